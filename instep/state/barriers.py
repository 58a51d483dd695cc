"""Barriers with a name: wait for every process and report missing ones; run one process before the others.

A barrier is one small all-gather of digests of its name, over the control group. A rank that waits for more than a
moment records this in the group's key-value store. So a barrier has no extra cost if all ranks come in time, and a
missing rank is found from the records of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from instep.errors import DistributedError, SettingError, UsageError
from instep.state.collective_checks import announce
from instep.state.messages import gather_calls, header, share_error
from instep.state.process import Process
from instep.state.process_group import Groups
from instep.state.rank_records import RankRecords, awaited, describe_ended, digest_of, finish
from instep.utils.warn import warn_user

_MOMENT_S = 0.25
_SAY_AFTER_S = 30.0

# Name of the outermost `goes_first` block that this process is in; empty outside of these blocks.
_open: list[str] = []


@contextmanager
def goes_first(process: Process, first: bool, name: str) -> Iterator[None]:
    """Run the `with` block on processes with `first=True`, and then on the others. Collective.

    A second block inside the first one has no effect if it has the same name or if the job has one node, since the
    order is already set. Any other inner block raises an error, since its processes would wait for processes that have
    not begun the outer block.

    Args:
        process: record of this process.
        first: whether this process goes first.
        name: name of the public method, for errors.

    Raises:
        RemoteError: the block raised on a process that goes first.
        UsageError: the block is inside another one with a different order of processes.
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


def wait_for_all(groups: Groups, name: str | None, timeout_s: float | None, checked: bool) -> None:
    """Wait until every rank calls this with the same name.

    Args:
        groups: the job's groups.
        name: what this rank waits for.
        timeout_s: how long to wait, in seconds. None: a little less than the time-out of the group, so that this
            function raises its error before torch raises one and the group can no longer be used.
        checked: whether checked mode is on. Its comparison before each collective waits for all ranks, so no barrier
            follows.

    Raises:
        SettingError: the time-out is not above 0, or is longer than the time-out of the group.
        DistributedError: on every rank, if the names differ; on the waiting ranks, if some ranks did not come in time.
    """
    limit_s = _limit(groups, timeout_s)
    if checked:
        announce(groups.control, f"wait_for_everyone({name!r})", timeout_s=limit_s)
        return
    with awaited(groups.control, f"wait_for_everyone({name!r})", alone=True) as watch:
        _wait(groups, name, limit_s, watch)


def _wait(groups: Groups, name: str | None, limit_s: float, watch: awaited) -> None:
    turn = next(groups.turns)
    mine = header(digest_of(f"wait_for_everyone() {_quoted(name)}"))
    seen = mine.new_empty((groups.control.size(), len(mine)))
    moment_s = min(_MOMENT_S, limit_s / 2)
    try:
        work: Any = dist.all_gather(list(seen.unbind()), mine, group=groups.control, async_op=True)
        late = not finish(work, moment_s)
        if late:
            _write(groups, turn, name)
            said_s = min(_SAY_AFTER_S, limit_s)
            late = not finish(work, said_s - moment_s)
            if late and said_s < limit_s:
                warn_user(_report(groups, turn, name, f"still waits after {said_s:g} s", last=False))
            # In the extra time, ranks that came at the last moment can record that they are here.
            late = late and not finish(work, limit_s - said_s + 2 * _MOMENT_S)
    except RuntimeError as error:
        _write(groups, turn, name)
        gone = describe_ended(watch.gone_by_now())
        problem = f"the connection to another process broke{f'. {gone}' if gone else f' ({error})'}"
        raise DistributedError(_report(groups, turn, name, problem.removesuffix("."))) from error
    if late:
        raise DistributedError(_report(groups, turn, name, f"not everybody came within {limit_s:g} s"))
    if seen.ne(mine).any():
        # A rank that entered another collective sees the difference too, and calls the same function.
        calls = gather_calls(_call(name), groups.control)
        doing = {rank: f"in {', '.join(parts)}" for rank, (parts, _) in enumerate(calls)}
        places = {rank: f"at {place}" for rank, (_, place) in enumerate(calls)}
        raise DistributedError(
            f"the processes wait for different things: {_by_name(doing)}. Every process must come to the same "
            f"wait_for_everyone(). Now {_by_name(places)}."
        )


def _write(groups: Groups, turn: int, name: str | None) -> None:
    try:
        RankRecords("waiting", groups.control).write(turn, _quoted(name))
    except RuntimeError:
        pass  # the process that hosts the store has ended; the message of `_report` will say so


def _report(groups: Groups, turn: int, name: str | None, problem: str, last: bool = True) -> str:
    """Describe which ranks are missing, and what the other ranks wait for; `last`: this rank waits no longer."""
    here = f"rank {groups.control.rank()} is in {_call(name)}, and {problem}."
    try:
        records = RankRecords("waiting", groups.control)
        names = records.read(turn, or_later=True)
    except RuntimeError:
        return f"{here} Who came is not known: the job's store, mostly in rank 0, does not answer. See its output."
    if last:
        records.keep_store_alive(turn, names)
    missing = [rank for rank in range(len(groups.hosts)) if rank not in names]
    if not missing:
        return f"{here} All had come, but not all are there any more: {_by_name(names)}."
    absent = ", ".join(f"rank {rank} (on {groups.hosts[rank]})" for rank in missing)
    return (
        f"{here} Missing: {absent}. Waiting: {_by_name(names)}. See what the missing ones do, or why they ended: one "
        "may have left its loop early, or have more batches."
    )


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


def _quoted(name: str | None) -> str:
    return "without a name" if name is None else f"under {name!r}"


def _call(name: str | None) -> str:
    return f"wait_for_everyone({'' if name is None else repr(name)})"


def _by_name(names: dict[int, Any]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, name in names.items():
        ranks.setdefault(name, []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, found))} {name}" for name, found in ranks.items())
