from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import distributed
from instep.cli import setup_check
from instep.cli.main import main
from tests.helpers.spawn import run_command
from tests.helpers.warm import warm_python
from tests.launch.ways import UNLAUNCHED

CHECKS = [
    "all_reduce (cpu)",
    "gather (cpu)",
    "broadcast (cpu)",
    "reduce, sum (cpu)",
    "reduce, mean (cpu)",
    "reduce, min (cpu)",
    "reduce, max (cpu)",
    "gather_ragged (cpu)",
    "pad_across_processes (cpu)",
    "objects",
    "wait_for_everyone",
    "errors reach every rank",
    "triggers",
    "training as one process",
    "checkpoint, save",
    "checkpoint, resume",
]


@pytest.mark.dist
def test_a_set_up_of_two_processes() -> None:
    command = [warm_python(), "-m", "instep", "test", "--devices", "2", "--accelerator", "cpu", "--json"]
    done = run_command([*command, "--precision", "bf16-mixed"], env=UNLAUNCHED)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert (said["processes"], said["device"], said["precision"], said["ok"]) == (2, "cpu", "bf16-mixed", True)
    assert [check["check"] for check in said["checks"]] == CHECKS
    assert all(check["seconds"] > 0 for check in said["checks"])
    moving = [check["check"] for check in said["checks"] if check["bytes_per_s"] is not None]
    assert moving == [*CHECKS[:3], "checkpoint, save"]


@pytest.fixture
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "INSTEP_ACCELERATOR": "cpu"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("_one_rank")
def test_what_is_wrong_is_said_and_the_rest_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> Any:
        raise ValueError("not today")

    right = distributed.reduce
    monkeypatch.setattr(
        distributed, "reduce", lambda data, op: {"a": torch.tensor([3.0])} if op == "sum" else right(data, op)
    )
    monkeypatch.setattr(distributed, "gather_ragged", refuse)
    monkeypatch.setattr(distributed.Triggers, "tick", lambda *_: ())
    monkeypatch.setattr(setup_check, "losses_of_one_process", lambda _: [1.0, 1.0, 1.0])
    assert main(["test"]) == 1
    said = capsys.readouterr().out
    assert "reduce, sum (cpu), rank 0: got [3.0], expected 1.0" in said
    assert "gather_ragged (cpu), rank 0: ValueError: not today" in said
    assert "triggers, rank 0: seen at {}, expected {4: ('instep-test', 0)}" in said
    assert "training as one process, rank 0: losses [" in said
    assert said.count("FAILED") == 4
    assert said.endswith("4 of 14 checks failed\n")


@pytest.mark.usefixtures("_one_rank")
def test_a_checkpoint_that_does_not_bring_everything_back_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = setup_check.fit

    def from_scratch(state: Any, root: Path, watch: Any, ckpt_path: Path | None = None) -> None:
        fit(state, root, watch)

    def spoil(state: Any, root: Path, watch: Any, ckpt_path: Path | None = None) -> None:
        fit(state, root, watch, ckpt_path)
        if ckpt_path is not None:
            watch.losses[-1] = 1.0

    for broken, problem in ((from_scratch, "it went on from step 0"), (spoil, "loss [1.0] after the checkpoint, [")):
        monkeypatch.setattr(setup_check, "fit", broken)
        assert main(["test"]) == 1
        said = capsys.readouterr().out
        assert f"checkpoint, resume, rank 0: {problem}" in said
        assert said.endswith("1 of 16 checks failed\n")
