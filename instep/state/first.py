"""One process runs a block before the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from instep.errors import UsageError
from instep.state.control import share_error
from instep.state.process import Process

# The blocks that this process is in, the outermost first.
_open: list[str] = []


@contextmanager
def goes_first(process: Process, first: bool, name: str) -> Iterator[None]:
    """Run the block here, then, if this process goes first, let the others run it. A collective.

    Inside such a block the order holds already: on one node, and for a block of the same name, an inner one does
    nothing. Otherwise the processes of the inner one could not meet, because some have not begun the outer one yet.

    Args:
        process: who this process is.
        first: whether it goes first.
        name: the method, for errors.

    Raises:
        RemoteError: where the block was waited for, or has run already, and it raised on a process that goes first.
        UsageError: the block stands inside one that orders the processes otherwise.
    """
    if _open:
        if process.environment.num_nodes > 1 and name != _open[0]:
            raise UsageError(
                f"{name} inside {_open[0]}: the processes of {process.environment.num_nodes} nodes cannot meet there, "
                f"since some of them run the outer block only after the others. Put one block after the other."
            )
        yield
        return
    group = None if process.groups is None else process.groups.control
    doing = f"the block under {name}"
    if not first:
        share_error(None, doing, group, around_block=True)
    try:
        _open.append(name)
        yield
    except BaseException as error:
        if first:
            share_error(error, doing, group, around_block=True)
        raise
    finally:
        _open.pop()
    if first:
        share_error(None, doing, group, around_block=True)
