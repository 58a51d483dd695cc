from __future__ import annotations

import json
import math
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from torch import Tensor

from instep.callbacks import ModelCheckpoint, SpikeDetection
from instep.errors import HookError, SettingError, TrainingSpikeError
from tests.trainer.toys import ManualToy, Toy, loader, quiet

NAN, INF = math.nan, math.inf


class Given(Toy):
    """The loss of each batch is given."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = losses

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer.weight.sum() * 0 + self.losses[self.global_step]


class Late(SpikeDetection):
    """Judges as on a GPU or several ranks."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        super().on_train_start(trainer, module)
        self._at_once = False


def fit(losses: list[float], ckpt_path: Any = None, trainer: Any = None, **options: Any) -> None:
    trainer = trainer or quiet(callbacks=SpikeDetection(exclude_batches_path="bad.json", **options), max_steps=8)
    trainer.fit(Given(losses), loader(12), ckpt_path=ckpt_path)


@pytest.mark.parametrize(
    ("losses", "options", "spike_at"),
    [
        ([1, 0.9, 0.8, 0.7, 2.3, 1, 1, 1], {}, None),  # 1.45 from the mean of 0.85, of which twice is 1.7
        ([1, 0.9, 0.8, 0.7, 2.6, 1, 1, 1], {}, 5),
        ([1, 0.9, 0.8, 0.7, 2.6, 1, 1, 1], {"warmup": 5}, None),
        ([1, 0.9, 0.8, 0.7, 2.6, 1, 1, 1], {"atol": 3.0}, None),
        ([1, 0.9, 0.8, 0.7, 1.2, 1, 1, 1], {"rtol": None, "atol": 0.3}, 5),
        ([9, 9, 9, 0.7, 2.3, 1, 1, 1], {"window": 1}, 5),
        ([1, 1, 1, 1, -5, -5, -5, -5], {}, None),  # better is no spike
        ([1, 1, 1, 1, -5, 1, 1, 1], {"mode": "max"}, 5),
        ([1, 1, NAN, 1, 1, 1, 1, 1], {}, 3),
        ([1, 1, NAN, 1, 1, 1, 1, 9], {"finite_only": False}, 8),
        ([1, 1, INF, 1, 1, 1, 1, 1], {"finite_only": False}, 3),
    ],
)
def test_spike_detection_raises_at_the_expected_batch(
    losses: list[float], options: dict[str, Any], spike_at: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if spike_at is None:
        fit(losses, **options)
        assert not Path("bad.json").exists()
        return
    with pytest.raises(TrainingSpikeError) as caught:
        fit(losses, **options)
    error, batch = caught.value, (spike_at - 1) % 4
    assert (error.global_step, error.epoch, error.batches[-1]) == (spike_at, (spike_at - 1) // 4, batch)
    written = json.loads(Path("bad.json").read_text())
    assert written[-1] == {
        "epoch": error.epoch, "batch": batch, "samples": {"0": [3 * batch, 3 * batch + 1, 3 * batch + 2]}
    }  # fmt: skip
    assert [one["batch"] for one in written] == list(range(max(0, batch - 1), batch + 1))
    assert f"global_step {spike_at} (epoch {error.epoch}, batch_idx {batch}): the loss is" in str(error)


def test_the_guard_has_what_is_not_finite(tmp_path: Path) -> None:
    spikes = SpikeDetection(exclude_batches_path=tmp_path)
    with pytest.warns(UserWarning, match="the loss is nan"):
        fit([1, 1, NAN, 1, 1, 1, 1, 1], trainer=quiet(callbacks=spikes, max_steps=8, nonfinite="continue"))
    assert list(spikes._means) == [1.0] * 7


def test_a_resumed_run_knows_the_mean_and_no_checkpoint_follows_a_spike(tmp_path: Path) -> None:
    def trainer(**settings: Any) -> Any:
        saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1, **settings)
        spikes = Late(exclude_batches_path=tmp_path)
        return quiet(callbacks=[spikes, saver], enable_checkpointing=True, max_steps=8)

    losses = [1.0, 0.9, 0.8, 0.7, 0.75, 2.6, 1.0, 1.0]
    with pytest.warns(UserWarning, match="a checkpoint was not saved"), pytest.raises(TrainingSpikeError) as warned:
        fit(losses, trainer=trainer(on_error="warn"))
    assert warned.value.global_step == 6
    for path in tmp_path.glob("step-*"):
        rmtree(path)
    with pytest.raises(TrainingSpikeError) as whole:
        fit(losses, trainer=trainer())
    kept = sorted(tmp_path.glob("step-*"))
    assert [path.name[:13] for path in kept] == ["step-00000002", "step-00000004"]
    with pytest.raises(TrainingSpikeError) as resumed:
        fit(losses, trainer=trainer(), ckpt_path=kept[0])
    texts = [str(error.value).partition("To find the cause")[0] for error in (whole, resumed)]
    assert texts[0] == texts[1]
    assert "is 0.83 (" in str(whole.value)
    assert whole.value.sample_indices == [{0: [0, 1, 2], 1: [3, 4, 5]}]


def test_judged_late_a_spike_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third step, what was there the time before."""
    steps: list[int] = []
    spikes = Late(exclude_batches_path=tmp_path)
    judge = spikes._judge_waiting
    monkeypatch.setattr(
        spikes, "_judge_waiting", lambda trainer, n: (steps.append(trainer.global_step), judge(trainer, n))
    )
    trainer = quiet(callbacks=spikes, max_steps=12, log_every_n_steps=3)
    with pytest.raises(TrainingSpikeError) as caught:
        trainer.fit(Given([1, 5, *[1] * 10]), loader(36))
    assert steps == [3, 6]
    assert caught.value.global_step == 2


def test_the_loss_must_be_there() -> None:
    with pytest.raises(HookError, match="SpikeDetection needs the loss, and training_step returned NoneType"):
        quiet(callbacks=SpikeDetection(), max_epochs=1).fit(ManualToy(), loader())
    with pytest.raises(SettingError, match="mode='least'"):
        SpikeDetection(mode="least")  # type: ignore[arg-type]
    assert torch.is_grad_enabled()
