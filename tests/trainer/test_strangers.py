"""Checkpoints whose values are of wrong kinds, resealed so that they verify: one error with the path, never a crash."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import Trainer
from instep.callbacks import EarlyStopping, ModelCheckpoint
from instep.errors import CorruptCheckpointError
from tests.checkpoint.test_strangers import reseal
from tests.trainer.toys import LoggingToy, loader


class Net(LoggingToy):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def trainer(root: Path) -> Trainer:
    saver = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    return Trainer(
        max_epochs=2,
        accelerator="cpu",
        default_root_dir=root,
        logger=False,
        enable_progress_bar=False,
        callbacks=[saver, EarlyStopping("train_loss", patience=50)],
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full checkpoint in the middle of an epoch."""
    run = trainer(tmp_path_factory.mktemp("saved"))
    run.fit(Net(), loader())
    folder = Path(run.checkpoint_callback.last_model_path).parent  # type: ignore[union-attr]
    return folder / "step-00000002-1"


DELETED = "(deleted)"


@pytest.mark.parametrize(
    ("file", "at", "value"),
    [
        ("trainer", ["epoch"], {"$": "float", "v": "nan"}),
        ("trainer", ["global_step"], 10**30),
        ("trainer", ["world_size"], "1"),
        ("trainer", ["hyper_parameters"], []),
        ("trainer", ["user"], None),
        ("trainer", ["seed"], -1),
        ("trainer", ["position"], 3),
        ("trainer", ["position", "batch"], "1"),
        ("trainer", ["schedulers"], {}),
        ("trainer", ["schedulers", 0, "step_size"], "x"),
        ("trainer", ["schedulers", 0, "step"], 1),
        ("trainer", ["schedulers", 0, "base_lrs"], {"$": "tuple", "v": ["x"]}),
        ("trainer", ["callbacks"], []),
        ("trainer", ["scaler"], None),
        ("trainer", ["metrics"], 3),
        ("trainer", ["data"], 3),
        ("trainer", ["run_id"], DELETED),
        ("optimizer", [], 3),
        ("optimizer", [0, "groups"], {}),
        ("optimizer", [0, "groups", 0, "params"], [3]),
        ("optimizer", [0, "groups", 0, "lr"], "fast"),
        ("optimizer", [0, "groups", 0, "betas"], 3),
        ("optimizer", [0, "state"], []),
        ("optimizer", [0, "shapes"], DELETED),
        ("rank-00000", ["rng"], []),
        ("rank-00000", ["data_rank"], "0"),
        ("rank-00000", ["log"], [3]),
        ("rank-00000", ["metric_states"], DELETED),
    ],
    ids=str,
)
def test_values_of_wrong_kinds(file: str, at: list[Any], value: Any, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / saved.name
    shutil.copytree(saved, path)
    tree = json.loads((path / f"{file}.json").read_text())
    if at:
        inner = tree
        for key in at[:-1]:
            inner = inner[key]
        if value is DELETED:
            del inner[at[-1]]
        else:
            inner[at[-1]] = value
    (path / f"{file}.json").write_text(json.dumps(tree if at else value))
    reseal(path)
    with pytest.raises(CorruptCheckpointError, match=saved.name) as caught:
        trainer(tmp_path / "new").fit(Net(), loader(), ckpt_path=path)
    assert caught.value.__cause__ is not None
