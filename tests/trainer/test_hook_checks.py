"""Methods that look like hooks and that nothing calls."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from instep import Callback
from tests.trainer.toys import Toy, loader, quiet


class Foreign:
    """A base of somebody else's."""

    def on_train_epoch_ending(self) -> None:
        pass


def misspelt() -> tuple[Toy, Callback]:
    class Model(Foreign, Toy):
        def on_train_epoch_ends(self) -> None:
            pass

        def on_val_epoch_end(self) -> None:
            pass

        def on_epoch_end(self) -> None:
            pass

        def on_sanity_check_start(self) -> None:
            pass

        def on_button_pressed(self) -> None:
            pass

        def on_train_batch_ended(self) -> None:
            self.calls = [0]

        def on_train_epoch_end(self) -> None:
            [self.on_train_batch_ended() for _ in range(1)]

    class Watcher(Callback):
        def on_train_batch_stop(self, *_: Any) -> None:
            pass

        def on_before_batch_transfer(self, *_: Any) -> None:
            pass

    return Model(), Watcher()


def test_they_are_told_once_with_the_hook_that_was_meant():
    module, watcher = misspelt()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            quiet(max_epochs=1, callbacks=watcher, limit_train_batches=1).fit(module, loader())
    said = [str(it.message) for it in caught if "is not called by anything" in str(it.message)]
    assert said == [
        "Model.on_epoch_end is not called by anything: it is of Lightning 1.x. Use on_train_epoch_end",
        "Model.on_sanity_check_start is not called by anything: only callbacks have this hook",
        "Model.on_train_epoch_ends is not called by anything: did you mean on_train_epoch_end?",
        "Model.on_val_epoch_end is not called by anything: did you mean on_validation_epoch_end?",
        "Watcher.on_before_batch_transfer is not called by anything: only modules have this hook",
        "Watcher.on_train_batch_stop is not called by anything: did you mean on_train_batch_start?",
    ]


@pytest.mark.parametrize("name", ["on_step", "on_click", "on_new_best"])
def test_other_names_are_the_users_own(name: str):
    module = Toy()
    module.__dict__[name] = lambda: None
    quiet(max_epochs=1, limit_train_batches=1).fit(module, loader())
