from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from instep.utils import process_id
from tests.helpers.spawn import HANG_S


def test_this_process_is_not_gone() -> None:
    assert process_id.is_gone(process_id.this_process()) is False


def test_an_ended_process_is_gone_and_a_running_one_is_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        name = process_id.this_process().replace(f"-{os.getpid()}-", f"-{child.pid}-").rpartition("-")[0]
        running = f"{name}-{process_id._life(child.pid)}"
        assert process_id.is_gone(running) is False
        child.communicate(b"\n", timeout=HANG_S)
    assert process_id.is_gone(running) is True


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc to tell two lives of a process id apart")
def test_a_process_id_given_to_another_process_is_gone() -> None:
    host, pid, _ = process_id.this_process().rsplit("-", 2)
    assert process_id.is_gone(f"{host}-{pid}-0123abcd") is True


def test_other_hosts_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    name = process_id.this_process()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert process_id.is_gone(name) is None
    assert process_id.is_gone("") is None


def test_strange_host_names_make_plain_folder_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "a/b-c@d" + "x" * 300)
    name = process_id.this_process()
    assert "/" not in name
    assert "@" not in name
    assert len(name) < 70
    assert process_id.is_gone(name) is False


def test_a_process_that_the_system_hides_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc with hidepid=2 shows nobody the processes of others."""
    name = process_id.this_process()

    def not_yours(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", not_yours)
    monkeypatch.setattr(process_id, "_life", lambda pid: "00000000")
    assert process_id.is_gone(name) is None
