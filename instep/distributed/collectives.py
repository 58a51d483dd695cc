"""Collectives on nested tensors.

`gather`, `reduce` and `broadcast` first compare what all ranks are about to do (operation, structure, shapes, dtypes)
by one 8-byte message per rank over the control group: torch itself gives a wrong result or hangs when ranks disagree.
`all_reduce_` is the bare operation for code that runs often and knows its tensors.

With one process nothing is sent, and results are as with several: a 0-dim tensor gathers to shape (1,).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from instep.distributed.nested import map_leaves, tensor_leaves
from instep.errors import DistributedError, one_of
from instep.state import PartialState
from instep.state.control import exchange

REDUCTIONS = ("sum", "mean", "min", "max", "none")
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


def gather(data: Any) -> Any:
    """Concatenate every rank's tensors along dimension 0, on every rank. A collective.

    Args:
        data: a tensor or nested tensors of one structure, shape and dtype on all ranks (`pad_across_processes` makes
            sizes equal). None stays None.

    Returns:
        The same structure; a tensor of shape (n, ...) becomes (world * n, ...) in rank order, a 0-dim tensor becomes
        (world,). Detached from the graph.

    Raises:
        DataError: a leaf is no tensor.
        DistributedError: ranks disagree; the text says which and in what.

    Example:
        >>> gather(torch.tensor(3.0))
        tensor([3.])
    """
    state = _check_alike("gather", data)

    def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
        if state.num_processes == 1:
            return tensor
        rows = tensor.new_empty((state.num_processes * tensor.shape[0], *tensor.shape[1:]))
        if rows.numel():
            parts = [_as_bytes(part) for part in rows.chunk(state.num_processes)]
            dist.all_gather(parts, _as_bytes(tensor.contiguous()), group=_group_of(state, tensor))
        return rows

    return _map_tensors(gather_tensor, data)


def reduce(data: Any, op: str = "mean") -> Any:
    """Combine every rank's tensors element by element, on every rank. A collective, except for "none".

    Args:
        data: a tensor or nested tensors of one structure, shape and dtype on all ranks; not changed. None stays None.
        op: "sum", "mean", "min", "max", or "none", which gives `data` back untouched.

    Returns:
        The same structure, detached. Floats keep their dtype (16-bit ones are summed in float32). Integers and bools
        are summed exactly in int64; their mean is float64, divided once from that sum, hence exact to the last bit of
        a float64 for sums below 2**53. Minimum and maximum keep every dtype.

    Raises:
        SettingError: the operation is unknown.
        DataError: a leaf is no tensor.
        DistributedError: ranks disagree; the text says which and in what.

    Example:
        >>> reduce(torch.tensor([1, 2]), "mean")
        tensor([1., 2.], dtype=torch.float64)
    """
    if op not in REDUCTIONS:
        raise one_of("op", op, REDUCTIONS)
    if op == "none":
        return data
    state = _check_alike(f"reduce({op})", data)

    def reduce_tensor(tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.dtype
        exact = not (kept.is_floating_point or kept.is_complex)
        wide = torch.int64 if exact else torch.float32 if kept.itemsize < 4 else kept
        value = tensor.detach().to(wide, copy=True, memory_format=torch.contiguous_format)
        if state.num_processes > 1 and value.numel():
            dist.all_reduce(value, op=_OPS[op], group=_group_of(state, value))
        if op == "mean":
            value = (value.double() if exact else value) / state.num_processes
        return value if exact and op in ("sum", "mean") else value.to(kept)

    return _map_tensors(reduce_tensor, data)


def all_reduce_(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Combine one tensor over all ranks in place. A collective; nothing is checked.

    Args:
        tensor: contiguous, of one shape and dtype on all ranks; of a floating dtype for "mean".
        op: "sum", "mean", "min", "max", or "none", which does nothing.

    Returns:
        The tensor itself.

    Raises:
        SettingError: the operation is unknown.
    """
    if op not in REDUCTIONS:
        raise one_of("op", op, REDUCTIONS)
    state = PartialState()
    if op == "none" or state.num_processes == 1:
        return tensor
    dist.all_reduce(tensor, op=_OPS[op], group=_group_of(state, tensor))
    return tensor.div_(state.num_processes) if op == "mean" else tensor


def broadcast(data: Any, from_process: int = 0) -> Any:
    """One rank's tensors on every rank. A collective.

    Args:
        data: a tensor or nested tensors of one structure, shape and dtype on all ranks; not changed. None stays None.
        from_process: the rank that gives the values.

    Returns:
        The same structure, detached: the tensors themselves on `from_process`, new ones elsewhere.

    Raises:
        DataError: a leaf is no tensor.
        DistributedError: ranks disagree; the text says which and in what.
    """
    state = _check_alike(f"broadcast(from_process={from_process})", data)

    def broadcast_tensor(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if state.num_processes == 1 or not tensor.numel():
            return tensor
        mine = state.process_index == from_process
        value = tensor.contiguous() if mine else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.broadcast(_as_bytes(value), src=from_process, group=_group_of(state, tensor))
        return tensor if mine else value

    return _map_tensors(broadcast_tensor, data)


def pad_across_processes(data: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Make tensors as long as the longest of any rank along one dimension, so that they can be gathered. A collective.

    Args:
        data: a tensor or nested tensors; not changed. A tensor without that dimension, and None, stay as they are.
        dim: the dimension to pad; negative counts from the end.
        pad_index: the value to fill with.
        pad_first: fill before the data rather than after.

    Returns:
        The same structure; tensors that are long enough already are the same objects.

    Raises:
        DataError: a leaf is no tensor.
        DistributedError: ranks differ in the number of tensors.
    """
    tensors = [tensor for _, tensor in tensor_leaves(data, "pad_across_processes")]
    sizes = [tensor.shape[dim] if -tensor.ndim <= dim < tensor.ndim else 0 for tensor in tensors]
    every = exchange(sizes, PartialState().control_group)
    counts = [len(sizes) for sizes in every]
    if len(set(counts)) > 1:
        raise DistributedError(f"pad_across_processes got another number of tensors on each rank: {counts} by rank")
    longest = iter([max(column) for column in zip(*every, strict=True)])

    def pad_tensor(tensor: torch.Tensor) -> torch.Tensor:
        length = next(longest)
        if not -tensor.ndim <= dim < tensor.ndim or tensor.shape[dim] == length:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = length - tensor.shape[dim]
        filler = tensor.new_full(shape, pad_index)
        return torch.cat([filler, tensor] if pad_first else [tensor, filler], dim=dim)

    return _map_tensors(pad_tensor, data)


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], data: Any) -> Any:
    return map_leaves(lambda leaf: None if leaf is None else function(leaf), data)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, without a copy: backends move every dtype as bytes, but know few by name."""
    return tensor.view(-1).view(torch.uint8)


def _group_of(state: PartialState, tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """CPU tensors go over the gloo group: the default group of a GPU job need not know the CPU."""
    return state.control_group if tensor.device.type == "cpu" else None


def _check_alike(operation: str, data: Any) -> PartialState:
    """Make sure that all ranks do the same thing to alike tensors; the state, for what follows."""
    leaves = tensor_leaves(data, operation.partition("(")[0])
    state = PartialState()
    if state.control_group is None:
        return state
    text = "\n".join(
        [operation, *[f"{where or 'tensor'}: {tensor.dtype} {tuple(tensor.shape)}" for where, tensor in leaves]]
    )
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    digests = torch.empty(state.num_processes, dtype=torch.int64)
    dist.all_gather(list(digests.split(1)), torch.tensor([digest]), group=state.control_group)
    if digests.ne(digest).any():  # the same answer on every rank: either all digests are equal or all see a difference
        raise DistributedError(_describe(operation, exchange(text, state.control_group)))
    return state


def _describe(operation: str, texts: list[str]) -> str:
    lines = [f"ranks disagree in a collective; this rank called {operation}. By rank:"]
    lines += [f"  rank {rank}: " + ", ".join(text.split("\n")) for rank, text in enumerate(texts)]
    return "\n".join(
        [*lines, "Call the same function on every rank, with tensors of the same names, shapes and dtypes."]
    )
