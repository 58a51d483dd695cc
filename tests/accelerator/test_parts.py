"""`load_state(resume=...)`: parts of a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from instep import Accelerator, Resume
from instep.errors import CheckpointError
from tests.accelerator.loops import Net
from tests.accelerator.test_saving import Counter


def prepared(make: Any, module: nn.Module, rate: float = 0.1) -> tuple[Accelerator, Any, Any, Any, Any, Counter]:
    accelerator, counter = make(), Counter()
    optimizer = torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loader = DataLoader(TensorDataset(torch.arange(48.0).reshape(12, 4)), batch_size=2)
    accelerator.register_for_checkpointing(counter)
    return accelerator, *accelerator.prepare(module, optimizer, scheduler, loader), counter


def steps(run: Any, count: int) -> None:
    accelerator, model, optimizer, scheduler, loader, counter = run
    for (x,), _ in zip(loader, range(count), strict=False):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter.count += 1


@pytest.fixture
def saved(make: Any, tmp_path: Path) -> Path:
    run = prepared(make, Net())
    steps(run, 3)
    return run[0].save_state(tmp_path / "state")


@pytest.mark.parametrize(
    ("resume", "expected"),
    [
        (None, (True, 0.1 / 8, 3, 3, 3)),
        (Resume(optimizer=False), (False, 0.1 / 8, 3, 3, 3)),
        (Resume(schedulers=False), (True, 0.1, 0, 3, 3)),
        (Resume(lr=0.2), (True, 0.2 / 8, 3, 3, 3)),
        (Resume(position=False), (True, 0.1 / 8, 3, 3, 0)),
        (Resume(callbacks=False), (True, 0.1 / 8, 3, 0, 3)),
        (Resume.weights(), (False, 0.1, 0, 0, 0)),
    ],
    ids=str,
)
def test_what_is_loaded(resume: Resume | None, expected: Any, make: Any, saved: Path) -> None:
    run = prepared(make, Net())
    accelerator, model, optimizer, scheduler, _, counter = run
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert accelerator.load_state(saved, resume) == saved
    momentum, lr, schedule, count, step = expected
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert bool(optimizer.optimizer.state) == momentum
    assert optimizer.param_groups[0]["lr"] == pytest.approx(lr)
    assert (scheduler.scheduler.last_epoch, counter.count, accelerator.step) == (schedule, count, step)
    assert accelerator.resume_report is not None
    assert accelerator.resume_report.parts == (resume or Resume()).parts
    steps(run, 2)


class Wide(Net):
    """One layer of another shape and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = nn.Linear(8, 2)
        self.more = nn.Linear(1, 3)


def test_what_fits(make: Any, saved: Path) -> None:
    module = Wide()
    run = prepared(make, module)
    with pytest.raises(CheckpointError, match="do not fit"):
        run[0].load_state(saved)
    run[0].load_state(saved, Resume(strict=False))
    report = run[0].resume_report
    assert report is not None
    assert report.missing == ["more.weight", "more.bias"]
    assert report.other_shape == {"layers.3.weight": ([1, 8], [2, 8]), "layers.3.bias": ([1], [2])}
    assert report.loaded == 2
    assert run[2].optimizer.state, "what fits of the optimizer's state"


def test_another_optimizer_is_left_out(make: Any, saved: Path) -> None:
    accelerator, module = make(), Net()
    model, optimizer = accelerator.prepare(module, torch.optim.Adam(module.parameters()))
    with pytest.raises(CheckpointError, match="SGD"):
        accelerator.load_state(saved, Resume(position=False, callbacks=False))
    accelerator.load_state(saved, Resume(position=False, callbacks=False, strict=False))
    report = accelerator.resume_report
    assert report is not None
    assert report.left_out == [
        "the state of SGD, since this run has Adam",
        "ExponentialLR of optimizer 0",
    ]
    assert not optimizer.optimizer.state
