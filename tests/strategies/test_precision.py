from __future__ import annotations

from typing import Any

import pytest
import torch

from instep.errors import SettingError
from instep.strategies import PRECISIONS, Precision
from tests.trainer.toys import Toy, loader, quiet

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "weights", "inside", "state"),
    [
        ("32-true", torch.float32, torch.float32, "no"),
        ("bf16-mixed", torch.float32, torch.bfloat16, "bf16"),
        ("64-true", torch.float64, torch.float64, "no"),
        ("bf16-true", torch.bfloat16, torch.bfloat16, "no"),
        ("16-true", torch.float16, torch.float16, "no"),
    ],
)
def test_the_table_holds_in_a_real_fit(name: str, weights: torch.dtype, inside: torch.dtype, state: str):
    seen: list[Any] = []

    class Model(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = self.layer(batch[0])
            seen.append((self.layer.weight.dtype, output.dtype, batch[0].dtype))
            if self.trainer.precision.endswith("true"):
                assert torch.zeros(1).dtype is weights  # new tensors in the step
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            assert self.layer(batch[0]).dtype is inside

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return self.layer(batch[0])

    assert Precision(name, CPU).mixed_precision == state
    trainer, module = quiet(max_epochs=1, precision=name), Model()
    trainer.fit(module, loader(), loader(3))
    inputs = weights if name.endswith("true") else torch.float32
    assert set(seen) == {(weights, inside, inputs)}
    trainer.test(module, loader(3), verbose=False)
    predictions = trainer.predict(module, loader(3))
    assert predictions is not None
    assert predictions[0].dtype is inside
    assert torch.get_default_dtype() is torch.float32


def test_double_precision_keeps_integers():
    module = Toy()
    module.training_step = lambda batch, batch_idx: module.layer(batch["x"]).sum() * (batch["n"].dtype == torch.int64)
    quiet(max_epochs=1, precision="64-true").fit(module, [{"x": torch.randn(3, 4), "n": torch.arange(3)}])
    assert float(module.layer.weight.grad.abs().sum()) > 0  # pyright: ignore[reportOptionalMemberAccess]


def test_half_autocast_is_refused_on_a_cpu():
    with pytest.raises(SettingError, match=r"needs a GPU.*bf16-mixed"):
        Precision("16-mixed", CPU)
    with pytest.raises(SettingError, match="needs a GPU"):
        quiet(precision="16-mixed")


def test_unknown_names():
    with pytest.raises(SettingError, match=r"Did you mean 'bf16-mixed'"):
        Precision("bf16_mixed", CPU)
    assert len(PRECISIONS) == 6


def test_only_scaled_precisions_have_a_state():
    precision = Precision("bf16-mixed", CPU)
    assert precision.scaler is None
    assert precision.state_dict() == {}
    precision.load_state_dict({})


def test_buffers_follow_and_integer_buffers_stay():
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    Precision("64-true", CPU).convert_module(module)
    assert module[0].running_mean.dtype is torch.float64
    assert module[0].num_batches_tracked.dtype is torch.int64


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [None, 1.0])
def test_half_autocast_scales_gradients_and_skips_overflows(clip: float | None):
    class Overflows(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 1 else loss

    module = Overflows()
    trainer = quiet(accelerator="gpu", devices=1, precision="16-mixed", max_epochs=1, gradient_clip_val=clip)
    trainer.fit(module, loader())
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert trainer.global_step == 4


def test_options_without_a_place_are_said():
    with pytest.warns(UserWarning, match=r"gradient scaler options .* no effect: precision='bf16-mixed'"):
        Precision("bf16-mixed", CPU, scaler_options={"init_scale": 2.0})
    with pytest.warns(UserWarning, match=r"autocast options .* no effect: precision='64-true'"):
        Precision("64-true", CPU, autocast_options={"cache_enabled": False})


def test_autocast_options():
    precision = Precision("bf16-mixed", CPU, autocast_options={"enabled": False})
    linear = torch.nn.Linear(2, 2)

    def inside(options: dict[str, Any] | None) -> torch.dtype:
        context = precision.context(options)
        assert context is not None
        with context:
            return linear(torch.ones(1, 2)).dtype

    assert inside(None) is torch.float32
    assert inside({"enabled": True}) is torch.bfloat16
    assert Precision("32-true", CPU).context({"enabled": True}) is None


def test_scaler_options():
    meta = torch.device("mps")  # scaling is the same arithmetic everywhere; a scaler of a CPU is refused
    precision = Precision("16-mixed", meta, scaler_options={"init_scale": 8.0, "enabled": True})
    assert precision.scaler is not None
    assert precision.state_dict()["scale"] == 8.0
    assert Precision("16-mixed", meta, scaler_options={"enabled": False}).scaler is None
