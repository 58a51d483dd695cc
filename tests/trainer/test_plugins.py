"""Callbacks and loggers in real fits."""

from __future__ import annotations

import copy
import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from instep import Callback, Trainer, TrainModule
from instep.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    LiveProgressBar,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from instep.errors import SettingError, UsageError
from instep.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger
from tests.loggers.test_tensorboard import texts
from tests.trainer.toys import LoggingToy, ScoredToy, Toy, assert_same, loader, quiet, weights


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


# ---- EarlyStopping


@pytest.mark.parametrize(
    ("scores", "options", "epochs", "reason"),
    [
        ([3, 2, 2, 2, 1], {"patience": 2}, 4, "PATIENCE_EXHAUSTED"),
        ([3, 2, 1, 0, -1], {"patience": 1}, 5, "NOT_STOPPED"),
        ([3, math.nan, 1, 1, 1], {}, 2, "NON_FINITE_METRIC"),
        ([3, 0.1, 1, 1, 1], {"stopping_threshold": 0.5}, 2, "STOPPING_THRESHOLD"),
        ([3, 2, 50, 1, 1], {"divergence_threshold": 10}, 3, "DIVERGENCE_THRESHOLD"),
    ],
)
def test_early_stopping_ends_the_run_and_says_why(
    scores: list[float], options: dict[str, Any], epochs: int, reason: str
):
    stopping = EarlyStopping("score", **options)
    trainer = quiet(max_epochs=5, callbacks=stopping)
    trainer.fit(ScoredToy(scores), loader(), loader(3))
    assert trainer.global_step == 4 * epochs
    assert stopping.stopping_reason.name == reason
    assert trainer.early_stopping_callback is stopping
    assert trainer.should_stop == (reason != "NOT_STOPPED")


def test_early_stopping_waits_for_the_minimum():
    trainer = quiet(max_epochs=5, min_epochs=4, callbacks=EarlyStopping("score", patience=1))
    trainer.fit(ScoredToy([1.0] * 5), loader(), loader(3))
    assert trainer.current_epoch == 4


def test_a_stopped_run_stays_stopped_until_its_patience_is_raised(tmp_path: Path):
    def steps(patience: int) -> int:
        trainer = Trainer(
            max_epochs=8,
            accelerator="cpu",
            callbacks=[EarlyStopping("score", patience=patience)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(ScoredToy([1.0] * 8), loader(), loader(), ckpt_path="auto")
        return trainer.global_step

    assert [steps(2), steps(2), steps(2)] == [12, 12, 12]
    assert steps(4) == 20


def test_early_stopping_without_its_metric():
    with pytest.raises(UsageError, match="watches 'scor', which was not logged"):
        quiet(max_epochs=1, callbacks=EarlyStopping("scor")).fit(ScoredToy([1.0]), loader(), loader(3))


# ---- Timer, learning rates


def test_timer_measures_the_stages():
    timer = Timer()
    trainer = quiet(max_epochs=1, callbacks=timer)
    trainer.fit(Toy(), loader(), loader(3))
    assert timer.time_elapsed("train") > 0
    assert timer.time_elapsed("validate") > 0
    assert timer.time_elapsed("test") == 0


def test_learning_rates_reach_the_logs(tmp_path: Path):
    class Scheduled(Toy):
        def configure_optimizers(self) -> Any:
            sgd = torch.optim.SGD(self.parameters(), lr=8.0)
            halve = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
            return [sgd], [{"scheduler": halve, "interval": "step"}]

    monitor = LearningRateMonitor("step")
    trainer = quiet(max_epochs=1, log_every_n_steps=2, logger=CSVLogger(), callbacks=monitor, default_root_dir=tmp_path)
    trainer.fit(Scheduled(), loader())
    assert trainer.log_dir is not None
    found = [(int(row["step"]), float(row["lr-SGD"])) for row in rows(Path(trainer.log_dir) / "metrics.csv")]
    assert found == [(0, 8.0), (2, 2.0)]
    assert monitor.lrs["lr-SGD"][-1] == trainer.callback_metrics["lr-SGD"] == 2.0
    with pytest.raises(SettingError, match="no logger"):
        quiet(max_epochs=1, callbacks=LearningRateMonitor()).fit(Scheduled(), loader())


# ---- which callbacks there are


def test_the_default_callbacks(tmp_path: Path):
    trainer = Trainer(accelerator="cpu", max_time="00:01:00:00", default_root_dir=tmp_path)
    assert [type(callback) for callback in trainer.callbacks] == [Timer, ModelSummary, LiveProgressBar, ModelCheckpoint]
    mine = [ModelCheckpoint(), ModelSummary(max_depth=2), ProgressBar(), EarlyStopping("x")]
    given = Trainer(accelerator="cpu", callbacks=mine)
    assert given.callbacks == [*mine[1:], mine[0]]
    with pytest.raises(SettingError, match="found `ModelCheckpoint` in callbacks"):
        Trainer(accelerator="cpu", callbacks=mine, enable_checkpointing=False)


def test_a_modules_own_callbacks_take_the_place_of_the_same_type():
    class Mine(Callback):
        pass

    class Other(Callback):
        pass

    theirs, own, other = Mine(), Mine(), Other()
    module = Toy()
    module.configure_callbacks = lambda: [own]
    trainer = quiet(max_epochs=1, callbacks=[theirs, other])
    trainer.fit(module, loader())
    trainer.fit(module, loader())
    assert trainer.callbacks == [other, own]


def test_the_modules_callbacks_replace_base_classes_too_and_its_bar_any():
    class Own(TQDMProgressBar):
        pass

    class Summary(ModelSummary):
        pass

    module, own, stopping = Toy(), [Own(refresh_rate=0), Summary()], EarlyStopping("x")
    module.configure_callbacks = lambda: own
    trainer = Trainer(max_epochs=0, accelerator="cpu", callbacks=stopping, logger=False, enable_checkpointing=False)
    assert type(trainer.progress_bar_callback) is LiveProgressBar
    trainer.fit(module, loader())
    trainer.fit(module, loader())
    assert trainer.callbacks == [stopping, *own]
    module.configure_callbacks = lambda: [Own(), LiveProgressBar()]
    with pytest.raises(SettingError, match=r"You added multiple progress bar callbacks \(Own, LiveProgressBar\)"):
        trainer.fit(module, loader())


def test_one_progress_bar():
    with pytest.raises(SettingError, match=r"^You added multiple progress bar callbacks"):
        Trainer(accelerator="cpu", callbacks=[TQDMProgressBar(), RichProgressBar()])
    with pytest.raises(SettingError, match="enable_progress_bar=False` but found `TQDMProgressBar"):
        Trainer(accelerator="cpu", callbacks=TQDMProgressBar(), enable_progress_bar=False)
    rich = Trainer(accelerator="cpu", callbacks=RichProgressBar(), logger=False, enable_checkpointing=False)
    assert [type(callback) for callback in rich.callbacks] == [RichProgressBar, RichModelSummary]
    assert isinstance(ProgressBar(leave=True), LiveProgressBar)


FACTORY = """
from instep import Callback


class Watcher(Callback):
    pass


def several():
    return [Watcher(), Watcher()]


def none():
    return []


def wrong():
    return 3
"""


def test_callbacks_of_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    def install(function: str) -> Trainer:
        folder = tmp_path / function
        (folder / "watcher-1.5.dist-info").mkdir(parents=True)
        (folder / "watcher-1.5.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: watcher\nVersion: 1.5\n"
        )
        lines = "[instep.callbacks_factory]\n" + "\n".join(f"{n} = watcher_pkg:{n}" for n in ("none", function))
        (folder / "watcher-1.5.dist-info" / "entry_points.txt").write_text(lines)
        (folder / "watcher_pkg.py").write_text(FACTORY)
        with monkeypatch.context() as path:
            path.syspath_prepend(folder)
            return Trainer(accelerator="cpu", max_epochs=0, callbacks=EarlyStopping("x"), default_root_dir=tmp_path)

    trainer = install("several")
    names = ["EarlyStopping", "ModelSummary", "LiveProgressBar", "Watcher", "Watcher", "ModelCheckpoint"]
    assert [type(callback).__name__ for callback in trainer.callbacks] == names
    trainer.fit(Toy(), loader())
    said = (
        "EarlyStopping, ModelSummary, LiveProgressBar, Watcher (of watcher 1.5), Watcher (of watcher 1.5), ModelCheckp"
    )
    assert f"Callbacks, as they run: {said}" in capsys.readouterr().out
    with pytest.raises(
        SettingError, match=r"wrong = watcher_pkg:wrong of the installed package watcher 1\.5.*returned 3"
    ):
        install("wrong")
    with pytest.raises(SettingError, match=r"package watcher 1\.5.*made no callback: AttributeError.*CALLBACKS=0"):
        install("missing")
    monkeypatch.setenv("INSTEP_EXTERNAL_CALLBACKS", "0")
    shutil.rmtree(tmp_path / "several")
    assert len(install("several").callbacks) == 4


def test_two_stateful_callbacks_of_one_key_are_refused():
    with pytest.raises(SettingError, match="two callbacks keep their state under the same key Timer"):
        quiet(max_epochs=1, callbacks=[Timer(), Timer()]).fit(Toy(), loader())


class Late(Callback):
    """Has a state once it has seen a batch."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen["step"] = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        return self.seen


def test_two_callbacks_of_one_key_are_refused_where_their_states_come_later(tmp_path: Path):
    saver = ModelCheckpoint(dirpath=tmp_path)
    trainer = quiet(max_epochs=1, callbacks=[Late(), Late(), saver], enable_checkpointing=True)
    with pytest.raises(SettingError, match="two callbacks keep their state under the same key Late"):
        trainer.fit(Toy(), loader())


# ---- loggers


@pytest.mark.parametrize(
    "arguments",
    [
        ({}, {}),
        ({"version": 1}, {}),
        ({}, {"version": 0}),
        ({"name": "a"}, {"name": "a"}),
        ({"save_dir": None}, {}),
        ({"save_dir": "other"}, {"save_dir": None}),
    ],
)
@pytest.mark.parametrize("kind", [CSVLogger, JSONLinesLogger])
def test_two_loggers_of_one_file_are_refused(kind: Any, arguments: Any, tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    loggers = [kind(**{"save_dir": "logs", **given}) for given in arguments]
    with pytest.raises(SettingError, match=r"would both write .*metrics\."):
        quiet(max_epochs=1, logger=loggers, default_root_dir=tmp_path).fit(Toy(), loader())


@pytest.mark.parametrize("arguments", [({"name": "a"}, {"name": "b"}), ({"version": 1}, {"version": 2})])
def test_two_loggers_of_a_kind_have_a_file_each(arguments: Any, tmp_path: Path):
    loggers = [CSVLogger(tmp_path, **given) for given in arguments]
    quiet(max_epochs=1, log_every_n_steps=1, logger=loggers, default_root_dir=tmp_path).fit(LoggingToy(), loader())
    first, second = (rows(logger.path) for logger in loggers)
    assert first == second
    assert first


def test_csv_holds_what_was_logged(tmp_path: Path):
    trainer = quiet(max_epochs=2, log_every_n_steps=2, logger=CSVLogger(), default_root_dir=tmp_path)
    trainer.fit(LoggingToy(lr=0.25), loader(), loader(6))
    assert trainer.log_dir == str(tmp_path / "instep_runs" / "version_0")
    table = rows(tmp_path / "instep_runs" / "version_0" / "metrics.csv")
    steps = [int(row["step"]) for row in table if row["train_loss_step"]]
    assert steps == [2, 4, 6, 8]
    (last,) = [row for row in table if row["val_loss"] and int(row["step"]) == 8]
    assert float(last["val_loss"]) == pytest.approx(float(trainer.callback_metrics["val_loss"]))
    assert [float(row["epoch"]) for row in table if row["train_loss_epoch"]] == [0.0, 1.0]


def test_tensorboard_holds_what_was_logged(tmp_path: Path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = quiet(max_epochs=1, log_every_n_steps=2, logger=True, default_root_dir=tmp_path)
    trainer.fit(LoggingToy(lr=0.25), loader(), loader(6))
    assert isinstance(trainer.logger, TensorBoardLogger)
    found = event_accumulator.EventAccumulator(trainer.log_dir)
    found.Reload()
    assert {"train_loss_step", "train_loss_epoch", "val_loss", "epoch"} <= set(found.Tags()["scalars"])
    assert [event.step for event in found.Scalars("train_loss_step")] == [2, 4]
    (val,) = found.Scalars("val_loss")
    assert val.value == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=1e-6)


def test_hyperparameters_are_logged_once_with_those_of_the_data(tmp_path: Path):
    from instep import DataModule

    class Data(DataModule):
        def __init__(self, size: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader(6, self.hparams.size)

    seen: list[dict[str, Any]] = []

    class Notes(CSVLogger):
        def _log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None) -> None:
            seen.append(params)
            super()._log_hyperparams(params, metrics)

    trainer = quiet(max_epochs=1, logger=Notes(), default_root_dir=tmp_path)
    trainer.fit(Toy(lr=0.25), datamodule=Data())
    assert seen == [{"size": 3, "lr": 0.25}]

    class Other(Toy):
        def __init__(self, size: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()

    with pytest.raises(UsageError, match="Error while merging hparams: Data and Other have different values of size"):
        trainer.fit(Other(), datamodule=Data())

    class Silent(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"secret": 1}, logger=False)

    quiet(max_epochs=1, logger=Notes(), default_root_dir=tmp_path).fit(Silent(), loader())
    assert len(seen) == 1


@pytest.mark.filterwarnings("default:::tensorboard.*", "default::DeprecationWarning", "ignore:.*before the run, which")
@pytest.mark.parametrize("used", ["before the Trainer", "after it"])
@pytest.mark.parametrize(("save_dir", "version"), [(None, None), ("own", None), ("own", 3)])
def test_what_users_write_around_a_fit_is_in_its_folder_unless_that_goes_on_with_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_dir: str | None, version: int | None, used: str
):
    monkeypatch.chdir(tmp_path)

    def write(when: str, step: int = 0) -> None:
        board.experiment.add_text(when, "text", step)
        table.log_metrics({when: 1.0}, step)
        table.save()

    for attempt in ("first", "resumed"):  # the second process finds a finished run, and goes on with it
        sub_dir = None if version is None else "board"
        board, table = (
            TensorBoardLogger(save_dir, version=version, sub_dir=sub_dir),
            CSVLogger(save_dir and f"{save_dir}-csv"),
        )
        if used == "before the Trainer":
            write(attempt)
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=1 if attempt == "first" else 2,
            default_root_dir="root",
            logger=[board, table],
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
        )
        if used == "after it":
            write(attempt)
        trainer.fit(LoggingToy(), loader(), loader(3), ckpt_path="auto")
        write(f"after-{attempt}", trainer.global_step)
        board.finalize()
        table.finalize()
        assert board.log_dir is not None
        assert Path(board.log_dir).absolute() == Path(trainer.log_dir or "", sub_dir or "")

    found = rows(Path(table.log_dir or "") / "metrics.csv")
    assert sorted(float(row["step"]) for row in found if row["train_loss_step"]) == list(range(1, 9))
    for name in ("after-first", "after-resumed"):
        assert [row[name] for row in found if row[name]] == ["1.0"]
    early = {"first"}
    if used == "before the Trainer":  # such a logger knows no root, but the folder of its version
        early = set[str]() if save_dir is None else {"first"} if version is None else {"first", "resumed"}
    assert set(texts(Path(board.log_dir or ""))) == {"after-first", "after-resumed"} | early
    events = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")} - {Path(board.log_dir or "").absolute()}
    assert set[str]().union(*map(texts, events)) == {"first", "resumed"} - early
    assert Path(trainer.log_dir or "").name == f"version_{version or 0}"


@pytest.mark.filterwarnings("default:::tensorboard.*", "default::DeprecationWarning", "ignore:.*before the run, which")
@pytest.mark.parametrize("used", ["before the Trainer", "after it"])
def test_what_users_write_before_a_fit_that_finds_its_version_taken(tmp_path: Path, used: str):
    def fit(attempt: str, **how: Any) -> Trainer:
        board = TensorBoardLogger(tmp_path, version=3)
        if used == "before the Trainer":
            board.experiment.add_text(attempt, "text")
        trainer = Trainer(
            accelerator="cpu", max_epochs=1, logger=board, enable_progress_bar=False, enable_model_summary=False
        )
        if used == "after it":
            board.experiment.add_text(attempt, "text")
        trainer.fit(LoggingToy(), loader(), **how)
        return trainer

    fit("first")
    with pytest.warns(UserWarning, match="version_3 is taken"):
        second = fit("second")
    assert second.log_dir == str(tmp_path / "version_4")
    again = fit("again", ckpt_path="auto")
    assert again.log_dir == second.log_dir
    found = {path.name: set(texts(path)) for path in tmp_path.iterdir()}
    if used == "after it":
        assert found == {"version_3": {"first"}, "version_4": {"second"}, "version_5": {"again"}}
    else:  # without a Trainer the user's word alone holds
        assert found == {"version_3": {"first", "second", "again"}, "version_4": set()}


def test_run_folders_are_numbered_and_say_how_the_run_ended(tmp_path: Path):
    for _ in range(2):
        quiet(max_epochs=1, logger=CSVLogger(), default_root_dir=tmp_path).fit(LoggingToy(), loader())
    module = LoggingToy()
    module.on_train_epoch_end = lambda: 1 / 0
    trainer = quiet(max_epochs=1, logger=CSVLogger(), default_root_dir=tmp_path)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, loader())
    runs = tmp_path / "instep_runs"
    assert sorted(path.name for path in runs.iterdir()) == ["version_0", "version_1", "version_2"]
    statuses = [json.loads((runs / f"version_{i}" / "status.json").read_text()) for i in range(3)]
    assert [status["status"] for status in statuses] == ["done", "done", "failed"]
    assert statuses[2]["error"] == "ZeroDivisionError: division by zero"


def test_a_run_without_loggers_and_checkpoints_writes_nothing(tmp_path: Path):
    trainer = quiet(max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(LoggingToy(), loader(), loader(3))
    assert trainer.log_dir is None
    assert not list(tmp_path.iterdir())


# ---- the module


def test_freeze_and_unfreeze():
    module = Toy()
    assert module.freeze() is module
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())
    module.unfreeze()
    assert module.training
    assert all(p.requires_grad for p in module.parameters())


def test_what_a_module_knows_of_its_trainer(capsys: pytest.CaptureFixture[str]):
    module = Toy()
    assert (module.current_epoch, module.global_step, module.global_rank, module.logger) == (0, 0, 0, None)
    with pytest.raises(UsageError, match="not attached"):
        _ = module.trainer
    seen: list[Any] = []

    def ends() -> None:
        seen.append((module.current_epoch, module.global_step, module.trainer.is_global_zero, module.device.type))
        module.print("hello")
        assert torch.equal(module.all_gather(torch.ones(2)), torch.ones(2))

    module.on_train_batch_start = lambda batch, batch_idx: None if module.batch_weight == 1.0 else -1
    module.on_train_epoch_end = ends
    quiet(max_epochs=2).fit(module, loader())
    assert seen == [(0, 4, True, "cpu"), (1, 8, True, "cpu")]
    assert [line for line in capsys.readouterr().out.splitlines() if line == "hello"] == ["hello"] * 2


def test_a_copy_of_a_trained_module_carries_no_trainer():
    module = Toy()
    quiet(max_epochs=1).fit(module, loader())
    other = copy.deepcopy(module)
    assert_same(weights(other), weights(module))
    with pytest.raises(UsageError, match="not attached"):
        _ = other.trainer
    quiet(max_epochs=1).fit(other, loader())


def test_configure_model_makes_layers_before_the_optimizer():
    class Late(TrainModule):
        layer: nn.Linear

        def configure_model(self) -> None:
            if not hasattr(self, "layer"):
                self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = quiet(max_epochs=1, precision="64-true")
    trainer.fit(module := Late(), loader())
    assert module.layer.weight.dtype is torch.float64
