"""Each check finds each rule that is broken, and says which; what keeps the rules passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from instep import Callback, DataModule, Logger, Strategy
from instep.testing import (
    ContractError,
    check_callback,
    check_datamodule,
    check_logger,
    check_module,
    check_strategy,
)
from instep.testing.ranks import in_ranks
from instep.testing.runs import Net, samples

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


def _rows(logger: Logger) -> Any:
    return list(Rows.table.items())


def _check_logger(make: Callable[[], Logger]) -> None:
    Twice.rows.clear()
    check_logger(make, read=(lambda logger: Twice.rows) if make is Twice else _rows)


BROKEN |= {
    "writes steps twice": (Twice, _check_logger, r"failed and was resumed it has 'train_loss_step' at the steps"),
    "rounds": (Rounding, _check_logger, "expected 0"),
    "raises in a hook": (Raising, _check_logger, "not all that was logged has arrived(.|\n)*no texts today"),
    "has no JSON": (NoJson, _check_logger, "is another one once it was JSON"),
}

# ---- modules and their data


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_rule_is_named(what: str) -> None:
    make, check, message = BROKEN[what]
    with pytest.raises(ContractError, match=message):
        check(make)


@pytest.mark.parametrize(
    ("make", "check"),
    [(Counting, check_callback), (Rows, _check_logger), (Net, check_module), (Samples, check_datamodule)],
)
def test_what_keeps_the_rules_passes(make: Callable[[], Any], check: Callable[..., None]) -> None:
    check(make)


# ---- strategies


class Apart(Strategy):
    """Replicas that never meet."""

    name = "apart"
    multi_process = True


@pytest.mark.dist
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


def test_it_needs_no_test_framework() -> None:
    for file in (Path(__file__).parents[2] / "instep" / "testing").glob("*.py"):
        assert "pytest" not in file.read_text(), file
