"""What two small things cost that every step does: the heartbeat's stores, and a trigger's tick between agreements.

    python benchmarks/studies/step_parts.py              # a few seconds

Each runs in a loop of 20,000 by itself, next to an empty loop, in turns; a round's value is the difference, in
microseconds of this thread's processor time. Others run here too, so the smallest of the rounds is what counts.

The bars: the two stores at most 0.1 microseconds, a tick at most 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # of the harness, shared with the programs kept green

import harness

from instep.distributed import Triggers
from instep.distributed.heartbeat import BATCH, STEP, heartbeat

COUNT = 20_000
LIMITS_US = {"heartbeat's stores": 0.1, "tick of the triggers": 1.0}


def nothing() -> None:
    """The empty loop."""
    for _ in range(COUNT):
        pass


def stores() -> None:
    """What the loop tells the heartbeat in each batch."""
    beats, at = heartbeat().numbers, SimpleNamespace(global_step=12345)
    for batch_idx in range(COUNT):
        beats[BATCH], beats[STEP] = batch_idx, at.global_step


def make_ticks() -> Callable[[], None]:
    """Ticks that are no agreement."""
    tick = Triggers(every=1_000_000_000).tick
    tick(1)

    def ticks() -> None:
        for _ in range(COUNT):
            tick(2)

    return ticks


def microseconds(work: Callable[[], None]) -> float:
    """The processor time of one turn."""
    start = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - start) / COUNT / 1000


def main() -> int:
    """Measure, print the table, write the JSON; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description="Microseconds of what every step does beside the user's work.")
    parser.add_argument("--rounds", type=int, default=50, help="(default: 50)")
    harness.add_out(parser)
    args = parser.parse_args()
    parts = dict(zip(LIMITS_US, (stores, make_ticks()), strict=True))
    over: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(args.rounds):
        base = microseconds(nothing)
        for name, work in parts.items():
            over[name].append(microseconds(work) - base)
    results: dict[str, Any] = {
        name: {"added_us": harness.spread(values, 4), "limit_us": LIMITS_US[name]} for name, values in over.items()
    }
    rows = [
        (name, f"{r['added_us']['min']:.3f}", f"{r['added_us']['median']:.3f}", f"{r['limit_us']:g}")
        for name, r in results.items()
    ]
    harness.print_table(("part", "us, smallest", "median", "bar"), rows)
    harness.write_results(args.out, "step_parts", {"rounds": args.rounds, "loop": COUNT, "results": results})
    return int(any(r["added_us"]["min"] > r["limit_us"] for r in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
