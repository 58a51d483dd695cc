"""Weights in files: mapped without a copy, and an offload folder that knows its model and checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from instep.big_models.offload import FILE, WeightsMap, identity_of, offload_weights, open_offload_folder
from instep.checkpoint.weights import stored_weights
from instep.errors import CheckpointError

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(3)}
SHAPES = {name: tensor.shape for name, tensor in WEIGHTS.items()}


def test_mapped_weights_are_no_copies(tmp_path: Path) -> None:
    save_file({"a": WEIGHTS["a"], "tied": WEIGHTS["a"].clone()}, tmp_path / "x.safetensors")
    stored = stored_weights(tmp_path / "x.safetensors")
    weights = WeightsMap({**stored, "again": stored["a"], "mine": WEIGHTS["b"]})
    assert torch.equal(weights["a"], WEIGHTS["a"])
    assert weights["a"] is weights["again"]
    assert weights["a"] is weights["a"]
    other = WeightsMap(stored)["a"]
    assert other.data_ptr() == weights["a"].data_ptr()  # one mapping of a file
    assert weights["mine"] is WEIGHTS["b"]
    assert set(weights) == {"a", "tied", "again", "mine"}
    weights.staged["a"] = WEIGHTS["b"]
    assert weights["a"] is WEIGHTS["b"]


def test_an_offload_folder_is_used_again_and_refused_for_another(tmp_path: Path) -> None:
    first = offload_weights(tmp_path, SHAPES, WEIGHTS, "checkpoint 1")
    assert all(torch.equal(first[name].map(), tensor) for name, tensor in WEIGHTS.items())
    assert all(first[name].map().dtype == tensor.dtype for name, tensor in WEIGHTS.items())
    inode = (tmp_path / FILE).stat().st_ino
    again = offload_weights(tmp_path, SHAPES, {"a": WEIGHTS["a"]}, "checkpoint 1")
    assert (tmp_path / FILE).stat().st_ino == inode
    assert torch.equal(again["a"].map(), WEIGHTS["a"])
    assert set(open_offload_folder(tmp_path, SHAPES)) == set(WEIGHTS)
    with pytest.raises(CheckpointError, match="another checkpoint"):
        offload_weights(tmp_path, SHAPES, WEIGHTS, "checkpoint 2")
    for wrong in ({**SHAPES, "a": (3, 2)}, {"a": SHAPES["a"]}):
        with pytest.raises(CheckpointError, match="another model"):
            offload_weights(tmp_path, wrong, WEIGHTS, "checkpoint 1")
        with pytest.raises(CheckpointError, match="another model"):
            open_offload_folder(tmp_path, wrong)
    held = first["a"].map()
    more = offload_weights(tmp_path, SHAPES, {**WEIGHTS, "a": WEIGHTS["a"].double()}, "checkpoint 1")
    assert more["a"].map().dtype == torch.float64
    assert torch.equal(held, WEIGHTS["a"])  # who uses the old file keeps it
    offload_weights(tmp_path / "memory", SHAPES, WEIGHTS)
    changed = offload_weights(tmp_path / "memory", SHAPES, {"a": WEIGHTS["a"] + 1})
    assert torch.equal(changed["a"].map(), WEIGHTS["a"] + 1)


def test_a_damaged_offload_folder_is_refused(tmp_path: Path) -> None:
    offload_weights(tmp_path, SHAPES, WEIGHTS, "checkpoint")
    whole = (tmp_path / FILE).read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        (tmp_path / FILE).write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=FILE):
            offload_weights(tmp_path, SHAPES, WEIGHTS, "checkpoint")
    (tmp_path / FILE).rename(tmp_path / "there")
    (tmp_path / FILE).symlink_to("there")
    with pytest.raises(CheckpointError, match="a link"):
        offload_weights(tmp_path, SHAPES, WEIGHTS, "checkpoint")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not write"):
        offload_weights(tmp_path / "file", SHAPES, WEIGHTS)


def test_the_identity_of_files_is_their_content(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(bytes(10**6))
    os.utime(file, ns=(1, 1))
    one = identity_of([file])
    file.write_bytes(bytes(10**6 - 1) + b"1")
    os.utime(file, ns=(1, 1))
    assert identity_of([file]) != one
    file.write_bytes(bytes(10**6))
    os.utime(file, ns=(1, 1))
    assert identity_of([file]) == one
    os.utime(file, ns=(2, 2))
    assert identity_of([file]) != one
