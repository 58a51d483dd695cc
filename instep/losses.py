"""Losses over a large vocabulary that never hold all logits.

A language model's last layer makes logits of shape [tokens, vocabulary]: 4,096 tokens of 32,000 words are 0.5 GB in
float32, and the plain loss holds them three times. Here the layer and the loss are one function. The function goes
through the tokens in chunks, and computes the gradients of a chunk while it holds the chunk's logits. It does the same
multiplications as the plain loss, so it takes as long.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from instep.errors import SettingError
from instep.utils.checks import at_least, choice, is_number, wrong

__all__ = ["linear_cross_entropy"]

_CHUNK = 2**24  # most logits that are held at one time


def linear_cross_entropy(
    input: Tensor,  # the name that torch uses
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_tokens: int | None = None,
) -> Tensor:
    """Return `cross_entropy(linear(input, weight, bias), target)` without holding all logits.

    Gradients equal those of the plain loss, except for rounding. They are computed in the forward, so a second
    derivative is an error; if no gradient is needed, none is computed. Under autocast the logits are computed in the
    lower precision, and all sums in float32.

    Args:
        input: hidden states, [..., features].
        weight: of the last layer, [vocabulary, features]. A DTensor that is cut along the vocabulary, as tensor
            parallelism does it, stays cut: each rank makes the logits of its words. `input` is whole then, the same on
            all these ranks, and so is the loss.
        target: the right words, int64, of the shape of `input` without its last dimension.
        bias: [vocabulary], cut as `weight` is.
        ignore_index: targets with this value count for nothing.
        label_smoothing: part of the target that is spread over all words, from 0 to 1.
        z_loss: this number times the mean of the squared log of the softmax's denominator is added, which keeps logits
            small (PaLM has 1e-4).
        reduction: "mean" over the targets that count, or "sum".
        chunk_tokens: tokens of a chunk; None: so many that it has 16 million logits.

    Returns:
        The loss, float32 or the inputs' float64; nan where no target counts and `reduction` is "mean".

    Raises:
        SettingError: a setting is wrong, or shapes do not fit each other.

    Example:
        >>> hidden, target = torch.randn(6, 4), torch.randint(10, (6,))
        >>> head = torch.nn.Linear(4, 10, bias=False)
        >>> loss = linear_cross_entropy(hidden, head.weight, target)
        >>> plain = torch.nn.functional.cross_entropy(head(hidden), target)
        >>> torch.allclose(loss, plain)
        True

    Source:
        Wijmans et al.: Cut Your Losses in Large-Vocabulary Language Models, 2024 (https://arxiv.org/abs/2411.09009);
        the z-loss of Chowdhery et al.: PaLM, 2022 (https://arxiv.org/abs/2204.02311).
    """
    choice("mean", "sum")("reduction", reduction)
    if not (is_number(label_smoothing) and 0 <= label_smoothing <= 1):
        raise wrong("label_smoothing", label_smoothing, "a number from 0 to 1")
    if not is_number(z_loss) or z_loss < 0:
        raise wrong("z_loss", z_loss, "a number of at least 0")
    if input.shape[:-1] != target.shape or input.shape[-1] != weight.shape[-1]:
        raise SettingError(
            f"linear_cross_entropy: input has the shape {tuple(input.shape)}, weight {tuple(weight.shape)} and target "
            f"{tuple(target.shape)}; expected [..., features], [vocabulary, features] and [...]",
            field="input",
        )
    vocabulary, first, group = weight.shape[0], 0, None
    if hasattr(weight, "device_mesh"):
        weight, bias, first, group = _local(weight, bias)
    chunk = max(1, _CHUNK // max(len(weight), 1)) if chunk_tokens is None else at_least(1)("chunk_tokens", chunk_tokens)
    settings = _Settings(vocabulary, first, group, ignore_index, label_smoothing, z_loss, reduction == "mean", chunk)
    if not torch.is_grad_enabled():
        input, weight, bias = input.detach(), weight.detach(), None if bias is None else bias.detach()
    return _LinearCrossEntropy.apply(input.flatten(0, -2), weight, bias, target.flatten(), settings)


def _local(weight: Any, bias: Any) -> tuple[Tensor, Tensor | None, int, Any]:
    """Return this rank's part of a shared vocabulary, the index of its first word, and the group of the ranks."""
    from instep.strategies.dtensors import box_of  # imported late: only tensor parallelism needs it

    mesh, placements = weight.device_mesh, weight.placements
    if mesh.ndim != 1 or not (placements[0].is_shard(0) or placements[0].is_replicate()):
        raise SettingError(
            f"linear_cross_entropy takes a weight that is cut along its vocabulary over one dimension of a mesh, and "
            f"got the placements {placements}. Cut it by ColwiseParallel, or give full_tensor()",
            field="weight",
        )
    cut = placements[0].is_shard(0)
    first = box_of(weight)[1][0] if cut else 0
    return weight.to_local(), None if bias is None else bias.to_local(), first, mesh.get_group() if cut else None


class _Settings:
    def __init__(
        self,
        vocabulary: int,
        first: int,
        group: Any,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        mean: bool,
        chunk: int,
    ) -> None:
        self.vocabulary, self.first, self.group, self.ignore_index = vocabulary, first, group, ignore_index
        self.label_smoothing, self.z_loss, self.mean, self.chunk = label_smoothing, z_loss, mean, chunk

    def reduce(self, value: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce over the ranks that share the vocabulary, in place."""
        if self.group is not None:
            dist.all_reduce(value, op, group=self.group)
        return value


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, to: _Settings) -> Tensor:
        kind = torch.promote_types(x.dtype, torch.float32)
        counts = target != to.ignore_index
        scale = counts.sum().to(kind).reciprocal() if to.mean else torch.ones((), dtype=kind, device=x.device)
        wanted = ctx.needs_input_grad
        of_x = torch.empty_like(x) if wanted[0] else None
        of_weight = torch.zeros_like(weight, dtype=kind) if wanted[1] else None
        of_bias = torch.zeros_like(bias, dtype=kind) if wanted[2] and bias is not None else None
        total = torch.zeros((), dtype=kind, device=x.device)
        for start in range(0, len(x), to.chunk):
            part = slice(start, start + to.chunk)
            made = torch.nn.functional.linear(x[part], weight, bias)
            logits = made.to(kind)
            total += _losses(logits, target[part], counts[part], to)
            if not any(wanted[:3]):
                continue
            gradient = logits.mul_(scale).to(made.dtype)  # `_losses` has overwritten `logits` with the gradient
            if of_x is not None:
                of_x[part] = to.reduce(gradient @ weight.to(made.dtype))
            if of_weight is not None:
                of_weight += gradient.T @ x[part].to(made.dtype)
            if of_bias is not None:
                of_bias += gradient.sum(0)
        ctx.save_for_backward(of_x, of_weight, of_bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        of_x, of_weight, of_bias = ctx.saved_tensors
        scaled = (None if one is None else one * upstream[0].to(one.dtype) for one in (of_x, of_weight, of_bias))
        of_x, of_weight, of_bias = scaled
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            of_x,
            None if of_weight is None else of_weight.to(weight_dtype),
            None if of_bias is None else of_bias.to(bias_dtype),
            None,
            None,
        )


def _losses(logits: Tensor, target: Tensor, counts: Tensor, to: _Settings) -> Tensor:
    """Return the sum of the losses of a chunk, and overwrite the logits with the gradient of the sum."""
    rows = torch.arange(len(target), device=target.device)
    word = target - to.first
    here = counts & (word >= 0) & (word < logits.shape[1])  # True for a word that this rank holds
    word = torch.where(here, word, 0)
    highest = to.reduce(logits.max(1).values, dist.ReduceOp.MAX)
    right = to.reduce(torch.where(here, logits[rows, word], 0))
    mean = to.reduce(logits.sum(1)) / to.vocabulary if to.label_smoothing else 0.0
    weights = logits.sub_(highest[:, None]).exp_()
    denominator = to.reduce(weights.sum(1))
    log = denominator.log() + highest
    losses = log - (1 - to.label_smoothing) * right - to.label_smoothing * mean + to.z_loss * log.square()
    weights.mul_(((1 + 2 * to.z_loss * log) / denominator)[:, None])
    if to.label_smoothing:
        weights.sub_(to.label_smoothing / to.vocabulary)
    weights[rows, word] -= (1 - to.label_smoothing) * here.to(weights.dtype)
    weights.mul_(counts[:, None])
    return torch.where(counts, losses, 0).sum()
