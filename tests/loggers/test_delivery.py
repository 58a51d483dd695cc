from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from instep import Trainer
from instep.errors import InstepError, LogError, SettingError
from instep.loggers import JSONLinesLogger, Logger, backlog, kinds, sender
from instep.loggers.backlog import Backlog, Record
from tests.trainer.toys import Toy, loader, quiet


class Remote(Logger):
    """A tracker that keeps what it is given, and can be down."""

    _LOCAL = False

    def __init__(self, store: list | None = None, **options) -> None:
        super().__init__(**options)
        self.store = [] if store is None else store
        self.down: type[Exception] | None = None
        self.refuses: set[str] = set()
        self.tries = 0

    def _log_metrics(self, metrics, step):
        self.tries += 1
        if self.down is not None:
            raise self.down("no route to host")
        if self.refuses & set(metrics):
            raise ValueError("not such a name")
        self.store.append((step, metrics))

    def _log_image(self, name, images, step):
        self.store.append((step, name, images[0].array.shape))


class Asked(Remote):
    """A tracker that says how far it got."""

    def _delivered(self):
        return {name: max(step for step, metrics in self.store if name in metrics) for _, m in self.store for name in m}


def spilled(run: Path) -> list[int]:
    lines = (run / "loggers" / "Remote.jsonl").read_text().splitlines()
    return [json.loads(line)[2] for line in lines]


@contextmanager
def warned() -> Iterator[list[str]]:
    """Collect the texts of warnings, which come from the logger's thread too."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
        texts += [str(one.message) for one in caught]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(sender, "_PERIOD_S", 0.01)
    monkeypatch.setattr(sender, "_LONGEST_PAUSE_S", 0.01)


def test_a_tracker_that_is_down_holds_up_nothing_and_loses_nothing(tmp_path):
    logger = Remote(flush_timeout_s=0.2)
    logger.delivery.start(tmp_path)
    with warned() as said:
        logger.down = ConnectionError
        for step in range(3):
            logger.log_metrics({"loss": step / 3}, step)
        logger.log_image("seen", torch.zeros(3, 4, 5), 2)
        logger.state_dict()
    assert spilled(tmp_path) == [0, 1, 2, 2]
    assert said[0].startswith("Remote failed: ConnectionError: no route to host. Training goes on")
    with warned() as said:
        logger.finalize()
    assert said[-1].startswith("Remote did not take 4 records: ConnectionError: ")
    assert said[-1].endswith(f"instep runs sync {tmp_path}")
    logger.down = None
    logger.log_metrics({"loss": 9.0}, 3)  # opens it again: first what waits, in its order
    logger.finalize()
    assert logger.store == [*((s, {"loss": s / 3}) for s in range(3)), (2, "seen", (4, 5, 3)), (3, {"loss": 9.0})]
    assert not (tmp_path / "loggers" / "Remote.jsonl").exists()


def test_a_full_queue_goes_to_the_disk_while_the_tracker_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(backlog, "QUEUE_RECORDS", 50)
    go_on = threading.Event()

    class Hangs(Remote):
        def _log_metrics(self, metrics, step):
            go_on.wait(60)
            super()._log_metrics(metrics, step)

    logger = Hangs()
    logger.delivery.start(tmp_path)
    for step in range(170):
        logger.log_metrics({"loss": float(step)}, step)
    assert len(logger.delivery.sender.backlog._memory) < 50
    go_on.set()
    logger.finalize()
    assert [step for step, _ in logger.store] == list(range(170))


def test_one_record_that_is_refused_stops_no_other(tmp_path):
    logger = Remote()
    logger.refuses = {"bad name"}
    logger.delivery.start(tmp_path)
    with warned() as said:
        for step, name in enumerate(["good", "bad name", "good", "good"]):
            logger.log_metrics({name: 1.0}, step)
        for _ in range(500):
            if len(logger.store) == 3:
                break
            logger.delivery.sender.backlog.is_many.set()
            threading.Event().wait(0.01)
        logger.finalize()
    assert "Remote refuses bad name: ValueError: not such a name" in said
    assert [step for step, _ in logger.store] == [0, 2, 3]
    assert json.loads((tmp_path / "loggers" / "Remote.refused.jsonl").read_text())[1][0] == {"dict": {"bad name": 1.0}}


def test_rows_behind_an_image_that_failed_once_still_go_together(tmp_path):
    go_on, sizes, images = threading.Event(), [], []

    class Many(Remote):
        def _log_metrics(self, metrics, step):
            sizes.append(1)

        def _log_rows(self, rows):
            sizes.append(len(rows))

        def _log_image(self, name, pictures, step):
            go_on.wait(60)
            images.append(name)
            if len(images) == 1:
                raise ConnectionError("no route to host")

    logger = Many()
    logger.delivery.start(tmp_path)
    logger.log_image("seen", torch.zeros(3, 4, 5), 0)
    for step in range(400):
        logger.log_metrics({"loss": 0.0}, step)
    with warned():
        go_on.set()
        for _ in range(500):
            if sum(sizes) == 400:
                break
            logger.delivery.sender.backlog.is_many.set()
            threading.Event().wait(0.01)
        logger.finalize()
    assert images == ["seen", "seen"]
    assert sum(sizes) == 400
    assert len(sizes) < 10


@pytest.mark.parametrize("kind", [Remote, Asked])
def test_a_resumed_run_sends_nothing_twice(kind, tmp_path):
    def run(logger, steps, state=None):
        if state is not None:
            logger.load_state_dict({**state, "global_step": state["step"]})
        logger.delivery.start(tmp_path)
        for step in steps:
            logger.log_metrics({"loss": step / 7, **({"val": -step} if step % 5 == 0 else {})}, step)
        return logger

    first = run(kind(), range(1, 11))
    state = first.state_dict()
    run(first, range(11, 18))
    assert first.delivery.sender.flush(10)  # then the process is killed
    second = run(kind(first.store), range(11, 25), state)
    second.log_metrics({"test": 1.0}, 10)  # at the checkpoint's step, and new
    second.finalize()
    assert [step for step, metrics in second.store if "loss" in metrics] == list(range(1, 25))
    assert [step for step, metrics in second.store if "val" in metrics] == [5, 10, 15, 20]
    assert second.store[-1] == (10, {"test": 1.0})
    first.finalize()


def test_what_was_spilled_before_the_checkpoint_is_sent_by_the_resumed_run(tmp_path):
    first = Remote(flush_timeout_s=0.1)
    first.delivery.start(tmp_path)
    first.down = ConnectionError
    with warned() as said:
        for step in range(3):
            first.log_metrics({"loss": 0.5}, step)
        state = first.state_dict()
        for step in range(3, 5):
            first.log_metrics({"loss": 0.5}, step)
        first.finalize()
    assert "did not take 5 records" in said[-1]
    second = Remote()
    second.load_state_dict({**state, "global_step": 2})
    second.delivery.start(tmp_path)
    for step in range(3, 6):
        second.log_metrics({"loss": 0.5}, step)
    second.finalize()
    assert [step for step, _ in second.store] == list(range(6))


def test_what_is_spilled_before_a_resumed_run_reaches_its_tracker_comes_behind_what_was_left(tmp_path, monkeypatch):
    class Away(Remote):
        def _start(self):
            if self.down is not None:
                raise self.down("no answer")

    monkeypatch.setattr(backlog, "QUEUE_RECORDS", 5)
    first, second = Away(flush_timeout_s=0.1), Away()
    first.delivery.start(tmp_path)
    first.down = second.down = ConnectionError
    with warned():
        for step in range(3):
            first.log_metrics({"loss": 0.5}, step)
        second.load_state_dict({**first.state_dict(), "global_step": 2})
        first.finalize()
        second.delivery.start(tmp_path)
        for step in range(3, 20):
            second.log_metrics({"loss": 0.5}, step)
        second.down = None
        second.finalize()
    assert [step for step, _ in second.store] == list(range(20))


def test_wrong_settings_end_the_start_and_an_unreachable_tracker_does_not(tmp_path):
    class Wrong(Remote):
        def _start(self):
            raise InstepError("no API key")

    class Away(Remote):
        def _start(self):
            if self.tries < 2:
                self.tries += 1
                raise TimeoutError("no answer")

    with pytest.raises(InstepError, match="no API key"):
        Wrong().delivery.start(tmp_path)
    away = Away()
    with warned() as said:
        away.delivery.start(tmp_path)
        away.log_metrics({"loss": 1.0}, 0)
        away.finalize()
        away.delivery.start(tmp_path)
        away.finalize()
    assert said[0].startswith("Away failed: TimeoutError")
    assert away.store == [(0, {"loss": 1.0})]


def test_every_rank_writes_where_it_is_asked_to(tmp_path, monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    for per_rank in (False, True):
        logger = JSONLinesLogger(per_rank=per_rank)
        logger.delivery.start(tmp_path, is_main=False)
        logger.log_metrics({"loss": 1.0}, 1)
        logger.finalize()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jsonl")] == ["rank-1/metrics.jsonl"]


def test_a_kind_without_a_place_is_said_once_with_those_that_have_one(tmp_path):
    logger = Logger()
    logger.delivery.start(tmp_path)
    with warned() as said:
        logger.log_image("a", np.zeros((2, 2)))
        logger.log_image("a", np.zeros((2, 2)))
    assert len(said) == 1
    assert "Logger has no place for image" in said[0]
    assert {"JSONLinesLogger", "TensorBoardLogger"} <= set(said[0].replace(",", "").split())
    logger.finalize()


def test_every_kind_survives_the_disk_and_nothing_else_is_read(tmp_path):
    values = [
        kinds.to_image("a", torch.rand(3, 4, 5), "seen"), kinds.to_audio("a", torch.zeros(1, 100), 8000),
        kinds.to_video("a", torch.zeros(2, 3, 4, 4)), kinds.to_histogram("a", torch.randn(100)),
        kinds.to_table("a", columns=["x", "y"], data=[[1, "b"], [None, torch.tensor(0.5)]]),
        kinds.Artifact(tmp_path / "f", "f"), kinds.code_state(tmp_path), {"deep": [1, {"er": float("inf")}]},
    ]  # fmt: skip
    waits = Backlog(tmp_path / "b" / "backlog.jsonl")
    for value in values:
        waits.append(Record("_log_any", ("name", value), 3, 1.5))
    waits.spill()
    with (tmp_path / "b" / "backlog.jsonl").open("ab") as file:
        file.write(b'["_start", [], 1, 2.0]\n{"x": \n["_log_a", [], 1')
    waits.close()
    after = Backlog(tmp_path / "b" / "backlog.jsonl")
    after.take_over(lambda record: True)
    read = after.peek(100)
    assert [record.line() for record in read] == [Record("_log_any", ("name", v), 3, 1.5).line() for v in values]
    assert read[0].args[1].png().startswith(b"\x89PNG")
    assert read[1].args[1].wav().startswith(b"RIFF")
    assert read[2].args[1].gif().startswith(b"GIF8")
    after.drop(len(values))
    after.close()
    assert not list((tmp_path / "b").iterdir())


def test_rows_are_drawn_over_a_metric_named_as_x_axis(tmp_path):
    logger = JSONLinesLogger(x_axis="tokens")
    logger.delivery.start(tmp_path)
    logger.log_metrics({"loss": 1.0, "tokens": 4096}, 1)
    logger.log_metrics({"loss": 0.5}, 2)
    logger.log_metrics({"loss": float("nan"), "tokens": 8192}, 3)
    logger.finalize()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(4096, 1.0), (4096, 0.5), (8192, "NaN")]


def test_an_axis_that_nothing_has_is_said_and_the_steps_are_taken(tmp_path):
    logger = JSONLinesLogger(x_axis="tokns")
    logger.delivery.start(tmp_path)
    with warned() as said:
        for step in (3, 4):
            logger.log_metrics({"loss": 1.0, "tokens": 4096}, step)
    logger.finalize()
    assert len(said) == 1
    assert "no metric of that name" in said[0]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 4]


def test_what_a_run_logs_without_a_step_has_that_of_the_run(tmp_path):
    class Says(Toy):
        def on_validation_end(self):
            self.logger.log_text("said", "words")

    logger = JSONLinesLogger()
    trainer = quiet(max_epochs=2, log_every_n_steps=3, logger=logger, default_root_dir=tmp_path)
    trainer.fit(Says(), loader(), loader())
    rows = [json.loads(line) for line in logger.path.read_text().splitlines()]
    assert [row["step"] for row in rows if row.get("kind") == "text"] == [0, 4, 8]  # the first of the sanity check


def test_arguments_that_no_logger_has():
    with pytest.raises(SettingError, match=r"JSONLinesLogger: argument='prefx' is not known.*Did you mean 'prefix'"):
        JSONLinesLogger(prefx="a")
    with pytest.raises(SettingError, match="two CSVLogger would write the same file"):
        Trainer(logger=["csv", "csv"])


def test_names_that_a_tracker_cannot_tell_apart_are_a_warning(tmp_path):
    class Narrow(Remote):
        def _sent_name(self, name):
            return name.lower().replace("?", "_")

    logger = Narrow()
    logger.delivery.start(tmp_path)
    for metrics in ({"a?": 1.0, "a_": 2.0, "b": 0.0}, {"F1": 1.0, "f1": 2.0}, {"x": 1.0, "X": 2.0, "b": 0.0}):
        with pytest.warns(UserWarning, match=r"Narrow allows only one name for (a\?, a_|F1, f1|x, X),"):
            logger.log_metrics(metrics, 1)
    logger.log_metrics({"a": 1.0, "b": 2.0}, 2)
    logger.finalize()
    assert logger.store[-1] == (2, {"a": 1.0, "b": 2.0})


def test_a_batch_of_pictures_and_wrong_values(tmp_path):
    logger = Remote()
    logger.delivery.start(tmp_path)
    logger.log_images({"batch": np.zeros((2, 8, 6, 3))}, 1)
    with pytest.raises(LogError, match="no option 'captin'; there are caption"):
        logger.log_image("a", np.zeros((2, 2)), captin="x")
    with pytest.raises(LogError, match="takes numbers, and got 'x'"):
        JSONLinesLogger(tmp_path).log_histogram("h", "x")
    with pytest.raises(LogError, match="a list of rows"):
        JSONLinesLogger(tmp_path).log_table("t", columns=["a"], data=3)
    logger.finalize()
    assert logger.store == [(1, "batch", (8, 6, 3))]


def test_a_checkpoint_knows_what_was_logged_before_the_start_too(tmp_path):
    logger = Remote()
    logger.log_metrics({"early": 1.0}, 3)
    logger.delivery.start(tmp_path)
    logger.log_metrics({"loss": 1.0}, 4)
    assert logger.state_dict()["logged"] == {"early": 3, "loss": 4}
    logger.finalize()
