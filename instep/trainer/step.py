"""The training step: forward, backward, clip, optimizer, scheduler.

`automatic_step` and `manual_step` resolve everything once and return one function that the loop calls per batch. The
order of hooks is Lightning's: the gradients are zeroed between forward and backward of a window's first micro-batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from instep.data.plan import gradient_correction, window_scale
from instep.distributed.nested import map_leaves
from instep.errors import HookError, SettingError
from instep.strategies import Strategy
from instep.strategies.gradients import Gradients
from instep.trainer.hooks import is_overridden
from instep.trainer.module import TrainModule
from instep.trainer.nonfinite import no_gradients_from
from instep.trainer.optimizers import step_schedulers

if TYPE_CHECKING:
    from instep.trainer.fit_session import FitSession

Step = Callable[..., Any]


def make_step(run: FitSession) -> Step:
    """The function that trains on one batch: `step(batch, batch_idx) -> what training_step returned`."""
    return automatic_step(run) if run.module.automatic_optimization else manual_step(run)


def automatic_step(run: FitSession) -> Step:
    """The step of automatic optimization."""
    module, strategy, at, source, book = run.module, run.strategy, run.position, run.source, run.book
    gradient, gradients = run.state.gradient, strategy.gradients
    training_step = within(strategy.precision.context(), run.step_function("training_step", "batch", "batch_idx"))
    optimizer: Optimizer | None = run.optimizers[0] if run.optimizers else None
    schedules = [config for config in run.schedulers if config.interval == "step"]
    scheduler_hook = module.lr_scheduler_step if is_overridden(module, "lr_scheduler_step", TrainModule) else None
    clip = run.clip_function(optimizer)
    before_zero_grad, before_backward = run.hooks["on_before_zero_grad"], run.hooks["on_before_backward"]
    after_backward, before_step = run.hooks["on_after_backward"], run.hooks["on_before_optimizer_step"]
    own_zero_grad = is_overridden(module, "optimizer_zero_grad", TrainModule)
    own_backward = module.backward if is_overridden(module, "backward", TrainModule) else None
    own_step = is_overridden(module, "optimizer_step", TrainModule) or _wants_closure(optimizer)
    scaler, guard, step_optimizer = strategy.precision.scaler, run.guard, run.step_optimizer
    if guard is not None:
        guard.forget_losses()  # of a window that the last epoch left unfinished
        before_backward = (*before_backward, guard.note_loss)
    plain_backward = own_backward is None and scaler is None and not is_overridden(strategy, "backward", Strategy)
    plain_step = scaler is None and guard is None and not is_overridden(gradients, "step", Gradients)
    plateau = any(config.reduce_on_plateau for config in schedules)
    accumulate = run.accumulate
    if accumulate > 1 and _wants_closure(optimizer):
        raise SettingError(
            f"accumulate_grad_batches={accumulate}: {type(optimizer).__name__} evaluates the loss several times in a "
            "step, which cannot be done for the micro-batches before the last. Use a larger batch.",
            field="accumulate_grad_batches",
            got=accumulate,
        )
    full_batches = source.plan.full_batches(accumulate)
    weight_of_full = 1.0 / accumulate
    strategy.loss_weight = lambda: window_scale(source, at.batch, accumulate)
    buffer = book.buffer
    opened = 0  # micro-batches in the open window that gave gradients

    def forward_backward(batch: Any, batch_idx: int) -> Any:
        nonlocal opened
        output = training_step(batch, batch_idx)
        if buffer:
            book.drain()
        loss = output if type(output) is Tensor and output.requires_grad and not output.ndim else _loss_of(output, run)
        if loss is None:
            return None
        weight = weight_of_full if batch_idx < full_batches else window_scale(source, batch_idx, accumulate)
        if opened == 0 and optimizer is not None:
            for hook in before_zero_grad:
                hook(optimizer)
            if own_zero_grad:
                module.optimizer_zero_grad(at.epoch, batch_idx, optimizer)
            else:
                optimizer.zero_grad()
        if optimizer is None:
            return output
        if weight != 1.0:
            if weight == 0.0:
                replay(loss)
                opened += 1
                return output
            loss = loss * weight
        for hook in before_backward:
            hook(loss)
        if plain_backward:
            loss.backward()
        elif own_backward is not None:
            own_backward(gradients.scale(loss))
        else:
            strategy.backward(loss)
        for hook in after_backward:
            hook()
        opened += 1
        return output

    def replay(loss: Tensor) -> None:
        """A batch of weight 0, run to keep step with the other ranks: nothing comes of it, not even of a nan."""
        loss = loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        for hook in before_backward:
            hook(loss)
        with no_gradients_from(gradients.leaves()):
            own_backward(gradients.scale(loss)) if own_backward is not None else strategy.backward(loss)
        for hook in after_backward:
            hook()

    def before_optimizer() -> None:
        assert optimizer is not None
        gradients.unscale(optimizer)
        correction = gradient_correction(source, at.batch, accumulate)
        if correction != 1.0:
            gradients.multiply(optimizer, correction)
        for hook in before_step:
            hook(optimizer)
        if guard is not None:
            guard.look(optimizer)
        if clip is not None:
            clip()

    must_prepare = bool(
        scaler is not None or before_step or clip is not None or (accumulate > 1 and not source.plan.exact)
    )

    # ------------------------------------------------------------------ the step
    def step(batch: Any, batch_idx: int) -> Any:
        nonlocal opened
        at.validated = False
        gradient.end_of_dataloader = source.share.last
        if accumulate > 1 and (batch_idx + 1) % accumulate and not source.share.last:
            gradient.sync_gradients = False
            with strategy.no_sync():
                output = forward_backward(batch, batch_idx)
            at.batch = batch_idx + 1
            return output
        gradient.sync_gradients = True
        stepped = True
        if own_step and optimizer is not None:
            output = run_own_step(batch, batch_idx)
        else:
            output = forward_backward(batch, batch_idx)
            if not opened or optimizer is None:
                stepped = False  # training_step returned None for the whole window
            else:
                if must_prepare:
                    before_optimizer()
                if plain_step:
                    optimizer.step()
                else:
                    step_optimizer(optimizer)
                    stepped = not gradients.step_was_skipped
        opened = 0
        at.batch = at.window_batch = batch_idx + 1
        at.global_step += 1
        if schedules and stepped:
            metrics = run.trainer.callback_metrics if plateau else {}
            step_schedulers(schedules, "step", at.global_step, metrics, scheduler_hook)
        return output

    # ------------------------------------------------------------------

    def run_own_step(batch: Any, batch_idx: int) -> Any:
        """`TrainModule.optimizer_step` is overridden, or the optimizer needs a closure."""
        outputs: list[Any] = []
        before = opened

        def closure() -> Any:
            nonlocal opened
            opened = before  # L-BFGS asks several times: each time the gradients are made anew
            output = forward_backward(batch, batch_idx)
            outputs.append(output)
            if opened:
                before_optimizer()
            elif optimizer is not None:
                optimizer.zero_grad()  # nothing to step with: not the last window's gradients either
            return None if output is None else _loss_of(output, run)

        module.optimizer_step(at.epoch, batch_idx, run.trainer._wrapped_optimizers[0], closure)
        if not outputs:
            raise HookError(
                f"{type(module).__name__}.optimizer_step did not run its closure, so nothing was computed. Call "
                "optimizer_closure() once, or pass it on: optimizer.step(closure=optimizer_closure)."
            )
        return outputs[-1]

    return step


def manual_step(run: FitSession) -> Step:
    """The step of manual optimization: the module does everything; a batch that stepped an optimizer counts."""
    strategy, at, source, book = run.strategy, run.position, run.source, run.book
    gradient = run.state.gradient
    training_step = within(strategy.precision.context(), run.step_function("training_step", "batch", "batch_idx"))

    def step(batch: Any, batch_idx: int) -> Any:
        at.validated = False
        gradient.end_of_dataloader = source.share.last
        run.manual_steps = 0
        output = training_step(batch, batch_idx)
        if book.buffer:
            book.drain()
        at.batch = at.window_batch = batch_idx + 1
        if run.manual_steps:
            at.global_step += 1
        return output

    return step


def within(context: AbstractContextManager[Any] | None, function: Step) -> Step:
    """`function`, run inside the context each time; the function itself where there is none."""
    if context is None:
        return function

    def run(*args: Any) -> Any:
        with context:
            return function(*args)

    return run


def _loss_of(output: Any, run: FitSession) -> Tensor | None:
    """The loss in what `training_step` returned."""
    loss = output.get("loss") if isinstance(output, dict) else output
    if loss is None:
        if isinstance(output, dict):
            raise HookError(f"training_step returned a dict without 'loss'; its keys are {sorted(map(str, output))}")
        if run.world_size > 1:
            raise HookError(
                "training_step returned None to skip a batch. With several processes the others would wait for this "
                "rank's gradients: return a loss multiplied by 0 instead."
            )
        run.note_no_loss()
        warnings.warn("training_step returned None: the batch is skipped. Is a `return loss` missing?", stacklevel=2)
        return None
    if not isinstance(loss, Tensor):
        raise HookError(
            f"training_step returned {type(loss).__name__}; return the loss as a tensor, a dict with it under 'loss', "
            "or None to skip the batch."
        )
    if loss.numel() != 1:
        raise HookError(f"training_step returned a loss of shape {tuple(loss.shape)}; reduce it to one number")
    if run.optimizers and not loss.requires_grad:
        raise HookError(
            "training_step returned a loss without a graph (requires_grad is False). Compute it from the module's "
            "parameters, without .detach(), .item() or torch.no_grad()."
        )
    return loss


def detached_outputs(output: Any) -> Any:
    """What `on_train_batch_end` gets: a dict with the loss, everything detached, so that no graph is kept alive."""
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)


def _wants_closure(optimizer: Optimizer | None) -> bool:
    """Whether the optimizer evaluates the loss several times in a step, as L-BFGS does."""
    return type(optimizer).__name__ == "LBFGS"
