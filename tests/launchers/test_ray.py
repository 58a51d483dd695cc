"""Jobs on a real Ray cluster of two nodes, both on this machine: one has room for two ranks, one for one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from instep.cli.main import main
from instep.errors import SettingError, UsageError
from instep.launch.engine import LaunchSpec
from instep.launchers.ray import RayLauncher
from tests.helpers.spawn import HANG_S, free_port, start_command
from tests.launch.ways import job, same_weights

ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
QUICK = ("-S", "-c")  # a rank of plain Python


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster."""
    address = f"127.0.0.1:{free_port()}"
    ray = (sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block")
    small = ("--object-store-memory", "80000000", "--disable-usage-stats")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-") as folder:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        head = ("--head", "--port", address.rpartition(":")[2], "--node-ip-address", "127.0.0.1", "--num-cpus", "2")
        with contextlib.ExitStack() as nodes:
            options = (*small, "--include-dashboard", "false", "--temp-dir", folder)
            nodes.enter_context(start_command([*ray, *head, *options]))
            _wait_for(lambda: _answers(address))
            nodes.enter_context(start_command([*ray, "--address", address, "--num-cpus", "1", *small]))
            yield address


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
        return True
    return False


def _wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not true():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


@pytest.mark.ray
@pytest.mark.dist
def test_two_actors_on_two_nodes_train_to_the_same_weights(cluster: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert RayLauncher(cluster, placement="STRICT_SPREAD").run(LaunchSpec(2, job(out))) == 0
    assert same_weights(out)["num_nodes"] == 2


@pytest.mark.ray
@pytest.mark.dist
def test_jobs_on_one_node(cluster: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import ray  # an optional package

    ray.init(cluster, log_to_driver=False)  # a connection that is there already is used, and left
    try:
        _check_places(capfd)
        _check_command(cluster, tmp_path, capfd)
        _check_failure(capfd)
        _check_signal(tmp_path)
        _check_lost_actor(ray, tmp_path, capfd)
        assert ray.is_initialized()
        groups = ray.util.placement_group_table().values()
        assert {group["state"] for group in groups} == {"REMOVED"}
    finally:
        ray.shutdown()


def _run(code: str, **settings: object) -> int:
    return RayLauncher(placement="STRICT_PACK").run(LaunchSpec(2, (*QUICK, code), **settings))  # type: ignore[arg-type]


def _check_places(capfd: pytest.CaptureFixture[str]) -> None:
    os.environ["INSTEP_SOMETHING"] = "travels"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "INSTEP_SOMETHING", "MORE")
    code = f"import os; os.write(1, (' '.join(os.environ[n] for n in {names}) + ' ' + os.getcwd() + '\\n').encode())"
    try:
        assert _run(code, env={"MORE": "more"}) == 0
    finally:
        del os.environ["INSTEP_SOMETHING"]
    printed = sorted(capfd.readouterr().out.splitlines())
    assert printed == [f"{rank} {rank} 2 2 1 travels more {os.getcwd()}" for rank in range(2)]


def _check_command(cluster: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = folder / "out.json"
    assert main(["launch", "--ray", cluster, "--devices", "2", *job(out)]) == 0
    assert same_weights(out)["num_nodes"] == 1
    capfd.readouterr()


def _check_failure(capfd: pytest.CaptureFixture[str]) -> None:
    code = """
import os, time
from instep.health.error_report import report_failures
report_failures()
if os.environ["RANK"] == "1":
    raise ValueError("the first to fail")
time.sleep(1e6)
"""
    assert _run(code) == 1
    said = capfd.readouterr().err
    assert said.count("the first to fail") == 1
    assert said.rstrip().endswith("ValueError: the first to fail")


def _check_signal(folder: Path) -> None:
    code = f"""
import os, signal, sys, pathlib
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
pathlib.Path({str(folder)!r}, "ready-" + os.environ["RANK"]).touch()
while True:
    signal.pause()
"""

    def send() -> None:
        _wait_for(lambda: all((folder / f"ready-{rank}").exists() for rank in range(2)))
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    sender = threading.Thread(target=send)
    sender.start()
    assert _run(code) == 75
    sender.join()
    assert signal.getsignal(signal.SIGTERM) is before


def _check_lost_actor(ray: object, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every rank ends with its actor, and all are placed anew."""
    code = f"""
import os, pathlib, signal
started = pathlib.Path({str(folder)!r}, "pid-" + os.environ["RANK"])
with open({str(folder)!r} + "/jobs", "a") as jobs:
    jobs.write(os.environ["INSTEP_JOB_ID"] + " " + os.environ["INSTEP_RESTART"] + "\\n")
if not started.exists():
    started.write_text(str(os.getpid()))
    signal.pause()
"""

    def kill() -> None:
        _wait_for(lambda: all(_has_text(folder / f"pid-{rank}") for rank in range(2)))
        agent = _parent(int((folder / "pid-0").read_text()))
        os.kill(_parent(agent), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    assert _run(code, max_restarts=1) == 0
    killer.join()
    assert "is lost" in capfd.readouterr().err
    jobs = (folder / "jobs").read_text().split()
    assert len(set(jobs[::2])) == 1
    assert [number > "0" for number in jobs[1::2]] == [False, False, True, True]
    for rank in range(2):
        assert not Path("/proc", (folder / f"pid-{rank}").read_text()).exists()


def _has_text(path: Path) -> bool:
    return path.exists() and path.read_text() != ""  # it is there before it is written


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.ray
def test_what_there_is_no_room_for_is_said(cluster: str) -> None:
    with pytest.raises(UsageError, match=r"asked for 2 ranks with \{'CPU': 8\.0\} each .*: no room after 0\.5 s"):
        RayLauncher(cluster, cpus_per_rank=8.0, timeout_s=0.5).run(LaunchSpec(2, (*QUICK, "")))


@pytest.mark.ray
def test_where_no_cluster_answers_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UsageError, match="no Ray cluster answers at 'nonsense'"):
        RayLauncher("nonsense").run(LaunchSpec(1, (*QUICK, "")))


def test_wrong_settings_are_named() -> None:
    with pytest.raises(SettingError, match="placement"):
        RayLauncher(placement="PILE")
    with pytest.raises(SettingError, match="gpus_per_rank=2"):
        RayLauncher(gpus_per_rank=2)
