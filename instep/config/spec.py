"""Make the `LaunchSpec`, which says what to launch, from the settings and the position of this node in the job."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from instep.config.file import FILE_VARIABLE, NO_FILE
from instep.config.layers import Launch
from instep.errors import SettingError, UsageError
from instep.launch.spec import SHUTDOWN_MARGIN_S, LaunchSpec
from instep.state import read_environment
from instep.state.device import find_device_kind, visible
from instep.state.launchers import meeting_url
from instep.utils.env import VARIABLES, as_variables, variable_of
from instep.utils.warn import warn_user


class Node(NamedTuple):
    """Position of one node's agent among the agents of all nodes, and the address at which they connect.

    Args:
        num_nodes: number of nodes in the job.
        node_rank: number of this node, from 0.
        master_addr: address of node 0.
        master_port: port at which the agents connect.
        run_id: name of the job, the same on all nodes.
    """

    num_nodes: int
    node_rank: int
    master_addr: str
    master_port: int
    run_id: str


def started_node(environ: Mapping[str, str] | None = None) -> Node | None:
    """Return this node's position in the job, from the variables of srun or mpirun.

    Args:
        environ: environment variables; None: `os.environ`.

    Returns:
        The position; None if this process is the only agent, or neither srun nor mpirun has started it.

    Raises:
        UsageError: several agents were started on this node.
        SettingError: the processes of mpirun do not know the address of the first one.

    Example:
        >>> step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[1-2]"}
        >>> step |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
        >>> step |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
        >>> started_node(step)
        Node(num_nodes=2, node_rank=1, master_addr='gpu1', master_port=20007, run_id='gpu1:20007')
    """
    environ = os.environ if environ is None else environ
    place = read_environment(environ)
    if place.launcher in ("none", "torchrun", "xla") or place.world_size == 1:
        return None
    if place.local_world_size > 1:
        one = "srun --ntasks-per-node=1" if place.launcher == "slurm" else "mpirun with one process for each node"
        raise UsageError(
            f"{place.launcher} started {place.local_world_size} agents on this node, and each would start all of the "
            f"node's ranks: use {one}, or start the script itself without `instep launch`."
        )
    url = urlsplit(meeting_url(place, environ))
    assert url.hostname is not None
    assert url.port is not None
    return Node(place.num_nodes, place.node_rank, url.hostname, url.port, f"{url.hostname}:{url.port}")


def make_spec(launch: Launch, program: Sequence[str], *, module: bool = False, python: bool = True) -> LaunchSpec:
    """Make the spec that the agent of this machine runs.

    Args:
        launch: settings of the launch.
        program: script and its arguments.
        module: whether the script is the name of a module, as for `python -m`.
        python: whether Python runs the script; otherwise the script is a command of its own.

    Raises:
        SettingError: settings contradict each other, or this machine does not have the devices.
    """
    settings = launch.settings
    node = None if "node_rank" in launch.sources else started_node()
    num_nodes = settings.most_nodes if node is None or "num_nodes" in launch.sources else node.num_nodes
    if node is not None and num_nodes != node.num_nodes:
        raise SettingError(
            f"num_nodes={settings.num_nodes} ({launch.sources['num_nodes']}), but srun or mpirun started one agent on "
            f"each of {node.num_nodes} machines: leave it out, or start as many",
            field="num_nodes",
            got=settings.num_nodes,
        )
    c10d = settings.rdzv_backend == "c10d" or (settings.rdzv_backend is None and settings.least_nodes is not None)
    # A single machine uses neither setting. If they come from MASTER_ADDR and MASTER_PORT, those are another job's.
    master_addr = "127.0.0.1" if num_nodes == 1 else settings.master_addr
    master_port = None if num_nodes == 1 else settings.master_port
    if node is not None:
        master_addr = settings.master_addr if "master_addr" in launch.sources else node.master_addr
        master_port = settings.master_port if "master_port" in launch.sources else node.master_port
    endpoint = settings.rdzv_endpoint
    if c10d and endpoint is None and master_port is not None:
        endpoint = f"{master_addr}:{master_port}"
    if c10d and settings.ray is not None:
        endpoint = settings.ray  # a placeholder, since the address is known only after Ray has found the machines
    _warn_of_unused(launch, num_nodes, c10d)
    nproc = count_ranks(launch, num_nodes)
    if settings.ray is not None and not c10d:
        nproc, num_nodes = nproc * num_nodes, 1  # Ray itself divides all ranks among the machines
    return LaunchSpec(
        nproc,
        tuple(("-m", *program) if module else program if python else program[1:]),
        num_nodes=num_nodes,
        min_nodes=settings.least_nodes,
        node_rank=settings.node_rank if node is None else node.node_rank,
        master_addr=master_addr,
        master_port=master_port,
        rdzv_backend="c10d" if c10d else "static",
        rdzv_endpoint=endpoint,
        rdzv_conf=settings.rdzv_conf,
        run_id=settings.run_id
        or (node.run_id if node else f"instep-{endpoint or master_port}" if num_nodes > 1 else None),
        local_addr=settings.local_addr,
        secret_file=None if settings.job_secret_file is None else Path(settings.job_secret_file).expanduser(),
        max_restarts=settings.max_restarts,
        shutdown_s=settings.grace_period_s + SHUTDOWN_MARGIN_S,
        log_dir=None if settings.log_dir is None else Path(settings.log_dir).expanduser(),
        tee=tuple(settings.tee) if isinstance(settings.tee, list) else settings.tee,
        cpu_affinity=settings.cpu_affinity,
        hang_timeout_s=settings.hang_timeout_s,
        env=rank_environment(launch),
        executable=sys.executable if python else program[0],
        python=python,
    )


def _warn_of_unused(launch: Launch, num_nodes: int, c10d: bool) -> None:
    places = ("master_addr", "master_port", "rdzv_endpoint", "local_addr")
    unused: dict[str, tuple[str, ...]] = {
        "Ray finds the machines": (*places, "node_rank") if launch.settings.ray is not None else (),
        "there is one machine": (*places, "rdzv_conf") if num_nodes == 1 else (),
        "c10d numbers the machines itself": ("node_rank",) if c10d else (),
    }
    for why, names in unused.items():
        given = [f"{name} ({launch.sources[name]})" for name in names if name in launch.sources]
        # Variables in the environment may be meant for other jobs, so there is no warning about them.
        given = [text for text in given if "(environment" not in text]
        if given:
            warn_user(f"without effect, since {why}: {', '.join(given)}")
            return


def rank_environment(launch: Launch) -> dict[str, str]:
    """Return the ranks' environment variables: for the settings that were given, the grace period and the config file.

    Raises:
        SettingError: strategy options are given without a strategy.
    """
    settings, given = launch.settings, launch.given()
    launch.check()
    added = as_variables({name: value for name, value in given.items() if name in VARIABLES})
    # The grace period is always set, since the agent kills the ranks after this time.
    added[variable_of("grace_period_s")] = str(settings.grace_period_s)
    if "strategy" in given and not settings.strategy_options and variable_of("strategy_options") in os.environ:
        # clear the strategy options in the environment, since they are for another strategy
        added[variable_of("strategy_options")] = ""
    # A launch that a rank starts uses the same config file. If there is none, it must not use the default file.
    added[FILE_VARIABLE] = NO_FILE if launch.file is None else str(launch.file.resolve())
    if settings.cpu_threads is not None:
        added["OMP_NUM_THREADS"] = str(settings.cpu_threads)
    if isinstance(settings.devices, tuple):
        added["CUDA_VISIBLE_DEVICES"] = visible(settings.devices)
        added[variable_of("devices")] = ",".join(map(str, settings.devices))
    return {**added, **settings.env}


def count_ranks(launch: Launch, num_nodes: int) -> int:
    """Return the number of ranks on this machine.

    Raises:
        SettingError: the machine does not have so many devices, or the processes do not divide evenly over the
            machines.
    """
    settings = launch.settings
    if settings.num_processes is not None:
        if settings.num_processes % num_nodes:
            raise SettingError(
                f"num_processes={settings.num_processes} ({launch.sources['num_processes']}) do not divide by "
                f"num_nodes={num_nodes}: each machine runs as many. `devices` counts those of one machine.",
                field="num_processes",
                got=settings.num_processes,
            )
        wanted: int | str | tuple[int, ...] = settings.num_processes // num_nodes
    else:
        wanted = settings.devices
    kind = find_device_kind(settings.accelerator)
    if kind.name in ("cpu", "xla"):
        if isinstance(wanted, tuple) or wanted == -1:
            problem = f"{kind.name} processes have no indices and no number that is all: give their number"
            raise SettingError(f"devices={wanted!r}: {problem}", field="devices", got=wanted)
        return 1 if isinstance(wanted, str) else wanted
    here = kind.count()
    if isinstance(wanted, tuple) and kind.name != "cuda":
        problem = f"indices choose cuda devices, and this is {kind.name}: give their number"
    elif here < (max(wanted) + 1 if isinstance(wanted, tuple) else wanted if isinstance(wanted, int) else 0):
        problem = (
            f"this machine has {here} {kind.name} device{'' if here == 1 else 's'}; use them, or --accelerator cpu"
        )
    else:
        return len(wanted) if isinstance(wanted, tuple) else wanted if isinstance(wanted, int) and wanted > 0 else here
    raise SettingError(f"devices={wanted!r}: {problem}", field="devices", got=wanted)
