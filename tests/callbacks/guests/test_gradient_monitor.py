from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from instep.callbacks import Callback, GradientMonitor, ModelCheckpoint
from instep.callbacks.guests.gradient_monitor import grad_norm
from instep.errors import SettingError
from tests.callbacks.fakes import RecordingLogger
from tests.trainer.toys import DeepToy, Toy, loader, quiet


class Deep(DeepToy):
    """Notes the gradients that its optimizer is stepped with."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: dict[int, dict[str, float]] = {}
        self.order: float = 2.0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, self.order)
        self.norms[self.global_step + 1] = {name: norm.item() for name, norm in norms.items()}


def fit(monitor: GradientMonitor, module: Deep, **settings: Any) -> RecordingLogger:
    logger = RecordingLogger()
    quiet(logger=logger, callbacks=monitor, **{"max_steps": 4, "log_every_n_steps": 2, **settings}).fit(
        module, loader()
    )
    return logger


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_norms_of_the_whole_window_before_clipping(order: float) -> None:
    module = Deep()
    module.order = order
    logger = fit(GradientMonitor(order), module, accumulate_grad_batches=2, gradient_clip_val=1e-3)
    rows = [(step, row) for step, row in logger.rows if any("grad" in name for name in row)]
    assert [step for step, _ in rows] == [2, 4]
    for step, row in rows:
        assert row == pytest.approx(module.norms[step], rel=1e-6)


def test_gradient_norms_are_logged_by_layer_and_in_total() -> None:
    module = Deep()
    logger = fit(GradientMonitor(depth=2), module)
    assert {name for _, row in logger.rows for name in row} == {
        "grad_2.0_norm/layer.0", "grad_2.0_norm/layer.1", "grad_2.0_norm_total"
    }  # fmt: skip
    norms = module.norms[4]
    squares = sum(norms[f"grad_2.0_norm/layer.0.{part}"] ** 2 for part in ("weight", "bias"))
    assert logger.of("grad_2.0_norm/layer.0")[4] == pytest.approx(squares**0.5)
    logger = fit(GradientMonitor(depth=0), Deep())
    assert {name for _, row in logger.rows for name in row} == {"grad_2.0_norm_total"}


def test_each_of_several_optimizers_has_its_parameters() -> None:
    class Two(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), 0.1) for part in self.layer]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

    logger = fit(GradientMonitor(depth=2), Two())
    assert set(logger.of("grad_2.0_norm_total/0")) == set(logger.of("grad_2.0_norm_total/1")) == {2, 4}
    assert logger.of("grad_2.0_norm/layer.0") == pytest.approx(logger.of("grad_2.0_norm_total/0"))
    assert logger.of("grad_2.0_norm/layer.1") == pytest.approx(logger.of("grad_2.0_norm_total/1"))


def test_values_that_are_on_their_way_are_logged_before_a_save(tmp_path: Path) -> None:
    monitor, logger = GradientMonitor(depth=0), RecordingLogger()
    deliver, arrived = monitor._deliver, []

    def late(trainer: Any, only_ready: bool = False) -> None:
        if not only_ready:
            arrived.append(trainer.global_step)
            deliver(trainer)

    monitor._deliver = late  # type: ignore[method-assign]
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3)
    trainer = quiet(
        logger=logger, callbacks=[monitor, saver], enable_checkpointing=True, max_steps=4, log_every_n_steps=1
    )
    trainer.fit(Deep(), loader())
    assert arrived[:1] == [3]
    assert list(logger.of("grad_2.0_norm_total")) == [1, 2, 3, 4]


def test_arguments_of_the_gradient_monitor_are_checked() -> None:
    with pytest.raises(SettingError, match="norm_type=0"):
        GradientMonitor(0)
    with pytest.raises(SettingError, match="GradientMonitor needs a logger"):
        quiet(callbacks=GradientMonitor(), max_steps=1).fit(Toy(), loader())


class Kept(RecordingLogger):
    """Has a place for histograms."""

    def __init__(self) -> None:
        super().__init__()
        self.histograms: list[tuple[str, int, Any]] = []

    def _log_histogram(self, name: str, histogram: Any, step: int) -> None:
        self.histograms.append((name, step, histogram))


def test_histograms_count_every_element() -> None:
    class Noting(Deep):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.gradients = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}

    module, logger = Noting(), Kept()
    trainer = quiet(logger=logger, callbacks=GradientMonitor(histograms=True), max_steps=2, log_every_n_steps=2)
    trainer.fit(module, loader())
    assert [(name, step) for name, step, _ in logger.histograms] == [
        (f"gradients/{name}", 2) for name in module.gradients
    ]
    for (_, _, found), gradient in zip(logger.histograms, module.gradients.values(), strict=True):
        edge = gradient.abs().max().item()
        assert (found.edges[0], found.edges[-1], len(found.edges)) == (-edge, edge, 65)
        assert found.counts.sum() == gradient.numel()
        plain, _ = np.histogram(gradient.double().numpy(), found.edges)
        assert np.abs(np.cumsum(plain - found.counts)).max() <= 1  # one that stands on an edge


@pytest.mark.parametrize("deterministic", [True, "warn"])
def test_histograms_of_a_deterministic_run(deterministic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    count, seen = torch.histc, []

    def counting(*args: Any) -> Any:  # on CUDA torch refuses it with deterministic algorithms
        seen.append(torch.are_deterministic_algorithms_enabled())
        return count(*args)

    class After(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            after.append(torch.are_deterministic_algorithms_enabled())
            after.append(torch.is_deterministic_algorithms_warn_only_enabled())

    after: list[bool] = []
    monkeypatch.setattr(torch, "histc", counting)
    monitor = GradientMonitor(histograms=True)
    settings: Any = {"logger": Kept(), "log_every_n_steps": 1, "deterministic": deterministic}
    quiet(callbacks=[monitor, After()], max_steps=1, **settings).fit(Deep(), loader())
    assert seen == [False] * 4
    assert after == [True, deterministic == "warn"]


@pytest.mark.parametrize(("order", "of_first", "of_all"), [(1, 7.0, 19.0), (2.0, 5.0, 13.0), ("inf", 4.0, 12.0)])
def test_norms_of_each_parameter_and_of_all(order: float | str, of_first: float, of_all: float):
    net = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in ("a", "b", "without")})
    net["a"].grad, net["b"].grad = torch.tensor([3.0, -4.0]), torch.tensor([12.0, 0.0])
    norms = grad_norm(net, order, group_separator=":")
    name = f"grad_{float(order)}_norm"
    assert list(norms) == [f"{name}:a", f"{name}:b", f"{name}_total"]
    assert (float(norms[f"{name}:a"]), float(norms[f"{name}_total"])) == (of_first, of_all)


def test_nothing_without_gradients_and_no_order_below_zero():
    assert grad_norm(nn.Linear(1, 1), 2) == {}
    with pytest.raises(SettingError, match="norm_type=0"):
        grad_norm(nn.Linear(1, 1), 0)
