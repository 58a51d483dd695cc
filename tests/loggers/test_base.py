from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import instep.loggers
from instep.errors import LogError
from instep.loggers import CSVLogger, JSONLinesLogger, Logger
from tests.helpers.warm import warm_python


class Recorder(Logger):
    """Keeps what its hooks get; forgets `super().__init__()` on purpose."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def _start(self) -> None:
        self.calls.append(("start", self.log_dir))

    def _log_metrics(self, metrics, step):
        self.calls.append(("metrics", metrics, step))

    def _log_hyperparams(self, params, metrics):
        self.calls.append(("hparams", params, metrics))

    def _after_save_checkpoint(self, path):
        self.calls.append(("checkpoint", path))

    def _save(self):
        self.calls.append(("save",))

    def _finalize(self, status):
        self.calls.append(("finalize", status))


def arrived(logger):
    """What the logger's hooks were called with, once all has been sent."""
    assert logger.delivery.sender.flush(10)
    return logger.calls


def test_records_from_before_the_start_are_kept_in_order(tmp_path):
    logger = Recorder()
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.after_save_checkpoint("a")
    assert logger.calls == []
    logger.delivery.start(tmp_path)
    logger.log_metrics({"loss": 0.5}, step=1)
    assert arrived(logger) == [
        ("start", str(tmp_path)),
        ("hparams", {"lr": 0.1}, None),
        ("metrics", {"loss": 1.0}, 0),
        ("checkpoint", Path("a")),
        ("metrics", {"loss": 0.5}, 1),
    ]


def test_a_logger_writes_nothing_on_other_ranks(tmp_path):
    logger = Recorder()
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.delivery.start(tmp_path, is_main=False)
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.log_hyperparams({})
    logger.save()
    logger.finalize("success")
    assert logger.calls == []
    assert logger.log_dir is None


def test_finalize_and_start_are_idempotent(tmp_path):
    logger = Recorder()
    logger.finalize()
    logger.delivery.start(tmp_path)
    logger.delivery.start(tmp_path)
    logger.finalize("failed")
    logger.finalize("success")
    assert [call for call in logger.calls if call[0] in ("start", "finalize")] == [
        ("start", str(tmp_path)),
        ("finalize", "failed"),
    ]


@pytest.mark.parametrize("save_dir", [None, "own"])
def test_without_a_run_save_and_finalize_write_what_was_kept(tmp_path, monkeypatch, save_dir):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("instep.loggers.delivery.atexit.register", lambda *call: None)
    logger = Recorder()
    if save_dir is not None:
        Logger.__init__(logger, save_dir)
    logger.save()
    logger.finalize()
    assert logger.calls == []
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.save()
    logger.finalize()
    folder = Path("own") if save_dir else tmp_path / "instep_runs"
    assert logger.calls == [
        ("start", str(folder / "version_0")),
        ("metrics", {"loss": 1.0}, 1),
        ("save",),
        ("finalize", "success"),
    ]


def test_without_a_run_another_rank_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    logger = Recorder()
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.save()
    logger.finalize()
    assert not logger.delivery.is_open
    assert logger.calls == []
    assert not list(tmp_path.iterdir())


def test_logging_after_finalize_opens_again(tmp_path, monkeypatch):
    at_exit = []
    monkeypatch.setattr("instep.loggers.delivery.atexit.register", lambda *call: at_exit.append(call))
    logger = Recorder()
    logger.delivery.start(tmp_path)
    logger.finalize()
    logger.log_metrics({"late": 1.0}, step=5)
    logger.log_metrics({"late": 2.0}, step=6)
    assert [call[0] for call in arrived(logger)] == ["start", "finalize", "start", "metrics", "metrics"]
    *_, (function,) = at_exit
    monkeypatch.delattr("sys.last_value", raising=False)  # pytest sets it after a failed test
    function()
    assert logger.calls[-1] == ("finalize", "success")


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("sys.exit(3)", "success"),
        ("logger.finalize('success'); sys.exit(3)", "success"),
        ("", "success"),
        ("raise ValueError", "failed"),
        ("sys.ps1 = ''; raise ValueError", "success"),
    ],
)
@pytest.mark.parametrize("calls_super", [True, False])
def test_the_end_of_the_program_calls_a_subclass_finalize_once(tmp_path, ending, status, calls_super):
    program = f"""
import sys
from instep.loggers import CSVLogger

class Own(CSVLogger):
    def finalize(self, status="success"):
        print("own", status, "logger open:", self.delivery.is_open)
        if {calls_super}:
            super().finalize(status)

    def _finalize(self, status):
        super()._finalize(status)
        print("hook", status)

logger = Own("runs", version="first")
logger.log_metrics({{"loss": 0.5}}, step=1)
{ending}
"""
    done = subprocess.run([warm_python(), "-c", program], cwd=tmp_path, text=True, capture_output=True, timeout=120)
    assert done.returncode == (1 if "raise" in ending else 3 * bool(ending)), done.stderr
    own = [f"own {status} logger open: True"]
    again = not calls_super and "finalize" in ending  # it was left open: the end closes it
    assert done.stdout.splitlines() == own * (1 + again) + [f"hook {status}"], done.stderr
    assert (tmp_path / "runs/first/metrics.csv").read_text() == "step,loss\n1,0.5\n"


def test_another_run_folder_closes_the_first(tmp_path):
    logger = Recorder()
    logger.delivery.start(tmp_path / "a")
    logger.delivery.start(tmp_path / "b")
    assert logger.calls == [
        ("start", str(tmp_path / "a")),
        ("finalize", "success"),
        ("start", str(tmp_path / "b")),
    ]


def test_log_metrics_passes_plain_numbers_to_the_hook(tmp_path):
    logger = Recorder()
    logger.delivery.start(tmp_path)
    logger.log_metrics({"a": torch.tensor(0.5), "b": 2, "c": 0.0, "d": True}, step=0)
    (metrics,) = [call[1] for call in arrived(logger) if call[0] == "metrics"]
    assert metrics == {"a": 0.5, "b": 2, "c": 0.0, "d": 1.0}
    assert [type(value) for value in metrics.values()] == [float, int, float, float]


@pytest.mark.parametrize("value", ["high", None, torch.zeros(2), [1.0]])
def test_a_metric_that_is_no_number_is_an_error_with_logger_and_name(value):
    with pytest.raises(LogError, match="Recorder: the metric 'loss' must be a number"):
        Recorder().log_metrics({"loss": value}, step=0)


def test_the_prefix_is_put_before_metrics(tmp_path):
    class Prefixed(Recorder):
        def __init__(self):
            Logger.__init__(self, prefix="run1")
            self.calls = []

    logger = Prefixed()
    logger.delivery.start(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=0)
    assert arrived(logger)[-1] == ("metrics", {"run1-loss": 1.0}, 0)


def test_own_folders_are_numbered(tmp_path):
    run = tmp_path / "run"
    for expected in (0, 1):
        logger = Logger(save_dir=tmp_path / "own", name="mnist")
        for when in ("before", "after"):
            assert logger.log_dir == str(tmp_path / "own" / "mnist" / f"version_{expected}"), when
            assert logger.version == expected
            assert logger.save_dir == str(tmp_path / "own")
            assert logger.root_dir == str(tmp_path / "own" / "mnist")
            logger.delivery.start(run)
        Path(logger.log_dir).mkdir(parents=True)
    logger = Logger(save_dir=tmp_path / "own", version="best")
    logger.delivery.start(run)
    assert logger.log_dir == str(tmp_path / "own" / "best")
    assert not run.exists()


def test_a_resumed_logger_returns_to_its_folder_and_flushes_for_a_checkpoint(tmp_path):
    logger = Logger(save_dir=tmp_path)
    logger.delivery.start("run")
    Path(logger.log_dir).mkdir(parents=True)
    logger.log_metrics({"loss": 1.0}, step=12)
    state = logger.state_dict()
    assert state == {"version": 0, "step": 12, "logged": {"loss": 12}}
    resumed = Logger(save_dir=tmp_path)
    resumed.load_state_dict(state)
    resumed.delivery.start("run")
    assert resumed.log_dir == logger.log_dir

    recorder = Recorder()
    recorder.delivery.start(tmp_path)
    recorder.state_dict()
    assert recorder.calls[-1] == ("save",)


def test_restoring_an_open_logger_closes_it(tmp_path):
    logger = Recorder()
    logger.delivery.start(tmp_path)
    logger.load_state_dict({"step": 3, "global_step": 5})
    assert logger.calls[-1] == ("finalize", "success")
    logger.delivery.start(tmp_path)
    assert logger.state_dict()["step"] == 5


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="TensorBoardLogger"):
        instep.loggers.TensorboardLogger  # noqa: B018


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7), 7.0], ids=["numpy", "torch", "float"])
def test_a_step_may_be_any_scalar(tmp_path, step):
    loggers = CSVLogger(tmp_path / "csv", version="run"), JSONLinesLogger(tmp_path / "jsonl", version="run")
    for logger in loggers:
        logger.log_metrics({"loss": 0.5}, step=step)
        logger.log_hyperparams({"lr": 0.1}, {"score": 1.0}, step=step)
    loggers[1].log_text("sample", "Once", step=step)
    for logger in loggers:
        logger.finalize()
    assert loggers[0].path.read_text() == "step,loss,score\n7,0.5,\n7,,1.0\n"
    assert [json.loads(line)["step"] for line in loggers[1].path.read_text().splitlines()] == [7, 7, 7]
