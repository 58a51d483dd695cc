"""Attributes and actions of a Trainer that callbacks, loggers and modules use."""

from __future__ import annotations

from typing import Any

import pytest

from instep import AcceleratorState, Callback
from instep.errors import UsageError
from tests.trainer.toys import Toy, loader, quiet


def test_the_training_data_is_there_while_fit_runs_only():
    asked: list[int] = []

    class Own(Toy):
        def train_dataloader(self) -> Any:
            asked.append(1)
            return loader()

        def on_train_start(self) -> None:
            assert self.trainer.train_dataloader.num_batches == 4

    trainer = quiet(max_epochs=1)
    assert trainer.train_dataloader is None
    trainer.fit(Own())
    assert trainer.train_dataloader is None
    assert asked == [1]


class Withdraws(Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.withdraw)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == 2

    def withdraw(self, trainer: Any, module: Any) -> None:
        trainer.should_stop = False


def test_an_agreed_stop_cannot_be_taken_back_by_one_rank():
    trainer = quiet(max_epochs=3, trigger_every=1, callbacks=[Withdraws("on_train_start")])
    trainer.fit(Toy(), loader())
    assert trainer.should_stop, "False had no meaning before the stop was asked for"
    trainer.should_stop = False
    assert not trainer.should_stop
    with pytest.raises(UsageError, match="one cannot take that back"):
        quiet(max_epochs=3, trigger_every=1, callbacks=[Withdraws("on_train_end")]).fit(Toy(), loader())


def test_the_state_shows_the_running_strategy() -> None:
    seen: list[object] = []

    class Looking(Toy):
        def on_train_start(self) -> None:
            seen.append(AcceleratorState().plugin)

    trainer = quiet(max_epochs=1)
    trainer.fit(Looking(), loader())
    assert seen == [trainer.strategy]
