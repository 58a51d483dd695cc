from __future__ import annotations

import inspect
import os
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from instep.errors import SettingError, UsageError
from instep.launch.agent import job_code
from instep.launch.engine import LaunchSpec, is_worker, run
from instep.launch.prepare import job_environment, secret_of
from instep.launch.rendezvous import ElasticNodes
from instep.state.secret import Secret
from tests.helpers.spawn import HANG_S, Finished, finish, free_port, run_command, start_command, without_greetings
from tests.helpers.warm import warm_python
from tests.launch.ways import SECRET

pytestmark = pytest.mark.dist

HOST = socket.gethostname()

LAUNCHED: dict[str, str | None] = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTEST_CURRENT_TEST"))
HEAD = '''
import os, pathlib, signal, sys, threading
rank = int(os.environ["RANK"])
wait = lambda seconds=1e6: threading.Event().wait(seconds)
say = lambda *words: os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece, unlike print


def meet():
    """Wait until each of two ranks has come here in this start."""
    for there in (rank, 1 - rank):
        file = pathlib.Path(__file__).with_name(f"met-{os.environ['INSTEP_RESTART']}-{there}")
        file.touch() if there == rank else None
        while not file.exists():
            wait(0.01)
'''


Job = Callable[..., Finished]


def _script(folder: Path, rank_code: str) -> str:
    path = folder / "rank.py"
    path.write_text(HEAD + textwrap.dedent(rank_code))
    return str(path)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Job:
    """Runs code as ranks, with the test's own process as the agent."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)

    def run_job(rank_code: str, nproc: int = 2, **spec: Any) -> Finished:
        code = run(LaunchSpec(nproc, (_script(tmp_path, rank_code),), **spec))
        out, err = capfd.readouterr()
        return Finished(code, without_greetings(out), err)

    return run_job


def _agent(folder: Path, rank_code: str, nproc: int = 2, **spec: Any) -> list[str]:
    """A program that is the agent, for tests that send it signals."""
    code = f"""
        import sys
        from instep.launch.engine import LaunchSpec, run
        sys.exit(run(LaunchSpec({nproc}, ({_script(folder, rank_code)!r},), **{spec!r})))
    """
    return [sys.executable, "-c", textwrap.dedent(code)]


def _lines(process: subprocess.Popen[str], pattern: str, count: int, timeout_s: float = HANG_S) -> list[str]:
    """Read the program's stdout until `count` lines match; fails after `timeout_s` seconds."""
    assert process.stdout is not None
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        found: list[str] = []
        while len(found) < count:
            line = process.stdout.readline()
            assert line, f"the output ended with {found} of {count} lines like {pattern!r}"
            if re.search(pattern, line):
                found.append(line.strip())
        return found
    finally:
        timer.cancel()


# --- exit codes -------------------------------------------------------------------------------------------------------


def test_a_job_that_is_done_gives_0_and_the_ranks_their_variables(job: Job) -> None:
    done = job(
        """
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS A_VALUE".split()
        say(__name__, *(os.environ[name] for name in names), os.environ["MASTER_PORT"].isdigit())
        """,
        env={"A_VALUE": "$x ${local_rank}"},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "__main__ 0 0 2 2 127.0.0.1 1 $x ${local_rank} True",
        "__main__ 1 1 2 2 127.0.0.1 1 $x ${local_rank} True",
    ]
    assert done.stderr == ""


@pytest.mark.campaign
def test_programs_that_make_the_process_group_themselves_meet_in_every_start(job: Job) -> None:
    done = job(
        """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        words = [None, None]
        dist.all_gather_object(words, rank)
        if os.environ["INSTEP_RESTART"] == "0":
            sys.exit(rank)
        from instep.distributed import gather_object
        say(words, gather_object({"rank": rank}), os.environ["TORCHELASTIC_USE_AGENT_STORE"])
        """,
        max_restarts=1,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0, 1] [{'rank': 0}, {'rank': 1}] False"] * 2


def test_ranks_find_the_secret_in_a_private_file_and_not_in_their_environment(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRET.items():
        monkeypatch.setenv(name, value)
    done = job(
        """
        path = os.environ["INSTEP_JOB_SECRET_FILE"]
        modes = [oct(os.stat(it).st_mode & 0o777) for it in (path, os.path.dirname(path))]
        say(modes, os.environ.get("INSTEP_JOB_SECRET"), len(open(path).read()))
        """,
    )
    assert done.stdout.splitlines() == ["['0o600', '0o700'] None 64"] * 2
    assert os.environ["INSTEP_JOB_SECRET"] == SECRET["INSTEP_JOB_SECRET"]
    assert not os.environ.keys() & {"INSTEP_JOB_SECRET_FILE", "INSTEP_MEETING_FILE"}


def _secretless(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INSTEP_JOB_SECRET", "INSTEP_JOB_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_the_first_of_several_nodes_makes_a_secret_and_prints_the_line_that_sets_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _secretless(monkeypatch)
    made = secret_of(LaunchSpec(1, ("x.py",), num_nodes=2, master_port=1)).text()
    assert len(made) == 64
    assert f"\nexport INSTEP_JOB_SECRET={made}\n" in capfd.readouterr().err
    assert "INSTEP_JOB_SECRET" not in os.environ
    monkeypatch.setenv("INSTEP_JOB_SECRET", made)
    assert secret_of(LaunchSpec(1, ("x.py",), num_nodes=2, node_rank=1, master_port=1)).text() == made
    assert secret_of(LaunchSpec(1, ("x.py",), num_nodes=2, master_port=1)).text() == made
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"node_rank": 1, "master_port": 1}, "If node 0 has printed a line"),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "h:1", "run_id": "r"}, "To close them, make one"),
    ],
)
def test_other_nodes_without_a_secret_warn_of_what_is_open(
    spec: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _secretless(monkeypatch)
    with pytest.warns(UserWarning, match=rf"no secret: whoever reaches its ports can run code in it.*{says}"):
        assert secret_of(LaunchSpec(1, ("x.py",), num_nodes=2, **spec)).text() == "none"


def test_arguments_arrive_as_they_are(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("a b", "$HOME", "$$", "${local_rank}", "-x")
    assert run(LaunchSpec(1, ("-c", "import sys; print(sys.argv[1:])", *words))) == 0
    assert capfd.readouterr().out.splitlines() == [repr(list(words))]


def test_the_agent_leaves_its_own_process_as_it_was(job: Job) -> None:
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    job("pass", nproc=1, env={"A_VALUE": "1"})
    assert dict(os.environ) == environment
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize(("codes", "expected"), [((75, 75), 75), ((76, 75), 76), ((3, 0), 1), ((75, 0), 75)])
def test_exit_codes_are_kept_apart(job: Job, codes: tuple[int, int], expected: int) -> None:
    done = job(
        f"""
        pid = pathlib.Path(__file__).with_name("pid")
        if rank == 0:
            pid.write_text(str(os.getpid()))
        meet()
        while rank == 1 and pathlib.Path("/proc", pid.read_text()).exists():
            wait(0.01)  # until the agent has seen the first one's code
        sys.exit({codes}[rank])
        """
    )
    assert done.returncode == expected, done.stderr
    assert (f"rank 0 (host {HOST}) failed with exit code {codes[0]};" in done.stderr) == (expected in (1, 76))


def test_after_a_preempted_rank_the_others_get_the_time_to_save_and_nothing_restarts(job: Job) -> None:
    done = job(
        """
        say("started")
        if rank == 1:
            wait(2)
            say("saved")
        sys.exit(75)
        """,
        max_restarts=3,
    )
    assert done.returncode == 75, done.stderr
    assert sorted(done.stdout.split()) == ["saved", "started", "started"]


def test_a_rank_that_never_saves_is_killed_and_the_job_failed(job: Job) -> None:
    done = job("sys.exit(75) if rank == 0 else wait()", shutdown_s=0.5)
    assert done.returncode == 1
    assert "rank 1" in done.stderr
    assert "did not end in its time" in done.stderr


def test_a_failed_job_is_restarted_and_its_ranks_can_meet_again(job: Job) -> None:
    done = job(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        say(f"{attempt}:{int(total)}")
        meet()
        if attempt == "0" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total)
        dist.destroy_process_group()
        """,
        max_restarts=1,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"\d:\d", done.stdout)) == ["0:2", "0:2", "1:2", "1:2"]
    assert "SIGKILL (if nobody sent it: out of memory)" in done.stderr
    assert "restart 1 of 1" in done.stderr


@pytest.mark.parametrize(
    ("first", "last", "killed", "expected"),
    [
        ([], [0, 0], False, 0),
        ([], [75, 75], False, 75),
        ([75], [75, 0], False, 75),
        ([75], [75, 1], False, 1),
        ([75], [75, -9], True, 1),
        ([], [75, -15], False, 1),
        ([76, 1], [76, 1], True, 76),
        ([1], [1, 76], False, 1),
        ([-11], [-11, -15], False, 1),
        ([-10], [-10, 1], False, 1),
    ],
)
def test_the_exit_code_of_a_job_is_made_of_those_of_its_ranks(
    first: list[int], last: list[int], killed: bool, expected: int
) -> None:
    assert job_code(first, last, killed) == expected
    assert job_code(first, last, killed, early=True) == (75 if first == [-10] else expected)


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_failing_rank_ends_the_others_and_its_traceback_comes_last_and_once(job: Job) -> None:
    done = job(
        """
        from instep.health.error_report import report_failures
        report_failures()
        meet()
        if rank == 1:
            raise ValueError("only here")
        wait()
        """
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: only here")
    assert done.stderr.count("Traceback") == 1
    assert f"rank 1 (host {HOST}) failed with exit code 1:\nTraceback" in done.stderr


def test_who_only_says_that_another_rank_failed_is_not_blamed(job: Job) -> None:
    done = job(
        """
        from instep.errors import RemoteError
        from instep.health.error_report import report_failures
        report_failures()
        meet()
        if rank == 0:
            raise RemoteError("saving", rank=1, traceback="...")
        wait(0.3)
        raise ValueError("the cause")
        """,
    )
    assert done.returncode == 1
    assert f"rank 0 (host {HOST}) ended with exit code 1: RemoteError: saving" in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: the cause")
    assert done.stderr.count("Traceback (most recent call last)") == 1


def test_a_rank_without_a_report_prints_for_itself(job: Job) -> None:
    done = job("raise ValueError('plain')", nproc=1)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: plain") == 1
    assert f"rank 0 (host {HOST}) failed with exit code 1; anything it said stands above" in done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("ValueError('mine')", ["instep: rank 1 (host HOST, step 7) failed:", "Traceback", "ValueError: mine"]),
        (
            "RuntimeError('pair.cc: Connection closed by peer')",
            ["instep: rank 1 (host HOST, step 7) ended: RuntimeError: pair.cc: Connection closed by peer"],
        ),
        ("ConnectionError('Connection refused')", ["instep: rank 1 (host HOST, step 7) failed:", "Traceback", "Conn"]),
    ],
)
def test_without_an_agent_a_rank_says_who_it_is(tmp_path: Path, error: str, said: list[str]) -> None:
    code = f"""
        from types import SimpleNamespace
        from instep.health.error_report import report_failures, tell_trainer
        trainer = SimpleNamespace(global_step=7)
        report_failures()
        tell_trainer(lambda: trainer)
        raise {error}
    """
    file = tmp_path / "error.json"
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_ERROR_FILE": str(file)}
    done = run_command([warm_python(), "-c", textwrap.dedent(code)], env=env)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("  ")]
    assert len(lines) == len(said), done.stderr
    assert all(line.startswith(start.replace("HOST", HOST)) for line, start in zip(lines, said, strict=True)), lines
    assert error.split("'")[1] in file.read_text()


# --- signals ----------------------------------------------------------------------------------------------------------

SAVES_ON_SIGNAL = """
import subprocess
got = []
event = threading.Event()
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(signum, lambda signum, frame: got.append(signum))
child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
say("ready")
while not got:
    wait(0.01)
wait(0.5)
say(rank, "got", *got, "child", child.poll())
child.kill()
child.wait()
sys.exit(75)
"""


@pytest.fixture
def _heard() -> Iterator[None]:
    """SIGHUP is not ignored, as it is under nohup, which children inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_heard")
@pytest.mark.parametrize(
    ("sent", "passed_on"),
    [("SIGINT", "SIGINT"), pytest.param("SIGUSR1", "SIGUSR1", marks=pytest.mark.campaign), ("SIGHUP", "SIGTERM")],
)
def test_a_signal_reaches_each_rank_once_and_nothing_below_it(tmp_path: Path, sent: str, passed_on: str) -> None:
    number = getattr(signal, passed_on).value
    with start_command(_agent(tmp_path, SAVES_ON_SIGNAL), env=LAUNCHED) as process:
        _lines(process, "ready", 2)
        process.send_signal(getattr(signal, sent))
        done = finish(process)
    assert sorted(done.stdout.splitlines()) == [f"{rank} got {number} child None" for rank in (0, 1)]
    assert done.returncode == 75, done.stderr
    assert done.stderr.count("passed on") == 1


def test_a_rank_that_dies_of_the_signal_has_not_saved(tmp_path: Path) -> None:
    with start_command(_agent(tmp_path, "say('ready'); wait()"), env=LAUNCHED) as process:
        _lines(process, "ready", 2)
        process.terminate()
        done = finish(process)
    assert done.returncode == 1
    assert "SIGTERM" in done.stderr


def test_ranks_that_die_of_an_announcement_when_they_have_just_started_can_be_run_again(tmp_path: Path) -> None:
    code = "rank or signal.signal(signal.SIGUSR1, lambda *_: None); say('ready'); wait()"  # one has a handler already
    with start_command(_agent(tmp_path, code), env=LAUNCHED) as process:
        _lines(process, "ready", 2)
        process.send_signal(signal.SIGUSR1)
        assert finish(process).returncode == 75


@pytest.mark.slow
def test_a_second_signal_cuts_the_wait_short(tmp_path: Path) -> None:
    stubborn = """
        signal.signal(signal.SIGTERM, lambda *_: say("heard"))
        say("ready")
        while True:
            wait(1)
    """
    with start_command(_agent(tmp_path, stubborn, shutdown_s=100.0), env=LAUNCHED) as process:
        _lines(process, "ready", 2)
        process.terminate()
        _lines(process, "heard", 2)
        process.terminate()
        done = finish(process)
    assert done.returncode == 1
    assert done.stderr.count("did not end in its time") == 2


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    command = _agent(tmp_path, "say('ready'); wait(2)", nproc=1)
    command[2] = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + command[2]
    with start_command(command, env=LAUNCHED) as process:
        _lines(process, "ready", 1)
        process.send_signal(signal.SIGHUP)
        assert finish(process).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_ranks_die_with_their_agent(tmp_path: Path) -> None:
    code = """
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        say("pid", os.getpid())
        wait()
    """
    with start_command(_agent(tmp_path, code), env=LAUNCHED) as process, ExitStack() as stack:
        ranks = [os.pidfd_open(int(line.split()[1])) for line in _lines(process, "pid", 2)]
        for rank in ranks:
            stack.callback(os.close, rank)
        process.kill()
        for rank in ranks:
            ready, _, _ = select.select([rank], [], [], HANG_S)  # readable once the process has ended
            assert ready, "a rank outlived its agent"


# --- several nodes ----------------------------------------------------------------------------------------------------


def test_two_agents_form_one_job_and_restart_together(tmp_path: Path) -> None:
    code = f"""
        here = {str(tmp_path)!r} + f"/began-{{rank}}"
        again = os.path.exists(here)
        open(here, "w").close()
        say("rank", rank, "of", os.environ["WORLD_SIZE"], "node", os.environ["GROUP_RANK"], again)
        meet()
        if not again:
            sys.exit(1) if rank == 1 else wait()
    """
    both = {"num_nodes": 2, "master_port": free_port(), "max_restarts": 1, "run_id": "job"}
    with ExitStack() as stack:
        nodes = []
        for node in (0, 1):
            command = _agent(tmp_path, code, nproc=1, node_rank=node, **both)
            nodes.append(stack.enter_context(start_command(command, env={**LAUNCHED, **SECRET})))
        done = [finish(process) for process in nodes]
    assert [job.returncode for job in done] == [0, 0], done
    assert [job.stdout.splitlines() for job in done] == [
        [f"rank {node} of 2 node {node} {again}" for again in (False, True)] for node in (0, 1)
    ]


def test_the_line_that_the_first_node_prints_lets_the_other_one_in(tmp_path: Path) -> None:
    both = {"num_nodes": 2, "master_port": free_port(), "run_id": "job"}
    code = "say(rank, os.environ['WORLD_SIZE'])"
    none = {**LAUNCHED, "INSTEP_JOB_SECRET": None, "INSTEP_JOB_SECRET_FILE": None}
    with ExitStack() as stack:
        first = stack.enter_context(start_command(_agent(tmp_path, code, nproc=1, node_rank=0, **both), env=none))
        assert first.stderr is not None
        line = next(line for line in first.stderr if line.startswith("export "))
        name, _, value = line.removeprefix("export ").strip().partition("=")
        command = _agent(tmp_path, code, nproc=1, node_rank=1, **both)
        second = stack.enter_context(start_command(command, env={**none, name: value}))
        done = [finish(process) for process in (first, second)]
    assert [job.returncode for job in done] == [0, 0], done
    assert [job.stdout for job in done] == ["0 2\n", "1 2\n"]
    assert all(value not in job.stderr for job in done)


@pytest.mark.campaign
def test_a_node_without_the_secret_of_the_first_one_is_told_how_to_get_it(tmp_path: Path) -> None:
    both = {"num_nodes": 2, "master_port": free_port(), "run_id": "job"}
    none = {**LAUNCHED, "INSTEP_JOB_SECRET": None, "INSTEP_JOB_SECRET_FILE": None}
    with ExitStack() as stack:
        for node in (0, 1):
            command = _agent(tmp_path, "pass", nproc=1, node_rank=node, **both)
            agent = stack.enter_context(start_command(command, env=none))
        done = finish(agent)
    assert done.returncode == 1
    assert "was not signed with this job's secret" in done.stderr
    assert "If node 0 has printed a line" in done.stderr


def _together(folder: Path, code: str, merged: Path, **spec: Any) -> tuple[list[int], str]:
    """Two agents of one rank each that write to one file, as on a terminal; their exit codes and the file."""
    both = {"num_nodes": 2, "master_port": free_port(), "run_id": "job", **spec}
    with ExitStack() as stack:
        nodes = []
        for node in (0, 1):
            command = _agent(folder, code, nproc=1, node_rank=node, **both)
            words = ["sh", "-c", 'out=$1; shift; exec "$@" >>"$out" 2>&1', "sh", str(merged), *command]
            nodes.append(stack.enter_context(start_command(words, env={**LAUNCHED, **SECRET})))
        return [finish(process).returncode for process in nodes], merged.read_text()


def test_a_failure_ends_the_ranks_of_all_nodes_and_its_traceback_comes_last_and_once(tmp_path: Path) -> None:
    code = """
        import pathlib
        from instep.health.error_report import report_failures
        report_failures()
        note = lambda name: pathlib.Path(os.environ["NOTES"], name).touch()
        while rank == 0:
            note("alive")
            wait(0.05)
        while not os.path.exists(os.path.join(os.environ["NOTES"], "alive")):
            wait(0.01)
        raise ValueError("only here")
    """
    codes, said = _together(tmp_path, code, tmp_path / "said", env={"NOTES": str(tmp_path)})
    assert codes == [1, 1], said
    assert said.rstrip().endswith("ValueError: only here"), said
    assert said.count("Traceback") == 1, said
    assert said.count(f"rank 1 (host {HOST}) failed with exit code 1: ValueError: only here; the output of") == 1, said


@pytest.mark.campaign
def test_agents_count_restarts_together(tmp_path: Path) -> None:
    code = """
        say("start", *map(os.environ.get, ("INSTEP_RESTART", "TORCHELASTIC_RESTART_COUNT", "INSTEP_JOB_ID")))
        meet()
        sys.exit(1) if int(os.environ["INSTEP_RESTART"]) % 2 == rank else wait()
    """
    codes, said = _together(tmp_path, code, tmp_path / "said", max_restarts=1)
    assert codes == [1, 1], said
    starts = [line.split() for line in said.splitlines() if line.startswith("start")]
    assert sorted(start[1:3] for start in starts) == [["0", "0"]] * 2 + [["1", "1"]] * 2, said
    assert len({start[3] for start in starts}) == 1, said


# --- output, cores, programs ------------------------------------------------------------------------------------------


def test_output_goes_to_files_and_with_tee_to_the_console_too(job: Job, tmp_path: Path) -> None:
    done = job(
        """
        say("out", rank, os.environ["INSTEP_RESTART"])
        os.write(2, f"err {rank}\\n".encode())
        meet()
        sys.exit(os.environ["INSTEP_RESTART"] == "0" and rank == 1)
        """,
        log_dir=tmp_path / "logs",
        tee=(1,),
        run_id="job",
        max_restarts=1,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[rank 1]: out 1 0", "[rank 1]: out 1 1"]
    assert done.stderr.count("[rank 1]: err 1") == 2
    assert "err 0" not in done.stderr
    (run_folder,) = (tmp_path / "logs").glob("job_*")
    for restart in (0, 1):
        for rank in (0, 1):
            files = run_folder / f"attempt_{restart}/{rank}"
            assert (files / "stdout.log").read_text() == f"out {rank} {restart}\n"
            assert (files / "stderr.log").read_text() == f"err {rank}\n"
    assert re.search(r"rank 1 .* failed with exit code 1; what it said is in .*attempt_0/1/stderr.log", done.stderr)


@pytest.mark.skipif(sys.platform != "linux", reason="pinning is Linux's")
def test_each_rank_gets_its_share_of_the_cores(job: Job) -> None:
    mine = os.sched_getaffinity(0)
    done = job("say(*sorted(os.sched_getaffinity(0)))", cpu_affinity=True)
    shares = [set(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(shares) == 2
    assert set.union(*shares) <= mine
    assert len(mine) < 2 or all(len(share) < len(mine) for share in shares)


def test_a_program_that_is_not_python(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(LaunchSpec(2, ("-c", 'echo "$RANK of $WORLD_SIZE"'), executable="sh", python=False)) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 of 2", "1 of 2"]
    with pytest.raises(SettingError, match="executable='no-such-program' is not a program"):
        run(LaunchSpec(1, (), executable="no-such-program", python=False))


# --- settings ------------------------------------------------------------------------------


def test_only_what_slurm_starts_again_has_slurms_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INSTEP_JOB_ID", raising=False)
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(name, value)

    def named(again: bool, terminal: bool) -> tuple[str, str]:
        monkeypatch.setattr(os, "isatty", lambda file: terminal)
        environment = job_environment(LaunchSpec(1, ("t.py",)), again)
        return environment["INSTEP_JOB_ID"], environment["INSTEP_RESTART"]

    assert named(again=True, terminal=False) == ("slurm-7-0", "2")
    for again, terminal in ((True, True), (False, False)):
        name, restart = named(again, terminal)
        assert (restart, name != "slurm-7-0", name != named(again, terminal)[0]) == ("0", True, True)


def test_a_rank_does_not_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not is_worker()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert is_worker()
    with pytest.raises(UsageError, match="a rank does not start ranks"):
        run(LaunchSpec(nproc=1, command=("x.py",)))


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("nproc", {"nproc": 0}),
        ("node_rank", {"num_nodes": 2, "node_rank": 2, "master_port": 1}),
        ("master_port", {"num_nodes": 2}),
        ("max_restarts", {"max_restarts": -1}),
        ("command", {"command": ()}),
        ("rdzv_backend", {"rdzv_backend": "etcd"}),
        ("min_nodes", {"min_nodes": 1}),
        ("min_nodes", {"min_nodes": 3, "num_nodes": 2, "rdzv_backend": "c10d", "rdzv_endpoint": "h:1", "run_id": "r"}),
        ("rdzv_endpoint", {"num_nodes": 2, "rdzv_backend": "c10d"}),
        ("rdzv_conf", {"rdzv_backend": "c10d", "rdzv_conf": {"join_timeuot": "3"}}),
        ("rdzv_conf", {"rdzv_backend": "c10d", "rdzv_conf": {"join_timeout": "soon"}}),
        ("tee", {"tee": True}),
        ("hang_timeout_s", {"hang_timeout_s": 0.0}),
    ],
)
def test_wrong_settings_are_named(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=field) as caught:
        LaunchSpec(**{"nproc": 1, "command": ("x.py",), **settings})
    assert caught.value.field == field


def test_a_heartbeat_does_not_read_the_source_of_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"rdzv_backend": "c10d", "rdzv_endpoint": f"localhost:{free_port()}", "run_id": "job"}
    spec = LaunchSpec(1, ("x.py",), num_nodes=2, min_nodes=1, rdzv_conf={"last_call_timeout": "1"}, **where)
    monkeypatch.setattr(inspect, "stack", lambda: pytest.fail("tenths of a second for each heartbeat"))
    nodes = ElasticNodes(spec, Secret(b"k" * 64))
    assert nodes.next_rendezvous().world_size == 1
    nodes._handler.shutdown()
