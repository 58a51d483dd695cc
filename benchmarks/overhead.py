"""Microseconds per step that a trainer costs over a handwritten loop.

    python benchmarks/overhead.py              # about 20 minutes
    python benchmarks/overhead.py --quick      # a rough look: 2,000 steps, 3 repetitions
    python benchmarks/overhead.py --data ready # ready batches instead of a DataLoader

The work: an MLP 32-32-1, batch 8, SGD, one thread, one epoch of 10,600 steps on data in memory, given as a shuffling
DataLoader over a TensorDataset (or, with `--data ready`, as a list of ready batches: no loader to save time in).

The clock sits in the data, the same for all: wall time from when batch 500 is asked for to when batch 10,500 is
(in the loader's collate_fn). Everything a framework does per step lies between; setting up and saving at the epoch's
end do not. Saves are timed alone, five of them after the epoch.

The handwritten loop is `contenders/handwritten_run.py`: zero_grad, forward, loss, backward, step. Each measurement is
paired: two fresh processes, one with the handwritten loop and one with the contender, are pinned to the same CPU with
all their threads and take turns of 2,500 steps: one runs while the other is stopped (SIGSTOP). The overhead is the
mean, over the contender's four turns, of its time minus the mean of the handwritten turns before and after. (A bar that
was stopped is late, and redraws at once when its turn begins: this counts.) Contenders and cases are interleaved, in
another order in each repetition, and the median over repetitions is reported; so is the median over all turns, which
bears a machine that is not quite idle better. The row `handwritten` measures a second handwritten loop in the
contender's place: the noise. Standard output and error are pseudo-terminals.

Cases: `bare` has no logger, progress bar, summary or checkpoint. `log` is that with one `self.log("loss", loss)` per
step. `everything` has that log with the bar, TensorBoard and CSV loggers, and ModelCheckpoint, all at their defaults.
Accelerate and Ignite have no `self.log`; the docstrings in `contenders/` say what stands for it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import contenders
import harness

WARMUP = 500  # steps before the clock starts
TURN = 2500  # steps: long against the redrawing of a progress bar, short against a machine's moods
REST = 100  # steps after the clock stops


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """In a fresh process: one epoch of one loop, in turns."""
    import torch  # late: the parent needs none of it
    import workload

    torch.set_num_threads(1)
    root = Path(request["root"])
    steps = request["turn"] * request["turns"]
    clock = workload.Clock(range(WARMUP, WARMUP + steps + 1, request["turn"]), workload.pause)
    loader = workload.make_loader(request["data"], WARMUP + steps + REST, clock)
    save = contenders.load(request["contender"])(request["case"], loader, root)
    notes = clock.all_notes()
    turns_us = [
        [(stop - start) / 1000 / request["turn"] for start, stop in zip(began, ended, strict=True)]
        for (_, began), (ended, _) in pairwise(notes)
    ]
    saves_ms = [_timed_save(save, root / f"save-{i}") for i in range(5)] if request["case"] == "everything" else []
    return {"turns_us": turns_us, "saves_ms": saves_ms}


def _timed_save(save: contenders.Save, folder: Path) -> float:
    start = time.perf_counter()
    save(folder)
    return (time.perf_counter() - start) * 1000


def pair(name: str, case: str, data: str, steps: int) -> dict[str, Any]:
    """The handwritten loop and a contender in turns.

    Returns:
        `own_us`: the contender's turns, each as (wall, CPU) microseconds per step. `handwritten_us`: for each of them
        the mean of the handwritten turns before and after. And the contender's other results.
    """
    turn = min(TURN, steps)
    turns = steps // turn
    base = {"contender": "handwritten", "case": "bare", "data": data, "turn": turn, "turns": turns + 1}
    own = {"contender": name, "case": case, "data": data, "turn": turn, "turns": turns}
    handwritten, contender = harness.take_turns(__file__, base, own, turns)
    around = [
        [(before + after) / 2 for before, after in zip(*both, strict=True)]
        for both in pairwise(handwritten["turns_us"])
    ]
    return {**contender, "handwritten_us": around, "own_us": contender["turns_us"]}


def main() -> None:
    """Run all repetitions, print the table, write the JSON."""
    args = parse_arguments()
    if args.show is not None:
        report(json.loads(args.show.read_text())["results"])
        return
    steps, repetitions = (2000, 3) if args.quick else (args.steps, args.repetitions)
    names = contenders.installed(args.contenders)
    jobs = [(name, case) for name in names for case in args.cases if name != "handwritten" or case == args.cases[0]]
    answers: dict[tuple[str, str], list[dict[str, Any]]] = {job: [] for job in jobs}
    progress = harness.Progress(repetitions * len(jobs))
    shuffle = random.Random(0).shuffle
    for _ in range(repetitions):
        shuffle(jobs)
        for name, case in jobs:
            answer = pair(name, case, args.data, steps)
            answers[name, case].append(answer)
            own, base = (statistics.fmean(wall for wall, _ in answer[key]) for key in ("own_us", "handwritten_us"))
            progress.step(f"{name} {case}: {own:.1f} us, handwritten {base:.1f} us")
    results = [
        {"contender": name, "case": case, **summary(answers[name, case])}
        for name in names
        for case in args.cases
        if (name, case) in answers
    ]
    report(results)
    setting = {"data": args.data, "steps": steps, "turn_steps": min(TURN, steps), "repetitions": repetitions}
    name = "overhead" if args.data == "loader" else f"overhead_{args.data}"
    harness.write_results(args.out, f"{name}_quick" if args.quick else name, {**setting, "results": results})


def summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repetitions; wall time first, then CPU time."""
    result: dict[str, Any] = {}
    for i, kind in enumerate(("wall", "cpu")):
        own = [[turn[i] for turn in a["own_us"]] for a in answers]
        handwritten = [[turn[i] for turn in a["handwritten_us"]] for a in answers]
        over = [[x - y for x, y in zip(*both, strict=True)] for both in zip(own, handwritten, strict=True)]
        result[f"handwritten_{kind}_us"] = harness.spread([statistics.fmean(turns) for turns in handwritten])
        result[f"own_{kind}_us"] = harness.spread([statistics.fmean(turns) for turns in own])
        result[f"overhead_{kind}_us"] = harness.spread([statistics.fmean(turns) for turns in over])
        result[f"overhead_{kind}_us_of_all_turns"] = harness.spread([turn for turns in over for turn in turns])
    saves = [value for a in answers for value in a["saves_ms"]]
    result["save_ms"] = harness.spread(saves) if saves else None
    result["terminal_bytes"] = min(a["terminal_bytes"] for a in answers)
    return result


def report(results: list[dict[str, Any]]) -> None:
    """Print the table."""
    rows = []
    for result in results:
        wall, turns, save = result["overhead_wall_us"], result["overhead_wall_us_of_all_turns"], result["save_ms"]
        rows.append(
            (
                result["contender"],
                "noise" if result["contender"] == "handwritten" else result["case"],
                f"{result['handwritten_wall_us']['median']:.1f}",
                f"{result['own_wall_us']['median']:.1f}",
                f"{wall['median']:+.1f}",
                f"{wall['min']:+.1f} .. {wall['max']:+.1f}",
                f"{turns['median']:+.1f}",
                f"{result['overhead_cpu_us']['median']:+.1f}",
                f"{save['median']:.1f}" if save else "",
            )
        )
    us = ("handwritten us", "us/step", "overhead us", "min .. max", "of turns", "CPU time")
    header = ("loop", "case", *us, "save ms")
    harness.print_table(header, rows)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Microseconds per step over a handwritten loop.")
    parser.add_argument("--quick", action="store_true", help="2,000 steps, 3 repetitions")
    parser.add_argument("--steps", type=int, default=10_000, help="timed steps, after 500 of warm-up (default: 10,000)")
    parser.add_argument("--repetitions", type=int, default=7, help="(default: 7)")
    parser.add_argument("--data", choices=("loader", "ready"), default="loader", help="(default: loader)")
    parser.add_argument("--contenders", nargs="+", choices=contenders.NAMES, default=list(contenders.NAMES))
    parser.add_argument("--cases", nargs="+", choices=contenders.CASES, default=list(contenders.CASES))
    parser.add_argument("--show", type=Path, metavar="JSON", help="measure nothing, print the table of these results")
    harness.add_out(parser)
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        harness.answer(measure)
    else:
        main()
