"""What a run leaves in a checkpoint and takes up again, alike with a Trainer and with an Accelerator.

Both go through `instep/checkpoint/run_state.py`. What only one of them has is tested in its own room.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep import Accelerator, Callback, Resume, TrainModule
from instep.accelerator import ProjectConfiguration
from instep.callbacks import ModelCheckpoint
from instep.checkpoint import ResumeReport
from instep.errors import CheckpointError
from tests.trainer.toys import assert_same, loader, quiet, weights


class Net(TrainModule):
    """Momentum, and a schedule that halves the rate at each step.

    Args:
        width: changes a shape.
        extra: adds a layer.
    """

    def __init__(self, width: int = 1, extra: bool = False) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(4, width), nn.Linear(4, 4)
        if extra:
            self.extra = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.body(x) + (self.extra(x) if hasattr(self, "extra") else 0)).mean(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}]


@dataclass
class Start:
    """What a run has before its first step."""

    weights: dict[str, Tensor]
    momentum: bool
    rate: float
    schedule: int
    step: int
    count: int
    report: ResumeReport | None


def start(module: nn.Module, optimizer: Any, schedule: Any, step: int, count: int, report: Any) -> Start:
    rate = optimizer.param_groups[0]["lr"]
    return Start(weights(module), bool(optimizer.state), rate, schedule.last_epoch, step, count, report)


class Counter(Callback):
    """Counts the steps of all its lives, and notes what there is before the first one."""

    start: Start

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]

    def on_train_start(self, trainer: Any, module: Any) -> None:
        schedule = trainer.lr_scheduler_configs[0].scheduler
        step, report = trainer.global_step, trainer.resume_report
        self.start = start(module, trainer.optimizers[0], schedule, step, self.count, report)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1


def by_trainer(root: Path, module: Net, path: Path | None = None, resume: Resume | None = None) -> tuple[Start, Path]:
    """Train for one epoch more and save below `checkpoints`; how it started, and the checkpoint."""
    counter, saver = Counter(), ModelCheckpoint(root / "checkpoints")
    trainer = quiet(
        max_epochs=1 if path is None else 2,
        callbacks=[counter, saver],
        enable_checkpointing=True,
        default_root_dir=root,
    )
    trainer.fit(module, loader(), ckpt_path=path, resume=resume)
    return counter.start, Path(saver.last_model_path)


def by_hand(root: Path, module: Net, path: Path | None = None, resume: Resume | None = None) -> tuple[Start, Path]:
    """The same with an Accelerator."""
    project = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=True)
    accelerator, counter = Accelerator(cpu=True, project_config=project), Counter()
    [bare], [config] = module.configure_optimizers()
    accelerator.register_for_checkpointing(counter)
    model, optimizer, schedule, batches = accelerator.prepare(module, bare, config["scheduler"], loader())
    try:
        if path is not None:
            accelerator.load_state(path, resume)
        began = start(module, bare, config["scheduler"], accelerator.step, counter.count, accelerator.resume_report)
        for x, y in batches:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            counter.count += 1
        return began, accelerator.save_state()
    finally:
        accelerator.end_training()


both = pytest.mark.parametrize("run", [by_trainer, by_hand])


@both
@pytest.mark.parametrize(
    ("resume", "momentum", "rate", "schedule", "step", "count"),
    [
        (None, True, 0.1 / 16, 4, 4, 4),
        (Resume(), True, 0.1 / 16, 4, 4, 4),
        (Resume(optimizer=False), False, 0.1 / 16, 4, 4, 4),
        (Resume(schedulers=False), True, 0.1, 0, 4, 4),
        (Resume(optimizer=False, schedulers=False), False, 0.1, 0, 4, 4),
        (Resume(position=False), True, 0.1 / 16, 4, 0, 4),
        (Resume(callbacks=False), True, 0.1 / 16, 4, 4, 0),
        (Resume(lr=0.2), True, 0.2 / 16, 4, 4, 4),
        (Resume(schedulers=False, lr=0.2), True, 0.2, 0, 4, 4),
        (Resume.weights(), False, 0.1, 0, 0, 0),
    ],
    ids=str,
)
def test_parts_that_are_taken_up(
    run: Any, resume: Any, momentum: bool, rate: float, schedule: int, step: int, count: int, tmp_path: Path
) -> None:
    module = Net()
    _, path = run(tmp_path / "first", module)
    got, _ = run(tmp_path / "second", Net(), path, resume)
    assert_same(got.weights, weights(module))
    assert (got.momentum, got.rate, got.schedule) == (momentum, pytest.approx(rate), schedule)
    assert (got.step, got.count) == (step, count)
    report = got.report
    assert report is not None
    assert report.parts == (resume or Resume()).parts
    assert (report.path, report.loaded, report.missing, report.unexpected, report.other_shape) == (path, 4, [], [], {})
    assert report.complete == (report.parts == Resume().parts)


@both
def test_what_fits_is_loaded_where_that_was_asked_for(run: Any, tmp_path: Path) -> None:
    first, module = Net(), Net(width=2, extra=True)
    _, path = run(tmp_path / "first", first)
    for resume in (None, Resume.weights(), Resume.weights(strict=True)):
        with pytest.raises(CheckpointError, match=r"layer\.weight(.|\n)*strict=False"):
            run(tmp_path / "second", Net(width=2, extra=True), path, resume)
    fresh = weights(module)
    got, _ = run(tmp_path / "second", module, path, Resume(strict=False))
    report = got.report
    assert report is not None
    assert report.other_shape == {"layer.weight": ([1, 4], [2, 4]), "layer.bias": ([1], [2])}
    assert (report.loaded, report.missing, report.unexpected) == (2, ["extra.weight", "extra.bias"], [])
    assert report.left_out == ["the state of 'layer.weight'", "the state of 'layer.bias'"]
    assert not report.complete
    assert got.momentum, "what fits of the optimizer's state"
    assert_same(got.weights, {**fresh, **{key: it for key, it in weights(first).items() if key.startswith("body")}})


@both
def test_what_a_smaller_module_has_no_place_for_is_named(run: Any, tmp_path: Path) -> None:
    _, path = run(tmp_path / "first", Net(extra=True))
    got, _ = run(tmp_path / "second", Net(), path, Resume.weights(strict=False))
    assert got.report is not None
    assert sorted(got.report.unexpected) == ["extra.bias", "extra.weight"]


@both
def test_the_first_save_clears_what_a_killed_one_left(run: Any, tmp_path: Path) -> None:
    doomed = tmp_path / "checkpoints" / ".deleting-step-00000001-1"
    doomed.mkdir(parents=True)
    (doomed / "model.safetensors").write_bytes(b"half")
    _, path = run(tmp_path, Net())
    assert [it.name for it in doomed.parent.iterdir() if not it.name.startswith(".lease-")] == [path.name]
