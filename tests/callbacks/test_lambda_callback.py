from __future__ import annotations

import pytest

from instep.callbacks import Callback, LambdaCallback
from instep.errors import SettingError


def test_functions_become_hooks_of_the_class():
    calls = []
    callback = LambdaCallback(
        setup=lambda trainer, module, stage: calls.append(stage),
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: calls.append(batch_idx),
    )
    callback.setup(None, None, "fit")
    callback.on_train_batch_end(None, None, None, None, 3)
    callback.on_train_end(None, None)
    assert calls == ["fit", 3]
    overridden = [name for name in vars(Callback) if getattr(type(callback), name) is not getattr(Callback, name)]
    assert {"setup", "on_train_batch_end"} <= set(overridden)
    assert "on_train_end" not in overridden
    assert isinstance(callback, LambdaCallback)
    assert callback.state_key == "LambdaCallback"


def test_two_do_not_share_hooks():
    first = LambdaCallback(on_fit_end=lambda trainer, module: 1)
    second = LambdaCallback()
    assert first.on_fit_end(None, None) == 1
    assert second.on_fit_end(None, None) is None


def test_wrong_hooks():
    with pytest.raises(SettingError, match="Did you mean 'on_train_end'"):
        LambdaCallback(on_train_ends=print)
    with pytest.raises(SettingError, match="must be a function"):
        LambdaCallback(on_train_end=3)
