from __future__ import annotations

import inspect
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest

import instep.callbacks
from instep.callbacks import Callback, EarlyStopping, ModelCheckpoint, SpikeDetection, Timer
from instep.callbacks.base import HOOKS
from instep.checkpoint import KeepNewest
from tests.callbacks.fakes import FakeTrainer
from tests.helpers.spawn import HANG_S

NOTHING: list[str] = []
BATCH_START = ["batch", "batch_idx"]
BATCH_END = ["outputs", "batch", "batch_idx"]

SIGNATURES = {
    "setup": ["stage"],
    "teardown": ["stage"],
    "on_exception": ["exception"],
    "on_save_checkpoint": ["checkpoint"],
    "on_load_checkpoint": ["checkpoint"],
    "on_fit_start": NOTHING,
    "on_fit_end": NOTHING,
    "on_sanity_check_start": NOTHING,
    "on_sanity_check_end": NOTHING,
    "on_train_start": NOTHING,
    "on_train_end": NOTHING,
    "on_train_epoch_start": NOTHING,
    "on_train_epoch_end": NOTHING,
    "on_train_batch_start": BATCH_START,
    "on_train_batch_end": BATCH_END,
    "on_before_zero_grad": ["optimizer"],
    "on_before_backward": ["loss"],
    "on_after_backward": NOTHING,
    "on_before_optimizer_step": ["optimizer"],
}
for stage in ("validation", "test", "predict"):
    SIGNATURES |= {
        f"on_{stage}_start": NOTHING,
        f"on_{stage}_end": NOTHING,
        f"on_{stage}_epoch_start": NOTHING,
        f"on_{stage}_epoch_end": NOTHING,
        f"on_{stage}_batch_start": [*BATCH_START, "dataloader_idx"],
        f"on_{stage}_batch_end": [*BATCH_END, "dataloader_idx"],
    }


def test_every_hook_with_its_arguments():
    assert set(HOOKS) == set(SIGNATURES)
    for name, arguments in SIGNATURES.items():
        parameters = inspect.signature(getattr(Callback(), name)).parameters
        assert list(parameters) == ["trainer", "module", *arguments], name
        assert getattr(Callback(), name)(*parameters) is None
        if "dataloader_idx" in parameters:
            assert parameters["dataloader_idx"].default == 0


def test_state_key_is_the_classs_name():
    class Mine(Callback):
        pass

    assert Mine().state_key.endswith("Mine")
    assert Mine().state_dict() == {}
    assert Mine.runs_last is False


SETTINGS: list[tuple[type[Callback], dict[str, Any]]] = [  # none is a default
    (
        EarlyStopping,
        {
            "monitor": "loss",
            "min_delta": 0.5,
            "patience": 7,
            "verbose": True,
            "mode": "max",
            "strict": False,
            "check_finite": False,
            "stopping_threshold": 9.0,
            "divergence_threshold": -9.0,
            "check_on_train_epoch_end": True,
            "log_rank_zero_only": True,
        },
    ),
    (
        ModelCheckpoint,
        {
            "dirpath": "/checkpoints",
            "filename": "{step}",
            "monitor": "loss",
            "verbose": True,
            "save_last": True,
            "save_top_k": 3,
            "save_on_exception": True,
            "save_weights_only": True,
            "mode": "max",
            "auto_insert_metric_name": False,
            "every_n_epochs": 2,
            "save_on_train_epoch_end": True,
            "background": True,
            "on_error": "warn",
        },
    ),
    (ModelCheckpoint, {"every_n_train_steps": 5, "keep": KeepNewest(2)}),
    (ModelCheckpoint, {"train_time_interval": timedelta(minutes=1)}),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_the_settings_of_a_callback_can_be_read_by_their_names(kind: Any, settings: dict[str, Any]) -> None:
    callback = kind(**settings)
    assert {name: getattr(callback, name) for name in settings} == settings


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="EarlyStopping"):
        instep.callbacks.Earlystopping  # noqa: B018


def test_importing_the_packages_loads_nothing_slow():
    code = (
        "import sys, instep.callbacks, instep.loggers; "
        "assert not {'torch', 'rich', 'tensorboard', 'wandb'} & set(sys.modules); "
        "from instep.callbacks import EarlyStopping, ProgressBar, ModelSummary, Timer, LearningRateMonitor; "
        "from instep.loggers import CSVLogger, TensorBoardLogger, WandbLogger; "
        "ProgressBar(), ModelSummary(), CSVLogger(), TensorBoardLogger(), WandbLogger(); "
        "assert not {'rich', 'tensorboard', 'wandb'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S)


@pytest.mark.parametrize(
    ("callback", "left"),
    [
        (EarlyStopping("val"), {"best_score": 0.5, "wait_count": 2, "stopping_reason": 3, "stopped_epoch": 4}),
        (SpikeDetection(), {"means": [0.5], "judged": 9}),
        (Timer({"seconds": 10}), {"time_elapsed": {"train": 7.0, "validate": 1.0, "test": 0.0}}),
    ],
    ids=["stopping", "spikes", "timer"],
)
def test_a_callback_that_an_earlier_run_has_used_begins_anew_in_a_new_run(callback, left):
    new = callback.state_dict()
    callback.load_state_dict({**new, **left})
    callback.setup(FakeTrainer(global_step=8), None, "fit")
    assert callback.state_dict() == {**new, **left}
    callback.setup(FakeTrainer(), None, "fit")
    assert callback.state_dict() == new
