from __future__ import annotations

import json
import math
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.callbacks import EarlyStopping, EarlyStoppingReason
from instep.callbacks.early_stopping import StoppingPolicy
from instep.errors import SettingError, UsageError
from tests.callbacks.fakes import FakeTrainer

NAN, INF = math.nan, math.inf
GO_ON = EarlyStoppingReason.NOT_STOPPED
NON_FINITE = EarlyStoppingReason.NON_FINITE_METRIC
EXHAUSTED = EarlyStoppingReason.PATIENCE_EXHAUSTED
THRESHOLD = EarlyStoppingReason.STOPPING_THRESHOLD
DIVERGED = EarlyStoppingReason.DIVERGENCE_THRESHOLD


@pytest.mark.parametrize(
    ("policy", "value", "best", "waited", "expected"),
    [
        # min: what is an improvement
        ({}, 1.0, INF, 0, (GO_ON, 1.0, 0)),
        ({}, 0.0, 1.0, 2, (GO_ON, 0.0, 0)),
        ({}, -0.0, 1.0, 2, (GO_ON, -0.0, 0)),
        ({}, -0.0, 0.0, 0, (GO_ON, 0.0, 1)),
        ({}, 0.0, -0.0, 0, (GO_ON, -0.0, 1)),
        ({}, 1.0, 1.0, 0, (GO_ON, 1.0, 1)),
        ({}, 2.0, 1.0, 2, (EXHAUSTED, 1.0, 3)),
        ({}, -1.0, 0.0, 2, (GO_ON, -1.0, 0)),
        ({"min_delta": 0.5}, 0.5, 1.0, 0, (GO_ON, 1.0, 1)),
        ({"min_delta": 0.5}, 0.49, 1.0, 0, (GO_ON, 0.49, 0)),
        # max
        ({"mode": "max"}, 0.0, -INF, 0, (GO_ON, 0.0, 0)),
        ({"mode": "max"}, 0.0, -0.0, 0, (GO_ON, -0.0, 1)),
        ({"mode": "max"}, 0.5, 0.0, 2, (GO_ON, 0.5, 0)),
        ({"mode": "max", "min_delta": 0.5}, 0.5, 0.0, 0, (GO_ON, 0.0, 1)),
        ({"mode": "max"}, -1.0, 0.0, 2, (EXHAUSTED, 0.0, 3)),
        # NaN and infinities stop where check_finite is on ...
        ({}, NAN, 1.0, 1, (NON_FINITE, 1.0, 1)),
        ({}, INF, 1.0, 1, (NON_FINITE, 1.0, 1)),
        ({}, -INF, 1.0, 1, (NON_FINITE, 1.0, 1)),
        ({"mode": "max"}, NAN, -INF, 0, (NON_FINITE, -INF, 0)),
        # ... and are checks without improvement, or values, where it is off
        ({"check_finite": False}, NAN, INF, 0, (GO_ON, INF, 1)),
        ({"check_finite": False}, NAN, 1.0, 2, (EXHAUSTED, 1.0, 3)),
        ({"check_finite": False, "mode": "max"}, NAN, -INF, 0, (GO_ON, -INF, 1)),
        ({"check_finite": False}, INF, INF, 0, (GO_ON, INF, 1)),
        ({"check_finite": False}, -INF, 1.0, 2, (GO_ON, -INF, 0)),
        ({"check_finite": False}, -INF, -INF, 0, (GO_ON, -INF, 1)),
        ({"check_finite": False, "mode": "max"}, INF, 1.0, 2, (GO_ON, INF, 0)),
        ({"check_finite": False, "mode": "max"}, -INF, -INF, 0, (GO_ON, -INF, 1)),
        # thresholds
        ({"stopping_threshold": 0.0}, 0.0, 1.0, 1, (THRESHOLD, 0.0, 1)),
        ({"stopping_threshold": 0.0}, -0.0, 1.0, 1, (THRESHOLD, -0.0, 1)),
        ({"stopping_threshold": 0.0}, 0.1, 1.0, 1, (GO_ON, 0.1, 0)),
        ({"stopping_threshold": 1.0, "mode": "max"}, 1.0, 0.5, 0, (THRESHOLD, 1.0, 0)),
        ({"stopping_threshold": 0.0, "check_finite": False}, NAN, 1.0, 0, (GO_ON, 1.0, 1)),
        ({"divergence_threshold": 0.0}, 0.1, -1.0, 0, (DIVERGED, -1.0, 0)),
        ({"divergence_threshold": 0.0}, 0.0, -1.0, 0, (GO_ON, -1.0, 1)),
        ({"divergence_threshold": 0.0, "mode": "max"}, -0.1, 1.0, 0, (DIVERGED, 1.0, 0)),
        ({"divergence_threshold": 0.0, "check_finite": False}, NAN, 1.0, 0, (GO_ON, 1.0, 1)),
        # patience
        ({"patience": 0}, 1.0, 1.0, 0, (EXHAUSTED, 1.0, 1)),
        ({"patience": 1}, 1.0, 1.0, 0, (EXHAUSTED, 1.0, 1)),
    ],
)
def test_the_stopping_policy_judges_each_value_as_the_table_says(policy, value, best, waited, expected):
    reason, new_best, new_waited = StoppingPolicy(**policy).judge(value, best, waited)
    assert (reason, new_best, new_waited) == expected
    assert math.copysign(1, new_best) == math.copysign(1, expected[1])


@given(
    values=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30),
    mode=st.sampled_from(["min", "max"]),
    check_finite=st.booleans(),
)
def test_nan_is_never_best_and_never_resets_the_patience(values, mode, check_finite):
    policy = StoppingPolicy(mode, patience=1000, check_finite=check_finite)
    best, waited = policy.worst, 0
    for value in values:
        before = waited
        _, best, waited = policy.judge(value, best, waited)
        assert not math.isnan(best)
        if math.isnan(value):
            assert waited >= before
    seen = [value for value in values if not math.isnan(value) and (math.isfinite(value) or not check_finite)]
    if seen:
        assert best == (min if mode == "min" else max)(seen)


def run(callback: EarlyStopping, values: list[float], **trainer_options) -> FakeTrainer:
    trainer = FakeTrainer(**trainer_options)
    callback.setup(trainer, None, "fit")
    for epoch, value in enumerate(values):
        trainer.current_epoch = epoch
        trainer.callback_metrics[callback.monitor] = torch.tensor(value)
        callback.on_validation_end(trainer, None)
        callback.on_train_epoch_end(trainer, None)
        if trainer.triggers:
            break
    return trainer


def test_stops_through_the_trigger_only_and_says_why():
    callback = EarlyStopping("val_loss", patience=2)
    trainer = run(callback, [1.0, 0.5, 0.6, 0.7, 0.1])
    assert [name for name, _ in trainer.triggers] == ["stop"]
    assert "val_loss did not improve in the last 2 checks" in trainer.triggers[0][1]
    assert callback.stopped_epoch == 3
    assert callback.wait_count == 2
    assert callback.stopping_reason is EXHAUSTED
    assert callback.best_score.item() == 0.5
    assert callback.best_score.shape == ()


def test_a_better_value_takes_a_verdict_back_that_has_waited():
    callback = EarlyStopping("val_loss", patience=1)
    run(callback, [1.0, 2.0])
    assert (callback.stopping_reason, callback.stopped_epoch) == (EXHAUSTED, 1)
    run(callback, [0.5])
    assert callback.state_dict() == {**EarlyStopping("val_loss").state_dict(), "best_score": 0.5}
    assert callback.stopping_reason_message is EarlyStopping("val_loss").stopping_reason_message is None


def test_nan_stops_at_once_and_is_not_best():
    callback = EarlyStopping("loss")
    trainer = run(callback, [1.0, NAN])
    assert callback.stopping_reason is NON_FINITE
    assert "nan is not finite; best was 1" in trainer.triggers[0][1]
    assert callback.best_score.item() == 1.0


def test_a_first_value_of_zero_counts():
    callback = EarlyStopping("loss", patience=1)
    run(callback, [0.0, 0.0])
    assert callback.best_score.item() == 0.0
    assert callback.stopping_reason is EXHAUSTED


def test_missing_metric_is_an_error_that_lists_the_available_ones():
    trainer = FakeTrainer(callback_metrics={"val_loss": 1.0, "accuracy": 0.5})
    with pytest.raises(UsageError, match=r"'val_los', .*Available: accuracy, val_loss"):
        EarlyStopping("val_los").on_train_epoch_end(trainer, None)
    with pytest.raises(UsageError, match="nothing yet"):
        EarlyStopping("val_los").on_train_epoch_end(FakeTrainer(), None)


def test_missing_metric_that_is_not_strict():
    trainer = FakeTrainer()
    EarlyStopping("loss", strict=False).on_train_epoch_end(trainer, None)
    with pytest.warns(UserWarning, match="left out"):
        EarlyStopping("loss", strict=False, verbose=True).on_train_epoch_end(trainer, None)
    assert trainer.triggers == []


@pytest.mark.parametrize(
    ("option", "trainer", "at_epoch_end"),
    [
        (None, {}, True),
        (None, {"val_check_interval": 0.5}, False),
        (None, {"val_check_interval": 1}, False),
        (None, {"val_check_interval": timedelta(minutes=1)}, False),
        (None, {"check_val_every_n_epoch": 2}, False),
        (None, {"check_val_every_n_epoch": 2, "enable_validation": False}, True),
        (True, {"val_check_interval": 0.5}, True),
        (False, {}, False),
    ],
)
def test_early_stopping_checks_once_after_validation_or_at_the_epochs_end(option, trainer, at_epoch_end):
    callback = EarlyStopping("loss", check_on_train_epoch_end=option)
    fake = FakeTrainer(callback_metrics={"loss": 1.0}, **trainer)
    callback.on_validation_end(fake, None)
    assert math.isinf(callback.best_score.item()) == at_epoch_end
    callback.on_train_epoch_end(fake, None)
    assert callback.best_score.item() == 1.0
    assert callback.wait_count == 0  # once


def test_not_in_the_sanity_check_nor_in_validate_nor_in_fast_dev_run():
    fake = FakeTrainer(callback_metrics={"loss": 1.0}, sanity_checking=True)
    callback = EarlyStopping("loss", check_on_train_epoch_end=False)
    callback.on_validation_end(fake, None)
    fake.sanity_checking, fake.state.fn = False, "validate"
    callback.on_validation_end(fake, None)
    fake.state.fn, fake.fast_dev_run = "fit", 1
    callback.on_validation_end(fake, None)
    assert math.isinf(callback.best_score.item())


def test_state_survives_and_options_are_those_of_the_new_run():
    callback = EarlyStopping("loss", patience=3)
    run(callback, [1.0, 2.0])
    state = json.loads(json.dumps(callback.state_dict()))
    resumed = EarlyStopping("loss", patience=2)
    resumed.load_state_dict(state)
    assert resumed.wait_count == 1
    trainer = run(resumed, [1.5], global_step=2)
    assert resumed.stopping_reason is EXHAUSTED
    assert len(trainer.triggers) == 1
    assert resumed.state_key == callback.state_key == "EarlyStopping(monitor='loss', mode='min')"
    assert EarlyStopping("loss", mode="max").state_key == "EarlyStopping(monitor='loss', mode='max')"


def test_verbose_prints_on_rank_zero_or_everywhere(capsys):
    callback = EarlyStopping("loss", verbose=True, patience=1)
    trainer = run(callback, [1.0, 0.5, 0.5])
    assert "better by 0.5 than 1" in trainer.printed[1]
    assert trainer.printed[-1].endswith("Stopping.")
    run(EarlyStopping("loss", verbose=True), [1.0], world_size=2, global_rank=1)
    assert capsys.readouterr().out == "[rank 1] loss = 1.\n"
    trainer = run(EarlyStopping("loss", verbose=True, log_rank_zero_only=True), [1.0], world_size=2)
    assert trainer.printed == ["loss = 1."]


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "mim"},
        {"min_delta": -0.1},
        {"min_delta": NAN},
        {"patience": -1},
        {"monitor": ""},
        {"strict": 3},
        {"stopping_threshold": "a"},
        {"divergence_threshold": NAN},
        {"check_on_train_epoch_end": "no"},
    ],
    ids=str,
)
def test_wrong_options_of_early_stopping_are_named(options):
    with pytest.raises(SettingError, match=next(iter(options))):
        EarlyStopping(**{"monitor": "loss", **options})


def test_early_stopping_restores_its_whole_state() -> None:
    stopping = EarlyStopping("val")
    state = {
        **stopping.state_dict(),
        "best_score": 1.5,
        "wait_count": 2,
        "stopped_epoch": 4,
        "stopping_reason": THRESHOLD.value,
        "stopping_reason_message": "it was good enough",
    }
    stopping.load_state_dict(state)
    assert stopping.state_dict() == state
