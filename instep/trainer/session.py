"""One call of fit, validate, test or predict: everything that is resolved before its first step, and undone after.

A `Session` is a context. Entering it attaches the module, makes the run the active one and opens the run folder and
loggers; leaving it, on an error too, puts everything back.
"""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from traceback import print_exception
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from instep.callbacks.base import Callback
from instep.data import BatchSource, DataModule
from instep.distributed import Trigger, Triggers, broadcast_object
from instep.distributed.heartbeat import heartbeat
from instep.errors import EXIT_FAILED, EXIT_PREEMPTED, InstepError, Preempted
from instep.health.error_report import tell_trainer
from instep.state import PartialState, Run, pop_run, push_run
from instep.strategies import Precision
from instep.strategies.precision import float32_products
from instep.trainer import run_folder, run_state
from instep.trainer.devices import connect, device_of, grace_period, torch_flags
from instep.trainer.hook_checks import check_hooks
from instep.trainer.hooks import Hook, HookTable, ModuleHooks, is_overridden
from instep.trainer.loaders import Loaders, batches_on_device
from instep.trainer.log import LogBook, NullBuffer
from instep.trainer.module import TrainModule, accepted_arguments
from instep.trainer.nonfinite import NonFiniteGuard
from instep.trainer.optimizers import LRSchedulerConfig, TrainOptimizer, configure
from instep.trainer.plugins import saves, start_loggers, with_own_callbacks
from instep.trainer.signals import SignalGuard
from instep.trainer.weights import load_weights
from instep.utils.seed import derive_seed, seed_process

if TYPE_CHECKING:
    from typing_extensions import Self

    from instep.checkpoint import Reader
    from instep.checkpoint.background import BackgroundSaver
    from instep.checkpoint.lease import Lease
    from instep.checkpoint.resume import Resume, ResumeReport
    from instep.checkpoint.run_state import SavedRun
    from instep.loggers.base import Logger
    from instep.trainer.trainer import Trainer


T = TypeVar("T")
LAST_SAVE_S = 30.0  # what a background save gets to end after an error
_TOGETHER_S = 86400.0  # without a limit to the grace period: torch takes no infinite one


class Session:
    """See the module.

    Args:
        trainer: whose arguments hold.
        fn: `fit`, `validate`, `test` or `predict`.
        module: the user's module.
        datamodule: or None.
        loaders: what the user passed, by stage: `train`, `val`, `test`, `predict`.
        ckpt_path: as passed to the Trainer.
        parts: which parts of it are taken up; None for all.
    """

    triggers: Triggers

    def __init__(
        self,
        trainer: Trainer,
        fn: str,
        module: TrainModule,
        datamodule: DataModule | None,
        loaders: dict[str, Any],
        ckpt_path: Any = None,
        parts: Resume | None = None,
    ) -> None:
        self.trainer = trainer
        self.settings = trainer.settings
        self.fn = fn
        self.module = module
        self.datamodule = datamodule
        self.ckpt_path = ckpt_path
        self.strategy = trainer.strategy
        self.position = trainer.position
        self.callbacks: list[Callback] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[LRSchedulerConfig] = []
        self.wrapped_optimizers: list[TrainOptimizer] = []
        self.manual_steps = 0
        self.guard: NonFiniteGuard | None = None
        self.batch_idx = 0
        self.deferred: list[Trigger] = []  # agreed on within an evaluation, to be acted on after it
        self.preempted = False  # the ranks agreed to stop for a signal, and what there was to save is saved
        self.logger_states: dict[tuple[str, int], dict[str, Any]] | None = None  # for the checkpoint, not the live ones
        self.saver: BackgroundSaver | None = None
        self.parts = parts
        self.report: ResumeReport | None = None
        self.resumed: SavedRun | None = None  # the checkpoint that is loaded, until all of it is restored
        self.continues: Reader | None = None  # set only for a full resume: position, data, random generators
        self.fit_of_job: str | None = None  # its name within a job that may be started again
        self.restarted = False  # it goes on from a checkpoint of an earlier start of that job
        self.resumed_with: dict[str, Any] | None = None  # what of it this run took up; its checkpoints say so
        self.leases: dict[Path, Lease | None] = {}  # folders that this run saves in; the main process holds the lease
        self.cleaned: set[Path] = set()  # folders of checkpoints that were cleared of what killed processes left
        self.accumulate = self.settings.accumulate_grad_batches
        self.book = LogBook("train")
        self.loaders = Loaders(self, loaders)
        self._stack = ExitStack()

    # ---- entering and leaving

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def _open(self) -> None:
        trainer = self.trainer
        process = connect(self.settings)
        if trainer._seed is None:
            trainer._seed = int(broadcast_object(torch.initial_seed() & (2**63 - 1)))
        self.world_size, self.rank = process.num_processes, process.process_index
        self.device = device_of(self.settings, process, trainer._environment)
        self.triggers = Triggers(self.settings.trigger_every)
        self.strategy.connect(self.device, Precision(self.settings.precision, self.device))
        self.precision = self.strategy.precision  # less what the strategy does in its own way
        run = Run(f"Trainer.{self.fn}", self.precision.mixed_precision, self.strategy, self.accumulate)
        self.state = push_run(run)
        self._stack.callback(pop_run, self.state)
        self.heart = heartbeat()
        self._stack.enter_context(self.heart.watched(self.settings.hang_timeout_s, trainer.run_folder.base))
        self._stack.enter_context(torch_flags(self.settings))
        self._stack.enter_context(float32_products(self.settings.tf32, self.device))
        trainer._session = self
        trainer.state.begin(self.fn)
        tell_trainer(weakref.ref(trainer))
        trainer.metrics.forget()
        self.module.trainer = trainer
        if self.datamodule is not None:
            self.datamodule.trainer = trainer
        if self.fn == "fit":
            grace_s = grace_period(self.settings, self.rank)
            self._stack.enter_context(SignalGuard(self.triggers, grace_s, self._overdue, self.rank != 0, self._killed))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """Undo everything, each thing even if another fails; the first error of all is the one that is raised."""
        first = error

        def close(logger: Logger) -> None:
            logger.finalize("success" if first is None else _status(first))

        undo: list[Callable[[], Any]] = [
            lambda: self._close_saver(error),
            *([] if error is None else [lambda: self._call_on_exception(error)]),
            self._call_teardown,
            *[partial(close, logger) for logger in self.trainer.loggers],
            lambda: self._finish(first),
            self.loaders.close,
            self._detach,
            lambda: self._end_together(first),
            # Its generators leave the error with the traceback that they are given.
            lambda: self._stack.__exit__(type(first) if first else None, first, first.__traceback__ if first else None),
        ]
        if error is not None:
            undo.insert(0, self._abandon)
        for step in undo:
            try:
                step()
            except BaseException as another:  # noqa: BLE001  raised below, or printed beside the first one
                if first is None:
                    first = another
                elif another is not first:
                    with suppress(OSError, ValueError):  # stderr on a full disk, or closed: the first error matters
                        print_exception(another)
        if first is not None and error is None:
            raise first

    def _end_together(self, error: BaseException | None) -> None:
        """Wait for the other ranks of a preempted run, which may close their loggers still.

        Once the first rank has ended with a code other than 0, torchrun, mpirun and `srun -K` kill the others.
        """
        if isinstance(error, Preempted) and self.world_size > 1:
            with suppress(RuntimeError):  # one is gone, or takes too long: this one has saved, and can end
                seconds = min(self.settings.grace_period_s, _TOGETHER_S)
                dist.monitored_barrier(PartialState().control_group, timedelta(seconds=seconds))

    def _abandon(self) -> None:
        """Wait for nobody from here on: the other ranks may never come."""
        if hasattr(self, "triggers"):  # not yet, if the processes never met
            self.triggers.abandon()
        if hasattr(self, "heart"):
            self.heart.end()
        if self.trainer._book is not None:
            self.trainer._book.buffer.clear()  # what raised is not collected a second time
            self.trainer._book.step_values.clear()  # nor is a device asked that may have failed

    def _close_saver(self, error: BaseException | None) -> None:
        """Let the save that is under way end; not for long after an error, since other ranks may be gone."""
        saver, self.saver = self.saver, None
        if saver is not None:
            stop = isinstance(error, KeyboardInterrupt)
            saver.close(None if error is None else 0.0 if stop else LAST_SAVE_S)

    def defer(self, agreed: tuple[Trigger, ...]) -> bool:
        """Keep triggers for after an evaluation; True where that is to be left at once."""
        self.deferred += agreed
        return any(trigger.name == "preempted" for trigger in agreed)

    def _overdue(self, name: str) -> int:
        """The grace period is over: say it in `status.json`. Called in a thread, while the main one may be stuck.

        Returns:
            The exit code.
        """
        if self.preempted:
            return EXIT_PREEMPTED  # only what comes after the save takes too long, and the status is written
        text = f"{name} came, and saving took longer than the grace period of {self.settings.grace_period_s:g} s"
        self.trainer.run_folder.write_status(self.trainer, InstepError(f"{text}; nothing was saved"), name)
        return EXIT_FAILED

    def _killed(self, name: str) -> None:
        """A second signal ends the process now: say it, in `status.json` too. Called in the signal's handler."""
        trainer = self.trainer
        with suppress(Exception):  # whatever it came into, the signal must end the process
            if self.preempted or not trainer.is_global_zero:
                return
            last = getattr(trainer.checkpoint_callback, "last_model_path", "")
            saved = f"the last checkpoint is {last}" if last else "there is no checkpoint"
            os.write(2, f"\nStopped at once by a second signal, {name}; {saved}.\n".encode())
            trainer.run_folder.write_status(trainer, SystemExit(128 + signal.Signals[name]), name)

    def _finish(self, error: BaseException | None) -> None:
        self.trainer.state.status = _status(error)
        if self.fn == "fit":
            self.trainer.run_folder.write_status(self.trainer, error)

    def _call_on_exception(self, error: BaseException) -> None:
        for hook in HookTable(self.trainer, self.module, self.callbacks).of_callbacks("on_exception"):
            hook(error)
        if self.datamodule is not None:
            self.datamodule.on_exception(error)

    def _call_teardown(self) -> None:
        self.set_book(None)
        if self.datamodule is not None:
            self.datamodule.teardown(self.fn)
        HookTable(self.trainer, self.module, self.callbacks).call("teardown", self.fn)

    def _detach(self) -> None:
        trainer = self.trainer
        self.set_book(None)
        self.strategy.teardown()
        before, trainer._session = trainer._last, None
        if self.fn == "fit" or before is None or before.module is not self.module:
            trainer._last = self  # an evaluation in between does not hide fit's optimizers from save_checkpoint
        trainer.progress.stage = None
        trainer.state.end()

    # ---- set-up, in the order of Lightning's hooks

    def set_up(self) -> None:
        """configure_callbacks › prepare_data › setup › configure_model › weights; the module is on its device then."""
        trainer, module = self.trainer, self.module
        self.callbacks = trainer.callbacks = with_own_callbacks(trainer.callbacks, module)
        self.hooks = HookTable(trainer, module, self.callbacks)
        check_hooks(self)
        if self.fn == "fit":
            run_folder.take_over(self)
        folder = trainer.run_folder.path
        self._own_folders()  # before anything is resumed from them
        self.heart.enter("load" if self.ckpt_path is not None else "start")
        path, self.resumed = trainer.run_folder.find_checkpoint(self, self.ckpt_path)
        if path is not None:
            run_state.begin(self, path, folder)
        for lease in self.leases.values():
            if lease is not None:
                lease.run_id = trainer.run_id  # that of the run that is taken up
        self._prepare_data()
        if self.datamodule is not None:
            self.datamodule.setup(self.fn)
        self.hooks.call("setup", self.fn)
        if self.resumed is not None and self.fn == "fit":
            run_state.resume_plugins(self, self.resumed)
        if self.report is not None and trainer.run_folder.path is None:
            self._stack.push(self._take_folder_back)
        start_loggers(self, module, self.datamodule)
        self._own_folders()  # the run folder's, which is chosen now
        self.heart.set_folder(trainer.run_folder.path)
        if self.fn == "fit":
            trainer.run_folder.say_running(self)
        if is_overridden(module, "configure_model", ModuleHooks):
            with self.strategy.model_context():
                module.configure_model()
        if self.settings.sync_batchnorm:
            self.strategy.sync_batchnorm(module)
        self.strategy.place(module)
        if path is not None:
            load_weights(self, path, self.resumed)
            if self.fn != "fit" and self.ckpt_path in ("last", "best", "auto"):
                trainer.print(f"{self.fn}: ckpt_path={self.ckpt_path!r} is {path}")

    def _take_folder_back(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """A resume that was refused leaves no empty run folder; the lease has been given back by now."""
        if isinstance(error, Exception) and self.trainer.resume_report is not self.report:
            self.trainer.run_folder.forget(self.rank == 0)

    def _own_folders(self) -> None:
        """Take the folders that this fit will save checkpoints in, as far as they are known."""
        for callback in self.callbacks if self.fn == "fit" else ():
            if saves(callback):
                folder = getattr(callback, "dirpath", None) or self.trainer.run_folder.checkpoints
                if folder is not None:
                    self.own(folder)

    def own(self, folder: Path) -> None:
        """Take a folder of checkpoints until the session ends. Collective.

        It is also the proof, before the first step, that the folder can be written to and that all ranks see it.

        Raises:
            FolderInUseError: another run has it.
            CheckpointError: it cannot be written to, or a rank does not see it.
        """
        from instep.checkpoint.store import CheckpointStore  # late: only a run with checkpoints pays for it

        store = CheckpointStore(folder)
        if store.root not in self.leases:
            store.own(self.trainer.run_id)
            self.leases[store.root] = store.lease
            if store.lease is not None:
                self._stack.callback(store.lease.release)

    def disown(self, folder: Path) -> None:
        """Give a folder back before the session's end: nothing is saved in it."""
        lease = self.leases.pop(folder, None)
        if lease is not None:
            lease.release()

    def _prepare_data(self) -> None:
        process = PartialState()
        per_node = getattr(self.datamodule or self.module, "prepare_data_per_node", True)
        mine = process.is_local_main_process if per_node else process.is_main_process
        with process.local_main_process_first() if per_node else process.main_process_first():  # its error is all's
            if mine and self.datamodule is not None:
                self.datamodule.prepare_data()
            if mine and is_overridden(self.module, "prepare_data", ModuleHooks):
                self.module.prepare_data()

    def configure_optimizers(self) -> None:
        """Call the module's `configure_optimizers`, then spread the module."""
        self.optimizers, self.schedulers = configure(self.module.configure_optimizers(), self.module)
        if self.settings.nonfinite is not None and self.optimizers:
            self.guard = NonFiniteGuard(self, self.settings.nonfinite)
        on_step = self._manual_step if not self.module.automatic_optimization else self.step_optimizer
        self.wrapped_optimizers = [
            TrainOptimizer(optimizer, self.module, on_step=on_step, no_sync=self.strategy.no_sync)
            for optimizer in self.optimizers
        ]
        self.strategy.setup(self.module, self.optimizers)
        self.state.gradient.num_steps = self.accumulate
        self._separate_random_streams()

    def _separate_random_streams(self) -> None:
        """Ranks with other data draw other dropout masks and augmentations; the first keeps the user's stream."""
        if self.strategy.data_rank:
            seed = derive_seed(self.trainer.seed, "rank", self.strategy.data_rank)
            if torch.initial_seed() != seed:
                seed_process(seed)

    # ---- what the loops ask for

    def step_function(self, name: str, *offered: str) -> Callable[..., Any]:
        """A step method through the strategy, taking all `offered` arguments even if the user's takes fewer."""
        count = accepted_arguments(getattr(self.module, name), offered)
        run_step = self.strategy.step_function(name)
        if count == len(offered):
            return run_step
        return lambda *args: run_step(*args[:count])

    def on_device(self, source: BatchSource, dataloader_idx: int = 0) -> Iterator[Any]:
        """The source's batches, brought to the device."""
        return batches_on_device(source, self.module, self.datamodule, self.device, self.precision, dataloader_idx)

    def clip_function(self, optimizer: Optimizer | None) -> Callable[[], None] | None:
        """What clips before each step, or None."""
        value, algorithm = self.settings.gradient_clip_val, self.settings.gradient_clip_algorithm
        if optimizer is None:
            return None
        if is_overridden(self.module, "configure_gradient_clipping", TrainModule):
            return lambda: self.module.configure_gradient_clipping(optimizer, value, algorithm)
        if value is None:
            return None
        return lambda: self.strategy.clip_gradients(optimizer, value, algorithm)

    def catch_up(self) -> None:
        """Before its first step a resumed run is what it went on from, whatever hooks have drawn and logged since."""

    def settle(self) -> None:
        """Know of every step so far whether it was finite: nothing is built on one that should have ended the run."""
        if self.guard is not None:
            self.guard.settle()

    @property
    def step_optimizer(self) -> Callable[..., Any]:
        """What steps an optimizer: the strategy, or the guard against values that are not finite in front of it."""
        return self.strategy.optimizer_step if self.guard is None else self.guard.optimizer_step

    def _manual_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """`optimizer.step()` of manual optimization."""
        self.manual_steps += 1
        hooks: Iterable[Hook] = self.hooks["on_before_optimizer_step"]
        if hooks:
            self.strategy.unscale_gradients(optimizer)
            for hook in hooks:
                hook(optimizer)
        return self.step_optimizer(optimizer, closure, **kwargs)

    def set_book(self, book: LogBook | None) -> LogBook | None:
        """Let `self.log` write into a book (None: nowhere), and return the one before."""
        before = self.trainer._book
        self.trainer._book = book
        if before is not None and before.stage == "train":
            self.trainer.metrics.keep(before)
        if self.settings.barebones:
            self.module._log_buffer = NullBuffer()
        else:
            self.module._log_buffer = None if book is None else book.buffer
        return before

    def agree(self, value: Any) -> Any:
        """The main process's value, on every rank."""
        return broadcast_object(value) if self.world_size > 1 else value

    def on_rank_zero(self, decide: Callable[[], T], doing: str) -> T:
        """What `decide()` returns on the main process, or that it failed there, on every rank. Collective.

        Args:
            decide: looks at the disk, for instance.
            doing: names the work, for the errors of the other ranks.
        """
        from instep.distributed.rank_zero import on_rank_zero  # late: its package loads what only saving needs

        return on_rank_zero(decide, doing)


def _status(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    return "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"
