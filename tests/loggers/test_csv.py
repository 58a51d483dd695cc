from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from instep.errors import CorruptCheckpointError, InstepError, SettingError
from instep.loggers import CSVLogger, JSONLinesLogger
from instep.loggers import csv as module


def read(folder: Path) -> list[dict[str, float]]:
    """The table, empty cells left out."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(None not in row and None not in row.values() for row in rows)  # every row is as wide as the header
    return [{name: float(value) for name, value in row.items() if value != ""} for row in rows]


def opened(folder: Path, **options) -> CSVLogger:
    logger = CSVLogger(**options)
    logger.delivery.start(folder)
    return logger


def test_csv_logger_writes_a_row_for_each_step_and_a_column_for_each_name(tmp_path):
    logger = opened(tmp_path)
    logger.log_metrics({"loss": 0.1, "epoch": 0}, step=50)
    logger.log_metrics({"val_loss": 0.0}, step=60)
    logger.finalize()
    assert read(tmp_path) == [{"step": 50, "loss": 0.1, "epoch": 0}, {"step": 60, "val_loss": 0.0}]
    assert (tmp_path / "metrics.csv").read_text().splitlines()[0] == "step,loss,epoch,val_loss"


@given(value=st.floats(allow_nan=True, allow_infinity=True))
def test_numbers_come_back_exactly(value, tmp_path_factory):
    folder = tmp_path_factory.mktemp("csv")
    logger = opened(folder)
    logger.log_metrics({"x": value}, step=1)
    logger.finalize()
    (row,) = read(folder)
    assert row["x"] == value or (math.isnan(value) and math.isnan(row["x"]))


def test_later_columns_rewrite_the_file_once_per_flush(tmp_path, monkeypatch):
    rewrites = []
    original = module._write_table
    monkeypatch.setattr(module, "_write_table", lambda *args: (rewrites.append(args), original(*args)))
    logger = opened(tmp_path, flush_logs_every_n_steps=100)
    for step in range(0, 1000, 10):
        metrics = {"a": float(step)}
        if step >= 500:
            metrics[f"new_{step}"] = 1.0
        logger.log_metrics(metrics, step=step)
    logger.finalize()
    rows = read(tmp_path)
    assert [row["step"] for row in rows] == list(range(0, 1000, 10))
    assert [row["a"] for row in rows] == list(range(0, 1000, 10))
    assert sum(len(row) for row in rows) == 100 * 2 + 50
    assert len(rewrites) <= 8
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.csv", "hparams.yaml"}


def test_csv_logger_flushes_after_so_many_steps(tmp_path):
    logger = opened(tmp_path, flush_logs_every_n_steps=100)
    for step in (0, 50):
        logger.log_metrics({"a": 1.0}, step=step)
    assert logger.delivery.sender.flush(10)
    assert (tmp_path / "metrics.csv").read_text() == ""
    logger.log_metrics({"a": 1.0}, step=100)
    assert logger.delivery.sender.flush(10)
    assert len(read(tmp_path)) == 3
    logger.log_metrics({"a": 1.0}, step=150)
    logger.save()
    assert len(read(tmp_path)) == 4


def test_a_resumed_run_appends_where_the_checkpoint_was(tmp_path):
    logger = opened(tmp_path, flush_logs_every_n_steps=1)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.log_metrics({"a": 2.0}, step=2)
    state = json.loads(json.dumps(logger.state_dict()))
    logger.log_metrics({"a": 3.0, "b": 1.0}, step=3)  # lost: after the checkpoint
    logger.log_metrics({"a": 4.0}, step=4)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("5,5.")  # killed while writing

    resumed = CSVLogger()
    resumed.load_state_dict(state)
    resumed.delivery.start(tmp_path)
    resumed.log_metrics({"a": 3.5}, step=3)
    resumed.finalize()
    assert read(tmp_path) == [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}, {"step": 3, "a": 3.5}]
    assert resumed.state_dict()["rows"] == 3


def test_what_was_logged_at_the_checkpoints_step_after_it_is_kept(tmp_path):
    logger = opened(tmp_path)
    logger.log_metrics({"a": 1.0}, step=50)
    state = logger.state_dict() | {"global_step": 70}
    logger.log_metrics({"test": 2.0}, step=70)
    logger.log_metrics({"a": 3.0}, step=71)
    logger.finalize()
    resumed = CSVLogger()
    resumed.load_state_dict(state)
    resumed.delivery.start(tmp_path)
    resumed.finalize()
    assert read(tmp_path) == [{"step": 50, "a": 1.0}, {"step": 70, "test": 2.0}]


@pytest.mark.parametrize("kind", [CSVLogger, JSONLinesLogger])
@pytest.mark.parametrize("before", [{"epoch": 0.0, "val": 1.0}, {"epoch": 0.0}, {"other": 1.0}])
def test_a_row_of_the_checkpoints_step_that_comes_again_is_there_once(kind, before, tmp_path):
    after = [{"loss": 2.0, "epoch": 0.0}, {"loss": 3.0, "epoch": 0.0}, {"rate": 0.5}]  # two rows with the same names
    logger = kind()
    logger.delivery.start(tmp_path)
    logger.log_metrics(before, step=4)
    state = logger.state_dict() | {"global_step": 4}
    for row in after:
        logger.log_metrics(row, step=4)
    logger.finalize()
    resumed = kind()
    resumed.load_state_dict(state)
    resumed.delivery.start(tmp_path)
    for row in [*after, {"loss": 4.0, "epoch": 0.0}]:
        resumed.log_metrics(row, step=4)
    resumed.finalize()
    assert rows_in(resumed.path) == [before, *after, {"loss": 4.0, "epoch": 0.0}]


def rows_in(path):
    """Read the rows of a CSV file or of JSON lines, without their steps and times."""
    with path.open() as file:
        rows = list(csv.DictReader(file)) if path.suffix == ".csv" else [json.loads(line) for line in file]
    return [
        {name: float(row[name]) for name in row if row[name] != "" and name not in ("step", "time")} for row in rows
    ]


def test_a_metric_called_step_does_not_keep_rows_that_come_again(tmp_path):
    logger = opened(tmp_path)
    logger.log_metrics({"a": 1.0}, step=640)  # the user's own axis, in samples
    state = logger.state_dict() | {"global_step": 10}
    logger.log_metrics({"test": 2.0}, step=10)
    logger.log_metrics({"val_loss": 3.0}, step=20)
    logger.finalize()
    resumed = CSVLogger()
    resumed.load_state_dict(state)
    resumed.delivery.start(tmp_path)
    resumed.finalize()
    assert read(tmp_path) == [{"step": 640, "a": 1.0}, {"step": 10, "test": 2.0}]


def test_a_checkpoint_never_knows_more_than_the_file(tmp_path):
    logger = opened(tmp_path)
    logger.log_metrics({"a": 1.0}, step=1)
    assert logger.state_dict()["rows"] == 1
    assert len(read(tmp_path)) == 1


def test_a_second_start_appends_everything(tmp_path):
    logger = opened(tmp_path)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.finalize()
    logger.delivery.start(tmp_path)
    logger.log_metrics({"test": 2.0}, step=1)
    logger.finalize()
    assert read(tmp_path) == [{"step": 1, "a": 1.0}, {"step": 1, "test": 2.0}]


@pytest.mark.parametrize("content", ["", "ste", "step,a", "step,a\n"])
def test_a_torn_or_empty_file_is_taken_over(tmp_path, content):
    (tmp_path / "metrics.csv").write_text(content)
    logger = opened(tmp_path)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.finalize()
    assert read(tmp_path) == [{"step": 1, "a": 1.0}]


def test_names_with_commas_quotes_and_line_breaks(tmp_path):
    for step in (1, 2):  # twice: the second reads the first's header
        logger = opened(tmp_path)
        logger.log_metrics({'a,"b"\nc': 1.0}, step=step)
        logger.finalize()
    assert read(tmp_path) == [{"step": 1, 'a,"b"\nc': 1.0}, {"step": 2, 'a,"b"\nc': 1.0}]


def test_csv_logger_writes_hyperparameters_and_their_metrics(tmp_path):
    logger = CSVLogger()
    logger.log_hyperparams({"lr": 0.1, "net": {"width": 3}}, metrics={"score": 1.0})
    logger.delivery.start(tmp_path)
    logger.finalize()
    assert yaml.safe_load((tmp_path / "hparams.yaml").read_text()) == {"lr": 0.1, "net": {"width": 3}}
    assert read(tmp_path) == [{"step": 0, "score": 1.0}]


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InstepError, match=r"CSVLogger failed in start"):
        opened(tmp_path / "file" / "below")


def test_wrong_options_of_the_csv_logger_are_named():
    with pytest.raises(SettingError, match="flush_logs_every_n_steps=0"):
        CSVLogger(flush_logs_every_n_steps=0)


@pytest.mark.parametrize("version", ["..", "../up", "/tmp/x", "a/b", "a\0b", {"a": 1}])
def test_a_checkpoints_version_leads_nowhere_else(version, tmp_path):
    logger = CSVLogger(tmp_path / "logs")
    with pytest.raises(CorruptCheckpointError, match="which is no name of a folder"):
        logger.load_state_dict({"version": version, "step": 3, "rows": 0})
    logger.load_state_dict({"version": "mine", "step": 3, "rows": 0})
    assert logger.version == "mine"


@pytest.mark.parametrize("name", ["exp", "", None])
def test_by_hand_it_writes_at_once(name, tmp_path):
    logger = CSVLogger(tmp_path, name)
    logger.log_hyperparams({"a": 1})
    assert logger.delivery.sender.flush(10)
    folder = tmp_path / (name or "") / "version_0"
    assert [path.name for path in folder.glob("*.yaml")] == ["hparams.yaml"]
    logger.log_metrics({"b": 2.0})
    logger.save()
    assert read(folder) == [{"step": 0, "b": 2.0}]
    logger.finalize()
