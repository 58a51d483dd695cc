"""Run a command as N ranks on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from instep.errors import SettingError, UsageError
from instep.launch.command import this_command
from instep.state import read_environment

__all__ = ["LaunchSpec", "is_worker", "run", "spec_for_nodes", "this_command"]


SHUTDOWN_MARGIN_S = 5.0  # over the ranks' grace period, at whose end they end themselves and say where they were


@dataclass(frozen=True)
class LaunchSpec:
    """What one agent runs.

    Args:
        nproc: ranks on this node.
        command: the arguments after the Python executable, e.g. `("train.py", "--lr", "0.1")`.
        num_nodes: nodes in the job; each runs one agent.
        node_rank: this node's number; node 0 hosts the rendezvous.
        master_addr: node 0's address.
        master_port: the port on node 0 where agents meet; needed for more than one node, else a free one is taken.
        max_restarts: how often all ranks are started again after a failure or a hang. A preempted job never is.
        shutdown_s: seconds the ranks get to save after a signal, or once one of them was preempted.
        run_id: the same on all nodes; by default a random one.
        env: more environment variables for the ranks.
    """

    nproc: int
    command: tuple[str, ...]
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    max_restarts: int = 0
    shutdown_s: float = 30.0 + SHUTDOWN_MARGIN_S
    run_id: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, low in (("nproc", 1), ("num_nodes", 1), ("node_rank", 0), ("max_restarts", 0), ("shutdown_s", 0)):
            got = getattr(self, name)
            if got < low:
                raise SettingError(f"{name}={got} must be at least {low}", field=name, got=got)
        if self.node_rank >= self.num_nodes:
            raise SettingError(
                f"node_rank={self.node_rank} is not one of num_nodes={self.num_nodes}; nodes are numbered from 0",
                field="node_rank",
                got=self.node_rank,
            )
        if self.num_nodes > 1 and self.master_port is None:
            raise SettingError(
                f"num_nodes={self.num_nodes} needs master_port: a free port of {self.master_addr}, equal on all nodes",
                field="master_port",
            )
        if not self.command:
            raise SettingError(
                "command is empty: give the arguments that follow the Python executable", field="command"
            )


def run(spec: LaunchSpec) -> int:
    """Be the agent: run the command as `spec.nproc` ranks, and return when all have ended.

    Every rank gets torchrun's variables. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and 2 are passed on to the ranks, which then
    have `spec.shutdown_s` seconds to save and end; a second signal cuts that short. When a rank fails the others end
    within seconds and its traceback is printed last. On Linux the ranks are killed when the agent dies.

    Call it from the main thread, so that signals can be handled.

    Args:
        spec: what to run.

    Returns:
        The exit code for this process: 0 done, 75 preempted (all ranks saved and can be resumed), 76 hung, else 1.

    Raises:
        UsageError: this process is a rank itself.

    Example:
        >>> sys.exit(run(LaunchSpec(nproc=2, command=("train.py",))))  # doctest: +SKIP
    """
    if is_worker():
        raise UsageError("this process is a rank of a running job; a rank does not start ranks of its own")
    # Late: torch.distributed.elastic takes a quarter of a second to import, and ranks never need it.
    from instep.launch.agent import run_agent

    return run_agent(spec)


def is_worker() -> bool:
    """Whether this process is a rank that a launcher started: this engine, torchrun, or RANK and kin set by hand."""
    return read_environment().launcher != "none"


def spec_for_nodes(
    nproc: int,
    num_nodes: int,
    command: tuple[str, ...],
    env: Mapping[str, str] | None = None,
    grace_period_s: float = 30.0,
) -> LaunchSpec:
    """The spec of this node's agent, for a program that is started once on each node.

    With several nodes the environment says who this one is and where they meet: `NODE_RANK`, `MASTER_ADDR` and
    `MASTER_PORT`, as torchrun's users know them.

    Args:
        nproc: ranks on each node.
        num_nodes: nodes in the job.
        command: the arguments after the Python executable.
        env: more environment variables for the ranks.
        grace_period_s: seconds that the ranks have after a signal.
    """
    shutdown_s = grace_period_s + SHUTDOWN_MARGIN_S
    if num_nodes == 1:
        return LaunchSpec(nproc, command, shutdown_s=shutdown_s, env=env or {})
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UsageError(
            f"num_nodes={num_nodes}: start the program once on each node with NODE_RANK, MASTER_ADDR and MASTER_PORT "
            f"in the environment, or under torchrun; {', '.join(missing)} is missing."
        )
    return LaunchSpec(
        nproc,
        command,
        num_nodes=num_nodes,
        node_rank=int(os.environ["NODE_RANK"]),
        master_addr=os.environ["MASTER_ADDR"],
        master_port=int(os.environ["MASTER_PORT"]),
        shutdown_s=shutdown_s,
        run_id=f"instep-{os.environ['MASTER_PORT']}",
        env=env or {},
    )
