from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.errors import SettingError
from instep.strategies import DataParallelStrategy, Precision
from tests.helpers import gpu
from tests.trainer.toys import LoggingToy, Toy, loader, quiet


class Through(LoggingToy):
    """Calls its own forward, which calls its layers."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return self.layer(x)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]).squeeze(-1), batch[1])


class Layers(LoggingToy):
    """Calls a submodule; has no forward."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def fit(module: Toy, strategy: Any) -> tuple[dict[str, Tensor], float]:
    trainer = quiet(max_epochs=2, strategy=strategy)
    trainer.fit(module, loader(12, 5))  # batches of 5, 5 and 2
    return module.state_dict(), float(trainer.callback_metrics["train_loss"])


@pytest.mark.filterwarnings("ignore:strategy='dp' has one device")  # what the next test is about
@pytest.mark.parametrize(
    ("kind", "strategy"), [(Through, DataParallelStrategy()), (Layers, DataParallelStrategy(module="layer"))]
)
def test_on_one_device_it_is_that_device(kind: type[Toy], strategy: DataParallelStrategy) -> None:
    for (name, value), other in zip(fit(kind(), "auto")[0].items(), fit(kind(), strategy)[0].values(), strict=True):
        assert torch.equal(value, other), name


def test_one_device_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"strategy='dp' has one device here, cpu.*strategy='ddp' with devices=N"):
        fit(Through(), "dp")


class Halves(nn.Module):
    """What torch's DataParallel does, with the two halves of a batch on the CPU."""

    def __init__(self, module: nn.Module, device_ids: list[int]) -> None:
        super().__init__()
        self.module, self.device_ids = module, device_ids

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.module(part) for part in x.chunk(len(self.device_ids))])


class TwoCPUs(DataParallelStrategy):
    def connect(self, device: torch.device, precision: Precision) -> None:
        self._ids = [0, 1]
        super(DataParallelStrategy, self).connect(device, precision)


def test_the_forward_is_cut_up_and_the_step_sees_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.strategies.dp.DataParallel", Halves)
    for kind, strategy in ((Through, TwoCPUs()), (Layers, TwoCPUs(module="layer"))):
        module = kind()
        expected, mean = fit(kind(), "auto")
        weights, logged = fit(module, strategy)
        assert list(weights) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, atol=1e-6, rtol=0, msg=name)
        assert logged == pytest.approx(mean, abs=1e-6)
        assert "forward" not in vars(module), "the module's own forward is back"
        if isinstance(module, Through):
            assert module.sizes[:6] == [3, 2, 3, 2, 1, 1]
    wrapped = strategy.wrap(module)
    assert isinstance(wrapped, Halves)


def test_dp_refuses_wrong_devices_and_several_processes() -> None:
    for ids in ([], [0, 0], [-1], [True]):
        with pytest.raises(SettingError, match=r"expected different numbers of GPUs"):
            DataParallelStrategy(device_ids=ids)
    with pytest.raises(SettingError, match=r"strategy='dp' runs in one process, and this run has 2.*'ddp'"):
        quiet(strategy="dp", devices=2)
    with pytest.raises(SettingError, match=r"device_ids=\[0, 1\]: this process sees no GPU: it trains on cpu"):
        fit(Through(), DataParallelStrategy(device_ids=[0, 1]))


@pytest.mark.filterwarnings("ignore:strategy='dp' has one device")  # as above
def test_there_must_be_something_to_cut_up() -> None:
    with pytest.raises(SettingError, match=r"Layers has no forward.*DataParallelStrategy\(module='net'\)"):
        fit(Layers(), "dp")
    with pytest.raises(SettingError, match=r"module='net'.*no attribute `net`.*Layers has layer"):
        fit(Layers(), DataParallelStrategy(module="net"))


@pytest.mark.gpu
@gpu.needs_two
@pytest.mark.parametrize(
    ("kind", "strategy"), [(Through, DataParallelStrategy()), (Layers, DataParallelStrategy(module="layer"))]
)
def test_gpus_train_the_same_weights(kind: type[Toy], strategy: DataParallelStrategy) -> None:
    expected, mean = fit(kind(), "auto")
    module = kind()
    trainer = quiet(max_epochs=2, strategy=strategy, accelerator="gpu", devices=1)
    trainer.fit(module, loader(12, 5))
    for name, value in expected.items():
        torch.testing.assert_close(module.state_dict()[name].cpu(), value, atol=1e-5, rtol=0, msg=name)
    assert float(trainer.callback_metrics["train_loss"]) == pytest.approx(mean, abs=1e-5)
