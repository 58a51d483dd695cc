from __future__ import annotations

import codecs
import io
import itertools
import multiprocessing
import os
import pty
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from instep import Trainer
from instep.callbacks import Callback, EarlyStopping, LiveProgressBar, ModelCheckpoint
from instep.callbacks.progress import bar as module
from instep.callbacks.progress import screen
from instep.callbacks.progress.view import Line, View
from instep.distributed import Triggers
from instep.distributed.signals import SignalGuard
from instep.errors import SettingError
from tests.callbacks.fakes import FakeProgress, FakeTrainer
from tests.helpers.spawn import HANG_S
from tests.trainer.resuming import Net, Plain

DEADLINE_S = HANG_S
COLOURS = re.compile(r"\x1b\[[\d;]*m")


class Terminal:
    """A pseudo-terminal in the place of stdout and stderr, and a thread that reads it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w", buffering=1)
        self.text = ""
        self.read_on = threading.Event()
        self.read_on.set()
        self.more = threading.Condition()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def connect(self) -> None:
        """To be called in the test itself: between a fixture and its test pytest sets the streams anew."""
        self.monkeypatch.setattr(sys, "stdout", self.stream)
        self.monkeypatch.setattr(sys, "stderr", self.stream)

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")()
        while True:
            self.read_on.wait(DEADLINE_S)
            try:
                data = os.read(self.master, 65536)
            except OSError:  # the other end was closed
                return
            with self.more:
                self.text += decoder.decode(data)
                self.more.notify_all()

    def read_until(self, wanted: str) -> str:
        with self.more:
            assert self.more.wait_for(lambda: wanted in self.text, DEADLINE_S), f"no {wanted!r} in {self.text!r}"
            return self.text

    def rest(self) -> str:
        """Everything shown up to now."""
        self.stream.write("<end>")
        self.stream.flush()
        return self.read_until("<end>")

    def close(self) -> None:
        self.stream.close()
        self.reader.join(DEADLINE_S)
        os.close(self.master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    terminal = Terminal(monkeypatch)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    yield terminal
    monkeypatch.undo()
    terminal.close()


def no_terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The streams are no terminals; what goes to stderr."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    return stream


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "instep-progress"]
    assert screen._forks.screen is None


def started(trainer: FakeTrainer, run: str = "fit", **options: Any) -> LiveProgressBar:
    bar = LiveProgressBar(**{"refreshes_per_s": 200.0, "plain_every_s": 0.005, **options})
    bar.setup(trainer, None, run)
    if run == "fit":
        bar.on_train_start(trainer, None)
        bar.on_train_epoch_start(trainer, None)
    else:
        getattr(bar, {"validate": "on_validation_start"}.get(run, f"on_{run}_start"))(trainer, None)
    return bar


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = threading.Event()
    timer = threading.Timer(DEADLINE_S, deadline.set)
    timer.start()
    try:
        while not condition():
            assert not deadline.wait(0.002), "not in time"
    finally:
        timer.cancel()


def test_counters_metrics_and_speed_on_a_terminal(terminal):
    terminal.connect()
    trainer = FakeTrainer(progress_bar_metrics={"loss": 0.25, "acc": torch.tensor(0.5)})
    bar = started(trainer)
    for batch in range(1, 51):
        trainer.progress.batch = batch
    terminal.read_until("50/100")
    assert "loss 0.25   acc 0.5" in COLOURS.sub("", terminal.text)
    trainer.progress.batch = 75
    terminal.read_until("75/100")
    terminal.read_until("it/s")
    bar.on_train_end(trainer, None)
    assert "Epoch 1/2" in terminal.rest()
    assert "━" in terminal.text
    assert bar.error is None
    assert sys.stdout is sys.stderr is terminal.stream


def test_validation_is_shown_below_training(terminal):
    terminal.connect()
    trainer = FakeTrainer(
        progress=FakeProgress("validate", batch=3, total=7, dataloader_idx=1, outer_batch=100, outer_total=100)
    )
    bar = started(trainer)
    text = terminal.read_until("3/7")
    assert "100/100" in text
    assert "Validation 2" in text
    bar.teardown(trainer, None, "fit")


@pytest.mark.parametrize(
    ("run", "stage", "title"),
    [("validate", "validate", "Validation"), ("test", "test", "Test"), ("predict", "predict", "Predict")],
)
def test_the_bar_names_validation_test_and_prediction(terminal, run, stage, title):
    terminal.connect()
    trainer = FakeTrainer(progress=FakeProgress(stage, batch=3, total=7))
    bar = started(trainer, run)
    text = terminal.read_until("3/7")
    assert title in text
    assert "Epoch" not in text
    getattr(bar, {"validate": "on_validation_end"}.get(run, f"on_{run}_end"))(trainer, None)
    assert bar._thread is None


def test_the_bar_shows_the_sanity_check_and_no_epoch(terminal):
    terminal.connect()
    trainer = FakeTrainer(progress=FakeProgress("sanity", batch=1, total=2))
    bar = LiveProgressBar(refreshes_per_s=200.0)
    bar.setup(trainer, None, "fit")
    bar.on_sanity_check_start(trainer, None)
    thread = bar._thread
    assert "Epoch" not in terminal.read_until("1/2")
    assert "Sanity check" in terminal.text
    bar.on_train_start(trainer, None)
    assert bar._thread is thread
    bar.on_train_end(trainer, None)


def test_prints_go_through_above_the_bar(terminal):
    terminal.connect()
    trainer = FakeTrainer()
    bar = started(trainer)
    terminal.read_until("0/100")
    print("hello [bold]there[/bold]")
    print("to stderr", file=sys.stderr)
    terminal.read_until("hello [bold]there[/bold]\r\n")
    terminal.read_until("to stderr\r\n")
    trainer.progress.batch = 60
    terminal.read_until("60/100")
    bar.on_train_end(trainer, None)
    print("after")
    assert terminal.rest().endswith("after\r\n<end>")


def shown(text: str, columns: int) -> str:
    """The lines of a terminal of that width, after what rich writes: text, line ends, cursor up, erased lines."""
    rows: list[list[str]] = [[]]
    row = column = 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|.|\n", text):
        up = re.fullmatch(r"\x1b\[(\d*)A", part)
        row, column = (row - int(up[1] or 1) if up else row), (0 if part == "\r" else column)
        if part == "\x1b[2K":
            rows[row] = []
        if part == "\n" or (part.isprintable() and column == columns):
            row, column = row + 1, 0
        rows += [[] for _ in range(row + 1 - len(rows))]
        if part.isprintable():
            rows[row][column:] = [part]
            column += 1
    return "\n".join("".join(row) for row in rows)


@pytest.mark.parametrize("columns", [44, 100])
def test_the_notice_of_a_signal_is_not_drawn_over(terminal, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal.connect()
    trainer = FakeTrainer()
    trainer.progress_bar_metrics = {"a_metric_with_a_long_name_on_a_line_of_its_own": 0.25}
    bar = started(trainer)
    terminal.read_until("0/100")
    with SignalGuard(Triggers()) as guard:
        os.kill(os.getpid(), signal.SIGINT)
        terminal.read_until("once.")
        guard.received = None
    trainer.progress.batch = 60
    terminal.read_until("60/100")
    bar.on_train_end(trainer, None)
    notice = "Stopping (SIGINT): this step is finished and saved first. Press Ctrl-C again to stop at once."
    assert notice in " ".join(shown(terminal.rest(), columns).split("\n")).replace("  ", " ")


def test_a_redirected_stdout_keeps_its_way(terminal, monkeypatch):
    terminal.connect()
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    trainer = FakeTrainer()
    bar = started(trainer)
    terminal.read_until("0/100")
    print("result")
    assert out.getvalue() == "result\n"
    bar.on_train_end(trainer, None)
    assert "result" not in terminal.rest()


def test_an_exception_ends_the_bar_cleanly(terminal):
    terminal.connect()
    trainer = FakeTrainer()
    bar = started(trainer)
    terminal.read_until("0/100")
    bar.on_exception(trainer, None, KeyboardInterrupt())
    bar.teardown(trainer, None, "fit")
    assert bar._thread is None
    assert sys.stdout is terminal.stream
    assert terminal.rest().endswith("\x1b[?25h<end>")  # the cursor is back


def test_the_bar_starts_again_for_the_next_stage(terminal):
    terminal.connect()
    trainer = FakeTrainer()
    bar = started(trainer)
    terminal.read_until("0/100")
    bar.on_train_end(trainer, None)
    trainer.progress = FakeProgress("test", 1, 4)
    bar.setup(trainer, None, "test")
    bar.on_test_start(trainer, None)
    terminal.read_until("1/4")
    bar.on_test_end(trainer, None)


def test_finished_epochs_stay_where_asked_for(terminal):
    terminal.connect()
    trainer = FakeTrainer(progress_bar_metrics={"loss": 1.0}, progress=FakeProgress(batch=100))
    bar = started(trainer, leave=True)
    bar.on_train_epoch_end(trainer, None)
    trainer.progress_bar_metrics["val_loss"] = 0.5  # logged at the epoch's very end
    trainer.progress = FakeProgress(epoch=1)
    bar.on_train_epoch_start(trainer, None)
    terminal.read_until("Epoch 1/2  100 batches in 0:00")
    terminal.read_until("loss: 1  val_loss: 0.5\r\n")
    bar.on_train_end(trainer, None)


def test_the_time_left_ends_with_the_steps():
    line = Line("Epoch 1", done=20, total=4000, elapsed_s=10.0, speed=2.0, end=100)
    assert "0:40 left" in line.plain()
    assert "33:10 left" in replace(line, end=5000).plain(), "the epoch comes first"


def test_the_steps_left_count_the_micro_batches_of_a_global_batch(tmp_path):
    seen = []

    class Bar(LiveProgressBar):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append(self._train_line(trainer, True, 0.0).end)

    data = torch.utils.data.DataLoader(Plain(32), batch_size=2)
    trainer = Trainer(
        max_steps=3,
        global_batch_size=8,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        callbacks=Bar(),
        default_root_dir=tmp_path,
    )
    trainer.fit(Net(), data)
    assert trainer.global_step == 3
    assert (seen[0], seen[-1], len(seen)) == (1 + 3 * 4, 12, 12)


def test_plain_lines_where_there_is_no_terminal(monkeypatch):
    pipe = no_terminal(monkeypatch)
    trainer = FakeTrainer(
        progress_bar_metrics={"loss": 0.5}, progress=FakeProgress(batch=7), max_steps=50, global_step=7
    )
    bar = started(trainer)
    wait_for(lambda: "7/100  step 7/50" in pipe.getvalue())
    bar.on_train_epoch_end(trainer, None)
    bar.on_train_end(trainer, None)
    lines = pipe.getvalue().splitlines()
    assert lines[0].startswith("Epoch 1/2  7/100  step 7/50  0:00")
    assert lines[0].endswith("loss: 0.5")
    assert lines[-1].startswith("Epoch 1/2  7 batches in 0:00")
    assert "\x1b" not in pipe.getvalue()
    assert "rich" not in type(sys.stdout).__module__


def test_plain_lines_are_rare_and_every_epoch_has_one(monkeypatch):
    pipe = no_terminal(monkeypatch)
    trainer = FakeTrainer()
    bar = started(trainer, plain_every_s=3600.0)
    for epoch in range(3):
        trainer.progress = FakeProgress(batch=100, epoch=epoch)
        bar.on_train_epoch_start(trainer, None)
        bar.on_train_epoch_end(trainer, None)
    bar.on_train_end(trainer, None)
    assert [line.split("  ")[0] for line in pipe.getvalue().splitlines()] == ["Epoch 1/2", "Epoch 2/2", "Epoch 3/2"]


def test_the_bar_is_drawn_by_global_rank_zero_alone(monkeypatch):
    no_terminal(monkeypatch)
    bar = started(FakeTrainer(global_rank=1, world_size=2))
    assert bar._thread is None
    bar.on_train_end(FakeTrainer(global_rank=1), None)


def test_a_failure_never_reaches_the_training(terminal, monkeypatch):
    terminal.connect()
    said = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", said)
    trainer = FakeTrainer()

    class Broken(LiveProgressBar):
        def get_metrics(self, trainer, module):
            raise RuntimeError("no such metric")

    bar = Broken(refreshes_per_s=200.0)
    bar.setup(trainer, None, "fit")
    bar.on_train_start(trainer, None)
    wait_for(lambda: bar.error is not None)
    bar.on_train_epoch_start(trainer, None)
    bar.on_train_epoch_end(trainer, None)
    bar.on_train_end(trainer, None)
    assert said.getvalue() == "The progress bar stopped: RuntimeError: no such metric\n"
    assert sys.stdout is terminal.stream


def test_a_closed_stream_never_reaches_the_training(monkeypatch):
    pipe = no_terminal(monkeypatch)
    monkeypatch.setattr(sys, "__stderr__", None)
    trainer = FakeTrainer()
    bar = started(trainer)
    pipe.close()
    wait_for(lambda: bar.error is not None)
    bar.on_train_end(trainer, None)
    assert isinstance(bar.error, ValueError)


def test_a_terminal_that_is_stopped_does_not_hold_the_end(terminal, monkeypatch):
    terminal.connect()
    monkeypatch.setattr(module, "_JOIN_S", 0.1)
    trainer = FakeTrainer(progress_bar_metrics={f"metric_{number}": number for number in range(100)})
    bar = started(trainer, refreshes_per_s=2000.0)
    terminal.read_until("0/100")
    terminal.read_on.clear()
    writing = threading.Event()
    monkeypatch.setattr(View, "draw", _counted(View.draw, writing, 200))
    assert not writing.wait(0.5)  # the thread is stuck: the terminal takes no more
    thread = bar._thread
    bar.on_train_end(trainer, None)
    assert sys.stdout is terminal.stream
    terminal.read_on.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def _counted(draw: Callable[..., Any], many: threading.Event, limit: int) -> Callable[..., Any]:
    count = itertools.count()

    def counting(*args: Any) -> Any:
        if next(count) == limit:
            many.set()
        return draw(*args)

    return counting


def test_metrics_may_change_while_they_are_read(terminal):
    terminal.connect()
    trainer = FakeTrainer()
    bar = started(trainer, refreshes_per_s=2000.0)
    for number in range(20000):
        trainer.progress_bar_metrics[f"metric_{number % 100}"] = number
        if number % 100 == 99:
            trainer.progress_bar_metrics.clear()
    bar.on_train_end(trainer, None)
    assert bar.error is None


def _print_in_a_child(done: Any) -> None:
    print("from the child")
    sys.stdout.flush()
    done.set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_worker_may_print(terminal):
    terminal.connect()
    fork = multiprocessing.get_context("fork")
    trainer = FakeTrainer()
    bar = started(trainer, refreshes_per_s=2000.0)
    for _ in range(5):
        done = fork.Event()
        child = fork.Process(target=_print_in_a_child, args=(done,))
        child.start()
        assert done.wait(DEADLINE_S)
        child.join(DEADLINE_S)
        assert child.exitcode == 0
    bar.on_train_end(trainer, None)
    assert terminal.rest().count("from the child") == 5


def test_wrong_refresh_rates_of_the_bar_are_named():
    for option in ("refreshes_per_s", "plain_every_s"):
        with pytest.raises(SettingError, match=option):
            LiveProgressBar(**{option: 0})


@pytest.mark.parametrize("both", [(EarlyStopping, ModelCheckpoint), (EarlyStopping,)], ids=["both", "stopping"])
def test_the_bar_shows_samples_per_second_mfu_and_the_best_values(both, monkeypatch, tmp_path):
    """Samples/s by the loader, MFU by a throughput monitor, the best by what the checkpoints monitor, the loss."""
    pipe = no_terminal(monkeypatch)

    class Monitor(Callback):
        metrics = {"train/device/items_per_sec": 40617.0, "train/device/mfu": 0.341, "train/items_per_sec": 81234.0}

    class Watched(LiveProgressBar):
        def on_validation_end(self, trainer, module):
            super().on_validation_end(trainer, module)
            self._speed("train").value = 10.0
            views.append(self._read(trainer, module))

    class Rated(Net):
        def on_validation_epoch_end(self):
            self.log("quality", 0.5 - self.current_epoch / 10, prog_bar=True)

    views: list[Any] = []
    data = torch.utils.data.DataLoader(Plain(8), batch_size=4)

    def fit(epochs, **resume):
        trainer = Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            callbacks=[Watched(), Monitor(), *(kind(monitor="quality", mode="max") for kind in both)],
            default_root_dir=tmp_path,
            num_sanity_val_steps=0,
        )
        trainer.fit(Rated(), data, data, **resume)

    fit(2)
    last = views[-1]
    assert last.best["quality"] == 0.5
    assert last.curve.points
    assert {"40.0 samples/s", "81.2k tokens/s", "MFU 34.1%"} <= set(last.facts)
    assert any(fact.startswith("ETA 0:") for fact in views[0].facts)
    assert "quality: 0.4" in pipe.getvalue()
    fit(3, ckpt_path="auto")
    assert views[-1].best["quality"] == 0.5, "the best of a resumed run is from before the resume"
