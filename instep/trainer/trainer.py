"""The Trainer: its arguments, the train loop, and what plug-ins may ask of it."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from instep.callbacks.base import Callback
from instep.data import DataModule
from instep.distributed import broadcast_object, control_group
from instep.errors import SettingError, UsageError
from instep.loggers.base import Logger
from instep.state import PartialState, find_device_kind, read_environment
from instep.strategies import Strategy, resolve_strategy
from instep.trainer.evaluation import evaluate, predict
from instep.trainer.fit_session import FitSession
from instep.trainer.log import LogBook
from instep.trainer.metrics import Metrics, as_tensors, print_results
from instep.trainer.module import TrainModule
from instep.trainer.optimizers import LRSchedulerConfig
from instep.trainer.position import Position, Progress
from instep.trainer.run_folder import RunFolder
from instep.trainer.session import Session
from instep.trainer.settings import resolve
from instep.trainer.status import TrainerState
from instep.trainer.step import detached_outputs, make_step
from instep.types import PathLike

if TYPE_CHECKING:
    from instep.callbacks.early_stopping import EarlyStopping
    from instep.callbacks.model_checkpoint import ModelCheckpoint
    from instep.checkpoint import Reader


class Trainer:
    """Trains, validates, tests and predicts with a `TrainModule`.

    All arguments are keyword-only, have Lightning's names and meaning, and are checked here, before anything runs. They
    can be read back under their names: `trainer.max_epochs`.

    Args:
        accelerator: "auto", "cpu", "gpu", "cuda", "mps", ...
        strategy: "auto", a name such as "ddp", or an `instep.Strategy`.
        devices: how many devices of this machine, their indices, or "auto" (one process on a CPU). With more than one
            in a plain `python train.py` the first fit, validate, test or predict starts the processes.
        num_nodes: machines.
        precision: "32-true", "bf16-mixed", "16-mixed", "64-true", "bf16-true", "16-true", or their short forms.
        logger: True for TensorBoard, a logger, a list of them, or False.
        callbacks: a callback or a list of them.
        fast_dev_run: True or a number: run so many batches of everything, to see that the code works.
        max_epochs: -1 for no limit; 1000 when neither it, `max_steps` nor `max_time` is given.
        min_epochs: keep going so long although a stop was asked for.
        max_steps: optimizer steps; -1 for no limit.
        min_steps: like `min_epochs`.
        max_time: "DD:HH:MM:SS", a timedelta, or its keyword arguments as a dict.
        limit_train_batches: number (int) or fraction (float) of the batches. So are the other three.
        limit_val_batches: 0 turns validation off.
        limit_test_batches: as above.
        limit_predict_batches: as above.
        overfit_batches: train and validate on so many (int) batches or such a fraction (float), in a fixed order.
        val_check_interval: fraction of an epoch (float), training batches (int), or time. Validation waits for the end
            of the optimizer window.
        check_val_every_n_epoch: None counts an int `val_check_interval` across epochs.
        num_sanity_val_steps: validation batches before training; -1 for all.
        log_every_n_steps: optimizer steps between two hand-overs of step values to the loggers; 0 for never.
        enable_checkpointing: save checkpoints; a ModelCheckpoint is added when there is none.
        enable_progress_bar: show a progress bar.
        enable_model_summary: print the model's size before fit.
        accumulate_grad_batches: micro-batches per optimizer step.
        gradient_clip_val: the largest gradient norm or value.
        gradient_clip_algorithm: "norm" or "value".
        deterministic: True, or "warn" to warn where torch has no deterministic algorithm.
        benchmark: `torch.backends.cudnn.benchmark`.
        inference_mode: use `torch.inference_mode` outside fit; else `no_grad`.
        use_distributed_sampler: shard loaders over processes.
        detect_anomaly: torch's anomaly detection.
        barebones: nothing but the loop: no log, bar, checkpoint, summary or sanity check.
        reload_dataloaders_every_n_epochs: ask for the loaders again so often; 0 for never.
        default_root_dir: where run folders go; the working directory by default.
        global_batch_size: samples per optimizer step over all processes; the batch per process and the accumulation
            follow, so that a run means the same on any number of processes.
        trigger_every: optimizer steps between two agreements on triggers; chosen by time when None.
        seed_samples: seed random augmentation by (seed, epoch, sample index).
        **unknown: anything else is an error that names the replacement.

    Raises:
        SettingError: a value or combination is wrong.

    Example:
        >>> trainer = Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> trainer.max_epochs
        3
    """

    def __init__(
        self,
        *,
        accelerator: str | None = None,
        strategy: str | Strategy | None = None,
        devices: int | str | list[int] | None = None,
        num_nodes: int | None = None,
        precision: str | int | None = None,
        logger: bool | Logger | Iterable[Logger] | None = None,
        callbacks: Callback | Iterable[Callback] | None = None,
        fast_dev_run: bool | int | None = None,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int | None = None,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float | None = None,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int | None = None,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool | None = None,
        use_distributed_sampler: bool | None = None,
        detect_anomaly: bool | None = None,
        barebones: bool | None = None,
        reload_dataloaders_every_n_epochs: int | None = None,
        default_root_dir: PathLike | None = None,
        global_batch_size: int | None = None,
        trigger_every: int | None = None,
        seed_samples: bool | None = None,
        **unknown: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "unknown")}
        self.settings = resolve(**given, **unknown)
        self._environment = read_environment()
        self._device_count = self._count_devices()
        self.strategy = resolve_strategy(self.settings.strategy, self._device_count * self.settings.num_nodes)
        self.callbacks = self._default_callbacks(enable_checkpointing)
        self._loggers: list[Logger] | None = None
        self.position = Position()
        self.progress = Progress(self.position)
        self.metrics = Metrics(self)
        self.state = TrainerState()
        self.run_folder = RunFolder(self.settings.default_root_dir)
        self.run_id = uuid.uuid4().hex[:16]
        self._seed: int | None = None
        self.model: TrainModule | None = None
        self.interrupted = False
        self.stop_reason = ""
        self._stop_agreed = False
        self._session: Session | None = None
        self._last: Session | None = None
        self._book: LogBook | None = None

    def __getattr__(self, name: str) -> Any:
        # Arguments can be read under their own names; only what is no attribute comes here.
        settings = self.__dict__.get("settings")
        if settings is None or not hasattr(settings, name):
            raise AttributeError(f"Trainer has no attribute {name!r}")
        return getattr(settings, name)

    # ------------------------------------------------------------------ the train loop

    def fit(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: PathLike | None = None,
    ) -> None:
        """Train.

        The order of all hooks (a callback's runs before the module's)::

            configure_callbacks
            prepare_data
            setup
            configure_model
            # with ckpt_path: on_load_checkpoint, weights, callbacks' load_state_dict
            configure_optimizers
            on_fit_start
            # with ckpt_path: optimizers, schedulers, position, data, random generators
            on_sanity_check_start
            # a validation of num_sanity_val_steps batches
            on_sanity_check_end
            on_train_start
            for epoch in epochs:
                on_train_epoch_start
                for batch in train_dataloader:
                    on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer
                    on_train_batch_start
                    training_step
                    if first micro-batch of the window:
                        on_before_zero_grad, optimizer_zero_grad
                    on_before_backward
                    backward
                    on_after_backward
                    if last micro-batch of the window:
                        on_before_optimizer_step
                        configure_gradient_clipping
                        optimizer_step
                        lr_scheduler_step
                    on_train_batch_end
                    if validation is due:
                        on_validation_model_zero_grad, on_validation_model_eval
                        on_validation_start
                        on_validation_epoch_start
                        for batch in val_dataloaders:
                            on_validation_batch_start
                            validation_step
                            on_validation_batch_end
                        on_validation_epoch_end
                        on_validation_end
                        on_validation_model_train
                    # triggers that all ranks agreed on: stop, save, preempted
                on_train_epoch_end
                # schedulers with interval="epoch"; EarlyStopping and ModelCheckpoint
            on_train_end
            on_fit_end
            teardown

        Args:
            model: what to train.
            train_dataloaders: a loader, a dict or list of them, or a DataModule; by default the model's.
            val_dataloaders: a loader or a list of them.
            datamodule: in place of loaders.
            ckpt_path: resume from a path, "last", "best", or "auto" (the newest that verifies; else start fresh).

        Raises:
            SettingError: settings that do not fit the model or data.
            CheckpointError: nothing to resume from.
            Preempted: a signal asked to stop; the run is saved. Uncaught, the process exits with status 75.
        """
        datamodule, train_dataloaders = _datamodule(datamodule, train_dataloaders, val_dataloaders)
        self._launch()
        self._begin(model)
        with FitSession(
            self, "fit", model, datamodule, {"train": train_dataloaders, "val": val_dataloaders}, ckpt_path
        ) as run:
            run.set_up()
            run.configure_optimizers()
            run.prepare()
            hooks, at, book, tick = run.hooks, run.position, run.book, run.triggers.tick
            hooks.call("on_fit_start")
            run.resume()
            run.sanity_check()
            run.start_training()
            hooks.call("on_train_start")
            run.check_saving()
            batch_start, batch_end = hooks["on_train_batch_start"], hooks["on_train_batch_end"]
            max_steps, hand_over_every = self.settings.max_steps, self.settings.log_every_n_steps or 500

            while not run.finished:
                run.begin_epoch()
                source, step = run.source, make_step(run)
                counts, even = source.counts, source.even_batches
                book.weight, complete = counts(at.batch)[0], False
                for batch in run.batches():
                    batch_idx, book.batch = at.batch, batch
                    if batch_idx >= even:
                        book.weight = counts(batch_idx)[0]
                    if batch_start and run.skips(batch_start, batch, batch_idx):
                        complete = True
                        break
                    output = step(batch, batch_idx)
                    if batch_end:
                        outputs = detached_outputs(output)
                        for hook in batch_end:
                            hook(outputs, batch, batch_idx)
                    if at.window_batch != at.batch:
                        continue  # in the middle of an optimizer window
                    if at.global_step % hand_over_every == 0:
                        run.hand_over()
                    if at.batch >= run.next_validation:
                        run.validate()
                    if run.has_clock:
                        run.look_at_clock()
                    agreed = tick(at.global_step)
                    if agreed:
                        run.act_on(agreed)
                    if at.global_step == max_steps or (self._stop_agreed and run.stopping):
                        complete = source.is_last
                        break
                else:
                    complete = True
                run.end_epoch(complete)

            hooks.call("on_train_end")
            hooks.call("on_fit_end")

    # ------------------------------------------------------------------ evaluation

    def validate(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: PathLike | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Run the validation loaders once.

        Args:
            model: by default the one of the last fit, with its best checkpoint's weights where there is one.
            dataloaders: a loader, a list of them, or a DataModule; by default the model's.
            ckpt_path: load weights from a path, "last" or "best" first.
            verbose: print the result on the main process.
            datamodule: in place of loaders.

        Returns:
            For each loader a dict of what was logged, the same on every rank.
        """
        return self._evaluate("validate", "val", model, dataloaders, ckpt_path, verbose, datamodule)

    def test(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: PathLike | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Run the test loaders once. Arguments and result are those of `validate`."""
        return self._evaluate("test", "test", model, dataloaders, ckpt_path, verbose, datamodule)

    def predict(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool = True,
        ckpt_path: PathLike | None = None,
    ) -> list[Any] | None:
        """Run `predict_step` over the predict loaders.

        Args:
            model: as in `validate`.
            dataloaders: as in `validate`.
            datamodule: in place of loaders.
            return_predictions: keep the outputs and return them.
            ckpt_path: as in `validate`.

        Returns:
            This rank's outputs, one for each batch, on the CPU; a list of such lists with several loaders. None with
            `return_predictions=False`.
        """
        datamodule, dataloaders = _datamodule(datamodule, dataloaders, None)
        self._launch()
        model, ckpt_path = self._model_for_evaluation(model, ckpt_path)
        with Session(self, "predict", model, datamodule, {"predict": dataloaders}, ckpt_path) as run:
            run.set_up()
            run.strategy.setup(model, [])
            sources = run.loaders.evaluation("predict")
            self._need_loaders(sources, "predict")
            outputs = predict(run, sources, return_predictions)
        return outputs if return_predictions else None

    def _evaluate(
        self,
        fn: str,
        stage: str,
        model: TrainModule | None,
        dataloaders: Any,
        ckpt_path: PathLike | None,
        verbose: bool,
        datamodule: DataModule | None,
    ) -> list[dict[str, float]]:
        datamodule, dataloaders = _datamodule(datamodule, dataloaders, None)
        self._launch()
        model, ckpt_path = self._model_for_evaluation(model, ckpt_path)
        with Session(self, fn, model, datamodule, {stage: dataloaders}, ckpt_path) as run:
            run.set_up()
            run.strategy.setup(model, [])
            sources = run.loaders.evaluation(stage)
            self._need_loaders(sources, fn)
            results = evaluate(run, fn, sources)
        if verbose and self.is_global_zero:
            print_results(results, fn)
        return results

    def _need_loaders(self, sources: list[Any], fn: str) -> None:
        limit = getattr(self.settings, f"limit_{'val' if fn == 'validate' else fn}_batches")
        if not sources and limit != 0:
            raise UsageError(f"{fn} needs data: pass dataloaders or a datamodule, or give the module a loader method.")

    def _model_for_evaluation(
        self, model: TrainModule | None, ckpt_path: PathLike | None
    ) -> tuple[TrainModule, PathLike | None]:
        if model is None:
            if self.model is None:
                raise UsageError("pass a model: this Trainer has not run one yet")
            callback = self.checkpoint_callback
            if ckpt_path is None and callback is not None and callback.best_model_path:
                ckpt_path = callback.best_model_path
            model = self.model
        _check_module(model)
        self.model = model
        return model, ckpt_path

    # ------------------------------------------------------------------ saving and triggers

    def save_checkpoint(self, filepath: PathLike, weights_only: bool = False) -> Path:
        """Save a checkpoint now. Collective: call it on all ranks.

        Args:
            filepath: the folder; it is saved as `<filepath>-<attempt>`, never over another. `ckpt_path=filepath` finds
                the newest of them.
            weights_only: leave out what only a resumed run needs.

        Returns:
            The folder.
        """
        from instep.checkpoint import CheckpointStore  # late: only who saves pays for it
        from instep.trainer import snapshot

        path = Path(filepath)
        run = self._session or self._last
        if run is None:
            raise UsageError("there is nothing to save yet: call fit first")
        return snapshot.save(run, CheckpointStore(path.parent), name=path.name, weights_only=weights_only)

    def save_to(self, dirpath: Path | None, name: str | None, *, weights_only: bool, **info: Any) -> Path:
        """Save a checkpoint into a folder of checkpoints; what ModelCheckpoint does. Collective.

        Args:
            dirpath: the folder; None for `checkpoints/` in the run folder.
            name: the checkpoint's name, without its attempt; None for `step-<8 digits>`.
            weights_only: leave out what only a resumed run needs.
            info: JSON values for the manifest, such as monitor, mode and score.
        """
        from instep.trainer import snapshot  # late, as above

        return snapshot.save(self._run, self._store(dirpath), name=name, weights_only=weights_only, **info)

    def verify_checkpoint(self, path: Path) -> list[str]:
        """What is wrong with a checkpoint; empty where it verifies. Collective."""
        return self._store(path.parent).verify_together(path)

    def delete_checkpoint(self, path: Path) -> None:
        """Delete a checkpoint. Collective."""
        self._store(path.parent).delete(path)

    def _store(self, folder: Path | None) -> Any:
        from instep.checkpoint import CheckpointStore  # late, as above

        folder = folder or self.run_folder.checkpoints
        if folder is None:
            raise UsageError("there is no run folder yet: save inside fit, or give a path")
        return CheckpointStore(folder)

    def agree(self, value: Any) -> Any:
        """The main process's value on every rank: for decisions that all must take alike. Collective."""
        return broadcast_object(value)

    def all_ranks_arrive(self, timeout_s: float) -> bool:
        """After an error: whether every rank gets here in time. Nobody waits longer than `timeout_s`."""
        group = control_group()
        if group is None:
            return True
        try:
            torch.distributed.monitored_barrier(group, timeout=timedelta(seconds=timeout_s))
        except RuntimeError:
            return False
        return True

    @property
    def resumed_from(self) -> Reader | None:
        """The checkpoint that the running fit went on from."""
        return None if self._session is None else self._session.resumed

    def set_trigger(self, name: str, reason: str = "") -> None:
        """Ask for something on any rank: "stop", "save", "preempted", or a name of your own. Local and free.

        All ranks see it at the same step.

        Args:
            name: what is asked for.
            reason: for people.
        """
        self._run.triggers.set(name, reason)

    def check_trigger(self, name: str | None = None) -> bool:
        """Whether any rank set the trigger; it is reset. Collective and blocking: call it on all ranks.

        Args:
            name: None for any.
        """
        return self._run.triggers.check(name)

    @property
    def should_stop(self) -> bool:
        """Whether all ranks agreed to stop. Setting it is local and asks for a stop."""
        return self._stop_agreed

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.set_trigger("stop", "trainer.should_stop")
        else:
            self._stop_agreed = False

    # ------------------------------------------------------------------ what plug-ins ask

    @property
    def _run(self) -> Session:
        if self._session is None:
            raise UsageError("this works only while fit, validate, test or predict runs")
        return self._session

    @property
    def global_step(self) -> int:
        """Optimizer steps done."""
        return self.position.global_step

    @property
    def current_epoch(self) -> int:
        """The epoch, from 0."""
        return self.position.epoch

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Everything logged so far, as 0-dim tensors: epoch values once reduced, step values as they stand."""
        book = self._book
        return as_tensors({**self.metrics.callback, **({} if book is None else book.step_values)})

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """What was sent to the loggers last."""
        return as_tensors(self.metrics.logged)

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """What was logged with `prog_bar=True`: floats, and device tensors of the running step."""
        book = self._book
        return {**self.metrics.bar, **({} if book is None else book.bar_values())}

    @property
    def seed(self) -> int:
        """What all that is random about the run is derived from: torch's initial seed on the main process."""
        if self._seed is None:
            raise UsageError("the seed is known once a run has started")
        return self._seed

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the main process."""
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:
        return self._environment.rank

    @property
    def local_rank(self) -> int:
        return self._environment.local_rank

    @property
    def node_rank(self) -> int:
        return self._environment.node_rank

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self._device_count * self.settings.num_nodes

    @property
    def num_devices(self) -> int:
        """Devices on this machine."""
        return self._device_count

    @property
    def datamodule(self) -> DataModule | None:
        run = self._session or self._last
        return None if run is None else run.datamodule

    @property
    def optimizers(self) -> list[Optimizer]:
        run = self._session or self._last
        return [] if run is None else run.optimizers

    @property
    def _wrapped_optimizers(self) -> list[Any]:
        return self._run.wrapped_optimizers

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        run = self._session or self._last
        return [] if run is None else run.schedulers

    @property
    def loggers(self) -> list[Logger]:
        """All loggers."""
        if self._loggers is None:
            if self.settings.logger is True:
                from instep.loggers import TensorBoardLogger  # late: loads the logger, not tensorboard

                self._loggers = [TensorBoardLogger()]
            else:
                self._loggers = list(self.settings.logger or ())
        return self._loggers

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str | None:
        """The run folder; None before it is chosen. Not a collective."""
        return None if self.run_folder.path is None else str(self.run_folder.path)

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first ModelCheckpoint."""
        return next((c for c in self.callbacks if hasattr(c, "save_now")), None)  # pyright: ignore[reportReturnType]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first EarlyStopping."""
        return next(
            (c for c in self.callbacks if hasattr(c, "stopping_reason")),
            None,  # pyright: ignore[reportReturnType]
        )

    @property
    def sanity_checking(self) -> bool:
        return self.state.stage == "sanity_check"

    @property
    def training(self) -> bool:
        return self.state.stage == "train"

    @property
    def validating(self) -> bool:
        return self.state.stage == "validate"

    @property
    def testing(self) -> bool:
        return self.state.stage == "test"

    @property
    def predicting(self) -> bool:
        return self.state.stage == "predict"

    @property
    def train_dataloader(self) -> Any:
        """The prepared training data of the run."""
        run = self._session or self._last
        return None if run is None else run.loaders.train

    @property
    def num_training_batches(self) -> int | float:
        """Batches of an epoch on this rank; infinity while unknown."""
        batches = self._run.loaders.train.num_batches
        return float("inf") if batches is None else batches

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader on this rank."""
        return self._eval_batches("val")

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        limit = self.settings.num_sanity_val_steps
        return [n if limit == -1 else min(n, limit) for n in self.num_val_batches]

    @property
    def num_test_batches(self) -> list[int | float]:
        return self._eval_batches("test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        return self._eval_batches("predict")

    def _eval_batches(self, stage: str) -> list[int | float]:
        sources = self._run.loaders.evaluation(stage)
        return [float("inf") if source.num_batches is None else source.num_batches for source in sources]

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole fit, for schedulers; usable in `configure_optimizers`."""
        s = self.settings
        batches = self.num_training_batches
        if s.max_epochs == -1 or batches == float("inf"):
            return s.max_steps if s.max_steps != -1 else float("inf")
        accumulate = self._run.accumulate
        steps = -(-int(batches) // accumulate) * s.max_epochs
        return steps if s.max_steps == -1 else min(steps, s.max_steps)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print` on the main process only."""
        if self.is_global_zero:
            print(*args, **kwargs)  # noqa: T201  it is a print

    # ------------------------------------------------------------------ behind the scenes

    def _count_devices(self) -> int:
        """Processes on this machine, checked against the launcher's environment."""
        devices, environment = self.settings.devices, self._environment
        kind = find_device_kind(self.settings.accelerator)
        if devices == "auto":
            wanted = environment.local_world_size if environment.launcher != "none" else None
            count = wanted or (1 if kind.name == "cpu" else kind.count())
        elif isinstance(devices, tuple):
            count = len(devices)
        else:
            count = kind.count() if devices == -1 else int(devices)
        if environment.launcher != "none" and count * self.settings.num_nodes != environment.world_size:
            nodes = "" if self.settings.num_nodes == 1 else f" and num_nodes={self.settings.num_nodes}"
            if devices == "auto" and self.settings.num_nodes == 1 and environment.num_nodes > 1:
                hint = f"set num_nodes={environment.num_nodes}"
            else:
                hint = f"start {count * self.settings.num_nodes} processes, or leave devices out"
            raise SettingError(
                f"devices={devices!r}{nodes} is {count * self.settings.num_nodes} processes, but the launcher started "
                f"{environment.world_size}: {hint}.",
                field="devices",
                got=devices,
            )
        return count

    def _launch(self) -> None:
        """Become the agent of several ranks, where this is a plain script that asked for several devices."""
        if self._device_count == 1 or self._environment.launcher != "none" or self._session is not None:
            return
        from instep.launch.engine import run, spec_for_nodes, this_command  # late: only a launch pays for it

        indices = self.settings.devices if isinstance(self.settings.devices, tuple) else ()
        env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, indices))} if indices else {}
        sys.exit(run(spec_for_nodes(self._device_count, self.settings.num_nodes, this_command(), env)))

    def _connect(self) -> PartialState:
        """This process's place among the others; the processes meet here."""
        kind = find_device_kind(self.settings.accelerator)
        process = PartialState(cpu=True) if kind.name == "cpu" else PartialState()
        if self._seed is None:
            self._seed = int(broadcast_object(torch.initial_seed() & (2**63 - 1)))
        return process

    def _device(self, process: PartialState) -> torch.device:
        """This process's device; `devices=[1]` in one process means the second one."""
        devices = self.settings.devices
        if isinstance(devices, tuple) and self._environment.launcher == "none":
            return torch.device(process.device.type, devices[0])
        return process.device

    def _begin(self, model: TrainModule) -> None:
        """A new fit of this Trainer goes on counting where the last one stopped, as users of Lightning expect."""
        _check_module(model)
        if self._session is not None:
            raise UsageError("this Trainer is running already; make another one for a run inside a run")
        if self.model is not model:
            self.model = model
        self._stop_agreed = False
        self.stop_reason = ""
        self.interrupted = False

    def _default_callbacks(self, enable_checkpointing: bool | None) -> list[Callback]:
        """The user's callbacks and the default ones; ModelCheckpoint last, since it saves the others' state."""
        s = self.settings
        callbacks = list(s.callbacks)
        savers = [callback for callback in callbacks if hasattr(callback, "save_now")]
        if savers and enable_checkpointing is False:
            raise SettingError(
                "enable_checkpointing=False, but callbacks has a ModelCheckpoint. Leave one of them out.",
                field="enable_checkpointing",
            )
        if s.fast_dev_run:
            callbacks = [c for c in callbacks if c not in savers and not hasattr(c, "stopping_reason")]
            savers = []
        if s.barebones:
            return callbacks
        from instep import callbacks as room  # late: each default is loaded only when it is on

        if s.max_time is not None:
            callbacks.append(room.Timer(s.max_time))
        if s.enable_model_summary and not any(isinstance(c, room.ModelSummary) for c in callbacks):
            callbacks.append(room.ModelSummary())
        if s.enable_progress_bar and not any(isinstance(c, room.ProgressBar) for c in callbacks):
            callbacks.append(room.ProgressBar())
        if s.enable_checkpointing and not savers:
            savers = [room.ModelCheckpoint()]
        return [c for c in callbacks if c not in savers] + savers

    def _resolve_callbacks(self, module: TrainModule) -> list[Callback]:
        """With `configure_callbacks`: the module's own replace those of the same type."""
        own = module.configure_callbacks()
        own = [own] if isinstance(own, Callback) else list(own or ())
        kinds = {type(callback) for callback in own}
        merged = [callback for callback in self.callbacks if type(callback) not in kinds] + own
        merged.sort(key=lambda callback: hasattr(callback, "save_now"))
        keys = [callback.state_key for callback in merged if callback.state_dict()]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise SettingError(
                f"two callbacks keep their state under the same key {', '.join(twice)}. Give one of them another "
                "state_key.",
                field="callbacks",
            )
        if own:
            self.callbacks = merged
        return merged

    def _start_loggers(self, module: TrainModule, datamodule: DataModule | None) -> None:
        run = self._run
        if self.loggers or self.checkpoint_callback is not None:
            self.run_folder.choose(run)
        for logger in self.loggers:
            logger.start(self.run_folder.path, self.is_global_zero)  # pyright: ignore[reportArgumentType]
        params: dict[str, Any] = {}
        for owner in (datamodule, module):
            if owner is not None and owner._log_hyperparams:
                params.update(owner.hparams_initial)
        if params and run.fn == "fit":
            for logger in self.loggers:
                logger.log_hyperparams(params)

    def _manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        module, strategy = self._run.module, self.strategy
        strategy.prepare_backward(loss)
        loss = strategy.scale(loss)
        for hook in self._run.hooks["on_before_backward"]:
            hook(loss)
        module.backward(loss, *args, **kwargs)
        for hook in self._run.hooks["on_after_backward"]:
            hook()

    def _batch_weight(self) -> float:
        run = self._run
        source = run.loaders.train
        return source.weight(run.position.batch)


def _check_module(model: Any) -> None:
    if not isinstance(model, TrainModule):
        raise UsageError(
            f"model must be an instep.TrainModule, got {type(model).__name__}. To port a LightningModule change its "
            "base class and import; a plain nn.Module goes into an attribute of a TrainModule."
        )


def _datamodule(datamodule: DataModule | None, loaders: Any, more: Any) -> tuple[DataModule | None, Any]:
    """A DataModule may be passed in the loaders' place."""
    if isinstance(loaders, DataModule):
        if datamodule is not None:
            raise UsageError("two datamodules were passed; pass one")
        return loaders, None
    if datamodule is not None and (loaders is not None or more is not None):
        raise UsageError("both loaders and a datamodule were passed; pass one of them")
    return datamodule, loaders
