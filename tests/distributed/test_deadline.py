"""The end of the grace period, and second signals: real programs that are stuck, in C too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.distributed import signals as deadline
from instep.distributed.signals import Deadline
from instep.trainer import devices
from instep.trainer.settings import resolve
from tests.helpers.spawn import HANG_S, finish, run_command, start_command
from tests.helpers.warm import warm_python

REPO = Path(__file__).parents[2]


def command(root: Path, where: str, grace_s: float) -> list[str]:
    return [warm_python(), "-m", "tests.trainer.stuck", str(root), where, str(grace_s)]


def status(root: Path) -> dict[str, Any]:
    [path] = root.rglob("status.json")
    return json.loads(path.read_text())


def weights(root: Path) -> dict[str, Any]:
    return torch.load(root / "weights-0", weights_only=True)


@pytest.mark.slow
def test_a_process_that_is_stuck_ends_in_time_and_the_run_goes_on(tmp_path: Path) -> None:
    assert run_command(command(tmp_path / "whole", "nowhere", 30), cwd=REPO).returncode == 0
    root = tmp_path / "stuck"
    for where, grace_s, signals in (("C", 0.3, 1), ("Python", 0.3, 1), ("C", float("inf"), 2)):
        with start_command(command(root, where, grace_s), cwd=REPO) as process:
            assert process.stdout is not None
            assert "stuck\n" in process.stdout, "after what a resumed run prints"
            assert status(root)["status"] == "running"
            process.send_signal(signal.SIGTERM)
            if signals == 2:  # another signal is never taken for the same one
                process.send_signal(signal.SIGUSR1)
            done = finish(process)
        if signals == 2 and done.returncode == -signal.SIGTERM:  # both came just before it was stuck
            assert "Stopped at once by a second signal" in done.stderr
            assert status(root)["status"] == "interrupted"
            continue
        assert done.returncode == 1, f"{where} {grace_s} {done}"
        came = "SIGTERM" if signals == 1 or "SIGTERM came" in done.stderr else "SIGUSR1"  # which Python handles first
        assert f"{came} came" in done.stderr
        assert "on_train_batch_end" in done.stderr, "where it was"
        said = status(root)
        assert (said["status"], said["exit_code"], said["signal"], said["global_step"]) == ("failed", 1, came, 3)
        assert [path.name for path in root.rglob("checkpoints/step-*")] == ["step-00000002-1"], "none of the third step"
        assert not list(root.rglob("checkpoints/.saving*"))
    assert run_command(command(root, "nowhere", 30), cwd=REPO).returncode == 0
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(root)[name]), name


@pytest.mark.dist
@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_is_stuck_ends_in_time_with_it(tmp_path: Path) -> None:
    with start_command(command(tmp_path, "waits for the other rank", 2.0), cwd=REPO) as process:
        assert process.stdout is not None
        assert any(line == "stuck\n" for line in process.stdout)
        process.send_signal(signal.SIGTERM)  # the launcher tells both
        done = finish(process)
    assert done.returncode == 1, done
    assert done.stderr.count("SIGTERM came") == 2, done.stderr
    said = status(tmp_path)
    assert (said["status"], said["exit_code"], said["signal"], said["global_step"]) == ("failed", 1, "SIGTERM", 3)
    assert "nothing was saved" in said["error"]
    assert said["checkpoint"].endswith("step-00000002-1")
    assert [path.name for path in tmp_path.rglob("checkpoints/step-*")] == ["step-00000002-1"]


def test_a_deadline_ends_the_process_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, calls = threading.Event(), []
    monkeypatch.setattr(os, "_exit", lambda code: (calls.append(code), ended.set()))
    monkeypatch.setattr(deadline.faulthandler, "dump_traceback_later", lambda *args, **kwargs: None)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        own = Deadline([signal.SIGUSR1], 0.05, lambda name: calls.append(name) or 75)  # type: ignore[func-returns-value]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ended.wait(HANG_S)
        own.close()
        own.close()
        assert calls == ["SIGUSR1", 75]
        other = Deadline([signal.SIGTERM], 0.05, lambda name: 1)
        os.kill(os.getpid(), signal.SIGUSR1)
        other.close()  # not one of its own: it slept
        assert len(calls) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signal.set_wakeup_fd(-1) == -1, "put back"


UNHEARD = """
import os, signal
from instep.distributed import signals as deadline
deadline.AT_ONCE_S = 0.2
own = deadline.Deadline([signal.SIGTERM], 0.1, lambda name: 75)
signal.signal(signal.SIGTERM, lambda number, frame: None)
signal.raise_signal(signal.SIGTERM)
while True:
    os.write(2, b"x" * 65536)
"""


def test_a_process_whose_output_nobody_reads_ends_too() -> None:
    with subprocess.Popen([sys.executable, "-c", UNHEARD], cwd=REPO, stderr=subprocess.PIPE) as process:
        try:
            assert process.wait(HANG_S) == 1
        finally:
            process.kill()


def test_a_child_does_not_wake_its_parent() -> None:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    own = Deadline([signal.SIGUSR1], 0.0, lambda name: 99)
    try:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGUSR1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        own.close()  # this process would have ended
        signal.signal(signal.SIGUSR1, before)


def test_another_ones_descriptor_is_left_alone() -> None:
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender)
    try:
        own = Deadline([signal.SIGUSR1], 30.0, lambda name: 99)
        own.note(signal.SIGUSR1)
        own.close()
        assert signal.set_wakeup_fd(-1) == sender
    finally:
        os.close(sender)
        os.close(receiver)


def test_the_grace_period_ends_before_the_launcher_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INSTEP_AGENT_PID", raising=False)
    assert devices.grace_period(resolve(grace_period_s=100), 0) == 100
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert devices.grace_period(resolve(), 0) == 25
    assert devices.grace_period(resolve(grace_period_s=10), 0) == 10
    with pytest.warns(UserWarning, match=r"=100: ranks have 25 s to save, since torchrun kills its ranks 30 s after"):
        assert devices.grace_period(resolve(grace_period_s=100), 0) == 25
    assert devices.grace_period(resolve(grace_period_s=100), 1) == 25
    monkeypatch.setenv("INSTEP_AGENT_PID", "1")
    assert devices.grace_period(resolve(grace_period_s=100), 0) == 100
    monkeypatch.setenv("INSTEP_GRACE_PERIOD_S", "40")
    assert devices.grace_period(resolve(), 0) == 40
    assert devices.grace_period(resolve(grace_period_s=10), 0) == 10
    with pytest.warns(UserWarning, match=r"=100: ranks have 40 s to save, since they were launched with 40"):
        assert devices.grace_period(resolve(grace_period_s=100), 0) == 40
