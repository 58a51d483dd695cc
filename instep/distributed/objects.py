"""Python objects, errors and waiting: what processes tell each other besides tensors, over the CPU control group.

Objects travel as pickles, between the processes of one job only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from instep.distributed.agree import check_rank
from instep.errors import DistributedError
from instep.state import PartialState
from instep.state.checked import announce
from instep.state.control import exchange, share_error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def control_group() -> ProcessGroup | None:
    """The CPU (gloo) group of all processes for control messages; None for one process."""
    return PartialState().control_group


def wait_for_everyone(name: str | None = None, timeout_s: float | None = None) -> None:
    """Wait until every process is here: `PartialState.wait_for_everyone`. A collective."""
    PartialState().wait_for_everyone(name, timeout_s)


def gather_object(obj: Any) -> list[Any]:
    """Every rank's object, in rank order, on every rank. A collective.

    Args:
        obj: anything that can be pickled. It is one entry of the list, whatever it is: a dict is not taken apart.

    Example:
        >>> gather_object({"rank": 0})
        [{'rank': 0}]
    """
    return exchange(obj, control_group())


def broadcast_object(obj: Any, from_process: int = 0) -> Any:
    """One rank's object on every rank. A collective.

    Args:
        obj: anything that can be pickled; read on `from_process` only.
        from_process: the rank that gives it.

    Returns:
        The object itself on `from_process`, copies elsewhere.
    """
    return broadcast_object_list([obj], from_process)[0]


def broadcast_object_list(objects: list[Any], from_process: int = 0) -> list[Any]:
    """Replace a list's items by those of one rank, in place. A collective.

    Args:
        objects: a list of the same length on every rank.
        from_process: the rank whose items are taken.

    Returns:
        The list itself.

    Raises:
        SettingError: there is no such rank.
        DistributedError: this rank's list is not as long as that of `from_process`; it is not changed.
    """
    check_rank(from_process)
    group = control_group()
    if group is None:
        return objects
    announce(group, f"broadcast_object_list(from_process={from_process})", f"length {len(objects)}")
    mine = PartialState().process_index == from_process
    parcel = [objects if mine else None]
    dist.broadcast_object_list(parcel, src=from_process, group=group)
    arrived = parcel[0]
    if mine or arrived is None:
        return objects
    if len(arrived) != len(objects):
        raise DistributedError(
            f"broadcast_object_list: rank {from_process} sent {len(arrived)} objects, but the list here has "
            f"{len(objects)} places. Give a list of the same length on every rank, such as [None] * {len(arrived)}."
        )
    objects[:] = arrived
    return objects


def raise_together(error: BaseException | None, doing: str) -> None:
    """Raise on every rank when any rank has an error; do nothing when none has. A collective.

    Args:
        error: this rank's error, or None.
        doing: what was being done, for the text of the others: "saving the checkpoint".

    Raises:
        BaseException: `error` itself, on the ranks that have one.
        RemoteError: on the others, with the first failing rank and its traceback.

    Example:
        >>> error = None
        >>> try:
        ...     pass  # this rank's part
        ... except Exception as caught:
        ...     error = caught
        >>> raise_together(error, "saving the checkpoint")
    """
    share_error(error, doing, control_group())
