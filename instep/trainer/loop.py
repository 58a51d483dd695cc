"""The training loop: `fit` on one screen, and below it epochs, validation, triggers and stopping."""

from __future__ import annotations

import copy
import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch

from instep.data import BatchSource
from instep.distributed import Trigger, gather_object
from instep.distributed.heartbeat import BATCH, STEP
from instep.errors import HookError, Preempted, SettingError
from instep.trainer.checks import check_epoch, check_losses, check_steps
from instep.trainer.context import RunContext, RunningStage
from instep.trainer.evaluation import evaluate
from instep.trainer.guests import Step, find_guests, note_samples
from instep.trainer.hooks import Hook, is_overridden
from instep.trainer.log import MOST_HELD, MetricLog, metric_states_module
from instep.trainer.manual import manual_optimizer_step, manual_step
from instep.trainer.module import TrainModule
from instep.trainer.optimizers import TrainOptimizer, configure, step_schedulers
from instep.trainer.plugins import by_class, saves, writes_checkpoints
from instep.trainer.step import automatic_step, detached_outputs, optimizer_step, step_of_phases
from instep.utils.imports import without_collections
from instep.utils.seed import rng_state, set_rng_state
from instep.utils.warn import warn_user


def fit(ctx: RunContext) -> None:
    """Train; the docstring of `Trainer.fit` shows the order of all hooks."""
    configure_optimizers(ctx)
    prepare_training(ctx)
    with ctx.strategy.changing_trainable():
        ctx.hooks.call("on_fit_start")
    resume(ctx)
    check_sanity(ctx)
    start_training(ctx)
    ctx.hooks.call("on_train_start")
    check_saving(ctx)
    agree_on_triggers(ctx)
    hooks, at, log, tick, trainer = ctx.hooks, ctx.position, ctx.log, ctx.triggers.tick, ctx.trainer
    progress, beats, validation, buffer = trainer.progress, ctx.heartbeat.numbers, ctx.validation, ctx.log.buffer
    batch_start, batch_end, ending = hooks["on_train_batch_start"], after_batch(ctx), ctx.ending
    max_steps, hand_over_every = ctx.settings.max_steps, ctx.settings.log_every_n_steps or MOST_HELD

    while not is_finished(ctx):
        begin_epoch(ctx)
        source, step = ctx.source, make_step(ctx)
        complete, over = False, ends_here(ctx)
        for batch in () if over else rest_of_epoch(ctx):
            batch_idx = progress.batch_idx = at.batch
            log.batch, log.weight = batch, source.share.mine
            if batch_start and skips_rest(ctx, batch_start, batch, batch_idx):
                complete = at.skipped_rest = True
                break
            output = step(batch, batch_idx)
            if buffer:  # collect values that were logged after `training_step`
                log.drain()
            beats[BATCH], beats[STEP] = batch_idx, at.global_step
            if batch_end:
                outputs = detached_outputs(output)
                for hook in batch_end:
                    hook(outputs, batch, batch_idx)
            if at.window_batch != at.batch:
                continue  # this batch is in the middle of an accumulation window
            if at.global_step % hand_over_every == 0 or at.batch % MOST_HELD == 0:
                hand_over_metrics(ctx)
            if at.batch >= validation.next_batch:
                validate(ctx)
            if validation.has_clock:
                check_clock(ctx)
            agreed = tick(at.global_step)
            if agreed or ending.deferred:
                act_on(ctx, agreed)
            if at.global_step == max_steps or (trainer._stop_agreed and is_stopping(ctx)):
                complete = source.share.last
                break
        else:
            complete = not over or is_last_batch(ctx)
            check_epoch(ctx)
        end_epoch(ctx, complete)

    # `end_epoch` sets this too, but is not called if a resumed run has no epoch left
    at.epoch_over |= at.closed_step == at.global_step
    ctx.strategy.average_replicas()
    hooks.call("on_train_end")
    hooks.call("on_fit_end")
    print_why_it_ended(ctx)


# ---- before the first step


def configure_optimizers(ctx: RunContext) -> None:
    """Call the module's `configure_optimizers`, then let the strategy distribute the module."""
    module, strategy = ctx.module, ctx.strategy
    with without_collections():
        # This import takes a second, and more with garbage collection. The first optimizer and DDP need it in any case.
        import_module("torch._dynamo")
    ctx.optimizers, ctx.schedulers = configure(_call_configure(module), module)
    ctx.guests = find_guests(ctx)
    wrap_optimizers(ctx)
    strategy.prepare_training(module, ctx.optimizers)
    strategy.separate_random_streams(ctx.trainer.seed)


def wrap_optimizers(ctx: RunContext) -> None:
    """Wrap the optimizers for `self.optimizers()`, so that a call of their `step` runs the Trainer's optimizer step."""
    module, no_sync = ctx.module, ctx.strategy.no_sync
    on_step = optimizer_step(ctx) if module.automatic_optimization else manual_optimizer_step(ctx)
    ctx.wrapped_optimizers = [
        TrainOptimizer(optimizer, module, on_step=on_step, no_sync=no_sync) for optimizer in ctx.optimizers
    ]


def make_step(ctx: RunContext) -> Step:
    """Make the function that trains on one batch: `step(batch, batch_idx) -> what training_step returned`."""
    if not ctx.module.automatic_optimization:
        step = manual_step(ctx)
    else:
        step = automatic_step(ctx) if ctx.loaders.phases is None else step_of_phases(ctx)
    return ctx.profiled("run_training_batch", step)


def _call_configure(module: TrainModule) -> Any:
    """Call `configure_optimizers`. If an optimizer refuses its arguments, raise an error that names them."""
    try:
        return module.configure_optimizers()
    except (TypeError, ValueError) as error:
        from instep.utils.trainable import why_no_optimizer  # imported late: only an error needs it

        if why := why_no_optimizer(error, module):
            raise HookError(f"{type(module).__name__}.configure_optimizers: {why}.") from error
        raise


def prepare_training(ctx: RunContext) -> None:
    """Prepare the loaders and the log; after this, `ctx.source` is the training data."""
    warned = ctx.trainer.metrics.warned if ctx.rank == 0 else None
    ctx.log = MetricLog("train", ctx.world_size, counts=ctx.strategy.contributes, module=ctx.module, warned=warned)
    objects = metric_states_module().metric_objects(ctx.module).values()
    ctx.counts.updates_at_start = {id(one): one._update_count for one in objects}
    with ctx.trainer.profiler.profile("setup_train_dataloader"):
        ctx.source = ctx.loaders.train
    for guest in ctx.guests:
        guest.check()
    ctx.validation.enabled = ctx.loaders.validates
    if ctx.validation.enabled and ctx.settings.limit("train") != 0:
        # check the interval now, and not only in the first epoch that validates
        validation_interval(ctx)
    if isinstance(ctx.settings.val_check_interval, timedelta):
        ctx.validation.next_time_s = time.monotonic() + ctx.settings.val_check_interval.total_seconds()


def resume(ctx: RunContext) -> None:
    """Load the states of optimizers, schedulers and data from the checkpoint, if the run resumes from one.

    Random generators are restored later, when the epoch begins.
    """
    from instep.trainer.run_state import resume_training  # imported late: only a run needs it

    plan, trainer, at = ctx.resume, ctx.trainer, ctx.position
    if plan is None:
        return
    resume_training(ctx, plan)
    report, lr = plan.report, plan.parts.lr
    batch = " done" if at.epoch_ended else f", batch {at.batch}"
    where = f"epoch {at.epoch + 1}{batch}, step {at.global_step}"
    if report.complete:
        trainer._print(f"Resuming from {report.path}: {where}.")
    else:
        trainer._print(f"{report}\n  goes on at {where}" if plan.resumed_reader else report)
    if plan.resumed_reader is not None and report.reached > at.global_step:
        again = report.reached - at.global_step
        steps = f"{again:,} steps are" if again > 1 else "1 step is"
        trainer._print(
            f"  The run had reached step {report.reached:,} or later: at least {steps} trained again."
            if trainer.run_id == plan.resumed_reader.manifest.run_id
            else f"  It goes back: the run had reached step {report.reached:,}. Its later checkpoints stay as they "
            "are, and are no part of this run."
        )
    if lr is not None:
        trainer._print(f"  learning rate: Resume(lr={lr}); after the schedules it is {learning_rates(ctx)}")
    trainer.resume_report = report


def check_sanity(ctx: RunContext) -> None:
    """Run a few validation batches, so that a broken validation shows before hours of training."""
    limit = ctx.settings.num_sanity_val_steps
    if not ctx.validation.enabled or limit == 0 or ctx.resumed_reader is not None:
        return
    rng = rng_state()
    ctx.trainer.state.stage = RunningStage.SANITY_CHECKING
    ctx.hooks.call("on_sanity_check_start")
    with ctx.clock.within("validation"):
        sources = validation_sources(ctx)
        once = any(source.reads_once for source in sources)
        if once:
            warn_user(
                "the validation data is an iterator, such as a generator, that gives its values once: the sanity check "
                "is left out, since the first validation would lack what it reads"
            )
        steps = None if limit == -1 else limit
        if once or not sources or evaluate(ctx, "sanity_check", sources, steps) is not None:
            ctx.hooks.call("on_sanity_check_end")
    ctx.trainer.metrics.forget()
    ctx.trainer.state.stage = RunningStage.TRAINING
    set_rng_state(rng)  # restore random generators, so that the training is the same without the sanity check


def start_training(ctx: RunContext) -> None:
    """Enter the training stage: from now on the loop counts batches and steps in `ctx.position`."""
    trainer, at, s = ctx.trainer, ctx.position, ctx.settings
    ctx.clock.start_loop()
    trainer.progress.stage = "train"
    ctx.counts.began = True
    ctx.counts.batches_at_start, ctx.counts.steps_at_start = at.earlier_batches + at.batch, at.global_step
    ctx.switch_log(ctx.log)
    torch.set_grad_enabled(True)
    if not ctx.module.training:
        warn_user(
            f"{type(ctx.module).__name__} is in eval mode, so dropout is off. Call model.train() before fit, unless "
            "that is meant."
        )
    if is_finished(ctx) and s.limit("train") != 0:
        trainer._print(
            f"Nothing is left to train: epoch {at.epoch + at.epoch_ended} and step {at.global_step} are done, with "
            f"max_epochs={s.max_epochs}, max_steps={s.max_steps}. Raise one of them; "
            "a new run needs another folder, or no ckpt_path."
        )


def check_saving(ctx: RunContext) -> None:
    """Raise an error before the first step if some state cannot be saved.

    The `state_dict` and `on_save_checkpoint` of callbacks and modules are called once for this check.
    """
    if any(map(writes_checkpoints, ctx.callbacks)):
        ctx.saver.dry_run()


# ---- epochs


def is_finished(ctx: RunContext) -> bool:
    """Return True if training is over: one of its limits is reached, or the run is stopping."""
    at, s = ctx.position, ctx.settings
    if s.limit("train") == 0 or (s.max_epochs != -1 and at.epoch + at.epoch_ended >= s.max_epochs):
        return True
    resumes = ctx.resume is not None and not ctx.resume.restored
    if resumes and at.owes_end and (at.global_step <= s.max_steps or s.max_steps == -1):
        # the checkpoint was saved after the last step: the validation and the hooks that follow it are still to run
        return False
    return (s.max_steps != -1 and at.global_step >= s.max_steps) or is_stopping(ctx)


def ends_here(ctx: RunContext) -> bool:
    """Return True if a run that was resumed within an epoch has no step left to do, but only the epoch's end."""
    at = ctx.position
    return at.inside and (at.global_step == ctx.settings.max_steps or is_stopping(ctx))


def is_last_batch(ctx: RunContext) -> bool:
    """Return True if the epoch has no batch left after the position. At most one batch is read to find out."""
    return ctx.position.skipped_rest or next(iter(ctx.source), None) is None


def is_stopping(ctx: RunContext) -> bool:
    """Return True if the ranks agreed to stop, and `min_steps` and `min_epochs` are reached."""
    if not ctx.trainer._stop_agreed or is_below_minimum(ctx):
        return False
    return not ctx.ending.waits or still_stops(ctx)


def is_below_minimum(ctx: RunContext) -> bool:
    """Return True if `min_steps` or `min_epochs` delays a stop."""
    at, s = ctx.position, ctx.settings
    return at.global_step < (s.min_steps or 0) or at.epoch + at.epoch_ended < (s.min_epochs or 0)


def still_stops(ctx: RunContext) -> bool:
    """Decide, once `min_steps` and `min_epochs` are reached, whether a stop that has waited for them is still wanted.

    Collective. The metric that EarlyStopping watches may have become better since the stop was requested, so the last
    decision of EarlyStopping counts. A stop for any other reason remains.
    """
    from instep.callbacks.early_stopping import WORD  # imported late: few runs have a minimum to wait for

    trainer, ctx.ending.waits = ctx.trainer, False
    verdicts = [each for each in trainer.early_stopping_callbacks if each.stopping_reason.value]
    others = [why for why in trainer._own_stops if not why.startswith(WORD)]
    if any(gather_object(bool(verdicts or others))):
        return True
    trainer._set_stop(False)
    return False


def begin_epoch(ctx: RunContext) -> None:
    """Enter the next epoch, or continue the epoch in which the checkpoint was saved."""
    at, plan = ctx.position, ctx.resume
    inside = plan is not None and not plan.restored and at.inside
    if plan is not None and not inside:
        plan.finish()
    if at.epoch_ended:
        at.next_epoch()
    at.epoch_over = False
    ctx.heartbeat.enter("epoch")
    every = ctx.settings.reload_dataloaders_every_n_epochs
    if every and at.epoch and at.epoch % every == 0 and not at.inside:
        ctx.loaders.reload_train()
        ctx.source = ctx.loaders.train
    ctx.source.set_epoch(at.epoch)
    if at.batch and not inside:
        ctx.source.start_at(at.batch)  # a second fit of this Trainer continues where the first one stopped
    ctx.loaders.begin_windows(at.global_step, at.batch)
    ctx.trainer.progress.outer_total = ctx.source.num_batches
    ctx.gradient.active_dataloader = ctx.source
    ctx.gradient.dataloader_references = [ctx.source]
    plan_validation(ctx)
    with ctx.strategy.changing_trainable():
        ctx.hooks.call("on_train_epoch_start")
    if plan is not None and inside:
        # restore log sums and random generators after the hook, since their saved state includes what
        # on_train_epoch_start did in the first run
        plan.finish()
    ctx.log.enter("training_step")
    ctx.heartbeat.enter("train")
    note_samples(ctx)
    # do what was due when the checkpoint was saved: hand over the values of its step, and validate
    if inside:
        every = ctx.settings.log_every_n_steps
        if every and at.global_step % every == 0:
            hand_over_metrics(ctx)
        if at.batch >= ctx.validation.next_batch:
            validate(ctx)


def rest_of_epoch(ctx: RunContext) -> Iterator[Any]:
    """Yield the remaining batches of the epoch, on the device."""
    if ctx.position.skipped_rest:
        return iter(())  # the run was resumed after on_train_batch_start had skipped these batches
    batches = ctx.profiled_batches("[TrainingLoop].train_dataloader_next", ctx.loaders.on_device(ctx.source))
    for guest in ctx.guests:
        batches = guest.batches("training_step", batches, ctx.source, log=ctx.log, first=ctx.position.batch)
    return ctx.clock.sampled(batches)


def after_batch(ctx: RunContext) -> tuple[Hook, ...]:
    """Return the hooks to call after each training batch."""
    hooks = ctx.hooks["on_train_batch_end"]
    for guest in ctx.guests:
        hooks = guest.hooks_after("training_step", hooks)
    return hooks


def skips_rest(ctx: RunContext, hooks: tuple[Hook, ...], batch: Any, batch_idx: int) -> bool:
    """Call `on_train_batch_start`; return True if a hook returned -1."""
    if -1 not in [hook(batch, batch_idx) for hook in hooks]:
        return False
    if ctx.world_size > 1:
        raise HookError(
            "on_train_batch_start returned -1 to skip the rest of the epoch. With several processes the others "
            "would not know: use trainer.set_trigger('stop') to end the run, or limit_train_batches."
        )
    return True


def end_epoch(ctx: RunContext, complete: bool) -> None:
    """Run the validation that is due, reduce metrics, call hooks, step schedulers and agree on triggers.

    Args:
        ctx: the run.
        complete: whether all batches were done. If not, a later fit or a resumed run continues this epoch.
    """
    at, trainer, log, hooks = ctx.position, ctx.trainer, ctx.log, ctx.hooks
    ctx.heartbeat.enter("epoch")
    ctx.loaders.in_epoch = False
    check_losses(ctx)
    check_steps(ctx)
    settle(ctx)
    stopped = not complete and is_stopping(ctx)
    if ctx.validation.enabled and not at.validated and (stopped or (complete and waits_for_end(ctx))):
        validate(ctx)  # a run that stops in the middle of an epoch also ends with a validation
    log.leave("")
    log.batch = log.weight = None
    arrived, metrics = log.reduce(at.global_step, reset=False)
    trainer.metrics.log_steps(arrived)
    trainer.metrics.put_epoch(metrics, final=False)
    for hook in hooks.of_callbacks("on_train_epoch_end", lambda callback: not callback.runs_last):
        hook()
    for hook in hooks.of_module("on_train_epoch_end"):
        hook()
    arrived, metrics = log.reduce(at.global_step, reset=complete)
    trainer.metrics.log_steps(arrived)
    trainer.metrics.put_epoch(metrics)
    if complete:
        module = ctx.module
        if module.automatic_optimization:
            step_hook = module.lr_scheduler_step if is_overridden(module, "lr_scheduler_step", TrainModule) else None
            for config in ctx.schedulers:
                if config.interval == "epoch" and config.reduce_on_plateau and config.monitor is not None:
                    reader = f"{type(config.scheduler).__name__} (monitor={config.monitor!r})"
                    trainer.metrics.warn_of_training(config.monitor, reader)
            step_schedulers(ctx.schedulers, "epoch", at.epoch + 1, trainer.callback_metrics, step_hook)
        at.epoch_ended = True
        for hook in hooks.of_callbacks("on_train_epoch_end", lambda callback: callback.runs_last):
            hook()
    else:
        at.closed_step = at.global_step
        if not getattr(trainer.checkpoint_callback, "saves_nothing", False):
            # this save is not ranked by a metric, since the epoch has no final metrics yet
            save_now(ctx, "the run ended within an epoch")
    at.epoch_over = True
    agree_on_triggers(ctx)


def settle(ctx: RunContext) -> None:
    """Make the guests of the step finish work that they have put off, before the result of the steps so far is used."""
    for guest in ctx.guests:
        guest.settle()


def hand_over_metrics(ctx: RunContext) -> None:
    """Start to copy newly logged values to the host, and send the step values that have arrived there to the loggers.

    Step values are copied only at every `log_every_n_steps`-th step, and only once for each of these steps.
    """
    step, every = ctx.position.global_step, ctx.settings.log_every_n_steps
    due = bool(every) and step % every == 0 and step != ctx.counts.handed_over
    ctx.counts.handed_over = step
    ctx.trainer.metrics.log_steps(ctx.log.hand_over(step, step_values=due))
    settle(ctx)


def learning_rates(ctx: RunContext) -> str:
    """Format the learning rates of all parameter groups, each rate once."""
    groups = [group for each in ctx.optimizers for group in each.param_groups]
    return ", ".join(dict.fromkeys(f"{float(group['lr']):g}" for group in groups))


def print_why_it_ended(ctx: RunContext) -> None:
    """Record and print why the fit ended: a limit, or a stop. Print which steps are in no checkpoint."""
    at, s, trainer = ctx.position, ctx.settings, ctx.trainer
    if trainer._stop_agreed:
        why = trainer.stop_reason or "a stop was asked for"
    elif s.max_steps != -1 and at.global_step >= s.max_steps:
        why = f"max_steps={s.max_steps} reached"
    else:
        why = "limit_train_batches=0" if s.limit("train") == 0 else f"max_epochs={s.max_epochs} reached"
    ctx.ending.reason = why.rstrip(".")
    trainer._print(f"fit ended at step {at.global_step}: {ctx.ending.reason}.")
    trainer.metrics.keep(ctx.log)
    if bad := trainer.metrics.describe_nan():
        trainer._print(
            f"{bad}. Is the learning rate ({learning_rates(ctx)}) too high? Trainer(nonfinite='stop') ends a run at "
            "the first loss or gradient that is not finite."
        )
    steps = [getattr(callback, "settled_step", 0) for callback in ctx.callbacks if saves(callback)]
    settled = max(steps, default=at.global_step)
    if settled < at.global_step:
        trainer._print(
            f"Steps {settled + 1} to {at.global_step} are in no checkpoint: it was not yet time for one. "
            "ModelCheckpoint(save_last=True) saves the end of a fit too."
        )


# ---- validation


def validation_interval(ctx: RunContext) -> int | None:
    """Return the number of training batches between validations; None if they run at an epoch's end or by time.

    Raises:
        SettingError: the interval does not fit the training data.
    """
    interval, batches = ctx.settings.val_check_interval, ctx.source.epoch_batches
    if isinstance(interval, int):
        if batches is not None and interval > batches and ctx.settings.check_val_every_n_epoch is not None:
            raise SettingError(
                f"val_check_interval={interval} must be less than or equal to the number of the training batches, "
                f"{batches} an epoch: nothing would be validated. check_val_every_n_epoch=None counts across epochs.",
                field="val_check_interval",
                got=interval,
            )
        return interval
    if interval == 1.0 or isinstance(interval, timedelta):
        return None
    if batches is None:
        raise SettingError(
            f"val_check_interval={interval} is a fraction of an epoch, but the training data has no "
            "length. Use a number of batches, a time, or 1.0.",
            field="val_check_interval",
        )
    return max(1, int(batches * interval))


def plan_validation(ctx: RunContext) -> None:
    """Decide when validations run in this epoch: after a number of batches, at its end, by time, or not at all."""
    s, plan, at = ctx.settings, ctx.validation, ctx.position
    due, at.validation_due = at.validation_due, None
    plan.every, plan.next_batch, plan.at_epoch_end, plan.has_clock = None, math.inf, False, False
    if not plan.enabled:
        return
    timed, every_n_epochs = isinstance(s.val_check_interval, timedelta), s.check_val_every_n_epoch
    plan.has_clock = timed and ctx.rank == 0
    if not timed and (every_n_epochs is None or (at.epoch + 1) % every_n_epochs == 0):
        plan.every = validation_interval(ctx)
        plan.at_epoch_end = plan.every is None
    plan_next_validation(ctx, due)


def waits_for_end(ctx: RunContext) -> bool:
    """Return True if a validation runs at this epoch's end.

    Either the validation is planned for the end, or the data ended before the batch at which the validation was due.
    Data whose length is not trusted may end before its claimed number of batches.
    """
    plan, batches = ctx.validation, ctx.source.epoch_batches
    if plan.every is None or batches is None or ctx.settings.check_val_every_n_epoch is None:
        return plan.at_epoch_end
    return plan.next_batch <= batches


def validates_now(ctx: RunContext) -> bool:
    """Return True if a planned validation runs right after the current step."""
    plan = ctx.validation
    return plan.enabled and (ctx.position.batch >= plan.next_batch or (ctx.source.share.last and waits_for_end(ctx)))


def plan_next_validation(ctx: RunContext, due: bool | None = None) -> None:
    """Set the batch after which the next validation is due.

    Args:
        ctx: the run.
        due: whether a validation is due at once, as the resumed checkpoint says; None: count the batches.
    """
    every, at = ctx.validation.every, ctx.position
    before = at.earlier_batches if ctx.settings.check_val_every_n_epoch is None else 0
    done = before + at.batch
    due = (every is not None and done % every == 0) if due is None else due
    following = math.inf if every is None else (done // every + 1) * every
    ctx.validation.next_batch = (done if due and at.inside and not at.validated else following) - before


def check_clock(ctx: RunContext) -> None:
    """On the main process, ask all ranks for a validation once the time `val_check_interval` has passed."""
    if time.monotonic() >= ctx.validation.next_time_s:
        assert isinstance(ctx.settings.val_check_interval, timedelta)
        ctx.validation.next_time_s = time.monotonic() + ctx.settings.val_check_interval.total_seconds()
        ctx.triggers.set("validate", "val_check_interval")


def validation_sources(ctx: RunContext) -> Sequence[BatchSource]:
    """Return the validation loaders of this epoch.

    Without validation loaders, the run goes on and does not validate.
    """
    sources = ctx.loaders.validation(ctx.position.epoch)
    ctx.validation.enabled = bool(sources)  # callbacks that wait for a validation must know that there is none
    return sources


def validate(ctx: RunContext) -> None:
    """Run the validation, then agree on the triggers that were set meanwhile."""
    at = ctx.position
    settle(ctx)
    ctx.strategy.average_replicas()
    at.validated = True
    ctx.log.leave("training_step")
    with ctx.clock.within("validation"):
        before = BeforeValidation(ctx)
        ctx.validation.counted_before = before.counted
        sources = validation_sources(ctx)
        if sources and evaluate(ctx, "validate", sources) is None:
            at.validated = False  # the validation stays due: a resumed run runs it again from its start
            before.restore()
        else:
            plan_next_validation(ctx)
        ctx.validation.counted_before = None
    agree_on_triggers(ctx)


class BeforeValidation:
    """State of a run that a validation changes. It is restored if the validation is left before its end.

    A validation does not change weights and optimizers, so they are not kept. Callbacks that count validations keep
    their counts.

    Args:
        ctx: the run.
    """

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx
        self._rng = rng_state()
        self.counted = copy.deepcopy(metric_states_module().metric_states(ctx.module))
        self._metrics = ctx.trainer.metrics.state_dict()
        self._loggers = {key: logger.state_dict() for key, logger in by_class(ctx.trainer.loggers).items()}

    def restore(self) -> None:
        """Restore the state from before the validation.

        Checkpoints that are saved later hold the loggers' states from before the validation.
        """
        metric_states_module().restore_metric_states(self._ctx.module, self.counted)
        self._ctx.trainer.metrics.load_state_dict(self._metrics)
        self._ctx.validation.loggers_before = self._loggers
        set_rng_state(self._rng)


# ---- triggers


def agree_on_triggers(ctx: RunContext) -> None:
    """Wait for all ranks to agree on the triggers set so far, and act on them."""
    act_on(ctx, ctx.triggers.sync())


def act_on(ctx: RunContext, agreed: tuple[Trigger, ...]) -> None:
    """Act on the triggers in `agreed` and on earlier ones (`Ending.deferred`). All ranks call this at the same step."""
    deferred, ctx.ending.deferred = ctx.ending.deferred, []
    # A validation comes last, since the other triggers must not wait for its end.
    for trigger in sorted((*deferred, *agreed), key=lambda one: one.name == "validate"):
        if trigger.name == "stop":
            ctx.ending.waits = is_below_minimum(ctx)
            ctx.trainer._set_stop(True, trigger.reason or ctx.trainer.stop_reason)
        elif trigger.name == "save":
            save_now(ctx, trigger.reason, final=False)
        elif trigger.name == "validate" and ctx.validation.enabled:
            validate(ctx)
        elif trigger.name == "preempted":
            preempt(ctx, trigger)


def save_now(ctx: RunContext, reason: str, final: bool = True) -> Any:
    """Save through the ModelCheckpoint whose `state_key` equals `reason`, else through the first one."""
    savers: dict[str, Any] = {callback.state_key: callback for callback in ctx.callbacks if saves(callback)}
    saver = savers.get(reason, ctx.trainer.checkpoint_callback)
    return None if saver is None else saver.save_now(ctx.trainer, reason, final)


def preempt(ctx: RunContext, trigger: Trigger) -> None:
    """Save and end the run; it can be resumed.

    Raises:
        Preempted: always, if there is a ModelCheckpoint. Without one, KeyboardInterrupt or SystemExit is raised, as the
            signal would have done.
    """
    trainer = ctx.trainer
    if trainer.checkpoint_callback is None:
        # Nothing can be saved, so nothing can be resumed: end as the signal would have done.
        if trigger.reason == "SIGINT":
            raise KeyboardInterrupt
        raise SystemExit(128 + getattr(signal, trigger.reason, signal.SIGTERM))
    began = ctx.position.global_step > 0 or ctx.resumed_reader is not None
    # Before the first step there is nothing to save. Hooks may have drawn random numbers or logged values, but a new
    # start does the same again.
    path = save_now(ctx, trigger.reason) if began else None
    at, s, batches = ctx.position, ctx.settings, ctx.source.num_batches
    epoch = f"epoch {at.epoch + 1}{f'/{s.max_epochs}' if s.max_epochs != -1 else ''}"
    done = f"{epoch}, batch {at.window_batch}{f' of {batches}' if batches is not None else ''}. Saved {path}"
    message = (
        f"Stopped by {trigger.reason or 'the preempted trigger'} (rank {trigger.rank}) at step {at.global_step}: "
        f'{done if began else "nothing to save yet"}. To go on, run it again with ckpt_path="auto".'
    )
    trainer._print(message)
    error = Preempted(message, path)
    # Write the status now, since torchrun sends SIGTERM to the remaining ranks once the first one has ended.
    trainer.stop_reason = trigger.reason
    with suppress(OSError):  # ignore a failure, since the run's end writes the status again, and warns if this fails
        trainer.run_folder.write_status(trainer, error)
    ctx.ending.preempted = True
    raise error
