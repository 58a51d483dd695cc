"""Kill a training of two ranks at random instants, again and again; every run must end bit for bit as if it never was.

    python benchmarks/soak.py --kills 1000     # make soak
    python benchmarks/soak.py --kills 100      # make soak-short

Each run trains with a save after every step, in the background in half of the runs, with and without loader workers,
and deletes old checkpoints. SIGKILL goes to the whole job, to one rank or to the agent, at an instant drawn over the
length of an undisturbed run; then the same command is started again, until it gets to its end. After each kill the
newest checkpoint must verify and be no older than the last save that returned. Weights, optimizer, scheduler, metrics,
the kept checkpoints' scores and the samples of every batch must be the undisturbed run's. A kill has recovered when its
run came to that end. A run that did not is written down with the seed, its last kill and its output, and its folder is
kept; the program goes on, up to ten of them, and ends with status 1. Linux only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import harness

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests are no package that could be installed

from tests.checkpoint.killing import Campaign, Kill

LOSSES = 9  # the next one ends the program: by then there is enough to look at


def main() -> int:
    """Run the campaign and write its table.

    Returns:
        The exit status: 1 where a run did not recover, or failed without a kill.
    """
    args = parse_arguments()
    started, load = time.monotonic(), [round(os.getloadavg()[0], 1)]
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    campaign, failure = Campaign(folder, args.seed), None
    try:
        campaign.run(args.kills, lambda text: print(text, flush=True), args.budget_s, LOSSES)
    except Exception as error:  # noqa: BLE001  the table is written all the same
        failure = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - started
    kills, recovered = campaign.kills, sum(kill.recovered for kill in campaign.kills)
    tables = {
        "where": table(kills, lambda kill: kill.where),
        "target": table(kills, lambda kill: kill.target),
        "way": table(kills, lambda kill: f"workers={kill.way.workers}, background={kill.way.background}"),
    }
    for name, rows in tables.items():
        print()
        harness.print_table((name, "kills", "recovered", "s to the last process's end, median", "max"), rows)
    print(f"\n{len(kills)} kills in {campaign.runs} runs, {seconds:.0f} s; {recovered} recovered")
    failed = bool(campaign.losses) or failure is not None
    if failed:
        print(f"{len(campaign.losses)} runs did not recover; their folders are in {folder}. {failure or ''}")
    else:
        shutil.rmtree(folder)
    result = {
        "seed": args.seed,
        "kills": len(kills),
        "recovered": recovered,
        "unrecoverable": len(kills) - recovered,
        "losses": [asdict(loss) for loss in campaign.losses],
        "failure": failure,
        "runs": campaign.runs,
        "seconds": round(seconds, 1),
        "load_average_before_and_after": [*load, round(os.getloadavg()[0], 1)],
        "tables": tables,
    }
    harness.write_results(args.out, args.name, {"machine": {**harness.machine(), "pinned_to_one_cpu": False}, **result})
    return int(failed)


def table(kills: list[Kill], kind: Callable[[Kill], str]) -> list[tuple[Any, ...]]:
    """Kills by kind."""
    rows = []
    for name in sorted({kind(kill) for kill in kills}):
        these = [kill for kill in kills if kind(kill) == name]
        ends_s = [kill.end_s for kill in these if kill.end_s is not None] or [float("inf")]
        recovered = sum(kill.recovered for kill in these)
        rows.append((name, len(these), recovered, f"{statistics.median(ends_s):.3f}", f"{max(ends_s):.3f}"))
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
    sys.exit(main())
