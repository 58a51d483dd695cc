"""Messages between processes outside the data path: python objects and errors, over the CPU control group.

Objects travel as pickles, between processes of one job only: never from a file or a stranger.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from instep.errors import RemoteError
from instep.state.checked import announce

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def exchange(obj: Any, group: ProcessGroup | None, operation: str = "gather_object") -> list[Any]:
    """Every rank's object, in rank order, on every rank. A collective; alone where there is no group.

    Args:
        obj: anything that can be pickled.
        group: the control group; None for a process alone.
        operation: what it is called in checked mode.
    """
    if group is None:
        return [obj]
    announce(group, operation)
    objects: list[Any] = [None] * group.size()
    dist.all_gather_object(objects, obj, group=group)
    return objects


def share_error(error: BaseException | None, doing: str, group: ProcessGroup | None) -> None:
    """Raise on every rank when any rank has an error. A collective.

    Args:
        error: this rank's error, or None.
        doing: what was being done, for the text of the others: "loading the checkpoint".
        group: the control group; None for a process alone.

    Raises:
        BaseException: `error` itself on the rank that has one.
        RemoteError: on the others, with the first failing rank and its traceback.
    """
    report = None if error is None else "".join(traceback.format_exception(error))
    try:
        reports = exchange(report, group, "raise_together")
    except Exception:
        if error is None:
            raise
        reports = []  # the group is broken as well: this rank's own error is nearer to the cause
    if error is not None:
        raise error
    failed = [rank for rank, report in enumerate(reports) if report is not None]
    if failed:
        others = f" (and on rank {', '.join(map(str, failed[1:]))})" if failed[1:] else ""
        raise RemoteError(f"{doing} failed on rank {failed[0]}{others}", rank=failed[0], traceback=reports[failed[0]])
