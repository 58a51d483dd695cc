"""Rich's own progress bars in place of the live view: rich's columns and styles, with the same counters."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.style import Style
from rich.text import Text

from instep.callbacks.progress.bar import LiveProgressBar
from instep.callbacks.progress.progress_bar import ProgressBar
from instep.callbacks.progress.view import View
from instep.utils.checks import Check, is_number, wrong

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

_MOST_PER_S = 10.0  # redraws in a second; during each one the training waits for a millisecond or two
_RATE = Check(lambda value: is_number(value) and value >= 0, "redraws per second of at least 0, which shows nothing")


@dataclass
class RichProgressBarTheme:
    """Styles of a `RichProgressBar`, as rich writes them.

    Args:
        description: of the text before each bar.
        progress_bar: of a bar.
        progress_bar_finished: of a bar that is full.
        progress_bar_pulse: of a bar without an end.
        batch_progress: of the number of batches.
        time: of time and time left.
        processing_speed: of the batches per second.
        metrics: of the metrics.
        metrics_text_delimiter: text between two metrics.
        metrics_format: format of a metric's value.

    Example:
        >>> theme = RichProgressBarTheme(progress_bar="green", metrics_format=".2e")
        >>> bar = RichProgressBar(theme=theme)
        >>> bar.theme.metrics_format
        '.2e'
    """

    description: str | Style = ""
    progress_bar: str | Style = "#6206E0"
    progress_bar_finished: str | Style = "#6206E0"
    progress_bar_pulse: str | Style = "#6206E0"
    batch_progress: str | Style = ""
    time: str | Style = "dim"
    processing_speed: str | Style = "dim underline"
    metrics: str | Style = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"


class _Texts(ProgressColumn):
    """A column of texts in one style.

    Args:
        style: of the theme.
        text: makes a task's text.
    """

    def __init__(self, style: str | Style, text: Callable[[Task], str]) -> None:
        self._style, self._text = style, text
        super().__init__()

    def render(self, task: Task) -> Text:
        return Text(self._text(task), style=self._style)


def _batches(task: Task) -> str:
    return f"{int(task.completed)}/{'--' if task.total is None else int(task.total)}"


def _times(task: Task) -> str:
    """Write the time, and the time left."""
    times = (task.finished_time if task.finished else task.elapsed, task.time_remaining)
    return " • ".join("-:--:--" if time_s is None else str(timedelta(seconds=int(time_s))) for time_s in times)


def _speed(task: Task) -> str:
    return f"{task.speed or 0:.2f}it/s"


def _formatted(value: Any, spec: str) -> str:
    try:
        return str(value) if isinstance(value, str) else format(value, spec)
    except (TypeError, ValueError):
        return str(value)


@dataclass
class _Bars(View):
    """The drawing by rich; the plain line for a log file is that of the live view."""

    progress: Progress = field(kw_only=True)

    def draw(self, width: int, ascii_only: bool = False) -> Any:
        return self.progress.get_renderable()

    def __rich_console__(self, console: Console, options: Any) -> Iterable[Any]:
        yield self.progress.get_renderable()


class RichProgressBar(LiveProgressBar):
    """A progress bar of rich's columns, with Lightning's look.

    It works as `LiveProgressBar` does: a thread draws the bar from counters, at no cost to a training step. So
    `get_metrics` is called when the bar is drawn, and not at every batch.

    Args:
        refresh_rate: redraws per second, of which at most 10 are made; 0 shows nothing.
        leave: the last line of every epoch stays on the terminal.
        theme: styles.
        console_kwargs: arguments of rich's `Console`, such as `{"width": 100}`.

    Raises:
        SettingError: an argument is wrong.

    Example:
        >>> theme = RichProgressBarTheme(progress_bar="green", metrics_format=".2e")
        >>> RichProgressBar(theme=theme, leave=True).theme.metrics_format
        '.2e'
    """

    goes_with = "RichModelSummary"

    def __init__(
        self,
        refresh_rate: float = 2.5,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        _RATE("refresh_rate", refresh_rate)
        if theme is not None and not isinstance(theme, RichProgressBarTheme):
            raise wrong("theme", theme, "a RichProgressBarTheme")
        super().__init__(min(refresh_rate, _MOST_PER_S) or 1.0, leave=leave)
        self.theme = theme or RichProgressBarTheme()
        self.progress: Progress | None = None
        self._refresh_rate = refresh_rate
        self._console_options = dict(console_kwargs or {})
        self._metrics: Mapping[str, Any] = {}
        self._tasks: dict[str, TaskID] = {}  # task of each stage, as `trainer.progress` names it

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "progress": None}

    @property
    def refresh_rate(self) -> float:
        """Redraws per second, as given."""
        return self._refresh_rate

    @property
    def is_enabled(self) -> bool:
        """Whether the bar shows anything in this process."""
        return self._enabled and self._refresh_rate > 0

    @property
    def train_progress_bar(self) -> Task:
        """Rich's task of the training."""
        return self._task("train")

    @property
    def val_sanity_check_bar(self) -> Task:
        """Rich's task of the sanity check."""
        return self._task("sanity")

    @property
    def val_progress_bar(self) -> Task:
        """Rich's task of the validation."""
        return self._task("validate")

    @property
    def test_progress_bar(self) -> Task:
        """Rich's task of the test."""
        return self._task("test")

    @property
    def predict_progress_bar(self) -> Task:
        """Rich's task of the prediction."""
        return self._task("predict")

    def _task(self, stage: str) -> Task:
        assert self.progress is not None, "the run has not begun"
        assert stage in self._tasks, "this stage has not begun"
        return self.progress.tasks[self._tasks[stage]]

    def get_metrics(self, trainer: Trainer, module: TrainModule) -> dict[str, Any]:
        """Return the metrics to show; override to change them. Runs in the bar's thread: must not touch a device."""
        return ProgressBar.get_metrics(self, trainer, module)

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        """Return rich's columns; override to choose others. The metrics follow these columns."""
        return [
            TextColumn("[progress.description]{task.description}"),
            BarColumn(
                complete_style=self.theme.progress_bar,
                finished_style=self.theme.progress_bar_finished,
                pulse_style=self.theme.progress_bar_pulse,
            ),
            _Texts(self.theme.batch_progress, _batches),
            _Texts(self.theme.time, _times),
            _Texts(self.theme.processing_speed, _speed),
        ]

    def _metrics_text(self, task: Task) -> str:
        """Format the metrics, which are shown behind the training bar."""
        if task.id != self._tasks.get("train"):
            return ""
        texts = [f"{name}: {_formatted(value, self.theme.metrics_format)}" for name, value in self._metrics.items()]
        return self.theme.metrics_text_delimiter.join(texts)

    # ---- bars of the stages: made when the stage starts; set by the thread, and when the stage ends

    def _open(self, trainer: Trainer, module: TrainModule) -> None:
        self._tasks, self._metrics = {}, {}
        metrics = _Texts(self.theme.metrics, self._metrics_text)
        # The live view's screen draws this progress, which is never started. So its own console is not used.
        self.progress = Progress(*self.configure_columns(trainer), metrics, console=Console(file=io.StringIO()))
        super()._open(trainer, module)

    def _begin(self, stage: str, text: str, batches: int | float) -> None:
        """Show a stage's bar from its start; a bar that exists starts again from zero."""
        if self.progress is None or self._thread is None:
            return
        text = f"[{self.theme.description}]{text}" if self.theme.description else text
        total = batches if math.isfinite(batches) else None  # for rich, None means a bar without an end
        if stage in self._tasks:
            self.progress.reset(self._tasks[stage], total=total, description=text, visible=True)
        else:
            self._tasks[stage] = self.progress.add_task(text, total=total)

    def _set(self, stage: str | None, done: int, **changed: Any) -> None:
        if stage in self._tasks and self.progress is not None:
            self.progress.update(self._tasks[stage], completed=done, **changed)

    def _get_train_description(self, current_epoch: int) -> str:
        last = self.trainer.max_epochs
        text = f"Epoch {current_epoch}" if last in (None, -1) else f"Epoch {current_epoch}/{last - 1}"
        return text.ljust(len(self.validation_description))

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_train_epoch_start(trainer, module)
        self._begin("train", self._get_train_description(trainer.current_epoch), self.total_train_batches)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_train_epoch_end(trainer, module)
        self._set("train", trainer.progress.outer_batch)

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_validation_start(trainer, module)
        self.reset_dataloader_idx_tracker()
        sanity = trainer.sanity_checking
        text = self.sanity_check_description if sanity else self.validation_description
        self._begin("sanity" if sanity else "validate", text, self.total_val_batches_current_dataloader)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        stage = "sanity" if trainer.sanity_checking else "validate"
        # the counters are those of the last loader
        done, total = trainer.progress.eval_batch, trainer.progress.eval_total
        self._set(stage, done, total=total, visible=self._run == "validate")
        super().on_validation_end(trainer, module)

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_test_start(trainer, module)
        self.reset_dataloader_idx_tracker()
        self._begin("test", self.test_description, self.total_test_batches_current_dataloader)

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._set("test", trainer.progress.eval_batch, total=trainer.progress.eval_total)
        super().on_test_end(trainer, module)

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_predict_start(trainer, module)
        self.reset_dataloader_idx_tracker()
        self._begin("predict", self.predict_description, self.total_predict_batches_current_dataloader)

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._set("predict", trainer.progress.eval_batch, total=trainer.progress.eval_total)
        super().on_predict_end(trainer, module)

    def _read(self, trainer: Trainer, module: TrainModule) -> View | None:
        view = super()._read(trainer, module)
        if view is None or self.progress is None:
            return view
        self._metrics = view.metrics
        progress = trainer.progress
        self._set(progress.stage, progress.batch, **({} if progress.stage == "train" else {"total": progress.total}))
        return _Bars(view.lines, view.metrics, view.best, view.facts, view.curve, progress=self.progress)
