"""Loggers of an Accelerator: nothing that was logged is dropped without a word."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from instep import Accelerator
from instep.accelerator import GeneralTracker, LoggerType, register_tracker_class, trackers
from instep.errors import SettingError, UsageError
from instep.loggers import CSVLogger, Logger
from tests.helpers.spawn import run_command, run_ranks
from tests.helpers.warm import warm_python


class Rows(Logger):
    """Keeps what it is given."""

    def __init__(self, per_rank: bool = False) -> None:
        super().__init__(name="rows", per_rank=per_rank)
        self.rows: list[Any] = []
        self.params: list[Any] = []
        self.ended = 0

    def _log_metrics(self, metrics: Any, step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def _log_hyperparams(self, params: Any, metrics: Any = None) -> None:
        self.params.append(params)

    def _finalize(self, status: str) -> None:
        self.ended += 1


def test_what_is_logged_before_the_start_is_kept(make: Any, tmp_path: Path) -> None:
    rows = Rows()
    accelerator = make(log_with=rows, project_dir=tmp_path)
    accelerator.log({"loss": 1.0})
    accelerator.log({"loss": torch.tensor(2.0)}, step=7)
    accelerator.init_trackers("project", config={"lr": 0.1})
    accelerator.log({"loss": 3})
    assert rows.delivery.sender.flush(10)
    assert rows.rows == [(1, {"loss": 1.0}), (7, {"loss": 2.0}), (8, {"loss": 3})]
    assert rows.params == [{"lr": 0.1}]
    assert accelerator.get_tracker("Rows") is rows
    accelerator.end_training()
    accelerator.end_training()
    assert rows.ended == 1


def test_a_logger_of_every_rank_has_what_another_rank_logged_before_the_start(tmp_path: Path) -> None:
    rows = Rows(per_rank=True)
    of_another_rank = trackers.Trackers(rows, is_main=False)
    of_another_rank.log({"loss": 1.0}, None)
    of_another_rank.init("project", None, {}, tmp_path)
    of_another_rank.finish()
    assert rows.rows == [(1, {"loss": 1.0})]


def test_of_many_records_before_the_start_the_last_are_kept_with_a_warning(make: Any, tmp_path: Path) -> None:
    rows = Rows()
    accelerator = make(log_with=rows, project_dir=tmp_path)
    for step in range(10_000):
        accelerator.log({"loss": 1.0}, step=step)
    with pytest.warns(UserWarning, match=r"keeps the last 10,000 records until init_trackers\(\) is called"):
        accelerator.log({"loss": 1.0}, step=10_000)
    for step in (10_001, 10_002):
        accelerator.log({"loss": 1.0}, step=step)
    accelerator.init_trackers("project")
    assert rows.delivery.sender.flush(60)
    assert [step for step, _ in rows.rows] == list(range(3, 10_003))
    accelerator.end_training()


def test_names_make_loggers_in_the_projects_folder(make: Any, tmp_path: Path) -> None:
    accelerator = make(log_with=["csv", "tensorboard"], project_dir=tmp_path)
    accelerator.init_trackers("project", init_kwargs={"csv": {"prefix": "my"}})
    accelerator.log({"loss": 0.5}, step=3)
    assert isinstance(accelerator.get_tracker("csv"), CSVLogger)
    with pytest.raises(UsageError, match="started are: csv, tensorboard"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()
    [file] = tmp_path.rglob("metrics.csv")
    [row] = csv.DictReader(file.read_text().splitlines())
    assert (row["step"], row["my-loss"]) == ("3", "0.5")
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_projects_of_two_names_have_folders_of_their_own(make: Any, tmp_path: Path) -> None:
    for name in ("first", "second"):
        accelerator = make(log_with=["csv", "tensorboard"], project_dir=tmp_path)
        accelerator.init_trackers(name, config={"name": name})
        accelerator.log({name: 0.5}, step=3)
        accelerator.end_training()
    for name in ("first", "second"):
        [row] = csv.DictReader((tmp_path / name / "metrics.csv").read_text().splitlines())
        assert row == {"step": "3", name: "0.5"}
        assert len(list((tmp_path / name).glob("events.out.tfevents.*"))) == 1


def test_logging_to_nowhere_is_said_once(make: Any, recwarn: pytest.WarningsRecorder) -> None:
    accelerator = make()
    with pytest.warns(UserWarning, match="nowhere to write to"):
        accelerator.log({"loss": 1.0})
    accelerator.log({"loss": 1.0})


def test_records_that_are_never_written_are_counted(make: Any) -> None:
    accelerator = make(log_with="csv")
    accelerator.log({"loss": 1.0})
    with pytest.warns(UserWarning, match="1 records of accelerator"):
        accelerator.end_training()


@pytest.mark.parametrize("last", ["", "raise SystemExit(3)"])
def test_a_program_that_does_not_call_end_training_keeps_what_it_logged(tmp_path: Path, last: str) -> None:
    lines = (
        "import sys, numpy",
        "from instep import Accelerator",
        "accelerator = Accelerator(cpu=True, log_with='csv', project_dir=sys.argv[1])",
        "accelerator.init_trackers('project')",
        "accelerator.log({'loss': 0.5}, step=numpy.int64(3))",
        last,
    )
    done = run_command([warm_python(), "-c", "\n".join(lines), str(tmp_path)], cwd=Path(__file__).parents[2])
    assert (done.returncode == 0) == (last == ""), done.stderr
    assert (tmp_path / "project" / "metrics.csv").read_text().split() == ["step,loss", "3,0.5"]


def start_on_the_main_rank(folder: str) -> int:
    accelerator = Accelerator(cpu=True, log_with="csv", project_dir=folder)
    if accelerator.is_main_process:
        accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0})
    accelerator.get_tracker("csv").log_metrics({"loss": 2.0})
    kept = len(accelerator._trackers._kept)
    accelerator.end_training()  # a warning would be an error
    return kept


@pytest.mark.dist
def test_trackers_that_only_the_main_rank_starts_are_enough(tmp_path: Path) -> None:
    assert run_ranks(start_on_the_main_rank, 2, str(tmp_path)) == [0, 0]


def test_arguments_for_a_logger_that_is_not_there_are_refused(make: Any) -> None:
    with pytest.raises(SettingError, match="wandb, which log_with does not name"):
        make(log_with="csv").init_trackers("project", init_kwargs={"wandb": {}})


def test_two_loggers_of_one_class_both_write(make: Any, tmp_path: Path) -> None:
    first, second = Rows(), Rows()
    accelerator = make(log_with=[first, "csv", second, CSVLogger(tmp_path / "own")], project_dir=tmp_path)
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0})
    assert accelerator.get_tracker("Rows") is first
    assert accelerator.get_tracker("Rows-2") is second
    assert accelerator.get_tracker("csv-2").log_dir == str(tmp_path / "own" / "version_0")
    accelerator.end_training()
    assert first.rows == second.rows == [(1, {"loss": 1.0})]
    assert first.ended == second.ended == 1
    assert len(list(tmp_path.rglob("metrics.csv"))) == 2


@pytest.mark.parametrize("twice", [["csv", "csv"], ["all", "wandb"], [Rows()] * 2])
def test_one_logger_given_twice_is_refused(make: Any, twice: list[Any]) -> None:
    with pytest.raises(SettingError, match="twice"):
        make(log_with=twice)


def test_starting_trackers_twice_is_refused(make: Any, tmp_path: Path) -> None:
    rows = Rows()
    accelerator = make(log_with=rows, project_dir=tmp_path)
    accelerator.init_trackers("project", config={"lr": 1})
    with pytest.raises(UsageError, match="called twice; Rows run already"):
        accelerator.init_trackers("project", config={"lr": 2})
    accelerator.end_training()
    assert rows.params == [{"lr": 1}]


def test_arguments_for_a_logger_that_is_made_already_are_refused(make: Any) -> None:
    with pytest.raises(SettingError, match="csv, which log_with does not name"):
        make(log_with=CSVLogger()).init_trackers("project", init_kwargs={"csv": {"prefix": "my"}})


class Printed(GeneralTracker):
    """A tracker as Accelerate has them."""

    name = "printed"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str, **options: Any) -> None:
        super().__init__()
        self.calls: list[Any] = [(run_name, logging_dir, options)]

    @property
    def tracker(self) -> Any:
        return self.calls

    def start(self) -> None:
        self.calls.append("start")

    def store_init_configuration(self, values: Any) -> None:
        self.calls.append(values)

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self.calls.append((values, step, kwargs))

    def finish(self) -> None:
        self.calls.append("finish")


def test_names_of_trackers_are_their_texts(make: Any, tmp_path: Path) -> None:
    accelerator = make(log_with=LoggerType.CSV, project_dir=tmp_path)
    accelerator.init_trackers("mine")
    assert accelerator.get_tracker("csv").name
    accelerator.end_training()


def test_trackers_of_the_users_own_are_known_by_name(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "LOGGER_TYPE_TO_CLASS", {})
    register_tracker_class(Printed)
    with pytest.warns(UserWarning, match="'printed' is already registered"):
        register_tracker_class(Printed)
    for wrong, says in ((Rows, "subclass of `GeneralTracker`"), (type("N", (GeneralTracker,), {}), "no `name`")):
        with pytest.raises(SettingError, match=says):
            register_tracker_class(wrong)
    with pytest.raises(NotImplementedError, match="no tracker"):
        type("Half", (GeneralTracker,), {"name": "half", "requires_logging_directory": False})()
    with pytest.raises(SettingError, match="requires a `logging_dir`"):
        make(log_with="printed")
    accelerator = make(log_with="printed", project_dir=tmp_path)
    accelerator.log({"text": "words"}, log_kwargs={"printed": {"commit": False}})
    accelerator.init_trackers("name", {"lr": 1}, init_kwargs={"printed": {"tags": 2}})
    accelerator.log({"losses": {"a": 1.0}}, step=7)
    calls = accelerator.get_tracker("printed", unwrap=True)
    assert accelerator.trackers == [accelerator.get_tracker("printed")]
    accelerator.end_training()
    assert calls == [
        ("name", str(tmp_path), {"tags": 2}), "start", {"lr": 1},
        ({"text": "words"}, 1, {"commit": False}), ({"losses": {"a": 1.0}}, 7, {}), "finish",
    ]  # fmt: skip


def test_texts_and_nested_values_go_where_there_is_a_place(make: Any, tmp_path: Path) -> None:
    rows = Rows()
    accelerator = make(log_with=[rows, "tensorboard"], project_dir=tmp_path)
    accelerator.init_trackers("project")
    values = {"said": "words", "losses": {"a": 1.0, "b": {"c": 2}}}
    with pytest.warns(UserWarning, match="Rows has no place for text"):
        accelerator.log(values, step=1)
    accelerator.log(values, step=2)  # a second warning would be an error
    with pytest.raises(SettingError, match=r"log_kwargs=.*get_tracker\('Rows', unwrap=True\)"):
        accelerator.log({"x": 1}, log_kwargs={"Rows": {"commit": False}})
    accelerator.end_training()
    assert rows.rows[0] == (1, {"losses/a": 1.0, "losses/b/c": 2})
    found = EventAccumulator(str(tmp_path / "project"), {"tensors": 0}).Reload()
    assert found.Tensors("said/text_summary")[0].tensor_proto.string_val == [b"words"]


def test_a_resumed_program_counts_its_records_on(make: Any, tmp_path: Path) -> None:
    first = make(log_with=Rows(), project_dir=tmp_path)
    first.init_trackers("project")
    for loss in (3.0, 2.0):
        first.log({"loss": loss})
    first.save_state(tmp_path / "state")
    first.log({"loss": 1.0})
    first.load_state(tmp_path / "state")  # one program never counts backwards: trackers would drop the records
    first.log({"loss": 2.0})
    first.end_training()
    assert first._trackers.step == 4
    rows = Rows()
    second = make(log_with=rows, project_dir=tmp_path)
    second.log({"seen": 1.0})
    second.load_state(tmp_path / "state")
    second.init_trackers("project")
    second.log({"loss": 1.0})
    second.end_training()
    assert rows.rows == [(3, {"seen": 1.0}), (4, {"loss": 1.0})]
