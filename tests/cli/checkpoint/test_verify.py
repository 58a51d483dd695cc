"""`instep checkpoint verify`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from instep.checkpoint import CheckpointStore
from tests.checkpoint.helpers import flip
from tests.cli.checkpoint.conftest import Command


def test_verify_counts_checkpoints_that_are_whole(run_folder: Path, instep: Command) -> None:
    answer = instep("verify", run_folder)
    assert answer.code == 0
    assert answer.out.endswith("2 verified, 0 damaged\n")


@pytest.mark.parametrize("broken", [False, True])
def test_sizes_are_those_of_ls(broken: bool, checkpoint: Path, instep: Command) -> None:
    if broken:
        os.truncate(checkpoint / "manifest.json", 20)
    [verified] = instep("verify", checkpoint, "--json").json["checkpoints"]
    [listed] = instep("ls", checkpoint, "--json").json["folders"][0]["checkpoints"]
    assert verified["bytes"] == listed["bytes"] == sum(path.stat().st_size for path in checkpoint.iterdir())


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.json", "rank-00000.safetensors"])
def test_a_flipped_bit_is_found(name: str, checkpoint: Path, run_folder: Path, instep: Command) -> None:
    flip(checkpoint / name, (checkpoint / name).stat().st_size - 1)
    answer = instep("verify", run_folder, "--json")
    assert answer.code == 1
    results = {Path(result["path"]).name: result for result in answer.json["checkpoints"]}
    assert results["step-00000010-1"]["ok"]
    [problem] = results["step-00000020-1"]["problems"]
    assert problem.startswith(f"{name} differs")
    assert answer.json["damaged"] == 1


def test_verify_calls_a_checkpoint_without_manifest_damaged(checkpoint: Path, instep: Command) -> None:
    os.unlink(checkpoint / "manifest.json")
    answer = instep("verify", checkpoint)
    assert answer.code == 1
    assert f"DAMAGED  {checkpoint}" in answer.out
    assert "it has no manifest.json" in answer.out


@pytest.mark.slow
def test_which_chunk_of_a_large_file(tmp_path: Path, instep: Command) -> None:
    tensor = torch.zeros(150 * 2**20, dtype=torch.uint8)
    path = CheckpointStore(tmp_path).save(1, lambda writer: writer.tensors("model.safetensors", {"x": tensor}))
    with open(path / "model.safetensors", "r+b") as file:
        file.seek(100 * 2**20)
        file.write(b"\1")
    answer = instep("verify", path)
    assert answer.code == 1
    assert "model.safetensors differs in 64 MiB chunk 1 from what was written" in answer.out
