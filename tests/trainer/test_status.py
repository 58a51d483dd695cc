"""`status.json` has the cause of a failure, whichever rank it was and however the main process ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from instep import Callback
from instep.callbacks import ModelCheckpoint
from instep.health.run_status import how_to_go_on, read_failures, write_status
from instep.loggers import CSVLogger
from tests.helpers.jobs import JobServer
from tests.helpers.mounts import tmpfs
from tests.helpers.spawn import RanksFailed, run_ranks
from tests.trainer.toys import Toy, loader, quiet

STEP = 2


class Ends(Callback):
    """Ends one rank after some steps, in one way or another."""

    def __init__(self, folder: Path, how: str, rank: int) -> None:
        self.folder, self.how, self.rank = folder, how, rank

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != STEP or trainer.global_rank != self.rank:
            return
        if self.how == "raises":
            raise ValueError("boom on purpose")
        if self.how == "aborts":
            os.abort()
        (self.folder / "here").touch()
        os.kill(os.getpid(), signal.SIGSTOP)


def train(folder: Path, how: str, rank: int) -> None:
    trainer = quiet(
        max_epochs=1,
        enable_checkpointing=True,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(every_n_train_steps=1, save_top_k=-1), Ends(folder, how, rank)],
    )
    trainer.fit(Toy(), loader(24))


def status(folder: Path) -> dict[str, Any]:
    """What it says; the newest checkpoint is the one of before the end, where nothing was saved after it."""
    [path] = folder.rglob("status.json")
    said = json.loads(path.read_text())
    assert re.fullmatch(rf"step-0000000[{STEP - 1}{STEP}]-1", Path(said["checkpoint"]).name), said
    sometimes = {"progress.json", "samples.jsonl"}  # of a run that took some time, and began to train
    files = {file.name for file in path.parent.iterdir()} - sometimes
    assert files == {"status.json", "checkpoints", "failures"}, "nothing is left over"
    return said


def wait_for(there: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 60.0
    while not there():
        assert time.monotonic() < deadline, log.read_text()
        os.sched_yield()


@pytest.fixture(scope="module")
def server() -> Iterator[JobServer]:
    with JobServer("tests.trainer.test_status") as server:
        yield server


@pytest.mark.dist
@pytest.mark.parametrize(
    ("how", "rank", "cause"),
    [
        ("raises", 0, r"ValueError: boom on purpose"),
        ("raises", 1, r"rank 1.*: ValueError: boom on purpose"),
        ("aborts", 1, r"rank 1 .* ended with SIGABRT"),
        ("aborts", 0, r"rank 0 .* ended with SIGABRT"),
        ("stops", 0, r"rank 0 .* did not end in its time after SIGTERM, and was killed"),
    ],
)
def test_the_agent_names_the_cause(server: JobServer, tmp_path: Path, how: str, rank: int, cause: str) -> None:
    log = tmp_path / "log"
    job = server.start(train, tmp_path, how, rank, nproc=2, log=log)
    try:
        if how == "stops":
            wait_for(lambda: (tmp_path / "here").exists(), log)
            os.kill(job.pid, signal.SIGTERM)
            wait_for(lambda: "SIGTERM: passed on" in log.read_text(), log)  # two at once are one
            os.kill(job.pid, signal.SIGTERM)  # the second one cuts the grace period short
        assert job.wait(60.0) == 1, log.read_text()
    finally:
        job.kill("job")
    said = status(tmp_path)
    assert (said["status"], said["exit_code"]) == ("failed", 1)
    assert re.match(cause, said["error"]), said["error"]
    assert re.match(cause, said["why"]), said["why"]
    assert said["summary"] is None or said["summary"]["why"] == said["why"]
    first, *_ = read_failures(next(tmp_path.rglob("status.json")).parent)
    assert (first["rank"], first["cause"], first["step"], first["phase"]) == (rank, True, STEP, "train")
    assert re.search(r"exception|SIGABRT|SIGKILL", first["how"])
    assert ("boom on purpose" in (first["traceback"] or "")) == (how == "raises")
    assert said["world_size"] == 2
    assert how_to_go_on(said).endswith('# with trainer.fit(..., ckpt_path="auto")')


@pytest.mark.dist
def test_without_an_agent_a_rank_leaves_its_error_to_the_main_process(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="boom on purpose"):
        run_ranks(train, 2, tmp_path, "raises", 1)
    said = status(tmp_path)
    assert said["status"] == "failed"
    assert said["error"] == said["why"] == said["summary"]["why"] == "rank 1: ValueError: boom on purpose"


def test_a_finished_run_names_its_newest_checkpoint(tmp_path: Path) -> None:
    train(tmp_path, "", -1)
    [path] = tmp_path.rglob("status.json")
    said = json.loads(path.read_text())
    assert (said["status"], Path(said["checkpoint"]).name) == ("done", "step-00000008-1")
    summary = said["summary"]
    assert (summary["why"], summary["steps"], summary["batches"], how_to_go_on(said)) == (
        "max_epochs=1 reached",
        8,
        8,
        "",
    )
    assert Path(summary["best_checkpoint"]).name == "step-00000008-1"
    assert sum(summary["time_s"].values()) == pytest.approx(summary["wall_s"], rel=0.05)
    assert summary["time_s"]["saving"] > 0


def test_a_full_disk_does_not_keep_the_end_from_being_said(tmp_path: Path) -> None:
    class Fills(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            with contextlib.suppress(OSError), open(trainer.run_folder.path / "rest", "wb") as file:
                while file.write(bytes(4096)):
                    file.flush()
            with pytest.raises(OSError, match="No space left"):
                (trainer.run_folder.path / "more").write_bytes(b"more")
            trainer.run_folder.record_saved(trainer, trainer.run_folder.path / ("x" * 100))  # takes nothing of the room
            raise ValueError("the disk is full " + "\N{GRINNING FACE}" * 5000)

    with tmpfs(tmp_path / "small", 1 << 20) as folder:
        with pytest.raises(ValueError, match="the disk is full"):
            quiet(max_epochs=1, default_root_dir=folder, logger=CSVLogger(), callbacks=[Fills()]).fit(Toy(), loader())
        [path] = folder.rglob("status.json")
        said = json.loads(path.read_text())
    assert (said["status"], said["error"][:28]) == ("failed", "ValueError: the disk is full")


def test_a_status_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_status(tmp_path, {"status": "running"})

    def fail(*_: Any) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no"):
            write_status(tmp_path, {"status": "done"})
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]
    assert json.loads((tmp_path / "status.json").read_text()) == {"status": "running"}
