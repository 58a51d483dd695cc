"""Truncated backpropagation through time: what the network remembers comes back on a resume."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_run_that_was_stopped_within_an_epoch_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    tbptt = import_module("tbptt")
    tbptt.main(["--smoke", "--root", str(tmp_path / "whole")])
    with monkeypatch.context() as patched:
        patched.setattr(tbptt, "Trainer", partial(tbptt.Trainer, max_steps=14))
        tbptt.main(["--smoke", "--root", str(tmp_path / "stopped")])
    tbptt.main(["--smoke", "--resume", "--root", str(tmp_path / "stopped")])
    whole, resumed = (
        load_file(next((tmp_path / name).rglob("step-00000020-*/model.safetensors"))) for name in ("whole", "stopped")
    )
    assert all((whole[name] == resumed[name]).all() for name in whole)
