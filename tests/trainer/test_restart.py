"""A program that its launcher started again goes on by itself: each of its fits from its own newest checkpoint."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from instep import Callback, Trainer
from instep.callbacks import ModelCheckpoint
from instep.loggers import CSVLogger
from instep.trainer import run_folder
from tests.trainer.toys import Toy, loader, quiet


class Ends(Callback):
    def __init__(self, at: int, text: str) -> None:
        self._at, self._text = at, text

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._at:
            raise RuntimeError(self._text)


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Be a new process of a job, in its n-th restart."""

    def begin(number: int, job: str = "job") -> None:
        monkeypatch.setenv("INSTEP_JOB_ID", job)
        monkeypatch.setenv("INSTEP_RESTART", str(number))
        monkeypatch.setattr(run_folder, "_fits", itertools.count(1))

    return begin


def fit(
    root: Path, steps: int, ends: int = -1, text: str = "the node is lost", logger: Any = False, **how: Any
) -> Trainer:
    callbacks = [ModelCheckpoint(every_n_train_steps=2, save_top_k=-1), Ends(ends, text)]
    limits = {"max_steps": steps, "max_epochs": -1}
    trainer = quiet(default_root_dir=root, enable_checkpointing=True, logger=logger, callbacks=callbacks, **limits)
    trainer.fit(Toy(), loader(), **how)
    return trainer


def folder(trainer: Trainer) -> str:
    assert trainer.log_dir is not None
    return Path(trainer.log_dir).name


@pytest.mark.parametrize("logs", [False, True])
def test_each_fit_of_a_restarted_program_continues_its_own_run(tmp_path: Path, begin: Any, logs: bool) -> None:
    def logger() -> Any:
        return CSVLogger(tmp_path / "logs") if logs else False

    begin(0)
    first = fit(tmp_path, 6, logger=logger())
    with pytest.raises(RuntimeError, match="the node is lost"):
        fit(tmp_path, 6, ends=3, logger=logger())
    begin(1)
    again = fit(tmp_path, 6, logger=logger())
    assert again.resume_report is not None
    assert (again.resume_report.path.name, folder(again)) == ("step-00000006-1", folder(first))
    second = fit(tmp_path, 6, logger=logger())
    assert second.resume_report is not None
    assert (second.resume_report.path.name, folder(second)) == ("step-00000002-1", "version_1")
    third = fit(tmp_path, 2, logger=logger())
    assert (third.resume_report, folder(third)) == (None, "version_2")
    assert {path.name for path in tmp_path.iterdir()} == {"logs" if logs else "instep_runs"}


@pytest.mark.filterwarnings("default:.*version_3 is taken")
def test_a_job_whose_version_was_taken_goes_on_in_the_next(tmp_path: Path, begin: Any) -> None:
    begin(0, "another job")
    fit(tmp_path, 4, logger=CSVLogger(tmp_path, version=3))
    begin(0)
    with pytest.raises(RuntimeError, match="the node is lost"):
        fit(tmp_path, 6, ends=3, logger=CSVLogger(tmp_path, version=3))
    begin(1)
    again = fit(tmp_path, 6, logger=CSVLogger(tmp_path, version=3))
    assert (again.resume_report is not None, folder(again)) == (True, "version_4")


def test_a_restart_continues_after_an_error_text_of_any_length(tmp_path: Path, begin: Any) -> None:
    begin(0)
    with pytest.raises(RuntimeError, match="the node is lost"):
        fit(tmp_path, 6, ends=3, text="the node is lost" + "\N{GRINNING FACE}" * 70_000)
    begin(1)
    again = fit(tmp_path, 6)
    assert again.resume_report is not None
    assert again.resume_report.path.name == "step-00000002-1"


def test_without_a_checkpoint_of_its_own_it_does_what_it_did_at_first(tmp_path: Path, begin: Any) -> None:
    begin(0, "another job")
    old = fit(tmp_path, 4)
    newest = old.checkpoint_callback.last_model_path or str(Path(old.log_dir, "checkpoints/step-00000004-1"))
    begin(0)
    with pytest.raises(RuntimeError, match="the node is lost"):
        fit(tmp_path, 9, ends=5, ckpt_path=newest)
    begin(1)
    again = fit(tmp_path, 9, ckpt_path=newest)
    assert again.resume_report is not None
    assert str(again.resume_report.path) == newest


def test_a_restart_passes_over_a_checkpoint_that_does_not_verify(tmp_path: Path, begin: Any) -> None:
    begin(0)
    before = fit(tmp_path, 4)
    weights = Path(before.log_dir or "", "checkpoints/step-00000004-1/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    begin(1)
    with pytest.warns(UserWarning, match="step-00000004-1 is passed over"):
        again = fit(tmp_path, 4)
    assert again.resume_report is not None
    assert again.resume_report.path.name == "step-00000002-1"


def test_another_program_of_the_job_is_not_gone_on_with(
    tmp_path: Path, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(0)
    fit(tmp_path, 4)
    begin(1)
    with monkeypatch.context() as other:
        other.setattr("sys.argv", ["/programs/another.py"])
        assert fit(tmp_path, 2).resume_report is None
