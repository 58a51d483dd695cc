"""The commands on checkpoints that several ranks wrote their parts of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from instep.checkpoint import CheckpointStore, Writer
from tests.cli.checkpoint.conftest import Command, optimizer, shared, weights, writes
from tests.helpers.sharding import cut


def in_parts(value: float, step: int, ranks: int = 2):
    def write(writer: Writer) -> None:
        for rank in range(ranks):
            part = f"-{rank:05d}-of-{ranks:05d}"
            writer.tensors(f"model{part}.safetensors", cut(weights(value), rank, ranks))
            writer.state(f"optimizer{part}", cut(optimizer(), rank, ranks))
        writer.state("trainer", shared(step))
        writer.state("rank-00000", {"rng": torch.arange(16)})

    return write


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """One state, saved whole, by two ranks and by three."""
    store = CheckpointStore(tmp_path)
    return (
        store.save(1, writes(1.0, 5), name="whole"),
        store.save(1, in_parts(1.0, 5), name="two"),
        store.save(1, in_parts(1.0, 5, 3), name="three"),
    )


def test_show_puts_the_parts_together(folders: tuple[Path, Path, Path], instep: Command) -> None:
    whole, two, _ = folders
    one, other = (instep("show", path, "--json").json for path in (whole, two))
    assert one["optimizers"] == other["optimizers"]
    assert one["tensors"].keys() == other["tensors"].keys()
    there = other["tensors"]["model.safetensors"]["linear.weight"]
    assert there == {"shape": [2, 3], "dtype": "float32", "bytes": 24, "parts": 2}
    assert "model.safetensors: 2 tensors, 8 elements, 32 B" in instep("show", two).out


def test_diff_compares_the_tensors_whoever_wrote_them(
    folders: tuple[Path, Path, Path], tmp_path: Path, instep: Command
) -> None:
    whole, two, three = folders
    for a, b in ((whole, two), (two, three), (three, three)):
        answer = instep("diff", a, b)
        assert answer.code == 0, answer.out
        assert "9 tensors are equal bit for bit, 0 are not" in answer.out
    other = CheckpointStore(tmp_path).save(1, in_parts(3.0, 5), name="other")
    answer = instep("diff", whole, other, "--weights")
    assert answer.code == 1
    assert "model.safetensors linear.weight: max abs 2, 6 of 6 elements" in answer.out


def test_sharded_checkpoints_are_verified_and_converted_whole(
    folders: tuple[Path, Path, Path], tmp_path: Path, instep: Command
) -> None:
    whole, two, _ = folders
    assert instep("verify", two).code == 0
    for source, name in ((whole, "a"), (two, "b")):
        assert instep("convert", source, tmp_path / f"{name}.safetensors").code == 0
        answer = instep("convert", source, tmp_path / f"{name}.ckpt")
        assert "optimizer" not in answer.out.partition("left out")[2]
    one, other = (load_file(tmp_path / f"{name}.safetensors") for name in "ab")
    assert all(torch.equal(one[name], other[name]) for name in weights(1.0))
    one, other = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["optimizer_states"][0] for name in "ab")
    assert one["param_groups"] == other["param_groups"]
    assert all(torch.equal(one["state"][i][key], it) for i in (0, 1) for key, it in other["state"][i].items())
