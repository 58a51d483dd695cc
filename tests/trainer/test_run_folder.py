"""The run folder: who chooses it, who goes on in it, and what `status.json` says."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import Callback, Trainer
from instep.callbacks import ModelCheckpoint
from instep.errors import CheckpointError, CorruptCheckpointError, Preempted
from instep.loggers import CSVLogger, Logger
from tests.trainer.toys import Toy, loader, quiet


def status(trainer: Trainer) -> dict[str, Any]:
    assert trainer.log_dir is not None
    return json.loads((Path(trainer.log_dir) / "status.json").read_text())


class Raises(Callback):
    """Raises in one hook, and keeps what status.json said when the hook was called."""

    def __init__(self, hook: str, error: BaseException | None) -> None:
        self.said: list[dict[str, Any]] = []

        def run(trainer: Any, *args: Any) -> None:
            self.said.append(status(trainer))
            if error is not None:
                raise error

        setattr(self, hook, run)


class Keeps(Logger):
    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        self.fail = fail
        self.closed: list[str] = []

    def _finalize(self, status: str) -> None:
        self.closed.append(status)
        if self.fail:
            raise ValueError("the disk is full")


@pytest.mark.parametrize(
    ("hook", "error", "expected", "logged"),
    [
        ("on_train_end", None, ("done", 0), "success"),
        ("on_train_start", ValueError("no"), ("failed", 1), "failed"),
        ("on_train_start", KeyboardInterrupt(), ("interrupted", 130), "interrupted"),
        ("on_train_start", SystemExit(143), ("interrupted", 143), "interrupted"),
        ("on_train_start", SystemExit("bye"), ("interrupted", 1), "interrupted"),
        ("teardown", ValueError("no"), ("failed", 1), "failed"),
        ("teardown", KeyboardInterrupt(), ("interrupted", 130), "interrupted"),
    ],
)
def test_the_status_is_that_of_the_first_error(
    hook: str, error: BaseException | None, expected: tuple[str, int], logged: str, tmp_path: Path
):
    callback, logger = Raises(hook, error), Keeps()
    trainer = quiet(max_epochs=1, callbacks=[callback], logger=logger, default_root_dir=tmp_path)
    module = Toy()
    if error is None:
        trainer.fit(module, loader())
    else:
        with pytest.raises(type(error)) as caught:
            trainer.fit(module, loader())
        assert caught.value is error
    running = callback.said[0]
    assert (running["status"], running["exit_code"], running["pid"]) == ("running", None, os.getpid())
    assert running.keys() == status(trainer).keys()
    said = status(trainer)
    assert (said["status"], said["exit_code"]) == expected
    assert logger.closed == [logged]
    assert trainer.train_dataloader is None, "detached"
    assert trainer.state.fn is None


def test_a_preempted_run_is_resumable_though_its_status_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    class Stops(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            path = trainer.run_folder.path / "status.json"
            if path.is_file():
                path.unlink()
                path.mkdir()  # which no file can replace
            trainer.set_trigger("preempted", "SIGTERM")

    trainer = quiet(max_epochs=1, callbacks=[Stops()], enable_checkpointing=True, default_root_dir=tmp_path)
    with pytest.raises(Preempted) as caught:
        trainer.fit(Toy(), loader())
    assert caught.value.checkpoint is not None
    assert "status.json" in capsys.readouterr().err


def test_a_logger_that_fails_at_the_end_skips_nothing(tmp_path: Path):
    loggers = [Keeps(fail=True), Keeps()]
    trainer = quiet(max_epochs=1, logger=loggers, default_root_dir=tmp_path)
    with pytest.raises(Exception, match="the disk is full"):
        trainer.fit(Toy(), loader())
    assert [logger.closed for logger in loggers] == [["success"], ["failed"]]
    assert status(trainer)["status"] == "failed"


# ---- "auto" with checkpoints elsewhere


def resumed(root: Path, kept: Path, epochs: int) -> Trainer:
    trainer = quiet(
        max_epochs=epochs, callbacks=[ModelCheckpoint(kept)], default_root_dir=root, enable_checkpointing=True
    )
    trainer.fit(Toy(), loader(), ckpt_path="auto")
    return trainer


def test_auto_goes_on_in_the_same_run_folder_wherever_the_checkpoints_are(tmp_path: Path):
    first = resumed(tmp_path / "runs", tmp_path / "kept", 1)
    second = resumed(tmp_path / "runs", tmp_path / "kept", 2)
    assert (second.log_dir, second.global_step) == (first.log_dir, 8)
    elsewhere = resumed(tmp_path / "others", tmp_path / "kept", 3)
    assert elsewhere.log_dir == str(tmp_path / "others" / "instep_runs" / "version_0"), "the root that was asked for"
    shutil.rmtree(tmp_path / "others" / "instep_runs" / "version_0")
    (tmp_path / "others" / "instep_runs" / "version_4").mkdir()
    gone = resumed(tmp_path / "others", tmp_path / "kept", 4)
    assert gone.log_dir == str(tmp_path / "others" / "instep_runs" / "version_5")
    assert gone.global_step == 16


@pytest.mark.parametrize("own", [False, True])
def test_auto_says_that_it_starts_afresh_but_not_beside_damaged_checkpoints(
    own: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def fit(ckpt_path: str, epochs: int = 1) -> Trainer:
        callbacks = [ModelCheckpoint(kept if own else None)]
        trainer = quiet(
            max_epochs=epochs, callbacks=callbacks, default_root_dir=tmp_path / "runs", enable_checkpointing=True
        )
        trainer.fit(Toy(), loader(), ckpt_path=ckpt_path)
        return trainer

    kept, base = tmp_path / "kept", tmp_path / "runs" / "instep_runs"
    looked_in = kept if own else base
    for left in (base / "version_0" / "checkpoints", kept):
        (left / ".saving-step-00000004-1@gone").mkdir(parents=True)  # a dead save is no checkpoint
        (left / "bert-base").mkdir()
        (left / "bert-base" / "model.safetensors").touch()  # nor is a model of another program
    path = Path(fit("auto").checkpoint_callback.last_model_path)  # type: ignore[union-attr]
    assert f"Nothing to resume from in {looked_in}: starting afresh." in capsys.readouterr().out
    (path / "model.safetensors").write_bytes(b"")
    versions = sorted(base.iterdir())
    for keyword in ("auto", "last"):
        with (
            pytest.warns(UserWarning, match="passed over"),
            pytest.raises(CorruptCheckpointError, match=rf"{path.name}: .*model.safetensors") as caught,
        ):
            fit(keyword, 2)
        assert ("afresh" in str(caught.value)) == (keyword == "auto")
    assert sorted(base.iterdir()) == versions, "and no folder is left"
    assert "afresh" not in capsys.readouterr().out


@pytest.mark.parametrize("logger", [False, "csv"])
def test_a_refused_resume_leaves_no_empty_folder(logger: Any, tmp_path: Path):
    def new(**settings: Any) -> Trainer:
        return quiet(**{"max_epochs": 2, "default_root_dir": tmp_path, "enable_checkpointing": True, **settings})

    class Wider(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Linear(3, 3)

    first = new()
    first.fit(Toy(), loader())
    path = first.checkpoint_callback.last_model_path  # type: ignore[union-attr]
    second = new(logger=CSVLogger() if logger else False)
    with pytest.raises(CheckpointError, match="do not fit"):
        second.fit(Wider(), loader(), ckpt_path=path)
    versions = [folder.name for folder in sorted((tmp_path / "instep_runs").iterdir())]
    assert versions == ["version_0", "version_1"][: 2 if logger else 1], "what a logger wrote stays"
    second.fit(Toy(), loader())
    assert second.log_dir == str(tmp_path / "instep_runs" / f"version_{len(versions)}")
    third = new(max_epochs=3, callbacks=[Raises("on_train_start", ValueError("no"))])
    with pytest.raises(ValueError, match="no"):
        third.fit(Toy(), loader(), ckpt_path=path)
    assert status(third)["status"] == "failed", "it was resumed"


@pytest.mark.parametrize("own", [False, True])
def test_the_status_of_a_failed_run_names_what_auto_would_take(own: bool, tmp_path: Path):
    class FailsLate(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(folder / "mine", weights_only=True)  # "auto" does not take it
                raise ValueError("no")

    folder = tmp_path / "kept" if own else tmp_path / "instep_runs" / "version_0" / "checkpoints"
    saver = ModelCheckpoint(folder if own else None, every_n_train_steps=3)
    trainer = quiet(max_epochs=1, default_root_dir=tmp_path, enable_checkpointing=True, callbacks=[saver, FailsLate()])
    with pytest.raises(ValueError, match="no"):
        trainer.fit(Toy(), loader())
    said = status(trainer)
    assert (said["status"], said["checkpoint"]) == ("failed", str(folder / "step-00000003-1"))
    trainer = quiet(max_epochs=1, default_root_dir=tmp_path / "new", callbacks=[Raises("on_train_start", KeyError())])
    trainer.run_folder.path = tmp_path
    with pytest.raises(KeyError):
        trainer.fit(Toy(), loader())
    assert status(trainer)["checkpoint"] is None
