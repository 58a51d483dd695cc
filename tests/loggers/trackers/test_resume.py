"""Each tracker: the digits are stopped in mid-epoch and resumed; no step is missing, none is there twice."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from instep.cli.main import main as instep
from tests.helpers.spawn import run_command
from tests.helpers.warm import warm_python
from tests.loggers.trackers.trackers import TRACKERS, Series

pytestmark = [pytest.mark.trackers, pytest.mark.filterwarnings("default")]  # of the trackers' packages


def train(tracker: str, root: Path, *stop: object) -> int:
    """Run the program; its exit status."""
    root.mkdir(exist_ok=True)
    (root / "home").mkdir(exist_ok=True)
    done = run_command(
        [warm_python(), "-m", "tests.loggers.trackers.train", tracker, str(root), *map(str, stop)],
        # A test of this process may have W&B's service running: a killed run would stay open there.
        env={**TRACKERS[tracker].environment(root), "WANDB_SERVICE": None},
        cwd=Path(__file__).parents[3],
    )
    assert "Traceback" not in done.stderr, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.returncode


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Series:
    """The values of a run that was left alone, from a table that keeps every float64."""
    root = tmp_path_factory.mktemp("uninterrupted")
    assert train("csv", root) == 0
    series = TRACKERS["csv"].read(root)
    assert [step for step, _ in series["loss"]] == list(range(1, 61)), "as many steps as train.py has"
    return series


# SIGTERM ends the run one step later, once at a step that ModelCheckpoint saved before the loggers had its values.
@pytest.mark.parametrize("step, stop", [(22, "SIGTERM"), (29, "SIGTERM"), (38, "SIGKILL")])
@pytest.mark.parametrize("tracker", TRACKERS)
def test_every_value_is_there_once_after_a_stop_and_a_resume(
    tracker: str, step: int, stop: str, tmp_path: Path, expected: Series
) -> None:
    row = TRACKERS[tracker]
    if find_spec(row.module) is None:
        pytest.skip(f"{row.module} is not installed")
    stopped = train(tracker, tmp_path, step, stop)
    assert stopped == (75 if stop == "SIGTERM" else -signal.SIGKILL)
    assert train(tracker, tmp_path) == 0
    found = row.read(tmp_path)
    for name, values in expected.items():
        there = found[name] if row.ordered else sorted(found[name])
        kept = [(at, row.kept(value)) for at, value in values]
        assert there == (list(dict.fromkeys(kept)) if row.once else kept), name


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_logger_goes_on_after_its_end(tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = TRACKERS[tracker]
    if find_spec(row.module) is None:
        pytest.skip(f"{row.module} is not installed")
    for name, value in row.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    logger = row.logger(tmp_path)
    for step in (1, 2):
        logger.delivery.start(tmp_path / "run")
        logger.log_metrics({"loss": step / 3}, step=step)
        logger.finalize()
    assert sorted(row.read(tmp_path)["loss"]) == [(step, row.kept(step / 3)) for step in (1, 2)]


# Trackio has one folder in a process, and MLflow a test with a real server.
_OTHERS = [name for name in TRACKERS if name not in ("csv", "tensorboard", "mlflow", "trackio")]


@pytest.mark.parametrize("tracker", _OTHERS)
def test_what_a_tracker_did_not_take_is_sent_later(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = TRACKERS[tracker]
    if find_spec(row.module) is None:
        pytest.skip(f"{row.module} is not installed")
    for name, value in row.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    logger = row.logger(tmp_path)
    logger._flush_timeout_s = 15.0  # ClearML takes several seconds to close
    write = logger._log_metrics

    def refuse(metrics: dict[str, float], step: int) -> None:
        if step > 2:
            raise ConnectionError("the tracker is away")
        write(metrics, step)

    logger._log_metrics = refuse
    logger.delivery.start(tmp_path / "run")
    for step in range(1, 6):
        logger.log_metrics({"loss": step / 3}, step=step)
    logger.finalize("failed")
    assert instep(["runs", "sync", str(tmp_path / "run")]) == 0
    assert sorted(row.read(tmp_path)["loss"]) == [(step, row.kept(step / 3)) for step in range(1, 6)]
