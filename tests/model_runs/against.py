"""Holds another instep against the model, and goes on after a difference: `--package PATH`.

PATH is a folder with a package `instep`, such as an older checkout. Differences are grouped by what differs first, once
without metrics and then with them: among all events, and among those of each owner, so that one difference does not
hide another. Each group is printed when it is first seen, with the number of the run, the minutes and the case, and in
the end with its smallest case.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

LONGEST_S = 10
"""A run that takes more seconds hangs."""
SHRINK_S = 20
"""How many seconds are spent on a group to find a smaller case."""


OWNERS = "CMOLDVF"
"""Owners of events, whose events are compared by themselves too."""


class Hangs(Exception):
    """Ends a run that hangs."""


def main() -> int:
    """Run cases for some minutes, and print the groups of differences."""
    parser = argparse.ArgumentParser(prog="python -m tests.model_runs.against", description=__doc__)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 1, 1, 1, 1, 1, 1, 1, 2, 3])
    given_ = parser.parse_args()
    put_first(given_.package.resolve())

    import torch  # late: the other package stands first on the path from here on
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from tests.model_runs import draw
    from tests.model_runs.script import changed

    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, end)
    began_s, runs = time.monotonic(), 0
    groups: dict[str, tuple[int, int, float, Any]] = {}

    @seed(given_.seed)
    @settings(
        max_examples=1_000_000,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )
    @given(draw.cases(tuple(given_.ranks)), draw.processes())
    def compare(case: Any, in_turn: Any) -> None:
        nonlocal runs
        pair = (case, in_turn)
        minutes = (time.monotonic() - began_s) / 60
        if minutes > given_.minutes:
            raise KeyboardInterrupt
        runs += 1
        for group in groups_of(pair):
            count, first, at, smallest = groups.get(group, (0, runs, minutes, pair))
            if count == 0:
                print(f"run {runs}, minute {minutes:.1f}: {group}\n  {changed(case)}\n  {in_turn}", flush=True)
            smaller = min(smallest, pair, key=lambda one: len(changed(one[0]) + repr(one[1])))
            groups[group] = (count + 1, first, at, smaller)

    try:
        compare()
    except KeyboardInterrupt:
        pass
    print(f"seed {given_.seed}: {runs} runs in {given_.minutes:g} minutes, {len(groups)} groups of differences")
    for group, (count, first, at, pair) in sorted(groups.items(), key=lambda item: -item[1][0]):
        case, in_turn = shrunk(pair, group)
        where = f"{count} runs, first in run {first} after {at:.1f} minutes: {group}"
        print(f"\n{where}\n  {changed(case)}\n  {in_turn}", flush=True)
    return int(bool(groups))


def put_first(package: Path) -> None:
    """Let `instep` be the one of a folder, here and in the processes that are started, and `tests` be these."""
    folder = tempfile.mkdtemp()
    os.symlink(package / "instep", f"{folder}/instep")
    sys.path.insert(0, folder)
    os.environ["PYTHONSAFEPATH"] = "1"  # a process that is started does not look into the present folder first
    os.environ["PYTHONPATH"] = os.pathsep.join((folder, str(Path(__file__).parents[2])))


def end(signal_number: int, frame: Any) -> None:
    """Raise Hangs: the alarm's handler."""
    raise Hangs


def first_of(meant: list[Any], seen: list[Any]) -> str | None:
    """Name the first difference of two lists of events."""
    for events in ((without_metrics(meant), without_metrics(seen)), (meant, seen)):
        for model, program in zip(*events, strict=False):
            if model != program:
                return f"{named(model, program)} for {named(program, model)}"
        if len(events[0]) != len(events[1]):
            longer = max(events, key=len)
            who = "the model" if longer is events[0] else "instep"
            return f"{who} goes on with {named(longer[min(map(len, events))])}"
    return None


def groups_of(pair: Any) -> list[str]:
    """Run a case, and return what differs first, and first for each owner of events; empty where nothing does."""
    from tests.model_runs import compare, processes

    def differs(case: Any, meant: list[Any], seen: list[Any]) -> str | None:
        found = first_of(meant, seen)
        parts = [[[event for event in part if event.owner == owner] for part in (meant, seen)] for owner in OWNERS]
        others = [first_of(*part) for part in parts]
        return found and "\n".join(dict.fromkeys([found, *(other for other in others if other is not None)]))

    real = compare.first_difference
    compare.first_difference = processes.first_difference = differs
    if pair[0].ranks == 1:  # ranks have a deadline of their own
        signal.setitimer(signal.ITIMER_REAL, LONGEST_S, 1.0)  # again, where the first falls into a finalizer
    try:
        found = processes.differences(*pair)
    except Hangs:
        found = "does not end"
    except Exception as error:  # of the program, outside of what it may raise, or of the comparison
        found = f"{type(error).__name__}: {str(error)[:80]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        compare.first_difference = processes.first_difference = real
    if found is None:
        return []
    ranks = "" if pair[0].ranks == 1 else "several ranks: "
    lines = [line for line in found.splitlines() if not line.startswith(("#", "import", "from", "in process"))]
    several = " for " in lines[0] or " goes on with " in lines[0]
    return [
        ranks + re.sub(r"rank \d of \d: |\bat step.*|\d+", "", line)[:150]
        for line in (lines if several else [" | ".join(lines[:2])])
    ]


def without_metrics(events: list[Any]) -> list[Any]:
    return [event._replace(metrics=()) for event in events]


def named(event: Any, other: Any = None) -> str:
    """Name an event, with its arguments or metrics where these are all that differs from the other one."""
    name = f"{event.owner}.{event.name}"
    if event.owner == "F" and other is not None and other.owner == "F":
        return f"{name} {' and '.join(of_rows(event.args, other.args))}"
    if event.name in ("on_exception", "error"):
        name += f"({event.args[0]})"
    if other is None or (event.owner, event.name) != (other.owner, other.name):
        return name
    if event.args != other.args:
        return f"{name} with other arguments"
    return f"{name} with other {'metrics' if event.metrics != other.metrics else 'counters'}"


def of_rows(rows: tuple[Any, ...], others: tuple[Any, ...]) -> list[str]:
    """Name what rows have more than others have: whole rows, or cells."""
    if len(rows) != len(others):
        return ["with more rows" if len(rows) > len(others) else "with fewer rows"]
    more = {name for row, other in zip(rows, others, strict=True) for name in {*dict(row[1])} - {*dict(other[1])}}
    return [f"with more cells of {name}" for name in sorted(more)] or ["with other values"]


def shrunk(pair: Any, group: str) -> Any:
    """Return the smallest case of a group that is found by putting back one setting after the other."""
    found, until_s = True, time.monotonic() + SHRINK_S
    while found:
        found = False
        for smaller in candidates(pair):
            if time.monotonic() > until_s:
                return pair
            if group in groups_of(smaller):
                pair, found = smaller, True
                break
    return pair


def candidates(pair: Any) -> Any:
    """Yield smaller cases: a part by its default, or a smaller number."""
    case, in_turn = pair
    for n in range(len(in_turn)):
        yield case, in_turn[:n] + in_turn[n + 1 :]
    for smaller in smaller_ones(case):
        yield smaller, in_turn


def smaller_ones(thing: Any) -> Any:
    plain = type(thing)(1) if "samples" in vars(thing) else type(thing)()
    for field in fields(thing):
        value, default = getattr(thing, field.name), getattr(plain, field.name)
        if repr(value) != repr(default):
            yield replace(thing, **{field.name: default})
        if is_dataclass(value):
            for smaller in smaller_ones(value):
                yield replace(thing, **{field.name: smaller})
        elif isinstance(value, int) and not isinstance(value, bool) and value > 1:
            yield replace(thing, **{field.name: value - 1})
        elif isinstance(value, tuple) and len(value) > 1:
            yield replace(thing, **{field.name: value[:-1]})


if __name__ == "__main__":
    sys.exit(main())
