"""Collectives on nested tensors.

Each collective first compares the ranks' calls (operation, structure, shapes, dtypes); see `agree` in `objects.py`.
Only `all_reduce_` compares nothing outside checked mode: it is for frequent calls whose tensors are known to fit.

With one process nothing is sent, and results have the same form as with several processes: a 0-dim tensor is gathered
to shape (1,).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from instep.distributed.nested import map_leaves, tensor_leaves, with_tensors
from instep.distributed.objects import agree, check_rank
from instep.errors import SettingError, one_of
from instep.state import PartialState
from instep.state.collective_checks import announce
from instep.state.process import step_group
from instep.state.rank_records import awaited
from instep.utils.warn import warn_user

REDUCTIONS = ("sum", "mean", "min", "max", "none")
_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def gather(data: Any) -> Any:
    """Concatenate every rank's tensors along dimension 0, on every rank. Collective.

    Args:
        data: a tensor or nested tensors of one structure, shape and dtype on all ranks (`pad_across_processes` makes
            sizes equal). None stays None.

    Returns:
        The same structure, detached from the graph. A tensor of shape (n, ...) becomes (world * n, ...) in rank order,
        a 0-dim tensor becomes (world,).

    Raises:
        DataError: a leaf is no tensor.
        DistributedError: ranks made different calls; the error text shows the first difference and each rank's call.

    Example:
        >>> gather(torch.tensor(3.0))
        tensor([3.])
    """
    state = _check_alike("gather", data)
    return _map_tensors(lambda tensor: _all_gather(state, _as_rows(tensor)), data)


def gather_ragged(data: Any, rows: int | None = None) -> Any:
    """Concatenate tensors of all ranks along dimension 0; ranks may have different numbers of rows. Collective.

    Args:
        data: a tensor or nested tensors of the same structure and dtype on all ranks, and of the same shape except for
            dimension 0, which may have size 0. None stays None.
        rows: number of first rows to use of each of this rank's tensors; None for all rows. With 0, this rank takes
            part and adds no rows.

    Returns:
        The same structure, detached: the rows of rank 0, then those of rank 1, and so on. A 0-dim tensor counts as one
        row, or as no row if `rows` is 0.

    Raises:
        SettingError: `rows` is negative.
        DataError: a leaf is no tensor.
        DistributedError: the calls of ranks differ in more than the number of rows; the error text shows how.

    Example:
        >>> gather_ragged({"x": torch.arange(4), "loss": torch.tensor(0.5)}, rows=3)
        {'x': tensor([0, 1, 2]), 'loss': tensor([0.5000])}
    """
    if rows is not None and rows < 0:
        raise SettingError(f"rows={rows} must be at least 0, or None for all rows", field="rows", got=rows)
    state = PartialState()
    leaves = [(where, _as_rows(tensor)[:rows]) for where, tensor in tensor_leaves(data, "gather_ragged")]
    alike = [_described(where, tensor, f"rows of {tuple(tensor.shape[1:])}") for where, tensor in leaves]
    by_rank = agree("gather_ragged", alike, [tensor.shape[0] for _, tensor in leaves])
    counts = zip(*by_rank, strict=True)
    return with_tensors(data, [_gather_rows(state, tensor, n) for (_, tensor), n in zip(leaves, counts, strict=True)])


def reduce(data: Any, op: str = "mean") -> Any:
    """Combine every rank's tensors element by element, on every rank. Collective, except for "none".

    Args:
        data: a tensor or nested tensors of one structure, shape and dtype on all ranks; not changed. None stays None.
        op: "sum", "mean", "min", "max", or "none", which returns `data` unchanged.

    Returns:
        The same structure, detached. Floats keep their dtype (16-bit floats are summed in float32). Integers and bools
        are summed exactly in int64. Their mean is float64: this sum is divided once, so the mean is exact to the last
        bit of a float64 for sums below 2**53. Minimum and maximum keep every dtype.

    Raises:
        SettingError: the operation is unknown.
        DataError: a leaf is no tensor.
        DistributedError: ranks made different calls; the error text shows the first difference and each rank's call.

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
            with _awaited(state, f"reduce({op})"):
                dist.all_reduce(value, op=_OPS[op], group=_group_of(state, value))
        if op == "mean":
            value = (value.double() if exact else value) / state.num_processes
        return value if exact and op in ("sum", "mean") else value.to(kept)

    return _map_tensors(reduce_tensor, data)


def all_reduce_(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Combine one tensor over all ranks in place. Collective. The ranks' calls are compared only in checked mode.

    Args:
        tensor: contiguous tensor of the same shape and dtype on all ranks; a floating dtype for "mean".
        op: "sum", "mean", "min", "max", or "none", which does nothing.

    Returns:
        The tensor itself.

    Raises:
        SettingError: the operation is unknown.

    Example:
        >>> all_reduce_(torch.tensor([1.0, 2.0]), "mean")  # with one process, the values stay as they are
        tensor([1., 2.])
    """
    if op not in REDUCTIONS:
        raise one_of("op", op, REDUCTIONS)
    state = PartialState()
    if op == "none" or state.num_processes == 1:
        return tensor
    announce(state.control_group, f"all_reduce_({op})", _described("", tensor, tuple(tensor.shape)))
    # The ranks' calls were not compared, so use the step group: in the control group, a rank that makes another call
    # would receive this message, which has another size.
    group = step_group() if tensor.device.type == "cpu" else None
    with _awaited(state, f"all_reduce_({op})"):
        dist.all_reduce(tensor, op=_OPS[op], group=group)
    return tensor.div_(state.num_processes) if op == "mean" else tensor


def broadcast(data: Any, from_process: int = 0) -> Any:
    """Send one rank's tensors to every rank. Collective.

    Args:
        data: a tensor or nested tensors of one structure, shape and dtype on all ranks; not changed. None stays None.
        from_process: rank that sends the values.

    Returns:
        The same structure, detached: the tensors themselves on `from_process`, new tensors on the other ranks.

    Raises:
        SettingError: there is no such rank.
        DataError: a leaf is no tensor.
        DistributedError: ranks made different calls; the error text shows the first difference and each rank's call.

    Example:
        >>> broadcast({"weight": torch.tensor([1.0, 2.0])}, from_process=0)
        {'weight': tensor([1., 2.])}
    """
    check_rank(from_process)
    state = _check_alike(f"broadcast(from_process={from_process})", data)

    def broadcast_tensor(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if state.num_processes == 1 or not tensor.numel():
            return tensor
        mine = state.process_index == from_process
        value = tensor.contiguous() if mine else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        with _awaited(state, f"broadcast(from_process={from_process})"):
            dist.broadcast(_as_bytes(value), src=from_process, group=_group_of(state, tensor))
        return tensor if mine else value

    return _map_tensors(broadcast_tensor, data)


def pad_across_processes(data: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad tensors along one dimension to the longest size of all ranks, so that they can be gathered. Collective.

    Args:
        data: a tensor or nested tensors; not changed. A tensor without the dimension `dim` and None are returned as
            they are; so is a tensor of torch.nested, with a warning.
        dim: the dimension to pad; negative counts from the end.
        pad_index: value to pad with.
        pad_first: whether to pad before the data, instead of after it.

    Returns:
        The same structure. Tensors that are already long enough are the same objects.

    Raises:
        DataError: a leaf is no tensor.
        DistributedError: ranks differ in names, dtypes or numbers of dimensions; the error text says which ranks, and
            in what.

    Example:
        >>> pad_across_processes(torch.ones(3, 2)).shape  # with one process, its own tensor is the longest
        torch.Size([3, 2])
    """
    if isinstance(data, torch.Tensor) and data.is_nested:
        warn_user("pad_across_processes leaves a torch.nested tensor as it is: make it a padded tensor first")
        return data
    leaves = tensor_leaves(data, "pad_across_processes")
    alike = [_described(where, tensor, f"{tensor.ndim}-dim") for where, tensor in leaves]
    sizes = [tensor.shape[dim] if -tensor.ndim <= dim < tensor.ndim else 0 for _, tensor in leaves]
    by_rank = agree(f"pad_across_processes(dim={dim})", alike, sizes)

    def pad_tensor(tensor: torch.Tensor, length: int) -> torch.Tensor:
        if not -tensor.ndim <= dim < tensor.ndim or tensor.shape[dim] == length:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = length - tensor.shape[dim]
        filler = tensor.new_full(shape, pad_index)
        return torch.cat([filler, tensor] if pad_first else [tensor, filler], dim=dim)

    longest = map(max, zip(*by_rank, strict=True))
    return with_tensors(data, [pad_tensor(tensor, n) for (_, tensor), n in zip(leaves, longest, strict=True)])


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], data: Any) -> Any:
    return map_leaves(lambda leaf: None if leaf is None else function(leaf), data)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes, since backends support only some dtypes."""
    return tensor.view(-1).view(torch.uint8)


def _group_of(state: PartialState, tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """Return the process group for a tensor.

    CPU tensors use the gloo group, since a GPU job's default group may not support them.
    """
    return state.control_group if tensor.device.type == "cpu" else None


def _awaited(state: PartialState, operation: str) -> awaited:
    group = state.control_group
    assert group is not None
    return awaited(group, operation)


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def _all_gather(state: PartialState, tensor: torch.Tensor) -> torch.Tensor:
    """Gather the rows of all ranks, which all have the same number of rows."""
    if state.num_processes == 1:
        return tensor
    rows = tensor.new_empty((state.num_processes * tensor.shape[0], *tensor.shape[1:]))
    if rows.numel():
        parts = [_as_bytes(part) for part in rows.chunk(state.num_processes)]
        with _awaited(state, "gather"):
            dist.all_gather(parts, _as_bytes(tensor.contiguous()), group=_group_of(state, tensor))
    return rows


def _gather_rows(state: PartialState, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Gather the rows of all ranks, which may have different numbers of rows."""
    longest = max(counts)
    if min(counts) == longest:
        return _all_gather(state, tensor)
    # Backends gather only tensors of equal size; the padding is cut off below.
    filled = tensor.new_zeros((longest, *tensor.shape[1:]))
    filled[: tensor.shape[0]] = tensor
    parts = _all_gather(state, filled).split(longest)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _described(where: str, tensor: torch.Tensor, shape: Any) -> str:
    # compare the kind of device too, since CPU tensors use another backend than device tensors
    kind = tensor.device.type
    return f"{where or 'tensor'}: {tensor.dtype} {shape}{'' if kind == 'cpu' else f' on {kind}'}"


def _check_alike(operation: str, data: Any) -> PartialState:
    """Check that all ranks call the same operation with tensors of the same shapes and dtypes.

    Return the process state.
    """
    leaves = tensor_leaves(data, operation.partition("(")[0])
    state = PartialState()
    if state.control_group is not None:
        agree(operation, [_described(where, tensor, tuple(tensor.shape)) for where, tensor in leaves])
    return state
