"""Signals that come when no agreement will: they are not lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instep import Callback
from instep.callbacks import ModelCheckpoint
from instep.distributed import Triggers
from instep.errors import Preempted
from instep.trainer.signals import SignalGuard
from tests.trainer.toys import Toy, loader, quiet


class Sends(Callback):
    """Sends signals to this process when a hook is called first, then may raise."""

    def __init__(self, hook: str, *signals: signal.Signals, error: Exception | None = None) -> None:
        left = list(signals)

        def send(*args: Any) -> None:
            while left:
                signal.raise_signal(left.pop())
            if error is not None:
                raise error

        setattr(self, hook, send)


@pytest.fixture
def terminations() -> Iterator[list[int]]:
    """The SIGTERMs that reached the script's own handler."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


def fit(root: Path, callback: Callback, **settings: Any) -> Any:
    trainer = quiet(**{"max_epochs": 1, "callbacks": [callback], "default_root_dir": root, **settings})
    try:
        trainer.fit(Toy(), loader())
    finally:
        assert trainer.state.fn is None, "detached"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return trainer


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end", "teardown"])
def test_a_signal_after_the_last_agreement_is_delivered_when_fit_ends(
    hook: str, terminations: list[int], tmp_path: Path
):
    trainer = fit(tmp_path, Sends(hook, signal.SIGTERM))
    assert terminations == [signal.SIGTERM]
    assert trainer.global_step == 4
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Sends(hook, signal.SIGINT))


def test_a_signal_that_stopped_the_run_is_not_delivered_again(terminations: list[int], tmp_path: Path):
    sends = Sends("on_train_batch_end", signal.SIGTERM)
    with pytest.raises(Preempted):
        fit(tmp_path, sends, callbacks=[sends, ModelCheckpoint()], enable_checkpointing=True, trigger_every=1)
    with pytest.raises(SystemExit):
        fit(tmp_path, Sends("on_train_batch_end", signal.SIGTERM), trigger_every=1)
    assert terminations == []


def test_a_signal_beside_an_error_is_delivered_after_the_error_was_shown(
    terminations: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    with pytest.raises(ValueError, match="as well"):
        fit(tmp_path, Sends("on_train_start", signal.SIGTERM, error=ValueError("as well")))
    assert terminations == [signal.SIGTERM]
    assert "ValueError: as well" in capfd.readouterr().err


def test_a_second_signal_in_teardown_leaves_everything_put_back(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Sends("teardown", signal.SIGINT, signal.SIGINT))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_a_forked_child_ctrl_c_says_nothing_and_sigterm_ends(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
):
    triggers = Triggers()
    with SignalGuard(triggers):
        child = os.fork()
        if child == 0:  # as a data loader's worker is
            signal.raise_signal(number)
            os._exit(7)  # still here
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (7 if number == signal.SIGINT else -signal.SIGTERM)
    assert capfd.readouterr().err == ""
