"""Trials: steps of a run that leave no trace.

A trial uses the run's own step, with a separate position, data, log and hooks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.data import BatchSource
from instep.distributed import Triggers
from instep.distributed.out_of_memory import clear_device_cache
from instep.distributed.rank_zero import from_every_rank
from instep.errors import DataError, HookError, UsageError
from instep.trainer.context import Ending, Progress, RunContext, StepCounts
from instep.trainer.evaluation import evaluate, predict
from instep.trainer.guests import find_guests
from instep.trainer.hooks import HookTable
from instep.trainer.loaders import Loaders
from instep.trainer.log import MetricLog, NullBuffer
from instep.trainer.loop import after_batch, make_step, plan_validation, wrap_optimizers
from instep.trainer.metrics import Metrics
from instep.trainer.plugins import SilentLogger
from instep.trainer.step import detached_outputs
from instep.trainer.trials.out_of_memory import out_of_memory
from instep.trainer.trials.snapshot import Snapshot
from instep.types import Stateful

if TYPE_CHECKING:
    from torch.optim import Optimizer

_STAGES = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
_HOOKS = {  # hooks in which a trial may be made, since no batch is being processed
    "fit": ("on_fit_start", "on_sanity_check_start", "on_train_start", "on_train_epoch_start"),
    "validate": ("on_validation_start", "on_validation_epoch_start"),
    "test": ("on_test_start", "on_test_epoch_start"),
    "predict": ("on_predict_start", "on_predict_epoch_start"),
}
_NEVER = "never"  # interval of schedulers in a trial: neither "step" nor "epoch", so the loop never steps them


class Trial:
    """Trial within a run: a `with` block that takes steps, and undoes all of them at its end, also after an error.

    A trial restores bit for bit: the module (weights, buffers, gradients, modes, plain attributes), optimizers, the
    gradient scaler, random generators, the place in the data, log, loggers, metrics, triggers and the Trainer's
    counters. The module's own hooks for a batch and for an epoch's start are called. Callbacks and schedulers are not.
    Collective.

    Args:
        ctx: the run. No batch of it may be under way.

    Raises:
        SettingError: steps cannot be undone under the run's strategy.
        UsageError: the run is in the middle of an epoch, or its data can be read once only.

    Example:
        >>> with trainer.trial() as trial:  # doctest: +SKIP
        ...     losses = [trial.step() for _ in range(10)]
    """

    def __init__(self, ctx: RunContext) -> None:
        self._run = ctx
        self._trainer, self._module, self._strategy = ctx.trainer, ctx.module, ctx.strategy
        self._stage = _STAGES[ctx.fn]
        self._ctx = ctx
        self._snapshot = Snapshot()
        self._undo = ExitStack()
        self._batches: Iterator[Any] | None = None
        self._step: Callable[..., Any] | None = None

    @property
    def repeats(self) -> bool:
        """Whether a resumed run repeats the current hook, so that the search was already done before the resume."""
        plan = self._run.resume
        return plan is not None and plan.resumed_reader is not None and not plan.restored

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps taken. In manual optimization a call of `training_step` may take none."""
        return self._ctx.position.global_step - self._run.position.global_step

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Optimizers of the run, whose learning rates may be set. The trial restores the learning rates too."""
        return self._run.optimizers

    def check_batch_size(self) -> None:
        """Raise an error if loaders do not come from loader methods, since only these can use another batch size.

        Raises:
            UsageError: loaders were passed to the Trainer's method.
        """
        if any(loaders is not None for loaders in self._run.loaders.given.values()):
            raise UsageError(
                f"The Batch size finder cannot be used with dataloaders passed directly to `.{self._run.fn}()`: they "
                "have their batch size already. Give the module or a DataModule methods that use the attribute."
            )

    # ---- begin and end

    def __enter__(self) -> Trial:
        run, trainer, module = self._run, self._trainer, self._module
        self._check()
        of_rank = copy.deepcopy(self._strategy.rank_state())
        # drop weights that a sharded strategy has gathered, since they must not be recorded
        self._strategy.abandon_step()
        snapshot = self._snapshot = Snapshot()
        snapshot.keep_module(module)
        for optimizer in run.optimizers:
            snapshot.keep_optimizer(optimizer)
        for config in run.schedulers:
            for scheduler in (config.scheduler, *getattr(config.scheduler, "_schedulers", ())):
                snapshot.capture_attributes(scheduler)
        snapshot.capture_attributes(self._strategy.gradients)
        if run.precision.scaler is not None:
            snapshot.capture_attributes(run.precision.scaler)
        snapshot.keep_random()
        with self._undo as undo:  # if a call in this block fails, the end of the block undoes everything so far
            undo.callback(self._put_back, of_rank)
            undo.callback(vars(trainer).update, {**vars(trainer), "_data": dict(trainer._data)})
            gradient = {entry.name: copy.copy(getattr(run.gradient, entry.name)) for entry in fields(run.gradient)}
            undo.callback(lambda: [setattr(run.gradient, name, value) for name, value in gradient.items()])
            undo.callback(setattr, self._strategy, "loss_weight", self._strategy.loss_weight)
            undo.callback(torch.set_grad_enabled, torch.is_grad_enabled())
            undo.callback(self._close_data)
            self._strategy.prepare_training(module, run.optimizers)
            self._open()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.close()
        clear_device_cache()

    def _check(self) -> None:
        run = self._run
        if not self._strategy.steps_can_be_undone:
            raise self._strategy._refused(
                "cannot undo steps, which looking for a learning rate or a batch size needs. Look for it under "
                "another strategy, such as 'ddp' or 'fsdp'."
            )
        hook = "" if self._trainer._log is None else self._trainer._log._hook
        if hook and hook not in _HOOKS[run.fn]:
            raise UsageError(
                f"steps can be tried while no batch is under way, and this is {hook}. In {run.fn} do it in "
                f"{' or '.join(_HOOKS[run.fn])}."
            )
        given = run.loaders.given.get(self._stage)
        if given is not None and hasattr(given, "__next__"):
            raise UsageError(
                f"the {self._stage} data is a {type(given).__name__}, which can be read once only: what a trial takes "
                "would be missing in the run. Pass what makes it, such as a DataLoader or a list."
            )

    def _open(self) -> None:
        """Make a copy of the run's context for the trial, and let the Trainer and the module use this copy."""
        run, trainer, module = self._run, self._trainer, self._module
        ctx = self._ctx = copy.copy(run)
        ctx.position = copy.copy(run.position)
        if ctx.position.epoch_ended:
            ctx.position.next_epoch()
        ctx.position.batch = ctx.position.window_batch = 0
        ctx.position.epoch_over = False
        ctx.hooks = HookTable(trainer, module, ())
        ctx.ending, ctx.validation = Ending(), copy.copy(run.validation)
        # Triggers that the module sets in a trial must not reach the run.
        ctx.triggers = Triggers(run.settings.trigger_every)
        ctx.counts = StepCounts(updates_at_start=run.counts.updates_at_start)
        ctx.log = MetricLog("train", run.world_size)
        ctx.log.buffer = NullBuffer()
        if module.automatic_optimization:
            ctx.schedulers = [replace(config, interval=_NEVER) for config in run.schedulers]
        ctx.guests = find_guests(ctx, tried=True)
        wrap_optimizers(ctx)
        silent = [SilentLogger() for _ in trainer.loggers]
        vars(trainer).update(
            _ctx=ctx, position=ctx.position, metrics=Metrics(trainer), _log=ctx.log, _loggers=silent,
            progress=Progress(ctx.position),
        )  # fmt: skip
        module._log_into(ctx.log.buffer)
        if run.fn == "fit":
            torch.set_grad_enabled(True)
        self._new_data(fresh=False)

    def _put_back(self, of_rank: dict[str, Any]) -> None:
        self._reset()
        self._strategy.load_rank_state(of_rank, own=True)
        self._snapshot.restore()

    def _reset(self) -> None:
        """Restore module, optimizers and strategy to their state at the trial's start, even in the middle of a step."""
        self._strategy.abandon_step()
        self._snapshot.restore()
        # with DDP, `prepare_training` wraps the module again, with a new reducer
        self._strategy.prepare_training(self._module, self._run.optimizers)
        # restore a second time, since `prepare_training` may have made buffers the same on all ranks
        self._snapshot.restore()

    # ---- data

    def _new_data(self, fresh: bool, steps: int | None = None) -> None:
        """Prepare the data again, to be read from its beginning.

        Args:
            fresh: whether to request the loaders from the user's methods again; if not, the run's loaders are read.
            steps: number of batches of each evaluation loader.
        """
        run, ctx = self._run, self._ctx
        self._close_data()
        given = dict.fromkeys(run.loaders.given) if fresh else {self._stage: run.loaders.raw(self._stage)}
        ctx.loaders = Loaders(self._trainer, self._module, run.datamodule, given, run.device, run.gradient)
        # keep the run's accumulation, except with `global_batch_size`, where the loader's batch size decides it
        if run.settings.global_batch_size is None:
            ctx.loaders.accumulate = run.loaders.accumulate
        if steps is not None:
            limited = {f"limit_{stage}_batches": steps for stage in ("val", "test", "predict")}
            limited = {name: steps for name in limited if getattr(run.settings, name) != 0}
            ctx.loaders.settings = replace(run.settings, **limited)
        self._batches = self._step = None

    def _close_data(self) -> None:
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()  # pyright: ignore[reportAttributeAccessIssue]
        if self._ctx.loaders is not self._run.loaders:
            self._ctx.loaders.close()

    def _training_batches(self) -> Iterator[Any]:
        """Yield batches, epoch after epoch. In each epoch the step is made anew, as in the loop."""
        ctx, at = self._ctx, self._ctx.position
        source = ctx.source = ctx.loaders.train
        kept = _state_of(source)
        first, at.batch, at.window_batch = at.epoch, 0, 0
        try:
            if self._run.position.global_step == 0:
                ctx.hooks.call("on_train_start")
            while True:
                source.set_epoch(at.epoch)
                ctx.loaders.begin_windows(at.global_step, at.batch)
                ctx.gradient.active_dataloader, ctx.gradient.dataloader_references = source, [source]
                ctx.hooks.call("on_train_epoch_start")
                ctx.log.enter("training_step")
                self._step = make_step(ctx)
                batches = ctx.loaders.on_device(source)
                for guest in ctx.guests:
                    batches = guest.batches("training_step", batches, source, log=ctx.log)
                yield from batches
                if at.batch == 0:
                    raise DataError("the training loader gives no batch, so no step can be tried")
                at.next_epoch()
        finally:
            source.set_epoch(first)  # `set_epoch` also sets the epoch of the user's samplers and data sets
            kept()

    # ---- steps

    def step(self) -> float | None:
        """Take one optimizer step on the next batches.

        Returns:
            Mean loss of the step's samples over all ranks; infinity if the mean is not finite, nan if `training_step`
            returned no loss. None if some rank got a signal or asked for a stop; then leave the trial.

        Raises:
            HookError: in manual optimization, `training_step` returned no loss.
        """
        total, weight = self._window()
        parts = from_every_rank((total, weight, self._run.triggers.pending))
        if any(pending for _, _, pending in parts):
            return None
        weight = sum(part for _, part, _ in parts)
        loss = sum(part for part, _, _ in parts) / weight if weight else math.nan
        return loss if math.isfinite(loss) or not weight else math.inf

    def _window(self) -> tuple[float, float]:
        """Run the micro-batches of one optimizer step. Return the sum of their losses, and the number of samples."""
        ctx, at = self._ctx, self._ctx.position
        if self._batches is None:
            self._batches = self._training_batches()
        after = after_batch(ctx)
        total = weight = 0.0
        while True:
            batch = next(self._batches)
            assert self._step is not None
            index, ctx.log.batch, ctx.log.weight = at.batch, batch, ctx.source.share.mine
            for hook in ctx.hooks["on_train_batch_start"]:
                hook(batch, index)
            output = self._step(batch, index)
            for hook in after:
                hook(detached_outputs(output), batch, index)
            if any(guest.ended for guest in ctx.guests):
                if index == 0:
                    raise DataError("one step takes more batches than an epoch has, so no step can be tried")
                continue
            # read this after the step, since a step that takes its batches itself sets the number of samples
            mine = ctx.log.weight
            loss = output.get("loss") if isinstance(output, dict) else output
            if isinstance(loss, Tensor) and mine != 0:
                samples = 1 if mine is None else mine
                total, weight = total + float(loss.detach()) * samples, weight + samples
            elif loss is None and not self._module.automatic_optimization:
                raise HookError(
                    "training_step returned no loss, so there is nothing to measure. In manual optimization return it "
                    "too, or a dict with it under 'loss'."
                )
            if at.window_batch == at.batch:
                return total, weight

    def out_of_memory(self, steps: int) -> str:
        """Run some steps as the run would, with the current batch size of module and data. Collective.

        In fit these are optimizer steps, followed by batches of each validation loader. Otherwise they are batches of
        each loader.

        Args:
            steps: number of optimizer steps or batches.

        Returns:
            Error text of the rank that ran out of memory; empty if the steps fitted into memory on all ranks.
        """
        clear_device_cache(garbage_collection=self._run.device.type != "cpu")
        self._new_data(fresh=True, steps=steps)
        # This call is collective, so it must not be inside `out_of_memory`, which one rank alone may leave.
        self._sources()
        why = out_of_memory(lambda: self._run_steps(steps), f"trying batches ({self._run.fn})")
        self._close_data()
        if why:
            # collect garbage, since the error's frames hold the tensors of the step in a reference cycle
            clear_device_cache(garbage_collection=True)
            self._reset()
            self._module._log_into(self._ctx.log.buffer)
            clear_device_cache(garbage_collection=True)
        return why

    @property
    def interrupted(self) -> bool:
        """Whether some rank got a signal or asked for a stop, so that the trial must be left. Collective."""
        return any(from_every_rank(self._run.triggers.pending))

    def reload_data(self) -> None:
        """Make the run request its loaders again after the trial, since the batch size has changed. Collective."""
        run = self._run
        loaders = run.loaders
        loaders.reload_evaluation()
        if run.fn != "fit":
            return
        loaders.reload_train()
        run.source = loaders.train
        run.source.set_epoch(run.position.epoch)
        self._trainer.progress.outer_total = run.source.num_batches
        if run.gradient.dataloader_references:  # an epoch is running, so replace its loader
            run.gradient.active_dataloader, run.gradient.dataloader_references = run.source, [run.source]
            plan_validation(run)

    def samples(self) -> int | None:
        """Return the largest possible number of samples in a batch of one rank; None if unknown."""
        known = [_samples(source) for source in self._sources()]
        sizes = [size for size in known if size is not None]
        most = -(-max(sizes) // self._strategy.data_world_size) if sizes else None
        of_all = self._run.settings.global_batch_size if self._run.fn == "fit" else None
        if of_all is None:
            return most
        of_all = of_all if isinstance(of_all, int) else max(of_all.values())
        share = max(1, of_all // self._strategy.data_world_size)
        return share if most is None else min(most, share)

    def _sources(self) -> list[BatchSource]:
        loaders = self._ctx.loaders
        if self._run.fn != "fit":
            return loaders.evaluation(self._stage)
        if self._run.validation.enabled:
            loaders.evaluation("val")
        return [loaders.train]

    def _run_steps(self, steps: int) -> None:
        ctx = self._ctx
        if ctx.fn == "fit":
            for _ in range(steps):
                self._window()
            sources = ctx.loaders.evaluation("val") if self._run.validation.enabled else []
            if sources:
                ctx.log.leave("")
                evaluate(ctx, "validate", sources)
        elif ctx.fn == "predict":
            predict(ctx, ctx.loaders.evaluation("predict"), keep=False)
        else:
            evaluate(ctx, ctx.fn, ctx.loaders.evaluation(self._stage))


def _samples(source: Any) -> int | None:
    """Return the number of samples in a source's data; for a source of several sources, their largest number."""
    parts = getattr(source, "flattened", None)
    if parts is not None:
        sizes = [size for size in map(_samples, parts) if size is not None]
        return max(sizes, default=None)
    try:
        return len(source.dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _state_of(source: Any) -> Callable[[], None]:
    """Record the data sets' states that last over epochs, and return a function that restores these states."""
    data = [getattr(part, "dataset", None) for part in getattr(source, "flattened", [source])]
    kept = [(one, copy.deepcopy(one.state_dict())) for one in data if isinstance(one, Stateful)]

    def put() -> None:
        for one, state in kept:
            one.load_state_dict(state)

    return put
