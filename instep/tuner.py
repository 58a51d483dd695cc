"""`Tuner`: finds a learning rate or batch size by trying out steps before a run; the steps are undone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from instep.errors import SettingError
from instep.profilers import make_profiler
from instep.trainer.context import Progress, RunContext, TrainerState
from instep.trainer.lifecycle import open_run
from instep.trainer.loop import agree_on_triggers, configure_optimizers, prepare_training
from instep.trainer.metrics import Metrics
from instep.trainer.plugins import SilentLogger, check_data, check_module, need_loaders, saves
from instep.trainer.run_folder import RunFolder
from instep.trainer.trainer import Trainer
from instep.trainer.trials import Snapshot
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks import BatchSizeFinder, LearningRateFinder
    from instep.callbacks.guests.lr_finder import LRFinder
    from instep.data import DataModule
    from instep.trainer import TrainModule

_METHODS = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}


class Tuner:
    """Finds a learning rate or a batch size before a Trainer's run.

    `lr_find` and `scale_batch_size` set up a run as the Trainer does, make steps in it, and undo them. Only the result
    is kept, in an attribute of the module or datamodule. No folder, log or checkpoint is written. The Trainer's
    counters, the random generators and the module's weights are restored; the module stays on its device. Of the
    callbacks only set-up and tear-down are called, and only in a search with `fit`. Callbacks that save or show
    something are not called at all.

    Args:
        trainer: Trainer, whose devices, strategy, precision, accumulation and limits are used for the search.

    Raises:
        SettingError: `trainer` is not a Trainer.

    Example:
        >>> import torch
        >>> from instep import Trainer, TrainModule
        >>> class Model(TrainModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.lr, self.layer = 0.1, torch.nn.Linear(2, 1)
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch).square().mean()
        ...
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=self.lr)
        >>> model, loader = Model(), torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
        >>> trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
        >>> found = Tuner(trainer).lr_find(model, loader, num_training=20, update_attr=False)
        >>> len(found.results["lr"])  # the rates that were tried
        20
        >>> model.lr = found.suggestion()
    """

    def __init__(self, trainer: Trainer) -> None:
        if not isinstance(trainer, Trainer):
            raise SettingError(
                f"Tuner takes a Trainer, and got a {type(trainer).__name__}: Tuner(trainer).lr_find(model).",
                field="trainer",
                got=trainer,
            )
        self._trainer = trainer

    def lr_find(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: Literal["fit"] | str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
        weights_only: bool | None = None,
    ) -> LRFinder | None:
        """Find a learning rate by training steps with growing learning rates.

        Args:
            model: module to train.
            train_dataloaders, val_dataloaders, datamodule: as in `Trainer.fit`.
            dataloaders: must be None, because the steps are training steps, as in `fit`.
            method: must be "fit", the only method that trains.
            min_lr, max_lr, mode, early_stop_threshold, update_attr, attr_name, weights_only: as in
                `LearningRateFinder`.
            num_training: number of steps from `min_lr` to `max_lr`.

        Returns:
            The rates and losses, with the methods `suggestion` and `plot`; None with `fast_dev_run`.

        Raises:
            SettingError: an argument is wrong, or the Trainer has a LearningRateFinder callback.
            HookError: the module does not have exactly one optimizer.
            AttributeError: the module does not have an attribute for the learning rate.
        """
        from instep.callbacks import LearningRateFinder

        if method != "fit":
            raise SettingError("method='fit' is the only valid configuration to run lr finder.", field="method")
        datamodule, data = _check(method, datamodule, train_dataloaders, val_dataloaders, dataloaders)
        self._refuse_twice(LearningRateFinder)
        finder = LearningRateFinder(
            min_lr, max_lr, num_training, mode, early_stop_threshold, update_attr, attr_name, weights_only
        )
        if self._trainer.fast_dev_run:
            warn_user("Skipping learning rate finder since `fast_dev_run` is enabled.")
            return None
        finder.check(check_module(model), datamodule)
        with self._aside(method, model, datamodule, data, val_dataloaders):
            finder.lr_find(self._trainer, model)
        finder.apply(model, datamodule)
        return finder.optimal_lr

    def scale_batch_size(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: Literal["fit", "validate", "test", "predict"] | str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Find the largest batch size that fits into memory on all ranks.

        Args:
            model: module to run.
            train_dataloaders, val_dataloaders, dataloaders: must be None, since the data has to come from hooks of the
                module or datamodule, which use the batch size.
            datamodule: as in the Trainer's methods.
            method: name of the Trainer's method whose steps are run.
            mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val: as in `BatchSizeFinder`.

        Returns:
            The batch size, which is also set as an attribute; None with `fast_dev_run`.

        Raises:
            SettingError: an argument is wrong, or the Trainer has a BatchSizeFinder callback.
            UsageError: the data does not come from hooks that could use the batch size, or no batch size fits.
        """
        from instep.callbacks import BatchSizeFinder

        datamodule, data = _check(method, datamodule, train_dataloaders, val_dataloaders, dataloaders)
        self._refuse_twice(BatchSizeFinder)
        finder = BatchSizeFinder(mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        if self._trainer.fast_dev_run:
            warn_user("Skipping batch size scaler since `fast_dev_run` is enabled.")
            return None
        with self._aside(method, check_module(model), datamodule, data, val_dataloaders):
            finder.setup(self._trainer, model, method)
            finder.scale_batch_size(self._trainer, model)
        finder.apply(model, datamodule)
        return finder.optimal_batch_size

    def _refuse_twice(self, kind: type[LearningRateFinder] | type[BatchSizeFinder]) -> None:
        if any(isinstance(callback, kind) for callback in self._trainer.callbacks):
            raise SettingError(
                f"Trainer is already configured with a `{kind.__name__}` callback. Please remove it if you want to use "
                "the Tuner.",
                field="callbacks",
            )

    @contextmanager
    def _aside(
        self, fn: str, model: TrainModule, datamodule: DataModule | None, data: Any, val_data: Any
    ) -> Iterator[RunContext]:
        """Set up a run for the block.

        At its end, also after an error, restore the Trainer, its callbacks, the module and the datamodule.
        """
        trainer = self._trainer
        trainer._launch()
        snapshot = Snapshot()
        snapshot.keep_plain_attributes(model)
        callbacks = [c for c in trainer.callbacks if fn == "fit" and not (saves(c) or _shows(c))]
        for callback in callbacks:
            snapshot.capture_attributes(callback)
        snapshot.keep_random()
        of_data = {} if datamodule is None else dict(vars(datamodule))
        before = {**vars(trainer), "_data": dict(trainer._data)}
        position = copy(trainer.position)
        vars(trainer).update(
            settings=replace(trainer.settings, enable_progress_bar=False), callbacks=callbacks, position=position,
            progress=Progress(position), metrics=Metrics(trainer), state=TrainerState(), profiler=make_profiler(None),
            run_folder=RunFolder(trainer.settings.default_root_dir), _loggers=[SilentLogger() for _ in trainer.loggers],
        )  # fmt: skip
        loaders = {"train": data, "val": val_data} if fn == "fit" else {_METHODS[fn]: data}
        try:
            trainer._begin(model)
            with open_run(trainer, fn, model, datamodule, loaders, is_trial=True) as ctx:
                if fn == "fit":
                    configure_optimizers(ctx)
                    prepare_training(ctx)
                else:
                    ctx.strategy.prepare_training(model, [])
                    need_loaders(ctx, ctx.loaders.evaluation(_METHODS[fn]))
                yield ctx
                if fn == "fit":
                    agree_on_triggers(ctx)  # ends the process if a signal arrived during the search
        finally:
            known, last = trainer._data, before["_last_ctx"] or trainer._last_ctx
            vars(trainer).clear()
            vars(trainer).update(before, model=model, _data=known, _last_ctx=last)
            snapshot.restore()
            model.trainer = trainer
            if datamodule is not None:
                vars(datamodule).clear()
                vars(datamodule).update(of_data)
                datamodule.trainer = trainer


def _shows(callback: Any) -> bool:
    """Return True if a callback shows something about the run, as a progress bar or a model summary does."""
    from instep.callbacks import ModelSummary, ProgressBar

    return isinstance(callback, ModelSummary | ProgressBar)


def _check(method: str, datamodule: Any, train: Any, val: Any, dataloaders: Any) -> tuple[DataModule | None, Any]:
    """Return the datamodule, which may be passed in the place of loaders, and the loaders."""
    if method not in _METHODS:
        raise SettingError(
            f"method {method!r} is invalid. Should be one of {tuple(_METHODS)}.", field="method", got=method
        )
    if method == "fit" and dataloaders is not None:
        raise SettingError(
            "In tuner with method='fit', `dataloaders` argument should be None, please consider setting "
            "`train_dataloaders` and `val_dataloaders` instead.",
            field="dataloaders",
        )
    if method != "fit" and (train is not None or val is not None):
        raise SettingError(
            f"In tuner with `method`={method!r}, `train_dataloaders` and `val_dataloaders` arguments should be None, "
            "please consider setting `dataloaders` instead.",
            field="train_dataloaders",
        )
    return check_data(datamodule, train if method == "fit" else dataloaders, val)
