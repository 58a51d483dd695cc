from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest

from instep.errors import MissingPackageError, SettingError
from instep.state import ProcessEnvironment, read_environment
from instep.state.launchers import meeting_url
from tests.helpers.spawn import finish, free_port, start_command
from tests.helpers.warm import warm_python

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_RUN_ID": "none",
}
# What a script of `sbatch --nodes=3 --ntasks=5` sees, and what srun adds and changes in its fourth task.
SBATCH = {
    "SLURM_JOB_ID": "4012",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "5",
    "SLURM_NNODES": "3",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_NODELIST": "gpu[07-08,11]",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
SRUN = {
    **SBATCH,
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MVAPICH = {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items()}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INTEL_MPI = {**MPICH, "I_MPI_ROOT": "/opt/intel/mpi"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_without_variables_a_process_is_alone() -> None:
    assert read_environment({}) == ProcessEnvironment()
    assert read_environment({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == ProcessEnvironment()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, ProcessEnvironment(5, 1, 8, 4, 1, 2, "torchrun", 3)),
        (SRUN, ProcessEnvironment(3, 1, 5, 2, 1, 3, "slurm")),
        ({**SRUN, "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"},
         ProcessEnvironment(4, 0, 5, 1, 2, 3, "slurm")),
        (OPEN_MPI, ProcessEnvironment(3, 1, 4, 2, 1, 2, "openmpi")),
        (MVAPICH, ProcessEnvironment(3, 1, 4, 2, 1, 2, "mvapich")),
        (MPICH, ProcessEnvironment(3, 1, 4, 2, 1, 2, "mpich")),
        (INTEL_MPI, ProcessEnvironment(3, 1, 4, 2, 1, 2, "intelmpi")),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, ProcessEnvironment(launcher="openmpi")),
    ],
)  # fmt: skip
def test_each_launchers_variables_are_read_and_nothing_is_written(
    environ: dict[str, str], expected: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_environment(environ) == expected
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI_", "PMIX_"))]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert read_environment() == expected
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, ProcessEnvironment(launcher="torchrun")),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, ProcessEnvironment(1, 1, 2, 2, launcher="torchrun")),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            ProcessEnvironment(3, 1, 4, 2, 1, 2, "torchrun"),
        ),
    ],
)
def test_variables_set_by_hand_are_completed(environ: dict[str, str], expected: ProcessEnvironment) -> None:
    assert read_environment(environ) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": None}, "RANK is not set"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"RANK": "8"}, "RANK=8 must be from 0 to 7"),
        ({"RANK": "one"}, "RANK='one' is not an integer"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 must be from 0 to 3"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 must be at least 1"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 must be from 1 to 8"),
    ],
)
def test_contradictions_are_errors_that_name_the_variable(change: dict[str, str | None], message: str) -> None:
    environ = {key: value for key, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(SettingError, match=message):
        read_environment(environ)


# Several launchers' variables at once: the innermost wins.


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({**SRUN, **TORCHRUN}, "torchrun"),
        ({**OPEN_MPI, **TORCHRUN}, "torchrun"),
        ({**SRUN, **TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
          "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}, "torchrun"),
        ({**SRUN, **OPEN_MPI}, "openmpi"),
        ({**SRUN, **MPICH}, "mpich"),
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "5"}, "slurm"),  # srun --mpi=pmi2
        ({**SRUN, "WORLD_SIZE": "5"}, "slurm"),  # the job script tells everybody
    ],
)  # fmt: skip
def test_the_innermost_launcher_wins(environ: dict[str, str], launcher: str) -> None:
    assert read_environment(environ).launcher == launcher


@pytest.mark.parametrize(
    "environ",
    [
        SBATCH,
        {**SBATCH, "SLURM_JOB_NAME": "interactive"},
        {**SBATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # the shell of salloc as a step
        {**SRUN, "SLURM_JOB_NAME": "bash", "SLURM_STEP_ID": "0", "SLURM_PTY_PORT": "41000"},  # srun --pty bash
        {**SRUN, "SLURM_JOB_NAME": "bash", "SLURM_STEP_ID": "", "SLURM_STEPID": "0", "SLURM_PTY_PORT": "41000"},
        {**SBATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_a_slurm_job_without_srun_is_one_process(environ: dict[str, str]) -> None:
    assert read_environment(environ) == ProcessEnvironment()


def test_srun_in_an_interactive_job_is_several_processes() -> None:
    for name in ("interactive", "bash"):
        assert read_environment({**SRUN, "SLURM_JOB_NAME": name, "SLURM_STEP_ID": "0"}).world_size == 5


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({**SBATCH, "WORLD_SIZE": "5"}, "RANK is not set"),
        ({**SRUN, "WORLD_SIZE": "1"}, "WORLD_SIZE=1, but slurm started 5 processes"),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "1"}, "torchrun's variables say .* 1, but slurm .* one of 5"),
        ({**SRUN, "OMPI_COMM_WORLD_SIZE": "1"}, "openmpi's variables say .* 1, but slurm .* one of 5"),
        ({**SRUN, "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"}, "mpich's variables say .* 1, but slurm .* one of 5"),
        ({**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "1"}, "torchrun's variables say .* 1, but openmpi .* one of 4"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALNRANKS is not set"),
        (without(SRUN, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"), "SLURM_STEP_NUM_TASKS is not set"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "SLURM_STEP_TASKS_PER_NODE=.* does not add up to .* 5 tasks"),
    ],
)
def test_a_size_above_one_never_comes_out_as_one_process(environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        read_environment(environ)


def test_without_tasks_per_node_they_are_spread_evenly() -> None:
    step = without(SRUN, "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS")
    assert read_environment(step) == ProcessEnvironment(3, 1, 5, 2, 1, 3, "slurm")


# Where they meet.


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu7,gpu8", "gpu7"),
        ("rack[2-3]node[1,4]", "rack2node1"),
        ("n[003,005-010].cluster", "n003.cluster"),
        ("localhost", "localhost"),
    ],
)
def test_slurm_processes_meet_on_the_first_host_at_a_port_of_their_own(nodes: str, host: str) -> None:
    place = ProcessEnvironment(world_size=2, launcher="slurm")
    environ = {"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "1234567", "SLURM_STEP_ID": "0"}
    assert meeting_url(place, environ) == f"tcp://{host}:24567"
    assert meeting_url(place, {**environ, "SLURM_STEP_ID": "1"}) == f"tcp://{host}:24668"
    assert meeting_url(place, {**without(environ, "SLURM_STEP_ID"), "SLURM_STEPID": "1"}) == f"tcp://{host}:24668"
    assert meeting_url(place, {**environ, "MASTER_PORT": "29500"}) == f"tcp://{host}:29500"
    assert meeting_url(place, {**environ, "MASTER_ADDR": "fe80::1"}) == "tcp://[fe80::1]:24567"


def test_processes_of_mpirun_on_one_node_meet_there_at_a_port_of_their_own() -> None:
    environ = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    urls = {meeting_url(read_environment(environ), {**environ, "PMIX_NAMESPACE": name}) for name in ("1", "1", "2")}
    assert len(urls) == 2
    assert all(url.startswith("tcp://127.0.0.1:2") for url in urls)
    named = {**environ, "PMIX_NAMESPACE": "1", "MASTER_PORT": "29500"}
    assert meeting_url(read_environment(named), named) == "tcp://127.0.0.1:29500"
    with pytest.raises(SettingError, match="openmpi started 4 processes, but MASTER_PORT is not set"):
        meeting_url(read_environment(environ), environ)


def test_where_nobody_says_the_address_the_error_says_what_to_set() -> None:
    with pytest.raises(SettingError, match=r"MASTER_ADDR and MASTER_PORT is not set.*-x MASTER_ADDR.*-genv"):
        meeting_url(read_environment(OPEN_MPI), OPEN_MPI)
    with pytest.raises(SettingError, match=r"torchrun started 8 processes, but MASTER_PORT is not set"):
        meeting_url(read_environment(TORCHRUN), {"MASTER_ADDR": "localhost"})


# XLA: without its package, by a stand-in for the parts of its runtime that are asked.


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch_xla", "torch_xla.runtime", "torch_xla.distributed", "torch_xla.distributed.xla_backend"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, value in {"world_size": 8, "global_ordinal": 6, "host_index": 1}.items():
        monkeypatch.setattr(sys.modules["torch_xla.runtime"], name, lambda value=value: value, raising=False)


@pytest.mark.usefixtures("runtime")
def test_xlas_runtime_is_asked_where_its_launcher_started_the_process() -> None:
    environ = {"PJRT_DEVICE": "TPU", "PJRT_LOCAL_PROCESS_RANK": "2", "PJRT_LOCAL_PROCESS_COUNT": "4"}
    place = read_environment(environ)
    assert place == ProcessEnvironment(6, 2, 8, 4, 1, 2, "xla")
    assert meeting_url(place, environ) == "xla://"
    assert read_environment({"PJRT_DEVICE": "TPU"}) == ProcessEnvironment()
    assert read_environment({**environ, **TORCHRUN}).launcher == "torchrun"


def test_a_process_of_xla_needs_its_package() -> None:
    with pytest.raises(MissingPackageError, match=r"pip install 'instep\[xla\]'"):
        read_environment({"PJRT_LOCAL_PROCESS_RANK": "0", "PJRT_LOCAL_PROCESS_COUNT": "4"})


# For real: two processes that only have their launcher's variables.

PROGRAM = """
import os
from instep.state import PartialState
from instep.distributed import gather_object

before = dict(os.environ)
state = PartialState(cpu=True, timeout=300)
print(gather_object((state.process_index, state.local_process_index, state.node_index, state.num_nodes)))
assert dict(os.environ) == before
state.destroy_process_group()
"""


def _slurm(rank: int, port: int) -> dict[str, str]:
    return {
        **SRUN,
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


def _open_mpi(rank: int, port: int) -> dict[str, str]:
    # As two nodes of one process each would have it: only when they meet do they learn that they share a machine.
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


@pytest.mark.dist
@pytest.mark.parametrize(
    ("job", "places"),
    [(_slurm, "[(0, 0, 0, 1), (1, 1, 0, 1)]"), (_open_mpi, "[(0, 0, 0, 1), (1, 0, 0, 1)]")],
)
def test_processes_meet_by_their_launchers_variables(job, places: str, tmp_path: Path) -> None:
    program, port = tmp_path / "program.py", free_port()
    program.write_text(PROGRAM)
    with ExitStack() as stack:
        env = {"PYTHONPATH": str(Path.cwd()), "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            stack.enter_context(start_command([warm_python(), str(program)], env={**env, **job(rank, port)}))
            for rank in range(2)
        ]
        for rank in ranks:
            done = finish(rank)
            assert (done.returncode, done.stdout.strip()) == (0, places), done.stderr
