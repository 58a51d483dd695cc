"""`LiveProgressBar`: the default progress bar, which a thread draws so that no training step waits for it."""

from __future__ import annotations

import atexit
import contextvars
import os
import sys
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from instep.callbacks.progress.progress_bar import ProgressBar
from instep.callbacks.progress.screen import Lines, open_screen
from instep.callbacks.progress.view import (
    Best,
    Curve,
    Line,
    Speed,
    View,
    amount,
    clock,
    is_evaluated,
    metric_text,
    showable,
    title,
)
from instep.state import GradientState
from instep.utils.checks import above_zero

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

_JOIN_S = 2.0  # seconds to wait for the thread at the end, since a stopped terminal may block it forever


class LiveProgressBar(ProgressBar, default=True):
    """Show the running training: bars, speed, time left, metrics with their best value, memory, and the loss curve.

    There is no hook per step: a daemon thread reads `trainer.progress` and `trainer.progress_bar_metrics` 2.5 times a
    second. It draws them with rich on the terminal (that of stderr, or else of stdout), or as HTML in a notebook's
    cell. If there is neither a terminal nor a notebook, it writes plain lines to stderr: one every few seconds and one
    per epoch. Only global rank 0 shows anything. Metrics that are on a device are left out, since reading them would
    make the training wait.

    Tokens per second and MFU are shown if there is a `ThroughputMonitor`. The best value is shown for metrics that a
    ModelCheckpoint or EarlyStopping monitors, and for metrics whose names begin with "val", "eval" or "dev".

    Lines that the run prints appear above the bars. An error in the bar's thread never stops the training: it is
    printed once to stderr and kept in the attribute `error`.

    Args:
        refreshes_per_s: redraws per second; each redraw makes the training wait for about a millisecond.
        plain_every_s: seconds between two plain lines.
        leave: True: the last line of every epoch stays on the terminal.

    Raises:
        SettingError: `refreshes_per_s` or `plain_every_s` is not positive.

    Example:
        >>> class Short(LiveProgressBar):
        ...     def get_metrics(self, trainer, module):
        ...         shown = super().get_metrics(trainer, module)
        ...         return {name: value for name, value in shown.items() if not name.endswith("_step")}
    """

    _console_options: Mapping[str, Any] = MappingProxyType({})  # arguments of rich's `Console`
    _screen: Lines | None = None
    _thread: threading.Thread | None = None

    def __init__(self, refreshes_per_s: float = 2.5, plain_every_s: float = 5.0, leave: bool = False) -> None:
        super().__init__()
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
        self._curve: Curve | None = None
        self._best = Best()
        self._started = (0.0, 0.0)

    def __getstate__(self) -> dict[str, Any]:
        # Threads and events cannot be copied; a copied bar makes its own when it starts.
        own = ("_screen", "_thread", "_stopping")
        return {name: value for name, value in super().__getstate__().items() if name not in own}

    @property
    def is_enabled(self) -> bool:
        """Whether the bar shows anything in this process."""
        return self._enabled

    @property
    def is_disabled(self) -> bool:
        """Whether the bar shows nothing in this process."""
        return not self.is_enabled

    def get_metrics(self, trainer: Trainer, module: TrainModule) -> dict[str, Any]:
        """Return the metrics to show; override to hide some. Called in the bar's thread: must not use a device."""
        return showable(trainer.progress_bar_metrics)

    # ---- hooks that start and stop the thread

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        super().setup(trainer, module, stage)
        self._run = stage

    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._start(trainer, module)

    on_train_start = on_sanity_check_start

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._close_epoch(trainer, module)
        self._train_start_s = time.monotonic()
        # Number of the epoch's batches that were done before a resume; 0 if the run did not resume within this epoch.
        self._train_first = trainer.progress.outer_batch

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
        elif self._thread is not None and not trainer.sanity_checking:
            self._guard(self._note_best, trainer, module)

    on_test_start = on_sanity_check_start

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._stop()

    on_predict_start, on_predict_end = on_sanity_check_start, on_test_end

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        self._stop()

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._stop()

    # ---- the thread

    def _guard(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - an error of the bar must never end the training
            if self.error is None:
                self.error = error
                self._say(f"The progress bar stopped: {type(error).__name__}: {error}")
            self._stopping.set()
            return None

    def _say(self, text: str) -> None:
        try:
            print(text, file=sys.__stderr__, flush=True)
        except (OSError, ValueError, AttributeError):
            return  # stderr is missing or closed; the attribute `error` keeps the error

    def _start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._thread is None and self.is_enabled and trainer.is_global_zero:
            self.error = None
            self._guard(self._open, trainer, module)

    def _open(self, trainer: Trainer, module: TrainModule) -> None:
        self._stopping = threading.Event()
        self._speeds, self._loop, self._epoch_done = {}, (), None
        self._curve, self._best = None, Best(_modes(trainer))
        self._loop_start_s = self._train_start_s = time.monotonic()
        self._started = (self._loop_start_s, _part_done(trainer) or 0.0)
        self._screen = open_screen(self._console_options)
        self._thread = threading.Thread(
            # The thread gets a copy of the context variables, since a notebook reads the output's cell from them.
            target=contextvars.copy_context().run,
            args=(self._guard, self._watch, trainer, module, self._screen, self._stopping),
            name="instep-progress",
            daemon=True,
        )
        self._thread.start()
        atexit.register(self._stop)

    def _watch(self, trainer: Trainer, module: TrainModule, screen: Lines, stopping: threading.Event) -> None:
        # Plain lines are written rarely, but the counters are still read at least once a second, to measure the speed.
        period_s = 1 / self.refreshes_per_s if screen.live else min(1.0, self.plain_every_s)
        shown_s = time.monotonic()
        try:
            while not stopping.wait(period_s):
                view = self._read(trainer, module)
                if view is not None and (screen.live or time.monotonic() - shown_s >= self.plain_every_s):
                    shown_s = time.monotonic()
                    screen.show(view)
            view = self._read(trainer, module) if screen.live and self.error is None else None
            if view is not None:
                screen.show(view)
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

    # ---- collecting what the bar shows

    def _read(self, trainer: Trainer, module: TrainModule) -> View | None:
        progress = trainer.progress
        stage = progress.stage
        if stage is None:
            return None
        now_s = time.monotonic()
        loop = (stage, progress.epoch, progress.dataloader_idx)
        if loop != self._loop:
            if stage == "train" and (not self._loop or self._loop[0] != "train"):
                # Training continues after a validation, whose time must not count in the training speed.
                self._speed("train").pause()
            if stage != "train":
                self._speeds.pop(stage, None)
                self._loop_start_s = now_s
            self._loop = loop
        metrics = self.get_metrics(trainer, module)
        view = View([], metrics, self._best.values)
        if self._run == "fit" and stage != "sanity":
            training = stage == "train"
            speed = self._speed("train")
            value = speed.read(now_s, progress.batch) if training else speed.value
            view.lines.append(self._train_line(trainer, training, now_s, value))
            view.facts = [*self._time_left(trainer, now_s), *_throughput(trainer, value), *_memory(int(now_s))]
            view.curve = self._read_curve(trainer, metrics)
            if training:
                return view
        else:
            view.facts = _memory(int(now_s))
        name = title(stage, progress.epoch, None, progress.dataloader_idx)
        speed = self._speed(stage).read(now_s, progress.batch)
        view.lines.append(Line(name, progress.batch, progress.total, now_s - self._loop_start_s, speed))
        return view

    def _train_line(self, trainer: Trainer, training: bool, now_s: float, speed: float | None = None) -> Line:
        progress = trainer.progress
        done, total = (progress.batch, progress.total) if training else (progress.outer_batch, progress.outer_total)
        max_steps = trainer.max_steps if trainer.max_steps is not None and trainer.max_steps > 0 else None
        note = f"step {trainer.global_step}/{max_steps}" if max_steps else ""
        name = title("train", progress.epoch, trainer.max_epochs, 0)
        steps_left = None if max_steps is None else max(0, max_steps - trainer.global_step)
        end = None if steps_left is None else done + steps_left * GradientState().num_steps
        return Line(name, done, total, now_s - self._train_start_s, speed, note, end)

    def _time_left(self, trainer: Trainer, now_s: float) -> list[str]:
        """Return the time left until the end of the run, with validations; [] if unknown, or if `max_epochs` is 1."""
        done, (start_s, at_start) = _part_done(trainer), self._started
        if done is None or not at_start < done < 1 or trainer.max_epochs == 1:
            return []
        return [f"ETA {clock((now_s - start_s) * (1 - done) / (done - at_start))}"]

    def _read_curve(self, trainer: Trainer, metrics: Mapping[str, Any]) -> Curve | None:
        """Add the training loss to the curve: from the bar's metrics, or else from `trainer.logged_metrics`."""
        found = _find_loss(metrics) or _find_loss(showable(trainer.logged_metrics))
        if found is not None:
            name, value = found
            if self._curve is None or self._curve.name != name:
                self._curve = Curve(name)
            self._curve.add(value)
        return self._curve

    def _note_best(self, trainer: Trainer, module: TrainModule) -> None:
        self._best.update(self.get_metrics(trainer, module))
        for callback in trainer.callbacks:
            # ModelCheckpoint's best score or EarlyStopping's, also from before a resume
            if (score := getattr(callback, "best_model_score", getattr(callback, "best_score", None))) is not None:
                self._best.update(showable({str(getattr(callback, "monitor", "")): score}))

    def _speed(self, stage: str) -> Speed:
        return self._speeds.setdefault(stage, Speed())

    # ---- the line for a finished epoch: written when the next epoch starts, since all its metrics are known then

    def _note_epoch(self, trainer: Trainer) -> None:
        if self._screen is not None and (self.leave or not self._screen.live):
            training = trainer.progress.stage in ("train", None)
            self._epoch_done = self._train_line(trainer, training, time.monotonic())

    def _close_epoch(self, trainer: Trainer, module: TrainModule) -> None:
        line, self._epoch_done = self._epoch_done, None
        if line is not None and self._screen is not None:
            self._guard(self._print_epoch, trainer, module, line, self._screen)

    def _print_epoch(self, trainer: Trainer, module: TrainModule, line: Line, screen: Lines) -> None:
        metrics = metric_text(self.get_metrics(trainer, module), self._best.values)
        batches = f"{line.done} batches in {clock(line.elapsed_s)}"
        if line.elapsed_s > 0:
            batches += f" ({(line.done - self._train_first) / line.elapsed_s:.1f} it/s)"
        screen.print("  ".join(filter(None, [line.title, batches, line.note, metrics])))


def _modes(trainer: Trainer) -> dict[str, str]:
    """Return "min" or "max" for each metric that a ModelCheckpoint or EarlyStopping monitors."""
    found = ((getattr(callback, "monitor", None), getattr(callback, "mode", None)) for callback in trainer.callbacks)
    return {name: mode for name, mode in found if name is not None and mode in ("min", "max")}


def _part_done(trainer: Trainer) -> float | None:
    """Return the fraction (0 to 1) of `max_steps` or `max_epochs` that is done; None if the end is unknown."""
    parts = []
    if trainer.max_steps is not None and trainer.max_steps > 0:
        parts.append(trainer.global_step / trainer.max_steps)
    if trainer.max_epochs is not None and trainer.max_epochs > 0 and trainer.progress.outer_total:
        epochs = trainer.progress.epoch + trainer.progress.outer_batch / trainer.progress.outer_total
        parts.append(epochs / trainer.max_epochs)
    return min(1.0, max(parts)) if parts else None


def _find_loss(metrics: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the name and value of the training loss in the metrics; None if there is none."""
    losses = ((name, value) for name, value in metrics.items() if "loss" in name.lower() and isinstance(value, float))
    return next((loss for loss in losses if not is_evaluated(loss[0])), None)


def _throughput(trainer: Trainer, speed: float | None) -> list[str]:
    """Format samples per second, and tokens per second and MFU if there is a ThroughputMonitor."""
    facts = []
    size = getattr(GradientState().active_dataloader, "batch_size", None)
    if speed and size:
        facts.append(f"{amount(speed * size * trainer.strategy.data_world_size)} samples/s")
    for callback in trainer.callbacks:
        metrics = getattr(callback, "metrics", None)  # of all callbacks, only a ThroughputMonitor has this dict
        items = (
            {name: value for name, value in metrics.items() if value and name.startswith("train")}
            if isinstance(metrics, dict)
            else {}
        )
        tokens = sorted((name for name in items if name.endswith("items_per_sec")), key=lambda name: "device" in name)
        # `sorted` puts names with "device" last, so the first name is the rate of all processes together. With one
        # process there is only the rate of its device.
        facts += [f"{amount(items[name])} tokens/s" for name in tokens[:1]]
        facts += [f"MFU {value:.1%}" for name, value in items.items() if name.endswith("mfu")]
    return facts


@lru_cache(maxsize=1)
def _memory(second: int) -> list[str]:
    """Format this process's resident memory and torch's GPU memory, without waiting for the GPU.

    Args:
        second: the current time in whole seconds; within the same second, the result comes from a cache.
    """
    facts = []
    if os.path.exists("/proc/self/statm"):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        facts.append(f"RAM {pages * os.sysconf('SC_PAGE_SIZE') / 1e9:.2f} GB")
    if torch.cuda.is_initialized():
        facts.append(f"GPU {torch.cuda.memory_allocated() / 1e9:.2f} GB")
    return facts
