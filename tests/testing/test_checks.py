"""Each check finds each rule that is broken, and says which; what keeps the rules passes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from instep import Callback, DataModule, Logger, Strategy, TrainModule
from instep.testing import (
    ContractError,
    check_callback,
    check_datamodule,
    check_logger,
    check_module,
    check_strategy,
)
from instep.testing.ranks import in_ranks
from instep.testing.runs import OF_THE_MACHINE, Net, comparable, differences, samples
from instep.testing.strategy import _close
from instep.utils.seed import rng_state

# ---- callbacks


class Counting(Callback):
    batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


class Forgetful(Counting):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Misspelt(Counting):
    def on_train_batch_ends(self, *_: Any) -> None: ...


class Unsavable(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"made": object()}


class RaisesLate(Counting):
    def teardown(self, trainer: Any, *_: Any) -> None:
        if trainer.state.status == "interrupted":
            raise KeyError("in teardown")


class Disturbing(Counting):
    """Changes the training by what it forgets."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self.batches < 30:
            for parameter in module.parameters():
                parameter.grad *= 0.5

    def state_dict(self) -> dict[str, Any]:
        return {}


def number() -> Any:
    return 3


BROKEN: dict[str, tuple[Callable[[], Any], Callable[..., None], str]] = {
    "forgets its state": (
        Forgetful,
        check_callback,
        r"Forgetful: a run that is resumed at step 21(.|\n)*/state/batches",
    ),
    "misspells a hook": (Misspelt, check_callback, "on_train_batch_ends is not called by anything: did you mean"),
    "keeps an object": (Unsavable, check_callback, "UnsavableStateError"),
    "raises after an error": (RaisesLate, check_callback, "after a step had raised, a hook raised too: KeyError"),
    "changes the training": (Disturbing, check_callback, "/metrics/train_loss"),
    "is no callback": (number, check_callback, "got an object of int; expected one of a subclass of Callback"),
}


# ---- loggers


class Rows(Logger):
    """Keeps one row of each step in a list that all objects share, as a table would."""

    table: dict[int, dict[str, float]] = {}

    def _start(self) -> None:
        if not self.delivery.last_step > 0:
            self.table.clear()

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.table.setdefault(step, {}).update(metrics)


class Twice(Rows):
    """Writes the steps that are trained again a second time."""

    rows: list[tuple[int, dict[str, float]]] = []

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))


class Rounding(Rows):
    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        super()._log_metrics({name: round(value, 2) for name, value in metrics.items()}, step)


class Raising(Rows):
    def _log_text(self, name: str, text: str, step: int) -> None:
        raise TypeError("no texts today")


class NoJson(Rows):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": {1: "a"}}


class Closed(Rows):
    """Loses what is logged after `finalize`."""

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if "late" not in metrics:
            super()._log_metrics(metrics, step)


class NotANumber(Rows):
    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        super()._log_metrics(dict.fromkeys(metrics, math.nan), step)


def _rows(logger: Logger) -> Any:
    return list(Rows.table.items())


def _check_logger(make: Callable[[], Logger]) -> None:
    Twice.rows.clear()
    check_logger(make, read=(lambda logger: Twice.rows) if make is Twice else _rows)


BROKEN |= {
    "writes steps twice": (Twice, _check_logger, r"failed and was resumed it has 'train_loss_step' at the steps"),
    "rounds": (Rounding, _check_logger, "expected 0"),
    "loses what comes late": (Closed, _check_logger, r"'late' at the steps \[\]; expected each once: \[10000\]"),
    "writes NaN": (NotANumber, _check_logger, "train_loss_step=nan"),
    "raises in a hook": (Raising, _check_logger, "not all that was logged has arrived(.|\n)*no texts today"),
    "has no JSON": (NoJson, _check_logger, "is another one once it was JSON"),
}

# ---- modules and their data


class TrainedAlone(Net):
    """Has training, of seven batches, and no other stage."""

    validation_step = TrainModule.validation_step
    test_step = TrainModule.test_step
    val_dataloader = TrainModule.val_dataloader
    test_dataloader = TrainModule.test_dataloader
    predict_dataloader = TrainModule.predict_dataloader

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        TrainedAlone.batches.append(batch_idx)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return DataLoader(samples(28), batch_size=4, shuffle=True)

    batches: list[int] = []


class OwnValidation(Net):
    """Validates on batches of its own, which are larger than those of the training."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert len(batch[0]) == 8, "a training batch in the validation"
        super().validation_step(batch, batch_idx)


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class Drifting(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.backbone[1].running_mean.add_(1.0)


class Stepping(Net):
    """Decides by a count that no checkpoint has."""

    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx) * (2.0 if self.steps > 6 else 1.0)


class NeedsDepth(Net):
    def __init__(self, depth: int) -> None:
        super().__init__()


def needs_depth() -> NeedsDepth:
    return NeedsDepth(8)


class Samples(DataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(samples(48), batch_size=4, shuffle=True)


class Ordered(Samples):
    """Draws its order from a generator that nobody seeds."""

    def train_dataloader(self) -> Any:
        data = samples(48)
        order = torch.randperm(48, generator=torch.Generator().manual_seed(torch.seed())).tolist()
        return DataLoader(torch.utils.data.Subset(data, order), batch_size=4)


class Short(Samples):
    def train_dataloader(self) -> Any:
        return DataLoader(samples(8), batch_size=4)


BROKEN |= {
    "leaves parameters out": (Unused, check_module, "no loss reached these parameters in 8 steps: spare.weight"),
    "changes in validation": (Drifting, check_module, "validation changed weights or buffers"),
    "decides by what is lost": (Stepping, check_module, "is resumed at step 7(.|\n)*/optimizer/"),
    "cannot be made again": (needs_depth, check_module, "Call self.save_hyperparameters"),
    "orders at random": (Ordered, check_datamodule, "/batches/"),
    "has too little data": (Short, check_datamodule, "Give data of at least four batches"),
}


@dataclass
class Point:
    x: int
    y: int


def _check_seven(make: Callable[[], DataModule]) -> None:
    check_datamodule(make, batches=7)


def _check_own_validation(make: Callable[[], Net]) -> None:
    check_module(make, DataLoader(samples(48), batch_size=4))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_rule_is_named(what: str) -> None:
    make, check, message = BROKEN[what]
    with pytest.raises(ContractError, match=message):
        check(make)


def test_a_misspelt_hook_is_found_again_though_the_trainer_warns_once() -> None:
    for _ in range(2):
        with pytest.raises(ContractError, match="on_train_batch_ends is not called"):
            check_callback(Misspelt)


@pytest.mark.parametrize(
    ("make", "check"),
    [
        (Counting, check_callback),
        (Rows, _check_logger),
        (Net, check_module),
        (OwnValidation, _check_own_validation),
        (Samples, check_datamodule),
        (Samples, _check_seven),
    ],
)
def test_what_keeps_the_rules_passes_and_no_random_state_changes(
    make: Callable[[], Any], check: Callable[..., None]
) -> None:
    before = comparable(rng_state(), "")
    check(make)
    assert comparable(rng_state(), "") == before


@pytest.mark.parametrize(
    ("make", "wrong"), [(Counting, None), (Forgetful, "is resumed at step 15"), (RaisesLate, "a hook raised too")]
)
def test_a_callback_is_checked_with_the_module_given(make: Callable[[], Callback], wrong: str | None) -> None:
    """One that trains alone, whose epochs of seven batches end at each seventh step: the check saves at others."""
    TrainedAlone.batches.clear()
    with nullcontext() if wrong is None else pytest.raises(ContractError, match=wrong):
        check_callback(make, module=TrainedAlone)
    if wrong is None:  # whole, whole again, from step 15 on, 14 steps until the failure, and one epoch
        assert len(TrainedAlone.batches) == 21 + 21 + 6 + 14 + 7


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (-5, -7),
        (None, "None"),
        ("run-3", "run-9"),
        (np.array([1.0, 2.0]), np.array([1.0, 2.5])),
        (np.float32(0.0), np.float32(-0.0)),
        ({"time_constant": 1.0}, {"time_constant": 2.0}),
        (defaultdict(int, a=1), defaultdict(int, a=2)),
        (Point(1, 2), Point(1, 3)),
        (True, 1),
    ],
)
def test_states_that_differ_compare_as_different(one: Any, other: Any) -> None:
    assert differences(comparable({"a": one}, ""), comparable({"a": one}, "")) == []
    assert differences(comparable({"a": one}, ""), comparable({"a": other}, "")) != []


def test_runs_in_two_folders_compare_as_equal_but_for_objects_that_are_unknown() -> None:
    whole = {"path": "/a/step-00000007-0", "time_s": 1.0, "best": Path("/a/step-00000014-1")}
    resumed = {"path": "/b/step-00000007-2", "time_s": 2.0, "best": Path("/b/step-00000014-0")}
    assert comparable(whole, "/a") == comparable(resumed, "/b")
    with pytest.raises(ContractError, match="cannot compare an object of object"):
        comparable({"a": object()}, "")


def test_only_metrics_of_time_speed_and_devices_are_left_out() -> None:
    names = ["val_samples_f1", "batches_seen", "lifetime_value", "memory_loss", "train/samples"]
    assert [name for name in names if re.search(OF_THE_MACHINE, name)] == []
    names = ["DeviceStatsMonitor.on_x/cpu_percent", "train/time", "step_time_s", "train/batches_per_sec"]
    assert [name for name in names if not re.search(OF_THE_MACHINE, name)] == []


# ---- strategies


class Apart(Strategy):
    """Replicas that never meet."""

    name = "apart"
    multi_process = True


RIGHT = {"losses": [1.0, 2.0], "weights": {"w": torch.zeros(2)}}


@pytest.mark.parametrize(
    ("losses", "weight", "message"),
    [
        ([1.0, math.nan], torch.zeros(2), "the losses of the epochs are"),
        ([1.0], torch.zeros(2), "the losses of the epochs are"),
        ([1.0, 2.0], torch.tensor([0.0, math.nan]), "the weights 'w' differ"),
        ([1.0, 2.0], torch.zeros(1), r"have the shape \(1,\); those of one process \(2,\)"),
    ],
)
def test_nan_and_other_shapes_are_not_close_to_one_process(losses: Any, weight: Tensor, message: str) -> None:
    _close("it", RIGHT, RIGHT, 0.0)
    with pytest.raises(ContractError, match=message):
        _close("it", RIGHT, {"losses": losses, "weights": {"w": weight}}, 1e-5)


@pytest.mark.dist
@pytest.mark.extras  # three sets of processes, each trains all cases
def test_replicas_that_never_meet_are_found() -> None:
    with pytest.raises(ContractError, match="Apart, whole batches: the losses of the epochs are"):
        check_strategy(Apart)


def fail_on_rank(rank: int) -> None:
    from instep import PartialState

    if PartialState().process_index == rank:
        raise ValueError("this rank fails")


@pytest.mark.dist
def test_a_rank_that_fails_is_reported_with_its_traceback() -> None:
    with pytest.raises(ContractError, match=r"fail_on_rank on 2 ranks: (.|\n)*ValueError: this rank fails"):
        in_ranks(fail_on_rank, (1,), 2, 120.0)


def test_the_checks_need_no_test_framework() -> None:
    files = list((Path(__file__).parents[2] / "instep" / "testing").glob("*.py"))
    assert len(files) >= 7
    assert [file for file in files if "pytest" in file.read_text()] == []
