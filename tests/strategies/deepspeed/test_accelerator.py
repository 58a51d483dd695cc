"""A handwritten loop under ZeRO: the losses of one process without it, states that go on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import Accelerator
from instep.accelerator import DataLoaderConfiguration, set_seed
from instep.errors import SettingError
from instep.strategies.deepspeed import DeepSpeedStrategy
from tests.helpers.spawn import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.deepspeed]
BATCHES, SAVED, ACCUMULATE = 8, 4, 2


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor, *, factor: float = 1.0) -> dict[str, torch.Tensor]:
        return {"logits": self.layers(x) * factor}


class Teacher(Student):
    """Prepared for evaluation: the engine is the student's alone."""


def loop(strategy: Any, root: Path, save: bool = False, load: Path | None = None, **settings: Any) -> dict[str, Any]:
    """Train a student on a teacher's answers for some windows; the losses, and where it was saved."""
    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        strategy=strategy,
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        **settings,
    )
    x = torch.randn(8 * BATCHES, 6)
    teacher, student = Teacher(), Student()
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.05)
    teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
    student, optimizer, schedule, loader = accelerator.prepare(
        student,
        optimizer,
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        DataLoader(TensorDataset(x), 8, shuffle=True),
    )
    if load is not None:
        accelerator.load_state(load)
    losses, saved = [], None
    for number, (inputs,) in enumerate(loader, start=1):
        with accelerator.accumulate(student):
            with torch.no_grad():
                wanted = teacher(inputs)["logits"]
            loss = F.mse_loss(student(inputs, factor=2.0)["logits"], wanted)
            assert loss.dtype == torch.float32
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(student.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        if save and number == SAVED:
            saved = accelerator.save_state(root / "state")
    weights = accelerator.get_state_dict(student)
    accelerator.end_training()
    return {"losses": losses, "saved": saved, "weights": weights}


def every_stage(root: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for stage in (0, 1, 2, 3):
        folder = root / str(stage)
        whole = loop(DeepSpeedStrategy(stage=stage), folder, save=True)
        results[f"stage {stage}"] = {
            **whole,
            "resumed": loop(DeepSpeedStrategy(stage=stage), folder, load=whole["saved"]),
        }
    results["stage 3 of stage 1"] = loop(DeepSpeedStrategy(stage=3), root, load=results["stage 1"]["saved"])
    results["bf16"] = loop(DeepSpeedStrategy(stage=2), root, mixed_precision="bf16")
    with pytest.raises(SettingError, match="prepare both in one call"):
        Accelerator(cpu=True, strategy="deepspeed").prepare(Student())
    return results


def test_stages_agree_and_resume(tmp_path: Path) -> None:
    main, *_ = run_ranks(every_stage, 2, tmp_path)
    alone = loop("auto", tmp_path)
    for stage in (0, 1, 2, 3):
        got = main[f"stage {stage}"]
        assert got["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        assert got["resumed"]["losses"] == got["losses"][SAVED:]
        assert all(torch.equal(got["resumed"]["weights"][name], value) for name, value in got["weights"].items())
    assert main["stage 3 of stage 1"]["losses"] == pytest.approx(alone["losses"][SAVED:], abs=1e-5)
    assert main["bf16"]["losses"] == pytest.approx(alone["losses"], rel=0.1)
    here = loop("auto", tmp_path, load=main["stage 2"]["saved"])  # one process without ZeRO takes it up
    assert here["losses"] == pytest.approx(alone["losses"][SAVED:], abs=1e-5)
