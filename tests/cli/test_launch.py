"""`instep launch`: what its words mean, and real jobs that it starts."""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from instep.cli import launch
from instep.cli.main import main, make_parser
from tests.helpers.spawn import finish, free_port, run_command, start_command
from tests.helpers.warm import warm_python
from tests.launch.ways import REPO, SECRET, UNLAUNCHED, job, same_weights

pytestmark = pytest.mark.dist

ASKS = """
import json, sys
from instep import PartialState, Trainer

trainer = Trainer(precision="64-true" if "--exact" in sys.argv else None, logger=False, enable_checkpointing=False)
state = PartialState()
told = {
    "precision": trainer.precision, "accumulate": trainer.accumulate_grad_batches, "accelerator": trainer.accelerator,
    "strategy": type(trainer.strategy).__name__, "options": trainer.strategy.ddp_options, "debug": state.debug,
    "grace": trainer.grace_period_s, "world": trainer.world_size, "arguments": sys.argv[1:],
}
if state.is_main_process:
    print("told " + json.dumps(told), flush=True)
state.destroy_process_group()
sys.exit(75)
"""


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a person's shell: no ranks' variables, no config file."""
    for name in [*UNLAUNCHED, *(name for name in os.environ if name.startswith("INSTEP_"))]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    for name in ("t.py", "train.py", "run.sh", "pack/train.py"):
        (tmp_path / name).touch(0o755)


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Any:
    """What a launch would run."""

    def plan(*words: str) -> dict[str, Any]:
        assert main(["launch", "--dry-run", *words]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)["spec"]

    return plan


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--devices 3 train.py --devices 5 -- x", {"nproc": 3, "command": ["train.py", "--devices", "5", "--", "x"]}),
        ("-m pack.train --module", {"nproc": 1, "command": ["-m", "pack.train", "--module"], "python": True}),
        ("--no-python ./run.sh -m", {"executable": "./run.sh", "command": ["-m"], "python": False}),
        ("--no_python ./run.sh", {"executable": "./run.sh", "command": [], "python": False}),
        ("-- train.py", {"command": ["train.py"]}),
        ("--same_network --quiet -q train.py", {"nproc": 1, "command": ["train.py"]}),
        ("--cpu --num_processes 4 --num_machines 2 --machine_rank 1 --main_process_ip h --main_process_port 5 t.py",
         {"nproc": 2, "num_nodes": 2, "node_rank": 1, "master_addr": "h", "master_port": 5, "rdzv_backend": "static"}),
        ("--nproc_per_node=2 --nnodes=1:3 --rdzv-endpoint=h:5 --rdzv-conf join_timeout=9,is_host=1 --rdzv-id x t.py",
         {"nproc": 2, "num_nodes": 3, "min_nodes": 1, "rdzv_backend": "c10d", "rdzv_endpoint": "h:5", "run_id": "x",
          "rdzv_conf": {"join_timeout": "9", "is_host": "1"}}),
        ("--num-nodes 2 --rdzv-backend c10d --master-addr h --master-port 5 t.py",
         {"min_nodes": None, "rdzv_backend": "c10d", "rdzv_endpoint": "h:5", "run_id": "instep-h:5"}),
        ("--log-dir logs --tee 0,1 --cpu-affinity --max-restarts 3 --hang-timeout-s 9 --grace-period-s 7 t.py",
         {"log_dir": "logs", "tee": [0, 1], "cpu_affinity": True, "max_restarts": 3, "hang_timeout_s": 9.0,
          "shutdown_s": 12.0}),
        ("--config cpu --devices 4 t.py", {"nproc": 4}),
    ],
)  # fmt: skip
def test_launch_options_become_settings(words: str, expected: dict[str, Any], planned: Any) -> None:
    spec = planned(*words.split())
    assert {name: spec[name] for name in expected} == expected
    assert spec["executable"] == expected.get("executable", sys.executable)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--mixed_precision bf16 --gradient_accumulation_steps 2 --use_fsdp --debug",
         {"PRECISION": "bf16", "ACCUMULATE_GRAD_BATCHES": "2", "STRATEGY": "fsdp", "DEBUG": "1"}),
        ("--strategy ddp --strategy-options a=1,b=x --accelerator cpu --no-debug",
         {"STRATEGY": "ddp", "STRATEGY_OPTIONS": '{"a": 1, "b": "x"}', "ACCELERATOR": "cpu", "DEBUG": "0"}),
        ("--precision 32-true", {"PRECISION": "32-true"}),
        ("--hang-timeout-s 9", {"HANG_TIMEOUT_S": "9.0"}),
        ("", {}),
    ],
)  # fmt: skip
def test_launch_passes_its_settings_to_the_ranks(words: str, expected: dict[str, str], planned: Any) -> None:
    env = ["--env", "A=1,2", "--env", "B=", "--env", "A_TOKEN=x"]
    told = planned(*words.split(), *env, "--cpu-threads", "3", "t.py")["env"]
    always = {"GRACE_PERIOD_S": "30.0", "CONFIG_FILE": "none"}
    expected = {f"INSTEP_{name}": value for name, value in {**expected, **always}.items()}
    assert told == {**expected, "A": "1,2", "B": "", "A_TOKEN": "***", "OMP_NUM_THREADS": "3"}


def test_a_file_that_was_declined_is_not_found_by_the_ranks(
    planned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("max_restarts: 1\n")
    monkeypatch.setenv("INSTEP_CONFIG_FILE", str(file))
    assert planned("t.py")["env"]["INSTEP_CONFIG_FILE"] == str(file)
    assert planned("--config", "none", "t.py")["env"]["INSTEP_CONFIG_FILE"] == "none"


def test_what_stands_in_the_environment_is_of_others(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_STRATEGY", "ddp")
    monkeypatch.setenv("INSTEP_STRATEGY_OPTIONS", '{"bucket_cap_mb": 5}')
    assert planned("t.py")["env"]["INSTEP_STRATEGY_OPTIONS"] == '{"bucket_cap_mb": 5}'
    assert planned("--strategy", "fsdp", "t.py")["env"]["INSTEP_STRATEGY_OPTIONS"] == ""
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert (planned("t.py")["master_addr"], planned("t.py")["master_port"]) == ("127.0.0.1", None)
    assert planned("--num-nodes", "2", "t.py")["master_addr"] == "elsewhere"
    step = {"JOB_ID": 7, "STEP_ID": 0, "STEP_NUM_TASKS": 2, "STEP_NUM_NODES": 2, "PROCID": 1, "LOCALID": 0, "NODEID": 1}
    for name, value in {**step, "STEP_NODELIST": "gpu[1-2]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    spec = planned("--devices", "4", "t.py")
    assert (spec["nproc"], spec["num_nodes"], spec["node_rank"], spec["master_addr"]) == (4, 2, 1, "elsewhere")
    monkeypatch.delenv("MASTER_ADDR")
    assert planned("t.py")["master_addr"] == "gpu1"
    assert main(["launch", "--num-nodes", "3", "t.py"]) == 2


def test_a_dry_run_says_where_each_setting_comes_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSTEP_PRECISION", "bf16-mixed")
    monkeypatch.setenv("INSTEP_MAX_RESTARTS", "3")
    assert main(["launch", "--dry-run", "--mixed_precision", "no", "t.py"]) == 0
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert sources == {"precision": "--mixed_precision", "max_restarts": "environment INSTEP_MAX_RESTARTS"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "SCRIPT is missing"),
        ("-m --no-python t.py", "give one of them"),
        ("--fsdp_sharding_strategy 1 t.py", "another launcher's: use --strategy fsdp --strategy-options"),
        ("--zero_stage 2 t.py", "use --strategy deepspeed_stage_2"),
        ("--max-restart 1 t.py", "did you mean --max-restarts?"),
        ("--version t.py", "version is no setting\n"),
        ("nope.py", "there is no script nope.py"),
        ("--dry-run train", "there is no script train (looked from"),
        ("-m pack.nope", "there is no module pack.nope"),
        ("-m nope.train", "there is no module nope.train"),
        ("-m t.inner", "there is no module t.inner"),
        ("--no-python ./nope", "there is no command ./nope"),
        ("--devices 0 t.py", "devices='0': expected at least 1, 'auto'"),
        ("--config nope t.py", "Or give the path of a file"),
        ("--precision bf61 t.py", "--precision: precision='bf61' is not known. Use one of: 32-true"),
        ("--mixed_precision bf61 t.py", "--mixed_precision: precision='bf61'"),
        ("--env A t.py", "argument --env: env='A': expected NAME=VALUE"),
        ("--devices -1 t.py", "cpu processes have no indices and no number that is all"),
        ("--accelerator cuda t.py", "this process sees no such device"),
        ("--num-nodes 2 t.py", "needs master_port"),
        ("--gpu_ids 3 --cpu t.py", "devices=(3,): cpu processes have no indices"),
        ("--num-nodes 2 --num-processes 3 t.py", "num_processes=3 (--num-processes) do not divide by num_nodes=2"),
        ("--config missing/file.yaml t.py", "there is no config file missing/file.yaml"),
        ("--strategy-options a=1 t.py", "are arguments of a strategy, and none is chosen"),
        ("--tee all t.py", "give log_dir"),
    ],
)
def test_wrong_words_end_with_2(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["launch", *words.split()])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert expected in capsys.readouterr().err


def test_a_misspelt_variable_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("INSTEP_PRECISON", "bf16")
    monkeypatch.setenv("INSTEP_OF_MY_OWN", "1")
    assert main(["launch", "--dry-run", "t.py"]) == 0
    said = capsys.readouterr()
    assert said.err == "instep: nobody reads INSTEP_PRECISON (did you mean INSTEP_PRECISION?)\n"
    assert '\n "spec": {\n' in said.out, "for people"


def test_the_guide_names_options_that_are_there() -> None:
    guide = (REPO / "docs" / "scale" / "launching.md").read_text()
    section = guide.partition("## Options of other launchers")[2].partition("```")[0]
    named = set(re.findall(r"`(--[a-z_-]+)", section))
    assert len(named) > 15
    assert named <= make_parser(("launch",), launch)._option_string_actions.keys()


def test_the_digits_have_the_same_weights(tmp_path: Path) -> None:
    launch = ["-m", "instep", "launch", "--cpu", "--devices", "2", *job(tmp_path / "out.json")]
    done = run_command([warm_python(), *launch])
    assert done.returncode == 0, done.stderr
    assert same_weights(tmp_path / "out.json")["world_size"] == 2


@pytest.mark.parametrize("meeting", ["static", "c10d"])
def test_two_machines_train_the_digits_to_the_same_weights(meeting: str, tmp_path: Path) -> None:
    launch = [warm_python(), "-m", "instep", "launch", "--cpu", "--devices=1"]
    port = free_port()
    where = {
        "static": ["--num-nodes=2", "--master-addr=127.0.0.1", f"--master-port={port}"],
        "c10d": ["--num-nodes=2:3", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=1"],
    }[meeting]
    ranks = [[f"--node-rank={node}"] if meeting == "static" else [] for node in (0, 1)]
    with ExitStack() as stack:
        agents = [
            stack.enter_context(start_command([*launch, *where, *rank, *job(tmp_path / "out.json")], env=SECRET))
            for rank in ranks
        ]
        for agent in agents:
            done = finish(agent)
            assert done.returncode == 0, done.stderr
    result = same_weights(tmp_path / "out.json")
    assert (result["world_size"], result["num_nodes"]) == (2, 2)


def test_script_before_command_line_before_file_before_environment(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    file = tmp_path / "instep" / "config.yaml"
    file.parent.mkdir()
    file.write_text(
        "accelerator: cpu\ndebug: true\ndevices: 3\nstrategy: ddp\nstrategy_options: {bucket_cap_mb: 7}\n"
        "precision: 16\n"
        "grace_period_s: 9\nlog_dir: " + str(tmp_path / "logs")
    )
    environment = {
        "INSTEP_ACCUMULATE_GRAD_BATCHES": "4", "INSTEP_PRECISION": "fp8", "INSTEP_STRATEGY": "fsdp",
        "PYTHONPATH": os.pathsep.join((str(tmp_path), str(REPO))),
    }  # fmt: skip
    words = ["--devices", "2", "--precision", "bf16", "--tee", "0", "-m", "asks", "--exact", "-- x"]
    done = run_command([warm_python(), "-m", "instep", "launch", *words], env=environment)
    assert done.returncode == 75, "the job's own exit code"
    (line,) = (line for line in done.stdout.splitlines() if "told " in line)
    assert json.loads(line.partition("told ")[2]) == {
        "precision": "64-true", "accumulate": 4, "accelerator": "cpu", "strategy": "DDPStrategy",
        "options": {"bucket_cap_mb": 7}, "debug": True, "grace": 9.0, "world": 2, "arguments": ["--exact", "-- x"],
    }, done.stderr  # fmt: skip
    logs = [path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")]
    assert sum("told " in text for text in logs) == 1
    assert len(logs) == 2


def test_a_command_that_is_no_python(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--devices", "2", "--no-python", "sh", "-c", 'echo "rank $RANK of $WORLD_SIZE"']) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
