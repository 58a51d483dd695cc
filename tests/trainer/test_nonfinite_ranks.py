"""A loss that is nan on one rank only: one decision on all of them, and equal weights afterwards."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep import TrainModule
from instep.errors import NonFiniteError
from instep.trainer.guests import nonfinite
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import loader, quiet

pytestmark = pytest.mark.dist

NAN = float("nan")
BAD_STEP = 2


@dataclass(frozen=True)
class Case:
    """`by`: what the loss is spoilt by: with "plus" the gradients stay finite, and only the loss tells."""

    policy: str
    fused: bool
    manual: bool
    by: str
    later: bool


CASES = [
    Case(policy, fused, manual, by, later)
    for policy, fused, manual, by, later in product(
        ("skip", "stop", "continue"), (False, True), (False, True), ("times", "plus"), (False, True)
    )
    if (fused or not later) and not (policy == "continue" and manual)
]


class Net(TrainModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.automatic_optimization = not case.manual
        self.case = case
        self.layer = nn.Linear(4, 1)
        self.history = [self.layer.weight.detach().clone()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        loss = nn.functional.mse_loss(self.layer(x).squeeze(-1), y)
        if self.global_rank == 1 and self.global_step == BAD_STEP:
            loss = loss * NAN if self.case.by == "times" else loss + NAN
        if not self.case.manual:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss * self.batch_weight)
        optimizer.step()
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.history.append(self.layer.weight.detach().clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1, fused=self.case.fused)


def run_cases() -> list[dict[str, Any]]:
    results = []
    real = nonfinite.host_may_wait
    for case in CASES:
        nonfinite.host_may_wait = (lambda device: False) if case.later else real
        torch.manual_seed(3)
        module = Net(case)
        trainer = quiet(max_epochs=1, nonfinite=case.policy, log_every_n_steps=1000)
        result: dict[str, Any] = {"error": None}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                trainer.fit(module, loader(20, 2))
            except NonFiniteError as error:
                result["error"] = (str(error), error.global_step, error.ranks, error.parameters, error.sample_indices)
        result["reports"] = [str(w.message) for w in caught if "global_step" in str(w.message)]
        result["history"] = module.history
        result["end"] = module.layer.weight.detach().clone()
        result["steps"] = trainer.global_step
        result["nonfinite_steps"] = trainer.position.nonfinite_steps
        results.append(result)
    return results


def test_all_ranks_decide_alike_on_a_nonfinite_step() -> None:
    first, second = run_ranks(run_cases, 2)
    for case, one, other in zip(CASES, first, second, strict=True):
        for a, b in zip((*one["history"], one["end"]), (*other["history"], other["end"]), strict=True):
            assert torch.equal(a, b) or (a.isnan().all() and b.isnan().all()), case
        assert one["error"] == other["error"], case
        assert one["steps"] == other["steps"], case
        moved = [not torch.equal(a, b) for a, b in pairwise(one["history"])]
        (reports, others_reports) = (one["reports"], other["reports"])
        assert others_reports == [], "the main process speaks for all"
        if case.policy == "stop":
            message, step, ranks, parameters, samples = one["error"]
            assert step == BAD_STEP + 1, case
            assert ranks == [1], case
            assert "the loss is nan on rank 1" in message
            assert parameters == (["layer.weight", "layer.bias"] if case.by == "times" else []), case
            assert samples == [{2: [8, 9]}, {2: [10, 11]}], case
            assert moved == [True, True, False, False, False][: len(moved)], case
            assert one["steps"] == (5 if case.later else BAD_STEP), case
            continue
        assert one["error"] is None, case
        assert "the loss is nan on rank 1" in reports[0]
        assert "Samples: rank 0: [8, 9], rank 1: [10, 11]." in reports[0]
        if case.policy == "skip":
            assert moved == [True, True, False, True, True], case
            assert one["nonfinite_steps"] == other["nonfinite_steps"] == 1, case
        elif case.by == "plus":
            assert moved == [True] * 5, case
        else:
            assert one["end"].isnan().all(), case


# ---- a batch that is replayed, to keep step with the other ranks


class Replays(Net):
    """The loss of a batch without samples of its own is nan, as a standard deviation over too few samples is."""

    spoilt = True
    replays = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        value = self.layer(x).squeeze(-1)
        replayed = self.trainer._run.source.share.mine == 0
        self.replays += replayed
        if self.spoilt and replayed:
            value = (value - 1e6).sqrt()  # nan, and its slope is nan, too
        loss = nn.functional.mse_loss(value, y)
        if not self.case.manual:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss * self.batch_weight)
        optimizer.step()
        return None


def replay_all() -> list[tuple[int, int, Tensor, Tensor]]:
    results = []
    for policy, manual, accumulate in ((None, False, 1), (None, False, 2), (None, True, 1), ("skip", False, 1)):
        ends: list[Tensor] = []
        replays = count = 0
        for spoilt in (True, False):
            torch.manual_seed(3)
            module = Replays(Case(policy or "", True, manual, "", False))
            module.spoilt = spoilt
            settings = {} if manual else {"accumulate_grad_batches": accumulate}
            trainer = quiet(max_epochs=2, nonfinite=policy, **settings)
            trainer.fit(module, loader(13, 2))
            ends.append(module.layer.weight.detach().clone())
            replays, count = module.replays, count + trainer.position.nonfinite_steps
        results.append((replays, count, ends[0], ends[1]))
    return results


def test_nothing_comes_of_a_replayed_batch_not_even_of_a_nan() -> None:
    first, second = run_ranks(replay_all, 2)
    assert [replays for replays, *_ in first] == [0] * 4
    assert [replays for replays, *_ in second] == [2] * 4, "one in each epoch"
    for (_, count, spoilt, healthy), (_, _, others, _) in zip(first, second, strict=True):
        assert count == 0
        assert torch.equal(spoilt, healthy)
        assert torch.equal(spoilt, others)
