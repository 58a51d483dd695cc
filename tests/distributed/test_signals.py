"""Signals that come when no agreement will: they are not lost."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instep import Callback
from instep.callbacks import ModelCheckpoint
from instep.distributed import Triggers
from instep.distributed.signals import SignalGuard
from instep.errors import Preempted
from tests.helpers.spawn import run_command
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
        assert trainer.state.stage is None, "detached"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return trainer


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end", "teardown"])
def test_a_signal_after_the_last_agreement_is_delivered_when_fit_ends(
    hook: str, terminations: list[int], tmp_path: Path
):
    trainer = fit(tmp_path, Sends(hook, signal.SIGTERM))
    assert terminations == [signal.SIGTERM]
    assert trainer.global_step == 4
    assert trainer.received_sigterm
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_is_told(number: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    sends = Sends("on_train_batch_end", number)
    with pytest.raises(Preempted):
        fit(tmp_path, sends, callbacks=[sends, ModelCheckpoint()], enable_checkpointing=True, trigger_every=1)
    told = capfd.readouterr().err
    assert told.startswith(f"\nStopping ({number.name}): this step is finished and saved first")
    assert told.count("at once") == 1


TWICE = """
import signal, sys
from pathlib import Path
from instep.callbacks import ModelCheckpoint
from tests.distributed.test_signals import Sends, fit
sends = Sends("second", signal.SIGTERM, signal.SIGUSR1)
sends.on_train_batch_start = lambda trainer, module, batch, batch_idx: sends.second() if batch_idx else None
saver = ModelCheckpoint(every_n_train_steps=int(sys.argv[2]))
fit(Path(sys.argv[1]), sends, callbacks=[sends, saver], enable_checkpointing=True)
"""


@pytest.mark.parametrize("every", [1, pytest.param(9, marks=pytest.mark.campaign)])
def test_a_second_signal_that_ends_the_process_is_told_and_written_down(every: int, tmp_path: Path):
    command = [sys.executable, "-c", TWICE, str(tmp_path), str(every)]
    done = run_command(command, cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGTERM, done
    [folder] = tmp_path.rglob("version_0")
    saved = f"the last checkpoint is {folder}/checkpoints/step-00000001-1" if every == 1 else "there is no checkpoint"
    assert done.stderr.endswith(f"Stopped at once by a second signal, SIGTERM; {saved}.\n")
    said = json.loads((folder / "status.json").read_text())
    assert (said["status"], said["exit_code"], said["signal"]) == ("interrupted", 143, "SIGTERM")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM])
def test_in_a_forked_child_sigterm_ends_and_the_others_say_nothing(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
):
    triggers = Triggers()
    with SignalGuard(triggers):
        child = os.fork()
        if child == 0:  # as a data loader's worker is
            signal.raise_signal(number)
            os._exit(7)  # still here
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (-signal.SIGTERM if number == signal.SIGTERM else 7)
    assert capfd.readouterr().err == ""
