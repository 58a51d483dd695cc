"""Compares a run with the model: the first difference, and a script that shows it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.model.run import Case, run
from tests.model.trace import Event
from tests.model_runs.loaders import draw
from tests.model_runs.pool import Failed, record_ranks
from tests.model_runs.record import is_recorded
from tests.model_runs.script import script

FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A file system in memory, if there is one."""

SETUP = (
    *("configure_callbacks", "prepare_data", "setup", "configure_model", "configure_optimizers", "on_fit_start"),
    *("train_dataloader", "val_dataloader"),
)


def expected(case: Case, rank: int = 0) -> list[Event]:
    """Return what the model says of a case on one rank, as far as the recorder sees it."""
    return [event for event in run(case, draw, rank) if is_recorded(event, case.watch)]


def difference(case: Case) -> str | None:
    """Run a case, and return the first difference from the model with a script that shows it; None without one."""
    folder = tempfile.mkdtemp(dir=FAST)
    try:
        by_rank = record_ranks(case, folder)
    except Failed as failed:
        return f"{failed}\n{script(case)}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for rank, seen in enumerate(by_rank):
        found = difference_of(case, expected(case, rank), seen)
        if found is not None:
            return found if case.ranks == 1 else f"rank {rank} of {case.ranks}: {found}"
    return None


def difference_of(case: Case, meant: list[Event], seen: list[Event]) -> str | None:
    """Return the first difference of what was seen from what the model says, with a script; None without one."""
    last = meant[-1]
    if last.name == "error" and last.args[1]:  # refused early: how far the run comes until then is left open
        ended = seen[-1]
        trained = any(event.name == "training_step" for event in seen)
        if ended.name == "error" and not trained:  # with which error is open too: there may be several reasons
            return None
        return f"the model refuses the run before its first step\n{ended} is its end\n{script(case)}"
    if last.name == "error":
        meant[-1] = last._replace(args=last.args[:1])
    meant, seen = without_metrics_after_an_error(meant), without_metrics_after_an_error(seen)
    meant, seen = without_metrics_of_setup(meant), without_metrics_of_setup(seen)
    return first_difference(case, meant, seen)


def first_difference(case: Case, meant: list[Event], seen: list[Event]) -> str | None:
    """Return the first difference of two lists of events, with a script; None without one."""
    for number, (model, program) in enumerate(zip(meant, seen, strict=False)):
        if model != program:
            return _text(case, meant, number, f"the model: {model}", f"instep:    {program}")
    if len(meant) != len(seen):
        number = min(len(meant), len(seen))
        rest = (meant if len(meant) > number else seen)[number]
        who = "the model goes on" if len(meant) > number else "instep goes on"
        return _text(case, meant, number, f"{who}: {rest}")
    return None


def without_metrics_of_setup(events: list[Event]) -> list[Event]:
    """Leave open what is shown during the set-up: a resume restores counters and metrics one by one."""
    begin = next((n for n, event in enumerate(events) if event.name not in SETUP), len(events))
    return [event._replace(step=0, epoch=0, metrics=()) if n < begin else event for n, event in enumerate(events)]


def without_places_of_loader_hooks(events: list[Event]) -> list[Event]:
    """Leave open which step a loader hook of a resumed run sees: that of an earlier call. Samples show the epoch."""
    hooks = ("train_dataloader", "val_dataloader")
    return [event._replace(step=0, epoch=0, metrics=()) if event.name in hooks else event for event in events]


def without_metrics_after_an_error(events: list[Event]) -> list[Event]:
    """Leave the metrics out from `on_exception` on: a device that has failed is not asked for them."""
    ends = next((number for number, event in enumerate(events) if event.name == "on_exception"), len(events))
    ends = min(ends, len(events) - 1 if events and events[-1].name == "error" else ends)
    return [*events[:ends], *(event._replace(metrics=()) for event in events[ends:])]


def _text(case: Case, meant: list[Event], number: int, *lines: str) -> str:
    before = [f"  {event}" for event in meant[max(0, number - 3) : number]]
    return "\n".join([f"event {number} differs, after", *before, *lines, script(case)])
