"""Waiting for every process, under a name; and saying who did not come.

All meet in one small all-gather of their names' digests over the control group. A rank that waits for longer than a
moment writes that down in the store where the group was made: what it says there costs nothing while everybody is in
time, and needs no help from the rank that is missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from instep.errors import DistributedError, SettingError
from instep.state.checked import announce
from instep.state.control import exchange
from instep.state.process_group import Groups

_MOMENT_S = 0.25
_LINGER = timedelta(seconds=5)


def wait_for_all(groups: Groups, name: str | None, timeout_s: float | None, checked: bool) -> None:
    """Wait until every rank is here under the same name.

    Args:
        groups: the job's groups.
        name: what this rank waits for.
        timeout_s: how long to wait, in seconds; a little less than the group's own time-out when None, so that the
            error here comes before the group breaks.
        checked: whether collectives are checked: then announcing the wait is the wait.

    Raises:
        SettingError: the time-out is not above 0, or is longer than the group's own.
        DistributedError: on every rank, if the names differ; on those that wait, if some did not come in time.
    """
    limit_s = _limit(groups, timeout_s)
    if checked:
        announce(groups.control, f"wait_for_everyone({name!r})", timeout_s=limit_s)
        return
    turn = next(groups.turns)
    mine, seen = torch.tensor(_digest(name)), torch.empty(groups.control.size(), 2, dtype=torch.int64)
    moment_s = min(_MOMENT_S, limit_s / 2)
    try:
        work: Any = dist.all_gather(list(seen.unbind()), mine, group=groups.control, async_op=True)
        late = not _is_done(work, moment_s)
        if late:
            _Book(groups, turn).write(name)
            # Who came within the last moment writes it down within the next.
            late = not _is_done(work, limit_s - moment_s + 2 * _MOMENT_S)
    except RuntimeError as error:
        book = _Book(groups, turn)
        book.write(name)
        raise DistributedError(book.report(name, f"the connection to another process broke ({error})")) from error
    if late:
        raise DistributedError(_Book(groups, turn).report(name, f"not everybody came within {limit_s:g} s"))
    if seen.ne(mine).any():
        names = dict(enumerate(exchange(_quoted(name), groups.control)))
        raise DistributedError(
            f"the processes wait for different things: {_by_name(names)}. Every process must come to the same "
            f"wait_for_everyone()."
        )


class _Book:
    """Who waits, and under which name: one record for each rank, its latest."""

    def __init__(self, groups: Groups, turn: int) -> None:
        self._hosts, self._turn, self._rank = groups.hosts, turn, groups.control.rank()
        self._store = PrefixStore(f"instep/waiting/{groups.control.group_name}", _get_default_store())

    def write(self, name: str | None) -> None:
        try:
            self._store.set(str(self._rank), f"{self._turn} {_quoted(name)}")
        except RuntimeError:
            pass  # the store is gone with its process; `report` says so

    def report(self, name: str | None, problem: str) -> str:
        here = f"rank {self._rank} waited for everyone {_quoted(name)}, and {problem}."
        try:
            names = self._read()
            missing = [rank for rank in range(len(self._hosts)) if rank not in names]
            self._linger(list(names))
        except RuntimeError:
            return f"{here} Rank 0, which knows who came, is gone: its output may say why."
        if not missing:
            return f"{here} All had come, but not all are there any more: {_by_name(names)}."
        absent = ", ".join(f"rank {rank} (on {self._hosts[rank]})" for rank in missing)
        return f"{here} Missing: {absent}. Waiting: {_by_name(names)}. See what the missing ones do, or why they ended."

    def _read(self) -> dict[int, str]:
        """The words of the ranks that came."""
        names: dict[int, str] = {}
        for rank in range(len(self._hosts)):
            if self._store.check([str(rank)]):  # `get` would wait for it
                turn, _, name = self._store.get(str(rank)).decode().partition(" ")
                if int(turn) >= self._turn:
                    names[rank] = name
        return names

    def _linger(self, here: Sequence[int]) -> None:
        """Rank 0 may hold the store: let nobody end before all who wait have read it."""
        self._store.set(f"read/{self._turn}/{self._rank}", "")
        try:
            self._store.wait([f"read/{self._turn}/{rank}" for rank in here], _LINGER)
        except RuntimeError:
            pass  # they have more time than this rank had


def _limit(groups: Groups, timeout_s: float | None) -> float:
    group_s = groups.timeout.total_seconds()
    if timeout_s is None:
        return group_s - min(5.0, group_s / 10)
    if not timeout_s > 0:
        raise SettingError(f"timeout_s={timeout_s} must be above 0", field="timeout_s", got=timeout_s)
    if timeout_s > group_s:
        raise SettingError(
            f"timeout_s={timeout_s}: every collective of this job ends after {group_s:g} s. Build the state with a "
            f"longer one: PartialState(timeout={timeout_s}).",
            field="timeout_s",
            got=timeout_s,
        )
    return timeout_s


def _is_done(work: Any, seconds: float) -> bool:
    """Wait so long for a collective, which goes on if the time is over."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True


def _digest(name: str | None) -> list[int]:
    digest = hashlib.blake2b(_quoted(name).encode(), digest_size=16).digest()
    return [int.from_bytes(half, "little", signed=True) for half in (digest[:8], digest[8:])]


def _quoted(name: str | None) -> str:
    return "without a name" if name is None else f"under {name!r}"


def _by_name(names: dict[int, Any]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, name in names.items():
        ranks.setdefault(name, []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, found))} {name}" for name, found in ranks.items())
