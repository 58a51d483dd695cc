from __future__ import annotations

import pickle

import pytest

from instep.callbacks import Callback, LambdaCallback
from instep.callbacks.base import HOOKS
from instep.errors import SettingError
from instep.trainer.hooks import is_overridden


def test_functions_become_hooks_of_a_lambda_callback():
    calls = []
    callback = LambdaCallback(
        setup=lambda trainer, module, stage: calls.append(stage),
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: calls.append(batch_idx),
    )
    callback.setup(None, None, "fit")
    callback.on_train_batch_end(None, None, None, None, 3)
    callback.on_train_end(None, None)
    assert calls == ["fit", 3]
    assert [name for name in HOOKS if is_overridden(callback, name, Callback)] == ["setup", "on_train_batch_end"]
    assert callback.state_key == "LambdaCallback"


def test_lambda_callback_can_be_pickled():
    callback = pickle.loads(pickle.dumps(LambdaCallback(on_fit_end=print)))
    assert callback.on_fit_end is print


def test_two_lambda_callbacks_do_not_share_hooks():
    first = LambdaCallback(on_fit_end=lambda trainer, module: 1)
    second = LambdaCallback()
    assert first.on_fit_end(None, None) == 1
    assert second.on_fit_end(None, None) is None


def test_a_lambda_callback_refuses_unknown_hooks_and_what_is_no_function():
    with pytest.raises(SettingError, match="Did you mean 'on_train_end'"):
        LambdaCallback(on_train_ends=print)
    with pytest.raises(SettingError, match="expected a function"):
        LambdaCallback(on_train_end=3)
