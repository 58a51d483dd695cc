from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest

from instep.accelerator.logging import get_logger
from instep.errors import SettingError
from instep.state import PartialState, process
from tests.helpers.spawn import run_ranks


def test_with_one_process_get_logger_logs_as_pythons_logger(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("instep.test.plain", log_level="info")
    logger.debug("unseen")
    logger.info("%d of %d", 1, 2, extra={"run": 7})
    logger.warning("all", main_process_only=False)
    logger.error("in turn", in_order=True)
    assert [record.getMessage() for record in caplog.records] == ["1 of 2", "all", "in turn"]
    assert caplog.records[0].run == 7  # type: ignore[attr-defined]
    assert not process.is_held()  # logging builds no state


def test_records_name_the_line_of_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("instep.test.lines")
    logger.warning("one")
    logger.log(logging.WARNING, "two")
    logger.warning_once("three")
    try:
        raise KeyError("four")
    except KeyError:
        logger.exception("four")
    assert {record.funcName for record in caplog.records} == {"test_records_name_the_line_of_the_caller"}
    assert caplog.records[-1].exc_info is not None


def test_a_warning_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("instep.test.once")
    for number in (1, 1, 2):
        logger.warning_once("batch %d is empty", number)
    assert [record.getMessage() for record in caplog.records] == ["batch 1 is empty", "batch 2 is empty"]
    for number in range(3000):
        logger.warning_once("the loss of step %d is nan", number)
    assert len(logger._warned) <= 1000
    assert len(caplog.records) == 3002


def test_the_root_logger_is_left_alone() -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    assert get_logger("instep.test.level", log_level="DEBUG").logger.level == logging.DEBUG
    assert get_logger("instep.test.level").logger.level == logging.DEBUG
    assert (root.level, root.handlers) == before
    with pytest.raises(SettingError, match=r"log_level='LOUD'.*DEBUG, INFO"):
        get_logger("instep.test.level", log_level="LOUD")


def log_on_ranks(shared: str) -> tuple[list[str], list[str]]:
    stream = io.StringIO()
    logger = get_logger("instep.test.ranks", log_level="INFO")
    logger.logger.addHandler(logging.StreamHandler(stream))
    logger.info("before the state")
    before = stream.getvalue().splitlines()
    PartialState(cpu=True)
    logger.info("main")
    logger.info("each", main_process_only=False)
    logger.warning_once("once", main_process_only=False)
    logger.warning_once("once", main_process_only=False)
    logger.logger.addHandler(logging.FileHandler(shared, mode="a"))
    for turn in range(10):
        logger.info("%d", turn, in_order=True)
        logger.debug("too low", in_order=True)
    return before, stream.getvalue().splitlines()[len(before) :]


@pytest.mark.dist
def test_the_logger_writes_on_the_ranks_that_are_asked_for(tmp_path: Path) -> None:
    (before, lines), *others = run_ranks(log_on_ranks, 3, str(tmp_path / "log"))
    assert before == ["before the state"]
    assert lines[:3] == ["main", "[RANK 0] each", "[RANK 0] once"]
    for rank, (nothing, own) in enumerate(others, start=1):
        assert nothing == []
        assert own[:3] == [f"[RANK {rank}] each", f"[RANK {rank}] once", f"[RANK {rank}] 0"]
    together = (tmp_path / "log").read_text().splitlines()
    assert together == [f"[RANK {rank}] {turn}" for turn in range(10) for rank in range(3)]
