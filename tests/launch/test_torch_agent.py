"""What `instep.launch.torch_agent` relies on in torch, of which most is private."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from instep.launch.agent import environment, signals_restored
from instep.launch.spec import LaunchSpec
from instep.launch.torch_agent import TorchAgent, logs
from instep.state.environment import RESTART

OVERRIDDEN = {"_start_workers", "_monitor_workers", "_exit_barrier", "_shutdown"}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Alone(RendezvousHandler):
    """One node that meets itself."""

    use_agent_store = False

    def get_backend(self) -> str:
        return "alone"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 29400))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "run"

    def shutdown(self) -> bool:
        return True


class Recorded:
    """Steps that are written down; one start fails and is repeated."""

    def __init__(self) -> None:
        self.agent: Any = None
        self.seen: list[str] = []
        self.codes: list[list[int]] = []

    @contextmanager
    def starting(self, group: WorkerGroup) -> Iterator[None]:
        assert (group.group_rank, group.group_world_size, type(group.store)) == (0, 1, HashStore)
        self.seen.append(f"start {group.spec.local_world_size}")
        with nullcontext():
            yield

    def monitor(self) -> RunResult:
        processes = self.agent.processes
        codes = [process.wait() for process in processes.by_rank().values()]
        processes.stop_tails()
        self.codes.append(codes)
        self.seen.append("monitor")
        if any(codes):
            self.agent.allow_restarts(1)
            return RunResult(state=WorkerState.FAILED, failures=processes.failures())
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(processes.local))

    def leave(self) -> None:
        self.seen.append("leave")

    def end_ranks(self, signum: signal.Signals) -> None:
        self.seen.append("end")

    def close(self) -> None:
        self.seen.append("close")


def test_four_private_methods_are_changed_and_torch_has_them() -> None:
    own = {name for name, value in vars(TorchAgent).items() if inspect.isfunction(value)} - {"__init__"}
    inherited = {name for base in LocalElasticAgent.__mro__ for name in vars(base)}
    assert own & inherited == OVERRIDDEN
    for name in OVERRIDDEN - {"_exit_barrier"}:
        assert getattr(SimpleElasticAgent, name, None) is not None


@pytest.mark.dist
def test_torchs_agent_takes_the_steps_in_this_order(tmp_path: Path) -> None:
    marker = tmp_path / "started"
    code = f"import pathlib, sys; p = pathlib.Path({str(marker)!r}); there = p.exists(); p.touch(); sys.exit(not there)"
    steps = Recorded()
    workers = WorkerSpec(
        role="rank", local_world_size=1, entrypoint="python", args=("-c", code), rdzv_handler=Alone(), max_restarts=0,
        monitor_interval=0.01,
    )  # fmt: skip
    with environment({RESTART: "0"}), signals_restored(SIGNALS):
        spec = LaunchSpec(1, ("unused",), log_dir=tmp_path / "logs", tee=True)
        steps.agent = TorchAgent(workers, logs(spec, str(tmp_path)), False, steps)
        assert steps.agent.processes is None
        steps.agent.run()
    restart = ["start 1", "monitor", "end", "close"]
    assert steps.seen == [*restart, "start 1", "monitor", "leave", "end", "close"]
    assert steps.codes == [[1], [0]]
    processes = steps.agent.processes
    assert Path(processes.stderr_of(0)).is_file()
    assert processes.error_file(0).endswith("error.json")
    assert (processes.node, processes.local) == (0, {0: 0})


def test_the_home_folder_may_be_short_in_log_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    spec = LaunchSpec(1, ("unused",), run_id="job", log_dir=Path("~/logs"))
    assert Path(logs(spec, "").root_log_dir).parent == tmp_path
