"""Who came, and what for: words that every rank leaves in torch's store.

They are read without the help of the rank that is missing. The store is the one where the default group was made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LINGER = timedelta(seconds=5)


class Book:
    """Numbered records of every rank of a group. Every method but `linger` raises RuntimeError if the store is gone.

    Args:
        kind: what is recorded; each kind has its own book.
        group: whose records; those of another group are not seen.
        kept: how many records of a rank are kept, its latest.
    """

    def __init__(self, kind: str, group: ProcessGroup, kept: int = 1) -> None:
        self._store = dist.PrefixStore(f"instep/{kind}/{group.group_name}", _get_default_store())
        self._rank, self._world, self._kept = group.rank(), group.size(), kept

    def write(self, number: int, text: str) -> None:
        """Leave this rank's record `number`."""
        self._store.set(f"{self._rank}/{number % self._kept}", json.dumps([number, text]))

    def read(self, number: int, or_later: bool = False) -> dict[int, str]:
        """The records `number` of the ranks that have left one; with `or_later`, or what came in its place since."""
        found: dict[int, str] = {}
        for rank in range(self._world):
            key = f"{rank}/{number % self._kept}"
            if self._store.check([key]):  # `get` would wait for it
                its_number, text = json.loads(self._store.get(key))
                if its_number == number or (or_later and its_number > number):
                    found[rank] = text
        return found

    def linger(self, number: int, ranks: Iterable[int]) -> None:
        """Rank 0 may hold the store: let nobody end before all these have read the records `number`."""
        try:
            self._store.set(f"read/{number}/{self._rank}", "")
            self._store.wait([f"read/{number}/{rank}" for rank in ranks], _LINGER)
        except RuntimeError:
            pass  # they wait longer than this rank did, or are gone


def digest_of(text: str) -> int:
    """64 bits of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
