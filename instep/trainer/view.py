"""What callbacks, loggers and modules may ask of a running Trainer, and ask it to do."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from instep.callbacks.base import Callback
from instep.data import DataModule
from instep.distributed import broadcast_object, control_group
from instep.errors import UsageError
from instep.loggers.base import Logger
from instep.state import PartialState, ProcessEnvironment
from instep.strategies import Strategy
from instep.trainer.log import LogBook
from instep.trainer.metrics import Metrics, as_tensors
from instep.trainer.nonfinite import no_gradients_from
from instep.trainer.optimizers import LRSchedulerConfig
from instep.trainer.position import Position, Progress, TrainerState
from instep.trainer.run_folder import RunFolder
from instep.trainer.session import Session
from instep.trainer.settings import Settings
from instep.types import Location
from instep.utils.paths import to_path

if TYPE_CHECKING:
    from instep.callbacks.early_stopping import EarlyStopping
    from instep.callbacks.model_checkpoint import ModelCheckpoint
    from instep.checkpoint import Reader
    from instep.checkpoint.background import PendingSave
    from instep.checkpoint.resume import ResumeReport


class TrainerView:
    """The part of the Trainer that plug-ins see. Names and meaning are Lightning's.

    The Trainer fills the attributes; everything here reads them, or acts on the session that runs.
    """

    settings: Settings
    strategy: Strategy
    callbacks: list[Callback]
    position: Position
    progress: Progress
    metrics: Metrics
    state: TrainerState
    run_folder: RunFolder
    run_id: str
    resume_report: ResumeReport | None
    _environment: ProcessEnvironment
    _device_count: int
    _loggers: list[Logger] | None
    _seed: int | None
    _session: Session | None
    _last: Session | None
    _book: LogBook | None
    _stop_agreed: bool

    def __getattr__(self, name: str) -> Any:
        # Arguments can be read under their own names; only what is no attribute comes here.
        settings = self.__dict__.get("settings")
        if settings is None or not hasattr(settings, name):
            raise AttributeError(f"Trainer has no attribute {name!r}")
        return getattr(settings, name)

    # ---- saving and triggers

    def save_checkpoint(self, filepath: Location, weights_only: bool = False) -> Path:
        """Save a checkpoint now. Collective: call it on all ranks.

        Args:
            filepath: the folder; it is saved as `<filepath>-<attempt>`, never over another. `ckpt_path=filepath` finds
                the newest of them.
            weights_only: leave out what only a resumed run needs.

        Returns:
            The folder.

        Raises:
            DistributedError: a rank did not call it.
        """
        from instep.trainer import run_state  # late: only who saves pays for it

        path = to_path(filepath).absolute()
        run = self._session or self._last
        if run is None:
            raise UsageError("there is nothing to save yet: call fit first")
        PartialState().wait_for_everyone("trainer.save_checkpoint(), which all ranks call")
        return run_state.save(run, self._store(path.parent), name=path.name, weights_only=weights_only)

    def save_to(self, dirpath: Path | None, name: str | None, *, weights_only: bool, **info: Any) -> Path:
        """Save a checkpoint into a folder of checkpoints; what ModelCheckpoint does. Collective.

        Args:
            dirpath: the folder; None for `checkpoints/` in the run folder.
            name: the checkpoint's name, without its attempt; None for `step-<8 digits>`.
            weights_only: leave out what only a resumed run needs.
            info: JSON values for the manifest, such as monitor, mode and score.
        """
        from instep.trainer import run_state  # late, as above

        return run_state.save(self._run, self._store(dirpath), name=name, weights_only=weights_only, **info)

    def save_later(
        self, dirpath: Path | None, name: str | None, *, weights_only: bool, to_delete: Sequence[str] = (), **info: Any
    ) -> PendingSave:
        """The same as `save_to`, written beside the training: `finish_save` says what became of it. Collective.

        Args:
            dirpath: as in `save_to`, like `name`, `weights_only` and `info`.
            name: the checkpoint's name.
            weights_only: leave out what only a resumed run needs.
            to_delete: older checkpoints in that folder, deleted once this one has verified.
            info: JSON values for the manifest.
        """
        from instep.trainer import run_state  # late, as above

        store = self._store(dirpath)
        return run_state.save_later(self._run, store, name=name, weights_only=weights_only, to_delete=to_delete, **info)

    def finish_save(self, pending: PendingSave) -> Path:
        """Wait for a save beside the training, and raise its error on all ranks. Collective."""
        from instep.trainer import run_state  # late, as above

        return run_state.finish(self._run, pending)

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
        store = CheckpointStore(folder)
        store.lease = None if self._session is None else self._session.leases.get(store.root)
        return store

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
        return None if self._session is None else self._session.continues

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
        """Whether all ranks agreed to stop. Setting it is local and asks for a stop.

        Raises:
            UsageError: it was set to False after all had agreed.
        """
        return self._stop_agreed

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.set_trigger("stop", "trainer.should_stop")
        elif self._session is None:
            self._stop_agreed = False
        elif self._stop_agreed:
            raise UsageError(
                "trainer.should_stop = False: all ranks have agreed to stop, and one cannot take that back alone. Ask "
                "for the stop later, or call fit again to go on."
            )

    # ---- what is known

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
            for logger in self._loggers:
                logger.attach(self.run_folder.claim)
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
        """The prepared training data of the running fit, from `on_fit_start` on; else None."""
        return None if self._session is None else self._session.loaders.prepared_train

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

    # ---- manual optimization

    def _manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        run, strategy = self._run, self.strategy
        replayed = run.book.weight == 0
        if run.guard is not None and not replayed:
            run.guard.note_loss(loss)
        strategy.prepare_backward(loss)
        loss = strategy.scale(loss)
        for hook in run.hooks["on_before_backward"]:
            hook(loss)
        if replayed:
            with no_gradients_from(strategy.leaves()):
                run.module.backward(loss, *args, **kwargs)
        else:
            run.module.backward(loss, *args, **kwargs)
        for hook in run.hooks["on_after_backward"]:
            hook()

    def _batch_weight(self) -> float:
        run = self._run
        source = run.loaders.train
        return source.weight(run.batch_idx)
