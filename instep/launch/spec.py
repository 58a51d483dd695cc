"""`LaunchSpec`: what one agent runs, for the engine and its parts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from instep.errors import SettingError, UsageError, one_of
from instep.state.environment import read_number

# Seconds from the end of the ranks' grace period until ranks are killed. In this time, ranks end themselves and report
# where in the code they are.
SHUTDOWN_MARGIN_S = 5.0

_RDZV_CONF = (
    *("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "read_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt", "is_host"),
)


@dataclass(frozen=True)
class LaunchSpec:
    """The job of one agent: its ranks, its nodes, and how they connect, restart and end.

    Args:
        nproc: number of ranks on this node.
        command: the arguments after the executable, e.g. `("train.py", "--lr", "0.1")`.
        num_nodes: number of nodes in the job; each node runs one agent.
        node_rank: number of this node; node 0 hosts the rendezvous. Not used with `rdzv_backend="c10d"`, which numbers
            the nodes itself.
        master_addr: address of node 0.
        master_port: port on node 0 where agents connect; needed for more than one node under "static".
        max_restarts: how often all ranks are started again after a failure or a hang. A preempted job is never
            restarted.
        shutdown_s: seconds that the ranks get to save after a signal, or after one of them was preempted.
        run_id: name of the job, the same on all nodes; None: a random name.
        env: further environment variables for the ranks.
        min_nodes: minimum number of nodes with which the job goes on if nodes are lost or late; None: all of
            `num_nodes`. Needs "c10d".
        rdzv_backend: how the agents connect: "static" for a fixed set of numbered nodes, "c10d" for any nodes that
            join.
        rdzv_endpoint: `HOST:PORT` where the agents connect under "c10d"; HOST is one of the nodes.
        rdzv_conf: torchrun's settings of the rendezvous under "c10d", such as `join_timeout` and `last_call_timeout`.
        local_addr: address of this node for the other nodes under "c10d"; None: its address on the network of
            `rdzv_endpoint`.
        secret_file: file of mode 0600 with the secret by which the agents of several nodes recognize each other; None:
            the one in INSTEP_JOB_SECRET or INSTEP_JOB_SECRET_FILE.
        log_dir: folder for the ranks' output: `<run id>_.../attempt_<i>/<local rank>/stdout.log` and `stderr.log`.
        tee: with `log_dir`: also print the output, each line with its rank; True, or a list of ranks on this node.
        cpu_affinity: whether each rank gets its own share of the machine's cores. The cores of a rank belong to one
            NUMA node.
        hang_timeout_s: seconds without a step after which a rank counts as hung; None: never.
        executable: program that is run; by default this Python.
        python: whether `executable` is a Python interpreter.

    Example:
        >>> spec = LaunchSpec(nproc=2, command=("train.py", "--lr", "0.1"), max_restarts=3, hang_timeout_s=600.0)
        >>> spec.nproc, spec.num_nodes, spec.rdzv_backend
        (2, 1, 'static')
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
    min_nodes: int | None = None
    rdzv_backend: Literal["static", "c10d"] = "static"
    rdzv_endpoint: str | None = None
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    secret_file: Path | None = None
    log_dir: Path | None = None
    tee: bool | tuple[int, ...] = False
    cpu_affinity: bool = False
    hang_timeout_s: float | None = None
    executable: str = sys.executable
    python: bool = True

    def __post_init__(self) -> None:
        for name, low in (("nproc", 1), ("num_nodes", 1), ("node_rank", 0), ("max_restarts", 0), ("shutdown_s", 0)):
            got = getattr(self, name)
            if got < low:
                raise SettingError(f"{name}={got} must be at least {low}", field=name, got=got)
        if self.rdzv_backend not in ("static", "c10d"):
            raise one_of("rdzv_backend", self.rdzv_backend, ("static", "c10d"))
        if self.node_rank >= self.num_nodes:
            raise SettingError(
                f"node_rank={self.node_rank} is not one of num_nodes={self.num_nodes}; nodes are numbered from 0",
                field="node_rank",
                got=self.node_rank,
            )
        if self.rdzv_backend == "c10d":
            self._check_elastic()
        else:
            self._check_static()
        if not self.command and self.python:
            raise SettingError("command is empty: give the arguments that follow the executable", field="command")
        if self.tee is not False and self.log_dir is None:
            raise SettingError("tee prints what goes into log_dir: give log_dir, or leave tee out", field="tee")
        if self.hang_timeout_s is not None and self.hang_timeout_s <= 0:
            raise SettingError(
                f"hang_timeout_s={self.hang_timeout_s} must be more than 0 seconds",
                field="hang_timeout_s",
                got=self.hang_timeout_s,
            )

    def _check_static(self) -> None:
        if self.num_nodes > 1 and self.master_port is None:
            raise SettingError(
                f"num_nodes={self.num_nodes} needs master_port: a free port of {self.master_addr}, equal on all nodes",
                field="master_port",
            )
        for name in ("min_nodes", "rdzv_endpoint", "rdzv_conf"):
            if getattr(self, name):
                raise SettingError(f'{name} needs rdzv_backend="c10d"', field=name, got=getattr(self, name))

    def _check_elastic(self) -> None:
        for name, value in self.rdzv_conf.items():
            if name not in _RDZV_CONF:
                raise one_of("rdzv_conf", name, _RDZV_CONF)
            if not value.isdecimal():
                what = f"rdzv_conf: {name}={value!r} must be a whole number (seconds, attempts, or 0 and 1)"
                raise SettingError(what, field="rdzv_conf", got=value)
        if self.min_nodes is not None and not 1 <= self.min_nodes <= self.num_nodes:
            raise SettingError(
                f"min_nodes={self.min_nodes} must be 1 to num_nodes={self.num_nodes}",
                field="min_nodes",
                got=self.min_nodes,
            )
        if self.num_nodes > 1 and (self.rdzv_endpoint is None or self.run_id is None):
            missing = "rdzv_endpoint" if self.rdzv_endpoint is None else "run_id"
            raise SettingError(
                f'num_nodes={self.num_nodes} with rdzv_backend="c10d" needs {missing}, the same on all nodes: '
                "rdzv_endpoint is HOST:PORT of one of the nodes, run_id a name that no other job uses there",
                field=missing,
            )


def spec_for_nodes(
    nproc: int,
    num_nodes: int,
    command: tuple[str, ...],
    env: Mapping[str, str] | None = None,
    grace_period_s: float = 30.0,
) -> LaunchSpec:
    """Make the `LaunchSpec` of this node's agent, for a program that the user starts once on each node.

    With several nodes, the environment must contain this node's rank and the address of node 0: `NODE_RANK`,
    `MASTER_ADDR` and `MASTER_PORT`, as for torchrun.

    Args:
        nproc: number of ranks on each node.
        num_nodes: number of nodes in the job.
        command: the arguments after the Python executable.
        env: further environment variables for the ranks.
        grace_period_s: seconds that the ranks have to save after a signal.

    Returns:
        The spec.

    Raises:
        UsageError: there are several nodes, and a variable is missing.

    Example:
        >>> spec_for_nodes(nproc=4, num_nodes=1, command=("train.py",)).nproc
        4
    """
    shutdown_s = grace_period_s + SHUTDOWN_MARGIN_S
    if num_nodes == 1:
        return LaunchSpec(nproc, command, shutdown_s=shutdown_s, env=env or {})
    if missing := [name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise UsageError(
            f"num_nodes={num_nodes}: start the program once on each node with NODE_RANK, MASTER_ADDR and MASTER_PORT "
            f"in the environment, or under torchrun; {', '.join(missing)} is missing."
        )
    return LaunchSpec(
        nproc,
        command,
        num_nodes=num_nodes,
        node_rank=read_number(os.environ, "NODE_RANK"),
        master_addr=os.environ["MASTER_ADDR"],
        master_port=read_number(os.environ, "MASTER_PORT", high=65535),
        shutdown_s=shutdown_s,
        run_id=f"instep-{os.environ['MASTER_PORT']}",
        env=env or {},
    )
