"""Microseconds per step that a trainer costs over a handwritten loop.

    python benchmarks/overhead.py              # about 25 minutes
    python benchmarks/overhead.py --quick      # a rough look: 2,000 steps, 3 repetitions
    python benchmarks/overhead.py --data ready # ready batches instead of a DataLoader

The work: an MLP 32-32-1, batch 8, SGD, one thread, one epoch of 10,600 steps on data in memory, given as a shuffling
DataLoader over a TensorDataset (or, with `--data ready`, as a list of ready batches: no loader to save time in).

The clock sits in the data, the same for all: wall time from when batch 500 is asked for to when batch 10,500 is
(in the loader's collate_fn). Everything a framework does per step lies between; setting up and saving at the epoch's
end do not. Saves are timed alone, five of them after the epoch.

The handwritten loop is `contenders/handwritten_run.py`: zero_grad, forward, loss, backward, step. Each measurement is
paired: a fresh process, pinned to one CPU with all its threads, runs the handwritten loop, the contender, and the
handwritten loop again; the overhead is the contender's time minus the mean of the two. Contenders and cases are
interleaved, in another order in each repetition, and the median over repetitions is reported. The row `handwritten`
measures the handwritten loop in the contender's place: the noise. Standard output and error are a pseudo-terminal.

Cases: `bare` has no logger, progress bar, summary or checkpoint. `log` is that with one `self.log("loss", loss)` per
step. `everything` has that log with the bar, TensorBoard and CSV loggers, and ModelCheckpoint, all at their defaults.
Accelerate and Ignite have no `self.log`; the docstrings in `contenders/` say what stands for it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import contenders
import harness

WARMUP = 500  # steps before the clock starts
REST = 100  # steps after it stops


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """In a fresh process: the handwritten loop, the contender, the handwritten loop again."""
    import torch  # late: the parent needs none of it
    import workload

    torch.set_num_threads(1)
    root = Path(request["root"])

    def epoch(name: str) -> tuple[tuple[float, float], contenders.Save]:
        clock = workload.Clock(WARMUP, WARMUP + request["steps"], workload.times)
        loader = workload.make_loader(request["data"], WARMUP + request["steps"] + REST, clock)
        save = contenders.load(name)(request["case"], loader, root)
        return workload.microseconds_per_step(clock), save

    contenders.load(request["contender"])  # its import changes the process for all three
    before, _ = epoch("handwritten")
    own, save = epoch(request["contender"])
    after, _ = epoch("handwritten")
    saves_ms = [_timed_save(save, root / f"save-{i}") for i in range(5)] if request["case"] == "everything" else []
    return {"before": before, "own": own, "after": after, "saves_ms": saves_ms}


def _timed_save(save: contenders.Save, folder: Path) -> float:
    start = time.perf_counter()
    save(folder)
    return (time.perf_counter() - start) * 1000


def main() -> None:
    """Run all repetitions, print the table, write the JSON."""
    args = parse_arguments()
    steps, repetitions = (2000, 3) if args.quick else (args.steps, args.repetitions)
    names = contenders.installed(args.contenders)
    jobs = [(name, case) for name in names for case in args.cases if name != "handwritten" or case == args.cases[0]]
    answers: dict[tuple[str, str], list[dict[str, Any]]] = {job: [] for job in jobs}
    progress = harness.Progress(repetitions * len(jobs))
    shuffle = random.Random(0).shuffle
    for _ in range(repetitions):
        shuffle(jobs)
        for name, case in jobs:
            request = {"contender": name, "case": case, "steps": steps, "data": args.data}
            answer = harness.run_child(__file__, request)
            answers[name, case].append(answer)
            own, base = answer["own"][0], (answer["before"][0] + answer["after"][0]) / 2
            progress.step(f"{name} {case}: {own:.1f} us, handwritten {base:.1f} us")
    results = [
        {"contender": name, "case": case, **summary(answers[name, case])}
        for name in names
        for case in args.cases
        if (name, case) in answers
    ]
    report(results)
    setting = {"data": args.data, "steps": steps, "repetitions": repetitions}
    name = "overhead" if args.data == "loader" else f"overhead_{args.data}"
    harness.write_results(args.out, f"{name}_quick" if args.quick else name, {**setting, "results": results})


def summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repetitions; wall time first, then CPU time."""
    result: dict[str, Any] = {}
    for i, kind in enumerate(("wall", "cpu")):
        handwritten = [(a["before"][i] + a["after"][i]) / 2 for a in answers]
        own = [a["own"][i] for a in answers]
        result[f"handwritten_{kind}_us"] = harness.spread(handwritten)
        result[f"own_{kind}_us"] = harness.spread(own)
        result[f"overhead_{kind}_us"] = harness.spread([a - b for a, b in zip(own, handwritten, strict=True)])
    saves = [value for a in answers for value in a["saves_ms"]]
    result["save_ms"] = harness.spread(saves) if saves else None
    result["terminal_bytes"] = min(a["terminal_bytes"] for a in answers)
    return result


def report(results: list[dict[str, Any]]) -> None:
    """Print the table."""
    rows = []
    for result in results:
        wall, cpu, save = result["overhead_wall_us"], result["overhead_cpu_us"], result["save_ms"]
        rows.append(
            (
                result["contender"],
                "noise" if result["contender"] == "handwritten" else result["case"],
                f"{result['handwritten_wall_us']['median']:.1f}",
                f"{result['own_wall_us']['median']:.1f}",
                f"{wall['median']:+.1f}",
                f"{wall['min']:+.1f} .. {wall['max']:+.1f}",
                f"{cpu['median']:+.1f}",
                f"{save['median']:.1f}" if save else "",
            )
        )
    header = ("loop", "case", "handwritten us", "us/step", "overhead us", "min .. max", "CPU overhead us", "save ms")
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
    harness.add_out(parser)
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        harness.answer(measure)
    else:
        main()
