"""A real SLURM on loopback: munged, slurmctld and two slurmds with folders, ports and a key of their own. Needs root.

Example:

    with serve(tmp_path) as cluster:
        done = cluster.run(["srun", "-n2", "hostname"])
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from tests.helpers.spawn import HANG_S, Finished, free_port, run_command

NODES = 2
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
_CONFIGURATION = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
FirstJobId={first_job}
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why SLURM cannot be started here; None where it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "SLURM's daemons are started as root on Linux only"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    absent = [name for name in _PROGRAMS if which(name, path=path) is None]
    return f"{', '.join(absent)} not installed (Debian: slurmctld, slurmd, munge, slurm-client)" if absent else None


@dataclass(frozen=True)
class Cluster:
    """A running SLURM.

    Args:
        folder: where everything of it lies.
        env: what its commands need.
    """

    folder: Path
    env: Mapping[str, str]

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float = HANG_S,
        cwd: Path | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> Finished:
        """Run a command that needs the cluster."""
        return run_command(argv, env={**self.env, **(env or {})}, timeout_s=timeout_s, cwd=cwd)

    def job(self, job_id: str) -> dict[str, str]:
        """What the controller says of a job, by its own names: `JobState`, `ExitCode`, `Restarts`, ..."""
        told = self.run(["scontrol", "--oneliner", "show", "job", job_id]).stdout
        return {name: value for name, _, value in (word.partition("=") for word in told.split())}

    def wait_for(self, job_id: str, done: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        """Ask until the job is as wanted.

        Raises:
            AssertionError: it was not within the time; the text has the job, and the ends of the daemons' logs.
        """
        deadline = time.monotonic() + HANG_S
        while not done(told := self.job(job_id)):
            if time.monotonic() > deadline:
                raise AssertionError(f"after {HANG_S} s job {job_id} is {told}\n{self.logs()}")
            time.sleep(0.2)  # SLURM tells nobody of a change: it is asked
        return told

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def serve() -> Iterator[Cluster]:
    """Start the cluster; leaving the block cancels its jobs and kills every process of it."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, contextlib.ExitStack() as stack:
        folder, host = Path(name), socket.gethostname()
        ports = [free_port() for _ in range(NODES + 1)]
        nodes = "\n".join(
            f"NodeName=127.0.0.{i + 1} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[i]} CPUs=4 RealMemory=500"
            for i in range(NODES)
        )
        (folder / "state").mkdir()
        configuration = folder / "slurm.conf"
        configuration.write_text(
            _CONFIGURATION.format(
                host=host, controller_port=ports[-1], first_job=ports[-1] + 500, folder=folder, nodes=nodes
            )
        )
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        path = f"{os.environ['PATH']}:/usr/sbin:/usr/bin"
        env = {"SLURM_CONF": str(configuration), "PATH": path}
        own = [f"--{what}={folder}/munge.{ending}" for what, ending in _MUNGE]
        stack.callback(_kill_all, folder)
        stack.enter_context(_daemon(["munged", "--foreground", "--force", *own], env, folder))
        stack.enter_context(_daemon(["slurmctld", "-D", "-c"], env, folder))
        for i in range(NODES):
            stack.enter_context(_daemon(["slurmd", "-D", "-N", f"127.0.0.{i + 1}"], env, folder))
        cluster = Cluster(folder, env)
        deadline = time.monotonic() + HANG_S
        while (states := cluster.run(["sinfo", "-h", "-N", "-o", "%t"]).stdout.split()) != ["idle"] * NODES:
            assert time.monotonic() < deadline, f"the nodes are {states}\n{cluster.logs()}"
            time.sleep(0.2)  # as above
        try:
            yield cluster
        finally:
            cluster.run(["scancel", "--signal=KILL", "--full", "--user=root"])


_MUNGE = (
    ("key-file", "key"),
    ("socket", "socket"),
    ("pid-file", "pid"),
    ("log-file", "log"),
    ("seed-file", "seed"),
)


@contextlib.contextmanager
def _daemon(argv: list[str], env: Mapping[str, str], folder: Path) -> Iterator[None]:
    with open(folder / f"{argv[0]}-{argv[-1]}.out.log".replace("/", "_"), "ab") as log:
        process = subprocess.Popen(
            argv,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0),  # end with this process
        )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(HANG_S)


def _kill_all(folder: Path) -> None:
    """Kill what has the cluster's configuration in its environment: steps and their tasks leave the daemons' groups."""
    mark = f"SLURM_CONF={folder}/slurm.conf".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
