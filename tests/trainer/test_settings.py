from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from instep.callbacks import Callback, EarlyStopping
from instep.errors import SettingError
from instep.loggers import Logger
from instep.state import device
from instep.strategies import DDPStrategy
from instep.trainer.settings import _CHECKS, Settings, reject_unknown, resolve
from instep.utils.porting import INSTEAD, instead_of


def test_settings_have_lightnings_defaults():
    settings = resolve()
    assert settings == Settings()
    assert (settings.max_epochs, settings.max_steps, settings.max_time) == (1000, -1, None)
    assert (settings.log_every_n_steps, settings.num_sanity_val_steps) == (50, 2)
    assert (settings.precision, settings.logger, settings.callbacks) == ("32-true", True, ())
    assert settings.default_root_dir == Path.cwd()


def test_every_argument_has_a_check_and_none_is_the_default():
    names = [field.name for field in fields(Settings)]
    assert list(_CHECKS) == names
    assert resolve(**{name: None for name in names if name != "check_val_every_n_epoch"}) == Settings()


def test_settings_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        resolve().max_epochs = 3  # pyright: ignore[reportAttributeAccessIssue]


def same(name: str, value: object, expected: object, **others: object) -> None:
    got = getattr(resolve(**{name: value}, **others), name)
    assert got == expected
    assert type(got) is type(expected)


ONE_HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("max_epochs", 3, 3),
        ("max_epochs", 0, 0),
        ("max_epochs", -1, -1),
        ("max_epochs", np.int64(3), 3),
        ("max_steps", -1, -1),
        ("max_steps", 10, 10),
        ("limit_train_batches", 1, 1),
        ("limit_train_batches", 1.0, 1.0),
        ("limit_val_batches", 0, 0),
        ("limit_test_batches", 0.25, 0.25),
        ("overfit_batches", 4, 4),
        ("overfit_batches", 0.1, 0.1),
        ("val_check_interval", 100, 100),
        ("val_check_interval", 1, 1),
        ("val_check_interval", 0.5, 0.5),
        ("val_check_interval", "00:01:00:00", ONE_HOUR),
        ("val_check_interval", ONE_HOUR, ONE_HOUR),
        ("val_check_interval", {"minutes": 60}, ONE_HOUR),
        ("max_time", "01:02:03:04", timedelta(days=1, hours=2, minutes=3, seconds=4)),
        ("max_time", ONE_HOUR, ONE_HOUR),
        ("max_time", {"hours": 0.5, "minutes": 30}, ONE_HOUR),
        ("num_sanity_val_steps", -1, -1),
        ("log_every_n_steps", 0, 0),
        ("gradient_clip_val", 1, 1.0),
        ("gradient_clip_val", 0, None),
        ("gradient_clip_val", math.inf, math.inf),
        ("deterministic", "warn", "warn"),
        ("deterministic", True, True),
        ("benchmark", False, False),
        ("fast_dev_run", True, True),
        ("fast_dev_run", 3, 3),
        ("fast_dev_run", False, False),
        ("devices", "auto", "auto"),
        ("devices", 2, 2),
        ("devices", "2", 2),
        ("accelerator", "auto", "auto"),
        ("strategy", "ddp", "ddp"),
        ("logger", False, ()),
        ("logger", [], ()),
        ("default_root_dir", "runs", Path("runs")),
        ("global_batch_size", 64, 64),
        ("trigger_every", 1, 1),
    ],
)
def test_good_values_of_settings_are_taken(name, value, expected):
    same(name, value, expected)


@pytest.mark.parametrize(
    "given, expected",
    [
        (32, "32-true"),
        ("32", "32-true"),
        ("32-true", "32-true"),
        (64, "64-true"),
        ("64", "64-true"),
        ("64-true", "64-true"),
        ("bf16", "bf16-mixed"),
        ("bf16-mixed", "bf16-mixed"),
        ("bf16-true", "bf16-true"),
        ("16-true", "16-true"),
    ],
)
def test_every_alias_of_a_precision_is_taken(given, expected):
    same("precision", given, expected, accelerator="cpu")


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("max_epochs", -2, "-1 for no limit"),
        ("max_epochs", 1.0, "integer"),
        ("max_epochs", True, "integer"),
        ("max_steps", "10", "integer"),
        ("max_steps", 1e6, "integer"),
        ("min_epochs", -1, "at least 0"),
        ("num_nodes", 0, "at least 1"),
        ("accumulate_grad_batches", 0, "at least 1"),
        ("accumulate_grad_batches", {0: 2}, "integer"),
        ("limit_train_batches", True, "batches"),
        ("limit_train_batches", -1, "batches"),
        ("limit_train_batches", 1.5, "fraction"),
        ("limit_train_batches", 10.0, "for 10 batches write 10"),
        ("limit_train_batches", math.nan, "fraction"),
        ("limit_val_batches", "0.5", "fraction"),
        ("val_check_interval", 0, "limit_val_batches=0"),
        ("val_check_interval", 0.0, "fraction"),
        ("val_check_interval", 1.5, "fraction"),
        ("val_check_interval", True, "fraction"),
        ("val_check_interval", "1h", "DD:HH:MM:SS"),
        ("check_val_every_n_epoch", 0, "or None"),
        ("max_time", "01:00", "DD:HH:MM:SS"),
        ("max_time", "00:00:00:00", "above zero"),
        ("max_time", 3600, "timedelta"),
        ("max_time", {"hour": 1}, "hour"),
        ("num_sanity_val_steps", -2, "-1 for all"),
        ("log_every_n_steps", -1, "0 for never"),
        ("gradient_clip_val", -1, "None or 0 for no clipping"),
        ("gradient_clip_val", math.nan, "above 0"),
        ("gradient_clip_val", True, "above 0"),
        ("gradient_clip_algorithm", "norms", "Did you mean 'norm'"),
        ("precision", "fp16", "bf16"),
        ("precision", 8, "32-true"),
        ("precision", True, "precision"),
        ("deterministic", "yes", "'warn'"),
        ("benchmark", 1, "True or False"),
        ("inference_mode", 0, "True or False"),
        ("enable_progress_bar", "no", "True or False"),
        ("fast_dev_run", -1, "at least 0"),
        ("fast_dev_run", 1.0, "integer"),
        ("devices", 0, "accelerator='cpu'"),
        ("devices", -2, "auto"),
        ("devices", True, "auto"),
        ("devices", 1.0, "auto"),
        ("devices", [], "indices"),
        ("devices", [0, 0], "differ"),
        ("devices", [-1], "indices"),
        ("devices", "two", "indices"),
        ("devices", "", "indices"),
        ("accelerator", "cpus", "Did you mean 'cpu'"),
        ("accelerator", "tpu", "xla"),
        ("strategy", "ddpp", "Did you mean 'ddp'"),
        ("strategy", DDPStrategy, r"DDPStrategy\(\)"),
        ("callbacks", Callback, r"Callback\(\)"),
        ("callbacks", [EarlyStopping], r"EarlyStopping\(monitor=\.\.\.\)"),
        ("callbacks", [print], "instep Callback"),
        ("logger", Logger, r"Logger\(\)"),
        ("logger", "cvs", r"not known.*Did you mean .csv."),
        ("logger", [3], "instep Logger"),
        ("default_root_dir", 3, "folder"),
        ("default_root_dir", "s3://bucket/runs", "may go to a URL"),
        ("reload_dataloaders_every_n_epochs", -1, "0 for never"),
        ("global_batch_size", 0, "at least 1"),
        ("global_batch_size", 64.0, "integer"),
        ("trigger_every", 0, "at least 1"),
    ],
)
def test_wrong_values_are_named_and_explained(name, value, said):
    with pytest.raises(SettingError, match=said) as caught:
        resolve(**{name: value})
    assert str(caught.value).startswith(f"{name}=")
    assert caught.value.field == name


@pytest.mark.parametrize(
    "given, epochs, steps",
    [
        ({}, 1000, -1),
        ({"max_steps": 5}, -1, 5),
        ({"max_time": ONE_HOUR}, -1, -1),
        ({"max_epochs": 2, "max_steps": 5}, 2, 5),
        ({"max_epochs": -1}, -1, -1),
        ({"max_steps": -1}, 1000, -1),
        ({"max_steps": 0}, -1, 0),
    ],
)
def test_the_default_limit_applies_only_without_another(given, epochs, steps):
    settings = resolve(**given)
    assert (settings.max_epochs, settings.max_steps) == (epochs, steps)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"min_epochs": 3, "max_epochs": 2}, "min_epochs=3 is more than max_epochs=2"),
        ({"min_steps": 3, "max_steps": 2}, "min_steps=3 is more than max_steps=2"),
        ({"check_val_every_n_epoch": None}, "across epochs"),
        ({"check_val_every_n_epoch": None, "val_check_interval": 0.5}, "across epochs"),
        ({"global_batch_size": 64, "accumulate_grad_batches": 2}, "derives the accumulation"),
        ({"accelerator": "cpu", "devices": [0, 1]}, "devices=2"),
        ({"accelerator": "cpu", "devices": "0,"}, "devices=2"),
        ({"accelerator": "cpu", "devices": -1}, "devices=2"),
        ({"accelerator": "cpu", "precision": "16-mixed"}, "bf16-mixed"),
        ({"accelerator": "cpu", "precision": 16}, "bf16-mixed"),
        ({"barebones": True, "enable_progress_bar": True}, "enable_progress_bar=True"),
        ({"barebones": True, "logger": True, "enable_checkpointing": True}, "logger=True, enable_checkpointing=True"),
        ({"barebones": True, "callbacks": Callback()}, "callbacks="),
        ({"barebones": True, "fast_dev_run": True}, "fast_dev_run=True"),
        ({"barebones": True, "num_sanity_val_steps": 2}, "num_sanity_val_steps=2"),
    ],
)
def test_contradicting_settings_are_refused(given, said):
    with pytest.raises(SettingError, match=said):
        resolve(**given)


def test_overfit_batches_goes_before_the_limits():
    with pytest.warns(UserWarning, match="limit_train_batches and limit_val_batches has no effect"):
        resolve(overfit_batches=2, limit_train_batches=5, limit_val_batches=1.0)


@pytest.mark.parametrize(
    "given",
    [
        {"min_epochs": 3, "max_epochs": -1},
        {"min_epochs": 0, "max_epochs": 0},
        {"check_val_every_n_epoch": None, "val_check_interval": 10},
        {"check_val_every_n_epoch": None, "val_check_interval": "00:00:10:00"},
        {"global_batch_size": 64, "accumulate_grad_batches": 1},
        {"overfit_batches": 0.0, "limit_train_batches": 5},
        {"barebones": True, "enable_progress_bar": False, "logger": False, "callbacks": []},
    ],
)
def test_settings_that_do_not_contradict_are_allowed(given):
    settings = resolve(**given)
    for name in ("check_val_every_n_epoch", "val_check_interval"):
        if given.get(name, "") is None:
            assert getattr(settings, name) is None


def test_settings_of_a_gpu_are_resolved(monkeypatch):
    gpu = device.DeviceKind("cuda", "nccl", device.DistributedType.MULTI_GPU, lambda: 2)
    monkeypatch.setitem(device.KINDS, "cuda", gpu)
    for accelerator in ("auto", "gpu", "cuda"):
        settings = resolve(accelerator=accelerator, precision="16", devices="0, 1")
        assert (settings.precision, settings.devices) == ("16-mixed", (0, 1))
        assert resolve(accelerator=accelerator, devices="-1").devices == -1


def test_an_accelerator_that_is_not_here(monkeypatch):
    monkeypatch.setitem(device.KINDS, "cuda", device.DeviceKind("cuda", None, device.DistributedType.NO, lambda: 0))
    with pytest.raises(SettingError, match="sees no such device"):
        resolve(accelerator="cuda")


def test_callbacks_and_loggers_become_tuples():
    callback, logger, strategy = Callback(), Logger(), DDPStrategy()
    settings = resolve(callbacks=callback, logger=[logger], strategy=strategy)
    assert settings.callbacks == (callback,)
    assert settings.logger == (logger,)
    assert settings.strategy is strategy


def test_fast_dev_run():
    settings = resolve(
        fast_dev_run=3,
        max_epochs=90,
        min_epochs=5,
        max_steps=10**6,
        limit_train_batches=0.5,
        overfit_batches=0,
        val_check_interval=100,
        check_val_every_n_epoch=None,
        logger=True,
        enable_checkpointing=True,
    )
    assert (settings.max_steps, settings.max_epochs, settings.min_epochs) == (3, 1, None)
    limits = [getattr(settings, f"limit_{stage}_batches") for stage in ("train", "val", "test", "predict")]
    assert limits == [3, 3, 3, 3]
    assert (settings.val_check_interval, settings.check_val_every_n_epoch, settings.num_sanity_val_steps) == (1.0, 1, 0)
    assert (settings.logger, settings.enable_checkpointing) == ((), False)
    assert settings.enable_progress_bar


def test_barebones_turns_loggers_callbacks_and_checks_off():
    settings = resolve(barebones=True, max_epochs=2)
    assert settings.logger == settings.callbacks == ()
    assert not any([settings.enable_checkpointing, settings.enable_progress_bar, settings.enable_model_summary])
    assert (settings.log_every_n_steps, settings.num_sanity_val_steps, settings.max_epochs) == (0, 0, 2)


def test_a_clipping_algorithm_without_a_value_warns():
    with pytest.warns(UserWarning, match="no effect"):
        resolve(gradient_clip_algorithm="value")
    assert resolve(gradient_clip_algorithm="value", gradient_clip_val=0.5).gradient_clip_algorithm == "value"


def test_unknown_arguments_are_named_with_the_nearest_or_the_replacement():
    with pytest.raises(SettingError, match=r"max_epoch: unknown \(did you mean max_epochs\?\)"):
        resolve(max_epoch=3)
    with pytest.raises(SettingError) as caught:
        reject_unknown({"plugins": None, "zebra": 1, "max_steps": 2, "epochs": 3, "swa": True})
    assert str(instead_of("Trainer", "plugins")) in str(caught.value)
    assert "zebra: unknown." in str(caught.value)
    assert "use max_epochs=" in str(caught.value)
    assert "StochasticWeightAveraging" in str(caught.value)
    assert "max_steps" not in str(caught.value)


def test_nothing_is_both_taken_and_not():
    assert not INSTEAD["Trainer"].keys() & _CHECKS.keys()
