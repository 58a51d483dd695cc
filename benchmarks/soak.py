"""Kill a training of two ranks at random instants, again and again; every run must end bit for bit as if it never was.

    python benchmarks/soak.py --kills 1000     # make soak
    python benchmarks/soak.py --kills 100      # make soak-short

Each run trains with a save after every step, in the background in half of the runs, with and without loader workers,
and deletes old checkpoints. SIGKILL goes to the whole job, to one rank or to the agent, at an instant drawn over the
length of an undisturbed run; then the same command is started again, until it gets to its end. After each kill the
newest checkpoint must verify and be no older than the last save that returned. Weights, optimizer, scheduler, metrics,
the kept checkpoints' scores and the samples of every batch must be the undisturbed run's. The first failure ends the
program with the seed and the run's output. Linux only.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests are no package that could be installed

from tests.checkpoint.killing import Campaign, Kill


def main() -> None:
    """Run the campaign and write its table."""
    args = parse_arguments()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        campaign = Campaign(Path(folder), args.seed)
        campaign.run(args.kills, lambda text: print(text, flush=True), args.budget_s)
    seconds = time.monotonic() - started
    kills = campaign.kills
    tables = {
        "where": table(kills, lambda kill: kill.where),
        "target": table(kills, lambda kill: kill.target),
        "way": table(kills, lambda kill: f"workers={kill.way.workers}, background={kill.way.background}"),
    }
    for name, rows in tables.items():
        print()
        harness.print_table((name, "kills", "recovered", "s to the last process's end, median", "max"), rows)
    print(f"\n{len(kills)} kills in {campaign.runs} runs, {seconds:.0f} s; none was lost")
    result = {
        "seed": args.seed,
        "kills": len(kills),
        "recovered": len(kills),
        "unrecoverable": 0,
        "runs": campaign.runs,
        "seconds": round(seconds, 1),
        "tables": tables,
    }
    harness.write_results(args.out, args.name, {"machine": {**harness.machine(), "pinned_to_one_cpu": False}, **result})


def table(kills: list[Kill], kind: Callable[[Kill], str]) -> list[tuple[Any, ...]]:
    """Kills by kind. What did not recover has ended the program before."""
    rows = []
    for name in sorted({kind(kill) for kill in kills}):
        ends_s = [kill.end_s for kill in kills if kind(kill) == name]
        rows.append((name, len(ends_s), len(ends_s), f"{statistics.median(ends_s):.3f}", f"{max(ends_s):.3f}"))
    return rows


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kill a training at random instants.")
    parser.add_argument("--kills", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, default=1, help="of instants and targets (default: 1)")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no run after so many seconds")
    parser.add_argument("--name", default="soak", help="of the JSON (default: soak)")
    harness.add_out(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
