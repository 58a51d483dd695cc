"""The progress bar: a thread of its own that reads counters, so that a training step pays nothing for it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import torch

from instep.callbacks.base import Callback
from instep.state import GradientState
from instep.utils.checks import above_zero

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from instep.callbacks.base import Trainer, TrainModule

_JOIN_S = 2.0  # a thread that is stuck in a stopped terminal is left behind
_BAR_WIDTH = 24  # columns

_WINDOW = 40  # readings: ten seconds at four a second

_TITLES = {"sanity": "Sanity check", "validate": "Validation", "test": "Test", "predict": "Predict"}


class Speed:
    """Batches per second over the last seconds."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self.value: float | None = None

    def pause(self) -> None:
        """Start a new measurement; the last value is kept until there is a new one."""
        self._readings.clear()

    def read(self, now_s: float, batch: int) -> float | None:
        """Take a reading and give the speed; None while it is not known."""
        if self._readings and batch < self._readings[-1][1]:
            self._readings.clear()  # a new epoch
        self._readings.append((now_s, batch))
        (first_s, first), (last_s, last) = self._readings[0], self._readings[-1]
        if last_s > first_s and last > first:
            self.value = (last - first) / (last_s - first_s)
        return self.value


@dataclass
class Line:
    """One loop's progress: `done` of `total` (None: unknown), seconds since its start, batches per second."""

    title: str
    done: int
    total: int | None
    elapsed_s: float
    speed: float | None
    note: str = ""
    end: int | None = None
    """The batch that it ends at, where that may come before `total`."""
    metrics: dict[str, float | int | str] = field(default_factory=dict)

    @property
    def fraction(self) -> float | None:
        """Part that is done, from 0 to 1; None where the total is unknown."""
        return min(1.0, self.done / self.total) if self.total else None

    def parts(self) -> list[str]:
        """Return the texts right of the bar: count, times, speed."""
        parts = [f"{self.done}/{self.total}" if self.total is not None else f"{self.done}"]
        if self.note:
            parts.append(self.note)
        parts.append(clock(self.elapsed_s))
        last = min((n for n in (self.total, self.end) if n is not None), default=None)
        if last is not None and self.done < last:
            left = None if not self.speed else (last - self.done) / self.speed
            parts.append(f"{clock(left)} left")
        if self.speed:
            parts.append(f"{self.speed:.1f} it/s" if self.speed >= 1 else f"{1 / self.speed:.2f} s/it")
        return parts

    def metric_text(self) -> str:
        """Write the metrics in one line."""
        return "  ".join(f"{name}: {number(value)}" for name, value in self.metrics.items())

    def plain(self) -> str:
        """Write the whole as one line without a bar."""
        return "  ".join(filter(None, [self.title, *self.parts(), self.metric_text()]))


def title(stage: str, epoch: int, max_epochs: int | None, dataloader_idx: int) -> str:
    """Name a loop: epochs count from 1 here."""
    if stage == "train":
        return f"Epoch {epoch + 1}/{max_epochs}" if max_epochs is not None and max_epochs > 0 else f"Epoch {epoch + 1}"
    name = _TITLES.get(stage, stage)
    return f"{name} {dataloader_idx + 1}" if dataloader_idx else name


def showable(metrics: Mapping[str, Any]) -> dict[str, float | int | str]:
    """Choose the metrics that can be read without waiting for a device: numbers, texts, one-element CPU tensors."""
    shown: dict[str, float | int | str] = {}
    # A copy first: the training thread adds to the dict meanwhile.
    for name, value in dict(metrics).items():
        if isinstance(value, (float, int, str)):
            shown[name] = value
        elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
            shown[name] = value.item()
    return shown


def number(value: float | int | str) -> str:
    """Write a metric's value with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def clock(seconds: float | None) -> str:
    """Write seconds as 1:02:03 or 2:03; None as -:--.

    Example:
        >>> clock(3723.4), clock(5), clock(None)
        ('1:02:03', '0:05', '-:--')
    """
    if seconds is None or seconds > 359_999_999:
        return "-:--"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class ProgressBar(Callback):
    """Shows epoch, batches, speed, time left and metrics while the run goes on.

    There is no hook per step: a daemon thread reads `trainer.progress` and `trainer.progress_bar_metrics` four times a
    second and draws with rich, on the terminal that stderr or else stdout is connected to. Where neither is a terminal,
    and in notebooks, it writes plain lines to stderr: one every few seconds and one per epoch. Only global rank 0 shows
    anything. Metrics that are on a device are left out: reading them would make the training wait.

    What the run prints meanwhile appears above the bar. A failure of the bar never reaches the training: it is shown
    once on stderr and kept in `error`.

    Args:
        refreshes_per_s: redraws per second; each costs the training about a millisecond.
        plain_every_s: seconds between plain lines.
        leave: True: the last line of every epoch stays on the terminal.

    Raises:
        SettingError: a rate is not positive.

    Example:
        >>> class Short(ProgressBar):
        ...     def get_metrics(self, trainer, module):
        ...         shown = super().get_metrics(trainer, module)
        ...         return {name: value for name, value in shown.items() if not name.endswith("_step")}
    """

    _screen: _Screen | None = None
    _thread: threading.Thread | None = None

    def __init__(self, refreshes_per_s: float = 4.0, plain_every_s: float = 5.0, leave: bool = False) -> None:
        rate = above_zero("above 0; Trainer(enable_progress_bar=False) shows no bar")
        self.refreshes_per_s = rate("refreshes_per_s", refreshes_per_s)
        self.plain_every_s = rate("plain_every_s", plain_every_s)
        self.leave = leave
        self.error: Exception | None = None
        self._run = "fit"
        self._stopping = threading.Event()
        self._speeds: dict[str, Speed] = {}
        self._loop: tuple[Any, ...] = ()
        self._loop_start_s = 0.0
        self._train_start_s = 0.0
        self._train_first = 0
        self._epoch_done: Line | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no thread, and makes an event of its own when it starts one.
        return {name: value for name, value in self.__dict__.items() if name not in ("_screen", "_thread", "_stopping")}

    def get_metrics(self, trainer: Trainer, module: TrainModule) -> dict[str, float | int | str]:
        """Return the metrics to show; override to hide some. Runs in the bar's thread: must not touch a device."""
        return showable(trainer.progress_bar_metrics)

    # ---- when it runs

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._run = stage

    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._start(trainer, module)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._start(trainer, module)

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._close_epoch(trainer, module)
        self._train_start_s = time.monotonic()
        self._train_first = trainer.progress.outer_batch  # not 0 in an epoch that a checkpoint was in

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._guard(self._note_epoch, trainer)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._close_epoch(trainer, module)
        self._stop()

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._run == "validate":
            self._start(trainer, module)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._run == "validate":
            self._stop()

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._start(trainer, module)

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._stop()

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._start(trainer, module)

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        self._stop()

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._stop()

    # ---- the thread

    def _guard(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - the bar must never end the training; it says that it is gone
            if self.error is None:
                self.error = error
                self._say(f"The progress bar stopped: {type(error).__name__}: {error}")
            self._stopping.set()
            return None

    def _say(self, text: str) -> None:
        try:
            print(text, file=sys.__stderr__, flush=True)
        except (OSError, ValueError, AttributeError):
            return  # there is no stderr to say it on; `error` has it

    def _start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._thread is None and trainer.is_global_zero:
            self.error = None
            self._guard(self._open, trainer, module)

    def _open(self, trainer: Trainer, module: TrainModule) -> None:
        self._stopping = threading.Event()
        self._speeds, self._loop, self._epoch_done = {}, (), None
        self._loop_start_s = self._train_start_s = time.monotonic()
        self._screen = _Screen()
        self._thread = threading.Thread(
            target=self._guard,
            args=(self._watch, trainer, module, self._screen, self._stopping),
            name="instep-progress",
            daemon=True,
        )
        self._thread.start()
        atexit.register(self._stop)

    def _watch(self, trainer: Trainer, module: TrainModule, screen: _Screen, stopping: threading.Event) -> None:
        # Plain lines are rare, but the speed is read more often than it is shown.
        period_s = 1 / self.refreshes_per_s if screen.live else min(1.0, self.plain_every_s)
        shown_s = time.monotonic()
        try:
            while not stopping.wait(period_s):
                lines = self._read(trainer, module)
                if screen.live or time.monotonic() - shown_s >= self.plain_every_s:
                    shown_s = time.monotonic()
                    screen.show(lines)
            if screen.live and self.error is None:
                screen.show(self._read(trainer, module))
        finally:
            screen.close()

    def _stop(self) -> None:
        thread, self._thread = self._thread, None
        screen, self._screen = self._screen, None
        if thread is None or screen is None:
            return
        self._stopping.set()
        if thread is not threading.current_thread():
            thread.join(_JOIN_S)
        screen.give_back_streams()
        atexit.unregister(self._stop)

    # ---- what it shows

    def _read(self, trainer: Trainer, module: TrainModule) -> list[Line]:
        progress = trainer.progress
        stage = progress.stage
        if stage is None:
            return []
        now_s = time.monotonic()
        loop = (stage, progress.epoch, progress.dataloader_idx)
        if loop != self._loop:
            if stage == "train" and (not self._loop or self._loop[0] != "train"):
                # Back from validation: its time is not the training's speed.
                self._speed("train").pause()
            if stage != "train":
                self._speeds.pop(stage, None)
                self._loop_start_s = now_s
            self._loop = loop
        metrics = self.get_metrics(trainer, module)
        lines: list[Line] = []
        if self._run == "fit" and stage != "sanity":
            training = stage == "train"
            speed = self._speed("train")
            value = speed.read(now_s, progress.batch) if training else speed.value
            lines.append(self._train_line(trainer, training, now_s, value))
            lines[0].metrics = metrics
            if training:
                return lines
        name = title(stage, progress.epoch, None, progress.dataloader_idx)
        speed = self._speed(stage).read(now_s, progress.batch)
        lines.append(Line(name, progress.batch, progress.total, now_s - self._loop_start_s, speed))
        if len(lines) == 1:
            lines[0].metrics = metrics
        return lines

    def _train_line(self, trainer: Trainer, training: bool, now_s: float, speed: float | None = None) -> Line:
        progress = trainer.progress
        done, total = (progress.batch, progress.total) if training else (progress.outer_batch, progress.outer_total)
        max_steps = trainer.max_steps if trainer.max_steps is not None and trainer.max_steps > 0 else None
        note = f"step {trainer.global_step}/{max_steps}" if max_steps else ""
        name = title("train", progress.epoch, trainer.max_epochs, 0)
        steps_left = None if max_steps is None else max(0, max_steps - trainer.global_step)
        end = None if steps_left is None else done + steps_left * GradientState().num_steps
        return Line(name, done, total, now_s - self._train_start_s, speed, note, end)

    def _speed(self, stage: str) -> Speed:
        return self._speeds.setdefault(stage, Speed())

    # ---- the line of a finished epoch: written at the next one's start, when its metrics are complete

    def _note_epoch(self, trainer: Trainer) -> None:
        if self._screen is not None and (self.leave or not self._screen.live):
            training = trainer.progress.stage in ("train", None)
            self._epoch_done = self._train_line(trainer, training, time.monotonic())

    def _close_epoch(self, trainer: Trainer, module: TrainModule) -> None:
        line, self._epoch_done = self._epoch_done, None
        screen = self._screen
        if line is not None and screen is not None:
            self._guard(self._print_epoch, trainer, module, line, screen)

    def _print_epoch(self, trainer: Trainer, module: TrainModule, line: Line, screen: _Screen) -> None:
        line.metrics = self.get_metrics(trainer, module)
        batches = f"{line.done} batches in {clock(line.elapsed_s)}"
        if line.elapsed_s > 0:
            batches += f" ({(line.done - self._train_first) / line.elapsed_s:.1f} it/s)"
        screen.print("  ".join(filter(None, [line.title, batches, line.note, line.metric_text()])))


class _Screen:
    """Output of the bar: a rich live display on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._out, self._err = sys.stdout, sys.stderr
        # Held while drawing, so that a process that is forked meanwhile does not inherit rich's locks in use.
        self.lock = threading.Lock()
        self._console: Console | None = None
        self._live: Live | None = None
        stream = next((stream for stream in (self._err, self._out) if _is_terminal(stream)), None)
        if stream is not None:
            self._open_live(stream)
        self.live = self._live is not None

    def _open_live(self, stream: TextIO) -> None:
        from rich.console import Console  # slow to import, and only needed on a terminal
        from rich.live import Live

        console = Console(file=stream)
        if not console.is_terminal or console.is_dumb_terminal or console.is_jupyter:
            return
        self._console = console
        self._live = Live(
            console=console,
            auto_refresh=False,
            # Only what goes to a terminal may be drawn above the bar: a redirected stream keeps its way.
            redirect_stdout=_is_terminal(self._out),
            redirect_stderr=_is_terminal(self._err),
        )
        _watch_forks(self)
        self._live.start()

    def show(self, lines: list[Line]) -> None:
        if not lines:
            return
        if self._live is None:
            self.print(" | ".join(line.plain() for line in lines))
            return
        text = self._draw(lines)
        with self.lock:
            self._live.update(text, refresh=True)

    def print(self, text: str) -> None:
        if self._console is not None:
            with self.lock:
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._err, flush=True)

    def _draw(self, lines: list[Line]) -> Text:
        from rich.text import Text  # loaded already

        assert self._console is not None
        width = self._console.width
        text = Text(no_wrap=True, overflow="ellipsis", end="")
        longest = max(len(line.title) for line in lines)
        for number, line in enumerate(lines):
            if number:
                text.append("\n")
            text.append(line.title.ljust(longest))
            fraction = line.fraction
            used = longest
            if fraction is not None:
                bar = min(_BAR_WIDTH, max(8, width // 4))
                full = int(fraction * bar)
                text.append(" " + "━" * full, "green" if full == bar else "cyan")
                text.append("━" * (bar - full), "bright_black")
                used += bar + 1
            tail = " " + "  ".join(line.parts())
            text.append(tail, "default")
            used += len(tail)
            metrics = line.metric_text()
            if metrics:
                text.append("  " if used + 2 + len(metrics) <= width else "\n")
                text.append(metrics)
        return text

    def close(self) -> None:
        if self._live is not None:
            with self.lock:
                self._live.stop()

    def give_back_streams(self) -> None:
        """Undo the redirection of stdout and stderr where the thread could not: it is stuck, or in a forked process."""
        if self._live is not None:
            if type(sys.stdout).__module__ == "rich.file_proxy":
                sys.stdout = self._out
            if type(sys.stderr).__module__ == "rich.file_proxy":
                sys.stderr = self._err
        if _forks.screen is self:
            _forks.screen = None


class _Forks:
    """Fork handlers for the screen that is drawn: a forked loader worker must not inherit a lock that is held."""

    def __init__(self) -> None:
        self.screen: _Screen | None = None
        self.registered = False
        self.held: threading.Lock | None = None

    def before(self) -> None:
        if self.screen is not None and self.screen.lock.acquire(timeout=1.0):
            self.held = self.screen.lock

    def in_parent(self) -> None:
        held, self.held = self.held, None
        if held is not None:
            held.release()

    def in_child(self) -> None:
        self.in_parent()
        if self.screen is not None:
            self.screen.give_back_streams()


_forks = _Forks()


def _watch_forks(screen: _Screen) -> None:
    _forks.screen = screen
    if not _forks.registered and hasattr(os, "register_at_fork"):
        _forks.registered = True
        os.register_at_fork(before=_forks.before, after_in_parent=_forks.in_parent, after_in_child=_forks.in_child)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # no stream, or a closed one
        return False
