"""A job for SLURM: make the batch script that starts an `instep launch` on each node, and submit it.

The script asks SLURM to send SIGUSR1 before the time limit, to the job's step but not to the script itself. The ranks
save and end with exit code 75, and the script requeues the job. SLURM itself requeues a job if a node fails, or if a
job of higher priority takes its place. A requeued job resumes from its newest checkpoint.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass

from instep.errors import EXIT_PREEMPTED, SettingError, UsageError

_CANNOT_SPLIT = "\n\r\0"
_OWN = ("nodes", "ntasks", "ntasks-per-node", "signal", "requeue", "no-requeue", "open-mode", "array")
_ENDING_S = 15  # seconds that the job needs to end after its ranks have ended
_SECRET = (
    "# By this the job's agents and ranks know each other; srun hands it on.",
    '[ -n "$INSTEP_JOB_SECRET$INSTEP_JOB_SECRET_FILE" ] ||',
    "    export INSTEP_JOB_SECRET=\"$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')\"",
)
_TIME = re.compile(r"\d+(:\d+(:\d+)?)?|\d+-\d+(:\d+(:\d+)?)?|(?i:infinite|unlimited)")


@dataclass(frozen=True)
class BatchJob:
    """A job to submit to SLURM.

    Args:
        command: script with its arguments, or `("-m", "module", ...)`.
        nodes: number of nodes; each node runs one agent.
        gpus: number of GPUs on each node, which is also the number of ranks there if `nproc` is None.
        nproc: number of ranks on each node.
        cpus: number of cores for each rank with its data loader's workers. None: the cluster's default for a GPU; 1 if
            `gpus` is 0.
        options: further options of sbatch, such as `"--partition=long"`.
        launch: options of `instep launch`, such as `"--precision=bf16-mixed"`.
        setup: lines of shell that run first, on the first node, such as `"module load cuda"`.
        signal_s: seconds before the time limit at which the ranks get the signal to save; SLURM may send it a minute
            earlier.
        requeue: whether the script requeues the job after its ranks were preempted, and SLURM may requeue the job when
            a node fails.
        output: path of the output, with sbatch's patterns such as `%j`.
        python: path of the Python interpreter, the same on all nodes.
    """

    command: tuple[str, ...]
    nodes: int = 1
    gpus: int = 0
    nproc: int | None = None
    cpus: int | None = None
    options: tuple[str, ...] = ()
    launch: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    signal_s: int = 120
    requeue: bool = True
    output: str = "slurm-%j.out"
    python: str = sys.executable

    def __post_init__(self) -> None:
        for name, low in (("nodes", 1), ("gpus", 0), ("nproc", 1), ("cpus", 1), ("signal_s", 1)):
            got = getattr(self, name)
            if got is not None and got < low:
                raise SettingError(f"{name}={got} must be at least {low}", field=name, got=got)
        if not self.command:
            raise SettingError("command is empty: give the script", field="command")
        for option in self.options:
            _check_option(option)
        for line in (*self.setup, self.output):
            if any(character in line for character in _CANNOT_SPLIT):
                raise SettingError(f"{line!r} must be one line", got=line)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node."""
        return self.nproc or self.gpus or 1

    def script(self) -> str:
        """Return the batch script."""
        nproc = self.ranks_per_node
        cpus = self.cpus or (None if self.gpus else 1)
        grace_s = max(self.signal_s - _ENDING_S, self.signal_s / 2)
        options = [
            f"--nodes={self.nodes}",
            "--ntasks-per-node=1",
            f"--cpus-per-task={cpus * nproc}" if cpus else "",
            f"--gpus-per-node={self.gpus}" if self.gpus else "",
            f"--signal=USR1@{self.signal_s}",
            "--requeue" if self.requeue else "--no-requeue",
            "--open-mode=append",
            f"--output={self.output}",
            *self.options,  # the user's options come last, since sbatch uses the last one if an option is given twice
        ]
        agent = [self.python, "-m", "instep", "launch", f"--num-nodes={self.nodes}", f"--devices={nproc}"]
        lines = ["#!/bin/bash", *(f"#SBATCH {_quoted(option)}" for option in options if option), "", *self.setup]
        lines += [
            f"export INSTEP_GRACE_PERIOD_S={grace_s:g}  # seconds for saving; then the limit is near",
            *(_SECRET if self.nodes > 1 else ()),
            "",
            "# An agent on each node, with all of the job's cores there; when one has ended the others may save.",
            "srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 \\",
            f"    {shlex.join((*agent, *self.launch, *self.command))}",
            "code=$?",
        ]
        if self.requeue:
            lines += ["# It was asked to stop, has saved, and can go on."]
            lines += [f'[ "$code" -eq {EXIT_PREEMPTED} ] && scontrol requeue "$SLURM_JOB_ID"']
        return "\n".join((*lines, 'exit "$code"', ""))


def submit(job: BatchJob, test_only: bool = False) -> str:
    """Submit a job by sbatch.

    Args:
        job: the job.
        test_only: True: sbatch only says when the job would start. It does not submit the job.

    Returns:
        The job's id, or with `test_only` the answer of sbatch.

    Raises:
        UsageError: sbatch is not installed here, or refuses the job.
    """
    command = ["sbatch", "--parsable", *(["--test-only"] if test_only else [])]
    try:
        done = subprocess.run(command, input=job.script(), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UsageError(
            "sbatch is not installed here: run this on a machine of the cluster from which jobs are submitted, or "
            "write the script with --print and give it to sbatch there."
        ) from None
    if done.returncode:
        raise UsageError(f"sbatch refuses the job: {done.stderr.strip()}")
    # sbatch may print ";" and the name of the cluster after the job's number.
    return done.stderr.strip() if test_only else done.stdout.strip().partition(";")[0]


def check_time(text: str) -> str:
    """Check a time limit, and return it unchanged.

    Raises:
        SettingError: the text is not a time limit in a format of SLURM.
    """
    if not _TIME.fullmatch(text):
        raise SettingError(
            f"time={text!r} is no time limit: give minutes, HH:MM:SS, or DAYS-HH[:MM[:SS]]", field="time", got=text
        )
    return text


def _check_option(option: str) -> None:
    name = option.removeprefix("--").partition("=")[0]
    if not option.startswith("--") or any(character in option for character in _CANNOT_SPLIT):
        raise SettingError(
            f"{option!r} is no option of sbatch: give --name or --name=value", field="options", got=option
        )
    if name in _OWN:
        raise SettingError(
            f"--{name} is set here already, as the whole script depends on it", field="options", got=name
        )


def _quoted(option: str) -> str:
    name, equals, value = option.partition("=")
    return f"{name}{equals}{shlex.quote(value)}" if equals else option
