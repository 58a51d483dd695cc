"""Exchange of Python objects and errors between processes, and waiting for all of them, over the CPU control group.

Objects are sent as pickles. A pickle is read only if its MAC (signature) was made with the job's secret.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from instep.errors import SettingError
from instep.state import PartialState
from instep.state.collective_checks import announce
from instep.state.messages import exchange, hand_out, meet, share_error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def agree(operation: str, described: Sequence[str], sizes: Sequence[int] = ()) -> list[list[int]]:
    """Check that all ranks are about to enter the same collective, and exchange sizes. Collective.

    Args:
        operation: name of what this rank is about to do.
        described: texts that must be the same on all ranks, one line per tensor.
        sizes: numbers that may differ between ranks: one for each line of `described`, or none on all ranks.

    Returns:
        Every rank's sizes, in rank order.

    Raises:
        DistributedError: on every rank, if two ranks disagree; the error text says in what.
    """
    state = PartialState()
    group = state.control_group
    if group is None:
        return [list(sizes)]
    announce(group, operation, ", ".join(described))
    return meet(group, operation, described, sizes).tolist()


def check_rank(from_process: int) -> None:
    """Raise SettingError if the job has no such rank. With a single process, every number is allowed."""
    world = PartialState().num_processes
    if world > 1 and not 0 <= from_process < world:
        raise SettingError(
            f"from_process={from_process}: the job has {world} processes, from 0 to {world - 1}",
            field="from_process",
            got=from_process,
        )


def control_group() -> ProcessGroup | None:
    """Return the CPU (gloo) process group of all processes, for control messages; None for a single process.

    Example:
        >>> control_group() is None  # with a single process
        True
    """
    return PartialState().control_group


def wait_for_everyone(name: str | None = None, timeout_s: float | None = None) -> None:
    """Wait until every process has called this. Collective; the same as `PartialState.wait_for_everyone`.

    Args:
        name: name of the wait. All processes must pass the same name, or none.
        timeout_s: seconds to wait, at most the process group's time-out. None means up to 5 seconds less than this
            time-out.

    Raises:
        SettingError: the time-out is not above 0, or is longer than the process group's time-out.
        DistributedError: a process waits with another name, or did not come. The error text says which process.

    Example:
        >>> wait_for_everyone("data is ready")
    """
    PartialState().wait_for_everyone(name, timeout_s)


def gather_object(obj: Any) -> list[Any]:
    """Return the objects of all ranks on every rank, in rank order; lists are joined. Collective.

    Args:
        obj: any object that can be pickled. A list adds its items to the result; ranks may have lists of different
            lengths. Any other object, a dict or tuple too, is one entry.

    Returns:
        A list of the items or objects of all ranks.

    Raises:
        Exception: the error raised by pickle, on ranks whose object cannot be pickled.
        RemoteError: on the other ranks; it names the first rank whose object cannot be pickled, and has the traceback
            of that rank.
        DistributedError: a message was not signed with this job's secret.

    Example:
        >>> gather_object({"rank": 0}), gather_object(["a", "b"])
        ([{'rank': 0}], ['a', 'b'])
    """
    joined: list[Any] = []
    for of_rank in exchange(obj, control_group()):
        joined += of_rank if isinstance(of_rank, list) else [of_rank]
    return joined


def broadcast_object(obj: Any, from_process: int = 0) -> Any:
    """Send one rank's object to every rank. Collective.

    Args:
        obj: any object that can be pickled; used only on `from_process`.
        from_process: rank that sends the object.

    Returns:
        The object itself on `from_process`, a copy on the other ranks.

    Raises:
        SettingError, RemoteError: as for `broadcast_object_list`.

    Example:
        >>> broadcast_object({"run": "digits-7"})  # every rank gets the object of rank 0
        {'run': 'digits-7'}
    """
    return broadcast_object_list([obj], from_process)[0]


def broadcast_object_list(objects: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of a list by the items of one rank's list, in place. Collective.

    Args:
        objects: a list of the same length on every rank.
        from_process: rank that sends its items.

    Returns:
        The list itself.

    Raises:
        SettingError: there is no such rank.
        DistributedError: on every rank, if the lists have different lengths; on the receiving ranks, if the message was
            not signed with this job's secret. The lists are then not changed.
        Exception: on `from_process`, the error raised by pickle.
        RemoteError: on the other ranks, if the items cannot be pickled.

    Example:
        >>> settings = ["digits-7", 0.1]
        >>> broadcast_object_list(settings)
        ['digits-7', 0.1]
    """
    check_rank(from_process)
    group = control_group()
    if group is None:
        return objects
    agree(f"broadcast_object_list(from_process={from_process})", [f"length {len(objects)}"])
    arrived = hand_out(objects, from_process, group, "broadcast_object_list")
    if group.rank() != from_process:
        objects[:] = arrived
    return objects


def raise_together(error: BaseException | None, doing: str) -> None:
    """Raise an error on every rank if any rank has an error; otherwise do nothing. Collective.

    Args:
        error: this rank's error, or None.
        doing: description of the work, for the error text on other ranks, such as "saving the checkpoint".

    Raises:
        BaseException: `error` itself, on ranks that have an error.
        RemoteError: on the other ranks; it names the first failing rank, and has the traceback of that rank.

    Example:
        >>> error = None
        >>> try:
        ...     pass  # this rank's part
        ... except Exception as caught:
        ...     error = caught
        >>> raise_together(error, "saving the checkpoint")
    """
    share_error(error, doing, control_group())
