"""Runs one process after another in one folder: broken off, resumed, gone back to, continued, and asked."""

from __future__ import annotations

import shutil
import tempfile
from copy import deepcopy
from dataclasses import dataclass, replace

from tests.model.checkpoints import Disk, Saved
from tests.model.data import Order
from tests.model.resume import Start, resumed
from tests.model.run import Case, run
from tests.model.trace import Event
from tests.model_runs.compare import (
    FAST,
    difference,
    difference_of,
    first_difference,
    order_of,
    without_metrics_of_setup,
)
from tests.model_runs.record import is_recorded, record

AGAIN = ("on_train_start", "on_train_epoch_start")
"""Hooks that run again after a resume: what they log comes again too, so such runs are not broken off."""


@dataclass(frozen=True)
class Process:
    """One process that runs the case's program in a folder that those before it have used.

    Attributes:
        ckpt_path: what its fit goes on from: None, "auto", "last", "best", or the number of a checkpoint that is there.
        place: where an exception breaks it off, as a part of its training; None: nowhere.
        more: what `max_epochs` and `max_steps` are raised by.
        asks: with which `ckpt_path` it calls `validate` after its fit, and then a process that has not trained does.
    """

    ckpt_path: str | int | None = "auto"
    place: float | None = None
    more: int = 0
    asks: tuple[str, ...] = ()


def differences(case: Case, processes: tuple[Process, ...]) -> str | None:
    """Compare a case; where it has checkpoints, and processes are drawn, one after another instead.

    A wish to stop is no part of a checkpoint, so such a run is not broken off.
    """
    again = any(call.hook in AGAIN for call in case.logs)
    if processes and case.ranks == 1 and case.checkpoints is not None and case.stop_at is None and not again:
        return difference_over_processes(case, processes)
    return difference(case)


def difference_after_a_break(case: Case, place: float) -> str | None:
    """Break a run off at a hook, and start it again: the first difference, also of the parts from the whole."""
    return difference_over_processes(case, (Process(place=place), Process()))


def difference_over_processes(case: Case, processes: tuple[Process, ...]) -> str | None:
    """Run one process after another in one folder, and return the first difference from the model; None without one."""
    disk, folder, order = Disk(), tempfile.mkdtemp(dir=FAST), order_of(case)
    before: list[Event] = []
    try:
        for number, process in enumerate(processes):
            case = longer(case, process.more)
            path = process.ckpt_path
            there = disk.saved if isinstance(path, int) else []
            start = Start(disk, path if isinstance(path, str) else None, asks=process.asks)
            if isinstance(path, int) and there:
                start.ckpt_path = there[path % len(there)]
            whole = run(case, order, start=replace(start, disk=deepcopy(disk)))
            start.breaks_at = place_of(whole, case, process.place)
            meant = run(case, order, start=start)
            if number == 1 and processes == (Process(place=processes[0].place), Process()):
                assert_parts_are_the_whole(case, order, before, meant)
            before = meant
            path = start.ckpt_path
            if isinstance(path, Saved):
                path = f"{folder}/{path.folder}/{path.name}"
            recorded = [event for event in meant if is_recorded(event, case.watch)]
            at = None if start.breaks_at is None else len(recorded) - 1
            seen = record(case, folder, at, path, asks=process.asks)
            if at is not None:  # what follows the exception is open
                seen = seen[: at + 1]
            if any(one.asks for one in processes[:number]):  # those evaluations wrote rows too
                recorded = [event for event in recorded if event.owner != "F"]
                seen = [event for event in seen if event.owner != "F"]
            found = difference_of(case, recorded, seen)
            if found is not None:
                return f"in process {number + 1} of {processes}\n{found}"
            if meant[-1].name == "error" and meant[-1].owner == "-":
                break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


def longer(case: Case, more: int) -> Case:
    """Return a case with more epochs and steps."""
    s = case.settings
    epochs = s.max_epochs if s.max_epochs in (None, -1) else s.max_epochs + more
    steps = s.max_steps if s.max_steps == -1 else s.max_steps + more
    return replace(case, settings=replace(s, max_epochs=epochs, max_steps=steps))


def place_of(whole: list[Event], case: Case, place: float | None) -> int | None:
    """Return the number of the hook at which a run is broken off; None where it does not train."""
    hooks = [n for n, event in enumerate(whole) if event.owner in "CM" and is_recorded(event, case.watch)]
    begin = next((n for n in hooks if whole[n].name in ("training_step", "on_train_end")), None)
    end = next((n for n, event in enumerate(whole) if event.name == "on_train_end"), None)
    inside = [n for n in hooks if begin is not None and end is not None and begin <= n < end]
    return inside[int(place * (len(inside) - 1))] if inside and place is not None else None


def assert_parts_are_the_whole(case: Case, order: Order | None, first: list[Event], second: list[Event]) -> None:
    """Hold the model against itself: the parts of a run that was broken off, put together, are the whole."""
    whole = run(case, order, start=Start(ckpt_path="auto"))
    manual = case.optimization.manual
    if manual is not None and max(manual.every) > 1:  # what is accumulated by hand is no part of a checkpoint
        return
    if whole[-1].name != "error" and first != whole:
        meant = [event for event in resumed(whole, len(first) - 1) if event.owner not in "DS"]
        said = [event for event in second if event.owner not in "DS"]
        found = first_difference(case, without_metrics_of_setup(meant), without_metrics_of_setup(said))
        assert found is None, found
