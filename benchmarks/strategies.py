"""What the Trainer adds to a step and to memory over the handwritten loop of the same strategy, on 2 processes (gloo).

    python benchmarks/strategies.py            # DDP, FSDP, DeepSpeed stage 2; about 20 minutes
    python benchmarks/strategies.py --quick    # a rough look

The work: feed-forward blocks under AdamW, in float32. The handwritten loops are the plainest ones: torch's
DistributedDataParallel, `fully_shard` of each block and of the whole, and a DeepSpeed engine.

Step time: both train in the same processes, each pinned to a CPU, in blocks of steps: handwritten, Trainer, handwritten
again, in each round of one fit. The handwritten blocks run where the Trainer asks for its next batch, so nothing of
either is in the other's time; ranks meet before each block, outside the clock. What a round says is the Trainer's block
over the mean of its two neighbours; the median over the rounds of a job is one value, and the median over several jobs
(fresh processes) is reported. The second handwritten block over the first is the noise. Beside the wall time stands the
added processor time of a rank and step (`process_time`, all threads): the Trainer's block less the mean of its two
neighbours, and as its noise the second handwritten block less the first.

CPU: the same blocks with a model of width 16, whose step takes a tenth of the time, so that its own processor time,
which differs from block to block by 3 %, does not hide what is added.

Memory: the peak resident memory of fresh processes that train a larger model for a few steps, imports included, as the
mean over the ranks; contenders in turns. glibc raises the size from which it gives freed memory back as a program runs,
so peaks of the same program differ by 7 %, by chance; here that size stays at 1 MB, for both.

The bars: 1.05 times the handwritten step, 1.02 times its peak, and 40 (DDP) and 80 (FSDP) microseconds of added
processor time in the CPU measurement with `--jobs 20`.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import harness
import torch
from torch import Tensor, nn

STRATEGIES = ("ddp", "fsdp", "deepspeed_stage_2")
WORLD = 2
TURNS = {"step": 1, "cpu": 1, "memory": 2}  # of a job
STEP_BAR, MEMORY_BAR = 1.05, 1.02
CPU_BARS_US = {"ddp": 40.0, "fsdp": 80.0}
MEASURES = ("step", "cpu", "memory")
BATCH = 64
BOUNDARY_S = 0.05  # docs/concepts/triggers.md
WIDTH, CPU_WIDTH, MEMORY_WIDTH, BLOCKS = 128, 16, 1024, 4
MEMORY_STEPS = 5


class Block(nn.Module):
    """A feed-forward net that is added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """From and to (batch, width)."""
        return x + self.layers(x)


def make_net(width: int) -> nn.Sequential:
    """The model, with the same weights in all processes."""
    torch.manual_seed(1)
    return nn.Sequential(*(Block(width) for _ in range(BLOCKS)))


def make_batch(width: int) -> tuple[Tensor, Tensor]:
    """One that is used again and again."""
    x = torch.randn(BATCH, width)
    return x, x.roll(1, 1)


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """The same for all."""
    return torch.optim.AdamW(net.parameters(), lr=1e-4)


# ---- the handwritten loops: each makes the function that does one step


def raw_ddp(net: nn.Module) -> Callable[[Any], None]:
    """DistributedDataParallel."""
    return plain_step(nn.parallel.DistributedDataParallel(net))


def raw_fsdp(net: nn.Module) -> Callable[[Any], None]:
    """`fully_shard`, block by block."""
    from torch.distributed.device_mesh import init_device_mesh  # late: only where they are measured
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for block in net.children():
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return plain_step(net)


def plain_step(net: nn.Module) -> Callable[[Any], None]:
    """The loop that everybody writes."""
    optimizer = make_optimizer(net)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def raw_deepspeed_stage_2(net: nn.Module) -> Callable[[Any], None]:
    """A DeepSpeed engine."""
    import deepspeed  # late: optional

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    engine: Any = deepspeed.initialize(model=net, optimizer=make_optimizer(net), config=config)[0]

    def step(batch: Any) -> None:
        engine.backward(nn.functional.mse_loss(engine(batch[0]), batch[1]))
        engine.step()

    return step


RAW = {"ddp": raw_ddp, "fsdp": raw_fsdp, "deepspeed_stage_2": raw_deepspeed_stage_2}


def fit(name: str, width: int, batches: Any, trigger_every: int | None = None) -> None:
    """The same by the Trainer, with nothing but the loop.

    Args:
        name: the strategy.
        width: of the model.
        batches: the training data.
        trigger_every: what a run would settle on by itself; to give where something else runs between its steps.
    """
    from instep import Trainer, TrainModule  # late: a handwritten loop's memory is without it

    class Module(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net(width)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return make_optimizer(self)

    strategy: Any = name
    if name == "fsdp":
        from instep.strategies import FSDPStrategy  # late: loads what only FSDP needs

        strategy = FSDPStrategy(wrap="Block")
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=1,
        barebones=True,
        use_distributed_sampler=False,
        trigger_every=trigger_every,
    )
    trainer.fit(Module(), batches)


# ---- step time


class Rounds:
    """The Trainer's batches; between blocks of them the handwritten loop has its own."""

    def __init__(self, step: Callable[[Any], None], batch: Any, rounds: int, steps: int) -> None:
        self.step, self.batch, self.rounds, self.steps = step, batch, rounds, steps
        self.times_ns: dict[str, list[tuple[float, float]]] = {"raw": [], "own": [], "again": []}

    def __len__(self) -> int:
        return (self.rounds + 1) * self.steps + 1

    def __iter__(self) -> Iterator[Any]:
        for number in range(-1, self.rounds):  # the round before is warm-up
            self.handwritten("raw", number)
            start = meet()
            for _ in range(self.steps):
                yield self.batch
            self.note("own", number, start)
            self.handwritten("again", number)
        yield self.batch  # who asks for it has ended the last block

    def handwritten(self, name: str, number: int) -> None:
        """A block of the handwritten loop."""
        start = meet()
        for _ in range(self.steps):
            self.step(self.batch)
        self.note(name, number, start)

    def note(self, name: str, number: int, start: tuple[int, int]) -> None:
        """A block ended."""
        if number >= 0:
            wall, cpu = time.perf_counter_ns() - start[0], time.process_time_ns() - start[1]
            self.times_ns[name].append((wall / self.steps, cpu / self.steps))


def meet() -> tuple[int, int]:
    """Wait for the other rank; the wall time and this process's CPU time after it."""
    torch.distributed.barrier()
    return time.perf_counter_ns(), time.process_time_ns()


def measure_steps(name: str, rounds: int, steps: int, width: int) -> dict[str, list[tuple[float, float]]]:
    """On every rank: all blocks of one job, in nanoseconds of wall and CPU time per step."""
    from instep import PartialState  # late, as above

    torch.set_num_threads(1)
    rank = PartialState(cpu=True).process_index
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    blocks = Rounds(RAW[name](make_net(width)), make_batch(width), rounds, steps)
    fit(name, width, blocks, trigger_every=steps_between_boundaries(blocks))
    return blocks.times_ns


def steps_between_boundaries(blocks: Rounds) -> int:
    """The steps between two agreements on triggers, for a run of such steps alone.

    The Trainer counts the time between two agreements. Here handwritten blocks are in it too, so it would take its
    steps for three times as long as they are, and agree three times as often.
    """
    step_s = torch.zeros(())
    for _ in range(2):  # the first is warm-up
        start = meet()[0]
        for _ in range(blocks.steps):
            blocks.step(blocks.batch)
        step_s = torch.tensor((time.perf_counter_ns() - start) / 1e9 / blocks.steps)
    torch.distributed.broadcast(step_s, 0)  # alike on all ranks
    return max(1, math.ceil(BOUNDARY_S / float(step_s)))


def step_job(name: str, rounds: int, steps: int, width: int) -> dict[str, float]:
    """One job: the handwritten step in ms, the medians of both ratios, and the added CPU time with its noise in us."""
    from instep import debug_launcher  # late, as above

    ranks = debug_launcher(measure_steps, (name, rounds, steps, width), num_processes=WORLD)

    def blocks(kind: int) -> list[tuple[float, ...]]:
        """Per round: the handwritten, the Trainer's and the second handwritten block, as means over the ranks."""
        means = (
            [statistics.fmean(times[kind] for times in block) for block in zip(*(r[name] for r in ranks), strict=True)]
            for name in ("raw", "own", "again")
        )
        return list(zip(*means, strict=True))

    wall, cpu = blocks(0), blocks(1)
    return {
        "step_ms": statistics.median(raw for raw, _, _ in wall) / 1e6,
        "ratio": statistics.median(2 * own / (raw + again) for raw, own, again in wall),
        "noise": statistics.median(again / raw for raw, _, again in wall),
        "added_cpu_us": statistics.median(own - (raw + again) / 2 for raw, own, again in cpu) / 1000,
        "noise_cpu_us": statistics.median(again - raw for raw, _, again in cpu) / 1000,
    }


# ---- memory


def measure_memory(request: dict[str, Any]) -> dict[str, Any]:
    """In a fresh process, as one rank: a few steps of a larger model."""
    os.environ.update(
        RANK=str(request["rank"]),
        LOCAL_RANK=str(request["rank"]),
        WORLD_SIZE=str(WORLD),
        LOCAL_WORLD_SIZE=str(WORLD),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(request["port"]),
    )
    torch.set_num_threads(1)
    name, width = request["strategy"], request["width"]
    batches = [make_batch(width)] * MEMORY_STEPS
    if request["contender"] == "instep":
        fit(name, width, batches)
    else:
        torch.distributed.init_process_group("gloo")
        step = RAW[name](make_net(width))
        for batch in batches:
            step(batch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return {"peak_bytes": peak}


def memory_job(name: str, contender: str, width: int) -> float:
    """The mean peak over the ranks, in MB."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    request = {"strategy": name, "contender": contender, "width": width, "port": port}
    ranks = [harness.Child(__file__, {**request, "rank": rank}) for rank in range(WORLD)]
    try:
        return statistics.fmean(rank.result()["peak_bytes"] for rank in ranks) / 1e6
    finally:
        for rank in ranks:
            rank.kill()


# ---- all of it


def main() -> None:
    """Measure in turns, print a table and write a JSON for the step and for memory."""
    args = parse_arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # the children's
    jobs, rounds, width = (1, 4, WIDTH) if args.quick else (args.jobs, args.rounds, MEMORY_WIDTH)
    names = [name for name in args.strategies if "deepspeed" not in name or find_spec("deepspeed")]
    progress = harness.Progress(jobs * len(names) * sum(TURNS[each] for each in args.measure))
    setting = {"processes": WORLD, "jobs": jobs}
    end = "_quick" if args.quick else ""
    for kind, own_width in (("step", WIDTH), ("cpu", CPU_WIDTH)):
        if kind in args.measure:
            results = measure_all_steps(names, jobs, rounds, args.steps, own_width, progress)
            more = {"width": own_width, "rounds": rounds, "steps_per_block": args.steps, "bar": STEP_BAR}
            harness.write_results(args.out, f"strategies_{kind}{end}", {**setting, **more, "results": results})
    if "memory" in args.measure:
        results = measure_all_memory(names, jobs, width, progress)
        more = {"width": width, "bar": MEMORY_BAR}
        harness.write_results(args.out, f"strategies_memory{end}", {**setting, **more, "results": results})


def measure_all_steps(
    names: Sequence[str], jobs: int, rounds: int, steps: int, width: int, progress: harness.Progress
) -> list[dict[str, Any]]:
    """Medians over the jobs."""
    done: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(jobs):
        for name in names:
            done[name].append(step_job(name, rounds, steps, width))
            job = done[name][-1]
            progress.step(f"{name}: {job['ratio']:.3f}, noise {job['noise']:.3f}, CPU {job['added_cpu_us']:+.0f} us")
    results = [
        {
            "strategy": name,
            "step_ms": harness.spread([job["step_ms"] for job in done[name]]),
            "step_ratio": harness.spread([job["ratio"] for job in done[name]], 4),
            "noise": harness.spread([job["noise"] for job in done[name]], 4),
            "added_cpu_us": harness.spread([job["added_cpu_us"] for job in done[name]], 1),
            "noise_cpu_us": harness.spread([job["noise_cpu_us"] for job in done[name]], 1),
            "bar_cpu_us": CPU_BARS_US.get(name),
        }
        for name in names
    ]
    rows = [
        (
            r["strategy"],
            f"{r['step_ms']['median']:.2f}",
            f"{r['step_ratio']['median']:.3f} ({r['step_ratio']['min']:.3f} .. {r['step_ratio']['max']:.3f})",
            f"{r['noise']['median']:.3f}",
            verdict(r["step_ratio"]["median"], STEP_BAR),
            f"{r['added_cpu_us']['median']:+.1f} ({r['noise_cpu_us']['median']:+.1f})",
            verdict(r["added_cpu_us"]["median"], r["bar_cpu_us"]) if r["bar_cpu_us"] else "",
        )
        for r in results
    ]
    header = ("strategy", "step ms", "Trainer's", "noise", f"bar {STEP_BAR}", "added CPU us (noise)", "its bar")
    harness.print_table(header, rows)
    return results


def measure_all_memory(names: Sequence[str], jobs: int, width: int, progress: harness.Progress) -> list[dict[str, Any]]:
    """Medians over the jobs."""
    peaks: dict[tuple[str, str], list[float]] = {(n, c): [] for n in names for c in ("handwritten", "instep")}
    for _ in range(jobs):
        for name, contender in peaks:
            peaks[name, contender].append(memory_job(name, contender, width))
            progress.step(f"{name}, {contender}: {peaks[name, contender][-1]:.0f} MB")
    results = []
    for name in names:
        raw, own = (statistics.median(peaks[name, contender]) for contender in ("handwritten", "instep"))
        results.append(
            {
                "strategy": name,
                "handwritten_mb": harness.spread(peaks[name, "handwritten"], 1),
                "instep_mb": harness.spread(peaks[name, "instep"], 1),
                "memory_ratio": round(own / raw, 4),
            }
        )
    rows = [
        (
            r["strategy"],
            f"{r['handwritten_mb']['median']:.0f}",
            f"{r['instep_mb']['median']:.0f}",
            f"{r['memory_ratio']:.3f}",
            verdict(r["memory_ratio"], MEMORY_BAR),
        )
        for r in results
    ]
    harness.print_table(("strategy", "peak MB", "Trainer's", "ratio", f"bar {MEMORY_BAR}"), rows)
    return results


def verdict(ratio: float, bar: float) -> str:
    """Whether the bar holds."""
    return "holds" if ratio <= bar else "missed"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What the Trainer adds to the handwritten loop of a strategy.")
    parser.add_argument("--quick", action="store_true", help="1 job, 4 rounds, memory of a small model")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, help="(default: all)")
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=MEASURES, help="(default: all)")
    parser.add_argument("--jobs", type=int, default=5, help="fresh starts of the processes (default: 5)")
    parser.add_argument("--rounds", type=int, default=30, help="of three blocks, in each job (default: 30)")
    parser.add_argument("--steps", type=int, default=20, help="of a block (default: 20)")
    harness.add_out(parser)
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        harness.answer(measure_memory)
    else:
        main()
