"""States, stores and damage for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from instep.checkpoint import CheckpointStore, Reader
from instep.checkpoint.writer import BaseWriter


def writes(value: float) -> Callable[[BaseWriter], None]:
    """A small but complete checkpoint; every file of it depends on the value."""

    def write(writer: BaseWriter) -> None:
        if writer.rank == 0:
            weight = torch.full((40,), value)
            writer.tensors("model.safetensors", {"weight": weight, "tied": weight})
            writer.state("optimizer", {"state": {0: {"exp_avg": torch.full((4,), value)}}, "betas": (0.9, value)})
            writer.json("trainer.json", {"value": value})
        writer.state(f"rank-{writer.rank}", {"rng": torch.full((8,), value), "rank": writer.rank})

    return write


def value_of(reader: Reader) -> float:
    """The value that `writes` was given; fails where the files do not agree on it."""
    values = {
        float(reader.tensors("model.safetensors")["tied"][7]),
        float(reader.state("optimizer")["state"][0]["exp_avg"][0]),
        reader.state("optimizer")["betas"][1],
        reader.json("trainer.json")["value"],
        float(reader.state("rank-0")["rng"][3]),
    }
    assert len(values) == 1, f"a mix of checkpoints: {values}"
    return values.pop()


def path_of(reader: Reader | None) -> Path | None:
    """The checkpoint that a store has opened."""
    return None if reader is None else reader.path


def left_over(store: CheckpointStore) -> list[str]:
    """The hidden folders in a store."""
    return sorted(path.name for path in store.root.iterdir() if path.name.startswith("."))


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(bytes(data))


# ---- what is killed, failed or cut off from power; OLD was saved as step 1 before

OLD, NEW = 1.0, 2.0


def save_new_step(store: CheckpointStore) -> None:
    store.save(2, writes(NEW))


def save_same_step(store: CheckpointStore) -> None:
    store.save(1, writes(NEW))


def save_then_delete_the_old(store: CheckpointStore) -> None:
    path = store.save(2, writes(NEW))
    assert store.verify(path) == []
    store.delete("step-00000001-1")


ACTIONS: list[Callable[[CheckpointStore], None]] = [save_new_step, save_same_step, save_then_delete_the_old]
