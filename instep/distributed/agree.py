"""What ranks tell each other before a collective: that they do the same to alike tensors, and sizes that may differ.

One message of 128 bytes per rank over the control group: torch itself gives wrong results or hangs when ranks disagree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from instep.errors import DistributedError, SettingError
from instep.state import PartialState
from instep.state.book import digest_of
from instep.state.checked import announce
from instep.state.control import exchange

HEADER = 16  # int64 numbers in the message: a digest, then as many sizes as find room


def agree(operation: str, described: Sequence[str], sizes: Sequence[int] = ()) -> list[list[int]]:
    """Make sure that all ranks are about to do the same, and exchange sizes. A collective.

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
    text = "\n".join([operation, *described])
    digest = digest_of(text)
    table = _all_gather([digest, *sizes[: HEADER - 1]], HEADER, group)
    if table[:, 0].ne(digest).any():  # the same on every rank: either all digests are equal or all see a difference
        raise DistributedError(_describe(operation, exchange(text, group)))
    known = table[:, 1 : len(sizes) + 1]
    rest = sizes[HEADER - 1 :]
    if rest:
        known = torch.cat([known, _all_gather(rest, len(rest), group)], dim=1)
    return known.tolist()


def check_rank(from_process: int) -> None:
    """Refuse a rank that the job does not have; a process alone takes every one."""
    world = PartialState().num_processes
    if world > 1 and not 0 <= from_process < world:
        raise SettingError(
            f"from_process={from_process}: the job has {world} processes, from 0 to {world - 1}",
            field="from_process",
            got=from_process,
        )


def _all_gather(numbers: Sequence[int], width: int, group: dist.ProcessGroup) -> torch.Tensor:
    mine = torch.tensor([*numbers, *[0] * (width - len(numbers))])
    table = torch.empty(group.size(), width, dtype=torch.int64)
    dist.all_gather(list(table.unbind()), mine, group=group)
    return table


def _describe(operation: str, texts: list[str]) -> str:
    lines = [f"ranks disagree in a collective; this rank called {operation}. By rank:"]
    lines += [f"  rank {rank}: " + ", ".join(text.split("\n")) for rank, text in enumerate(texts)]
    return "\n".join(
        [*lines, "Call the same function on every rank, with tensors of the same names, shapes and dtypes."]
    )
