"""A run folder with two checkpoints, and the command in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.checkpoint import CheckpointStore, Writer
from instep.cli.main import main

HPARAMS = {"width": 3, "note": "x"}


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Answer]


@pytest.fixture
def instep(capsys: pytest.CaptureFixture[str]) -> Command:
    """`instep checkpoint ...` in this process."""

    def run(*words: Any) -> Answer:
        capsys.readouterr()
        code = main(["checkpoint", *map(str, words)])
        return Answer(code, *capsys.readouterr())

    return run


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"linear.weight": torch.full((2, 3), value), "linear.bias": torch.arange(2.0)}


def shared(step: int) -> dict[str, Any]:
    """A trainer.json."""
    return {
        "instep_version": "0",
        "epoch": 1,
        "global_step": step,
        "world_size": 1,
        "hyper_parameters": HPARAMS,
        "hparams_name": None,
        "user": {"mine": 5},
        "run_id": "abc",
        "position": {"epoch": 1, "batch": 4},
        "schedulers": [{"gamma": 0.5, "last_epoch": step}],
        "callbacks": {"Counter": {"batches": step, "odd": float("nan")}},
        "data": {"kind": "index", "done": 16},
    }


def optimizer() -> list[dict[str, Any]]:
    """An optimizer.json of two groups, in another order than the weights."""
    state = {
        name: {
            "exp_avg": torch.full_like(tensor, 0.25),
            "exp_avg_sq": torch.ones_like(tensor),
            "step": torch.tensor(7.0),
        }
        for name, tensor in weights(1.0).items()
    }
    options = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    options |= {"maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None}
    groups = [{**options, "params": ["linear.bias"]}, {**options, "params": ["linear.weight"], "lr": 0.2}]
    shapes = {name: list(tensor.shape) for name, tensor in weights(1.0).items()}
    return [{"optimizer": "Adam", "shapes": shapes, "state": state, "groups": groups}]


def writes(value: float, step: int) -> Callable[[Writer], None]:
    def write(writer: Writer) -> None:
        writer.tensors("model.safetensors", weights(value))
        writer.state("optimizer", optimizer())
        writer.state("trainer", shared(step))
        writer.state("rank-00000", {"rng": torch.arange(16)})

    return write


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """`runs/version_0` with checkpoints of step 10 and of step 20, the second one scored."""
    store = CheckpointStore(tmp_path / "runs" / "version_0" / "checkpoints")
    store.save(10, writes(1.0, 10), info={"kind": "full", "epoch": 0}, run_id="abc")
    scored = {"kind": "full", "epoch": 1, "monitor": "val_loss", "mode": "min", "score": 0.25}
    store.save(20, writes(2.0, 20), info=scored, run_id="abc")
    return store.root.parent


@pytest.fixture
def checkpoint(run_folder: Path) -> Path:
    return run_folder / "checkpoints" / "step-00000020-1"
