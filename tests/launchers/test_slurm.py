"""SLURM: the batch script, and a real one on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instep.cli.main import main
from instep.errors import SettingError, UsageError
from instep.launchers.slurm import BatchJob, check_time, submit
from tests.helpers import slurm
from tests.helpers.slurm import Cluster
from tests.helpers.spawn import HANG_S
from tests.launch.ways import RAISES, REPO, SECRET, UNLAUNCHED, check_error_was_told, job, same_weights

HELD = Path(__file__).parent.parent / "launch" / "held_job.py"


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def last_lines(script: str) -> list[str]:
    return [line for line in script.splitlines() if line and not line.startswith("#")]


# ---- the script


def test_a_batch_script_starts_one_agent_on_each_node_and_goes_back_into_the_queue() -> None:
    script = BatchJob(("train.py", "--lr", "0.1 x"), nodes=2, gpus=8, python="/py", launch=("--debug",)).script()
    assert script.startswith("#!/bin/bash\n#SBATCH ")
    assert options(script) == [
        "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--signal=USR1@120", "--requeue", "--open-mode=append",
        "--output=slurm-%j.out",
    ]  # fmt: skip
    assert last_lines(script) == [
        "export INSTEP_GRACE_PERIOD_S=105  # seconds for saving; then the limit is near",
        '[ -n "$INSTEP_JOB_SECRET$INSTEP_JOB_SECRET_FILE" ] ||',
        "    export INSTEP_JOB_SECRET=\"$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')\"",
        "srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 \\",
        "    /py -m instep launch --num-nodes=2 --devices=8 --debug train.py --lr '0.1 x'",
        "code=$?",
        '[ "$code" -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"',
        'exit "$code"',
    ]


def test_what_is_asked_for_is_in_the_script() -> None:
    asked = BatchJob(
        ("-m", "train"), nproc=3, cpus=4, signal_s=10, requeue=False, options=("--comment=a 'b'", "--exclusive"),
        setup=("module load cuda",), output="out put/%j",
    )  # fmt: skip
    script = asked.script()
    assert options(script)[2:] == [
        "--cpus-per-task=12", "--signal=USR1@10", "--no-requeue", "--open-mode=append", "--output='out put/%j'",
        "--comment='a '\"'\"'b'\"'\"''", "--exclusive",
    ]  # fmt: skip
    assert "scontrol" not in script
    assert last_lines(script)[:2] == ["module load cuda", last_lines(script)[1]]
    assert "INSTEP_GRACE_PERIOD_S=5 " in script
    assert "--devices=3 -m train\n" in script
    assert BatchJob(("a.py",)).ranks_per_node == 1
    assert "--cpus-per-task=1" in options(BatchJob(("a.py",)).script())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nodes": 0}, "nodes=0 must be at least 1"),
        ({"gpus": -1}, "gpus=-1 must be at least 0"),
        ({"nproc": 0}, "nproc=0 must be at least 1"),
        ({"command": ()}, "command is empty"),
        ({"options": ("partition=x",)}, r"'partition=x' is no option of sbatch"),
        ({"options": ("--comment=x\ntouch /tmp/x",)}, "is no option of sbatch"),
        ({"options": ("--ntasks=4",)}, "--ntasks is set here already"),
        ({"setup": ("a\nb",)}, "must be one line"),
    ],
)
def test_a_wrong_job_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        BatchJob(**{"command": ("train.py",), **wrong})


def test_time_limits_are_slurms() -> None:
    for text in ("90", "90:30", "24:00:00", "2-12", "2-12:30", "2-12:30:15", "UNLIMITED"):
        assert check_time(text) == text
    for text in ("1h", "24:00:00:00", "", "two"):
        with pytest.raises(SettingError, match="is no time limit"):
            check_time(text)


def test_without_sbatch_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"sbatch is not installed here.*--print"):
        submit(BatchJob(("train.py",)))


def test_the_command_prints_the_script_and_passes_options_of_launch_on(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "2", "--gpus", "4", "--time", "1-0", "--sbatch", "partition=long", "--precision", "bf16-mixed"]
    words += ["--strategy", "fsdp", "--strategy-options", "cpu_offload=true", "--env", "A=b c", "--no-debug"]
    assert main(["slurm", *words, "--print", "runs/train.py", "--precision", "of the script"]) == 0
    script = capsys.readouterr().out
    assert options(script)[-3:] == ["--job-name=train", "--time=1-0", "--partition=long"]
    given = '--precision=bf16-mixed --strategy=fsdp \'--strategy-options={"cpu_offload": true}\' \'--env={"A": "b c"}\''
    assert f"--devices=4 {given} --no-debug runs/train.py --precision 'of the script'\n" in script
    assert main(["slurm", *words, "--dry-run", "runs/train.py", "--precision", "of the script"]) == 0
    assert capsys.readouterr().out == script


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--devices 2 train.py", "devices is called --nproc here"),
        ("--num_machines 2 train.py", "num_machines is called --nodes here"),
        ("--time abc train.py", "time='abc' is no time limit"),
        ("--nodes 0 train.py", "nodes=0 must be at least 1"),
        ("nope.py", "there is no script nope.py"),
    ],
)
def test_wrong_words_end_with_2(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["slurm", *words.split()])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert expected in capsys.readouterr().err


def test_the_scripts_own_lines_are_those_of_a_shell(tmp_path: Path) -> None:
    """With stand-ins for srun and scontrol: what they are called with, and the exit code for each of srun's."""
    for name, does in (("srun", 'echo "$@" > srun.txt; exit $CODE'), ("scontrol", 'echo "$@" > scontrol.txt')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    script = BatchJob(("train.py", "$HOME `x`"), setup=("cd .",), python="py").script()
    for code in (0, 1, 75):
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "CODE": str(code)}
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, timeout=HANG_S, check=False)
        assert done.returncode == code
        assert (tmp_path / "srun.txt").read_text().endswith("train.py $HOME `x`\n")
        assert (tmp_path / "scontrol.txt").exists() == (code == 75)
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 7\n"


# ---- a real SLURM


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm.serve() as made:
        yield made


@pytest.fixture(scope="module")
def limited(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A job that waits in its first life until it is asked to stop, ahead of its time limit.

    SLURM looks at time limits every 30 s. So the job is submitted first, and the other tests run meanwhile.
    """
    folder = tmp_path_factory.mktemp("limited")
    words = ["--nodes=2", "--nproc=1", "--time=30", "--signal=120", f"--output={folder}/log.txt", "--json"]
    words += [str(HELD), str(folder / "out.json"), str(folder / "runs"), str(folder / "held")]
    done = instep_slurm(cluster, folder, *words)
    return json.loads(done)["job_id"], folder


def over(job: dict[str, str]) -> bool:
    return job["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "COMPLETING", "REQUEUED")


def instep_slurm(cluster: Cluster, folder: Path, *words: str) -> str:
    done = cluster.run([sys.executable, "-m", "instep", "slurm", *words], cwd=folder, env=UNLAUNCHED)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slurm
@pytest.mark.dist
@pytest.mark.usefixtures("limited")
def test_srun_alone_starts_ranks(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run(
        ["srun", "-N1", "-n2", sys.executable, *job(tmp_path / "out.json")], cwd=tmp_path, env=UNLAUNCHED
    )
    assert done.returncode == 0, done.stderr
    result = same_weights(tmp_path / "out.json")
    assert (result["launcher"], result["world_size"], result["num_nodes"]) == ("slurm", 2, 1)


@pytest.mark.slurm
@pytest.mark.dist
def test_an_error_of_a_rank_of_srun_is_told_and_ends_all(cluster: Cluster, tmp_path: Path) -> None:
    command = ["srun", "-N1", "-n2", sys.executable, *RAISES, str(tmp_path)]
    done = cluster.run(command, cwd=tmp_path, env={**UNLAUNCHED, "PYTHONPATH": str(REPO)})
    check_error_was_told(done, tmp_path)


@pytest.mark.slurm
@pytest.mark.dist
@pytest.mark.usefixtures("limited")
def test_srun_starts_an_agent_on_each_node(cluster: Cluster, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "instep", "launch", "--devices=1", *job(tmp_path / "out.json")]
    done = cluster.run(["srun", "-N2", "--ntasks-per-node=1", *launch], cwd=tmp_path, env={**UNLAUNCHED, **SECRET})
    assert done.returncode == 0, done.stderr
    result = same_weights(tmp_path / "out.json")
    assert (result["launcher"], result["world_size"], result["num_nodes"]) == ("torchrun", 2, 2)
    done = cluster.run(["srun", "-N1", "-n2", *launch], cwd=tmp_path, env=UNLAUNCHED)
    assert "slurm started 2 agents on this node" in done.stderr


@pytest.mark.slurm
def test_sbatch_accepts_the_script_and_refuses_what_it_cannot_run(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = ["--nodes=2", "--time=1-0", "--sbatch", "comment=a 'b c", "--test-only", "train.py"]
    assert "to start at" in instep_slurm(cluster, tmp_path, *words)
    command = [sys.executable, "-m", "instep", "slurm", "--sbatch", "partition=none", "train.py"]
    done = cluster.run(command, cwd=tmp_path)
    assert done.returncode == 1
    assert "instep: sbatch refuses the job: " in done.stderr
    assert "invalid partition" in done.stderr


@pytest.mark.slurm
@pytest.mark.dist
def test_a_job_that_fails_is_not_put_back(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    told = instep_slurm(cluster, tmp_path, "--output=%j.txt", "fails.py")
    job_id = told.split()[2].rstrip(";")
    assert f"output: {job_id}.txt" in told
    ended = cluster.wait_for(job_id, over)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "0")


@pytest.mark.slurm
@pytest.mark.dist
@pytest.mark.slow
def test_at_the_time_limit_a_job_saves_is_put_back_and_goes_on(cluster: Cluster, limited: tuple[str, Path]) -> None:
    job_id, folder = limited
    log = folder / "log.txt"
    cluster.wait_for(job_id, lambda now: len(list((folder / "held").glob("*"))) == 2 or over(now))
    minutes = int(cluster.job(job_id)["RunTime"].split(":")[1]) + 2  # less than two are left then
    change(cluster, job_id, f"TimeLimit={minutes}")
    again = cluster.wait_for(job_id, lambda now: now["Reason"] == "BeginTime" or over(now))
    assert (again["JobState"], again["Restarts"]) == ("PENDING", "1"), log.read_text()
    change(cluster, job_id, "TimeLimit=30")
    # SLURM waits for two minutes otherwise; but a start in the second of the end would be taken for the revoked one.
    change(cluster, job_id, "StartTime=now+4")
    ended = cluster.wait_for(job_id, over)
    assert ended["JobState"] == "COMPLETED", f"{ended}\n{log.read_text()}\n{cluster.logs()}"
    assert same_weights(folder / "out.json")["num_nodes"] == 2
    assert "Stopped by SIGUSR1" in log.read_text()
    assert "Resuming from" in log.read_text()


def change(cluster: Cluster, job_id: str, what: str) -> None:
    done = cluster.run(["scontrol", "update", f"JobId={job_id}", what])
    assert done.returncode == 0, done.stderr
