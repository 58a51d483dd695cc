"""No step of the default path makes the host wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from instep import Callback, Trainer
from instep.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from instep.loggers import CSVLogger
from tests.helpers import gpu
from tests.trainer.toys import Toy, loader

AVERAGING = [
    (None, EMAWeightAveraging),
    ("skip", WeightAveraging),
    (None, lambda: WeightAveraging(avg_fn=lambda average, value, count: average + (value - average) / (count + 1))),
]
WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.is_nonzero.default}


class Logging(Toy):
    """Logs in every way that a step can, with a scheduler that moves in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"twice": 2 * loss, "batch": batch_idx})
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, fused=True)  # others read their count of steps
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Counting(TorchDispatchMode):
    """Notes the operations of a step whose result the host has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITS:
            self.waits.append(str(func))
        return func(*args, **(kwargs or {}))


class Watching(Callback):
    """Calls `begin` before the third step, when all is warm, and `end` after the last."""

    def __init__(self, begin: Callable[[], Any], end: Callable[[], Any], steps: int) -> None:
        self.begin, self.end, self.steps = begin, end, steps

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.begin()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.steps - 1:
            self.end()


def run(
    folder: Path, begin: Callable[[], Any], end: Callable[[], Any], averaging: Callable[[], Callback], **settings: Any
) -> Trainer:
    steps = 12
    trainer = Trainer(
        max_epochs=1,
        default_root_dir=folder,
        logger=CSVLogger(folder),
        callbacks=[
            EarlyStopping("loss_epoch", check_on_train_epoch_end=True),
            ModelCheckpoint(),
            averaging(),
            Watching(begin, end, steps),
        ],
        gradient_clip_val=0.5,
        log_every_n_steps=steps * 2,  # the hand-over to loggers reads what was copied before
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(Logging(), loader(4 * steps, 4))
    assert trainer.global_step == steps
    return trainer


@pytest.mark.parametrize(("nonfinite", "averaging"), AVERAGING)
def test_no_operation_of_a_step_is_waited_for(
    tmp_path: Path, nonfinite: str | None, averaging: Callable[[], Callback], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instep.trainer.guests.nonfinite.host_may_wait", lambda device: False)  # as on a GPU
    counting = Counting()
    run(
        tmp_path,
        counting.__enter__,
        lambda: counting.__exit__(None, None, None),
        averaging,
        accelerator="cpu",
        nonfinite=nonfinite,
        enable_progress_bar=True,
    )
    assert counting.waits == []


@pytest.mark.gpu
@pytest.mark.parametrize(("nonfinite", "averaging"), AVERAGING)
def test_torch_finds_no_synchronisation(
    tmp_path: Path, nonfinite: str | None, averaging: Callable[[], Callback]
) -> None:
    try:
        run(
            tmp_path,
            gpu.begin_no_waiting,
            gpu.end_no_waiting,
            averaging,
            nonfinite=nonfinite,
            enable_progress_bar=True,
            **gpu.ON_DEVICE,
        )
    finally:
        gpu.end_no_waiting()
