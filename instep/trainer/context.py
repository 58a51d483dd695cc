"""The context of a run: its settings, its position in the training and its open checkpoints, shared by its functions.

One `RunContext` exists for each call of fit, validate, test or predict; `lifecycle.open_run` fills and closes it. The
context only holds values. The loop, the step, evaluation and saving are functions that take it as `ctx`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from instep.callbacks.base import Callback
from instep.data import BatchSource, DataModule
from instep.distributed import Trigger, Triggers
from instep.distributed.heartbeat import Heartbeat
from instep.distributed.signals import SignalGuard
from instep.state.runs import GradientRecord
from instep.strategies import Precision, Strategy
from instep.trainer.hooks import HookTable
from instep.trainer.loaders import Loaders
from instep.trainer.log import MetricLog, NullBuffer
from instep.trainer.module import TrainModule
from instep.trainer.optimizers import LRSchedulerConfig
from instep.trainer.settings import Settings
from instep.types import Word

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer
    from instep.checkpoint import Reader
    from instep.checkpoint.resume import Resume, ResumeReport
    from instep.checkpoint.run_state import SavedRun
    from instep.compile import Recompiles
    from instep.profilers.run_clock import RunClock
    from instep.trainer.guests import StepGuest, StepParts
    from instep.trainer.run_state import TrainerSaver


class TrainerStatus(Word):
    """Status of a Trainer's last run. It is "interrupted" after an error or a signal."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether the last run is over: finished or interrupted."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(Word):
    """Entry points of a Trainer: the methods that start a run."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(Word):
    """Stages of a run. A fit has the stages "sanity_check", "train" and "validate"."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether the stage is a validation, a sanity check or a test."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str:
        """Prefix of the stage's loader method: "train", "val", "test" or "predict"."""
        return "val" if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING) else self.value


@dataclass
class TrainerState:
    """State of a Trainer: its status, entry point and stage. Each value is equal to its string, such as "fit".

    Attributes:
        status: "initializing", "running", "finished" or "interrupted".
        fn: "fit", "validate", "test" or "predict": what runs, or ran last; None before the first run.
        stage: "sanity_check", "train", "validate", "test" or "predict"; None between runs.
    """

    status: TrainerStatus = TrainerStatus.INITIALIZING
    fn: TrainerFn | None = None
    stage: RunningStage | None = None

    @property
    def finished(self) -> bool:
        """Whether the last run ended without an error or a signal."""
        return self.status == "finished"

    @property
    def stopped(self) -> bool:
        """Whether the last run is over: finished or interrupted."""
        return self.status in ("finished", "interrupted")

    def begin(self, fn: str) -> None:
        """Record that the Trainer runs "fit", "validate", "test" or "predict". The Trainer calls this itself."""
        self.status, self.fn = TrainerStatus.RUNNING, TrainerFn(fn)
        self.stage = RunningStage("train" if fn == "fit" else fn)


@dataclass
class Position:
    """Position of a run in its training. Checkpoints save it; the loop, the step with its guests, and a resume set it.

    Attributes:
        epoch: index of the epoch, from 0.
        batch: batches done in the epoch.
        window_batch: batches done when the last accumulation window ended; equal to `batch` except while a window is
            incomplete.
        global_step: optimizer steps done.
        earlier_batches: batches done in the epochs before this one.
        validated: whether the validation that was due at `batch` has run.
        validation_due: for a position from a checkpoint, whether a validation was due when it was saved. It is stored
            because a different number of ranks counts the batches differently. None: `batch` decides.
        epoch_ended: whether the epoch's end hooks and schedulers have run.
        part_done: whether some samples of the epoch are done, but fewer than one batch of all ranks of the resumed run.
        epoch_over: whether the epoch's end hooks have run, also in an epoch that the run's end cuts short. No
            checkpoint holds this.
        skipped_rest: whether `on_train_batch_start` asked to leave the rest of the epoch out.
        closed_step: the step at which the end of a run closed this epoch early and ran its end hooks; -1 if no run did.
        nonfinite_steps: optimizer steps with a value that was not finite, counted if `Trainer(nonfinite=...)` is set.
        had_loss: whether any closed accumulation window so far had a loss from `training_step`.
        loaded_epoch: the epoch in which the loaders were requested, if `reload_dataloaders_every_n_epochs` is not set.
        loaded_step: `global_step` when the training loader was last requested.
        val_loaded_epoch: the epoch in which the validation loaders were last requested, if
            `reload_dataloaders_every_n_epochs` is set.
        val_loaded_step: `global_step` when the validation loaders were last requested for `val_loaded_epoch`.
    """

    epoch: int = 0
    batch: int = 0
    window_batch: int = 0
    global_step: int = 0
    earlier_batches: int = 0
    validated: bool = False
    validation_due: bool | None = None
    epoch_ended: bool = False
    part_done: bool = False
    skipped_rest: bool = False
    closed_step: int = -1
    nonfinite_steps: int = 0
    had_loss: bool = False
    loaded_epoch: int = 0
    loaded_step: int = 0
    val_loaded_step: int = 0
    val_loaded_epoch: int | None = None

    epoch_over = False  # not annotated, so it is no dataclass field and no checkpoint holds it

    def next_epoch(self) -> None:
        """Move to the first batch of the next epoch."""
        self.epoch += 1
        self.earlier_batches += self.batch
        self.batch = self.window_batch = 0
        self.validated = self.epoch_ended = self.part_done = self.skipped_rest = False
        self.validation_due, self.closed_step = None, -1

    def state_dict(self) -> dict[str, Any]:
        """Return the position at the end of the last accumulation window, where a resumed run goes on."""
        return {**asdict(self), "batch": self.window_batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for entry in fields(self):
            setattr(self, entry.name, state_dict.get(entry.name, entry.default))
        if "closed_step" not in state_dict:  # a checkpoint of an earlier version of instep lacks this key
            self.closed_step = self.global_step
        self.had_loss = state_dict.get("had_loss", True)  # earlier versions did not save `had_loss`
        self.epoch_over = self.epoch_ended

    @property
    def reached(self) -> dict[str, Any]:
        """Position for comparing checkpoints: if it has not changed since the last save, no new save is needed."""
        return {**self.state_dict(), "closed_step": None, "validation_due": None}

    @property
    def inside(self) -> bool:
        """Whether the epoch has begun, and not ended."""
        return bool(self.batch or self.part_done or self.skipped_rest) and not self.epoch_ended

    @property
    def owes_end(self) -> bool:
        """Whether the hooks and the validation at the epoch's end still have to run."""
        return self.inside and self.closed_step != self.global_step


class Progress:
    """Counters that the progress bar's thread reads. They are plain attributes, without locks.

    Attributes:
        stage: "train", "sanity", "validate", "test", "predict" or None.
        batch_idx: index of the current training batch in its epoch.
        dataloader_idx: index of the current evaluation loader.
    """

    def __init__(self, position: Position) -> None:
        self._position = position
        self.stage: str | None = None
        self.batch_idx = 0
        self.dataloader_idx = 0
        self.eval_batch = 0
        self.eval_total: int | None = None
        self.outer_total: int | None = None

    @property
    def batch(self) -> int:
        """Batches done in the running stage's loader."""
        return self._position.batch if self.stage == "train" else self.eval_batch

    @property
    def total(self) -> int | None:
        """Batches of the running stage's loader; None while unknown."""
        return self.outer_total if self.stage == "train" else self.eval_total

    @property
    def epoch(self) -> int:
        return self._position.epoch

    @property
    def outer_batch(self) -> int:
        """Training batches done in the epoch, while validation runs."""
        return self._position.batch


@dataclass
class ValidationPlan:
    """Schedule of validation within a fit; `loop.plan_validation` sets it at each epoch's start.

    Attributes:
        enabled: whether there is anything to validate.
        every: training batches between two validations; None if validations do not depend on a number of batches.
        next_batch: number of batches done in the epoch at which the next validation is due; infinity for never.
        at_epoch_end: whether a validation runs at the epoch's end.
        has_clock: whether this process decides by its clock when to validate. True on the main process if the interval
            is a time.
        next_time_s: when the next validation is due, in seconds of `time.monotonic`.
        counted_before: what the metric objects had counted when the running validation began; None if no validation
            runs.
        loggers_before: states of the loggers before a validation that was left early. Checkpoints saved after it hold
            these states.
    """

    enabled: bool = False
    every: int | None = None
    next_batch: float = math.inf
    at_epoch_end: bool = False
    has_clock: bool = False
    next_time_s: float = math.inf
    counted_before: dict[str, Any] | None = None
    loggers_before: dict[tuple[str, int], dict[str, Any]] | None = None


@dataclass(eq=False, repr=False)
class Ending:
    """End of a fit: what asks the fit to end, and why it has ended.

    Attributes:
        waits: whether a stop that the ranks agreed on is delayed until `min_steps` and `min_epochs` are reached. Once
            they are reached, the ranks decide again whether to stop.
        deferred: triggers, such as "stop" or "save", on which the loop will act later. The ranks agreed on them during
            an evaluation, or each rank set them by itself with `set_trigger(agreed=True)`.
        preempted: whether the ranks agreed to stop for a signal and have saved what had to be saved.
        reason: why the fit ended; empty until it has ended.
    """

    waits: bool = False
    deferred: list[Trigger] = field(default_factory=list)
    preempted: bool = False
    reason: str = ""


@dataclass(eq=False, repr=False)
class ResumePlan:
    """Plan of a resume: the checkpoint that a run loads, and which parts of it.

    Attributes:
        path: folder of the checkpoint, or a file of weights.
        saved: the opened checkpoint, until all of it is restored; None for a file of weights.
        parts: the parts of the checkpoint that are loaded.
        report: what was loaded and what was left out.
        chosen: the parts that the user chose; this run's checkpoints record them.
        resumed_reader: reader of the checkpoint; set only if position, data and random generators are resumed too.
        restore_rest: function that restores log sums and random generators, called once the hooks before the first step
            have run.
    """

    path: Path
    saved: SavedRun | None
    parts: Resume
    report: ResumeReport
    chosen: dict[str, Any] | None = None
    resumed_reader: Reader | None = None
    restore_rest: Callable[[], None] | None = None

    @property
    def restored(self) -> bool:
        """Whether all requested parts of the checkpoint are restored."""
        return self.saved is None and self.restore_rest is None

    def finish(self) -> None:
        """Restore log sums and random generators by a last call of `restore_rest`, and drop this function."""
        if self.restore_rest is not None:
            self.restore_rest()
        self.restore_rest = None


@dataclass(eq=False, repr=False)
class StepCounts:
    """Counts of a fit that are not saved in checkpoints.

    Attributes:
        began: whether the training of this fit has begun.
        steps_at_start: optimizer steps done when the training began.
        batches_at_start: training batches done when the training began, over all epochs.
        updates_at_start: number of updates that each metric object had when the training began, by the object's `id`.
            These updates do not belong to the training.
        in_window: micro-batches of the open accumulation window that gave gradients.
        of_batch: number of optimizer steps in the current batch, in manual optimization.
        handed_over: last step whose values were handed to the loggers. In manual optimization a step may take several
            batches.
        recompiles: recompilations, counted if the module is compiled.
    """

    began: bool = False
    steps_at_start: int = 0
    batches_at_start: int = 0
    updates_at_start: dict[int, int] = field(default_factory=dict)
    in_window: int = 0
    of_batch: int = 0
    handed_over: int = 0
    recompiles: Recompiles | None = None


def _run_clock() -> RunClock:
    from instep.profilers.run_clock import RunClock  # imported late: only a run needs it

    return RunClock()


@dataclass(eq=False, repr=False)
class RunContext:
    """Values that the functions of one run share.

    Attributes:
        trainer: the Trainer that runs.
        fn: "fit", "validate", "test" or "predict".
        module: the user's module.
        datamodule: the user's datamodule, or None.
        ckpt_path: requested checkpoint or file of weights.
        asked: requested parts of the checkpoint; None for all.
        is_trial: whether the run only searches for a setting, such as a learning rate; then nothing is logged or saved.
        settings: the Trainer's arguments.
        strategy: the Trainer's strategy.
        clock: measures where the time of the run goes.
        exit_stack: clean-up of the run, called in reverse order at its end.
        rank, world_size, device, triggers, heartbeat, gradient, loaders: set when the processes have connected.
        signals: the handler of SIGTERM and other signals, in fit only.
        callbacks: callbacks of the Trainer and of the module.
        hooks: overridden hooks, set with the callbacks.
        optimizers, wrapped_optimizers, schedulers: set in fit; `self.optimizers()` returns the wrapped optimizers.
        guests: features that change the training step, such as the check for nan.
        step_parts: parts of the training step of this epoch.
        position: position in the training; it belongs to the Trainer, so that a second fit goes on from it.
        source: in fit the training data, in predict the current loader; unset until the loader is prepared.
        log: log of the training: sums of the running epoch, and step values.
        validation: when validations run in a fit.
        ending: what asks a fit to end, and why it has ended.
        counts: counts of steps and batches of this fit, which checkpoints do not save.
        resume: the checkpoint that the run resumes from; None without one.
        saver: saves the run, and holds the folders that it saves in.
    """

    # ---- settings, processes and objects of the run
    trainer: Trainer
    fn: str
    module: TrainModule
    datamodule: DataModule | None
    ckpt_path: Any = None
    asked: Resume | None = None
    is_trial: bool = False
    settings: Settings = field(init=False)
    strategy: Strategy = field(init=False)
    clock: RunClock = field(default_factory=_run_clock)
    exit_stack: ExitStack = field(default_factory=ExitStack)
    rank: int = field(init=False)
    world_size: int = field(init=False)
    device: torch.device = field(init=False)
    triggers: Triggers = field(init=False)
    heartbeat: Heartbeat = field(init=False)
    gradient: GradientRecord = field(init=False)
    signals: SignalGuard | None = None
    loaders: Loaders = field(init=False)
    callbacks: list[Callback] = field(default_factory=list)
    hooks: HookTable = field(init=False)
    optimizers: list[Optimizer] = field(default_factory=list)
    wrapped_optimizers: list[Any] = field(default_factory=list)
    schedulers: list[LRSchedulerConfig] = field(default_factory=list)
    guests: list[StepGuest] = field(default_factory=list)
    step_parts: StepParts = field(init=False)

    # ---- position in the training
    position: Position = field(init=False)
    source: BatchSource = field(init=False)
    log: MetricLog = field(default_factory=lambda: MetricLog("train"))
    validation: ValidationPlan = field(default_factory=ValidationPlan)
    ending: Ending = field(default_factory=Ending)
    counts: StepCounts = field(default_factory=StepCounts)

    # ---- checkpoints
    resume: ResumePlan | None = None
    saver: TrainerSaver = field(init=False)

    def __post_init__(self) -> None:
        self.settings, self.strategy, self.position = (
            self.trainer.settings,
            self.trainer.strategy,
            self.trainer.position,
        )

    @property
    def resumes(self) -> bool:
        """Whether the same command, started again, resumes the run."""
        return self.ckpt_path in ("auto", "last")

    @property
    def precision(self) -> Precision:
        """Precision of the run: the precision in the settings, without any part that the strategy handles itself."""
        return self.strategy.precision

    @property
    def resumed_reader(self) -> Reader | None:
        """Reader of the checkpoint whose position this run continues; None for a run that starts at the beginning."""
        return None if self.resume is None else self.resume.resumed_reader

    def profiled(self, action: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function`, so that the profiler measures its calls; without a profiler, return `function` itself."""
        profiler = self.trainer.profiler
        return function if profiler.off else profiler.wrap(action, function)

    def profiled_batches(self, action: str, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator over `batches` that lets the profiler measure the wait for each batch.

        Without a profiler, return `batches` itself.
        """
        profiler = self.trainer.profiler
        return batches if profiler.off else profiler.batches(action, batches)

    def switch_log(self, log: MetricLog | None) -> MetricLog | None:
        """Set the log that `self.log` writes into (None for no log), and return the previous one."""
        before = self.trainer._switch_log(log)
        if log is not None:
            config = self.settings.compile
            log.copies = config is not None and config.overwrites_outputs(self.device)
        if before is not None and before.stage == "train":
            self.trainer.metrics.keep(before)
        if self.settings.barebones:
            self.module._log_into(NullBuffer())
        else:
            self.module._log_into(None if log is None else log.buffer)
        return before
