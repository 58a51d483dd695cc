"""Forward and backward as one graph: compiled by `compile="step"`, or recorded by `cuda_graphs=True`.

The settings refuse the two options together. If the step cannot be one graph, it runs as usual, and a warning says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from instep import cuda_graphs
from instep.compile import CompileConfig
from instep.distributed.nested import map_leaves
from instep.trainer.checks import loss_of
from instep.trainer.context import RunContext
from instep.trainer.guests import Step, StepGuest, StepParts
from instep.trainer.hooks import is_overridden
from instep.trainer.module import TrainModule
from instep.trainer.optimizers import wants_closure
from instep.utils.warn import warn_user


class OneGraph(StepGuest):
    """Feature (guest) that replaces forward and backward by one graph, and the optimizer's step by another graph."""

    def __init__(self, ctx: RunContext) -> None:
        super().__init__(ctx)
        # texts of the warnings given so far; each epoch makes its step anew, and would give them again
        self._warned: set[str] = set()
        self.captured: cuda_graphs.CapturedStep | None = None
        self._compiled: Callable[..., Any] | None = None
        if ctx.optimizers and getattr(ctx.settings.compile, "optimizer", False):
            ctx.exit_stack.callback(forget_code, ctx.optimizers[0].step)

    def forward_backward(self, parts: StepParts) -> None:
        """Replace forward and backward by one graph, where that is possible."""
        ctx, records = self.ctx, self.ctx.settings.cuda_graphs
        if not ctx.optimizers:
            return
        recorder = cuda_graphs.recorder_for(ctx.device) if records else None
        if why := self._why_two_graphs(parts, recorder):
            two = 'compile="step": forward and backward are two graphs'
            self._warn_once(f"{'cuda_graphs=True has no effect' if records else two}, since {why}.")
        elif recorder is not None:
            parts.forward_backward = self._recorded(parts, recorder)
        else:
            parts.forward_backward = self._compiled_step(parts)
        if ctx.module.automatic_optimization:
            parts.step_plain = self._graph_of_optimizer(parts)

    def _why_two_graphs(self, parts: StepParts, recorder: cuda_graphs.Recorder | None) -> str:
        """Return why forward and backward cannot be one graph; "" where they can be."""
        ctx, records = self.ctx, self.ctx.settings.cuda_graphs
        module, strategy = ctx.module, ctx.strategy
        own_step = is_overridden(module, "optimizer_step", TrainModule) or any(map(wants_closure, ctx.optimizers))
        if not module.automatic_optimization:
            return parts.around[-1]
        if records and recorder is None:
            return f"accelerator={ctx.device.type!r} has no CUDA graphs"
        if parts.around:
            return parts.around[0]
        if not strategy.backward_fits_in_graph:
            return f"strategy={strategy.name!r} works around the backward"
        if records and ctx.loaders.most_accumulated > 1:
            return "accumulate_grad_batches is more than 1"
        if records and own_step:
            return "the module or a closure steps the optimizer"
        return "" if records else why_no_backward_in_graph()

    def _warn_once(self, text: str) -> None:
        if text not in self._warned and self.ctx.rank == 0:
            warn_user(text)
        self._warned.add(text)

    def _recorded(self, parts: StepParts, recorder: cuda_graphs.Recorder) -> Step:
        """Make the function that replays forward, loss and backward of one batch as a CUDA graph.

        The first `full_batches` batches of an epoch use the graph. The later ones run without it, since their losses
        may have other weights.
        """
        ctx, log, buffer, train = self.ctx, self.ctx.log, self.ctx.log.buffer, parts.forward_backward
        captured = self.captured or cuda_graphs.CapturedStep(ctx.module, parts.take, buffer, recorder, ctx.device)
        self.captured, full_batches = captured, parts.full_batches

        def normal(batch: Any, batch_idx: int) -> Any:
            return cuda_graphs.without_graph(train(batch, batch_idx))

        def train_recorded(batch: Any, batch_idx: int) -> Any:
            if batch_idx >= full_batches:
                captured.replayed = False
                return normal(batch, batch_idx)
            output = captured(batch, batch_idx, normal)
            if captured.replayed:  # if the graph was not replayed, `normal` has already done the following
                if buffer:
                    log.drain()
                ctx.counts.in_window += 1
            return output

        return train_recorded

    def _compiled_step(self, parts: StepParts) -> Step:
        """Make the function that runs forward, loss and backward of one micro-batch as one compiled graph.

        This function zeroes the gradients before the forward; the usual step zeroes them after the forward. No hook can
        see the difference.
        """
        ctx, log, buffer, config = self.ctx, self.ctx.log, self.ctx.log.buffer, self.ctx.settings.compile
        zero_grad, weigh, train = parts.zero_grad, parts.weigh, parts.forward_backward
        # the function of an earlier epoch is used again, since torch would have to compile a new function
        if self._compiled is None:
            assert config is not None
            ctx.exit_stack.enter_context(backward_in_graph())
            self._compiled = compile_forward_backward(parts.take, config)
        compiled = self._compiled

        def train_compiled(batch: Any, batch_idx: int) -> Any:
            weight = weigh(batch_idx)
            # For a weight of 0 use the step without the graph: only that step keeps a nan loss out of the gradients
            # (0 times nan is nan).
            if not weight:
                return train(batch, batch_idx)
            if ctx.counts.in_window == 0:
                zero_grad()
            output, done = compiled(batch, batch_idx, weight)
            if buffer:
                log.drain()
            if not done:
                # `loss_of` returns None for a skipped batch, and raises an error for a wrong output
                return loss_of(output, ctx)
            ctx.counts.in_window += 1
            return output

        return train_compiled

    def _graph_of_optimizer(self, parts: StepParts) -> Callable[[], Any] | None:
        """Return the optimizer's step, compiled or recorded.

        If neither is possible, warn why, and return the step unchanged.
        """
        ctx, config, captured, plain = self.ctx, self.ctx.settings.compile, self.captured, parts.step_plain
        optimizer = ctx.optimizers[0]
        scheduled = any(each.scheduler.optimizer is optimizer for each in ctx.schedulers)
        worked_around = "a scaler, a guard, a profiler, another optimizer or the strategy works around it"
        if config is not None and config.optimizer and not ctx.settings.cuda_graphs:
            why = why_not_compiled(optimizer, scheduled) if plain else worked_around
            if not why:
                # torch's own hooks around an optimizer step break the graph
                return torch.compile(optimizer.step, **{**config.options_of_torch(), "fullgraph": False})
            self._warn_once(f'compile="step": the step of {type(optimizer).__name__} is not compiled, since {why}.')
        elif captured is not None:
            why = cuda_graphs.why_not_captured(optimizer, scheduled) if plain else worked_around
            if not why:
                captured.optimizer = captured.optimizer or cuda_graphs.CapturedOptimizer(optimizer, captured)
                return captured.optimizer
            self._warn_once(cuda_graphs.runs_without(optimizer, why))
        return plain


def why_no_backward_in_graph() -> str:
    """Return why this version of torch cannot compile a backward into a graph; "" if it can."""
    from torch._dynamo import config  # imported late: torch's compiler takes a second to load

    return "" if hasattr(config, "trace_autograd_ops") else f"torch {torch.__version__} does not trace a backward"


def backward_in_graph() -> AbstractContextManager[Any]:
    """Make torch trace `loss.backward()` into the graph compiled in the `with` block."""
    from torch._dynamo import config  # imported late: torch's compiler takes a second to load

    return config.patch(trace_autograd_ops=True)  # pyright: ignore[reportAttributeAccessIssue]


def compile_forward_backward(training_step: Callable[[Any, int], Any], config: CompileConfig) -> Callable[..., Any]:
    """Compile forward, loss and backward of a micro-batch as one graph. `backward_in_graph` must be active.

    Args:
        training_step: takes a batch and its index, and returns a loss or a dict with one.
        config: options of the compilation.

    Returns:
        A function of the batch, its index and the factor of the loss. It returns the detached outputs and True; or the
        output of `training_step` and False, if the output has no loss to backpropagate.
    """

    def forward_backward(batch: Any, batch_idx: int, factor: float) -> tuple[Any, bool]:
        output = training_step(batch, batch_idx)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            return output, False
        (loss if factor == 1.0 else loss * factor).backward()
        return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output), True

    return torch.compile(forward_backward, **config.options_of_torch())


def forget_code(step: Any) -> None:
    """Remove an optimizer's compiled step from torch's cache, whose 8 places in a process are never free again."""
    while step is not None:
        torch._dynamo.eval_frame.remove_from_cache(step)
        step = getattr(step, "__wrapped__", None)  # torch compiles parts of a step that hooks are around


def why_not_compiled(optimizer: torch.optim.Optimizer, scheduled: bool) -> str:
    """Return why an optimizer's step is left uncompiled; "" where it can be compiled.

    Args:
        optimizer: an optimizer of the run.
        scheduled: whether a scheduler changes its learning rate.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return f"{type(optimizer).__name__} is not one of torch's own"
    if scheduled and not all(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups):
        return "a scheduler changes its lr, and each number would be compiled anew: give lr=torch.tensor(...)"
    return ""
