"""The engine: run a command as N ranks on this machine."""

from __future__ import annotations

from instep.errors import UsageError
from instep.launch.spec import LaunchSpec, spec_for_nodes
from instep.state import read_environment
from instep.state.launchers import MPI

__all__ = ["LaunchSpec", "is_worker", "run", "spec_for_nodes"]


def run(spec: LaunchSpec) -> int:
    """Run a command as `spec.nproc` ranks on this node, and return when all ranks of the job have ended.

    This process becomes the agent of the node. Every rank gets torchrun's variables. SIGINT, SIGTERM, SIGHUP, SIGUSR1
    and SIGUSR2 are passed on to the ranks. The ranks then have `spec.shutdown_s` seconds to save and end; a second
    signal ends this time early. When a rank fails, all other ranks end within seconds, and the traceback of the failed
    rank is printed last. On Linux, the ranks are killed if the agent dies.

    Call this from the main thread, so that signals can be handled.

    Args:
        spec: the command, the ranks and the nodes.

    Returns:
        The exit code for this process: 0 done; 75 preempted (all ranks saved and can be resumed); 76 hung; else 1.

    Raises:
        UsageError: this process is itself a rank of a job.

    Example:
        >>> import sys
        >>> from instep.launch.engine import LaunchSpec, run
        >>> sys.exit(run(LaunchSpec(nproc=2, command=("train.py",))))  # doctest: +SKIP
    """
    here = read_environment()
    # srun or mpirun may have started one agent on each node, and then this process is not a rank.
    agents = here.launcher in ("slurm", *MPI) and here.local_world_size == 1 and here.world_size == spec.num_nodes
    if here.launcher != "none" and not agents:
        raise UsageError("this process is a rank of a running job; a rank does not start ranks of its own")
    # Imported late, since torch.distributed.elastic takes a quarter of a second to import, and ranks never need it.
    from instep.launch.agent import run_agent

    return run_agent(spec)


def is_worker() -> bool:
    """Return True if this process is a rank: of this engine, torchrun, srun or mpirun, or with RANK set by hand.

    Example:
        >>> is_worker()
        False
    """
    return read_environment().launcher != "none"
