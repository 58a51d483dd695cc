"""Which node this is, where srun or mpirun started one agent on each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from instep.errors import UsageError
from instep.state import read_environment
from instep.state.launchers import meeting_url


class Node(NamedTuple):
    """An agent's place among those of the other nodes.

    Args:
        num_nodes: nodes in the job.
        node_rank: this one's number.
        master_addr: node 0's address.
        master_port: the port where the agents meet.
        run_id: the same on all nodes.
    """

    num_nodes: int
    node_rank: int
    master_addr: str
    master_port: int
    run_id: str


def started_node(environ: Mapping[str, str] | None = None) -> Node | None:
    """This node's place, as srun's or mpirun's variables say it.

    Args:
        environ: the variables; `os.environ` by default.

    Returns:
        The place; None where this process is the only agent, or its place is given by hand.

    Raises:
        UsageError: several agents were started on this node.
        SettingError: MPI's processes were not told where to meet.

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
