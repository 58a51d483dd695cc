"""How long saving keeps the training loop waiting, and how long it takes until a checkpoint is safe.

    python benchmarks/checkpoint.py            # about 10 minutes, 15 GB of memory, 4 GB of disk
    python benchmarks/checkpoint.py --quick    # a rough look: 10 MB, one process

The work: linear layers with about 10 MB, 200 MB and 1 GB of float32 weights and Adam, so three times that in bytes are
saved. All contenders save the same module and the same optimizer, which have made a real step, in one process with
torch's default number of threads:

- `instep`: `trainer.save_to` in a running fit, fsynced; `instep background`: `trainer.save_later`.
- `torch.save` of the two state dicts into one file; `torch.save + fsync`: and the file is fsynced.
- `lightning`: `Trainer.save_checkpoint`; `accelerate`: `Accelerator.save_state`.
- `dcp`: `torch.distributed.checkpoint.save`; `dcp async`: `async_save`; both at their defaults, without a group.

`blocked` is the time until the call returns. `safe` goes on until the call's own promise holds: for instep until every
byte was read back and verified, for `dcp async` until its future is done, for the others it is the same. Only instep,
`torch.save + fsync` and dcp wait for the disk. In each process every contender saves once per round, in random order,
with everything written and removed in between outside the clock. The first save of a process is told apart from the
later ones. Beside them stand a `copy_` of the same tensors into memory that is there, and a `clone` into new memory;
each process has touched and freed three times that much memory before, so that it is not a virtual machine's first use
of it.

The slow-down is what optimizer steps take while a background save is under way, over what they take otherwise. The
checksum's cost is what writing and fsyncing the bytes of the state takes more with it than without.

The bars: from the second save on, background blocks at most 1/10 of torch.save and at most 1.5 times a `copy_`; the
first at most 1.5 times a `clone`; the checksum at most 10 % of write and fsync.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness

# MB of weights -> how wide a layer is, how many processes measure, and how often each contender saves in one of them
SIZES = {10: (512, 3, 5), 200: (1024, 2, 4), 1000: (2048, 1, 3)}
BLOCK_S = 1.5  # steps are timed for at least so long
ASYNC = ("instep background", "dcp async")
BARS = {"share of torch.save": 0.1, "over copy_": 1.5, "first over clone": 1.5, "checksum share": 0.1}


class Work:
    """A module and an optimizer that have made a step.

    Args:
        width: of a layer.
        megabytes: of weights.
    """

    def __init__(self, width: int, megabytes: float) -> None:
        import torch  # late, like all of them: the parent measures nothing, and its imports would only take memory
        from torch import nn

        count = max(1, round(megabytes * 1e6 / (4 * width * width)))
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-5)
        self.batch = torch.randn(4, width)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(self.batch).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> list[Any]:
        """All that is saved."""
        kept = [p.detach() for p in self.net.parameters()]
        return kept + [value for state in self.optimizer.state.values() for value in state.values()]


# ---- contenders: each returns what saves into a folder and gives back what waits until that is safe


Save = Callable[[Path], Callable[[], Any]]


def nothing() -> None:
    """Safe already."""


def instep_saves(trainer: Any) -> dict[str, Save]:
    """In a running fit."""

    def now(folder: Path) -> Callable[[], Any]:
        path = trainer.save_to(folder, None, weights_only=False)
        return lambda: no_problems(trainer.verify_checkpoint(path))

    def later(folder: Path) -> Callable[[], Any]:
        pending = trainer.save_later(folder, None, weights_only=False)
        return lambda: trainer.finish_save(pending)

    return {"instep": now, "instep background": later}


def no_problems(problems: list[str]) -> None:
    """What was verified."""
    if problems:
        raise RuntimeError(f"a checkpoint does not verify: {problems}")


def torch_saves(work: Work) -> dict[str, Save]:
    """One file with the two state dicts."""
    import torch

    def save(folder: Path, sync: bool) -> Callable[[], Any]:
        folder.mkdir()
        with open(folder / "state.pt", "wb") as file:
            torch.save({"model": work.net.state_dict(), "optimizer": work.optimizer.state_dict()}, file)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        return nothing

    return {"torch.save": lambda folder: save(folder, False), "torch.save + fsync": lambda folder: save(folder, True)}


def dcp_saves(work: Work) -> dict[str, Save]:
    """torch.distributed.checkpoint without a process group."""
    import torch.distributed.checkpoint as dcp

    def state() -> dict[str, Any]:
        return {"model": work.net.state_dict(), "optimizer": work.optimizer.state_dict()}

    def now(folder: Path) -> Callable[[], Any]:
        dcp.save(state(), checkpoint_id=folder, no_dist=True)
        return nothing

    def later(folder: Path) -> Callable[[], Any]:
        future: Any = dcp.async_save(state(), checkpoint_id=folder, no_dist=True)
        return future.result

    return {"dcp": now, "dcp async": later}


def accelerate_saves(work: Work) -> dict[str, Save]:
    """The module and the optimizer prepared."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]  # of the bench extra

    accelerator: Any = Accelerator(cpu=True)
    accelerator.prepare(work.net, work.optimizer)

    def save(folder: Path) -> Callable[[], Any]:
        accelerator.save_state(str(folder))
        return nothing

    return {"accelerate": save}


def lightning_saves(work: Work) -> dict[str, Save]:
    """After a fit of one step over the same module and optimizer."""
    import torch
    from lightning import LightningModule, Trainer  # pyright: ignore[reportMissingImports]  # as above

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return work.optimizer

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=1, **dict.fromkeys(off, False))
    trainer.fit(Module(), torch.utils.data.DataLoader(work.batch, batch_size=4))  # pyright: ignore[reportArgumentType]

    def save(folder: Path) -> Callable[[], Any]:
        folder.mkdir()
        trainer.save_checkpoint(folder / "state.ckpt")
        return nothing

    return {"lightning": save}


# ---- in the child


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Everything of one size, in one process."""
    import torch

    import instep.checkpoint  # a ModelCheckpoint would have loaded it  # noqa: F401
    from instep import Callback, Trainer, TrainModule

    warnings.simplefilter("ignore")
    work = Work(request["width"], request["megabytes"])
    total = sum(tensor.nbytes for tensor in work.tensors())
    touched = torch.ones(3 * total, dtype=torch.uint8)
    del touched
    answer: dict[str, Any] = {}

    class Module(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return work.optimizer

    saves = {**torch_saves(work), **dcp_saves(work)}
    for make in (accelerate_saves, lightning_saves):
        try:
            saves |= make(work)
        except ImportError as error:
            print(f"left out: {error}")

    class Measures(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            saves.update(instep_saves(trainer))
            answer.update(all_of(work, saves, Path(request["root"]), request))
            answer["buffer_bytes"] = trainer._ctx.saver._background.buffer_bytes
            answer["bytes"] = total

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(accelerator="cpu", max_steps=1, callbacks=[Measures()], **dict.fromkeys(off, False))
    trainer.fit(Module(), torch.utils.data.DataLoader(work.batch, batch_size=4))  # pyright: ignore[reportArgumentType]
    return answer


def all_of(work: Work, saves: dict[str, Save], root: Path, request: dict[str, Any]) -> dict[str, Any]:
    """All rounds, in seconds."""
    import torch

    order = random.Random(request["seed"])
    tensors = work.tensors()
    places = [torch.ones_like(tensor) for tensor in tensors]
    blocked: dict[str, list[float]] = {}
    safe: dict[str, list[float]] = {}

    def copy() -> None:
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)

    def clone() -> list[Any]:
        return [tensor.clone() for tensor in tensors]

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        blocked.setdefault(name, []).append(time.perf_counter() - start)
        return result

    for _ in range(request["rounds"]):
        names = [*saves, "clone", "copy_"]
        order.shuffle(names)
        for name in names:
            if name == "clone":
                timed(name, clone)
            elif name == "copy_":
                timed(name, copy)
            else:
                folder = root / "saved"
                start = time.perf_counter()
                wait = timed(name, lambda name=name, folder=folder: saves[name](folder))
                wait()
                safe.setdefault(name, []).append(time.perf_counter() - start)
                shutil.rmtree(folder)
                os.sync()
    places.clear()
    steps = {name: slow_down(work, saves[name], root) for name in ASYNC}
    return {"blocked": blocked, "safe": safe, "steps": steps, "checksum": checksum(tensors, root, request["rounds"])}


def slow_down(work: Work, save: Save, root: Path) -> dict[str, float]:
    """Seconds per step, alone and beside a save."""
    import threading

    alone: list[float] = []
    beside: list[float] = []

    def step() -> float:
        start = time.perf_counter()
        work.step()
        return time.perf_counter() - start

    for number in range(1 if step() > 0.5 else 2):
        while sum(alone) < BLOCK_S * (number + 1) or len(alone) < 3 * (number + 1):
            alone.append(step())
        while sum(beside) < BLOCK_S * (number + 1):
            wait = save(root / "saved")
            ended = threading.Event()
            waits = threading.Thread(target=lambda wait=wait, ended=ended: (wait(), ended.set()))
            waits.start()
            while not ended.is_set():
                beside.append(step())
            waits.join()
            shutil.rmtree(root / "saved")
            os.sync()
    return {"alone": statistics.fmean(alone), "beside": statistics.fmean(beside), "steps": len(beside)}


def checksum(tensors: list[Any], root: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds to write and fsync the same bytes, without and with the checksum."""
    import torch

    from instep.checkpoint import LocalFiles
    from instep.checkpoint.hashing import Hasher

    content = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors]).numpy().data
    times: dict[str, list[float]] = {"without": [], "with": []}
    update = Hasher.update
    for number in range(-2, 2 * rounds):  # the first two warm up
        name = ("without", "with")[(number + number // 2) % 2]  # each is first as often
        Hasher.update = update if name == "with" else lambda self, data: None
        start = time.perf_counter()
        with LocalFiles().create(root / "file") as out:
            out.write(content)
            out.close()
        if number >= 0:
            times[name].append(time.perf_counter() - start)
        Hasher.update = update
        (root / "file").unlink()
        os.sync()
    return times


# ---- in the parent


def main() -> None:
    """Run all processes, print and write what they found."""
    args = parse_arguments()
    plan = {size: (512, 1, 2) if args.quick else SIZES[size] for size in ([10] if args.quick else args.sizes)}
    answers: dict[int, list[dict[str, Any]]] = {size: [] for size in plan}
    progress = harness.Progress(sum(processes for _, processes, _ in plan.values()))
    for size, (width, processes, rounds) in plan.items():
        for seed in range(processes):
            answer = run_child({"megabytes": size, "width": width, "seed": seed, "rounds": rounds}, args.folder)
            answers[size].append(answer)
            progress.step(f"{size} MB: blocked for {answer['blocked']['instep background'][-1]:.3f} s")
    results = [summary(size, answers[size]) for size in plan]
    for result in results:
        report(result)
    machine = {**harness.machine(), "pinned_to_one_cpu": False}
    name = "checkpoint_quick" if args.quick else "checkpoint"
    harness.write_results(args.out, name, {"machine": machine, "bars": BARS, "results": results})


def run_child(request: dict[str, Any], where: Path | None) -> dict[str, Any]:
    """One process of its own."""
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=where) as folder:
        asked = Path(folder, "request.json")
        asked.write_text(json.dumps({**request, "root": folder, "cpu": None}))
        done = subprocess.run(
            [sys.executable, __file__, "--child", str(asked)], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{request} ended with status {done.returncode}:\n{done.stderr[-6000:]}")
        return json.loads(Path(folder, "answer.json").read_text())


def summary(size: int, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over all processes and rounds; the first save of each process apart."""

    def part(kind: str, name: str, which: slice) -> list[float]:
        return [value for answer in answers for value in answer[kind][name][which]]

    names = list(answers[0]["blocked"])
    seconds: dict[str, Any] = {}
    for name in names:
        seconds[name] = {
            "first_blocked_s": harness.spread(part("blocked", name, slice(0, 1)), 4),
            "blocked_s": harness.spread(part("blocked", name, slice(1, None)), 4),
        }
        if name in answers[0]["safe"]:
            seconds[name]["safe_s"] = harness.spread(part("safe", name, slice(1, None)), 4)
    without, hashed = ([v for a in answers for v in a["checksum"][name]] for name in ("without", "with"))
    steps = {
        name: {
            "alone_s": round(statistics.median(a["steps"][name]["alone"] for a in answers), 4),
            "beside_s": round(statistics.median(a["steps"][name]["beside"] for a in answers), 4),
            "ratio": harness.spread([a["steps"][name]["beside"] / a["steps"][name]["alone"] for a in answers], 3),
        }
        for name in ASYNC
    }

    def blocked(name: str, which: str = "blocked_s") -> float:
        return seconds[name][which]["median"]

    background = blocked("instep background")
    shares = {
        "share of torch.save": background / blocked("torch.save"),
        "over copy_": background / blocked("copy_"),
        "first over clone": blocked("instep background", "first_blocked_s") / blocked("clone", "first_blocked_s"),
        "checksum share": statistics.median(hashed) / statistics.median(without) - 1,
    }
    return {
        "weights_mb": size,
        "processes": len(answers),
        "saves_in_each": len(answers[0]["blocked"]["copy_"]),
        "saved_bytes": answers[0]["bytes"],
        "host_buffer_bytes": answers[0]["buffer_bytes"],
        "seconds": seconds,
        "steps": steps,
        "write_and_fsync_s": {"without": harness.spread(without, 4), "with_checksum": harness.spread(hashed, 4)},
        "bars": {name: {"got": round(value, 3), "held": value <= BARS[name]} for name, value in shares.items()},
    }


def report(result: dict[str, Any]) -> None:
    """Print the tables of one size."""
    total, buffers = result["saved_bytes"] / 1e6, result["host_buffer_bytes"] / 1e6
    print(f"\n{result['weights_mb']} MB of weights, {total:.0f} MB saved, {buffers:.0f} MB of host buffers\n")
    rows = []
    for name, times in sorted(result["seconds"].items(), key=lambda pair: pair[1]["blocked_s"]["median"]):
        safe = f"{times['safe_s']['median']:.4f}" if "safe_s" in times else ""
        rows.append((name, *(f"{times[key]['median']:.4f}" for key in ("first_blocked_s", "blocked_s")), safe))
    harness.print_table(("", "first save: blocked s", "later: blocked s", "later: safe s"), rows)
    for name, steps in result["steps"].items():
        print(f"steps beside {name}: {steps['ratio']['median']:.2f} times {steps['alone_s']:.4f} s")
    for name, bar in result["bars"].items():
        print(f"{name}: {bar['got']:.3f}, at most {BARS[name]}: {'holds' if bar['held'] else 'missed'}")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="How long saving blocks, and how long until a checkpoint is safe.")
    parser.add_argument("--quick", action="store_true", help="10 MB, one process, two rounds")
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=list(SIZES), help="MB of weights")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure (default: the temporary one)")
    harness.add_out(parser)
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        harness.answer(measure)
    else:
        main()
