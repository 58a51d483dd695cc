"""Who came, and what for: words that every rank leaves in torch's store, behind a MAC made with the job's secret.

They are read without the help of the rank that is missing. The store is the one where the default group was made. Where
that is a file, which grows with each word, they lie in a folder beside it.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from instep.errors import DistributedError
from instep.state.secret import job_secret
from instep.utils.small_files import replace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LINGER = timedelta(seconds=5)
_POLL_S = 0.02


class Book:
    """Numbered records of every rank of a group. Every method but `linger` raises RuntimeError if the store is gone.

    Args:
        kind: what is recorded; each kind has its own book.
        group: whose records; those of another group are not seen.
        kept: how many records of a rank are kept, its latest.
    """

    def __init__(self, kind: str, group: ProcessGroup, kept: int = 1) -> None:
        self._name = f"instep/{kind}/{group.group_name}"
        store: Any = dist.PrefixStore(self._name, _get_default_store())
        below: Any = store
        while isinstance(below, dist.PrefixStore):
            below = below.underlying_store
        file_store: Any = dist.FileStore  # whose stub lacks the path
        if isinstance(below, file_store):
            mine = store.compare_set("folder", "", uuid.uuid4().hex).decode()  # the same on all ranks, of this book
            store = _Folder(Path(f"{below.path}.{kind}-{mine}"))
        self._store = store
        self._rank, self._world, self._kept = group.rank(), group.size(), kept

    def write(self, number: int, text: str) -> None:
        """Leave this rank's record `number`."""
        key = f"{self._rank}/{number % self._kept}"
        self._store.set(key, job_secret().sign(f"{self._name}/{key}", [number, text]))

    def read(self, number: int, or_later: bool = False) -> dict[int, str]:
        """The records `number` of the ranks that have left one; with `or_later`, or what came in its place since."""
        found: dict[int, str] = {}
        for rank in range(self._world):
            key = f"{rank}/{number % self._kept}"
            if self._store.check([key]):  # `get` would wait for it
                try:
                    its_number, text = job_secret().verify(f"{self._name}/{key}", self._store.get(key))
                except DistributedError:
                    its_number, text = number, "left a record that was not signed with this job's secret"
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


class _Folder:
    """What `Book` needs of a store: a file for each key.

    Args:
        path: where; made on first use.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(self, key: str, value: str) -> None:
        try:
            self._path.mkdir(mode=0o700, exist_ok=True)
            replace(self._of(key), value.encode())
        except OSError as error:
            raise RuntimeError(f"the job's folder does not answer: {error}") from error

    def get(self, key: str) -> bytes:
        try:
            return self._of(key).read_bytes()
        except OSError as error:
            raise RuntimeError(f"the job's folder does not answer: {error}") from error

    def check(self, keys: Iterable[str]) -> bool:
        if not self._path.parent.is_dir():
            raise RuntimeError("the job's folder has gone with its agent")
        return all(self._of(key).exists() for key in keys)

    def wait(self, keys: Iterable[str], limit: timedelta) -> None:
        deadline = time.monotonic() + limit.total_seconds()
        keys = list(keys)
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{keys} have not come within {limit}")
            time.sleep(_POLL_S)

    def _of(self, key: str) -> Path:
        return self._path / quote(key, safe="")


def digest_of(text: str) -> int:
    """64 bits of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
