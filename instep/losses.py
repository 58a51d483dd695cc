"""`linear_cross_entropy`: a language model's last layer and its loss in one function, which uses much less memory.

The last layer of a language model computes logits of shape [tokens, vocabulary]: for 4,096 tokens and 32,000 words
these are 0.5 GB in float32, and the plain loss needs three such tensors. This function goes through the tokens in
chunks, and computes the gradients of a chunk while the logits of the chunk exist. It does the same multiplications as
the plain loss, so it takes the same time.
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

_CHUNK = 2**24  # largest number of logits that exist at one time


def linear_cross_entropy(
    input: Tensor,  # the name hides Python's `input`, but torch's losses use it too
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
    """Compute `cross_entropy(linear(input, weight, bias), target)` without storing all logits at once.

    The gradients are those of the plain loss, except for rounding. They are computed in the forward, if they are
    needed, so second derivatives are an error. Under autocast the logits are computed in the lower precision, and all
    sums in float32.

    Args:
        input: hidden states, of shape [..., features].
        weight: weight of the last layer, of shape [vocabulary, features]. It may be a DTensor that is sharded along the
            vocabulary, as in tensor parallelism: each rank then computes the logits of its own words. In this case
            `input` must be whole and the same on all these ranks, and the loss is the same on all of them.
        target: indices of the correct words, int64, with the shape of `input` without the last dimension.
        bias: bias of the last layer, of shape [vocabulary], sharded like `weight`.
        ignore_index: targets with this value are ignored.
        label_smoothing: fraction of the target that is spread over all words, from 0 to 1.
        z_loss: factor of an additional loss, the mean of the squared logarithm of the softmax's denominator, which
            keeps the logits small (1e-4 in PaLM).
        reduction: "mean" over the targets that are not ignored, or "sum".
        chunk_tokens: number of tokens in a chunk; None: as many as give 16 million logits.

    Returns:
        The loss, in float32 (float64 if the inputs are); nan if `reduction` is "mean" and all targets are ignored.

    Raises:
        SettingError: an argument is wrong, or the shapes do not fit together.

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
    """Return this rank's shards of weight and bias, the index of the shard's first word, and the ranks' group."""
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
        """Reduce a tensor in place over the ranks that have parts of the vocabulary."""
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
            gradient = logits.mul_(scale).to(made.dtype)  # `_losses` has written the gradient into `logits`
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
    """Return the sum of the losses of a chunk, and write the gradient of the sum into the logits."""
    rows = torch.arange(len(target), device=target.device)
    word = target - to.first
    here = counts & (word >= 0) & (word < logits.shape[1])  # True where the target is one of this rank's words
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
