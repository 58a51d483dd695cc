"""The long proof: nothing of a run grows with its length but what the user asked to keep.

    python benchmarks/studies/longhaul.py                       # make longhaul; 20 minutes on 2 cores
    python benchmarks/studies/longhaul.py --only epochs kills   # some legs
    python benchmarks/studies/longhaul.py --quick               # a hundredth of each leg, about a minute

Each leg (`longhaul_legs.py`) is a process of its own, on one core, with a limit on its time. Two run at a time, and the
one of two ranks runs alone. They write into memory where there is `/dev/shm`. At twelve points of a leg these figures
are taken: processor time for each unit of the leg since the point before, resident memory, descriptors, threads, and
the bytes and files on the disk.

**The rule.** The early value of a figure is the median of points 3 to 5, the late one that of points 10 to 12. So one
disturbed point fails nothing, and what a run makes once is there already. The late value may be at most

    early value * (1 + share) + more

with the figure's share and more in `RULES`. Logs grow by a row for each record, as the user asked: there the rule holds
for the bytes for each unit of the leg. Where a leg makes new runs in one folder, it holds so for all that is on the
disk. Everything else must stay. Other programs on the machine change processor time. So its share is large, and where
`by_hand_ms` grows, the time of the same handwritten steps at each point, so much growth is allowed as well. With
`--quick`, processor time is not judged: a twelfth of a leg takes milliseconds there.

A leg also fails if it raises, if it takes longer than its limit, or if the run did not do what was asked for: steps,
rows, checkpoints.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # of the harness, shared with the programs kept green

import harness

POINTS = 12
EARLY, LATE = slice(2, 5), slice(9, 12)
QUICK = 100  # `--quick` runs one of so many parts of a leg
IN_MEMORY = Path("/dev/shm")
CPU = "cpu_ms"


@dataclass(frozen=True)
class Rule:
    """How much a figure may grow between the early and the late points.

    Args:
        share: of the early value.
        more: on top, in the figure's own unit.
        why: where the two come from.
    """

    share: float
    more: float
    why: str


RULES = {
    CPU: Rule(0.30, 0.0, "other programs change it by a fifth; what goes through all that was before doubles it"),
    "resident_mb": Rule(0.0, 8.0, "fragments of the allocator; half a million steps that keep 16 bytes each are more"),
    "descriptors": Rule(0.0, 2.0, "a save in the background has its file and folder open"),
    "threads": Rule(0.0, 1.0, "a save in the background has one"),
    "checkpoint_bytes": Rule(0.0, 2048.0, "numbers of steps have more digits"),
    "status_bytes": Rule(0.0, 256.0, "numbers of steps have more digits"),
    "log_bytes": Rule(0.0, 1024.0, "the leg deletes them with the run"),
    "other_bytes": Rule(0.10, 65536.0, "a checkpoint is on its way, or not yet deleted"),
    "other_files": Rule(0.0, 12.0, "a checkpoint is on its way, or not yet deleted"),
}
BY_WORK = {  # for each unit of a leg
    "log_bytes": Rule(0.25, 1.0, "numbers of steps have more digits, and a point may fall before or after a row"),
    "other_bytes": Rule(0.0, 2048.0, "numbers of runs and steps have more digits"),
    "other_files": Rule(0.0, 1.0, "the run in hand may not have all of its files yet"),
}


@dataclass(frozen=True)
class Leg:
    """A leg.

    Args:
        length: in full.
        unit: of the length.
        limit_s: seconds after which it is ended and has failed.
        cores: that it uses.
        shortest: of a quick one.
        by_work: figures that grow by what the user asks for: judged for each unit of the leg.
    """

    length: int
    unit: str
    limit_s: float
    cores: int = 1
    shortest: int = 24
    by_work: tuple[str, ...] = ("log_bytes",)


NEW_RUNS = ("log_bytes", "other_bytes", "other_files")
LEGS = {  # the longest first
    "ranks": Leg(100_000, "step of 2 ranks", 600.0, cores=2),
    "steps": Leg(1_000_000, "step", 1200.0),
    "saves": Leg(10_000, "save", 500.0),
    "rows": Leg(500_000, "row of 3 loggers", 500.0),
    "fits": Leg(2_000, "fit", 600.0, by_work=()),
    "epochs": Leg(5_000, "epoch", 600.0),
    "accelerator": Leg(200_000, "step of the Accelerator", 500.0),
    "runs": Leg(300, "run in one folder", 500.0, by_work=NEW_RUNS),
    "kills": Leg(30, "kill and resume", 500.0, shortest=12),
}


def judge(points: Sequence[dict[str, float]], by_work: Sequence[str], cpu: bool = True) -> list[str]:
    """Hold the points of a process against the rules.

    Args:
        points: all twelve.
        by_work: figures that are judged for each unit of the leg.
        cpu: judge processor time.

    Returns:
        A sentence for each figure that grew by more than its rule allows.
    """
    if len(points) != POINTS:
        return [f"there are {len(points)} points, where {POINTS} are expected"]
    grown = []
    rules = {**RULES, **{name: BY_WORK[name] for name in by_work}}
    for name, rule in rules.items():
        if name not in points[-1] or (name == CPU and not cpu):
            continue
        early, late = early_and_late(points, name, name in by_work)
        most = early * (1 + rule.share) + rule.more
        if name == CPU:
            before, after = early_and_late(points, "by_hand_ms", False)
            most *= max(1.0, after / before)
        if late > most:
            per = " for each unit" if name in by_work else ""
            grown.append(f"{name}{per} grew from {early:,.1f} to {late:,.1f}; at most {most:,.1f}: {rule.why}")
    return grown


def early_and_late(points: Sequence[dict[str, float]], name: str, by_work: bool) -> tuple[float, float]:
    """The median of a figure at the early points, and at the late ones."""
    values = [point.get(name, 0.0) for point in points]
    if by_work:
        before = [(0.0, 0.0), *((point["done"], point[name]) for point in points)]
        values = [(now[1] - then[1]) / (now[0] - then[0]) for then, now in itertools.pairwise(before)]
    return statistics.median(values[EARLY]), statistics.median(values[LATE])


def run_leg(name: str, quick: bool, cpus: Sequence[int]) -> dict[str, Any]:
    """Run one leg to its end, or to its limit.

    Args:
        name: the leg.
        quick: a hundredth of it.
        cpus: where it runs.

    Returns:
        What goes into the results: length, seconds, points by process, and why it failed ([] if it did not).
    """
    leg = LEGS[name]
    length = max(leg.length // QUICK, leg.shortest) if quick else leg.length
    folder = Path(tempfile.mkdtemp(prefix="longhaul-", dir=IN_MEMORY if IN_MEMORY.is_dir() else None))
    script, started = str(Path(__file__).with_name("longhaul_legs.py")), time.monotonic()
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, script, name, str(length), str(folder), ",".join(map(str, cpus))],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            cwd=folder,
            start_new_session=True,
        )
        _running.append(process)
        try:
            process.wait(leg.limit_s)
            failed = []
        except subprocess.TimeoutExpired:
            failed = [f"it took longer than {leg.limit_s:g} s"]
        finally:
            end(process)
    points = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((folder / "points").glob("*.jsonl"))
    }
    if process.returncode and not failed:
        last = (folder / "output").read_text(errors="replace").strip().splitlines()[-12:]
        failed = [f"it ended with status {process.returncode}: " + "\n".join(last)]
    for process_name, each in points.items() if not failed else ():
        failed += [f"{process_name}: {text}" for text in judge(each, leg.by_work, cpu=not quick)]
    if not points and not failed:
        failed = ["it has measured nothing"]
    shutil.rmtree(folder, ignore_errors=True)
    seconds = round(time.monotonic() - started, 1)
    return {
        "length": length,
        "unit": leg.unit,
        "seconds": seconds,
        "limit_s": leg.limit_s,
        "failed": failed,
        "points": points,
    }


_running: list[subprocess.Popen[bytes]] = []  # legs, also those that have ended


def end(process: subprocess.Popen[bytes]) -> None:
    """End a leg with all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)  # also what a leg that has ended left behind
    except ProcessLookupError:
        pass  # nothing is left
    process.wait()


def run_all(names: Sequence[str], quick: bool) -> dict[str, dict[str, Any]]:
    """Run legs: those of two cores alone, the others two at a time."""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    found: dict[str, dict[str, Any]] = {}

    def finish(name: str, result: dict[str, Any]) -> None:
        found[name] = result
        word = "failed" if result["failed"] else "held"
        print(f"{name}: {word} after {result['seconds']:.0f} s", *result["failed"], sep="\n  ", flush=True)

    for name in (name for name in names if LEGS[name].cores > 1):
        finish(name, run_leg(name, quick, cpus))
    free: SimpleQueue[int] = SimpleQueue()
    for cpu in cpus:
        free.put(cpu)

    def on_a_core(name: str) -> None:
        cpu = free.get()
        try:
            finish(name, run_leg(name, quick, [cpu]))
        finally:
            free.put(cpu)

    with ThreadPoolExecutor(len(cpus)) as pool:
        try:
            list(pool.map(on_a_core, [name for name in names if LEGS[name].cores == 1]))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in _running:
                if process.returncode is None:
                    end(process)
            raise
    return {name: found[name] for name in names}


def rows(legs: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each process of each leg; early and late values."""
    found = []
    for name, leg in legs.items():
        for process, points in leg["points"].items():
            if len(points) == POINTS:
                words = [
                    name if process == "main" else f"{name}, {process}",
                    f"{leg['length']:,}",
                    f"{leg['seconds']:.0f}",
                ]
                words += [from_to(points, figure, LEGS[name].by_work) for figure in COLUMNS]
                found.append((*words, "**failed**" if leg["failed"] else "held"))
    return found


COLUMNS = {
    CPU: "CPU ms for each",
    "resident_mb": "memory, MB",
    "descriptors": "descriptors",
    "threads": "threads",
    "log_bytes": "bytes of logs",
    "other_bytes": "other bytes",
    "checkpoint_bytes": "checkpoint, bytes",
    "status_bytes": "status, bytes",
}
HEADER = ("leg", "length", "s", *COLUMNS.values(), "")


def from_to(points: Sequence[dict[str, float]], figure: str, by_work: Sequence[str]) -> str:
    """The early and the late value of a figure; "" where the leg has none."""
    if figure not in points[-1]:
        return ""
    early, late = early_and_late(points, figure, figure in by_work)
    form = ",.3f" if figure == CPU else ",.0f"
    return f"{early:{form}} .. {late:{form}}" + (" for each" if figure in by_work else "")


def main() -> int:
    """Run the legs that were asked for, print the table, write the JSON.

    Returns:
        The exit status: 1 where a leg failed.
    """
    args = parse_arguments()
    started, load = time.monotonic(), round(os.getloadavg()[0], 1)
    legs = run_all([name for name in LEGS if name in args.only], args.quick)
    print()
    harness.print_table(HEADER, rows(legs))
    failed = [name for name, leg in legs.items() if leg["failed"]]
    print(
        f"\n{len(legs)} legs, {time.monotonic() - started:.0f} s" + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    result = {
        "quick": args.quick,
        "seconds": round(time.monotonic() - started, 1),
        "load_average_before_and_after": [load, round(os.getloadavg()[0], 1)],
        "legs": legs,
    }
    whole = not args.quick and set(args.only) == set(LEGS)
    harness.write_results(args.out, "longhaul" if whole else "longhaul_part", result)
    return int(bool(failed))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Long runs: nothing may grow but what the user asked to keep.")
    parser.add_argument("--quick", action="store_true", help="a hundredth of each leg; processor time is not judged")
    parser.add_argument(
        "--only", nargs="+", choices=tuple(LEGS), default=list(LEGS), metavar="LEG", help=", ".join(LEGS)
    )
    harness.add_out(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
