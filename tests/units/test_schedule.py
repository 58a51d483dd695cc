"""Rates by tokens: those of the curve at the total, on any number of ranks, resumed, in every loop."""

from __future__ import annotations

import copy
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import DataModule, Trainer
from instep.callbacks import BatchSizeFinder, LearningRateFinder, LearningRateMonitor, ModelCheckpoint
from instep.errors import SettingError
from instep.schedules import cosine, linear
from instep.units import Samples, Tokens, by_samples, by_tokens
from tests.callbacks.fakes import RecordingLogger
from tests.helpers.spawn import run_ranks
from tests.units.runs import Model, Seen, batches, length, trainer_for

TOTAL, WARMUP = 600, 100


def scheduled() -> Model:
    model = Model()
    model.schedule = lambda optimizer, trainer: by_tokens(cosine(optimizer, TOTAL, warmup_steps=WARMUP), trainer)
    return model


def rate(total: int) -> float:
    curve = cosine(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5), TOTAL, warmup_steps=WARMUP)
    return 0.5 * curve.rate_at(total)


def run(folder: str, most: int, ckpt_path: Any = None, **settings: Any) -> Seen:
    tokens = Tokens("attention_mask", max_tokens=most)
    seen, saver = Seen(tokens), ModelCheckpoint(folder)
    trainer = trainer_for(seen, tokens, saver, enable_checkpointing=True, default_root_dir=folder, **settings)
    trainer.fit(scheduled(), batches(), ckpt_path=ckpt_path)
    assert len(seen.totals) > 2
    for step, total in seen.totals.items():
        assert seen.rates[step] == pytest.approx(rate(total), abs=1e-12), (step, total)
    return seen


def both_parts(folder: str, most: int, ckpt_path: Any) -> None:
    for number, settings in enumerate(({}, {"strategy": "fsdp"}, {"accumulate_grad_batches": 2})):
        run(f"{folder}/{number}", most, ckpt_path, **settings)


@pytest.mark.dist
@pytest.mark.parametrize(("first", "then"), [(1, 1), pytest.param(2, 3, marks=pytest.mark.extras)])
def test_each_step_has_the_rate_of_the_tokens_before_it(tmp_path: Path, first: int, then: int) -> None:
    run_ranks(both_parts, first, str(tmp_path), 300, None)
    run_ranks(both_parts, then, str(tmp_path), 700, "last")


def test_manual_optimization_a_second_fit_and_the_monitor_of_rates() -> None:
    class Manual(Model):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()
            self.lr_schedulers().step()

    for kind in (Manual, Model):
        model, samples, logger = kind(), Samples(), RecordingLogger()
        model.schedule = lambda optimizer, trainer: by_samples(linear(optimizer, 40, warmup_steps=4), trainer)
        seen = Seen(samples)
        trainer = trainer_for(
            seen, samples, LearningRateMonitor("step"), logger=logger, log_every_n_steps=1, max_steps=6
        )
        trainer.fit(model, batches())
        trainer.max_steps = 12
        trainer.fit(model, batches())
        expected = [0.5 * min(total / 4, (40 - total) / 36) for total in seen.totals.values()]
        assert list(seen.rates.values()) == pytest.approx(expected)
        assert list(logger.of("lr-SGD").values()) == pytest.approx([0.0, *expected[:-1]])


@pytest.mark.parametrize("finder", [LearningRateFinder, BatchSizeFinder])
def test_steps_that_are_tried_count_nothing(finder: Any, tmp_path: Path) -> None:
    class Data(DataModule):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return batches(batch_size=self.batch_size)

    how: dict[str, Any] = (
        {"num_training_steps": 5, "update_attr": False} if finder is LearningRateFinder else {"max_trials": 2}
    )
    tokens = Tokens("attention_mask")
    seen = Seen(tokens)
    trainer = trainer_for(seen, tokens, finder(**how), max_steps=4, default_root_dir=tmp_path)
    trainer.fit(scheduled(), datamodule=Data())
    totals = list(accumulate(sum(map(length, samples)) for samples in seen.samples.values()))
    assert list(seen.totals.values()) == totals
    assert list(seen.rates.values()) == pytest.approx([rate(total) for total in totals])
    copy.deepcopy(trainer)  # which needs no copy of the data


def test_a_schedule_needs_its_count() -> None:
    model = scheduled()
    with pytest.raises(SettingError, match=r"needs one Tokens among .* there are 0"):
        trainer_for(Samples(), max_steps=1).fit(model, batches())


def test_what_is_no_schedule_of_instep_and_what_is_no_number_is_named() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    trainer = Trainer(callbacks=[Tokens(1)], logger=False, enable_checkpointing=False)
    theirs: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    with pytest.raises(SettingError, match=r"instep\.schedules"):
        by_tokens(theirs, trainer)
    with pytest.raises(SettingError, match="a function that returns a number of tokens"):
        Tokens(lambda batch: 2.9).count_batch(torch.zeros(2), 2)  # type: ignore[arg-type]
