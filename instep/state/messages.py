"""Control messages between ranks: first a message of fixed size, then small objects with a MAC (a signature).

The first message contains a digest of what a rank is about to do, and some numbers. Every collective of instep begins
with an all-gather of this message on the control group. So even if ranks enter different collectives, their first
messages have the same size, and all ranks learn of the difference. Without the first messages, gloo would end the
process, because the ranks would send messages of different sizes.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import traceback
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from instep.errors import DistributedError, RemoteError
from instep.state.collective_checks import announce
from instep.state.rank_records import awaited, call_site, digest_of, finish, named_ranks
from instep.state.secret import job_secret, not_ours

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

HEADER = 16  # int64 numbers in the first message: a digest, then up to 15 sizes

_PICKLE, _JSON, _ERROR = b"P", b"J", b"E"
_HEAD = 5  # int64 numbers that are sent before an object: its size in bytes, and four numbers for its MAC
_MOST_BYTES = 1 << 38  # limit in bytes, larger than any object that a machine can pickle


def meet(group: ProcessGroup, operation: str, described: Sequence[str], sizes: Sequence[int]) -> torch.Tensor:
    """Check that all ranks are about to enter the same collective, and exchange numbers. Collective.

    Args:
        group: the control group, or another gloo group.
        operation: name of what this rank is about to do.
        described: texts that must be the same on all ranks, one per tensor.
        sizes: numbers that may differ between ranks. How many they are must follow from `operation` and `described`,
            and so be the same on all ranks.

    Returns:
        Every rank's sizes, of shape (ranks, sizes).

    Raises:
        DistributedError: on every rank, if two ranks disagree; on the waiting ranks, if a rank does not come.
    """
    text = "\n".join([operation, *described])
    with awaited(group, operation):
        table = all_gather(header(digest_of(text), *sizes[: HEADER - 1]), group)
        # all ranks see the same table, so either none of them or all of them raise the error
        if table[:, 0].ne(digest_of(text)).any():
            raise DistributedError(_describe(gather_calls(text, group)))
        known = table[:, 1 : len(sizes) + 1]
        rest = sizes[HEADER - 1 :]
        return torch.cat([known, all_gather(torch.tensor(rest), group)], dim=1) if rest else known


def header(digest: int, *numbers: int) -> torch.Tensor:
    """Make the first message of a collective: a digest and some numbers, filled with zeros to a fixed size."""
    return torch.tensor([digest, *numbers, *[0] * (HEADER - 1 - len(numbers))])


def gather_calls(text: str, group: ProcessGroup) -> list[tuple[list[str], str]]:
    """Gather descriptions of what every rank is about to do.

    All ranks call this if their first messages differ. Collective.

    Returns:
        For each rank, the operation with its tensors, and the line of the user's program that called it.
    """
    path, line = call_site(sys._getframe())
    rows = [text.split("\n") for text in _gather_texts(f"{text}\n{os.path.basename(path)}:{line}", group)]
    return [(parts, place) for *parts, place in rows]


def _gather_texts(text: str, group: ProcessGroup) -> list[str]:
    data = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
    sizes = all_gather(torch.tensor([len(data)]), group).flatten().tolist()
    mine = torch.zeros(max(sizes), dtype=torch.uint8)
    mine[: len(data)] = data
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in all_gather(mine, group)]


def all_gather(mine: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Gather a 1-d tensor of the same size from every rank. Call this inside an `awaited` block. Collective."""
    table = mine.new_empty((group.size(), len(mine)))
    work: Any = dist.all_gather(list(table.unbind()), mine, group=group, async_op=True)
    finish(work)
    return table


def _describe(calls: list[tuple[list[str], str]]) -> str:
    """Format the error message if ranks disagree: the first difference in one line, then the call of each rank."""
    cells = [list(column) for column in zip_longest(*[parts for parts, _ in calls], fillvalue="nothing more")]
    index = next((i for i, column in enumerate(cells) if len(set(column)) > 1), 0)
    ranks: dict[str, list[int]] = {}
    for rank, (part, (_, place)) in enumerate(zip(cells[index], calls, strict=True)):
        ranks.setdefault(part if index else f"{part} ({place})", []).append(rank)
    about, word = (f"what they give to {cells[0][0]}", "with") if index else ("the collective", "in")
    found = "; ".join(f"{named_ranks(of)} {word} {part}" for part, of in ranks.items())
    lines = [f"ranks disagree about {about}: {found}. By rank:"]
    lines += [f"  rank {rank}: {', '.join(parts)}" for rank, (parts, _) in enumerate(calls)]
    return "\n".join(
        [*lines, "Call the same function on every rank, with tensors of the same names, shapes and dtypes."]
    )


class _Error(NamedTuple):
    """Traceback of a pickling that failed, which is sent in place of the object."""

    traceback: str


def exchange(
    obj: Any, group: ProcessGroup | None, operation: str = "gather_object", any_line: bool = False
) -> list[Any]:
    """Return the objects of all ranks, in rank order. Collective. Without a group, return only `obj` in a list.

    Args:
        obj: anything that can be pickled.
        group: the control group; None for a single process.
        operation: name of the call in checked mode.
        any_line: whether checked mode ignores the line of the call.

    Raises:
        Exception: the error raised by pickle, if this rank's object cannot be pickled.
        RemoteError: on the other ranks, if an object cannot be pickled.
        DistributedError: a message was not signed with this job's secret.
    """
    if group is None:
        return [obj]
    announce(group, operation, any_line=any_line)
    parcel, error = _packed(obj)
    with awaited(group, operation):
        heads = meet(group, operation, (), _head(parcel, group, group.rank()))
        sizes = [_size(head) for head in heads]
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(parcel)] = _bytes(parcel)
        parcels = all_gather(mine, group)
    found = {
        rank: _read(bytes(parcels[rank, :size].numpy()), heads[rank], group, rank) for rank, size in enumerate(sizes)
    }
    return list(_opened(found, error, operation).values())


def hand_out(obj: Any, source: int, group: ProcessGroup, operation: str, device: torch.device | None = None) -> Any:
    """Send one rank's object to every rank of a group. Collective; in checked mode the caller announces it.

    Args:
        obj: anything that can be pickled; used only on `source`.
        source: rank that sends the object, counted in the whole job.
        group: the control group, or another one.
        operation: name of the call in errors.
        device: device of the tensors that the group sends; the CPU by default.

    Returns:
        The object itself on `source`, a copy on the other ranks.

    Raises:
        Exception: on `source`, the error raised by pickle, if the object cannot be pickled.
        RemoteError: on the other ranks, if the object cannot be pickled.
        DistributedError: on the other ranks, if the message was not signed with this job's secret.
    """
    gives = dist.get_rank() == source
    device = device or torch.device("cpu")
    parcel, error = _packed(obj) if gives else (b"", None)
    head = torch.tensor(_head(parcel, group, source) if gives else [0] * _HEAD, device=device)
    with awaited(group, operation):
        _wait(dist.broadcast(head, source, group=group, async_op=True), device)
        body = (_bytes(parcel) if gives else torch.empty(_size(head.cpu()), dtype=torch.uint8)).to(device)
        _wait(dist.broadcast(body, source, group=group, async_op=True), device)
    if gives and error is None:
        return obj
    arrived = parcel if gives else bytes(body.cpu().numpy())
    return _opened({source: _read(arrived, head.cpu(), group, source)}, error, operation)[source]


def _wait(work: Any, device: torch.device) -> None:
    if device.type == "cpu":
        finish(work)  # this raises an error if a rank of the group has ended, instead of waiting for the rank
    else:
        work.wait()


def share_error(
    error: BaseException | None, doing: str, group: ProcessGroup | None, around_block: bool = False
) -> None:
    """Raise an error on every rank if any rank has one. Collective.

    Args:
        error: this rank's error, or None.
        doing: description of the work, for the errors on other ranks, such as "loading the checkpoint".
        group: the control group; None for a single process.
        around_block: whether some ranks call at the beginning of a `with` block and others at its end. In this case
            checked mode compares `doing`, and not the line of the call.

    Raises:
        BaseException: `error` itself, on a rank that has an error.
        RemoteError: on the other ranks; the error has the number of the first rank that failed, and its traceback.
    """
    report = None if error is None else "".join(traceback.format_exception(error))
    try:
        reports = exchange(report, group, doing if around_block else "raise_together", any_line=around_block)
    except Exception:
        if error is None:
            raise
        reports = []  # the group is broken too, but this rank's own error is closer to the cause
    if error is not None:
        raise error
    _raise_remote({rank: report for rank, report in enumerate(reports) if report is not None}, doing)


def _packed(obj: Any) -> tuple[bytes, Exception | None]:
    """Pack an object into bytes. If it cannot be pickled, pack the error instead, since other ranks wait for it."""
    # compare types, not isinstance: a str subclass such as an enum must arrive as an enum
    if type(obj) in (type(None), bool, int, float, str):
        return _JSON + json.dumps(obj).encode(), None
    try:
        return _PICKLE + pickle.dumps(obj), None
    except Exception as error:  # noqa: BLE001  `_opened` raises it
        return _ERROR + json.dumps("".join(traceback.format_exception(error))).encode(), error


def _head(parcel: bytes, group: ProcessGroup, rank: int) -> list[int]:
    """Return the size of a packed object and its MAC, as int64 numbers."""
    mac = job_secret().mac(_place(group, rank), parcel)
    return [len(parcel), *torch.frombuffer(bytearray(mac), dtype=torch.int64).tolist()]


def _read(parcel: bytes, head: torch.Tensor, group: ProcessGroup, rank: int) -> Any:
    """Read the object in a message, after a check of its MAC. It is an `_Error` if pickling failed on the sender.

    Raises:
        DistributedError: the message was not signed with this job's secret.
    """
    if not job_secret().fits(head[1:].numpy().tobytes(), _place(group, rank), parcel):
        raise not_ours(f"a message of rank {rank}")
    kind, content = parcel[:1], parcel[1:]
    if kind == _PICKLE:
        return pickle.loads(content)  # noqa: S301  the MAC was checked above
    value = json.loads(content)
    return _Error(value) if kind == _ERROR else value


def _place(group: ProcessGroup, rank: int) -> str:
    return f"{group.group_name}/{rank}"


def _size(head: torch.Tensor) -> int:
    size = int(head[0])
    if not 0 <= size <= _MOST_BYTES:
        raise not_ours(f"a message of {size} bytes")
    return size


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _opened(found: Mapping[int, Any], error: Exception | None, operation: str) -> Mapping[int, Any]:
    if error is not None:
        raise error
    reports = {rank: value.traceback for rank, value in found.items() if isinstance(value, _Error)}
    _raise_remote(reports, f"{operation}: pickling the object")
    return found


def _raise_remote(reports: Mapping[int, str], doing: str) -> None:
    if reports:
        first, *others = reports
        more = f" (and on rank {', '.join(map(str, others))})" if others else ""
        raise RemoteError(f"{doing} failed on rank {first}{more}", rank=first, traceback=reports[first])
