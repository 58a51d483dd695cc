"""The ways to start a program that need nothing but torch: each of two processes ends with the same weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.helpers.spawn import free_port, run_command
from tests.launch.ways import UNLAUNCHED, job, reference, same_weights

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("way", ["its own start", "torchrun"])
def test_the_same_weights(way: str, tmp_path: Path) -> None:
    command = job(tmp_path / "out.json", *(["--devices", "2"] if way == "its own start" else []))
    if way == "torchrun":
        command = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", *command)
    done = run_command([sys.executable, *command], env=UNLAUNCHED, cwd=tmp_path, timeout_s=120.0)
    assert done.returncode == 0, done.stderr
    assert same_weights(tmp_path / "out.json")["world_size"] == 2


def test_other_weights_are_found(tmp_path: Path) -> None:
    result = reference(2)
    (tmp_path / "out.json").write_text(json.dumps({**result, "weights": "0" * 64}))
    with pytest.raises(AssertionError):
        same_weights(tmp_path / "out.json")
