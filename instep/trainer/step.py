"""The training step: forward, backward, clip, optimizer, scheduler.

`automatic_step` and `manual_step` resolve everything once and return one function that the loop calls per batch. The
order of hooks is Lightning's: the gradients are zeroed between forward and backward of a window's first micro-batch.

Several optimizers step together, from one backward.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from instep.data.plan import gradient_correction, window_scale
from instep.distributed import reduce
from instep.distributed.nested import map_leaves
from instep.errors import HookError, SettingError
from instep.strategies import Strategy
from instep.strategies.gradients import Gradients, parameters_of
from instep.trainer.context import RunContext
from instep.trainer.hooks import is_overridden
from instep.trainer.log import metric_room
from instep.trainer.module import TrainModule, accepted_arguments, takes_batches
from instep.trainer.optimizers import step_schedulers, wants_closure
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.compile import CompileConfig

Step = Callable[..., Any]


def make_step(ctx: RunContext) -> Step:
    """Make the function that trains on one batch: `step(batch, batch_idx) -> what training_step returned`."""
    if not ctx.module.automatic_optimization:
        step = manual_step(ctx)
    else:
        step = automatic_step(ctx) if ctx.loaders.phases is None else step_of_phases(ctx)
    if takes_batches(ctx.module.training_step):
        from instep.data.taken import count_taken  # late: few steps take their batches

        step = count_taken(ctx, step)
    if ctx.settings.gc_every_n_steps is not None:
        step = collecting_garbage(ctx, step, ctx.settings.gc_every_n_steps)
    return ctx.profiled("run_training_batch", step)


def collecting_garbage(ctx: RunContext, step: Step, every: int) -> Step:
    """Collect garbage after every so many optimizer steps, the same on all ranks, and leave Python's own times out.

    Python collects when enough objects were made, which differs from rank to rank: each time all wait for one.
    """
    at = ctx.position
    if gc.isenabled():
        gc.disable()
        ctx.undo.callback(gc.enable)

    def run(batch: Any, batch_idx: int) -> Any:
        before = at.global_step
        output = step(batch, batch_idx)
        if at.global_step // every > before // every:
            gc.collect(1)  # what steps leave; the oldest generation, which takes long, waits for the end of the run
        return output

    return run


# ---- automatic optimization


def automatic_step(ctx: RunContext) -> Step:
    """Make the step of automatic optimization."""
    if ctx.guard is not None:
        ctx.guard.forget_losses()  # of a window that the last epoch left unfinished
    ctx.window_count, ctx.loaders.in_epoch = 0, True
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
    train = forward_backward(ctx)
    prepare, finish = finish_window(ctx)
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
        ctx.window_count = 0
        at.batch = at.window_batch = batch_idx + 1
        at.global_step += 1
        if schedules and stepped:
            metrics = ctx.trainer.callback_metrics if plateau else {}
            step_schedulers(schedules, "step", at.global_step, metrics, scheduler_hook)
        return output

    ctx.clock.watch("backward", step, "train")
    ctx.clock.watch("optimizer", step, "finish" if module_step is None else "module_step")
    return step


def step_of_phases(ctx: RunContext) -> Step:
    """Make the step where `global_batch_size` changes: at the end of an optimizer window, for the next one."""
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


def forward_backward(ctx: RunContext) -> Step:
    """Make the function that runs forward and backward of one micro-batch; it returns what `training_step` did."""
    module, strategy, at, source, log, guard = ctx.module, ctx.strategy, ctx.position, ctx.source, ctx.log, ctx.guard
    trains, buffer = bool(ctx.optimizers), ctx.log.buffer
    accumulate, origin = ctx.loaders.accumulate, ctx.loaders.window_origin
    training_step = counting_once(ctx, resolve_step(ctx, "training_step", "batch", "batch_idx"))
    before_backward, after_backward = ctx.hooks["on_before_backward"], ctx.hooks["on_after_backward"]
    if guard is not None:
        before_backward = (*before_backward, guard.note_loss)
    zero_grad = _zero_grad(ctx)
    own_backward = module.backward if is_overridden(module, "backward", TrainModule) else None
    backward = strategy.backward if own_backward is None else lambda loss: own_backward(strategy.gradients.scale(loss))
    backward = ctx.profiled(f"[Strategy]{type(strategy).__name__}.backward", backward)
    plain = own_backward is None and strategy.precision.scaler is None and ctx.trainer.profiler.off
    plain = plain and not is_overridden(strategy, "backward", Strategy)
    full_batches, weight_of_full = source.plan.full_batches(accumulate, origin), 1.0 / accumulate
    scale: Callable[..., float] = window_scale
    if takes_batches(module.training_step):
        from instep.data.taken import weight_of_taken  # late: as above

        full_batches, scale = 0, weight_of_taken(ctx)
    strategy.loss_weight = lambda: scale(source, at.batch, accumulate, origin)

    def train(batch: Any, batch_idx: int) -> Any:
        output = training_step(batch, batch_idx)
        if buffer:
            log.drain()
        loss = output if type(output) is Tensor and output.requires_grad and not output.ndim else _loss_of(output, ctx)
        if not trains:
            return None if loss is None else output
        if accumulate == 1 or (batch_idx - origin) % accumulate == 0:
            zero_grad()
        if loss is None:
            return None
        weight = weight_of_full if batch_idx < full_batches else scale(source, batch_idx, accumulate, origin)
        if weight != 1.0:  # 0: run to keep step with the other ranks, and nothing comes of it, not even of a nan
            loss = loss * weight if weight else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        for hook in before_backward:
            hook(loss)
        if plain and weight:
            loss.backward()
        elif weight:
            backward(loss)
        else:
            with _no_gradients_from(strategy.gradients.leaves()):
                backward(loss)
        for hook in after_backward:
            hook()
        ctx.window_count += 1
        return output

    if trains and _wants_one_graph(ctx):
        around = bool(not plain or before_backward or after_backward or ctx.hooks["on_before_zero_grad"])
        if not (why := _why_two_graphs(ctx, around)):
            if ctx.settings.cuda_graphs:
                return _recorded(ctx, training_step, full_batches, train)
            weigh = lambda index: weight_of_full if index < full_batches else scale(source, index, accumulate, origin)  # noqa: E731
            return _compiled(ctx, training_step, zero_grad, weigh, train)
        _warn_two_graphs(ctx, why)

    ctx.clock.watch("forward", train, "training_step")
    return train


# ---- forward and backward as one graph, compiled or recorded


def _compiles_step(ctx: RunContext) -> CompileConfig | None:
    """Return how the whole step is compiled; None where it is not."""
    config = ctx.settings.compile
    return config if config is not None and config.scope == "step" else None


def _wants_one_graph(ctx: RunContext) -> bool:
    """Tell whether the settings ask for `cuda_graphs=True` or `compile="step"`; they refuse both at once."""
    return ctx.settings.cuda_graphs or _compiles_step(ctx) is not None


def _why_two_graphs(ctx: RunContext, around: bool) -> str:
    """Say why forward and backward cannot be one graph; "" where they can be.

    Args:
        ctx: the run.
        around: whether hooks, a guard, a scaler or a profiler run around the backward.
    """
    from instep.compile import why_no_backward_in_graph  # late: few runs are compiled or recorded
    from instep.cuda_graphs import recorder_for

    module, strategy, records = ctx.module, ctx.strategy, ctx.settings.cuda_graphs
    own_step = is_overridden(module, "optimizer_step", TrainModule) or any(map(wants_closure, ctx.optimizers))
    return (
        f"accelerator={ctx.device.type!r} has no CUDA graphs"
        if records and recorder_for(ctx.device) is None
        else "hooks, a guard, a scaler or a profiler run around the backward"
        if around
        else "the step takes batches by itself"
        if takes_batches(module.training_step)
        else f"strategy={strategy.name!r} works around the backward"
        if not strategy.backward_fits_in_graph
        else "accumulate_grad_batches is more than 1"
        if records and ctx.loaders.most_accumulated > 1
        else "the module or a closure steps the optimizer"
        if records and own_step
        else ""
        if records
        else why_no_backward_in_graph()
    )


def _warn_two_graphs(ctx: RunContext, why: str) -> None:
    what = 'compile="step": forward and backward are two graphs'
    _warn_once(ctx, f"{'cuda_graphs=True has no effect' if ctx.settings.cuda_graphs else what}, since {why}.")


def _warn_once(ctx: RunContext, text: str) -> None:
    """Warn on the first rank, once in a run: each epoch makes its step anew."""
    if text not in ctx.said:
        ctx.said.add(text)
        if ctx.rank == 0:
            warn_user(text)


def _recorded(ctx: RunContext, training_step: Step, full_batches: int, train: Step) -> Step:
    """Make the function that replays forward, loss and backward of each of the full batches as one CUDA graph."""
    from instep.cuda_graphs import CapturedStep, recorder_for, without_graph  # late: few runs have them

    log, buffer = ctx.log, ctx.log.buffer
    if ctx.captured_step is None and (recorder := recorder_for(ctx.device)) is not None:  # else of an earlier epoch
        ctx.captured_step = CapturedStep(ctx.module, training_step, buffer, recorder, ctx.device)
    captured = ctx.captured_step
    assert captured is not None

    def normal(batch: Any, batch_idx: int) -> Any:
        return without_graph(train(batch, batch_idx))

    def train_recorded(batch: Any, batch_idx: int) -> Any:
        if batch_idx >= full_batches:
            captured.replayed = False
            return normal(batch, batch_idx)
        output = captured(batch, batch_idx, normal)
        if captured.replayed:  # else `normal` did the rest too
            if buffer:
                log.drain()
            ctx.window_count += 1
        return output

    return train_recorded


def _compiled(
    ctx: RunContext, training_step: Step, zero_grad: Callable[[], Any], weigh: Callable[[int], float], train: Step
) -> Step:
    """Make the function that runs forward, loss and backward of one micro-batch as one compiled graph.

    The gradients are zeroed before the forward here, where no hook could see the difference.
    """
    log, buffer = ctx.log, ctx.log.buffer
    if ctx.compiled_step is None:  # else of an earlier epoch: torch would compile a new one anew
        from instep.compile import backward_in_graph, compile_forward_backward  # late: as above

        ctx.undo.enter_context(backward_in_graph())
        ctx.compiled_step = compile_forward_backward(training_step, ctx.settings.compile)
    forward_backward = ctx.compiled_step

    def train_compiled(batch: Any, batch_idx: int) -> Any:
        weight = weigh(batch_idx)
        if not weight:  # what a nan in it would do to the sum is for the plain way
            return train(batch, batch_idx)
        if ctx.window_count == 0:
            zero_grad()
        output, done = forward_backward(batch, batch_idx, weight)
        if buffer:
            log.drain()
        if not done:
            return _loss_of(output, ctx)  # None, or an error
        ctx.window_count += 1
        return output

    return train_compiled


def _graph_of_step(ctx: RunContext, optimizer: Optimizer, plain: bool) -> Callable[[], Any]:
    """Return an optimizer's step: compiled or recorded, as forward and backward are; else its own, and say why.

    Args:
        ctx: the run.
        optimizer: of the run.
        plain: whether nothing works around its step.
    """
    scheduled = any(each.scheduler.optimizer is optimizer for each in ctx.schedulers)
    worked_around = "a scaler, a guard, a profiler, another optimizer or the strategy works around it"
    if (config := _compiles_step(ctx)) is not None and config.optimizer:
        from instep.compile import compile_optimizer_step, why_not_compiled  # late: as above

        why = why_not_compiled(optimizer, scheduled) if plain else worked_around
        if not why:
            return compile_optimizer_step(optimizer, config)
        _warn_once(ctx, f'compile="step": the step of {type(optimizer).__name__} is not compiled, since {why}.')
    elif (captured := ctx.captured_step) is not None:
        from instep.cuda_graphs import CapturedOptimizer, runs_without, why_not_captured  # late: as above

        why = why_not_captured(optimizer, scheduled) if plain else worked_around
        if not why:
            captured.optimizer = captured.optimizer or CapturedOptimizer(optimizer, captured)
            return captured.optimizer
        _warn_once(ctx, runs_without(optimizer, why))
    return optimizer.step


# ---- the end of an optimizer window


def _zero_grad(ctx: RunContext) -> Callable[[], Any]:
    """Make the function that zeroes the gradients where a window begins."""
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


def finish_window(ctx: RunContext) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Make the two functions that end an optimizer window.

    Returns:
        The one that unscales, rescales, checks and clips the gradients, for a module that steps the optimizer itself;
        and the one that does this where it is needed, steps the optimizers, and returns whether they stepped.
    """
    strategy, at, source, guard, optimizers = ctx.strategy, ctx.position, ctx.source, ctx.guard, ctx.optimizers
    accumulate, origin, scaler = ctx.loaders.accumulate, ctx.loaders.window_origin, ctx.strategy.precision.scaler
    if not optimizers:
        return lambda: None, lambda: False
    hooks, clip = ctx.hooks["on_before_optimizer_step"], _clip_function(ctx, optimizers)
    step_optimizer, optimizer = optimizer_step(ctx), optimizers[0]
    plain = scaler is None and guard is None and not is_overridden(strategy.gradients, "step", Gradients)
    plain = plain and ctx.trainer.profiler.off and len(optimizers) == 1
    step_plain = _graph_of_step(ctx, optimizer, plain)
    must_prepare = bool(scaler is not None or hooks or clip is not None or (accumulate > 1 and source.plan.corrects))
    must_prepare = must_prepare or (guard is not None and len(optimizers) > 1)  # it looks at all before one steps
    # Where all batches of a window were skipped, the optimizers step without a gradient; these cannot.
    needs_loss = scaler is not None or guard is not None or is_overridden(strategy.gradients, "step", Gradients)

    def prepare() -> None:
        if needs_loss and not ctx.window_count:
            return
        strategy.gradients.unscale_together(optimizers)
        rescale = gradient_correction(source, at.batch, accumulate, origin)
        for each in optimizers:
            if rescale != 1.0:
                strategy.gradients.multiply(each, rescale)
            for hook in hooks:
                hook(each)
        if guard is not None:
            guard.check(optimizers)
        if clip is not None:
            clip()

    def finish() -> bool:
        if needs_loss and not ctx.window_count:
            return True
        if must_prepare:
            prepare()
        if plain:
            step_plain()
            return True
        stepped = False
        for each in optimizers:
            step_optimizer(each)
            stepped = stepped or not strategy.gradients.step_was_skipped
        return stepped

    return prepare, finish


def step_by_module(ctx: RunContext, train: Step, prepare: Callable[[], None]) -> Step:
    """Make the step where `TrainModule.optimizer_step` is overridden, or the optimizer needs a closure.

    Of several optimizers the first one's closure computes; those after it get the loss that it found.
    """
    module, at = ctx.module, ctx.position
    searches = ctx.world_size > 1 and wants_closure(ctx.optimizers[0])
    first, *others = ctx.wrapped_optimizers

    def step(batch: Any, batch_idx: int) -> Any:
        outputs: list[Any] = []
        before, found = ctx.window_count, None

        @torch.enable_grad()  # some optimizers turn gradients off around their step
        def closure() -> Any:
            nonlocal found
            ctx.window_count = before  # L-BFGS asks several times: each time the gradients are made anew
            output = train(batch, batch_idx)
            outputs.append(output)
            prepare()
            found = None if output is None else _loss_of(output, ctx)
            if searches and found is not None:  # by its own loss each rank would evaluate another number of times
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
    """Choose the function that steps an optimizer: the strategy's, or the guard's, which checks values first."""
    step = ctx.strategy.gradients.step if ctx.guard is None else ctx.guard.optimizer_step
    return ctx.profiled(f"[Strategy]{type(ctx.strategy).__name__}.optimizer_step", step)


def _clip_function(ctx: RunContext, optimizers: Sequence[Optimizer]) -> Callable[[], object] | None:
    """Make the function that clips before each step; None where nothing clips.

    The norm is that of all parameters that step together; the module's own hook is called for each optimizer.
    """
    value, algorithm = ctx.settings.gradient_clip_val, ctx.settings.gradient_clip_algorithm
    if is_overridden(ctx.module, "configure_gradient_clipping", TrainModule):
        clip_own = ctx.module.configure_gradient_clipping
        return lambda: [clip_own(optimizer, value, algorithm) for optimizer in optimizers]
    if value is None:
        return None
    gradients = ctx.strategy.gradients
    return lambda: gradients.clip(_parameters(optimizers), value, algorithm)


def _parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [p for optimizer in optimizers for p in parameters_of(optimizer)]


# ---- manual optimization


def manual_step(ctx: RunContext) -> Step:
    """Make the step of manual optimization: the module does everything; a batch that stepped an optimizer counts."""
    at, source, log, gradient = ctx.position, ctx.source, ctx.log, ctx.gradient
    training_step = counting_once(ctx, resolve_step(ctx, "training_step", "batch", "batch_idx"))
    if _wants_one_graph(ctx):
        _warn_two_graphs(ctx, "the module optimizes by itself (automatic_optimization=False)")

    def step(batch: Any, batch_idx: int) -> Any:
        at.validated = False
        gradient.end_of_dataloader = source.share.last
        ctx.manual_steps = 0
        output = training_step(batch, batch_idx)
        if log.buffer:
            log.drain()
        at.batch = at.window_batch = batch_idx + 1
        if ctx.manual_steps:
            at.global_step += 1
        return output

    ctx.clock.watch("forward", step, "training_step")
    return step


def manual_optimizer_step(ctx: RunContext) -> Callable[..., Any]:
    """Make the function behind `optimizer.step()` of manual optimization."""
    step_optimizer = optimizer_step(ctx)

    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        ctx.manual_steps += 1
        hooks = ctx.hooks["on_before_optimizer_step"]
        if hooks:
            ctx.strategy.gradients.unscale(optimizer)
            for hook in hooks:
                hook(optimizer)
        return step_optimizer(optimizer, closure, **kwargs)

    ctx.clock.watch("optimizer", step, "step_optimizer")
    return step


def manual_backward(ctx: RunContext, loss: Tensor, *args: Any, **kwargs: Any) -> None:
    """Backpropagate as `TrainModule.manual_backward` says."""
    strategy, replayed = ctx.strategy, ctx.log.weight == 0
    if not loss.requires_grad and not is_overridden(ctx.module, "backward", TrainModule):
        raise _without_graph(ctx, "self.manual_backward got a loss")
    if ctx.guard is not None and not replayed:
        ctx.guard.note_loss(loss)
    strategy.prepare_backward(loss)
    loss = strategy.gradients.scale(loss)
    for hook in ctx.hooks["on_before_backward"]:
        hook(loss)
    with _no_gradients_from(strategy.gradients.leaves()) if replayed else nullcontext():
        ctx.module.backward(loss, *args, **kwargs)
    for hook in ctx.hooks["on_after_backward"]:
        hook()


# ---- both


@contextmanager
def _no_gradients_from(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Make every parameter's gradient zero in a backward within the block, whatever the loss.

    For a batch that is replayed with weight 0: its loss may be nan, and nan times 0 is nan.
    """
    hooks = [p.register_hook(torch.zeros_like) for p in parameters if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def counting_once(ctx: RunContext, training_step: Step) -> Step:
    """Leave batches that are replayed out of what the module's metric objects count; the step itself without these."""
    module, log = ctx.module, ctx.log
    if ctx.world_size == 1 or not metric_room().metric_objects(module):
        return training_step

    def step(*args: Any) -> Any:
        with metric_room().uncounted(module) if log.weight == 0 else nullcontext():
            return training_step(*args)

    return step


def resolve_step(ctx: RunContext, name: str, *offered: str, needed_only: int = 0) -> Step:
    """Resolve a step method through strategy and precision; the result takes all `offered` arguments.

    Args:
        ctx: the run.
        name: the method.
        offered, needed_only: as in `accepted_arguments`.
    """
    method = getattr(ctx.module, name)
    takes = takes_batches(method)
    offered = ("dataloader_iter",) if takes else offered
    count = accepted_arguments(method, offered, needed_only)
    step = ctx.profiled(f"[Strategy]{type(ctx.strategy).__name__}.{name}", ctx.strategy.step_function(name))
    accepted = step if count == len(offered) else lambda *args: step(*args[:count])
    accepted = within(ctx.precision.context(), accepted)
    if not takes:
        return accepted
    from instep.data.taken import run_taking  # late: as above

    return run_taking(ctx, accepted, trains=name == "training_step")


def within(context: AbstractContextManager[Any] | None, function: Step) -> Step:
    """`function`, run inside the context each time; the function itself where there is none."""
    if context is None:
        return function

    def run(*args: Any) -> Any:
        with context:
            return function(*args)

    return run


def _loss_of(output: Any, ctx: RunContext) -> Tensor | None:
    """Check the output of `training_step`, and return its loss; None where the batch is skipped."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if loss is None:
        if isinstance(output, Mapping):
            raise HookError(
                "training_step returned a dict, in which the 'loss' key needs to be present; its keys are "
                f"{sorted(map(str, output))}"
            )
        if ctx.world_size > 1:
            raise HookError(
                "training_step returned None to skip a batch. With several processes the others would wait for this "
                "rank's gradients: return a loss multiplied by 0 instead."
            )
        place = ctx.position.epoch, ctx.position.batch
        ctx.position.batches_without_loss += place != ctx.last_without_loss  # a closure may return None several times
        ctx.last_without_loss = place
        warn_user("training_step returned None: the batch is skipped. Is a `return loss` missing?")
        return None
    if not isinstance(loss, Tensor):
        raise HookError(
            f"training_step returned {type(loss).__name__}. It must return a Tensor, a dict, or None: the loss, a dict "
            "with the loss under 'loss', or None to skip the batch."
        )
    if loss.numel() != 1:
        raise HookError(f"training_step returned a loss of shape {tuple(loss.shape)}; reduce it to one number")
    if ctx.optimizers and not loss.requires_grad:
        raise _without_graph(ctx, "training_step returned a loss")
    return loss


def _without_graph(ctx: RunContext, what: str) -> HookError:
    """Make the error for a loss that depends on nothing that is trained."""
    from instep.utils.trainable import why_no_graph  # late: only an error needs it

    why = why_no_graph([ctx.module], _parameters(ctx.optimizers))
    return HookError(f"{what} without a graph (requires_grad is False): {why}.")


def detached_outputs(output: Any) -> Any:
    """Return the outputs for `on_train_batch_end`, with the loss; detached, so that no graph is kept alive."""
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
