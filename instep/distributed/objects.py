"""Python objects, errors and waiting: messages between processes other than tensors, over the CPU control group.

Objects are sent as pickles, and are read only if their MAC was made with the job's secret.
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
    """Check that all ranks are about to do the same, and exchange sizes. A collective.

    Args:
        operation: what this rank is about to do.
        described: what must be the same on all ranks; one line per tensor.
        sizes: what may differ; as many on every rank as there are lines, or none on any.

    Returns:
        Every rank's sizes, in rank order.

    Raises:
        DistributedError: on every rank, if any two disagree; the text says in what.
    """
    state = PartialState()
    group = state.control_group
    if group is None:
        return [list(sizes)]
    announce(group, operation, ", ".join(described))
    return meet(group, operation, described, sizes).tolist()


def check_rank(from_process: int) -> None:
    """Raise if the job has no such rank; a job of one process allows every number."""
    world = PartialState().num_processes
    if world > 1 and not 0 <= from_process < world:
        raise SettingError(
            f"from_process={from_process}: the job has {world} processes, from 0 to {world - 1}",
            field="from_process",
            got=from_process,
        )


def control_group() -> ProcessGroup | None:
    """Return the CPU (gloo) group of all processes, for control messages; None for one process.

    Example:
        >>> control_group() is None  # a process alone
        True
    """
    return PartialState().control_group


def wait_for_everyone(name: str | None = None, timeout_s: float | None = None) -> None:
    """Wait until every process has called this. A collective, the same as `PartialState.wait_for_everyone`.

    Args:
        name: name of what is waited for. All processes give the same name, or none.
        timeout_s: seconds to wait, at most the process group's time-out; None waits almost that long.

    Raises:
        SettingError: the time-out is not above 0, or longer than the process group's.
        DistributedError: a process waits under another name, or did not come. The text says which process.

    Example:
        >>> wait_for_everyone("data is ready")
    """
    PartialState().wait_for_everyone(name, timeout_s)


def gather_object(obj: Any) -> list[Any]:
    """Give every rank all ranks' objects, in rank order; lists are joined. A collective.

    Args:
        obj: anything that can be pickled. A list adds its items, as many as each rank has; anything else is one entry,
            a dict or a tuple too.

    Returns:
        The items or objects of all ranks.

    Raises:
        Exception: what pickling raised, on the ranks whose object cannot be pickled.
        RemoteError: on the others, with the first such rank and its traceback.
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
    """Give one rank's object to every rank. A collective.

    Args:
        obj: anything that can be pickled; read on `from_process` only.
        from_process: the rank that gives it.

    Returns:
        The object itself on `from_process`, copies elsewhere.

    Raises:
        SettingError, RemoteError: as `broadcast_object_list`.

    Example:
        >>> broadcast_object({"run": "digits-7"})  # every rank gets rank 0's
        {'run': 'digits-7'}
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
        DistributedError: on every rank, if the lists are not equally long; where the message was not signed with this
            job's secret. None is changed.
        Exception: what pickling raised, on `from_process`.
        RemoteError: on the others, where pickling raised.

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
    """Raise on every rank if any rank has an error; do nothing if none has. A collective.

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
