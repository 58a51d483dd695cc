"""Seconds per step where data is slow: a tuned loader in each trainer, beside the same loader in a handwritten loop.

    python benchmarks/studies/data_path.py           # about 6 minutes
    python benchmarks/studies/data_path.py --quick   # a rough look

Two kinds of slow data: `collate`, whose collate function computes for some milliseconds, and `disk`, whose samples are
read at random places of a large file, out of the page cache, each after 2 ms that stand for a disk in a network.
`tune_loader` chooses workers and prefetching once, in a process of its own; then every contender trains on a DataLoader
with that setting, in fresh processes, in another order in each round. The clock is read in the main process, when a
loss is computed: from step 20 to the last one. What counts is a contender's time over the handwritten loop's in the
same round.

The bar: 1.03 times the handwritten loop, which also takes a second turn in each round: the noise.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # of the harness, shared with the programs kept green

import contenders
import harness

FIRST, BATCH, READ = 20, 8, 64 << 10
BAR = 1.03
KINDS = ("collate", "disk")
CONTENDERS = ("handwritten", "instep", "lightning", "accelerate")


def make_loader(kind: str, steps: int, file: str, **settings: Any) -> Any:
    """The loader of one epoch."""
    import torch
    from torch.utils.data import DataLoader, Dataset, default_collate

    class Samples(Dataset[Any]):
        def __len__(self) -> int:
            return steps * BATCH

        def __getitem__(self, index: int) -> Any:
            x = torch.full((32,), (index % 100) / 100)
            if kind == "disk":
                time.sleep(0.002)
                place = (index * 2654435761) % (os.path.getsize(file) - READ)
                with open(file, "rb", buffering=0) as data:
                    os.posix_fadvise(data.fileno(), place, READ, os.POSIX_FADV_DONTNEED)
                    x = x + len(os.pread(data.fileno(), READ, place)) / READ / 100
            return x, x.sum(0, keepdim=True)

    def collate(samples: list[Any]) -> Any:
        if kind == "collate":
            end = time.thread_time() + 0.004
            while time.thread_time() < end:
                torch.matmul(torch.randn(64, 64), torch.randn(64, 64))
        return default_collate(samples)

    return DataLoader(Samples(), BATCH, shuffle=True, collate_fn=collate, **settings)


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """In a fresh process: choose a setting, or train one epoch."""
    import torch
    import workload

    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # workers have the other processors
    torch.set_num_threads(1)
    kind, steps, file = request["kind"], request["steps"], request["file"]
    if request["contender"] == "tune":
        from instep.data.tune import tune_loader

        best, tried = tune_loader(make_loader(kind, steps, file), seconds=request["seconds"])
        settings: dict[str, Any] = {"num_workers": best.num_workers}
        if best.num_workers:
            settings |= {"prefetch_factor": best.prefetch_factor, "persistent_workers": True}
        return {"settings": settings, "tried": len(tried)}
    times: list[float] = []
    loss_of = workload.loss_of

    def timed(net: Any, batch: Any) -> Any:
        times.append(time.perf_counter())
        return loss_of(net, batch)

    workload.loss_of = timed
    loader = make_loader(kind, steps, file, **request["settings"])
    contenders.load(request["contender"])("bare", loader, Path(request["root"]))
    assert len(times) == steps, f"{len(times)} steps of {steps}"
    return {"step_ms": (times[-1] - times[FIRST]) / (steps - 1 - FIRST) * 1000}


def main() -> None:
    """Run all rounds, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Seconds per step where data is slow.")
    parser.add_argument("--quick", action="store_true", help="1 round of few steps")
    parser.add_argument("--steps", type=int, default=500, help="(default: 500)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    parser.add_argument("--contenders", nargs="+", choices=contenders.NAMES, default=list(CONTENDERS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    harness.add_out(parser)
    args = parser.parse_args()
    steps, rounds = (60, 1) if args.quick else (args.steps, args.rounds)
    names = [*contenders.installed(args.contenders), "noise"]
    shuffle, results = random.Random(0).shuffle, []
    progress = harness.Progress(rounds * len(names) * len(args.kinds))
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        file = Path(folder, "data")
        with open(file, "wb") as data:
            for _ in range(4 if args.quick else 256):
                data.write(os.urandom(4 << 20))
            os.fsync(data.fileno())
        for kind in args.kinds:
            asked = {"kind": kind, "steps": steps, "file": str(file)}
            tuned = harness.run_child(__file__, {**asked, "contender": "tune", "seconds": 0.2 if args.quick else 2.0})
            took: list[dict[str, float]] = []
            for _ in range(rounds):
                took.append({})
                for name in shuffled(names, shuffle):
                    own = {"contender": "handwritten" if name == "noise" else name, "settings": tuned["settings"]}
                    took[-1][name] = harness.run_child(__file__, {**asked, **own})["step_ms"]
                    progress.step(f"{kind} {name}: {took[-1][name]:.2f} ms")
            ratios = {n: harness.spread([each[n] / each["handwritten"] for each in took], 4) for n in names}
            step_ms = {n: harness.spread([each[n] for each in took], 3) for n in names}
            results.append(
                {"kind": kind, "settings": tuned["settings"], "step_ms": step_ms, "ratio": ratios, "bar": BAR}
            )
    rows = [
        (r["kind"], name, f"{r['step_ms'][name]['median']:.2f}", f"{r['ratio'][name]['median']:.3f}")
        for r in results
        for name in r["ratio"]
    ]
    harness.print_table(("data", "loop", "ms per step", "over the handwritten loop"), rows)
    setting = {"steps": steps, "rounds": rounds, "batch": BATCH}
    harness.write_results(args.out, f"data_path{'_quick' if args.quick else ''}", {**setting, "results": results})


def shuffled(names: list[str], shuffle: Any) -> list[str]:
    """Another order."""
    order = list(names)
    shuffle(order)
    return order


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        harness.answer(measure)
    else:
        main()
