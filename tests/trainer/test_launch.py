"""Real programs: they start their ranks themselves or under torchrun, are stopped and killed, and go on."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from instep import Trainer
from instep.errors import SettingError
from tests.helpers.spawn import Finished, free_port, run_command
from tests.helpers.warm import warm_python
from tests.launch.ways import check_error_was_told

pytestmark = [pytest.mark.slow]

HERE = Path(__file__)
REPO = HERE.parents[2]
SCRIPT = (str(HERE.with_name("program.py")),)
MODULE = ("-m", "tests.trainer.program")


def torchrun(nproc: int) -> tuple[str, ...]:
    port = free_port()
    return ("-m", "torch.distributed.run", f"--nproc-per-node={nproc}", f"--master-port={port}", *SCRIPT)


def run(root: Path, *args: str, start: tuple[str, ...] = SCRIPT, python: str | None = None) -> Finished:
    root.mkdir(exist_ok=True)
    argv = [python or warm_python(), *start, "--root", str(root), *args]
    return run_command(argv, env={"PYTHONPATH": str(REPO)}, cwd=REPO)


def results(root: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((root / f"result-{rank}.json").read_text()) for rank in range(ranks)]


def status(root: Path) -> dict[str, Any]:
    """How the run ended. There is one run folder only: a resumed run goes on in it."""
    [path] = root.rglob("status.json")
    return json.loads(path.read_text())


def saved(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.rglob("checkpoints/step-*/manifest.json"))


def table(root: Path) -> str:
    [path] = root.rglob("metrics.csv")
    return path.read_text()


def expect(done: Finished, code: int) -> None:
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run of one process that nobody disturbs gives."""
    root = tmp_path_factory.mktemp("alone")
    expect(run(root), 0)
    return results(root, 1)[0]


@pytest.fixture(scope="module")
def helped(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The same with two loader workers, whose augmentation has random numbers of its own; and the logged table."""
    root = tmp_path_factory.mktemp("helped")
    expect(run(root, "--workers", "2"), 0)
    return results(root, 1)[0], table(root)


@pytest.fixture(scope="module")
def pair_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have trained that the program started itself, after it had logged something."""
    root = tmp_path_factory.mktemp("pair")
    expect(run(root, "--devices", "2", "--early"), 0)
    return root


@pytest.fixture(scope="module")
def pair(pair_root: Path) -> dict[str, Any]:
    """What they gave."""
    root = pair_root
    first, second = results(root, 2)
    assert first == second
    assert (root / "started").read_text().split().count("None") == 1, "fit and test: launched once"
    assert sorted((root / "started").read_text().split()) == ["0", "1", "None"]
    assert status(root)["status"] == "done"
    return first


def test_a_signal_to_the_whole_group_with_loader_workers(helped: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    for name, step in (("SIGINT", 4), ("SIGTERM", 9)):
        stopped = run(tmp_path, "--workers", "2", "--do", f"group-{name}", "--step", str(step))
        expect(stopped, 75)
        assert "Traceback" not in stopped.stderr
        assert stopped.stderr.count(f"Stopping ({name}): ") == 1, stopped.stderr
        said, at = status(tmp_path), step + 1
        assert (said["status"], said["exit_code"], said["global_step"], said["signal"]) == ("preempted", 75, at, name)
        assert said["checkpoint"].endswith(f"step-{at:08d}-1")
        assert saved(tmp_path) == [f"step-{at:08d}-1"]
    expect(run(tmp_path, "--workers", "2"), 0)
    assert results(tmp_path, 1)[0] == helped[0]
    assert table(tmp_path) == helped[1], "the table goes on without a gap or a repetition"


def test_killed_in_training_then_resumed(alone: dict[str, Any], tmp_path: Path) -> None:
    expect(run(tmp_path, "--do", "SIGKILL", "--step", "14"), -signal.SIGKILL)
    assert saved(tmp_path) == ["step-00000012-1"]
    expect(run(tmp_path), 0)
    assert results(tmp_path, 1) == [alone]
    assert status(tmp_path)["status"] == "done"


# The signal, its rank, the step that it comes after and the one that all stop at, and how the ranks are started: by the
# program itself, as a script and as a module, and by torchrun, which knows no other code than 1.
STOPS = [
    ("SIGUSR1", "1", "1", 2, SCRIPT),
    ("SIGTERM", "1", "4", 5, MODULE),
    ("SIGUSR2", "0", "6", 6, SCRIPT),
    ("SIGINT", "0", "7", 8, None),
]


@pytest.mark.dist
def test_a_signal_to_one_rank_stops_all(pair: dict[str, Any], tmp_path: Path) -> None:
    """One run that is stopped again and again, then ends like one that was not."""
    for name, rank, step, at, start in STOPS:
        event = ("--do", name, "--rank", rank, "--step", step)
        if start is None:
            expect(run(tmp_path, *event, start=torchrun(2)), 1)
        else:
            expect(run(tmp_path, "--devices", "2", *event, start=start), 75)
        said = status(tmp_path)
        assert (said["status"], said["exit_code"], said["signal"]) == ("preempted", 75, name)
        assert said["global_step"] == at
        assert said["checkpoint"].endswith(f"{at:08d}-1")
        assert saved(tmp_path) == [f"step-{at:08d}-1"]
    expect(run(tmp_path, "--devices", "2"), 0)
    assert results(tmp_path, 2) == [pair, pair]


@pytest.mark.dist
def test_what_is_written_before_the_ranks_are_started_is_there_once(pair_root: Path) -> None:
    """The process that becomes the agent has run the same lines as the main rank."""
    header, *rows = [line.split(",") for line in table(pair_root).splitlines()]
    assert [row[header.index("early")] for row in rows if row[header.index("early")]] == ["1.0"]
    assert len(list(pair_root.rglob("version_*"))) == 1


@pytest.mark.dist
def test_a_killed_rank_ends_the_job_which_can_be_resumed(pair: dict[str, Any], tmp_path: Path) -> None:
    killed = run(tmp_path, "--devices", "2", "--do", "SIGKILL", "--rank", "1", "--step", "5")
    expect(killed, 1)
    assert re.search(r"rank 1 \(host .*\) failed with SIGKILL", killed.stderr), killed.stderr
    assert saved(tmp_path) == ["step-00000003-1"]
    expect(run(tmp_path, start=torchrun(2)), 0)
    assert results(tmp_path, 2) == [pair, pair]


@pytest.mark.dist
@pytest.mark.campaign
def test_an_error_on_one_rank_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, "--devices", "2", "--do", "raise", "--rank", "1", python=sys.executable)  # its ranks' parent
    check_error_was_told(done, tmp_path)
    *_, error, note = done.stderr.splitlines()
    assert error == "ValueError: boom on purpose", done.stderr
    assert note.startswith("This came from Event.on_train_batch_end, epoch 1, batch_idx 0"), done.stderr


@pytest.mark.parametrize(("devices", "hint"), [(3, "start 3 processes"), ("auto", "")])
def test_devices_are_held_against_the_launcher(devices: Any, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "",
        "MASTER_PORT": 1,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    if not hint:
        assert Trainer(accelerator="cpu", devices=devices).world_size == 2
        return
    with pytest.raises(SettingError, match=f"the launcher started 2: {hint}"):
        Trainer(accelerator="cpu", devices=devices)
