"""What agreeing on triggers adds to a step, over 2 and 4 processes (gloo).

    python benchmarks/studies/triggers.py              # about 10 minutes
    python benchmarks/studies/triggers.py --quick      # a rough look: 1 job, 6 rounds

The work: an MLP 32-32-1 under DistributedDataParallel, batch 8 per process, SGD, one thread each, on one batch that is
there already, each rank with all its threads pinned to one CPU. The loop is measured bare and with `Triggers.tick`
after every step, at its default distance (`every` left out: an agreement about every 50 ms), as the Trainer calls it;
nothing is ever set, as in nearly every step.

Both run in the same processes, in blocks of 150 steps. A round is three blocks in random order, the same on all ranks:
bare, bare a second time, and with triggers. All ranks meet before each block, outside the clock. A block's time is the
mean over the ranks. What a round says is a difference to its first bare block; the median over the rounds of a job is
one value, and the median over several jobs (fresh processes) is reported. The difference of the second bare block is
the noise: the loop against itself.

The bar, at 2 processes: at most 1 % of the step or 15 microseconds, whichever is larger, beyond the noise.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # of the harness, shared with the programs kept green

import harness
import torch
import workload
from torch.nn.parallel import DistributedDataParallel

from instep import PartialState, debug_launcher
from instep.distributed import Triggers

BARE, AGAIN, TICKS = "bare", "bare again", "triggers"
LIMIT_SHARE, LIMIT_US = 0.01, 15.0


def measure(seed: int, rounds: int, steps: int) -> dict[str, Any]:
    """On every rank: all blocks of one job, in nanoseconds per step."""
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    # As in overhead.py: where the system puts the ranks' threads otherwise changes a step by more than is measured.
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[state.process_index % len(cpus)]})
    step = make_step()
    own = Triggers()
    done = 0
    times: dict[str, list[float]] = {BARE: [], AGAIN: [], TICKS: []}
    order = list(times)
    shuffle = random.Random(seed).shuffle
    for number in range(-1, rounds):
        shuffle(order)
        for name in order:
            own.sync()
            state.wait_for_everyone()
            if name == TICKS:
                took = with_triggers(step, own.tick, done, steps)
                done += steps
            else:
                took = bare(step, steps)
            if number >= 0:  # the round before is warm-up, in which the distance grows from 1
                times[name].append(took / steps)
    return {"times_ns": times, "every": own.every}


def bare(step: Callable[[], Any], steps: int) -> int:
    """The handwritten loop."""
    start = time.perf_counter_ns()
    for _ in range(steps):
        step()
    return time.perf_counter_ns() - start


def with_triggers(step: Callable[[], Any], tick: Callable[[int], Any], done: int, steps: int) -> int:
    """The same with an agreement."""
    start = time.perf_counter_ns()
    for number in range(done + 1, done + steps + 1):
        step()
        if tick(number):
            raise RuntimeError("nothing was set, but the ranks agreed on a trigger")
    return time.perf_counter_ns() - start


def make_step() -> Callable[[], None]:
    """One optimizer step, gradients averaged over the processes."""
    net = DistributedDataParallel(workload.make_net())
    optimizer = workload.make_optimizer(net)
    x = torch.randn(workload.BATCH, workload.FEATURES)
    batch = (x, x.sum(dim=1, keepdim=True))

    def step() -> None:
        optimizer.zero_grad()
        workload.loss_of(net, batch).backward()
        optimizer.step()

    return step


def job(world: int, seed: int, rounds: int, steps: int) -> dict[str, float]:
    """One job; its medians in microseconds per step."""
    ranks = debug_launcher(measure, (seed, rounds, steps), num_processes=world)
    blocks = {
        name: [statistics.fmean(values) / 1000 for values in zip(*(r["times_ns"][name] for r in ranks), strict=True)]
        for name in (BARE, AGAIN, TICKS)
    }
    over = {
        name: statistics.median(own - base for own, base in zip(blocks[name], blocks[BARE], strict=True))
        for name in (AGAIN, TICKS)
    }
    return {
        "step": statistics.median(blocks[BARE]),
        "noise": over[AGAIN],
        "added": over[TICKS],
        "every": ranks[0]["every"],
    }


def main() -> None:
    """Run all jobs, print the table, write the JSON."""
    args = parse_arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    jobs, rounds = (1, 6) if args.quick else (args.jobs, args.rounds)
    answers: dict[int, list[dict[str, float]]] = {world: [] for world in args.worlds}
    progress = harness.Progress(jobs * len(args.worlds))
    for seed in range(jobs):
        for world in args.worlds:
            answer = job(world, seed, rounds, args.steps)
            answers[world].append(answer)
            progress.step(f"{world} processes: {answer['added']:+.1f} us, noise {answer['noise']:+.1f} us")
    results = [summary(world, answers[world]) for world in args.worlds]
    report(results)
    setting = {"steps_per_block": args.steps, "rounds": rounds, "jobs": jobs}
    own_machine = {**harness.machine(), "pinned_to_one_cpu": False}
    name = "triggers_quick" if args.quick else "triggers"
    harness.write_results(args.out, name, {"machine": own_machine, **setting, "results": results})


def summary(world: int, answers: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the jobs, and whether the bar holds (which is meant for 2 processes)."""
    result: dict[str, Any] = {"processes": world, "every": [int(answer["every"]) for answer in answers]}
    for key in ("step", "noise", "added"):
        result[f"{key}_us"] = harness.spread([answer[key] for answer in answers])
    limit_us = max(LIMIT_SHARE * result["step_us"]["median"], LIMIT_US)
    noise_us = abs(result["noise_us"]["median"])
    held = result["added_us"]["median"] - noise_us <= limit_us
    verdict = "too noisy to tell" if noise_us > limit_us else "holds" if held else "missed"
    return {**result, "limit_us": round(limit_us, 2), "verdict": verdict}


def report(results: list[dict[str, Any]]) -> None:
    """Print the table."""
    rows = []
    for result in results:
        step, noise, added = result["step_us"], result["noise_us"], result["added_us"]
        rows.append(
            (
                result["processes"],
                f"{step['median']:.1f}",
                *(f"{over['median']:+.1f} ({over['min']:+.1f} .. {over['max']:+.1f})" for over in (noise, added)),
                f"{result['limit_us']:.1f}: {result['verdict']}" if result["processes"] == 2 else "",
                f"{min(result['every'])} .. {max(result['every'])}",
            )
        )
    harness.print_table(("processes", "step us", "noise us", "triggers us", "bar us", "steps apart"), rows)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What agreeing on triggers adds to a step.")
    parser.add_argument("--quick", action="store_true", help="1 job, 6 rounds")
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4], help="numbers of processes (default: 2 4)")
    parser.add_argument("--jobs", type=int, default=3, help="fresh starts of the processes (default: 3)")
    parser.add_argument("--rounds", type=int, default=80, help="of three blocks, in each job (default: 80)")
    parser.add_argument("--steps", type=int, default=150, help="of a block (default: 150)")
    harness.add_out(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
