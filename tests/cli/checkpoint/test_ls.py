"""`instep checkpoint ls`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from instep.checkpoint import CheckpointStore
from instep.utils.process_id import this_process
from tests.cli.checkpoint.conftest import Command, writes


@pytest.mark.parametrize("where", ["", "runs", "runs/version_0", "runs/version_0/checkpoints"])
def test_ls_finds_checkpoints_from_every_folder_above_them(
    where: str, run_folder: Path, tmp_path: Path, instep: Command
) -> None:
    answer = instep("ls", tmp_path / where)
    lines = answer.out.splitlines()
    assert answer.code == 0
    assert lines[0] == str(run_folder / "checkpoints")
    assert [line.split()[:5] for line in lines[2:]] == [
        ["step-00000020-1", "20", "1", "full", "1"],
        ["step-00000010-1", "10", "1", "full", "0"],
    ]
    assert "val_loss=0.25" in lines[2]
    assert "to clear" not in answer.out
    assert all("\x1b" not in line and "│" not in line for line in lines)


def test_ls_describes_a_single_checkpoint(checkpoint: Path, instep: Command) -> None:
    [folder] = instep("ls", checkpoint, "--json").json["folders"]
    [entry] = folder["checkpoints"]
    assert entry["name"] == "step-00000020-1"
    assert entry["state"] == "complete"
    assert (entry["score"], entry["monitor"], entry["run_id"]) == (0.25, "val_loss", "abc")
    assert entry["bytes"] == sum(path.stat().st_size for path in checkpoint.iterdir())


def test_the_latest_attempt_of_a_name(tmp_path: Path, instep: Command) -> None:
    store = CheckpointStore(tmp_path)
    for value in (1.0, 2.0):
        store.save(10, writes(value, 10), name="best")
    [folder] = instep("ls", tmp_path / "best", "--json").json["folders"]
    assert [entry["name"] for entry in folder["checkpoints"]] == ["best-2"]


@pytest.mark.parametrize(
    ("damage", "note"),
    [
        (lambda path: os.truncate(path / "model.safetensors", 5), "model.safetensors has 5 bytes instead of"),
        (lambda path: (path / "trainer.json").unlink(), "trainer.json is missing"),
        (lambda path: (path / "manifest.json").unlink(), "it has no manifest.json"),
        (lambda path: os.truncate(path / "manifest.json", 20), "cut short or damaged"),
    ],
)
def test_ls_says_why_a_checkpoint_is_broken(
    damage, note: str, checkpoint: Path, run_folder: Path, instep: Command
) -> None:
    damage(checkpoint)
    answer = instep("ls", run_folder)
    assert answer.code == 1
    [line] = [line for line in answer.out.splitlines() if line.startswith(checkpoint.name)]
    assert "broken: " in line
    assert note in line
    assert answer.out.splitlines()[-1] == f"to clear what is broken: rm -r {checkpoint}"


def test_saves_that_go_on_or_are_dead(run_folder: Path, instep: Command) -> None:
    root = run_folder / "checkpoints"
    dead = this_process().replace(f"-{os.getpid()}-", "-999999999-")
    for owner, step in ((this_process(), 30), (dead, 31), ("elsewhere-1-00000000", 32)):
        (root / f".saving-step-000000{step}-1@{owner}").mkdir()
    (root / ".deleting-step-00000005-1").mkdir()
    answer = instep("ls", run_folder, "--json")
    assert answer.code == 0, "nothing of it is broken"
    states = {entry["step"]: entry["state"] for entry in answer.json["folders"][0]["checkpoints"] if "step" in entry}
    assert states == {20: "complete", 10: "complete", 30: "saving", 31: "dead", 32: "unknown"}
    assert "deleted: the next save" in instep("ls", run_folder).out


def test_ls_says_which_run_holds_the_folder(run_folder: Path, instep: Command) -> None:
    content = {"owner": this_process(), "host": "here", "pid": 7, "run_id": "abc", "command": "train.py"}
    lease = run_folder / "checkpoints" / ".lease-00000002"
    lease.write_text(json.dumps({**content, "released": False}))
    (run_folder / "checkpoints" / ".lease-00000001").write_text("older")
    assert "held by run abc: here, pid 7, train.py\n" in instep("ls", run_folder).out
    lease.write_text(json.dumps({**content, "released": True}))
    assert "held" not in instep("ls", run_folder).out
    lease.write_text("half a fi")
    assert instep("ls", run_folder).code == 0


def test_ls_of_a_folder_without_checkpoints_says_so(tmp_path: Path, instep: Command) -> None:
    answer = instep("ls", tmp_path)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith(f"instep: there is no checkpoint in {tmp_path}")
    assert f"there is no checkpoint {tmp_path / 'gone'}: it does not exist" in instep("ls", tmp_path / "gone").err


def test_ls_lists_the_checkpoints_of_a_url(instep: Command) -> None:
    pytest.importorskip("upath")
    CheckpointStore("memory://ls/run").save(4, writes(1.0, 4), info={"kind": "full"})
    [folder] = instep("ls", "memory://ls", "--json").json["folders"]
    assert [(entry["name"], entry["state"]) for entry in folder["checkpoints"]] == [("step-00000004-1", "complete")]
