"""Messages between processes outside the data path: python objects and errors, over the CPU control group.

Objects travel as pickles, between processes of one job only: never from a file or a stranger.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from instep.errors import RemoteError
from instep.state.awaiting import awaited
from instep.state.checked import announce
from instep.state.meeting import all_gather, meet

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Parcel = tuple[bool, Any]  # True and the object, or False and the traceback of the attempt


def exchange(
    obj: Any, group: ProcessGroup | None, operation: str = "gather_object", any_line: bool = False
) -> list[Any]:
    """Every rank's object, in rank order, on every rank. A collective; alone where there is no group.

    Args:
        obj: anything that can be pickled.
        group: the control group; None for a process alone.
        operation: what it is called in checked mode.
        any_line: whether checked mode leaves the line of the call out.

    Raises:
        Exception: what pickling raised, where this rank's object cannot be pickled.
        RemoteError: on the others, where some rank's object cannot be.
    """
    if group is None:
        return [obj]
    announce(group, operation, any_line=any_line)
    parcel, error = _packed(obj)
    message = pickle.dumps(parcel)
    with awaited(group, operation):
        sizes = meet(group, operation, (), [len(message)]).flatten().tolist()
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        arrived = all_gather(mine, group)
    parcels = {rank: pickle.loads(bytes(arrived[rank, :size].numpy())) for rank, size in enumerate(sizes)}  # noqa: S301
    return list(_opened(parcels, error, operation).values())


def hand_out(obj: Any, source: int, group: ProcessGroup, operation: str) -> Any:
    """One rank's object on every rank. A collective, which the caller announces.

    Args:
        obj: anything that can be pickled; read on `source` only.
        source: the rank that gives it.
        group: the control group.
        operation: what it is called in errors.

    Raises:
        Exception: what pickling raised, on `source`.
        RemoteError: on the others, where pickling raised.
    """
    parcel, error = _packed(obj) if group.rank() == source else (None, None)
    box = [parcel]
    with awaited(group, operation):
        dist.broadcast_object_list(box, src=source, group=group)
    arrived: Any = box[0]
    return _opened({source: arrived}, error, operation)[source]


def share_error(
    error: BaseException | None, doing: str, group: ProcessGroup | None, around_block: bool = False
) -> None:
    """Raise on every rank when any rank has an error. A collective.

    Args:
        error: this rank's error, or None.
        doing: what was being done, for the text of the others: "loading the checkpoint".
        group: the control group; None for a process alone.
        around_block: some ranks come from the beginning of a `with` block and others from its end: checked mode then
            compares `doing` and not the line.

    Raises:
        BaseException: `error` itself on the rank that has one.
        RemoteError: on the others, with the first failing rank and its traceback.
    """
    report = None if error is None else "".join(traceback.format_exception(error))
    try:
        reports = exchange(report, group, doing if around_block else "raise_together", any_line=around_block)
    except Exception:
        if error is None:
            raise
        reports = []  # the group is broken as well: this rank's own error is nearer to the cause
    if error is not None:
        raise error
    _raise_remote({rank: report for rank, report in enumerate(reports) if report is not None}, doing)


def _packed(obj: Any) -> tuple[Parcel, Exception | None]:
    # Tried here before torch does it: an error has to travel like the object, or the other ranks would wait for it.
    try:
        pickle.dumps(obj)
    except Exception as error:  # noqa: BLE001  `_opened` raises it
        return (False, "".join(traceback.format_exception(error))), error
    return (True, obj), None


def _opened(parcels: Mapping[int, Parcel], error: Exception | None, operation: str) -> dict[int, Any]:
    if error is not None:
        raise error
    reports = {rank: content for rank, (whole, content) in parcels.items() if not whole}
    _raise_remote(reports, f"{operation}: pickling the object")
    return {rank: content for rank, (_, content) in parcels.items()}


def _raise_remote(reports: Mapping[int, str], doing: str) -> None:
    if reports:
        first, *others = reports
        more = f" (and on rank {', '.join(map(str, others))})" if others else ""
        raise RemoteError(f"{doing} failed on rank {first}{more}", rank=first, traceback=reports[first])
