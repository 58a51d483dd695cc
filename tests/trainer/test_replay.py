"""A Trainer in a replay, in this process; tests/cli/test_replay.py runs whole programs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from instep import Trainer
from instep.callbacks import LearningRateMonitor, ModelCheckpoint, Timer
from instep.checkpoint import CheckpointStore
from instep.loggers import CSVLogger
from instep.trainer.guests import REPLAY, find_replay
from instep.utils.private_files import is_own
from tests.test_public_names import in_new_process
from tests.trainer.resuming import Augmented, Net


class Ended(BaseException):
    """In place of the process's end."""


class OwnSaver(Net):
    """A module with callbacks of its own that would write."""

    def configure_callbacks(self) -> Any:
        return ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)


def trainer(root: Path, **more: Any) -> Trainer:
    callbacks = [ModelCheckpoint(every_n_train_steps=2, save_top_k=-1), LearningRateMonitor(), Timer("00:01:00:00")]
    options = {"accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 1, "default_root_dir": root, **more}
    return Trainer(logger=CSVLogger(), callbacks=callbacks, **options)


def data() -> Any:
    return DataLoader(Augmented(22), batch_size=4, shuffle=True)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of step 2, by a run of 6 steps."""
    trainer(tmp_path / "first").fit(Net(), data())
    [found] = tmp_path.rglob("step-00000002-1")
    return found


@pytest.fixture
def output(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """From here on this process replays two steps; where the lines go."""
    folder = tmp_path / "output"
    folder.mkdir()

    def end(code: int) -> None:
        assert code == 0
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setenv(REPLAY, json.dumps({"checkpoint": str(checkpoint), "steps": 2, "output": str(folder)}))
    return folder


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "rank-0.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", [Net, OwnSaver])
def test_a_replay_repeats_the_steps_after_a_checkpoint_and_writes_nothing(
    kind: type[Net], output: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    again = trainer(tmp_path / "second")
    with pytest.raises(Ended):
        again.fit(kind(), data(), ckpt_path="auto")
    steps = lines(output)
    assert [step["step"] for step in steps] == [3, 4]
    assert all(len(step["grad_norms"]) == 1 for step in steps)
    assert again.loggers == []
    assert again.log_dir is None
    assert again.checkpoint_callback is None
    assert sorted(tmp_path.rglob("*")) == sorted([*before, output / "rank-0.jsonl"])


def test_saving_by_hand_saves_nothing(output: Path, tmp_path: Path) -> None:
    class Saves(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert self.trainer.save_checkpoint(tmp_path / "mine") == tmp_path / "mine"

    with pytest.raises(Ended):
        trainer(tmp_path / "second").fit(Saves(), data())
    assert len(lines(output)) == 2
    assert not list(tmp_path.glob("mine*"))


def test_the_end_of_the_run_comes_first(output: Path, tmp_path: Path) -> None:
    with pytest.raises(Ended):
        trainer(tmp_path / "second", max_steps=3).fit(Net(), data())
    assert [step["step"] for step in lines(output)] == [3]


def test_a_step_that_fails_is_told(output: Path, tmp_path: Path) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise ValueError("boom")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="boom"):
        trainer(tmp_path / "second").fit(Fails(), data())
    done, failed = lines(output)
    assert "error" not in done
    assert failed["error"] == "ValueError: boom"
    [batch] = failed["batches"]
    assert batch["loss"] is None
    assert len(batch["samples"]) == 4


def test_manual_optimization_steps_twice(checkpoint: Path, output: Path, tmp_path: Path) -> None:
    class Twice(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for _ in range(2):
                loss = self.net(batch[0]).square().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            both = super().configure_optimizers()
            return {**both, "lr_scheduler": both["lr_scheduler"]["scheduler"]}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs is None

    with pytest.raises(Ended):
        trainer(tmp_path / "second").fit(Twice(), data())
    assert [(len(step["grad_norms"]), step["batches"][0]["loss"]) for step in lines(output)] == [(2, None)] * 2


def test_a_trainer_outside_of_a_replay_is_unchanged(tmp_path: Path) -> None:
    ours = trainer(tmp_path)
    callbacks = list(ours.callbacks)
    assert find_replay() is None
    assert ours.callbacks == callbacks
    assert len(ours.loggers) == 1


def test_the_folder_of_the_command_is_where_the_program_began() -> None:
    in_new_process("""
import os
before = os.getcwd()
from instep import Trainer
os.chdir("/")
from instep.trainer import own_command
assert own_command._STARTED_IN == before
""")


def test_a_checkpoint_keeps_the_command_without_its_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says that it is this user's own."""
    words = ("/home/me/train.py", "--lr", "0.1", "--api-key", "abc123secret")
    monkeypatch.setattr("instep.launch.command.this_command", lambda: words)
    monkeypatch.setattr("sys.orig_argv", ["python", *words])
    ours = trainer(tmp_path)
    ours.fit(Net(), data())
    [path] = tmp_path.rglob("step-00000006-1")
    how = CheckpointStore(path.parent).read(path).state("trainer")["command"]
    given = how.pop("mark")
    assert how["arguments"] == ["/home/me/train.py", "--lr", "0.1", "--api-key", "***"]
    assert how["left_out"] == ["--api-key"]
    assert is_own(how, given)
    assert not is_own({**how, "folder": "/"}, given)
    held = [path for path in tmp_path.rglob("*") if path.is_file() and b"abc123secret" in path.read_bytes()]
    assert held == [], "neither a checkpoint, nor a lease, nor anything else of the run"
    assert any(b"api-key" in path.read_bytes() for path in tmp_path.rglob(".lease-*"))
