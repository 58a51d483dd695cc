"""MLflow with a database of its own, and with a real server that goes away and comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instep import Callback, Trainer
from instep.cli.main import main as instep
from instep.errors import SettingError
from instep.loggers import MLFlowLogger
from tests.helpers.browser import answers
from tests.helpers.spawn import free_port

pytestmark = [pytest.mark.trackers, pytest.mark.filterwarnings("default")]  # of MLflow's packages
pytest.importorskip("mlflow", reason="mlflow is not installed: make test-trackers")


@pytest.fixture(autouse=True)
def nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)


def client_of(logger: MLFlowLogger) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(logger._tracking_uri)


def files(client: Any, run_id: str, folder: str | None = None) -> list[str]:
    found = client.list_artifacts(run_id, folder)
    return [path for one in found for path in (files(client, run_id, one.path) if one.is_dir else [one.path])]


def test_everything_comes_back_from_the_database_beside_the_runs(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "model.safetensors").write_bytes(b"weights")
    logger = MLFlowLogger(
        "digits", "first", tags='{"team": "a"}', description="A note.", registered_model_name="net", log_model="all"
    )
    logger.log_hyperparams({"lr": 0.1, "net": {"width": 3}, "long": "x" * 7000}, metrics={"score": 0.5})
    logger.delivery.start(tmp_path / "version_0")
    for step in range(1100):  # more than one request may have
        logger.log_metrics({"loss": step / 3, "top@5": float("nan")}, step=step)
    logger.log_image("seen", [np.zeros((4, 4)), np.ones((3, 4, 4))], step=3)
    logger.log_text("said", "Once", 3)
    logger.log_audio("heard", np.zeros(100), step=3, sample_rate=8000)
    logger.log_video("moved", np.zeros((2, 3, 4, 4)), step=3)
    logger.log_table("table", ["a", "b"], [[1, "x"], [2, None]], step=3)
    logger.after_save_checkpoint(tmp_path / "step-1")
    logger.log_checkpoint(tmp_path / "step-1", ["best"])
    logger.log_code(Path(__file__).parent)
    with pytest.warns(UserWarning, match="MLFlowLogger has no place for histogram"):
        logger.log_histogram("weights", np.ones(3), 3)
    logger.log_hyperparams({"lr": 0.2})
    with pytest.warns(UserWarning, match="MLflow does not change parameters: the new values of lr"):
        logger.save()
    assert logger.run_id == logger.version
    assert logger.experiment.get_run(logger.run_id).info.status == "RUNNING"
    logger.finalize("interrupted")

    client = client_of(logger)
    assert (tmp_path / "mlflow.db").exists()
    run = client.get_run(logger.version)
    assert (run.info.status, run.info.run_name) == ("KILLED", "first")
    assert client.get_experiment(run.info.experiment_id).name == "digits"
    assert {name: run.data.params[name] for name in ("lr", "net/width")} == {"lr": "0.1", "net/width": "3"}
    expected = {"team": "a", "mlflow.note.content": "A note.", "lr": "0.2", "checkpoint.best": "step-1"}
    assert expected.items() <= run.data.tags.items()
    assert len(run.data.tags["mlflow.source.git.commit"]) == 40
    history = client.get_metric_history(logger.version, "loss")
    assert sorted((metric.step, metric.value) for metric in history) == [(step, step / 3) for step in range(1100)]
    assert len(client.get_metric_history(logger.version, "top_5")) == 1100
    there = {path.partition("+")[0] for path in files(client, logger.version)}
    assert there >= {
        *("images/seen~0", "images/seen~1", "text/said/3.txt", "audio/heard/3-0.wav", "video/moved/3-0.gif"),
        *("tables/table/3.json", "model/step-1/model.safetensors"),
    }
    version = client.get_model_version_by_alias("net", "best")
    assert (version.run_id, version.version) == (logger.version, 2)
    assert Path(version.source, "model.safetensors").read_bytes() == b"weights"


def test_a_run_below_another_and_one_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    store = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    mlflow.set_tracking_uri(store)
    try:
        with mlflow.start_run() as above:
            logger = MLFlowLogger(tracking_uri=store, nested_run=True, log_system_metrics=True)
    finally:
        mlflow.set_tracking_uri(None)
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    logger.delivery.start(tmp_path / "run")
    client = client_of(logger)
    assert client.get_run(logger.version).data.tags["mlflow.parentRunId"] == above.info.run_id
    while not any(name.startswith("system/") for name in client.get_run(logger.version).data.metrics):
        pass  # MLflow's thread has yet to write some
    logger.finalize()
    again = MLFlowLogger(tracking_uri=store, run_id=logger.version)
    again.delivery.start(tmp_path / "run")
    assert client.get_run(logger.version).info.status == "RUNNING"
    again.finalize("failed")
    run = client.get_run(logger.version)
    assert run.info.status == "FAILED"


@pytest.mark.parametrize("options", [{"run_id": "0" * 32}, {"tracking_uri": "file:mlruns"}, {"tracking_uri": "x://y"}])
def test_wrong_settings_end_the_start(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="MLFlowLogger"):
        MLFlowLogger(**{"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db", **options}).delivery.start(tmp_path / "run")


class Server:
    """MLflow's server on one port, which may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        store = f"sqlite:///{folder}/server.db"
        words = ["server", "--backend-store-uri", store, "--artifacts-destination", str(folder / "artifacts")]
        self._command = [sys.executable, "-m", "mlflow", *words, "--port", str(self.port), "--workers", "1"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def wait(self) -> None:
        assert self._process is not None
        while not answers(f"{self.url}/health"):
            assert self._process.poll() is None

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    made.start()
    made.wait()
    yield made
    made.kill()


class At(Callback):
    """Calls functions after steps."""

    def __init__(self, **calls: Any) -> None:
        self.calls = calls

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.get(f"step_{trainer.global_step}", lambda: None)()


def fit(server: Server, folder: Path, flush_timeout_s: float, **calls: Any) -> tuple[MLFlowLogger, Path]:
    """Train 60 steps, each logged; the run folder too."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from tests.loggers.trackers.train import Digits

    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.rand(960, 64, generator=generator), torch.randint(10, (960,), generator=generator))
    logger = MLFlowLogger("digits", tracking_uri=server.url, flush_timeout_s=flush_timeout_s)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        log_every_n_steps=1,
        default_root_dir=folder,
        logger=logger,
        enable_progress_bar=False,
        callbacks=[At(**calls)],
    )
    trainer.fit(Digits(), DataLoader(data, 16))
    return logger, Path(str(trainer.log_dir))


def steps(server: Server, logger: MLFlowLogger) -> list[int]:
    return [metric.step for metric in client_of(logger).get_metric_history(logger.version, "third")]


def test_a_server_that_is_killed_and_comes_back_gets_every_step(server: Server, tmp_path: Path) -> None:
    def return_() -> None:
        server.start()
        server.wait()

    logger, run = fit(server, tmp_path, 60.0, step_20=server.kill, step_40=return_)
    assert sorted(steps(server, logger)) == list(range(1, 61))
    assert not list(run.glob("loggers/*.jsonl"))


def test_what_a_server_that_stays_away_did_not_get_is_kept_and_sent_later(server: Server, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="instep runs sync"):
        logger, run = fit(server, tmp_path, 3.0, step_20=server.kill)
    (kept,) = run.glob("loggers/*.jsonl")
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    waits = {line[2] for line in lines if line[0] == "_log_metrics"}
    assert {*range(40, 61)} <= waits  # what came before may be in the tracker already
    server.start()
    server.wait()
    assert {*steps(server, logger), *waits} == {*range(1, 61)}
    instep(["runs", "sync", str(run)])
    assert sorted(steps(server, logger)) == list(range(1, 61))
    assert not list(run.glob("loggers/*.jsonl"))
