"""Manual optimization: the module calls backward and steps its optimizers; the Trainer calls hooks and counts steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from instep.trainer.checks import check_graph
from instep.trainer.context import RunContext
from instep.trainer.guests import Step
from instep.trainer.hooks import is_overridden
from instep.trainer.module import TrainModule
from instep.trainer.step import finished, make_parts, no_gradients_from, optimizer_step


def manual_step(ctx: RunContext) -> Step:
    """Make the step of manual optimization: a batch counts as a step if the module stepped an optimizer in it."""
    at, source, log, gradient, counts = ctx.position, ctx.source, ctx.log, ctx.gradient, ctx.counts
    parts = make_parts(ctx)
    parts.around.append("the module optimizes by itself (automatic_optimization=False)")
    training_step = parts.forward_backward = parts.take
    for guest in ctx.guests:
        guest.forward_backward(parts)

    def step(batch: Any, batch_idx: int) -> Any:
        at.validated = False
        gradient.end_of_dataloader = source.share.last
        counts.of_batch = 0
        output = training_step(batch, batch_idx)
        if log.buffer:
            log.drain()
        at.batch = at.window_batch = batch_idx + 1
        if counts.of_batch:
            at.global_step += 1
        return output

    ctx.clock.watch("forward", step, "training_step")
    return finished(ctx, parts, step)


def manual_optimizer_step(ctx: RunContext) -> Callable[..., Any]:
    """Make the function that `optimizer.step()` calls in manual optimization."""
    step_optimizer, counts = optimizer_step(ctx), ctx.counts

    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        counts.of_batch += 1
        hooks, losses = ctx.hooks["on_before_optimizer_step"], list[Any]()

        def compute() -> Any:
            losses.append(closure and closure())
            for hook in hooks:
                ctx.strategy.gradients.unscale(optimizer)
                hook(optimizer)
            return losses[-1]

        if closure is None:
            compute()
        step_optimizer(optimizer, closure and compute, **kwargs)
        return losses[0] if losses else None

    ctx.clock.watch("optimizer", step, "step_optimizer")
    return step


def manual_backward(ctx: RunContext, loss: Tensor, *args: Any, **kwargs: Any) -> None:
    """Backpropagate a loss in manual optimization, as `TrainModule.manual_backward` describes."""
    strategy, replayed = ctx.strategy, ctx.log.weight == 0
    if loss.is_leaf and not is_overridden(ctx.module, "backward", TrainModule):
        check_graph(ctx, loss, "self.manual_backward got a loss")
    for look in () if replayed else ctx.step_parts.on_loss:
        look(loss)
    strategy.prepare_backward(loss)
    loss = strategy.gradients.scale(loss)
    for hook in ctx.hooks["on_before_backward"]:
        hook(loss)
    with no_gradients_from(strategy.gradients.leaves()) if replayed else nullcontext():
        ctx.module.backward(loss, *args, **kwargs)
    for hook in ctx.hooks["on_after_backward"]:
        hook()
