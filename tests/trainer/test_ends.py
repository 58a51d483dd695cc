"""The end of a run: what cannot be written then is a warning, and nothing is shown of the run before."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from instep import Callback, Trainer
from instep.callbacks import EarlyStopping, ModelCheckpoint
from instep.health import run_status
from instep.loggers import CSVLogger
from tests.trainer.toys import QUIET, LoggingToy, Toy, samples


def loader() -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=4)


# ---- files of the end


def refuse(*names: str, since: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make renames onto files of these names fail once `since` holds a True."""
    replace = os.replace

    def fail(source: Any, target: Any, **kwargs: Any) -> None:
        if since and Path(target).name in names:
            raise PermissionError(13, "not permitted", str(target))
        replace(source, target, **kwargs)

    monkeypatch.setattr(os, "replace", fail)


class Ended(Callback):
    """Notes that the last step is over."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_train_end(self, *args: Any) -> None:
        self.seen.append(True)


@pytest.mark.parametrize("name", [run_status.NAME, run_status.PROGRESS])
def test_a_status_that_cannot_be_renamed_at_the_end_is_a_warning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    import warnings

    warnings.simplefilter("always")
    ended = Ended()
    refuse(name, since=ended.seen, monkeypatch=monkeypatch)
    trainer = Trainer(**{**QUIET, "logger": "csv"}, max_epochs=1, default_root_dir=tmp_path, callbacks=[ended])
    trainer.fit(Toy(), loader())
    assert trainer.state.finished
    said = [str(one.message) for one in recwarn if "could not be written to its end" in str(one.message)]
    assert len(said) == (name == run_status.NAME)


class BadLogger(CSVLogger):
    def finalize(self, status: str) -> None:
        super().finalize(status)
        raise OSError(28, "No space left on device")


class BadReport:
    """A profiler's report that cannot be written."""

    def __call__(self) -> None:
        raise OSError(30, "Read-only file system")


@pytest.mark.parametrize("what", ["logger", "profiler"])
def test_a_logger_or_profiler_that_cannot_write_its_last_file_is_a_warning(what: str, tmp_path: Path) -> None:
    logger = BadLogger(tmp_path) if what == "logger" else False
    trainer = Trainer(**{**QUIET, "logger": logger}, max_epochs=1, default_root_dir=tmp_path, profiler="simple")
    if what == "profiler":
        trainer.profiler.describe = BadReport()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.warns(UserWarning, match="the run is over, but .* could not be written"):
        trainer.fit(Toy(), loader())
    assert trainer.state.finished


def test_a_failed_run_keeps_its_error_where_its_status_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(Ended):
        def on_train_epoch_end(self, *args: Any) -> None:
            self.seen.append(True)
            raise KeyError("mine")

    fails = Fails()
    refuse(run_status.NAME, since=fails.seen, monkeypatch=monkeypatch)
    trainer = Trainer(**{**QUIET, "logger": "csv"}, max_epochs=1, default_root_dir=tmp_path, callbacks=[fails])
    with pytest.warns(UserWarning, match="status.json could not be written"), pytest.raises(KeyError, match="mine"):
        trainer.fit(Toy(), loader())


# ---- nothing of the run before


class FailsIn(Callback):
    """Raises in one hook, in the second fit."""

    def __init__(self, hook: str) -> None:
        self.hook, self.fits = hook, 0

    def _called(self, hook: str) -> None:
        if hook == self.hook and self.fits == 2:
            raise KeyError(hook)

    def setup(self, *args: Any) -> None:
        self.fits += 1
        self._called("setup")

    def on_fit_start(self, *args: Any) -> None:
        self._called("on_fit_start")

    def on_sanity_check_start(self, *args: Any) -> None:
        self._called("on_sanity_check_start")


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_sanity_check_start"])
def test_a_fit_that_fails_before_it_starts_shows_no_summary_of_the_run_before(
    hook: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**QUIET, "enable_progress_bar": True, "enable_checkpointing": True}
    trainer = Trainer(**settings, max_epochs=2, default_root_dir=tmp_path, callbacks=[FailsIn(hook)])
    trainer.fit(LoggingToy(), loader(), loader())
    first = trainer.run_summary
    assert first is not None
    assert (first.batches, first.metrics != {}) == (6, True)
    capsys.readouterr()
    with pytest.raises(KeyError, match=hook):
        trainer.fit(LoggingToy(), loader(), loader())
    second = trainer.run_summary
    assert second is not None
    assert (second.batches, second.steps, second.metrics, second.best_checkpoint) == (0, 0, {}, None)
    assert "steps in" not in capsys.readouterr().out


# ---- an evaluation of a checkpoint


def test_an_evaluation_logs_at_its_checkpoints_step_and_epoch(tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path / "saved", save_top_k=-1, every_n_train_steps=2, filename="{step}")
    settings = {**QUIET, "enable_checkpointing": True, "callbacks": [saver], "default_root_dir": tmp_path}
    Trainer(**settings, max_epochs=4).fit(LoggingToy(), loader())
    trainer = Trainer(**{**QUIET, "logger": CSVLogger(tmp_path / "logs")}, default_root_dir=tmp_path)
    paths = {int(path.name.split("=")[1].split("-")[0]): path for path in (tmp_path / "saved").glob("step=*")}
    assert sorted(paths) == [2, 4, 6, 8, 10, 12]
    for step in (4, 12, 6):
        trainer.test(LoggingToy(), loader(), ckpt_path=paths[step], verbose=False)
        assert (trainer.global_step, trainer.current_epoch) == (0, 0)
    trainer.validate(LoggingToy(), loader(), ckpt_path=paths[10], verbose=False)
    with open(f"{trainer.log_dir}/metrics.csv") as file:
        rows = [(int(row["step"]), int(float(row["epoch"]))) for row in csv.DictReader(file)]
    assert rows == [(4, 1), (12, 3), (6, 1), (10, 3)]


def test_a_fit_goes_on_from_its_own_step_after_an_evaluation_of_an_older_checkpoint(tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path / "saved", save_top_k=-1, filename="{step}")
    settings = {**QUIET, "enable_checkpointing": True, "callbacks": [saver], "default_root_dir": tmp_path}
    trainer = Trainer(**settings, max_epochs=2)
    trainer.fit(LoggingToy(), loader())
    trainer.test(LoggingToy(), loader(), ckpt_path=next((tmp_path / "saved").glob("step=3*")), verbose=False)
    assert (trainer.global_step, trainer.current_epoch) == (6, 2)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"max_epochs": 2}, "fit ended at step 6: max_epochs=2 reached."),
        ({"max_epochs": 2, "max_steps": 4}, "fit ended at step 4: max_steps=4 reached."),
        ({"max_epochs": 1, "max_steps": 4}, "fit ended at step 3: max_epochs=1 reached."),
    ],
)
def test_a_run_says_which_limit_has_ended_it(
    settings: dict[str, int], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(**QUIET, **settings).fit(Toy(), loader())
    assert capsys.readouterr().out.splitlines().count(line) == 1


class Stages(Callback):
    """Notes which stage the progress names while batches are evaluated."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def note(self, trainer: Any, *_: Any) -> None:
        self.seen += [trainer.progress.stage] if trainer.progress.stage not in self.seen[-1:] else []

    on_validation_batch_start = on_predict_batch_start = on_train_batch_start = note  # type: ignore[assignment]


def test_the_progress_names_the_stage() -> None:
    stages = Stages()
    trainer = Trainer(**{**QUIET, "num_sanity_val_steps": 1}, max_epochs=1, callbacks=[stages])
    trainer.fit(LoggingToy(), loader(), loader())
    trainer.predict(LoggingToy(), loader())
    assert stages.seen == ["sanity", "train", "validate", "predict"]


@pytest.mark.parametrize("verbose", [False, True])
def test_only_a_verbose_early_stopping_prints_what_it_sees(verbose: bool, capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(**QUIET, max_epochs=2, callbacks=[EarlyStopping("val_loss", verbose=verbose)]).fit(
        LoggingToy(lr=1e-4), loader(), loader()
    )
    assert ("val_loss = " in capsys.readouterr().out) == verbose
