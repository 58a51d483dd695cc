"""The run folder: who chooses it, who goes on in it, and what `status.json` says."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from instep import Callback, Trainer
from instep.callbacks import ModelCheckpoint
from instep.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, Preempted
from instep.loggers import CSVLogger, JSONLinesLogger, Logger, TensorBoardLogger, folders
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import QUIET, LoggingToy, Toy, WiderToy, loader, quiet


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
    assert trainer._ctx is None, "detached"
    assert trainer.state.stage is None
    assert trainer.state.stopped


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

    first = new()
    first.fit(Toy(), loader())
    path = first.checkpoint_callback.last_model_path  # type: ignore[union-attr]
    second = new(logger=CSVLogger() if logger else False)
    with pytest.raises(CheckpointError, match="do not fit"):
        second.fit(WiderToy(), loader(), ckpt_path=path)
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


# ---- a logger's `save_dir`: logs and checkpoints of a run in one folder


def boards(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob("events.out.tfevents.*"))


def logging_to(logger: Any, epochs: int = 1, callbacks: Any = (), **settings: Any) -> Trainer:
    defaults = {"max_epochs": epochs, "enable_checkpointing": True, "log_every_n_steps": 1}
    return quiet(logger=logger, callbacks=[*callbacks], **defaults, **settings)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("version", [None, 3, "best", ""])
def test_the_first_logger_with_a_save_dir_gives_the_run_folder(version: Any, tmp_path: Path):
    table, board = CSVLogger(), TensorBoardLogger(tmp_path / "tb", "exp", version, sub_dir="board")
    beside, own = JSONLinesLogger(tmp_path / "tb", "exp", version or None), CSVLogger(tmp_path / "own", version="x")
    trainer = logging_to([table, board, beside, own], default_root_dir=tmp_path / "root")
    trainer.fit(LoggingToy(), loader())
    folder = tmp_path / "tb" / "exp" / {None: "version_0", 3: "version_3"}.get(version, version)
    assert (trainer.log_dir, trainer.default_root_dir) == (str(folder), str(tmp_path / "root"))
    assert {"checkpoints", "status.json", "metrics.csv"} <= {path.name for path in folder.iterdir()}
    assert boards(tmp_path) == [folder / "board"]
    assert table.log_dir == str(folder)
    assert beside.log_dir == str(folder if version != "" else folder / "version_0")
    assert own.log_dir == str(tmp_path / "own" / "x"), "of another name or version: as it says"
    assert not (tmp_path / "root").exists()
    assert Path(trainer.checkpoint_callback.best_model_path).parent == folder / "checkpoints"  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
@pytest.mark.parametrize("how", ["auto", "last", "path"])
def test_the_same_command_goes_on_in_the_loggers_folder(how: str, kind: Any, tmp_path: Path):
    def fit(version: Any, epochs: int, ckpt_path: Any) -> Trainer:
        trainer = logging_to(kind(tmp_path, "exp", version), epochs)
        trainer.fit(LoggingToy(), loader(), ckpt_path=ckpt_path)
        return trainer

    first, other = fit(1, 1, "auto"), fit(2, 1, "auto")
    assert (other.global_step, Path(other.log_dir or "").name) == (4, "version_2"), "another version is another run"
    path = first.checkpoint_callback.last_model_path  # type: ignore[union-attr]
    again = fit(1, 2, path if how == "path" else how)
    assert (again.global_step, again.log_dir) == (8, first.log_dir)
    assert [path.name for path in sorted((tmp_path / "exp").iterdir())] == ["version_1", "version_2"]
    newest = fit(None, 3, "auto")
    assert (newest.global_step, newest.log_dir) == (12, other.log_dir), "without a version: the newest of all"


def leave_run(folder: Path) -> None:
    logging_to(CSVLogger(folder.parent.parent, folder.parent.name, 3)).fit(LoggingToy(), loader())


def leave_lightnings(folder: Path) -> None:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "epoch=0-step=4.ckpt").write_bytes(b"PK")
    (folder / "hparams.yaml").write_text("lr: 0.1\n")
    (folder / "metrics.csv").write_text("epoch,loss\n0,1.0\n")


@pytest.mark.parametrize("leave", [leave_run, leave_lightnings])
def test_a_folder_of_another_run_is_left_alone_and_the_next_version_is_found_again(leave: Any, tmp_path: Path):
    taken = tmp_path / "exp" / "version_3"
    leave(taken)
    before = contents(tmp_path)

    def fit(logger: Any, *callbacks: Any, **how: Any) -> Trainer:
        trainer = logging_to(logger, 2, callbacks)
        with pytest.raises(KeyError) if callbacks else nullcontext():
            trainer.fit(LoggingToy(), loader(), **how)
        return trainer

    with pytest.warns(UserWarning, match=r"version_3 is taken: .* writes into .*version_4, and ckpt_path='auto'"):
        killed = fit(CSVLogger(tmp_path, "exp", 3), Raises("on_train_end", KeyError()))
    assert killed.log_dir == str(tmp_path / "exp" / "version_4")
    again = fit(CSVLogger(tmp_path, "exp", 3), ckpt_path="auto")
    assert (again.log_dir, again.resume_report is not None) == (killed.log_dir, True)
    assert {path: data for path, data in contents(tmp_path).items() if path in before} == before
    assert {path.name for path in (tmp_path / "exp").iterdir()} == {"version_3", "version_4"}


def test_a_run_behind_a_link_is_passed_over_aloud(tmp_path: Path):
    leave_run(tmp_path / "elsewhere" / "exp" / "version_3")
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "version_3").symlink_to(tmp_path / "elsewhere" / "exp" / "version_3")
    (tmp_path / "exp" / "latest").symlink_to(tmp_path / "exp" / "version_4")
    before = contents(tmp_path / "elsewhere")
    auto, named = logging_to(CSVLogger(tmp_path, "exp")), logging_to(CSVLogger(tmp_path, "exp", 3))
    with pytest.warns(UserWarning, match="version_3 is passed over: it leads out"):
        auto.fit(LoggingToy(), loader(), ckpt_path="auto")
    assert (auto.log_dir, auto.resume_report) == (str(tmp_path / "exp" / "version_4"), None)
    with pytest.warns(UserWarning, match="version_3 is taken"):
        named.fit(LoggingToy(), loader())
    assert named.log_dir == str(tmp_path / "exp" / "version_5")
    assert contents(tmp_path / "elsewhere") == before


def test_an_older_checkpoint_of_a_folder_is_gone_on_from_in_the_next_version(tmp_path: Path):
    first, second = (
        logging_to(CSVLogger(tmp_path, version=0), epochs, [ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)])
        for epochs in (1, 2)
    )
    first.fit(Toy(), loader())
    with pytest.warns(UserWarning, match="version_0 is taken"):
        second.fit(Toy(), loader(), ckpt_path=tmp_path / "version_0" / "checkpoints" / "step-00000002-1")
    assert (second.log_dir, second.global_step) == (str(tmp_path / "version_1"), 8)


def test_an_evaluation_logs_beside_the_run_and_a_fit_does_not(tmp_path: Path):
    leave_run(tmp_path / "exp" / "version_3")
    before = contents(tmp_path)
    trainer = logging_to(TensorBoardLogger(tmp_path, "exp", 3))
    trainer.test(LoggingToy(), loader(), ckpt_path="last")
    assert trainer.log_dir == str(tmp_path / "exp" / "version_3")
    with pytest.warns(UserWarning, match="version_3 is taken"):
        trainer.fit(LoggingToy(), loader())
    assert trainer.log_dir == str(tmp_path / "exp" / "version_4")
    assert {path: data for path, data in contents(tmp_path).items() if path in before} == before
    fresh = logging_to(CSVLogger(tmp_path, "fresh", 3))
    fresh.validate(LoggingToy(), loader())
    fresh.fit(LoggingToy(), loader())
    assert fresh.log_dir == str(tmp_path / "fresh" / "version_3")


def test_loggers_that_are_set_between_runs_decide_anew(tmp_path: Path):
    trainer = logging_to(CSVLogger(tmp_path / "one"), default_root_dir=tmp_path)
    trainer.loggers = [CSVLogger(tmp_path / "two", "exp")]
    assert trainer.run_folder.base == tmp_path / "two" / "exp"
    trainer.loggers = [CSVLogger()]
    trainer.fit(LoggingToy(), loader())
    assert trainer.log_dir == str(tmp_path / "instep_runs" / "version_0")


def test_a_runs_own_configuration_says_which_run_of_a_logger_is_meant(tmp_path: Path):
    first, second = (logging_to(CSVLogger(tmp_path, "exp")) for _ in range(2))
    for trainer in (first, second):
        trainer.fit(LoggingToy(), loader())
    meant, newest = logging_to(CSVLogger(tmp_path, "exp"), 2), logging_to(CSVLogger(tmp_path, "exp"), 2)
    meant.run_folder.given = [tmp_path / "exp" / "version_0"]
    newest.run_folder.given = [tmp_path / "exp"]
    for trainer, run in ((meant, first), (newest, second)):
        trainer.fit(LoggingToy(), loader(), ckpt_path="auto")
        assert (trainer.log_dir, trainer.global_step) == (run.log_dir, 8)


def test_a_run_that_begins_in_a_new_folder_writes_into_no_loggers_old_one(tmp_path: Path):
    def fit(epochs: int, ckpt_path: Any = None, version: Any = None) -> Trainer:
        trainer = logging_to([TensorBoardLogger(tmp_path / "tb"), CSVLogger(tmp_path / "csv", version=version)], epochs)
        trainer.fit(LoggingToy(), loader(), ckpt_path=ckpt_path)
        return trainer

    first = fit(1)
    before = contents(tmp_path / "csv")
    path = first.checkpoint_callback.last_model_path  # type: ignore[union-attr]
    assert [Path(logger.log_dir or "").name for logger in fit(2, path).loggers] == ["version_1", "version_1"]
    with pytest.warns(UserWarning, match="CSVLogger writes into .*version_2"):
        fit(1, version=0)
    assert before.items() <= contents(tmp_path / "csv").items()
    assert [Path(logger.log_dir or "").name for logger in fit(3, "auto").loggers] == ["version_2", "version_2"]


def test_an_evaluation_before_it_keeps_no_fit_from_its_run(tmp_path: Path):
    logging_to(True, 1, default_root_dir=tmp_path).fit(LoggingToy(), loader())
    trainer = logging_to(True, 2, default_root_dir=tmp_path)
    for _ in range(2):
        trainer.test(LoggingToy(), loader(), ckpt_path="best", verbose=False)
    trainer.fit(LoggingToy(), loader(), ckpt_path="auto")
    assert (trainer.global_step, trainer.log_dir) == (8, str(tmp_path / "instep_runs" / "version_0"))
    new = logging_to(True, 1, default_root_dir=tmp_path)
    new.test(LoggingToy(), loader(), verbose=False)
    folder = new.log_dir
    new.fit(LoggingToy(), loader())
    assert new.log_dir == folder, "a run that begins takes it"


def test_one_logger_of_several_trainers_has_a_folder_for_each(tmp_path: Path):
    logger = CSVLogger(tmp_path)
    folders = []
    for _ in range(2):  # as in cross-validation
        trainer = logging_to(logger)
        trainer.fit(LoggingToy(), loader())
        folders.append(trainer.log_dir)
        tested = logging_to(logger)
        tested.test(LoggingToy(), loader())
        assert (tested.log_dir, logger.log_dir) == (trainer.log_dir, trainer.log_dir)
    assert folders == [str(tmp_path / "version_0"), str(tmp_path / "version_1")]


def test_jobs_that_start_at_once_take_different_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    together, look = Barrier(2), folders.is_free

    def is_free(folder: Path) -> bool:
        free = look(folder)
        together.wait(30)  # both have looked before one of them acts
        return free

    monkeypatch.setattr(folders, "is_free", is_free)
    trainers = [logging_to(CSVLogger(tmp_path, version=3)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        taken = list(pool.map(lambda trainer: trainer.run_folder._make(for_fit=True)[0].name, trainers))
    assert sorted(taken) == ["version_3", "version_4"]


def on_a_rank(root: Path) -> list[tuple[str | None, int]]:
    """Take a version that is taken, then go on there."""
    ends = []
    for epochs, ckpt_path in ((1, None), (2, "auto")):
        trainer = logging_to(CSVLogger(root, "exp", 3), epochs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*version_3 is taken")
            trainer.fit(LoggingToy(), loader(), ckpt_path=ckpt_path)
        ends.append((trainer.log_dir, trainer.global_step))
    return ends


@pytest.mark.dist
def test_rank_0_chooses_for_all(tmp_path: Path):
    leave_run(tmp_path / "exp" / "version_3")
    first, second = run_ranks(on_a_rank, 2, tmp_path)
    assert first == second == [(str(tmp_path / "exp" / "version_4"), steps) for steps in (2, 4)]
    assert {path.name for path in (tmp_path / "exp").iterdir()} == {"version_3", "version_4"}


@pytest.mark.parametrize("earlier", [False, True], ids=["alone", "beside an earlier run"])
@pytest.mark.parametrize("off", ["fast_dev_run", "enable_checkpointing"])
def test_a_run_that_saves_nothing_says_so_where_its_best_is_asked_for(off: str, earlier: bool, tmp_path: Path):
    places = {**QUIET, "default_root_dir": tmp_path}
    del places["enable_checkpointing"]
    if earlier:
        Trainer(**places, max_epochs=1).fit(Toy(), loader())
    why = {"fast_dev_run": True} if off == "fast_dev_run" else {"enable_checkpointing": False, "max_epochs": 1}
    trainer = Trainer(**places, **why)
    trainer.fit(Toy(), loader())
    for name in ("best", "last"):
        for run in (trainer.test, trainer.validate, trainer.predict):
            with pytest.raises(
                CheckpointNotFoundError, match=rf"'{name}': there is no checkpoint .*\. {off}\S* saves none\."
            ):
                run(Toy(), loader(), ckpt_path=name)
