"""A resume reads every byte of its checkpoint twice at most: once to verify it, once to load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from instep import Accelerator, Trainer
from instep.accelerator.handlers import ProjectConfiguration
from instep.callbacks import ModelCheckpoint
from tests.checkpoint.reads import bytes_read, times_read
from tests.trainer.toys import LoggingToy


class Net(LoggingToy):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def data() -> DataLoader[Any]:
    x = torch.arange(48.0).reshape(12, 4) / 48
    return DataLoader(TensorDataset(x, x.sum(1)), batch_size=4)


def trainer(root: Path, steps: int, dirpath: Path | None) -> Trainer:
    return Trainer(
        accelerator="cpu",
        default_root_dir=root,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=dirpath, monitor="train_loss_step", save_top_k=-1, every_n_train_steps=1)],
    )


@pytest.mark.parametrize("in_folder", [True, False], ids=["run-folder", "dirpath"])
@pytest.mark.parametrize("keyword", ["auto", "last", "best", "path"])
def test_a_fit_reads_each_byte_twice(tmp_path: Path, keyword: str, in_folder: bool) -> None:
    dirpath = None if in_folder else tmp_path / "checkpoints"
    first = trainer(tmp_path, 3, dirpath)
    first.fit(Net(), data())
    saver = first.checkpoint_callback
    assert isinstance(saver, ModelCheckpoint)
    path = Path(saver.best_model_path if keyword == "best" else saver.last_model_path)
    with bytes_read() as counts:
        second = trainer(tmp_path, 4, dirpath)
        second.fit(Net(), data(), ckpt_path=path if keyword == "path" else keyword)
    assert second.global_step == 4 if keyword != "best" else second.global_step >= 2
    assert second.resume_report is not None
    assert second.resume_report.path == path
    read = times_read(counts, path)
    assert max(read.values()) <= 2, read
    assert read["model.safetensors"] == read["optimizer.safetensors"] == read["trainer.json"] == 2


@pytest.mark.parametrize("automatic", [True, False], ids=["newest", "path"])
def test_load_state_reads_each_byte_twice(tmp_path: Path, automatic: bool) -> None:
    def prepared() -> Accelerator:
        project = ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=project)
        model = nn.Linear(4, 1)
        accelerator.prepare(model, torch.optim.Adam(model.parameters()), data())
        return accelerator

    accelerator = prepared()
    path = accelerator.save_state()
    accelerator.end_training()
    accelerator = prepared()
    with bytes_read() as counts:
        accelerator.load_state(None if automatic else path)
    accelerator.end_training()
    read = times_read(counts, path)
    assert max(read.values()) <= 2, read
    assert read["model.safetensors"] == read["accelerator.json"] == 2
