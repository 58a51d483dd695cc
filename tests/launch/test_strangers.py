"""Another user of the machine attacks a running job: nothing of theirs may run in a rank or an agent, nor be read.

Root runs the job and `nobody` attacks, from a forked child that has torch loaded and then drops its rights. It gets the
ports that a scan of the machine would find, but only those of this job. Ending the job is not forbidden: neither gloo
nor a TCPStore asks who is there.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import pwd
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from instep.state import messages
from tests.helpers.spawn import Finished, finish, free_port, start_command
from tests.launch.ways import REPO, UNLAUNCHED

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="root only can become another user"),
    pytest.mark.skipif(not hasattr(dist.TCPStore, "list_keys"), reason="a TCPStore of torch 2.9 lists no keys"),
]
LIMIT_S = 180.0
PROBE_S = 10.0
SECRET = "a secret of the test, which nobody knows"
JOB = """
import os, sys, time
from pathlib import Path

from instep.distributed import gather_object
from instep.health.error_report import report_failures
from instep.state import PartialState

report_failures()
folder, late = Path(sys.argv[1]), sys.argv[2].split(",")
rank = os.environ["RANK"]
(folder / f"rank-{rank}").write_text(str(os.getpid()))
while rank in late and not (folder / "attacked").exists():
    time.sleep(0.02)
PartialState()
print("all are here:", gather_object({"rank": rank}), flush=True)
"""
PLACES = ("one", "static", "c10d")
ATTACKS = ("join as torch", "join as instep", "agents")
EVERY = [(place, attack) for place in PLACES for attack in ATTACKS]
FURTHER = pytest.param(*EVERY[4], marks=pytest.mark.campaign)
CHOSEN = EVERY if os.environ.get("INSTEP_STRANGERS_EVERY") else [EVERY[0], FURTHER, EVERY[8]]


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


# --- the attacker -----------------------------------------------------------------------------------------------------


Tell = Callable[[dict[str, Any]], None]


def as_nobody(attack: Callable[[Tell], dict[str, Any]]) -> dict[str, Any]:
    """What a function returns that runs as another user, in a forked child with a deadline."""
    receiving, sending = os.pipe()

    def tell(found: dict[str, Any]) -> None:
        os.write(sending, json.dumps(found).encode() + b"\n")

    child = os.fork()
    if child == 0:
        signal.alarm(int(LIMIT_S))
        try:
            nobody = pwd.getpwnam("nobody")
            os.setgroups([])
            os.setgid(nobody.pw_gid)
            os.setuid(nobody.pw_uid)
            found = attack(tell)
        except BaseException:
            found = {"error": traceback.format_exc()}
        tell(found)
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as answer:
        found = json.loads(answer.read().splitlines()[-1])  # gloo may have ended the attacker, whom a rank surprised
    os.waitpid(child, 0)
    assert "error" not in found, found["error"]
    return found


def _stores(ports: list[int]) -> dict[int, Any]:
    """The ports that are a TCPStore's. To one of gloo's a client would talk for ever."""
    found: dict[int, Any] = {}

    def connect(port: int) -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            found[port] = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PROBE_S))

    threads = [threading.Thread(target=connect, args=(port,), daemon=True) for port in ports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PROBE_S)
    return dict(found)


def attack(how: str, ports: list[int], evil: Path, files: list[str], tell: Tell) -> dict[str, Any]:
    """All that can be tried from outside; what came of it."""
    found: dict[str, Any] = {"ports": ports, "joined": [], "written": [], "tried": [], "read": []}
    for file in files:
        found["tried"].append(file)
        with contextlib.suppress(OSError):
            os.listdir(file) if os.path.isdir(file) else Path(file).read_bytes()
            found["read"].append(file)
    tell(found)
    stores = _stores(ports)
    if stores and how != "agents":  # rank 0 waits there for the other one, or soon will
        _until(lambda: any("instep/0/1" in key for store in stores.values() for key in store.list_keys()), "rank 0")
    keys = {port: sorted(store.list_keys()) for port, store in stores.items()}
    found["keys"] = keys
    for port, store in stores.items():
        if how == "agents":
            for name in (key.lstrip("/") for key in keys[port] if "instep/" not in key):
                pickled = pickle.dumps(Evil(evil))
                store.set(name, base64.b64encode(pickled) if name.startswith("torch.rendezvous.") else pickled)
                found["written"].append(name)
        elif any("instep/0/1" in key for key in keys[port]):
            found["joined"].append(_join(how, store, evil))
    return found


def _join(how: str, store: Any, evil: Path) -> str:
    """Take rank 1's place."""
    try:
        limit = timedelta(seconds=20)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("instep/0/1", store), rank=1, world_size=2, timeout=limit
        )
        group: Any = dist.new_group(backend="gloo")
        if how == "join as torch":
            dist.all_gather_object([None, None], Evil(evil), group=group)
        else:
            messages.exchange(Evil(evil), group)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "as a rank"


# --- the job ----------------------------------------------------------------------------------------------------------


def _listening(pids: list[int]) -> list[int]:
    """The TCP ports at which these processes listen."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(descriptor))
            except OSError:
                continue
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return sorted(
        {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes}
    )


def _files(pids: list[int]) -> list[str]:
    """Where secrets may lie: environments, and all that variables of ours name."""
    found: list[str] = []
    for pid in pids:
        found += [f"/proc/{pid}/environ", f"/proc/{pid}/mem", f"/proc/{pid}/fd"]
        for entry in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0"):
            name, _, value = entry.partition("=")
            path = "/" + value.partition("/")[2]
            if name.startswith("INSTEP_") and os.path.exists(path) and path != "/":
                found += [path, os.path.dirname(path)]
    return sorted(set(found))


def _until(there: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := there()):
        assert time.monotonic() < deadline, f"no {what} after {LIMIT_S} s"
        time.sleep(0.02)  # another process's doing: there is nothing to wait on
    return found


def run_attacked(folder: Path, place: str, how: str) -> tuple[list[Finished], dict[str, Any]]:
    """Run a job of two ranks that is attacked before its last rank joins; how its agents ended, what was done."""
    (folder / "job.py").write_text(JOB)
    port = free_port()
    specs: list[dict[str, Any]] = [{"nproc": 2}]
    if place == "static":
        specs = [{"nproc": 1, "num_nodes": 2, "node_rank": node, "master_port": port, "run_id": "j"} for node in (0, 1)]
    elif place == "c10d":
        endpoint = {"rdzv_backend": "c10d", "rdzv_endpoint": f"localhost:{port}", "run_id": "j", "num_nodes": 2}
        specs = [{"nproc": 1, "min_nodes": 1, "rdzv_conf": {"last_call_timeout": "5"}, **endpoint} for _ in (0, 1)]
    late = "0,1" if how == "agents" else "1"
    command = (str(folder / "job.py"), str(folder), late)
    code = "import sys; from instep.launch.engine import LaunchSpec, run; sys.exit(run(LaunchSpec(**{!r})))"
    env = {**UNLAUNCHED, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "INSTEP_JOB_SECRET": SECRET}
    with ExitStack() as stack:
        agents = [
            stack.enter_context(
                start_command([sys.executable, "-c", code.format({"command": command, **spec})], env=env, cwd=REPO)
            )
            for spec in specs
        ]
        pids = [int(_until(lambda r=r: _text(folder / f"rank-{r}"), f"rank {r}")) for r in (0, 1)]
        pids += [agent.pid for agent in agents]
        ports, files = _listening(pids), _files(pids)
        found = as_nobody(lambda tell: attack(how, ports, folder / "evil", files, tell))
        (folder / "attacked").touch()
        return [finish(agent, LIMIT_S) for agent in agents], found


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(("place", "how"), CHOSEN)
def test_a_stranger_runs_nothing_in_a_rank_or_an_agent_and_reads_no_secret(
    place: str, how: str, tmp_path: Path
) -> None:
    done, found = run_attacked(tmp_path, place, how)
    print(found, *done, sep="\n")
    assert not (tmp_path / "evil").exists(), "the stranger's code has run in the job"
    assert any(file.endswith("/secret") for file in found["tried"]), found
    assert found["read"] == []
    assert SECRET not in str(done)
