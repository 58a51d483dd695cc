from __future__ import annotations

import subprocess
import sys

import pytest

import instep.callbacks
from instep.callbacks import Callback
from instep.callbacks.base import HOOKS


def test_every_hook_of_lightning_is_there_with_its_arguments():
    theirs = pytest.importorskip("lightning.pytorch.callbacks", reason="needs lightning").Callback
    import inspect

    names = {name for name in vars(theirs) if name in ("setup", "teardown") or name.startswith("on_")}
    assert set(HOOKS) == names
    for name in names:
        ours = list(inspect.signature(getattr(Callback, name)).parameters)
        other = list(inspect.signature(getattr(theirs, name)).parameters)
        assert [{"module": "pl_module"}.get(parameter, parameter) for parameter in ours] == other, name


def test_every_hook_does_nothing():
    import inspect

    callback = Callback()
    for name in HOOKS:
        arguments = [None] * len(inspect.signature(getattr(callback, name)).parameters)
        assert getattr(callback, name)(*arguments) is None


def test_state_key_is_the_classs_name():
    class Mine(Callback):
        pass

    assert Mine().state_key.endswith("Mine")
    assert Mine().state_dict() == {}
    assert Mine.monitoring is False


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
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
