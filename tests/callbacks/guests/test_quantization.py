"""Quantization-aware training: plain checkpoints, the same bits after a stop, and a quantized model that is as good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from instep import TrainModule
from instep.callbacks import ModelCheckpoint, QuantizationAwareTraining
from instep.checkpoint import load_weights
from instep.errors import Preempted, SettingError, UnsavableStateError
from tests.helpers.spawn import run_ranks
from tests.trainer.resuming import StopAt
from tests.trainer.toys import Toy, assert_same, loader, quiet

NO_TORCHAO = "torchao is not installed, or needs a newer torch"
pytest.importorskip("torchao.quantization", reason=NO_TORCHAO, exc_type=ImportError)
torchao = pytest.importorskip("torchao")


class Digits(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.net(x)), y)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self.head(self.net(x)).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.005)


def digits(train: bool, samples: int | None = None) -> DataLoader[Any]:
    from sklearn.datasets import load_digits

    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    rows = slice(samples or 1400) if train else slice(1400, None)
    return DataLoader(TensorDataset(x[rows].float() / 16, y[rows].long()), 64, shuffle=train)


def fit(root: Path, callback: Any, *others: Any, **settings: Any) -> tuple[Digits, Any, Path]:
    torch.manual_seed(1)
    module, saver = Digits(), ModelCheckpoint(save_last=True)
    samples = settings.pop("samples", 256)
    trainer = quiet(
        **{"max_epochs": 3, "default_root_dir": root, "trigger_every": 1, "enable_checkpointing": True, **settings},
        callbacks=[callback, saver, *others],
    )
    try:
        trainer.fit(module, digits(True, samples), ckpt_path="auto")
    except Preempted:
        assert others
    return module, trainer, Path(saver.last_model_path)


@pytest.mark.campaign
def test_the_quantized_model_is_as_good_as_the_one_that_was_trained(tmp_path: Path) -> None:
    callback = QuantizationAwareTraining(convert_at_end=False)
    module, trainer, path = fit(tmp_path, callback, samples=1400, max_epochs=12)
    assert {type(layer).__name__ for layer in (module.net[0], module.head)} == {"FakeQuantizedLinear"}

    def accuracy(model: Digits) -> float:
        return trainer.test(model, digits(False), verbose=False)[0]["accuracy"]

    plain = Digits.load_from_checkpoint(path)
    assert_same(dict(plain.state_dict()), dict(module.state_dict()))
    trained, quantized = accuracy(module), accuracy(callback.convert(plain))
    assert trained > 0.9
    assert quantized == pytest.approx(trained, abs=0.01)
    assert type(plain.head) is nn.Linear
    assert type(plain.head.weight).__name__ != "Parameter"


def test_a_stopped_run_ends_with_the_same_bits_and_is_quantized(tmp_path: Path) -> None:
    def callback() -> QuantizationAwareTraining:
        return QuantizationAwareTraining(start_epoch=1, filter_fn=lambda layer, name: name != "head")

    expected, trainer, whole = fit(tmp_path / "whole", callback())
    for stop in (2, 6):  # 4 steps an epoch
        fit(tmp_path / "stopped", callback(), StopAt(stop))
    got, _, path = fit(tmp_path / "stopped", callback())
    held = load_weights(path)
    assert_same(held, load_weights(whole))
    assert held.keys() == Digits().state_dict().keys()
    never = fit(tmp_path / "never", QuantizationAwareTraining(start_epoch=9, convert_at_end=False))[0]
    plain = fit(tmp_path / "plain", ModelCheckpoint(monitor="epoch"))[0]
    assert_same(dict(never.state_dict()), dict(plain.state_dict()))  # the random numbers are those of plain training
    assert not torch.equal(held["head.weight"], plain.head.weight)
    x = torch.rand(5, 64)
    with torch.no_grad():
        assert torch.equal(got.eval().head(got.net(x)), expected.eval().head(expected.net(x)))
    assert type(got.head.weight) is nn.Parameter
    with pytest.raises(SettingError, match="cannot be trained any more"):
        trainer.fit(expected, digits(True, 64))
    with pytest.raises(UnsavableStateError, match=r"net\.0\.weight"):
        trainer.save_checkpoint(tmp_path / "quantized")


def test_errors_say_what_to_do() -> None:
    with pytest.raises(SettingError, match=r"layer 'layer' cannot be quantized so: in_features .* filter_fn"):
        quiet(max_epochs=1, callbacks=[QuantizationAwareTraining()]).fit(Toy(), loader())
    nothing = QuantizationAwareTraining(filter_fn=lambda *_: False)
    with pytest.raises(SettingError, match="no linear layer"):
        quiet(max_epochs=1, callbacks=[nothing]).fit(Toy(), loader())
    with pytest.raises(SettingError, match="no fake quantization for it"):
        QuantizationAwareTraining(torchao.quantization.Int8WeightOnlyConfig())


def quantize_on_ranks(root: Path) -> list[float]:
    states = []
    for strategy in ("ddp", "fsdp"):
        callback = QuantizationAwareTraining(convert_at_end=False)
        settings = {"strategy": strategy, "devices": "auto", "samples": 128, "max_epochs": 2}
        _, trainer, _ = fit(root / strategy, callback, **settings)
        fit(root / f"stopped-{strategy}", QuantizationAwareTraining(convert_at_end=False), StopAt(1), **settings)
        _, again, _ = fit(root / f"stopped-{strategy}", QuantizationAwareTraining(convert_at_end=False), **settings)
        states.append(trainer.strategy.full_model_state())
        assert_same(states[-1], again.strategy.full_model_state())
    with pytest.raises(SettingError, match="convert_at_end=True needs whole weights, and strategy='fsdp'"):
        fit(root / "error", QuantizationAwareTraining(), strategy="fsdp", devices="auto")
    return [float((states[0][name] - states[1][name]).abs().max()) for name in states[0]]


@pytest.mark.extras  # each rank imports torchao
@pytest.mark.dist
def test_replicas_and_shards_train_alike(tmp_path: Path) -> None:
    assert max(run_ranks(quantize_on_ranks, 2, tmp_path)[0], default=1.0) < 1e-5
