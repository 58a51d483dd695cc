"""The code of the guides runs, block after block, as a reader would type it."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from instep import TrainModule
from instep.cli.main import main

DOCS = Path(__file__).parent.parent / "docs"


class Model(TrainModule):
    """What the guide calls `model`."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, outputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.body(batch[0])).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


@pytest.mark.filterwarnings("ignore:there is a validation")
def test_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    loader = DataLoader(TensorDataset(torch.arange(96.0).reshape(24, 4)), batch_size=3)
    names = {"model": Model(), "wider_model": Model(3), "train_loader": loader, "val_loader": loader}
    text = (DOCS / "checkpoints.md").read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    printed = ""
    for language, code in blocks:
        if language == "python":
            exec(compile(code, "checkpoints.md", "exec"), names)
            printed += capsys.readouterr().out
        elif language == "sh":
            for line in code.splitlines():
                assert main(line.split()[1:]) == 0, line
        else:
            for line in code.splitlines()[1:]:  # the first has a path of its own
                assert line in printed
    assert {language for language, _ in blocks} == {"python", "sh", "text"}


@pytest.mark.filterwarnings("ignore:the configured optimizer takes the place")
def test_config_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = (DOCS / "config_trainer.md").read_text()
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language == "sh":
            for line in code.splitlines():
                assert main(line.split()[1:]) == 0, line
        else:
            Path(code.split()[1]).write_text(code)
    assert len(list(tmp_path.glob("instep_runs/version_*/config.yaml"))) == 5
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["train.py", "fit", "--data.batch_size=16", "--stop.patience=5", "--note=own"])
    runpy.run_path("train.py", run_name="__main__")
    assert "own 0.16" in capsys.readouterr().out


def test_strategies() -> None:
    """The blocks of the sections on DDP and DataParallel; other sections name files and devices of their readers."""
    text = (DOCS / "strategies.md").read_text()
    sections = [part for part in re.split(r"^(?=## )", text, flags=re.MULTILINE) if re.match(r"## (DDP|DataPar)", part)]
    blocks = [
        code for part in sections for code in re.findall(r"^```python\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    ]
    names: dict[str, Any] = {}
    for code in blocks:
        exec(compile(code, "strategies.md", "exec"), names)
    assert len(blocks) == 4
    assert names["trainer"].strategy.ddp_options == {"bucket_cap_mb": 50, "gradient_as_bucket_view": True}
