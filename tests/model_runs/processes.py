"""Runs one process after another in one folder: broken off, resumed, gone back to, continued, and asked."""

from __future__ import annotations

import shutil
import tempfile
from copy import deepcopy
from dataclasses import dataclass, replace

from tests.model.checkpoints import Disk, Saved
from tests.model.data import Draw
from tests.model.resume import Start, is_kept, resumed, saved_last, updates
from tests.model.run import Case, run
from tests.model.trace import Event
from tests.model_runs.compare import (
    FAST,
    difference,
    difference_of,
    first_difference,
    without_metrics_of_setup,
    without_places_of_loader_hooks,
)
from tests.model_runs.draw_data import can_go_on, can_move
from tests.model_runs.loaders import draw
from tests.model_runs.pool import Failed, Stop, record_ranks
from tests.model_runs.record import Ask, is_recorded
from tests.model_runs.script import script


@dataclass(frozen=True)
class Process:
    """One process that runs the case's program in a folder that those before it have used.

    Attributes:
        ckpt_path: what its fit goes on from: None, "auto", "last", "best", or the number of a checkpoint that is there.
        place: where it is broken off, as a part of its training; None: nowhere.
        kills: SIGKILL breaks it off; else an exception does.
        rank: the rank on which that happens, modulo their number.
        trigger: what that rank asks for in order, as in `tests.model.triggers`; None: nothing. The run may be broken
            off as well, later or before.
        asks_place: where it asks, as `place`.
        ranks: how many ranks it has; None: as many as before.
        more: what `max_epochs` and `max_steps` are raised by; below 0 they are lowered, at most to 0.
        asks: with which `ckpt_path` it calls `validate` after its fit, and then a process that has not trained does.
    """

    ckpt_path: str | int | None = "auto"
    place: float | None = None
    kills: bool = False
    rank: int = 0
    ranks: int | None = None
    more: int = 0
    trigger: str | None = None
    asks_place: float = 0.0
    asks: tuple[str, ...] = ()


def differences(case: Case, processes: tuple[Process, ...]) -> str | None:
    """Compare a case; where it has checkpoints, and processes are drawn, one after another instead."""
    if not can_move(case):
        processes = tuple(replace(process, ranks=None) for process in processes)
    return difference_over_processes(case, processes) if goes_through_processes(case, processes) else difference(case)


def goes_through_processes(case: Case, processes: tuple[Process, ...]) -> bool:
    """Return whether a case is run by one process after another."""
    return bool(processes) and case.checkpoints is not None and can_go_on(case)


def difference_after_a_break(case: Case, place: float) -> str | None:
    """Break a run off at a hook, and start it again: the first difference, also of the parts from the whole."""
    return difference_over_processes(case, (Process(place=place, kills=place == 0.35), Process()))


class Remembering(Disk):
    """A disk that knows of all checkpoints that ever were on it."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(list(disk.saved), disk.runs, dict(disk.held), deepcopy(disk.tables))
        self.ever = list(disk.saved)

    def add(self, new: Saved) -> Saved:
        self.ever.append(super().add(new))
        return self.ever[-1]


def difference_over_processes(case: Case, processes: tuple[Process, ...]) -> str | None:
    """Run one process after another in one folder, and return the first difference from the model; None without one."""
    folder = tempfile.mkdtemp(dir=FAST)
    disks = [Disk() for _ in range(case.ranks)]  # each rank's view of the one that there is
    before: list[Event] = []
    where = ""
    try:
        for number, process in enumerate(processes):
            where = f"in process {number + 1} of {processes}\n"
            case = longer(case, process.more)
            ranks = process.ranks or case.ranks
            if ranks != case.ranks:  # others go on with what rank 0 has saved
                case, disks = replace(case, ranks=ranks), [deepcopy(disks[0]) for _ in range(ranks)]
            rank, starts = process.rank % ranks, [start_of(process, disk) for disk in disks]
            by_rank = run_on_ranks(case, process, starts, disks, rank)
            if number == 1 and ranks == 1 and processes == (replace(processes[0], ranks=None), Process()):
                assert_parts_are_the_whole(case, draw, processes[0], before, by_rank[0])
            before = by_rank[0]
            recorded = [[event for event in meant if is_recorded(event, case.watch)] for meant in by_rank]
            start, there = starts[rank], starts[0].ckpt_path
            stop = None if start.breaks_at is None else Stop(len(recorded[rank]) - 1, process.kills, rank)
            ask = None
            if process.trigger is not None and start.sets_before is not None:
                at = sum(is_recorded(event, case.watch) for event in by_rank[rank][: start.sets_at])
                ask = Ask(process.trigger, at, rank)
            if isinstance(there, Saved):
                there = f"{folder}/{there.folder}/{there.name}"
            seen = record_ranks(case, folder, stop, ask=ask, ckpt_path=there, asks=process.asks)
            asked = any(one.asks for one in processes[:number])
            found = difference_on_ranks(case, recorded, seen, stop, asked)
            if found is not None:
                return f"{where}{found}"
            if before[-1].name == "error" and before[-1].args[0] != "Preempted":
                break
    except Failed as failed:
        return f"{where}{failed}\n{script(case)}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


def start_of(process: Process, disk: Disk) -> Start:
    """Return how a process starts, with what one rank sees of the disk."""
    path = process.ckpt_path
    if isinstance(path, int):
        path = disk.saved[path % len(disk.saved)] if disk.saved else None
    return Start(disk, path, asks=process.asks)


def run_on_ranks(case: Case, process: Process, starts: list[Start], disks: list[Disk], rank: int) -> list[list[Event]]:
    """Return the model's events on each rank, and leave starts and disks as they are after the process.

    Args:
        case: the run.
        process: what happens to it.
        starts: of the ranks.
        disks: each rank's view of the disk.
        rank: the one on which it happens.
    """
    start = starts[rank]

    def whole() -> list[Event]:
        return run(case, draw, rank, replace(start, disk=deepcopy(disks[rank])))

    if process.trigger is not None:
        sets_at = place_of(whole(), case, process.asks_place, BEGINS)
        if sets_at is not None:
            start.trigger, start.sets_at = process.trigger, sets_at
    start.breaks_at, start.kills = place_of(whole(), case, process.place), process.kills
    stopped = run(case, draw, rank, start)
    by_rank = []
    for other, its in enumerate(starts):
        if other == rank:
            by_rank.append(stopped)
            continue
        its.disk = Remembering(its.disk)
        its.trigger, its.sets_before = start.trigger, start.sets_before
        if start.breaks_at is not None:
            goes_on = run(case, draw, other, replace(its, disk=deepcopy(its.disk)))
            its.breaks_at = end_of_validation(goes_on, stopped)
        by_rank.append(run(case, draw, other, its))
        disks[other] = as_seen_by(its.disk, disks[rank])
    return by_rank


def end_of_validation(goes_on: list[Event], stopped: list[Event]) -> int | None:
    """Return the number of the event that a rank waits for in vain, since another one is broken off in a validation.

    Args:
        goes_on: the rank's events without the break.
        stopped: those of the one that is broken off.
    """
    start, end = (("C", f"on_validation_{name}") for name in ("start", "epoch_end"))
    begun, ended = (sum((event.owner, event.name) == hook for event in stopped) for hook in (start, end))
    ends = [n for n, event in enumerate(goes_on) if (event.owner, event.name) == end]
    return ends[ended] if begun > ended and len(ends) > ended else None


def difference_on_ranks(
    case: Case, recorded: list[list[Event]], seen: list[list[Event]], stop: Stop | None, asked: bool
) -> str | None:
    """Return the first difference on a rank; None without one.

    Args:
        case: the run.
        recorded: the model's events of each rank.
        seen: the program's.
        stop: where the run is broken off.
        asked: an earlier process has evaluated after its fit.
    """
    for rank, (meant, events) in enumerate(zip(recorded, seen, strict=True)):
        meant, events = without_places_of_loader_hooks(meant), without_places_of_loader_hooks(events)
        if asked:  # those evaluations wrote rows too
            meant, events = ([event for event in part if event.owner != "F"] for part in (meant, events))
        if stop is not None:  # what follows the break is open, and how far the other ranks come
            ended = [n for n, event in enumerate(events) if event.name in ("on_exception", "error")]
            until = stop.at + 1 if rank == stop.rank else min([len(events), len(meant), *ended])
            meant, events = meant[:until], events[:until]
        found = difference_of(case, meant, events) if meant else None
        if found is not None:
            return f"{f'rank {rank} of {case.ranks}: ' if case.ranks > 1 else ''}{found}"
    return None


def as_seen_by(own: Remembering, there: Disk) -> Disk:
    """Return what is on a disk with the states that another rank has saved, which has seen the run to its end."""
    disk = deepcopy(there)
    states = {(one.folder, one.name, one.line, one.step): one for one in own.ever}
    disk.saved = [states[one.folder, one.name, one.line, one.step] for one in disk.saved]
    disk.tables = own.tables
    return disk


def longer(case: Case, more: int) -> Case:
    """Return a case with more epochs and steps, or with fewer."""
    s = case.settings
    epochs = s.max_epochs if s.max_epochs in (None, -1) else max(0, s.max_epochs + more)
    steps = s.max_steps if s.max_steps == -1 else max(0, s.max_steps + more)
    return replace(case, settings=replace(s, max_epochs=epochs, max_steps=steps))


BEGINS = ("on_fit_start", "on_train_start", "training_step", "on_train_end")
"""The first of these is the first hook in which a run is asked for something."""


def place_of(
    whole: list[Event], case: Case, place: float | None, begins: tuple[str, ...] = ("training_step", "on_train_end")
) -> int | None:
    """Return the number of the hook at which something happens to a run; None where it does not come so far.

    Args:
        whole: the events of the run without it.
        case: the run.
        place: where it happens, as in `Process`.
        begins: the first of these hooks is the first place.
    """
    hooks = [n for n, event in enumerate(whole) if event.owner in "CM" and is_recorded(event, case.watch)]
    begin = next((n for n in hooks if whole[n].name in begins), None)
    end = next((n for n, event in enumerate(whole) if event.name == "on_train_end"), None)
    inside = [n for n in hooks if begin is not None and end is not None and begin <= n < end]
    return inside[int(place * (len(inside) - 1))] if inside and place is not None else None


def assert_parts_are_the_whole(
    case: Case, order: Draw | None, process: Process, first: list[Event], second: list[Event]
) -> None:
    """Hold the model against itself: the parts of a run that was broken off, or asked to end, are the whole together.

    A stop closes its epoch, which may validate once more. Then it is the optimizer steps that are the whole's, if
    nothing depends on a validation. One that the case asks for ends the whole too.
    """
    assert process.ckpt_path in (None, "auto")
    whole = run(case, order, start=Start(ckpt_path=process.ckpt_path))
    manual = case.optimization.manual
    if case.stop_at is not None:
        return
    # What is accumulated by hand is no part of a checkpoint.
    if manual is not None and ((manual.both and not manual.toggles) or max(manual.every) > 1):
        return
    errors = [part[-1].args[0] for part in (whole, first, second) if part[-1].name == "error"]
    if any(error != "Preempted" for error in errors):
        return
    more = case.stopping is not None or any(one.plateau for one in case.schedulers)
    if not (more and process.trigger in ("stop", "validate")):
        number, again = saved_last(first), updates(second)
        begins_anew = again[:1] == updates(whole)[:1]  # where only weights were left it does
        done = [] if number is None or begins_anew else first[:number]
        assert updates(done) + again == updates(whole)
    ended = any(event.name == "on_train_end" for event in first)
    if not ended and process.trigger not in ("stop", "validate"):
        parts = (resumed(whole, first), [event for event in second if is_kept(event)])
        meant, said = (without_metrics_of_setup(part) for part in parts)
        found = first_difference(case, meant, said)
        assert found is None, found
