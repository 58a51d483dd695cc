"""Objects of other trainers, devices that are not there, and names and values that `self.log` cannot take."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from instep import Accelerator, Trainer
from instep.errors import LogError, SettingError
from instep.state import device
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import Mean, Toy, quiet, samples


def foreign(name: str, *bases: type) -> Any:
    """An object of a class as another package has it, or of one of the user's own below that."""
    module, _, leaf = name.rpartition(".")
    return type(leaf, bases, {"__module__": module})


EarlyStopping = foreign("lightning.pytorch.callbacks.early_stopping.EarlyStopping")
Callback = foreign("pytorch_lightning.callbacks.callback.Callback")
CSVLogger = foreign("lightning.pytorch.loggers.csv_logs.CSVLogger")
MINE = foreign("__main__.Mine", Callback)


class HasForeign(Toy):
    def configure_callbacks(self) -> Any:
        return EarlyStopping()


def fit(trainer: Trainer, module: Toy | None = None) -> None:
    trainer.fit(module or Toy(), DataLoader(samples(), batch_size=4))


def fit_with_appended() -> None:
    trainer = quiet(max_epochs=1)
    trainer.callbacks.append(MINE())
    fit(trainer)


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (
            lambda: quiet(callbacks=[EarlyStopping()]),
            "EarlyStopping is Lightning's: use instep.callbacks.EarlyStopping",
        ),
        (lambda: quiet(callbacks=MINE()), "Mine is derived from Lightning's Callback: .* to instep.callbacks.Callback"),
        (fit_with_appended, "Mine is derived from Lightning's Callback"),
        (lambda: fit(quiet(max_epochs=1), HasForeign()), "use instep.callbacks.EarlyStopping in its place"),
        (lambda: quiet(logger=CSVLogger()), "use instep.loggers.CSVLogger in its place"),
        (lambda: quiet(logger=["csv", CSVLogger()]), "use instep.loggers.CSVLogger in its place"),
        (lambda: quiet(strategy=foreign("lightning.pytorch.strategies.ddp.DDPStrategy")()), "instep.strategies.DDPS"),
        (lambda: quiet(profiler=foreign("lightning.pytorch.profilers.SimpleProfiler")()), "instep.profilers.Simple"),
        (lambda: Accelerator(cpu=True, log_with=CSVLogger()), "use instep.loggers.CSVLogger in its place"),
        (
            lambda: Accelerator(cpu=True, log_with=foreign("accelerate.tracking.WandBTracker")()),
            'WandBTracker is Accelerate\'s: use log_with="wandb"',
        ),
        (
            lambda: Accelerator(
                cpu=True, project_config=foreign("accelerate.utils.dataclasses.ProjectConfiguration")()
            ),
            "use instep.accelerator.ProjectConfiguration in its place",
        ),
    ],
)
def test_an_object_of_another_trainer_gets_a_hint(call: Callable[[], Any], hint: str) -> None:
    with pytest.raises(SettingError, match=hint):
        call()


@pytest.mark.parametrize(("accelerator", "built"), [("gpu", "cuda"), ("cuda", "cuda"), ("mps", "mps")])
def test_a_torch_without_the_device_says_so(accelerator: str, built: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
    for kind in ("cuda", "xpu", "mps"):
        monkeypatch.setitem(device.KINDS, kind, device.DeviceKind(kind, None, device.DistributedType.NO, lambda: 0))
    with pytest.raises(SettingError, match=f"is a build without {built.upper()}.*accelerator='cpu'"):
        Trainer(accelerator=accelerator)


def test_hidden_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setitem(device.KINDS, "cuda", device.DeviceKind("cuda", None, device.DistributedType.NO, lambda: 0))
    with pytest.raises(SettingError, match="CUDA_VISIBLE_DEVICES='' hides them"):
        Trainer(accelerator="cuda")


class Logs(Toy):
    """Logs what it is told to, from batch 1 on; before that, a plain number under the same name."""

    def __init__(self, name: Any, value: Any, late: bool = False, **arguments: Any) -> None:
        super().__init__()
        self.what, self.late, self.arguments = (name, value), late, arguments

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        name, value = self.what
        self.log(name, 1.0 if self.late and batch_idx == 0 else value, on_step=True, on_epoch=True, **self.arguments)
        return super().training_step(batch, batch_idx)


class Key(str, Enum):
    LOSS = "loss"


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (10**400, "too large for a float"),
        (Fraction(10**400, 3), "too large for a float"),
        (1j, "complex .*1j"),
        (np.complex64(1), "complex"),
        (torch.tensor(1j), "complex.*log its parts"),
        (torch.ones(1).to_sparse(), "is sparse"),
        (torch.ones((), device="meta"), "is on the meta device"),
        (torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), r"is nested; log \.values\(\)"),
        ("1.5", "got str '1.5'"),
    ],
)
def test_a_value_that_is_no_float_is_named(value: Any, text: str, late: bool) -> None:
    with pytest.raises(LogError, match=rf"self.log\('a'\) .*{text}"):
        fit(quiet(max_epochs=1, log_every_n_steps=1), Logs("a", value, late))


class Computes(Mean):
    """A metric object that computes what it is told to."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def compute(self) -> Any:
        return self.value


class LogsObject(Toy):
    metric: Mean

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metric.update(1.0)
        self.log("a", self.metric)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.tensor(1j), "'a'.*complex.*log its parts"),
        (torch.ones(1).to_sparse(), "'a'.*is sparse"),
        (10**400, "'a'.*too large for a float"),
        (torch.ones(2), "logged as 'a' must be a tensor with one element"),
        ("1.5", r"logged as 'a' must be .*self\.log_dict"),
    ],
    ids=["complex", "sparse", "large", "two", "text"],
)
def test_a_metric_object_that_computes_no_float_is_named(value: Any, text: str) -> None:
    module = LogsObject()
    module.metric = Computes(value)
    with pytest.raises(LogError, match=text):
        quiet().validate(module, DataLoader(samples(2)), verbose=False)


@pytest.mark.parametrize("name", [3, None, ("a", 1), b"a", ["a"]])
def test_a_name_that_is_no_text_is_named(name: Any) -> None:
    with pytest.raises(LogError, match="a name must be a text, got"):
        fit(quiet(max_epochs=1), Logs(name, 1.0))


@pytest.mark.parametrize("size", ["x", -1, 10**400, float("nan"), [3]])
def test_a_batch_size_that_is_no_number_is_named(size: Any) -> None:
    with pytest.raises(LogError, match=r"batch_size=.*expected the number of samples"):
        fit(quiet(max_epochs=1), Logs("a", 1.0, batch_size=size))


def test_texts_of_other_classes_are_names() -> None:
    trainer = quiet(max_epochs=1)
    fit(trainer, Logs(Key.LOSS, 2**70))
    assert float(trainer.callback_metrics["loss_step"]) == 2.0**70


class LogsByRank(Toy):
    """Each rank logs the names of its own."""

    def __init__(self, names: list[list[str]], objects: bool, **arguments: Any) -> None:
        super().__init__()
        self.names, self.arguments = names, arguments
        self.metrics = torch.nn.ModuleDict({name: Mean() for of_rank in names for name in of_rank} if objects else {})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for name in self.names[dist.get_rank()]:
            if name in self.metrics:
                self.metrics[name].update(loss.detach())
            value = self.metrics[name] if name in self.metrics else loss  # noqa: SIM401  a ModuleDict has no get
            self.log(name, value, on_step=not self.metrics, on_epoch=True, **self.arguments)
        return loss


def log_by_rank(names: list[list[str]], objects: bool, arguments: dict[str, Any]) -> str:
    module = LogsByRank(names, objects, **arguments)
    try:
        fit(quiet(max_epochs=2, strategy="ddp", devices=len(names), log_every_n_steps=1), module)
    except LogError as error:
        return str(error)
    return ""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("names", "objects", "text"),
    [
        ([["b"], ["a"]], False, "'a'.*rank 1 logs it, and rank 0 does not.*there: 'b'"),
        ([[], ["a"]], False, "'a'.*rank 1 logs it, and rank 0 does not.*there: none"),
        ([["a", "b"], ["a"], ["a"]], False, "'b'.*rank 0 logs it, and ranks 1, 2 do not.*there: 'a'"),
        ([["a"], ["a", "b"]], True, "'b'.*metric object.*rank 1 logs it, and rank 0 does not"),
    ],
    ids=["other", "nothing", "three-ranks", "objects"],
)
def test_ranks_that_log_different_names_all_get_the_names(names: Any, objects: bool, text: str) -> None:
    said = run_ranks(log_by_rank, len(names), names, objects, {} if objects else {"sync_dist": True})
    assert len(set(said)) == 1
    assert re.search(text, said[0])


@pytest.mark.dist
def test_a_name_of_one_rank_is_right_where_nothing_is_averaged_at_a_step() -> None:
    assert run_ranks(log_by_rank, 2, [["a"], []], False, {"rank_zero_only": True, "sync_dist": True}) == ["", ""]
    assert run_ranks(log_by_rank, 2, [["a"], ["b"]], False, {}) == ["", ""]
