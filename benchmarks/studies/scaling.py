"""Collectives, bytes and store operations of a run by number of ranks, and what they take with real ranks.

    python benchmarks/studies/scaling.py           # about 3 minutes
    python benchmarks/studies/scaling.py --quick

**Counted**: one process plays rank 0 of 2 to 1,024 under torch's fake process group, in a fit with DDP. Every `c10d`
operator that the process calls is counted by a dispatch mode, with the bytes that this rank puts in and gets out. DDP's
gradients, which the handwritten loop has too, are told apart by a communication hook. The fake group moves nothing, so
an all-gather is answered as if all ranks had sent what this one did. That shows what ranks do that agree; what a rank
answers to others that differ (a stop, an error) is beyond it. Operations of the key-value store are counted where this
process calls it.

**Timed**: the same operations among 2 to 4 real ranks (gloo, loopback).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # of the harness, shared with the programs kept green

import harness

WORLDS = (2, 8, 64, 1024)
STEPS = 60
WIDTH = 37


class Counts:
    """Collectives of this process, by the part of the run that it is in."""

    def __init__(self) -> None:
        self.part = "start"
        self.calls: dict[str, Counter[str]] = {}
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()

    def add(self, name: str, sent: int, received: int) -> None:
        """One more, with the bytes that this rank puts in and gets out."""
        self.calls.setdefault(self.part, Counter())[name] += 1
        self.sent[self.part] += sent
        self.received[self.part] += received


def count_run(request: dict[str, Any]) -> dict[str, Any]:
    """In a fresh process: rank 0 of many, counted."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg
    from torch.utils._python_dispatch import TorchDispatchMode

    world, counts = request["world"], Counts()
    store = counting_store(dist, counts)
    os.environ.update(RANK="0", WORLD_SIZE=str(world), LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(min(world, 8)))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", INSTEP_JOB_SECRET="none")
    assert fake_pg  # it registers the backend
    make_group = dist.new_group
    dist.new_group = lambda *args, **kwargs: make_group(*args, **{**kwargs, "backend": "fake"})  # ours are of gloo
    dist.init_process_group("fake", store=store, rank=0, world_size=world)
    from instep.checkpoint import store as store_room
    from instep.state import messages
    from instep.strategies.comm_hooks import CommHook

    read = messages._read
    messages._read = lambda data, head, group, rank: read(data, head, group, 0)  # rank 0 sent them all

    joined = store_room._joined
    store_room._joined = lambda parts, *rest: joined(parts[:1], *rest)  # and wrote all files

    def reduced(state, bucket):  # without annotations, which DDP reads and wants to be its own
        counts.add("gradients", 0, 0)
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())  # the reducer wants a result, of which the fake group has none
        return done

    CommHook.register = lambda self, ddp: ddp.register_comm_hook(None, reduced)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.namespace == "c10d":
                name = func.__name__.split(".")[0].strip("_")
                own = args[1] if name in ("allgather", "gather", "_allgather_base") else args[0]
                tensors = [own] if isinstance(own, torch.Tensor) else list(own)
                size = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
                if name == "allgather":
                    for outputs, sent in zip(args[0], args[1], strict=True):
                        for output in outputs:
                            output.copy_(sent)
                counts.add(name, size, size * world if "gather" in name else size)
            return result

    with Mode(), tempfile.TemporaryDirectory() as folder:
        fit(counts, folder, "cpu", world)
    return {
        "parts": {part: dict(calls) for part, calls in counts.calls.items()},
        "sent": dict(counts.sent),
        "received": dict(counts.received),
    }


def counting_store(dist: Any, counts: Counts) -> Any:
    """A store in this process that counts what is asked of it."""
    inner = dist.HashStore()

    class Counting(dist.Store):
        def set(self, key: str, value: Any) -> None:
            counts.add("store", len(value), 0)
            inner.set(key, value)

        def get(self, key: str) -> bytes:
            counts.add("store", 0, 0)
            return inner.get(key)

        def add(self, key: str, amount: int) -> int:
            counts.add("store", 8, 8)
            return inner.add(key, amount)

        def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
            counts.add("store", len(desired), 0)
            return inner.compare_set(key, expected, desired)

        def check(self, keys: list[str]) -> bool:
            counts.add("store", 0, 0)
            return inner.check(keys)

        def wait(self, keys: list[str], timeout: Any = None) -> None:
            counts.add("store", 0, 0)

        def set_timeout(self, timeout: Any) -> None:
            inner.set_timeout(timeout)

    return Counting()


def fit(counts: Counts, folder: str, accelerator: str, world: int) -> None:
    """A run with logging, a save and a validation, in named parts."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from instep import Callback, Trainer, TrainModule

    class Net(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, WIDTH)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.net(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.net(batch[0]).square().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    class Parts(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            counts.part = "first steps" if batch_idx < 20 else f"{STEPS - 20} steps"

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 19:
                counts.part = "a save"
                trainer.save_checkpoint(Path(folder, "saved"))
            if batch_idx == STEPS - 1:
                counts.part = "the epoch's end, with a validation"

        def on_train_end(self, trainer: Any, module: Any) -> None:
            counts.part = "the end"

    data, checks = (TensorDataset(torch.randn(batches * 2 * world, WIDTH)) for batches in (STEPS, 4))
    trainer = Trainer(
        accelerator=accelerator,
        strategy="ddp",
        devices=min(world, 8),
        num_nodes=max(1, world // 8),
        max_epochs=1,
        trigger_every=1,
        default_root_dir=folder,
        logger=False,
        callbacks=[Parts()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Net(), DataLoader(data, 2), DataLoader(checks, 2))


# ---- timed


def time_ranks(repeats: int) -> dict[str, float]:
    """On every rank: seconds per operation."""
    import torch

    from instep import PartialState
    from instep.distributed import gather_object
    from instep.distributed.triggers import Triggers

    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    triggers = Triggers(every=1)
    steps = iter(range(10**9))
    ways = {
        "a boundary of the triggers": lambda: triggers.tick(next(steps)),
        "triggers.sync": triggers.sync,
        "wait_for_everyone": state.wait_for_everyone,
        "gather_object of 100 bytes": lambda: gather_object("x" * 100),
    }
    took = {}
    for name, way in ways.items():
        for _ in range(20):
            way()
        state.wait_for_everyone()
        start = time.perf_counter()
        for _ in range(repeats):
            way()
        took[name] = (time.perf_counter() - start) / repeats
    triggers.abandon()
    return took


def main() -> None:
    """Count, time, print, write the JSON."""
    parser = argparse.ArgumentParser(description="Collectives and bytes by number of ranks.")
    parser.add_argument("--quick", action="store_true", help="2 and 64 ranks counted, 2 timed")
    harness.add_out(parser)
    args = parser.parse_args()
    worlds, real, repeats = ((2, 64), (2,), 50) if args.quick else (WORLDS, (2, 3, 4), 500)
    from instep import debug_launcher  # late: children need none of it

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    counted = {world: harness.run_child(__file__, {"world": world}) for world in worlds}
    rows = [
        (
            part,
            *(
                ", ".join(f"{n} {name}" for name, n in sorted(counted[w]["parts"].get(part, {}).items()))
                for w in worlds
            ),
        )
        for part in counted[worlds[0]]["parts"]
    ]
    harness.print_table(("", *(f"{world} ranks" for world in worlds)), rows)
    timed = {}
    for world in real:
        ranks = debug_launcher(time_ranks, (repeats,), num_processes=world)
        timed[world] = {name: round(statistics.fmean(rank[name] for rank in ranks) * 1e6, 1) for name in ranks[0]}
    print()
    harness.print_table(
        ("us", *(f"{w} ranks" for w in real)), [(n, *(timed[w][n] for w in real)) for n in timed[real[0]]]
    )
    results = {"steps": STEPS - 20, "counted": counted, "timed_us": timed}
    harness.write_results(args.out, f"scaling{'_quick' if args.quick else ''}", results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        harness.answer(count_run)
    else:
        main()
