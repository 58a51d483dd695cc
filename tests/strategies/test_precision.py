from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import Accelerator
from instep.errors import MissingPackageError, SettingError
from instep.strategies import PRECISIONS, Precision, Strategy
from instep.strategies.precision import float32_products
from tests.helpers import gpu
from tests.strategies.tiny_gpt import TinyGPT, train
from tests.trainer.toys import Toy, loader, quiet

CPU = torch.device("cpu")
NO_TORCHAO = "torchao is not installed, or needs a newer torch"


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


def test_an_unknown_precision_suggests_the_nearest():
    with pytest.raises(SettingError, match=r"Did you mean 'bf16-mixed'"):
        Precision("bf16_mixed", CPU)
    assert len(PRECISIONS) == 7


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
def test_half_autocast_scales_gradients_and_skips_overflows(clip: float | None, monkeypatch: pytest.MonkeyPatch):
    gpu.allow_float16(monkeypatch)

    class Overflows(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 1 else loss

    module = Overflows()
    trainer = quiet(**gpu.ON_DEVICE, precision="16-mixed", max_epochs=1, gradient_clip_val=clip)
    trainer.fit(module, loader())
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert trainer.global_step == 4
    assert trainer.strategy.precision.state_dict()["scale"] <= 2.0**15  # half of what it began with


def test_options_without_a_place_are_said():
    with pytest.warns(UserWarning, match=r"gradient scaler options .* no effect: precision='bf16-mixed'"):
        Precision("bf16-mixed", CPU, scaler_options={"init_scale": 2.0})
    with pytest.warns(UserWarning, match=r"autocast options .* no effect: precision='64-true'"):
        Precision("64-true", CPU, autocast_options={"cache_enabled": False})


def test_autocast_options_reach_the_context():
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


def test_scaler_options_reach_the_gradient_scaler():
    meta = torch.device("meta")  # scaling is the same arithmetic everywhere; a scaler of a CPU is refused
    precision = Precision("16-mixed", meta, scaler_options={"init_scale": 8.0, "enabled": True})
    assert precision.scaler is not None
    assert precision.state_dict()["scale"] == 8.0
    assert Precision("16-mixed", meta, scaler_options={"enabled": False}).scaler is None


# ---- what a strategy takes over


def test_a_strategy_takes_over_the_casts_or_the_scaling():
    scaled = Precision("16-mixed", torch.device("meta"))
    assert scaled.compute_dtype is torch.float16
    assert scaled.without(autocast=True).scaler is scaled.scaler is not None
    assert scaled.without(scaler=True).scaler is None
    cast = Precision("bf16-mixed", CPU)
    assert cast.without(autocast=True).context() is None
    assert cast.without(scaler=True).context() is not None
    assert cast.context() is not None
    assert cast.without(autocast=True).mixed_precision == "bf16"


class Casts(Strategy):
    """Computes in bfloat16 without autocast."""

    name = "casts"

    def connect(self, device: torch.device, precision: Precision) -> None:
        super().connect(device, precision.without(autocast=True))


def test_a_run_computes_as_its_strategy_says():
    seen: list[bool] = []

    class Model(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            seen.append(torch.is_autocast_enabled("cpu"))

    for strategy, autocasts in ((Casts(), False), (Strategy(), True)):
        seen.clear()
        trainer = quiet(max_epochs=1, precision="bf16-mixed", strategy=strategy)
        trainer.fit(Model(), loader(), loader(3))
        assert set(seen) == {autocasts}


# ---- the environment


def test_the_environment_chooses_where_the_program_does_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INSTEP_PRECISION", "bf16")
    assert quiet().precision == "bf16-mixed"
    assert quiet(precision="64").precision == "64-true"
    assert Accelerator(cpu=True).mixed_precision == "bf16"
    Accelerator(cpu=True, mixed_precision="no").end_training()
    monkeypatch.setenv("INSTEP_PRECISION", "")
    assert quiet().precision == "32-true"
    monkeypatch.setenv("INSTEP_PRECISION", "bf61")
    with pytest.raises(SettingError, match=r"INSTEP_PRECISION='bf61'.*Did you mean"):
        quiet()
    monkeypatch.setenv("INSTEP_PRECISION", "64-true")
    with pytest.raises(SettingError, match=r"mixed_precision='64-true'"):
        Accelerator(cpu=True)


# ---- what a device cannot do


def test_a_dtype_that_the_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch):
    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise TypeError("no float64 here")

    monkeypatch.setattr(torch, "mm", mm)
    with pytest.raises(
        SettingError, match=r"'64-true' computes in float64, which cpu cannot: no float64 here"
    ) as error:
        quiet(precision="64-true")
    assert error.value.field == "precision"


def test_tf32_is_refused_without_an_nvidia_device():
    with pytest.raises(SettingError, match=r"tf32=True needs a CUDA device .* and cpu is none"):
        quiet(tf32=True)


def products() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.mark.filterwarnings("ignore:Please use the new API settings to control TF32:UserWarning")  # torch 2.9's own
def test_tf32_holds_for_the_run_and_is_put_back(monkeypatch: pytest.MonkeyPatch):
    inside: list[Any] = []

    class Model(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            inside.append(products())
            return super().training_step(batch, batch_idx)

    before = products()
    assert before == ("highest", True)
    quiet(max_epochs=1, tf32=False).fit(Model(), loader())
    quiet(max_epochs=1).fit(Model(), loader())
    assert inside == [("highest", False)] * 4 + [before] * 4
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with float32_products(True, torch.device("cuda")):
        assert products() == ("high", True)
    assert products() == before
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(SettingError, match=r"capability 8\.0"), float32_products(True, torch.device("cuda")):
        pass


# ---- float8


def test_float8_computes_the_inner_linear_layers():
    pytest.importorskip("torchao.float8", reason=NO_TORCHAO, exc_type=ImportError)
    module, plain = TinyGPT(), TinyGPT()
    parameters = dict(module.named_parameters())
    precision = Precision("fp8", CPU)
    assert precision.mixed_precision == "fp8"
    for _ in range(2):  # fit, then test
        precision.convert_module(module)
    kinds = {name: type(layer).__name__ for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}
    assert kinds.pop("head") == "Linear"
    assert set(kinds.values()) == {"Float8Linear"}
    assert module.state_dict().keys() == plain.state_dict().keys()
    assert all(p is parameters[name] for name, p in module.named_parameters())
    assert module.head.weight is module.embedding.weight


def test_float8_trains_as_float32_does_but_for_its_rounding():
    pytest.importorskip("torchao.float8", reason=NO_TORCHAO, exc_type=ImportError)
    exact, half, eighth = (train(batch_size=8, steps=8, precision=it).losses for it in ("32-true", "bf16-mixed", "fp8"))
    assert eighth == pytest.approx(exact, abs=0.05)
    assert max(abs(a - b) for a, b in zip(eighth, half, strict=True)) > 1e-3, "nothing was rounded to float8"


def test_float8_without_a_layer_for_it_or_a_device_or_torchao(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torchao.float8", reason=NO_TORCHAO, exc_type=ImportError)
    with pytest.raises(SettingError, match=r"no layer to compute in float8 in Toy: of its 1 linear"):
        quiet(precision="fp8", max_epochs=1).fit(Toy(), loader())
    with pytest.raises(SettingError, match=r"capability 8.9 .* and meta is none"):
        Precision("fp8", torch.device("meta"))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(MissingPackageError, match=r"precision='fp8' needs .* pip install 'instep\[quant\]'"):
        quiet(precision="fp8")


def test_an_accelerator_computes_in_float8():
    pytest.importorskip("torchao.float8", reason=NO_TORCHAO, exc_type=ImportError)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    model = TinyGPT()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.arange(16).reshape(2, 8)
    before = model.blocks[0].q.weight.detach().clone()
    accelerator.backward(model.pipeline_loss(model(tokens), tokens))
    optimizer.step()
    assert type(model.blocks[0].q).__name__ == "Float8Linear"
    assert not torch.equal(model.blocks[0].q.weight, before)
    accelerator.end_training()


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "bound"), [("bf16-mixed", 0.02), ("16-mixed", 0.02), ("fp8", 0.05), ("bf16-true", 0.1)]
)
def test_on_a_gpu_losses_stay_near_those_of_float32(precision: str, bound: float, monkeypatch: pytest.MonkeyPatch):
    gpu.allow_float16(monkeypatch)
    if precision == "fp8":
        pytest.importorskip("torchao.float8", reason=NO_TORCHAO, exc_type=ImportError)
    settings: dict[str, Any] = {**gpu.ON_DEVICE, "batch_size": 8, "steps": 20 if gpu.DEVICE == "cuda" else 2}
    exact = train(precision="32-true", **settings)
    rounded = train(precision=precision, **settings)
    assert rounded.losses == pytest.approx(exact.losses, abs=bound)


@pytest.mark.gpu
def test_a_scaler_goes_on_where_it_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gpu.allow_float16(monkeypatch)
    settings: dict[str, Any] = {**gpu.ON_DEVICE, "precision": "16-mixed", "max_epochs": 2}
    trainer = quiet(**settings)
    trainer.fit(Toy(), loader())
    precision = trainer.strategy.precision
    precision.load_state_dict({**precision.state_dict(), "scale": 4.0})
    path = trainer.save_checkpoint(tmp_path / "saved")
    resumed = quiet(**{**settings, "max_epochs": 3})
    resumed.fit(Toy(), loader(), ckpt_path=path)
    assert resumed.strategy.precision.state_dict()["scale"] == 4.0
