"""Diagnostics in torch's key-value store: each rank records which collective it enters or waits for.

From these records, other ranks can tell which rank is missing. Each record has a MAC made with the job's secret. The
records are in the store of the default group. If this store is a file, they are in a folder next to the file, since
the file would grow with each record.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import instep
from instep.errors import DistributedError, InstepError
from instep.state.secret import job_secret
from instep.utils.atomic import replace
from instep.utils.untrusted_files import clean

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from torch.distributed import ProcessGroup

_LINGER = timedelta(seconds=5)
_POLL_S = 0.02
_AT_ONCE = 256  # number of records per request to the store

ENDED_FILE = "INSTEP_ENDED_FILE"
"""Environment variable: path of the file in which the agent records ended ranks, as JSON (exit code by rank)."""


class RankRecords:
    """Numbered records of every rank of a group.

    Every method but `keep_store_alive` raises RuntimeError if the store is gone.

    Args:
        kind: kind of the records; records of different kinds are separate.
        group: group of the ranks; records of different groups are separate.
        kept: number of latest records that are kept for each rank.
    """

    def __init__(self, kind: str, group: ProcessGroup, kept: int = 1) -> None:
        self._name = f"instep/{kind}/{group.group_name}"
        store: Any = dist.PrefixStore(self._name, _get_default_store())
        below: Any = store
        while isinstance(below, dist.PrefixStore):
            below = below.underlying_store
        # typed as Any, since torch's type stub of FileStore lacks the attribute `path`
        file_store: Any = dist.FileStore
        if isinstance(below, file_store):
            # a folder name that all ranks share, used only for these records
            mine = store.compare_set("folder", "", uuid.uuid4().hex).decode()
            store = _Folder(Path(f"{below.path}.{kind}-{mine}"))
        self._store = store
        self._rank, self._world, self._kept = group.rank(), group.size(), kept

    def write(self, number: int, text: str) -> None:
        """Write this rank's record `number`."""
        key = f"{self._rank}/{number % self._kept}"
        self._store.set(key, job_secret().sign(f"{self._name}/{key}", [number, text]))

    def read(self, number: int, or_later: bool = False) -> dict[int, str]:
        """Return record `number` of each rank that has written it.

        With `or_later`, also return a rank's later record that has overwritten record `number`.
        """
        found: dict[int, str] = {}
        for first in range(0, self._world, _AT_ONCE):
            ranks = range(first, min(first + _AT_ONCE, self._world))
            keys = [f"{rank}/{number % self._kept}" for rank in ranks]
            for rank, key, value in zip(ranks, keys, self._values(keys), strict=True):
                if value is None:
                    continue
                try:
                    its_number, text = job_secret().verify(f"{self._name}/{key}", value)
                except DistributedError:
                    its_number, text = number, "left a record that was not signed with this job's secret"
                if its_number == number or (or_later and its_number > number):
                    found[rank] = text
        return found

    def _values(self, keys: list[str]) -> list[bytes | None]:
        """Return the values of keys, with None for a missing key.

        If all keys exist, and the store can return several values in one reply, two requests are enough.
        """
        if getattr(self._store, "has_extended_api", bool)() and self._store.check(keys):
            return self._store.multi_get(keys)
        # `get` would wait for a missing key
        return [self._store.get(key) if self._store.check([key]) else None for key in keys]

    def keep_store_alive(self, number: int, ranks: Iterable[int]) -> None:
        """Record that this rank has read record `number`, and wait a few seconds until all `ranks` have done so.

        This process may host the store. Then the store ends with the process, and later readers would find nothing.
        """
        try:
            self._store.set(f"read/{number}/{self._rank}", "")
            self._store.wait([f"read/{number}/{rank}" for rank in ranks], _LINGER)
        except RuntimeError:
            pass  # the store has ended, or a rank has not read the record in time


class _Folder:
    """Folder with one file per key, in place of a store for `RankRecords`.

    Args:
        path: the folder, which is created on first use.
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
    """Hash a text to 64 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


SAY_AFTER_S = 30.0
_LOOK_S = 0.5
_WRITE_AFTER_S = 1.0
_IDLE_S = 5.0  # seconds after which the watcher's thread ends if no thread waits for a collective
_KNOWN_WITHIN_S = 1.0
_LIBRARIES = (
    *(os.path.join(os.path.dirname(str(module.__file__)), "") for module in (instep, torch)),
    contextlib.__file__,  # its frames, of `with` blocks and decorators, are not the user's code
)
_LEFT = "left"

_open: dict[int, awaited] = {}  # thread id -> the collective that the thread waits for now
_watcher: tuple[int, threading.Thread] | None = None
_hosts: tuple[str, ...] = ()


def note_hosts(hosts: tuple[str, ...]) -> None:
    """Record the host names of the ranks, for later messages."""
    global _hosts
    _hosts = hosts


def finish(work: Any, within_s: float = float("inf")) -> bool:
    """Wait for a torch operation inside an `awaited` block; return False if it has not ended within `within_s` seconds.

    Raises:
        RuntimeError: the operation failed, or a rank has ended.
    """
    wait, begun = _open[threading.get_ident()], time.monotonic()
    while True:
        left_s = within_s - (time.monotonic() - begun)
        try:
            work.wait(timedelta(seconds=max(0.001, min(left_s, _LOOK_S))))
        except RuntimeError:
            # A completed operation has either failed, or ended just after this wait timed out. A second wait raises the
            # error of a failed one.
            if work.is_completed():
                work.wait()
                return True
            if wait.in_vain:
                raise RuntimeError("a rank has ended") from None
            if left_s <= _LOOK_S:
                return False
        else:
            return True


def ended_ranks() -> dict[int, str]:
    """Return which ranks have ended while others run, and how, from the record of instep's agent; {} without one."""
    try:
        with open(os.environ[ENDED_FILE]) as file:
            codes = json.load(file)
    except (KeyError, OSError, ValueError):  # there is no agent of instep, or no rank has ended
        return {}
    return {
        int(rank): "has ended its program with success" if code == 0 else f"has ended with exit code {code}"
        for rank, code in codes.items()
    }


def record_end(group: ProcessGroup) -> None:
    """Record at the program's end that this rank has ended, for ranks that wait for it later. This never takes long."""
    how = "has ended its program" + (" after an error" if hasattr(sys, "last_value") else "")
    with suppress(RuntimeError):  # the store has ended with the process that hosts it
        RankRecords(_LEFT, group).write(0, how)


class awaited:
    """Context manager around a blocking collective.

    It turns a RuntimeError of torch into a DistributedError that names the missing ranks. Inside another `awaited`
    block of the same thread it has no effect.

    Args:
        group: process group of the collective.
        operation: name of the user's call.
        alone: whether the code in the block reports missing ranks and explains its errors itself. Then this object
            only stops the block if a rank has ended.

    Attributes:
        in_vain: whether a rank for which the block waits has ended.
    """

    __slots__ = ("_alone", "_gone", "_inner", "_since", "_thread", "_told", "_written", "group", "in_vain", "operation")

    def __init__(self, group: ProcessGroup, operation: str, alone: bool = False) -> None:
        self.group, self.operation, self._alone = group, operation, alone
        self.in_vain = self._gone = self._told = self._written = self._inner = False

    def __enter__(self) -> awaited:
        self._thread = threading.get_ident()
        if self._thread in _open:
            self._inner = True
            return self
        self._since = time.monotonic()
        _open[self._thread] = self
        _see_to_watcher()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._inner:
            return
        del _open[self._thread]
        if isinstance(error, RuntimeError) and not isinstance(error, InstepError) and not self._alone:
            self._fail(error)
        if self._written:
            self._write("")

    def _fail(self, error: RuntimeError) -> NoReturn:
        self._write(self._where())
        gone = self.gone_by_now()
        waited_s = time.monotonic() - self._since
        problem = "which will not come any more" if gone else f"and it failed ({str(error).splitlines()[0]})"
        text = self._text(f"waited {waited_s:.0f} s for the other ranks in {self._where()}, {problem}", gone)
        raise DistributedError(text) from error

    def check_age(self) -> None:
        """Record the wait, warn, or stop it, depending on how long it has lasted. Called in the watcher's thread."""
        age_s = time.monotonic() - self._since
        if age_s < _WRITE_AFTER_S:
            return
        if not self._written:
            self._written = True
            self._write(self._where())
            if _open.get(self._thread) is not self:  # the wait has ended while the record was written
                self._write("")
        before, self._gone = self._gone, bool(self.gone())
        # stop at the second check, since messages that the ended rank had sent may still arrive after the first check
        if before and self._gone:
            self.in_vain = True
        elif age_s > SAY_AFTER_S and not self._told and not self._alone:
            self._told = True
            said = self._text(f"has waited {age_s:.0f} s for the other ranks in {self._where()}, and goes on", {})
            with suppress(OSError, ValueError):  # stderr may be closed
                sys.stderr.write(clean(f"instep: {said}\n"))

    def gone(self) -> dict[int, str]:
        """Return the ranks of the group that have ended, with a text that says how."""
        ranks = self._ranks()
        gone = {}
        with suppress(RuntimeError):
            gone = {ranks[place]: how for place, how in RankRecords(_LEFT, self.group).read(0).items()}
        return gone | {rank: how for rank, how in ended_ranks().items() if rank in ranks}

    def gone_by_now(self) -> dict[int, str]:
        """Return the ended ranks after an error. Wait a moment, since a connection breaks before an end is recorded."""
        deadline = time.monotonic() + _KNOWN_WITHIN_S
        # an agent of instep also knows how a rank has ended
        known = ended_ranks if ENDED_FILE in os.environ else self.gone
        while not known() and time.monotonic() < deadline:
            time.sleep(_KNOWN_WITHIN_S / 10)
        return self.gone()

    def _ranks(self) -> list[int]:
        """Return the ranks of the group, numbered in the whole job."""
        return dist.get_process_group_ranks(self.group)

    def _where(self) -> str:
        frame = sys._current_frames().get(self._thread)
        return self.operation if frame is None else f"{self.operation} at {':'.join(map(str, call_site(frame)))}"

    def _write(self, text: str) -> None:
        with suppress(RuntimeError):  # the process that hosts the store has ended, as `_text` tells the user
            RankRecords("awaiting", self.group).write(0, text)

    def _text(self, what: str, gone: dict[int, str]) -> str:
        ranks = self._ranks()
        own = ranks[self.group.rank()]
        here = f"rank {own} {what}."
        try:
            waiting = {
                ranks[place]: text for place, text in RankRecords("awaiting", self.group).read(0).items() if text
            }
        except RuntimeError:
            waiting = {}
            here += " Who came is not known: the job's store, mostly in rank 0, does not answer."
        missing = [rank for rank in ranks if rank not in waiting and rank not in gone]
        parts = [said] if (said := describe_ended(gone)) else []
        if missing and not gone:
            parts.append(f"Missing: {', '.join(map(_named, missing))}.")
        others = [f"rank {rank} in {text}" for rank, text in waiting.items() if rank != own]
        if others:
            parts.append(f"Waiting too: {'; '.join(others)}.")
        return " ".join([here, *parts, "Every rank must make the same calls; see what the missing ones do."])


def call_site(frame: FrameType) -> tuple[str, int]:
    """Return file and line of the innermost call in the user's code, which is neither in instep nor in torch."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def named_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a message: "rank 3", "ranks 0, 1"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def describe_ended(gone: dict[int, str]) -> str:
    """Describe how ranks have ended, in one sentence for each rank; "" if no rank has ended."""
    return " ".join(f"Rank {rank} {how}." for rank, how in sorted(gone.items()))


def wait_for_start(store: Any, rank: int, world_size: int, timeout_s: float) -> None:
    """Wait until every rank is ready to create the process group.

    The store must be new: an entry of an earlier call would count as a rank that is ready.

    Raises:
        DistributedError: a rank has ended, or did not come in time.
    """
    begun = time.monotonic()
    store.set(f"come/{rank}", "")
    missing = [other for other in range(world_size) if other != rank]
    pause_s, said = 0.002, False
    while missing:
        missing = [other for other in missing if not store.check([f"come/{other}"])]
        age_s = time.monotonic() - begun
        gone = {other: how for other, how in ended_ranks().items() if other in missing}
        if gone and age_s > pause_s:
            raise DistributedError(
                f"rank {rank} waited {age_s:.0f} s in PartialState() for ranks that will not come any more. "
                f"{describe_ended(gone)} Every rank must build the state, or none."
            )
        text = f"waited {age_s:.0f} s in PartialState(). Missing: {', '.join(map(_named, missing))}."
        if missing and age_s > timeout_s:
            raise DistributedError(f"rank {rank} {text} Every rank must build the state; see what these do.")
        if missing and age_s > SAY_AFTER_S and not said:
            said = True
            sys.stderr.write(f"instep: rank {rank} has {text} It goes on waiting.\n")
        if missing:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)


def _named(rank: int) -> str:
    return f"rank {rank} (on {_hosts[rank]})" if rank < len(_hosts) else f"rank {rank}"


def _see_to_watcher() -> None:
    global _watcher
    if _watcher is None or _watcher[0] != os.getpid() or not _watcher[1].is_alive():
        thread = threading.Thread(target=_watch, name="instep-awaiting", daemon=True)
        _watcher = os.getpid(), thread
        thread.start()


def _watch() -> None:
    idle_s = 0.0
    while idle_s < _IDLE_S:
        time.sleep(_LOOK_S)
        waits: Iterable[awaited] = list(_open.values())
        idle_s = 0.0 if waits else idle_s + _LOOK_S
        for wait in waits:
            with suppress(RuntimeError):  # the process group was left in the meantime
                wait.check_age()
