"""The first message of every collective of the framework's own: what this rank is about to do, and some numbers.

All of them begin with an all-gather of one size on the control group. So ranks that come to different calls meet
nevertheless and all of them learn it, where gloo would end the process on messages of two sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from instep.errors import DistributedError
from instep.state.awaiting import awaited, finish
from instep.state.book import digest_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

HEADER = 16  # int64 numbers in the message: a digest, then as many sizes as find room


def meet(group: ProcessGroup, operation: str, described: Sequence[str], sizes: Sequence[int]) -> torch.Tensor:
    """Make sure that all ranks are about to do the same, and exchange numbers. A collective.

    Args:
        group: the control group, or one like it.
        operation: what this rank is about to do.
        described: what must be the same on all ranks; one line per tensor.
        sizes: what may differ; as many on every rank as `described` implies.

    Returns:
        Every rank's sizes, of shape (ranks, sizes).

    Raises:
        DistributedError: on every rank, if any two disagree; on those that wait, if one does not come.
    """
    text = "\n".join([operation, *described])
    with awaited(group, operation):
        table = all_gather(header(digest_of(text), *sizes[: HEADER - 1]), group)
        if table[:, 0].ne(digest_of(text)).any():  # on every rank: all digests are equal, or all see a difference
            raise DistributedError(_describe(operation, gather_texts(text, group)))
        known = table[:, 1 : len(sizes) + 1]
        rest = sizes[HEADER - 1 :]
        return torch.cat([known, all_gather(torch.tensor(rest), group)], dim=1) if rest else known


def header(digest: int, *numbers: int) -> torch.Tensor:
    """A first message."""
    return torch.tensor([digest, *numbers, *[0] * (HEADER - 1 - len(numbers))])


def gather_texts(text: str, group: ProcessGroup) -> list[str]:
    """Every rank's text: what all ranks call whose first messages differ. A collective."""
    data = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
    sizes = all_gather(torch.tensor([len(data)]), group).flatten().tolist()
    mine = torch.zeros(max(sizes), dtype=torch.uint8)
    mine[: len(data)] = data
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in all_gather(mine, group)]


def all_gather(mine: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Every rank's tensor, which is of one size on all of them, inside of `awaited`. A collective."""
    table = mine.new_empty((group.size(), len(mine)))
    work: Any = dist.all_gather(list(table.unbind()), mine, group=group, async_op=True)
    finish(work)
    return table


def _describe(operation: str, texts: list[str]) -> str:
    lines = [f"ranks disagree in a collective; this rank called {operation}. By rank:"]
    lines += [f"  rank {rank}: " + ", ".join(text.split("\n")) for rank, text in enumerate(texts)]
    return "\n".join(
        [*lines, "Call the same function on every rank, with tensors of the same names, shapes and dtypes."]
    )
