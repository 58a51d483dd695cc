"""`instep checkpoint show`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from instep.checkpoint import CheckpointStore, write_tensors
from instep.cli.checkpoint.contents import read_headers
from instep.errors import CorruptCheckpointError
from tests.checkpoint.helpers import flip
from tests.cli.checkpoint.conftest import Command, writes


def test_show_prints_the_state_of_a_checkpoint(run_folder: Path, instep: Command) -> None:
    answer = instep("show", run_folder)
    assert answer.code == 0
    lines = [line.strip() for line in answer.out.splitlines()]
    assert "step 20, attempt 1, kind full" in lines, "the newest of the run"
    for expected in ("width: 3", "score: 0.25", "gamma: 0.5", "batches: 20", "lr: 0.2", "done: 16"):
        assert expected in lines
    assert "linear.weight  2x3    float32  24 B" in lines
    assert not any("exp_avg" in line for line in lines), "the optimizer's tensors are listed with --tensors"
    assert any(
        "0.state.linear.weight.exp_avg " in line for line in instep("show", run_folder, "--tensors").out.split("\n")
    )


def test_show_writes_strict_json_for_programs(checkpoint: Path, instep: Command) -> None:
    content = instep("show", checkpoint, "--json").json
    assert content["trainer"]["hyper_parameters"] == {"width": 3, "note": "x"}
    assert content["trainer"]["callbacks"]["Counter"]["odd"] == "nan", "strict JSON has no NaN"
    assert content["optimizers"][0]["groups"][1] | {"lr": 0} == content["optimizers"][0]["groups"][0] | {"lr": 0}
    assert content["tensors"]["model.safetensors"]["linear.bias"] == {"shape": [2], "dtype": "float32", "bytes": 8}
    assert content["files"]["model.safetensors"]["bytes"] == (checkpoint / "model.safetensors").stat().st_size


def test_damage_is_an_error_and_no_traceback(checkpoint: Path, instep: Command) -> None:
    flip(checkpoint / "trainer.json", 30)
    answer = instep("show", checkpoint)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("instep: ")
    assert "trainer.json differs" in answer.err


def test_several_runs_are_not_guessed(run_folder: Path, instep: Command) -> None:
    CheckpointStore(run_folder.parent / "version_1" / "checkpoints").save(1, writes(1.0, 1))
    answer = instep("show", run_folder.parent)
    assert answer.code == 1
    assert "several folders of checkpoints" in answer.err


def test_headers_of_shared_and_odd_tensors(tmp_path: Path) -> None:
    weight = torch.ones(4, 2, dtype=torch.bfloat16)
    tensors = {
        "weight": weight,
        "tied": weight,
        "odd": torch.ones(3, dtype=torch.complex128),
        "flag": torch.tensor(True),
    }
    write_tensors(tmp_path / "x.safetensors", tensors)
    assert read_headers([tmp_path / "x.safetensors"]) == {
        "flag": {"shape": [], "dtype": "bool", "bytes": 1},
        "odd": {"shape": [3], "dtype": "complex128", "bytes": 48},
        "tied": {"shape": [4, 2], "dtype": "bfloat16", "bytes": 16, "same_as": "weight"},
        "weight": {"shape": [4, 2], "dtype": "bfloat16", "bytes": 16},
    }


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 40, (2).to_bytes(8, "little") + b"[]", (9).to_bytes(8, "little") + b'{"x": {}}']
)
def test_read_headers_refuses_a_file_without_a_safetensors_header(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match="not a safetensors file"):
        read_headers([tmp_path / "x.safetensors"])


def test_damage_without_the_attempt_is_said(checkpoint: Path, instep: Command) -> None:
    os.truncate(checkpoint / "manifest.json", 20)
    answer = instep("show", checkpoint.parent / "step-00000020")
    assert (answer.code, answer.out) == (1, "")
    assert f"{checkpoint} is damaged: " in answer.err
    assert f"`instep checkpoint verify {checkpoint}`" in answer.err
    assert f"DAMAGED  {checkpoint}" in instep("verify", checkpoint.parent / "step-00000020").out


@pytest.mark.parametrize(
    "damage", [lambda path: os.truncate(path / "manifest.json", 20), lambda path: flip(path / "trainer.json", 30)]
)
def test_the_newest_that_can_be_read(
    damage: Callable[[Path], None], checkpoint: Path, run_folder: Path, instep: Command
) -> None:
    damage(checkpoint)
    answer = instep("show", run_folder)
    assert answer.code == 0
    assert answer.out.startswith(f"{checkpoint.parent}/step-00000010-1\n")
    assert f"instep: {checkpoint} is damaged: " in answer.err
    damage(checkpoint.parent / "step-00000010-1")
    assert (instep("show", run_folder).code, instep("show", run_folder).out) == (1, "")


def test_convert_and_show_count_a_single_tensor_without_a_run(tmp_path: Path, instep: Command) -> None:
    write_tensors(tmp_path / "w.safetensors", {"x": torch.ones(1)})
    assert "(1 tensor)" in instep("convert", tmp_path / "w.safetensors", tmp_path / "out").out
    shown = instep("show", tmp_path / "out").out
    assert "model.safetensors: 1 tensor, 1 element, 4 B\n" in shown
    assert "by run" not in shown
