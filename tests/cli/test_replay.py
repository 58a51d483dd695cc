"""`instep replay`: the steps of a real program again, held against what it wrote down when it ran."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.checkpoint import CheckpointStore
from instep.cli.main import main
from instep.cli.replay import _few, _program
from instep.utils.private_files import mark
from tests.helpers.spawn import Finished, free_port, run_command
from tests.helpers.warm import warm_python

HERE = Path(__file__)
REPO = HERE.parents[2]
PROGRAM = str(HERE.with_name("program.py"))
needs_programs = [pytest.mark.slow]


def run(argv: list[str], cwd: Path, diary: str | None = None) -> Finished:
    done = run_command([warm_python(), *argv], env={"PYTHONPATH": str(REPO), "DIARY": diary}, cwd=cwd)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def train(root: Path, *argv: str) -> Path:
    """Run the program; its folder of checkpoints."""
    run(list(argv), root, str(root / "diary"))
    [found] = (root / "out").rglob("checkpoints")
    return found


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Finished]:
    """`instep replay` in this process and the test's folder; the program that it runs is a process of its own."""
    monkeypatch.setattr(sys, "executable", warm_python())
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.delenv("DIARY", raising=False)
    monkeypatch.chdir(tmp_path)

    def run_here(*words: str | Path) -> Finished:
        capfd.readouterr()
        code = main(["replay", *map(str, words)])
        return Finished(code, *capfd.readouterr())

    return run_here


@pytest.fixture
def replay(command: Callable[..., Finished]) -> Callable[..., dict[int, dict[int, Any]]]:
    """Step -> rank -> what was printed of it."""

    def replayed(checkpoint: Path, *words: str) -> dict[int, dict[int, Any]]:
        done = command(checkpoint, "--json", *words)
        assert done.returncode == 0, done.stderr
        assert "a line of the program" in done.stderr
        answer = json.loads(done.stdout)
        assert answer["checkpoint"] == str(checkpoint)
        return {step["step"]: {rank["rank"]: rank for rank in step["ranks"]} for step in answer["steps"]}

    return replayed


def diary(root: Path, rank: int) -> dict[int, list[tuple[str, list[int], str | None]]]:
    """Optimizer step -> loss, samples and gradient norm of each of its batches, as the program wrote them."""
    steps: dict[int, list[Any]] = {}
    waiting: list[Any] = []
    for line in (root / f"diary-{rank}").read_text().splitlines():
        step, _, loss, samples, norm = json.loads(line)
        waiting.append((loss, samples, norm))
        if norm is not None:
            steps[step], waiting = waiting, []
    return steps


def check(root: Path, replayed: dict[int, dict[int, Any]], steps: list[int], ranks: int) -> None:
    assert list(replayed) == steps
    for rank in range(ranks):
        written = diary(root, rank)
        for step in steps:
            got = replayed[step][rank]
            [norm] = got["grad_norms"]
            assert [(batch["loss"].hex(), batch["samples"]) for batch in got["batches"]] == [
                (loss, samples) for loss, samples, _ in written[step]
            ], f"step {step}, rank {rank}"
            assert norm.hex() == written[step][-1][2]


def everything(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of one process: its folder, and its checkpoints."""
    root = tmp_path_factory.mktemp("alone")
    return root, train(root, PROGRAM)


class TestOneProcess:
    pytestmark = needs_programs

    def test_bit_for_bit_over_an_epochs_end_and_nothing_is_written(
        self, alone: tuple[Path, Path], tmp_path: Path, replay: Any
    ) -> None:
        root, checkpoints = alone
        (root / "later").unlink()
        before = everything(root)
        steps = replay(checkpoints / "step-00000004-1", "--steps", "4")
        check(root, steps, [5, 6, 7, 8], ranks=1)
        assert everything(root) == before, "not even the program's last line has run"
        assert not list(tmp_path.iterdir())
        (root / "later").touch()

    def test_replay_prints_a_table_of_steps(self, alone: tuple[Path, Path], tmp_path: Path) -> None:
        root, checkpoints = alone
        done = run(["-m", "instep", "replay", str(checkpoints / "step-00000002-1"), "--steps", "1"], tmp_path)
        lines = [re.split("  +", line.strip()) for line in done.stdout.splitlines()]
        first, last = diary(root, 0)[3]
        assert lines[0] == ["step", "rank", "batch", "loss", "gradient norm", "samples"]
        assert lines[1] == ["3", "0", "4", repr(float.fromhex(first[0])), str(first[1])]
        exact = [repr(float.fromhex(str(number))) for number in (last[0], last[2])]
        assert lines[2] == ["3", "0", "5", *exact, str(last[1])]
        assert "Warning" not in done.stderr

    def test_a_replay_ends_where_the_run_ended(self, alone: tuple[Path, Path], replay: Any) -> None:
        root, checkpoints = alone
        check(root, replay(checkpoints / "step-00000010-1", "--steps", "99"), [11, 12], ranks=1)

    def test_a_program_that_was_moved_is_replayed_from_its_new_place(
        self, alone: tuple[Path, Path], tmp_path: Path, replay: Any
    ) -> None:
        root, checkpoints = alone
        moved = tmp_path / "moved.py"
        moved.write_text(Path(PROGRAM).read_text())
        check(root, replay(checkpoints / "step-00000002-1", "--steps", "1", "--", str(moved)), [3], ranks=1)

    def test_the_step_that_fails_is_among_them(
        self, alone: tuple[Path, Path], tmp_path: Path, command: Callable[..., Finished]
    ) -> None:
        root, checkpoints = alone
        failing = tmp_path / "failing.py"
        text, call = Path(PROGRAM).read_text(), "trainer.fit(module, train,"
        poison = "f = module.training_step\n    module.training_step = lambda b, i: f(b, i) * float('nan') ** (i == 7)"
        text = text.replace(call, f"{poison}\n    {call}")
        failing.write_text(text.replace("max_epochs=2", "max_epochs=2, nonfinite='stop'"))
        done = command(checkpoints / "step-00000002-1", "--json", "--", failing)
        assert done.returncode == 1
        steps = {
            step["step"]: {rank["rank"]: rank for rank in step["ranks"]} for step in json.loads(done.stdout)["steps"]
        }
        assert list(steps) == [3, 4]
        check(root, {3: steps[3]}, [3], ranks=1)
        failed = steps[4][0]
        assert failed["grad_norms"] == ["nan"]
        first = float.fromhex(diary(root, 0)[4][0][0])
        assert [batch["loss"] for batch in failed["batches"]] == [first, "nan"], "as training_step returned them"
        assert [batch["samples"] for batch in failed["batches"]] == [samples for _, samples, _ in diary(root, 0)[4]]
        assert "NonFiniteError" in failed["error"]

    def test_a_program_that_fails(
        self, alone: tuple[Path, Path], tmp_path: Path, command: Callable[..., Finished]
    ) -> None:
        bad, idle = tmp_path / "bad.py", tmp_path / "python_idle.py"
        bad.write_text("raise SystemExit(7)")
        idle.write_text("")
        for program, said in ((bad, "ended with exit code 7, before a fit"), (idle, "without a fit")):
            done = command(alone[1] / "step-00000002-1", "--command", f"{program} --x")
            assert done.returncode == 1
            assert said in done.stderr
            assert "Traceback" not in done.stderr


@pytest.mark.extras
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("launcher", ["itself", "torchrun"])
def test_two_ranks_are_replayed_under_any_launcher(launcher: str, tmp_path: Path, replay: Any) -> None:
    """With `devices` in the program it starts its ranks again; what torchrun started, replay starts."""
    argv = [PROGRAM, "--devices", "2"]
    if launcher == "torchrun":
        argv = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", PROGRAM]
    checkpoints = train(tmp_path, *argv)
    before = everything(tmp_path)
    steps = replay(checkpoints / "step-00000002-1", "--steps", "2")
    check(tmp_path, steps, [3, 4], ranks=2)
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (None, "unknown"),
        (list(range(8)), "[0, 1, 2, 3, 4, 5, 6, 7]"),
        (list(range(50)), "[0, 1, 2, 3, 4, 5, 6, 7] ... (50)"),
    ],
)
def test_the_table_names_a_few_samples(samples: list[int] | None, said: str) -> None:
    assert _few(samples) == said


# ---- refusals, without a program


def saved(root: Path, state: Any = None, kind: str = "full") -> Path:
    def write(writer: Any) -> None:
        writer.tensors("model.safetensors", {"x": torch.ones(1)})
        if state is not None:
            writer.state("trainer", state)

    return CheckpointStore(root).save(1, write, info={"kind": kind})


@pytest.mark.parametrize(
    ("state", "kind", "said"),
    [
        (None, "full", "not saved by a Trainer"),
        ({"world_size": 1}, "weights", "holds weights only"),
        ({"world_size": 1}, "full", "does not say which program saved it"),
        ({"world_size": 1, "command": {"arguments": ["/gone/train.py"], "folder": "/"}}, "full", "/gone/train.py"),
    ],
)
def test_replay_refuses_a_run_that_it_cannot_repeat(
    state: Any, kind: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(saved(tmp_path, state, kind))]) == 1
    assert said in capsys.readouterr().err


def test_a_program_that_ran_with_options_of_the_interpreter(tmp_path: Path) -> None:
    program = ["-B", "-X", "dev", str(tmp_path / "train.py")]
    (tmp_path / "train.py").touch()
    recorded = {"arguments": program, "folder": str(tmp_path), "starts_ranks": True}
    args = argparse.Namespace(command=None, after=[], yes=True)
    assert _program(args, recorded, tmp_path / "run" / "step-1-1", 1) == (program, str(tmp_path), True)


def test_replay_of_a_damaged_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, {"world_size": 1})
    os.truncate(path / "model.safetensors", 20)
    assert main(["replay", str(path)]) == 1
    assert "does not verify: model.safetensors has 20 bytes" in capsys.readouterr().err


def test_another_number_of_processes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, pathlib\norder = json.loads(os.environ['INSTEP_REPLAY'])\n"
        "pathlib.Path(order['output'], 'rank-0.jsonl').touch()\n"
    )
    path = saved(tmp_path / "c", {"world_size": 2, "command": {"arguments": [str(program)], "starts_ranks": True}})
    assert main(["replay", str(path), "--yes"]) == 1
    assert "of 2 processes, and the program ran with 1" in capsys.readouterr().err


# ---- what a stranger's checkpoint names, and what was left out of one's own


def test_a_strangers_program_is_shown_and_waits_for_a_yes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    program = tmp_path / "train.py"
    program.write_text(f"open({str(ran)!r}, 'w')")
    how = {"arguments": [str(program), "--lr", "1"], "folder": str(tmp_path), "starts_ranks": True}
    path = saved(tmp_path / "c", {"world_size": 1, "command": how})
    argv = ["replay", str(path)]
    assert main(argv) == 1
    said = capsys.readouterr().err
    assert "was not saved by you" in said
    assert f"python '{program} --lr 1'" in said
    assert "run it with --yes" in said
    for answer in ("", "n", "Y"):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        assert not ran.exists()
        assert main(argv) == 1
    assert ran.exists()
    ran.unlink()
    assert main([*argv, "--yes"]) == 1
    assert ran.exists()
    ran.unlink()
    # This user's own runs at once. The mark is of these arguments only.
    monkeypatch.setattr(sys, "stdin", Terminal("n"))
    assert main(["replay", str(saved(tmp_path / "d", {"world_size": 1, "command": {**how, "mark": mark(how)}}))]) == 1
    assert ran.exists()
    ran.unlink()
    other = {**how, "arguments": [str(program)], "mark": mark(how)}
    assert main(["replay", str(saved(tmp_path / "e", {"world_size": 1, "command": other}))]) == 1
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    assert main(["replay", str(saved(tmp_path / "f", {"world_size": 1, "command": {**how, "mark": mark(other)}}))]) == 1
    assert not ran.exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "open('ran', 'w') # ", "-m"],
        ["-copen('ran','w')"],
        ["-"],
        ["-i", "train.py"],
        ["-B", "-c", "open('ran', 'w')", "train.py"],
        ["-Xpycache_prefix=.", "train.py"],
        ["-X", "presite=evil", "train.py"],
        ["-W", "error::evil.Category", "train.py"],
        ["-Sc", "open('ran', 'w')"],
        ["-m", "timeit", "open('ran', 'w')"],
        ["-m"],
        ["-O"],
        ["c/step-00000001-1/evil.py"],
        ["c/evil.py"],
        ["linked.py"],
        ["train.py", "a\0b"],
        ["train.py", 7],
        [],
        "train.py",
    ],
)
def test_what_a_stranger_cannot_have_run(
    arguments: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path / "c", {"world_size": 1, "command": {"arguments": arguments, "folder": str(tmp_path)}})
    for place in ("train.py", "c/evil.py", "c/step-00000001-1/evil.py"):
        (tmp_path / place).write_text("open('ran', 'w')")
    (tmp_path / "linked.py").symlink_to("c/evil.py")
    assert main(["replay", str(path), "--yes"]) == 1
    assert not (tmp_path / "ran").exists()
    assert "--command" in capsys.readouterr().err


def test_a_secret_that_was_left_out_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").touch()
    how = {"arguments": [str(tmp_path / "train.py"), "--api-key", "***"], "left_out": ["--api-key"], "folder": "/"}
    path = saved(tmp_path / "c", {"world_size": 1, "command": {**how, "mark": mark(how)}})
    assert main(["replay", str(path)]) == 1
    said = capsys.readouterr().err
    assert "saved without what looked like a secret: --api-key" in said
    assert f"--command '{tmp_path}/train.py --api-key" in said


@pytest.mark.parametrize("count", ["0", "-1", "x"])
def test_replay_refuses_a_wrong_number_of_steps(count: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["replay", str(tmp_path), "--steps", count])
    assert end.value.code == 2
    assert "--steps" in capsys.readouterr().err
