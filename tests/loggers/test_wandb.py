"""Offline, and against a server that is not there: no test leaves this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instep.callbacks import ModelCheckpoint, WandbSweep
from instep.errors import InstepError, Preempted, SettingError
from instep.loggers import WandbLogger
from tests.helpers.warm import warm_python
from tests.loggers.wandb_file import read_all, records
from tests.trainer.toys import ScoredToy, Toy, loader, quiet

# W&B's own threads and subprocess leave sockets to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("default::ResourceWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"),
]

STEP = "trainer/global_step"


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No key, no home, and a server on a port where nobody listens."""
    home = str(tmp_path_factory.mktemp("home"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, home)
    monkeypatch.setenv("NETRC", f"{home}/netrc")
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    yield
    wandb.teardown()  # the settings of one test must not be those of the next


def offline(folder: Path, **options: Any) -> WandbLogger:
    logger = WandbLogger(mode="offline", **options)
    logger.delivery.start(folder)
    return logger


def test_everything_comes_back_from_the_file(tmp_path):
    logger = WandbLogger(name="first", project="digits", mode="offline", tags=["a"])
    logger.log_hyperparams({"lr": 0.1, "net": {"width": 3}, "path": Path("data")})
    logger.log_metrics({"early": 1.0}, step=0)
    assert logger.version is None
    logger.delivery.start(tmp_path)
    for step in range(100):
        logger.log_metrics({"loss": step / 8, "zero": 0.0}, step=step)
    logger.finalize("success")
    logger.finalize("success")
    (run,) = read_all(tmp_path)
    assert (run["id"], run["project"], run["name"]) == (logger.version, "digits", "first")
    assert {key: run["config"][key] for key in ("lr", "net", "path")} == {
        "lr": 0.1,
        "net": {"width": 3},
        "path": "data",
    }
    assert run["history"][0] == {"early": 1.0, STEP: 0}
    assert run["history"][1:] == [{"loss": step / 8, "zero": 0.0, STEP: step} for step in range(100)]
    assert run["exit_code"] == 0


def test_records_of_several_blocks(tmp_path):
    logger = offline(tmp_path)
    wide = {f"metric_{number:05}": float(number) for number in range(3000)}
    for step in range(3):
        logger.log_metrics(wide, step=step)
    logger.finalize()
    (run,) = read_all(tmp_path)
    assert run["history"] == [{**wide, STEP: step} for step in range(3)]


def test_a_smaller_step_is_not_dropped(tmp_path):
    logger = offline(tmp_path)
    for step in (5, 3, 3):
        logger.log_metrics({"loss": 1.0}, step=step)
    logger.finalize()
    assert [row[STEP] for row in read_all(tmp_path)[0]["history"]] == [5, 3, 3]


def test_a_resumed_run_keeps_its_id(tmp_path):
    logger = offline(tmp_path, project="digits")
    logger.log_metrics({"loss": 1.0}, step=1)
    state = json.loads(json.dumps(logger.state_dict()))
    logger.finalize("failed")
    resumed = WandbLogger(mode="offline")
    resumed.load_state_dict(state)
    resumed.delivery.start(tmp_path)
    resumed.log_metrics({"loss": 0.5}, step=2)
    resumed.finalize()
    first, second = read_all(tmp_path)
    assert first["id"] == second["id"] == logger.version
    assert second["project"] == "digits"
    assert (first["exit_code"], second["exit_code"]) == (1, 0)


def test_testing_after_finalize_continues_the_run(tmp_path):
    logger = offline(tmp_path)
    logger.finalize()
    logger.delivery.start(tmp_path)
    logger.log_metrics({"test": 1.0}, step=3)
    logger.finalize()
    first, second = read_all(tmp_path)
    assert first["id"] == second["id"]
    assert second["history"] == [{"test": 1.0, STEP: 3}]


def test_a_run_that_is_used_first_goes_on_through_start_and_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = WandbLogger(project="digits", mode="offline")
    run = logger.experiment
    run.config.update({"seed": 1})
    logger.delivery.start(tmp_path / "run")
    assert logger.experiment is run
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.finalize()
    logger.experiment.config.update({"late": 2})
    logger.finalize()
    found = read_all(tmp_path / "instep_runs" / "version_0") + read_all(tmp_path / "run")
    assert [it["id"] for it in found] == [logger.version] * 2
    assert found[0]["config"]["seed"] == 1
    assert found[0]["history"] == [{"loss": 1.0, STEP: 1}]
    assert found[1]["config"]["late"] == 2


def test_a_resumed_run_takes_over_the_configuration_of_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = WandbLogger(mode="offline")
    logger.experiment.config.update({"seed": 1})
    logger.load_state_dict({"version": "older", "step": 3})
    logger.delivery.start(tmp_path / "run")
    logger.finalize()
    (found,) = read_all(tmp_path / "run")
    assert (found["id"], found["config"]["seed"]) == ("older", 1)


def test_what_is_written_without_a_run_is_in_the_file_when_the_program_ends(tmp_path):
    code = (
        "import sys; from instep.loggers import WandbLogger; logger = WandbLogger(save_dir='.', mode='offline'); "
        "logger.log_metrics({'loss': 1.0}, step=1); logger.experiment.config.update({'seed': 1}) "
        "if sys.argv[1] == 'used' else None"
    )
    for how, config in (("used", {"seed": 1}), ("kept", {})):
        folder = tmp_path / how
        folder.mkdir()
        done = subprocess.run(
            [warm_python(), "-c", code, how], cwd=folder, check=True, timeout=120, capture_output=True, text=True
        )
        assert "Traceback" not in done.stderr
        (found,) = read_all(folder)
        assert found["history"] == [{"loss": 1.0, STEP: 1}]
        assert found["config"].get("seed") == config.get("seed")
        assert found["exit_code"] == 0


def test_two_loggers_write_two_runs(tmp_path):
    first, second = offline(tmp_path / "a", id="one"), offline(tmp_path / "b", id="two")
    second.log_metrics({"loss": 2.0}, step=1)
    first.log_metrics({"loss": 1.0}, step=1)
    first.finalize()
    second.finalize()
    for folder, loss in (("a", 1.0), ("b", 2.0)):
        (run,) = read_all(tmp_path / folder)
        assert run["history"] == [{"loss": loss, STEP: 1}]


def test_a_run_of_the_script_is_used_and_left_open(tmp_path):
    import wandb

    with wandb.init(mode="offline", dir=str(tmp_path), id="mine") as run:
        logger = WandbLogger()
        logger.delivery.start(tmp_path / "run")
        assert logger.version == "mine"
        assert logger.experiment is run
        logger.log_metrics({"loss": 1.0}, step=1)
        logger.finalize()
        run.log({"after": 1.0})
        with pytest.warns(UserWarning, match="'other' is ignored"):
            WandbLogger(id="other").delivery.start(tmp_path / "run")
    (found,) = read_all(tmp_path)
    assert found["history"] == [{"loss": 1.0, STEP: 1}, {"after": 1.0, STEP: 1}]


def test_a_wandb_logger_opens_no_run_on_other_ranks(tmp_path):
    logger = WandbLogger(mode="online")
    logger.delivery.start(tmp_path, is_main=False)
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.experiment.log({"image": None})
    logger.finalize()
    assert list(tmp_path.iterdir()) == []


def test_the_environments_mode_counts_where_none_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = WandbLogger()
    logger.delivery.start(tmp_path)
    logger.finalize()
    assert len(read_all(tmp_path)) == 1


def test_disabled_writes_nothing(tmp_path):
    logger = WandbLogger(mode="disabled")
    logger.delivery.start(tmp_path)
    logger.log_hyperparams({"lr": 0.1}, metrics={"score": 1.0})
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.finalize()
    assert read_all(tmp_path) == []


def test_a_missing_key_is_a_clear_error_at_the_start(tmp_path):
    logger = WandbLogger()
    with pytest.raises(InstepError, match=r"WandbLogger has no valid API key.*WANDB_API_KEY"):
        logger.delivery.start(tmp_path)


def test_a_server_that_is_not_there_does_not_block(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    logger = WandbLogger(mode="online", init_timeout_s=1.0)
    with pytest.warns(UserWarning, match="goes on offline"):
        logger.delivery.start(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.finalize()
    assert read_all(tmp_path)[-1]["history"] == [{"loss": 1.0, STEP: 1}]


def test_or_is_an_error_where_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    logger = WandbLogger(init_timeout_s=1.0, fall_back_offline=False)
    with pytest.raises(InstepError, match="WandbLogger could not reach the W&B server within 1 s"):
        logger.delivery.start(tmp_path)


def test_an_answer_of_the_server_is_not_hidden(tmp_path, monkeypatch):
    import wandb

    def refuse(**arguments: Any) -> None:
        raise wandb.errors.CommError("permission denied for entity 'nobody'")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(InstepError, match="WandbLogger failed in start: CommError: permission denied"):
        WandbLogger(mode="online").delivery.start(tmp_path)


def test_arguments_that_wandb_does_not_know(tmp_path):
    with pytest.raises(InstepError, match=r"WandbLogger failed in start: TypeError.*log_everything"):
        offline(tmp_path, log_everything=True)


@pytest.mark.parametrize(
    "options",
    [{"mode": "onlin"}, {"offline": True, "mode": "online"}, {"id": "a", "version": "b"}, {"init_timeout_s": 0}],
)
def test_wrong_options_of_the_wandb_logger_are_refused(options):
    with pytest.raises(SettingError):
        WandbLogger(**options)


class Falls(ScoredToy):
    def on_validation_end(self) -> None:
        if self.current_epoch == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_sweep_is_told_of_the_best_value_and_of_a_preemption(tmp_path):
    logger = WandbLogger(mode="offline", save_dir=tmp_path)
    callbacks = [WandbSweep("val_loss"), ModelCheckpoint()]
    trainer = quiet(
        max_epochs=4, logger=logger, callbacks=callbacks, default_root_dir=tmp_path, enable_checkpointing=True
    )
    with pytest.raises(Preempted):
        trainer.fit(Falls([3.0, 1.0, 2.0], "val_loss"), loader(16), loader(8))
    pytest.importorskip("wandb").teardown()  # its service writes the rest
    (file,) = tmp_path.rglob("*.wandb")
    told = list(records(file))
    metrics = [
        one.metric for one in told if one.WhichOneof("record_type") == "metric" and one.metric.name == "val_loss"
    ]
    assert [metric.summary.min for metric in metrics] == [True]
    assert [one.WhichOneof("record_type") for one in told].count("preempting") == 1


def test_a_sweep_without_a_run_of_its_own_is_an_error(tmp_path):
    with pytest.raises(SettingError, match="WandbLogger"):
        quiet(max_epochs=1, callbacks=[WandbSweep("val_loss")]).fit(Toy(), loader(16))
