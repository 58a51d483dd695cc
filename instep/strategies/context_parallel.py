"""Context parallelism: each rank of a group has a part of every sequence, but attention covers the whole sequence.

Before an attention, an all-to-all exchange gives each rank some of the heads over the whole sequence, in place of all
heads over its part of the sequence. After the attention, a second exchange reverses this. With any mask, results and
gradients are those of one process. torch's own ring attention, for GPUs, keeps the heads together and sends keys and
values from rank to rank instead.

Source: Jacobs et al., DeepSpeed Ulysses, 2023 (https://arxiv.org/abs/2309.14509); Liu, Zaharia, Abbeel: Ring Attention
with Blockwise Transformers, 2023 (https://arxiv.org/abs/2310.01889), as built in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from instep.distributed.nested import map_leaves
from instep.errors import DataError, HookError, SettingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_active: ContextParallel | None = None  # None if no step with context parallelism runs


def sequence_positions(length: int, device: torch.device | str | None = None) -> Tensor:
    """Return the positions of this rank's tokens in the whole sequence; use it in place of `torch.arange(length)`.

    Args:
        length: length of this rank's part of the sequence, which is the input of the model.
        device: device of the result.

    Returns:
        int64 tensor of shape (length,). Outside of context parallelism it is 0 to length - 1.

    Example:
        >>> sequence_positions(3)
        tensor([0, 1, 2])
    """
    if _active is None:
        return torch.arange(length, device=device)
    return _active.part(torch.arange(length * _active.size, device=device), 0)


class ContextParallel:
    """Context parallelism by an all-to-all exchange of sequence parts and attention heads.

    Args:
        mesh: 1-dim mesh of the ranks that share their sequences, in the order of the parts.
    """

    pieces_per_rank = 1

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self._calls = 0

    # ---- the batch

    def split(self, batch: Any, dims: int | Mapping[Any, int]) -> Any:
        """Return this rank's part of a batch.

        Args:
            batch: nested tensors, the same on all ranks of the group.
            dims: index of the sequence dimension; every tensor that has this dimension is split. Or a dict from keys or
                indices of the batch to the dimension: only these entries are split.
        """
        if not isinstance(dims, Mapping):
            return map_leaves(
                lambda leaf: self.part(leaf, dims) if isinstance(leaf, Tensor) and leaf.ndim > dims else leaf, batch
            )
        parts: Any = copy(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
        found = dims.keys() & parts.keys()
        if not found:
            raise DataError(f"cp={self.size}: sequence_dim={dict(dims)} names nothing in the batch of {[*parts]}")
        for key in found:
            parts[key] = self.part(parts[key], dims[key])
        return parts if isinstance(batch, Mapping) else getattr(batch, "_make", type(batch))(parts.values())

    def part(self, value: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a tensor, which is split along dimension `dim`."""
        pieces = self.size * self.pieces_per_rank
        if value.shape[dim] % pieces:
            raise DataError(
                f"cp={self.size}: a sequence of {value.shape[dim]} cannot be cut into {pieces} equal parts (dimension "
                f"{dim} of a tensor of shape {tuple(value.shape)}). Pad the batches to a multiple of {pieces}; where "
                "this is no sequence, let the module's sequence_dim name those that are: {key or index: dimension}."
            )
        cut = value.chunk(pieces, dim)
        return torch.cat([cut[i] for i in self._mine()], dim)

    def _mine(self) -> tuple[int, ...]:
        """Return the indices of the pieces of the sequence that this rank has."""
        return (self.rank,)

    # ---- the step

    def step(
        self, step: Callable[..., Any], dims: int | Mapping[Any, int], everywhere: bool = True
    ) -> Callable[..., Any]:
        """Wrap a step so that it gets this rank's part of the batch, and its attention covers the whole sequence.

        Args:
            step: step method, called with the batch as the first argument.
            dims: sequence dimensions, as in `split`.
            everywhere: whether the step must call attention. False for a pipeline stage, which may have no attention.
        """

        def run(batch: Any, *args: Any) -> Any:
            part, before = self.split(batch, dims), self._calls
            with self.attention():
                output = step(part, *args)
            if everywhere and self._calls == before:
                raise HookError(
                    f"cp={self.size}: the step did not call torch.nn.functional.scaled_dot_product_attention, so "
                    "attention saw only this rank's part of the sequence. Let the model call it by that name (as "
                    "F.scaled_dot_product_attention), or train with cp=1."
                )
            return output

        return run

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Patch `F.scaled_dot_product_attention` in the `with` block so that it covers the whole sequence.

        This context is needed around a step, and around a backward that recomputes activations.
        """
        global _active
        if _active is not None:  # the function is patched already, as in a backward within a step
            yield
            return
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # torch's fused encoder layers do not call the patched function
        _active = self
        try:
            with self._patched():
                yield
        finally:
            _active = None
            torch.backends.mha.set_fastpath_enabled(fast)

    def _patched(self) -> AbstractContextManager[None]:
        return self._counted(self._exchanged(F.scaled_dot_product_attention))

    @contextmanager
    def _counted(self, attend: Callable[..., Tensor]) -> Iterator[None]:
        # The function is replaced in its module: a torch function mode would slow down every torch call.
        before = F.scaled_dot_product_attention

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            self._calls += 1
            return attend(*args, **kwargs)

        F.scaled_dot_product_attention = counted  # type: ignore[assignment]
        try:
            yield
        finally:
            F.scaled_dot_product_attention = before

    # ---- attention with all-to-all exchanges

    def _exchanged(self, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def exchanged(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            heads = query.shape[-3] if query.ndim > 2 else 1
            if heads % self.size:
                raise SettingError(
                    f"cp={self.size} does not divide the {heads} heads of an attention (query of shape "
                    f"{tuple(query.shape)}, with the heads in the third dimension from the end). Choose a cp that "
                    "divides them.",
                    field="cp",
                    got=self.size,
                )
            # If the number of key heads is not a multiple of the group's size, repeat them to one for each query head.
            if enable_gqa and key.shape[-3] % self.size:
                key, value = (tensor.repeat_interleave(heads // tensor.shape[-3], -3) for tensor in (key, value))
            mask = None if attn_mask is None else self._mask(attn_mask, query.shape[-2], key.shape[-2], heads)
            if query.shape == key.shape == value.shape:  # send query, key and value in one message
                query, key, value = self._exchange(torch.stack((query, key, value)), -3, -2).unbind(0)
            else:
                query, key, value = (self._exchange(tensor, -3, -2) for tensor in (query, key, value))
            options = {"enable_gqa": True} if enable_gqa and key.shape[-3] != query.shape[-3] else {}
            output = attend(query, key, value, mask, dropout_p, is_causal, scale=scale, **options)
            return self._exchange(output, -2, -3)

        return exchanged

    def _exchange(self, tensor: Tensor, scatter: int, gather: int) -> Tensor:
        """Exchange parts of a tensor with all ranks: split along dimension `scatter`, and join along `gather`."""
        return torch.cat(self._swap(torch.stack(tensor.chunk(self.size, scatter))), gather)

    def _gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Gather the tensors of all ranks, and concatenate them along a dimension."""
        return torch.cat(self._swap(tensor.expand(self.size, *tensor.shape).contiguous()), dim)

    def _swap(self, parts: Tensor) -> tuple[Tensor, ...]:
        """Send the i-th part to rank i, and return the parts received from all ranks."""
        # Imported late: only needed with context parallelism.
        from torch.distributed import _functional_collectives as collectives

        # Before torch 2.13 all_to_all_single_autograd does not work in inference mode.
        plain = torch.is_inference_mode_enabled()
        swap = collectives.all_to_all_single if plain else collectives.all_to_all_single_autograd
        ones = [1] * self.size
        return swap(parts, ones, ones, self.mesh.get_group()).unbind(0)

    def _mask(self, mask: Tensor, queries: int, keys: int, heads: int) -> Tensor:
        """Return the attention mask for this rank's heads over the whole sequence."""
        mask = torch.atleast_2d(mask)
        rows, columns = mask.shape[-2:]
        if rows == 1 and columns == keys:
            mask = self._gather(mask, -1)
        elif rows == queries and columns == keys * self.size and rows != 1:
            mask = self._gather(mask, -2)
        elif rows not in (1, queries * self.size) or columns not in (1, keys * self.size):
            raise DataError(
                f"cp={self.size}: an attn_mask of shape {tuple(mask.shape)} for this rank's {queries} queries and "
                f"{keys} keys. Give it for all keys of the sequence, {keys * self.size} columns, and for all queries "
                "or this rank's; or for this rank's keys with one row; or use is_causal=True."
            )
        return mask.chunk(self.size, -3)[self.rank] if mask.ndim > 2 and mask.shape[-3] == heads else mask


class RingAttention(ContextParallel):
    """Context parallelism by torch's ring attention, which needs GPUs and takes no mask.

    Each rank has one piece from the beginning and one from the end of the sequence, so that all ranks have the same
    amount of work in a causal attention.
    """

    pieces_per_rank = 2

    def _mine(self) -> tuple[int, ...]:
        return (self.rank, 2 * self.size - 1 - self.rank)

    @contextmanager
    def _patched(self) -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel  # imported late: rarely used

        # torch's context splits the given buffers in place. Here the batch is already split, so a placeholder is given.
        stand_in = torch.empty(2 * self.size, device=self.mesh.device_type)
        ring = context_parallel(self.mesh, buffers=[stand_in], buffer_seq_dims=[0], no_restore_buffers={stand_in})
        with ring, self._counted(F.scaled_dot_product_attention):
            yield
