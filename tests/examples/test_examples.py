"""The examples as programs: what they learn, on one process and two, and that an interrupted run loses nothing."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.spawn import HANG_S, Finished, finish, free_port, run_command, start_command
from tests.helpers.warm import warm_python

EXAMPLES = Path(__file__).parents[2] / "examples"
LENGTH = {"digits.py": ("--max-epochs", "15"), "stdlib_gpt.py": ("--max-steps", "60")}


def command(example: str, root: Path, *args: str, devices: int = 1, workers: int = 0) -> list[str]:
    """The command line of an example on CPUs."""
    common = ["--accelerator", "cpu", "--devices", str(devices), "--workers", str(workers), "--root", str(root)]
    return [warm_python(), str(EXAMPLES / example), *common, *args]


def run(example: str, root: Path, *args: str, devices: int = 1, workers: int = 0) -> str:
    """Run an example to its end and return what it printed."""
    done = run_command(command(example, root, *args, devices=devices, workers=workers))
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def number(pattern: str, text: str) -> float:
    """The first group of the pattern, which the text must have."""
    match = re.search(pattern, text)
    assert match, f"{pattern!r} is not in\n{text}"
    return float(match[1].replace(",", ""))


def last_checkpoint(root: Path) -> Path:
    """The newest checkpoint under an example's root."""
    found = [path.parent for path in root.rglob("checkpoints/*/manifest.json") if not path.parent.name.startswith(".")]
    assert found, f"no checkpoint in {sorted(map(str, root.rglob('*')))}"
    return max(found, key=lambda path: (json.loads((path / "manifest.json").read_text())["step"], path.name))


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state."""
    files = [*checkpoint.glob("model*.safetensors"), *checkpoint.glob("optimizer*.safetensors")]
    assert len(files) >= 2, sorted(checkpoint.iterdir())
    return {f"{file.name}:{name}": tensor for file in files for name, tensor in load_file(file).items()}


def assert_bit_identical(one: Path, other: Path) -> None:
    """Both roots' last checkpoints are of the same step and hold the same bits."""
    a, b = last_checkpoint(one), last_checkpoint(other)
    steps = [json.loads((path / "manifest.json").read_text())["step"] for path in (a, b)]
    assert steps[0] == steps[1]
    first, second = tensors(a), tensors(b)
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different


def until(condition: Callable[[], bool], process: subprocess.Popen[str], what: str) -> None:
    """Wait for a condition that a program brings about; fail when it ends or is late instead."""
    deadline = time.monotonic() + HANG_S
    clock = threading.Event()
    while not condition():
        if process.poll() is not None:
            done = finish(process)
            raise AssertionError(f"ended with {done.returncode} before {what}\n{done.stdout}\n{done.stderr}")
        assert time.monotonic() < deadline, f"no {what} within {HANG_S} s"
        clock.wait(0.01)


def has_logged(root: Path, step: int) -> bool:
    """Whether the run's metrics file has a row at this step or later."""
    for path in root.rglob("metrics.csv"):
        rows = path.read_text().splitlines()[1:]
        if rows and int(rows[-1].split(",")[0]) >= step:
            return True
    return False


def status(root: Path) -> dict[str, Any]:
    """The run's own account of how it ended."""
    [path] = root.rglob("status.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[Path, str]]:
    """Runs that were left alone, made once each by all processes of the tests: their roots and what they printed."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def get(example: str, devices: int) -> tuple[Path, str]:
        root = shared / f"uninterrupted-{example}-{devices}"
        said = Path(f"{root}.txt")
        with open(f"{root}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not said.exists():
                said.write_text(run(example, root, *LENGTH[example], devices=devices))
        return root, said.read_text()

    return get


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=[pytest.mark.dist, pytest.mark.campaign])])
def test_digits_learns(uninterrupted: Callable[[str, int], tuple[Path, str]], devices: int) -> None:
    _, said = uninterrupted("digits.py", devices)
    assert number(r"test accuracy ([\d.]+)%", said) >= 97.0
    assert number(r": (\d+) of 297 correct", said) >= 0.97 * 297
    assert number(r"trained (\d+) steps", said) == 15 * 19
    assert f"on {devices} process(es)" in said
    dashboard = re.search(r"tensorboard --logdir (.+)", said)
    assert dashboard
    assert list(Path(dashboard[1].strip()).glob("events.out.tfevents.*"))


@pytest.mark.slow
@pytest.mark.dist
def test_one_checkpoint_has_the_same_counts_on_one_process_and_on_two(
    tmp_path: Path, uninterrupted: Callable[[str, int], tuple[Path, str]]
) -> None:
    checkpoint = str(last_checkpoint(uninterrupted("digits.py", 1)[0]))
    counts, losses = [], []
    for devices in (1, 2):
        said = run("digits.py", tmp_path / str(devices), "--evaluate", checkpoint, devices=devices)
        counts.append(number(r": (\d+) of 297 correct", said))
        losses.append(number(r"test loss ([\d.e-]+)", said))
    assert counts[0] == counts[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.extras
@pytest.mark.slow
@pytest.mark.dist
def test_examples_run_under_torchrun(tmp_path: Path) -> None:  # the digits: launch/test_ways.py
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    python, *rest = command("stdlib_gpt.py", tmp_path, "--max-steps", "4", devices=2)
    done = run_command([python, *launcher, *rest])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("on 2 process(es)") == 1


@pytest.mark.slow
@pytest.mark.campaign
def test_the_gpt_learns(tmp_path: Path) -> None:
    steps, bits = (600, 3.2) if os.environ.get("INSTEP_EXAMPLES_WHOLE") else (200, 3.9)
    said = run("stdlib_gpt.py", tmp_path, "--max-steps", str(steps))
    assert number(r"validation bits per byte ([\d.]+)", said) < bits
    assert number(r"model: ([\d,]+) parameters", said) == 437_760
    assert number(rf"trained {steps} steps, ([\d,]+) tokens", said) == steps * 16 * 64


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.dist
def test_the_gpt_means_the_same_on_two_processes(uninterrupted: Callable[[str, int], tuple[Path, str]]) -> None:
    said = [uninterrupted("stdlib_gpt.py", devices)[1] for devices in (1, 2)]
    one, two = (number(r"validation bits per byte ([\d.]+)", text) for text in said)
    assert one < 6.0
    assert one == pytest.approx(two, rel=0.02)  # dropout draws differ per rank


# Both examples, numbers of processes and of loader workers, and signals; without workers: trainer/test_preemption.py.
INTERRUPTIONS = [
    ("digits.py", 1, 2, signal.SIGTERM),
    ("stdlib_gpt.py", 2, 2, signal.SIGINT),
]


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.dist
@pytest.mark.parametrize("example, devices, workers, sent", INTERRUPTIONS)
def test_an_interrupted_run_ends_with_the_same_bits(
    tmp_path: Path,
    uninterrupted: Callable[[str, int], tuple[Path, str]],
    example: str,
    devices: int,
    workers: int,
    sent: signal.Signals,
) -> None:
    """Loader workers, none in the run that is left alone, change nothing either."""
    reference, _ = uninterrupted(example, devices)
    line = command(example, tmp_path, *LENGTH[example], devices=devices, workers=workers)

    first = interrupt(line, tmp_path, sent)
    assert first.returncode == 75, f"{first.returncode}\n{first.stdout}\n{first.stderr}"
    stopped = status(tmp_path)
    assert stopped["status"] == "preempted"
    assert 20 <= stopped["global_step"] < int(LENGTH[example][1]) * (19 if example == "digits.py" else 1)

    second = run_command([*line, "--resume"])
    assert second.returncode == 0, f"{second.returncode}\n{second.stdout}\n{second.stderr}"
    assert status(tmp_path)["status"] == "done"
    assert_bit_identical(tmp_path, reference)


def interrupt(line: list[str], root: Path, sent: signal.Signals) -> Finished:
    """Start a program, send it the signal in mid-epoch and wait for its end.

    Ctrl-C in a terminal reaches every process of the job, data loading workers too; SIGTERM, as a scheduler sends it,
    only the first.
    """
    if sent == signal.SIGINT:
        line = [sys.executable, *line[1:]]  # in one process group, as from a terminal
    with start_command(line) as process:
        until(lambda: has_logged(root, 20), process, "step 20 in metrics.csv")
        if sent == signal.SIGINT:
            os.killpg(process.pid, sent)
        else:
            process.send_signal(sent)
        return finish(process)


# ---- the Accelerator's


def by_ranks(example: str, *args: str, ranks: int = 1) -> str:
    """Run an example by itself or under torchrun, and return what it printed."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    line = [warm_python(), *(launcher if ranks > 1 else []), str(EXAMPLES / example), *args]
    done = run_command(line)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.dist
def test_a_handwritten_loop_learns_resumes_and_counts_exactly(tmp_path: Path) -> None:
    common = ("--cpu", "--root", str(tmp_path))
    said = by_ranks("accelerator_loop.py", *common, "--epochs", "5", "--accumulate", "2")
    assert "trained 120 steps on 1 process(es)" in said
    again = run_command([warm_python(), str(EXAMPLES / "accelerator_loop.py"), *common])
    assert (again.returncode, again.stdout) == (2, ""), "refused before it trains"
    assert "go on with --resume, or give another folder by --root" in again.stderr
    said = by_ranks("accelerator_loop.py", *common, "--epochs", "8", "--accumulate", "2", "--resume", ranks=2)
    assert "trained 192 steps on 2 process(es)" in said
    assert number(r"test accuracy ([\d.]+)%", said) >= 95.0
    correct = number(r"test accuracy .*: (\d+) of 297 correct", said)
    newest = str(max((tmp_path / "checkpoints").glob("step-*")))
    for ranks in (1, 2):
        again = by_ranks("accelerator_loop.py", *common, "--evaluate", newest, ranks=ranks)
        assert number(r"test accuracy .*: (\d+) of 297 correct", again) == correct


@pytest.mark.slow
@pytest.mark.dist
def test_work_is_done_once_and_seen_everywhere(tmp_path: Path) -> None:
    said = by_ranks("deferred_work.py", "--root", str(tmp_path), ranks=2)
    assert said.count("download") == said.count("map") == said.count("save") == 1
    assert len(re.findall(r"rank \d did: .*weights add up to 1\.000000", said)) == 2
    assert by_ranks("deferred_work.py", "--root", str(tmp_path), ranks=1).count("nothing") == 1


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    "ranks, setter, blocking", [(2, 1, False), pytest.param(3, 2, True, marks=pytest.mark.campaign)]
)
def test_one_rank_stops_all_at_one_step(ranks: int, setter: int, blocking: bool) -> None:
    args = ("--setter", str(setter), *(["--blocking"] if blocking else []))
    said = by_ranks("early_stop_trigger.py", *args, ranks=ranks)
    match = re.search(r"stopped at steps \[([\d, ]+)\] of (\d+) because rank (\d)", said)
    assert match
    steps = {int(step) for step in match[1].split(", ")}
    assert len(steps) == 1
    assert steps.pop() < int(match[2])
    assert int(match[3]) == setter
