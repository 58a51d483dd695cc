"""Checks during a run: that the data gives batches, `training_step` gives losses, and optimizers step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from instep.data import BatchSource
from instep.errors import OTHERS_WAIT, DataError, HookError
from instep.strategies.gradients import parameters_of
from instep.trainer.context import RunContext
from instep.utils.warn import warn_user


def check_epoch(ctx: RunContext) -> None:
    """Raise DataError if the epoch had no batch, since a run without batches trains nothing, and might never end."""
    at, source = ctx.position, ctx.source
    empty = "; ".join(source.empty_parts())
    if not at.inside:
        alone = source.world_size > 1 and ctx.settings.uneven == "stop"
        uneven = " One rank without a batch ends the epoch: Trainer(uneven='join') trains on the rest." if alone else ""
        raise DataError(
            f"epoch {at.epoch} had no batch: the training data ({empty}) gave none. An iterable that is empty, such as "
            "by a wrong path, gives none; and a generator gives its values once, in one epoch. Give data that can be "
            f"iterated again: a list, a DataLoader, a class whose __iter__ makes a new generator each time.{uneven}"
        )
    elif at.batch and empty:
        warn_user(f"a part of the training data gave no batch ({empty}): None stands in its place")


def warn_of_no_batch(source: BatchSource, what: str, loader_idx: int) -> None:
    """Warn that a loader gave no batch. If its length is 0, do nothing, since `Loaders` has warned already."""
    if source.num_batches != 0:
        empty = "; ".join(source.empty_parts())
        warn_user(f"loader {loader_idx} of the {what} data ({empty}) gave no batch: nothing was done with it")


# ---- losses and steps


def loss_of(output: Any, ctx: RunContext) -> Tensor | None:
    """Check the output of `training_step`, and return its loss; None if the step returned None to skip the batch."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if loss is None:
        if isinstance(output, Mapping):
            raise HookError(
                "training_step returned a dict, in which the 'loss' key needs to be present; its keys are "
                f"{sorted(map(str, output))}"
            )
        if ctx.world_size > 1:
            raise HookError(f"training_step returned None to skip a batch. {OTHERS_WAIT}")
        warn_user("training_step returned None: the batch is skipped. Is a `return loss` missing?")
        return None
    if not isinstance(loss, Tensor):
        raise HookError(
            f"training_step returned {type(loss).__name__}. It must return a Tensor, a dict, or None: the loss, a dict "
            "with the loss under 'loss', or None to skip the batch."
        )
    if loss.numel() != 1:
        raise HookError(
            f"{type(ctx.module).__name__}.training_step returned a loss of shape {tuple(loss.shape)}; reduce it to one "
            "number: by its mean where it has one loss for each sample. What has the shape of the model's output is no "
            "loss: return what a loss function makes of it."
        )
    if ctx.optimizers:
        check_graph(ctx, loss, "training_step returned a loss")
    return loss


def check_graph(ctx: RunContext, loss: Tensor, what: str) -> None:
    """Raise HookError if a loss visibly depends on no trained parameter.

    On one process, a new tensor with requires_grad=True is accepted: it trains nothing, and no other rank waits for it.
    """
    if not loss.requires_grad:
        from instep.utils.trainable import why_no_graph  # imported late: only an error needs it

        why = why_no_graph([ctx.module], [p for each in ctx.optimizers for p in parameters_of(each)])
        raise HookError(f"{what} without a graph (requires_grad is False): {why}.")
    if ctx.world_size > 1 and loss.is_leaf and not isinstance(loss, nn.Parameter):
        raise HookError(f"{what} that depends on no parameter. {OTHERS_WAIT}")


def check_losses(ctx: RunContext) -> None:
    """Raise HookError if no batch so far had a loss, since a run that has trained nothing must not look finished."""
    at, name = ctx.position, type(ctx.module).__name__
    done = at.earlier_batches + at.batch
    needs_loss = ctx.optimizers and ctx.module.automatic_optimization
    if needs_loss and done and not (at.had_loss or ctx.counts.in_window):
        raise HookError(
            f"{name}.training_step returned None for every batch so far ({done}), so nothing was trained. Return "
            "the loss. If training_step steps the optimizer itself, set self.automatic_optimization = False in "
            "__init__; if nothing is to be trained, return None from configure_optimizers."
        )


def check_steps(ctx: RunContext) -> None:
    """Warn at the end of the first epoch if, in manual optimization, the module has not stepped any optimizer."""
    at, module = ctx.position, ctx.module
    if ctx.optimizers and not module.automatic_optimization and not at.global_step and not at.epoch and ctx.rank == 0:
        warn_user(
            f"{type(module).__name__} has automatic_optimization = False, and no optimizer stepped in the first epoch "
            f"({at.batch} batches): nothing was trained. In training_step call self.manual_backward(loss), then step() "
            "of an optimizer that self.optimizers() returns. The Trainer does not see the steps of other optimizers."
        )
