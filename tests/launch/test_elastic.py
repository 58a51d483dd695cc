"""Jobs that lose ranks and nodes, and go on by themselves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.spawn import HANG_S, finish, free_port, start_command
from tests.helpers.warm import warm_python
from tests.launch.elastic_job import SAMPLES
from tests.launch.ways import REPO, SECRET, UNLAUNCHED

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.dist,
    pytest.mark.skipif(sys.platform != "linux", reason="the ranks end with their agent on Linux only"),
]
NODES = {"nproc": 1, "num_nodes": 2, "min_nodes": 1, "max_restarts": 1, "run_id": "job", "rdzv_backend": "c10d"}
# A node that waits looks once a second whether it may join: with a shorter last call a busy one misses the next round.
QUICK = {"join_timeout": "600", "last_call_timeout": "15", "keep_alive_interval": "1", "keep_alive_max_attempt": "6"}


@contextlib.contextmanager
def _agent(folder: Path, spec: dict[str, Any], *args: str, inside: tuple[str, ...] = (), **env: str) -> Iterator[Any]:
    """An agent whose output is in `folder/out`; its process ends with the block."""
    folder.mkdir(exist_ok=True)
    python = sys.executable if inside else warm_python()  # which starts outside, and each rank in a moment
    command = [*inside, python, "-m", "tests.launch.elastic_job", str(folder.parent), json.dumps(spec), *args]
    words = ["sh", "-c", 'out=$1; shift; exec "$@" >"$out" 2>&1', "sh", str(folder / "out"), *command]
    with start_command(words, env={**UNLAUNCHED, **SECRET, "OMP_NUM_THREADS": "1", **env}, cwd=REPO) as process:
        yield process


def _until(there: Callable[[], Any], process: subprocess.Popen[str], what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not there():
        assert process.poll() is None, f"the agent ended with {process.returncode} before {what}"
        assert time.monotonic() < deadline, f"no {what} after {HANG_S} s"
        time.sleep(0.02)  # another process's file or output: there is nothing to wait on


def _lines(folder: Path, name: str) -> list[list[Any]]:
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")] if path.exists() else []


def _check_samples(folder: Path, steps: int) -> None:
    """Of what was done last at each step, over all ranks: every sample once in every whole epoch."""
    done: dict[int, dict[int, tuple[int, list[int]]]] = {}
    for path in folder.glob("steps-*"):
        restart = int(path.name.split("-")[1])
        for step, epoch, numbers in _lines(folder, path.name):
            _, found = done.setdefault(step, {}).setdefault(restart, (epoch, []))
            found += numbers
    assert sorted(done) == list(range(steps))
    epochs: dict[int, list[int]] = {}
    for starts in done.values():
        epoch, numbers = starts[max(starts)]
        epochs.setdefault(epoch, []).extend(numbers)
    for epoch in range(max(epochs)):  # the last one may have been left
        assert sorted(epochs[epoch]) == list(range(SAMPLES)), epoch


def _result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def test_one_of_four_ranks_is_killed_ten_times_and_nothing_is_lost(tmp_path: Path) -> None:
    results = []
    for kills in (0, 10):
        folder = tmp_path / f"kills-{kills}"
        folder.mkdir()
        with _agent(folder / "agent", {"nproc": 4, "max_restarts": 10}, "--kills", str(kills)) as process:
            assert finish(process).returncode == 0, (folder / "agent/out").read_text()
        said = (folder / "agent/out").read_text()
        assert said.count("failed with SIGKILL") == said.count("starting all ranks again") == kills, said
        results.append(_result(folder))
    assert results[1]["digest"] == results[0]["digest"]
    assert [result["restart"] for result in results] == [0, 10]
    _check_samples(tmp_path / "kills-10", 40)


def test_a_node_comes_and_another_is_lost(tmp_path: Path) -> None:
    spec = {**NODES, "rdzv_endpoint": f"localhost:{free_port()}", "rdzv_conf": QUICK}
    how = ("--digits", "--steps", "48", "--hold", "12=go", "--hold", "40=lost")
    with _agent(tmp_path / "a", spec, *how) as first:
        _until(lambda: len(_lines(tmp_path, "steps-0-0")) > 3, first, "step of a job of one node")
        with _agent(tmp_path / "b", spec, *how) as second:
            _until(lambda: "another node has come" in (tmp_path / "a/out").read_text(), first, "second node")
            (tmp_path / "go").touch()
            _until(lambda: len(_lines(tmp_path, "steps-1-1")) > 4, first, "step of a job of two nodes")
            second.kill()
            (tmp_path / "lost").touch()
            assert finish(first).returncode == 0, (tmp_path / "a/out").read_text()
    said = (tmp_path / "a/out").read_text()
    assert "node 1 has gone" in said, said
    assert "restart 1 of 1" in said, said  # that another node came did not count
    result = _result(tmp_path)
    assert result.items() >= {"world": 1, "restart": 2, "steps": 48}.items()
    assert result["accuracy"] > 0.55, "the 9 steps after the loss alone do not come there"
    _check_samples(tmp_path, 48)


def _can_make_networks() -> bool:
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", f"instep-probe-{os.getpid()}"], capture_output=True, check=False)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", f"instep-probe-{os.getpid()}"], check=True)
    return made.returncode == 0


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, with a cable between them."""
    if not _can_make_networks():
        pytest.skip("needs root and `ip netns` to make two hosts")
    names = (f"instep-a-{os.getpid()}", f"instep-b-{os.getpid()}")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for number, name in enumerate(names, 1):
            _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
            for link in ("lo", "cable"):
                _ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def test_a_host_that_is_cut_off_stops_and_the_other_goes_on(tmp_path: Path, two_hosts: tuple[str, str]) -> None:
    spec = {**NODES, "rdzv_endpoint": "10.77.0.1:29400", "rdzv_conf": QUICK}
    how = ("--steps", "60", "--hold", "20=go")
    with contextlib.ExitStack() as stack:
        hosts = []
        for folder, name in zip("ab", two_hosts, strict=True):
            inside = ("ip", "netns", "exec", name)
            agent = _agent(tmp_path / folder, spec, *how, inside=inside, GLOO_SOCKET_IFNAME="cable")
            hosts.append(stack.enter_context(agent))
        _until(lambda: len(_lines(tmp_path, "steps-0-1")) > 4, hosts[0], "step of two hosts")
        _ip("-n", two_hosts[1], "link", "set", "cable", "down")
        (tmp_path / "go").touch()
        codes = [finish(host).returncode for host in hosts]
    first, second = ((tmp_path / name / "out").read_text() for name in "ab")
    assert codes == [0, 1], (first, second)
    assert "did not answer for" in first, first
    assert "this node is cut off" in second, second
    assert _result(tmp_path).items() >= {"world": 1, "restart": 1, "steps": 60}.items()
    _check_samples(tmp_path, 60)
