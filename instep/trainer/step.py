"""The training step: forward, backward, clip, optimizer, scheduler.

`automatic_step` resolves everything once and returns one function that the loop calls per batch. The order of hooks is
Lightning's: the gradients are zeroed between forward and backward of a window's first micro-batch. Several optimizers
step together after one backward. Optional features, such as the check for nan, are guests (`guests/`): this file calls
all guests alike. Manual optimization is in `manual.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from instep.data.plan import gradient_correction, window_scale
from instep.distributed import reduce
from instep.distributed.nested import map_leaves
from instep.errors import HookError, SettingError
from instep.strategies import Strategy
from instep.strategies.gradients import Gradients, parameters_of
from instep.trainer.checks import loss_of
from instep.trainer.context import RunContext
from instep.trainer.guests import Step, StepParts
from instep.trainer.hooks import is_overridden
from instep.trainer.log import metric_states_module
from instep.trainer.module import TrainModule, accepted_arguments
from instep.trainer.optimizers import step_schedulers, wants_closure


def make_parts(ctx: RunContext) -> StepParts:
    """Make the parts that the step begins with, and let the guests (optional features) change them."""
    source, accumulate, origin = ctx.source, ctx.loaders.accumulate, ctx.loaders.window_origin
    full_batches, weight_of_full = source.plan.full_batches(accumulate, origin), 1.0 / accumulate
    ctx.step_parts = parts = StepParts(
        take=counting_once(ctx, resolve_step(ctx, "training_step", "batch", "batch_idx")),
        zero_grad=_zero_grad(ctx),
        weigh=lambda index: weight_of_full if index < full_batches else window_scale(source, index, accumulate, origin),
        full_batches=full_batches,
        weight_of_full=weight_of_full,
    )
    for guest in ctx.guests:
        guest.take(parts)
    return parts


# ---- automatic optimization


def automatic_step(ctx: RunContext) -> Step:
    """Make the function that trains on one batch in automatic optimization."""
    counts = ctx.counts
    counts.in_window, ctx.loaders.in_epoch = 0, True
    module, strategy, at, source, gradient = ctx.module, ctx.strategy, ctx.position, ctx.source, ctx.gradient
    accumulate, origin = ctx.loaders.accumulate, ctx.loaders.window_origin
    closures = [optimizer for optimizer in ctx.optimizers if wants_closure(optimizer)]
    if (most := ctx.loaders.most_accumulated) > 1 and closures:
        raise SettingError(
            f"accumulate_grad_batches={most}: {type(closures[0]).__name__} evaluates the loss within its "
            "step, which cannot be done for the micro-batches before the last. Use a larger batch.",
            field="accumulate_grad_batches",
            got=most,
        )
    parts = make_parts(ctx)
    parts.forward_backward = forward_backward(ctx, parts)
    parts.step_plain = plain_step(ctx)
    for guest in ctx.guests:
        guest.forward_backward(parts)
    train = parts.forward_backward
    prepare, finish = finish_window(ctx, parts)
    by_module = is_overridden(module, "optimizer_step", TrainModule) or closures
    module_step = step_by_module(ctx, train, prepare) if by_module and ctx.optimizers else None
    schedules = [config for config in ctx.schedulers if config.interval == "step"]
    scheduler_hook = module.lr_scheduler_step if is_overridden(module, "lr_scheduler_step", TrainModule) else None
    plateau = any(config.reduce_on_plateau for config in schedules)

    def step(batch: Any, batch_idx: int) -> Any:
        at.validated = False
        gradient.end_of_dataloader = source.share.last
        if accumulate > 1 and (batch_idx + 1 - origin) % accumulate and not source.share.last:
            gradient.sync_gradients = False
            with strategy.no_sync():
                output = train(batch, batch_idx)
            at.batch = batch_idx + 1
            return output
        gradient.sync_gradients = True
        if module_step is not None:
            output, stepped = module_step(batch, batch_idx), True
        else:
            output = train(batch, batch_idx)
            stepped = finish()
        if counts.in_window:
            at.had_loss, counts.in_window = True, 0
        at.batch = at.window_batch = batch_idx + 1
        at.global_step += 1
        if schedules and stepped:
            metrics = ctx.trainer.callback_metrics if plateau else {}
            step_schedulers(schedules, "step", at.global_step, metrics, scheduler_hook)
        return output

    ctx.clock.watch("backward", step, "train")
    ctx.clock.watch("optimizer", step, "finish" if module_step is None else "module_step")
    return finished(ctx, parts, step)


def finished(ctx: RunContext, parts: StepParts, step: Step) -> Step:
    """Let the guests (optional features) change the whole step, and return the changed step."""
    parts.step = step
    for guest in ctx.guests:
        guest.finish(parts)
    return parts.step


def step_of_phases(ctx: RunContext) -> Step:
    """Make the step for a changing `global_batch_size`: each time the size changes, the step is made anew."""
    at, loaders = ctx.position, ctx.loaders
    step, change = automatic_step(ctx), loaders.next_change(at.global_step)

    def step_and_change(batch: Any, batch_idx: int) -> Any:
        nonlocal step, change
        output = step(batch, batch_idx)
        if at.global_step >= change:
            loaders.begin_windows(at.global_step, at.batch)
            step, change = automatic_step(ctx), loaders.next_change(at.global_step)
        return output

    return step_and_change


def forward_backward(ctx: RunContext, parts: StepParts) -> Step:
    """Make the function that runs forward and backward of a micro-batch and returns the output of `training_step`."""
    module, strategy, log, at, counts = ctx.module, ctx.strategy, ctx.log, ctx.position, ctx.counts
    trains, buffer = bool(ctx.optimizers), ctx.log.buffer
    accumulate, origin = ctx.loaders.accumulate, ctx.loaders.window_origin
    training_step, zero_grad, weigh = parts.take, parts.zero_grad, parts.weigh
    full_batches, weight_of_full = parts.full_batches, parts.weight_of_full
    before_backward = (*ctx.hooks["on_before_backward"], *parts.on_loss)
    after_backward = ctx.hooks["on_after_backward"]
    own_backward = module.backward if is_overridden(module, "backward", TrainModule) else None
    backward = strategy.backward if own_backward is None else lambda loss: own_backward(strategy.gradients.scale(loss))
    backward = ctx.profiled(f"[Strategy]{type(strategy).__name__}.backward", backward)
    plain = own_backward is None and strategy.precision.scaler is None and ctx.trainer.profiler.off
    plain = plain and not is_overridden(strategy, "backward", Strategy)
    if not plain or any(ctx.hooks[name] for name in ("on_before_backward", "on_after_backward", "on_before_zero_grad")):
        parts.around.append("hooks, a scaler or a profiler run around the backward")
    strategy.loss_weight = lambda: weigh(at.batch)

    def train(batch: Any, batch_idx: int) -> Any:
        output = training_step(batch, batch_idx)
        if buffer:
            log.drain()
        loss = output if type(output) is Tensor and not (output.is_leaf or output.ndim) else loss_of(output, ctx)
        if not trains:
            return None if loss is None else output
        if accumulate == 1 or (batch_idx - origin) % accumulate == 0:
            zero_grad()
        if loss is None:
            return None
        weight = weight_of_full if batch_idx < full_batches else weigh(batch_idx)
        # A batch of weight 0 only keeps this rank in step with the others: even a nan in its loss must have no effect.
        if weight != 1.0:
            loss = loss * weight if weight else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        for hook in before_backward:
            hook(loss)
        if plain and weight:
            loss.backward()
        elif weight:
            backward(loss)
        else:
            with no_gradients_from(strategy.gradients.leaves()):
                backward(loss)
        for hook in after_backward:
            hook()
        counts.in_window += 1
        return output

    ctx.clock.watch("forward", train, "training_step")
    return train


# ---- the end of an accumulation window


def _zero_grad(ctx: RunContext) -> Callable[[], Any]:
    """Make the function that zeroes the gradients at the beginning of an accumulation window."""
    module, at, hooks = ctx.module, ctx.position, ctx.hooks["on_before_zero_grad"]
    own = is_overridden(module, "optimizer_zero_grad", TrainModule)
    if len(ctx.optimizers) == 1 and not hooks and not own:
        return ctx.optimizers[0].zero_grad

    def zero_grad() -> None:
        for optimizer in ctx.optimizers:
            for hook in hooks:
                hook(optimizer)
            if own:
                module.optimizer_zero_grad(at.epoch, at.batch, optimizer)
            else:
                optimizer.zero_grad()

    return zero_grad


def plain_step(ctx: RunContext) -> Callable[[], Any] | None:
    """Return the step of the only optimizer; None if there are several, or if something wraps the step."""
    gradients = ctx.strategy.gradients
    alone = len(ctx.optimizers) == 1 and ctx.strategy.precision.scaler is None and ctx.trainer.profiler.off
    wrapped = is_overridden(gradients, "step", Gradients) or optimizer_step(ctx) != gradients.step
    return ctx.optimizers[0].step if alone and not wrapped else None


def finish_window(ctx: RunContext, parts: StepParts) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Make the two functions that end an accumulation window.

    Returns:
        The first function unscales, rescales, checks and clips the gradients, for a module that steps the optimizer
        itself. The second function does the same where it is needed, then steps the optimizers, and returns whether
        they stepped.
    """
    strategy, at, source, optimizers, counts = ctx.strategy, ctx.position, ctx.source, ctx.optimizers, ctx.counts
    accumulate, origin, scaler = ctx.loaders.accumulate, ctx.loaders.window_origin, ctx.strategy.precision.scaler
    if not optimizers:
        return lambda: None, lambda: False
    hooks, checks, clip = ctx.hooks["on_before_optimizer_step"], tuple(parts.before_clip), _clip_function(ctx)
    step_optimizer, step_plain = optimizer_step(ctx), parts.step_plain
    must_prepare = bool(scaler is not None or hooks or clip is not None or (accumulate > 1 and source.plan.corrects))
    # The checks must see the gradients of all optimizers before one of them steps.
    must_prepare = must_prepare or (bool(checks) and len(optimizers) > 1)
    # If all batches of an accumulation window were skipped, the optimizers step without gradients. In the following
    # cases they do not step then.
    needs_loss = scaler is not None or parts.needs_loss or is_overridden(strategy.gradients, "step", Gradients)

    def prepare() -> None:
        if needs_loss and not counts.in_window:
            # Without a loss in the accumulation window, only zero the gradients: the module steps each optimizer
            # anyway, and a scaler would refuse to unscale.
            for each in optimizers:
                each.zero_grad()
            return
        strategy.gradients.unscale_together(optimizers)
        rescale = gradient_correction(source, at.batch, accumulate, origin)
        for each in optimizers:
            if rescale != 1.0:
                strategy.gradients.multiply(each, rescale)
            for hook in hooks:
                hook(each)
        for check in checks:
            check(optimizers)
        if clip is not None:
            clip()

    def finish() -> bool:
        if needs_loss and not counts.in_window:
            return True
        if must_prepare:
            prepare()
        if step_plain is not None:
            step_plain()
            return True
        stepped = False
        for each in optimizers:
            step_optimizer(each)
            stepped = stepped or not strategy.gradients.step_was_skipped
        return stepped

    return prepare, finish


def step_by_module(ctx: RunContext, train: Step, prepare: Callable[[], None]) -> Step:
    """Make the step for an overridden `TrainModule.optimizer_step`, or for an optimizer that needs a closure.

    With several optimizers, the closure of the first optimizer runs forward and backward. The closures of the other
    optimizers only return the same loss.
    """
    module, at, counts = ctx.module, ctx.position, ctx.counts
    searches = ctx.world_size > 1 and wants_closure(ctx.optimizers[0])
    first, *others = ctx.wrapped_optimizers

    def step(batch: Any, batch_idx: int) -> Any:
        outputs: list[Any] = []
        before, found = counts.in_window, None

        @torch.enable_grad()  # needed because some optimizers turn gradients off in their `step`
        def closure() -> Any:
            nonlocal found
            counts.in_window = before  # L-BFGS calls `closure` several times, each time for new gradients
            output = train(batch, batch_idx)
            outputs.append(output)
            prepare()
            found = None if output is None else loss_of(output, ctx)
            # L-BFGS needs the same loss on all ranks, or the ranks would evaluate it different numbers of times
            if searches and found is not None:
                weight = ctx.strategy.loss_weight()
                found = reduce(found.detach() * weight if weight else torch.zeros_like(found.detach()))
            return found

        module.optimizer_step(at.epoch, batch_idx, first, closure)
        if not outputs:
            raise HookError(
                f"The closure hasn't been executed: {type(module).__name__}.optimizer_step computed nothing. Call "
                "optimizer_closure() once, or pass it on: optimizer.step(closure=optimizer_closure)."
            )
        for optimizer in others:
            module.optimizer_step(at.epoch, batch_idx, optimizer, lambda: found)
        return outputs[-1]

    ctx.clock.watch("backward", step, "train")
    return step


def optimizer_step(ctx: RunContext) -> Callable[..., Any]:
    """Make the function that steps an optimizer: the strategy's function, changed by the guests."""
    step = ctx.strategy.gradients.step
    for guest in ctx.guests:
        step = guest.step_optimizer(step)
    return ctx.profiled(f"[Strategy]{type(ctx.strategy).__name__}.optimizer_step", step)


def _clip_function(ctx: RunContext) -> Callable[[], object] | None:
    """Make the function that clips the gradients before each step; return None if nothing is clipped.

    If the gradients are clipped by their norm, it is one norm over all parameters that step together. An overridden
    `configure_gradient_clipping` is called once for each optimizer.
    """
    value, algorithm, optimizers = ctx.settings.gradient_clip_val, ctx.settings.gradient_clip_algorithm, ctx.optimizers
    if is_overridden(ctx.module, "configure_gradient_clipping", TrainModule):
        clip_own = ctx.module.configure_gradient_clipping
        return lambda: [clip_own(optimizer, value, algorithm) for optimizer in optimizers]
    if value is None:
        return None
    gradients = ctx.strategy.gradients
    return lambda: gradients.clip([p for each in optimizers for p in parameters_of(each)], value, algorithm)


# ---- parts of steps


@contextmanager
def no_gradients_from(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Make every parameter's gradient zero in a backward within the block, whatever the loss.

    This is for a batch that is replayed with weight 0. Its loss may be nan, and nan times 0 is nan.
    """
    hooks = [p.register_hook(torch.zeros_like) for p in parameters if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def counting_once(ctx: RunContext, training_step: Step) -> Step:
    """Wrap `training_step`, so that the module's metric objects do not count replayed batches."""
    module, log = ctx.module, ctx.log
    if ctx.world_size == 1 or not metric_states_module().metric_objects(module):
        return training_step

    def step(*args: Any) -> Any:
        with metric_states_module().uncounted(module) if log.weight == 0 else nullcontext():
            return training_step(*args)

    return step


def resolve_step(ctx: RunContext, name: str, *offered: str, needed_only: int = 0) -> Step:
    """Return a function that runs a step method under the strategy and precision, and takes all `offered` arguments.

    Args:
        ctx: the run.
        name: name of the method.
        offered, needed_only: as in `accepted_arguments`.
    """
    method = getattr(ctx.module, name)
    count = accepted_arguments(method, offered, needed_only)
    step = ctx.profiled(f"[Strategy]{type(ctx.strategy).__name__}.{name}", ctx.strategy.step_function(name))
    accepted = step if count == len(offered) else lambda *args: step(*args[:count])
    accepted = within(ctx.precision.context(), accepted)
    for guest in ctx.guests:
        accepted = guest.step_method(name, accepted)
    return accepted


def within(context: AbstractContextManager[Any] | None, function: Step) -> Step:
    """Return a function that runs `function` inside the context; return `function` itself if the context is None."""
    if context is None:
        return function

    def run(*args: Any) -> Any:
        with context:
            return function(*args)

    return run


def detached_outputs(output: Any) -> Any:
    """Return the outputs for `on_train_batch_end`, including the loss, detached so that no graph is kept alive."""
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
