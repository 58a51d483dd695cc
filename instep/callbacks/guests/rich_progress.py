"""`RichProgressBar`: progress bars drawn by the package rich, as Lightning's callback of this name shows them."""

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

_MOST_PER_S = 10.0  # largest number of redraws per second; the thread that draws delays training by 1 or 2 ms each time
_RATE = Check(lambda value: is_number(value) and value >= 0, "redraws per second of at least 0, which shows nothing")


@dataclass
class RichProgressBarTheme:
    """Styles of a `RichProgressBar`, in rich's style syntax such as "bold green".

    Args:
        description: style of the text before each bar.
        progress_bar: style of a bar.
        progress_bar_finished: style of a bar that is full.
        progress_bar_pulse: style of a bar whose total is unknown.
        batch_progress: style of the number of batches.
        time: style of the elapsed and the remaining time.
        processing_speed: style of the batches per second.
        metrics: style of the metrics.
        metrics_text_delimiter: text between two metrics.
        metrics_format: format specification of a metric's value, such as ".3f".

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
    """A column of the progress display whose texts have one style.

    Args:
        style: a style of the theme.
        text: function that makes the text for one of rich's tasks.
    """

    def __init__(self, style: str | Style, text: Callable[[Task], str]) -> None:
        self._style, self._text = style, text
        super().__init__()

    def render(self, task: Task) -> Text:
        return Text(self._text(task), style=self._style)


def _batches(task: Task) -> str:
    return f"{int(task.completed)}/{'--' if task.total is None else int(task.total)}"


def _times(task: Task) -> str:
    """Format a task's elapsed and remaining time."""
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
    """A view that is drawn with rich's progress bars; in a log file it is one plain line, as `View` writes it."""

    progress: Progress = field(kw_only=True)

    def draw(self, width: int, ascii_only: bool = False) -> Any:
        return self.progress.get_renderable()

    def __rich_console__(self, console: Console, options: Any) -> Iterable[Any]:
        yield self.progress.get_renderable()


class RichProgressBar(LiveProgressBar):
    """A progress bar made of rich's columns, which looks like Lightning's `RichProgressBar`.

    As with `LiveProgressBar`, a thread draws the bar, so that a training step does not wait for the terminal. Therefore
    `get_metrics` is called when the bar is drawn, not at every batch.

    Args:
        refresh_rate: redraws per second; values above 10 count as 10, and 0 shows nothing.
        leave: whether the last line of every epoch stays on the terminal.
        theme: the styles of the bar's parts.
        console_kwargs: arguments for rich's `Console`, such as `{"width": 100}`.

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
        self._tasks: dict[str, TaskID] = {}  # rich's task of each stage, under the stage's name in `trainer.progress`

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "progress": None}

    @property
    def refresh_rate(self) -> float:
        """The `refresh_rate` that was passed to the constructor, in redraws per second."""
        return self._refresh_rate

    @property
    def is_enabled(self) -> bool:
        """Whether the bar shows anything in this process."""
        return self._enabled and self._refresh_rate > 0

    @property
    def train_progress_bar(self) -> Task:
        """The rich `Task` that shows training."""
        return self._task("train")

    @property
    def val_sanity_check_bar(self) -> Task:
        """The rich `Task` that shows the sanity check."""
        return self._task("sanity")

    @property
    def val_progress_bar(self) -> Task:
        """The rich `Task` that shows validation."""
        return self._task("validate")

    @property
    def test_progress_bar(self) -> Task:
        """The rich `Task` that shows test."""
        return self._task("test")

    @property
    def predict_progress_bar(self) -> Task:
        """The rich `Task` that shows prediction."""
        return self._task("predict")

    def _task(self, stage: str) -> Task:
        assert self.progress is not None, "the run has not begun"
        assert stage in self._tasks, "this stage has not begun"
        return self.progress.tasks[self._tasks[stage]]

    def get_metrics(self, trainer: Trainer, module: TrainModule) -> dict[str, Any]:
        """Return the metrics to show; override to change them. Called in the bar's thread: must not use a device."""
        return ProgressBar.get_metrics(self, trainer, module)

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        """Return rich's columns; override to choose others. The metrics are shown to the right of these columns."""
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
        """Format the metrics, which are shown to the right of the training bar."""
        if task.id != self._tasks.get("train"):
            return ""
        texts = [f"{name}: {_formatted(value, self.theme.metrics_format)}" for name, value in self._metrics.items()]
        return self.theme.metrics_text_delimiter.join(texts)

    # ---- one bar for each stage: made when the stage starts, updated by the thread and when the stage ends

    def _open(self, trainer: Trainer, module: TrainModule) -> None:
        self._tasks, self._metrics = {}, {}
        metrics = _Texts(self.theme.metrics, self._metrics_text)
        # This Progress is never started: the live view's screen draws it. So its own console writes to nowhere.
        self.progress = Progress(*self.configure_columns(trainer), metrics, console=Console(file=io.StringIO()))
        super()._open(trainer, module)

    def _begin(self, stage: str, text: str, batches: int | float) -> None:
        """Show the bar of a stage that begins; if the bar exists, set it back to zero."""
        if self.progress is None or self._thread is None:
            return
        text = f"[{self.theme.description}]{text}" if self.theme.description else text
        total = batches if math.isfinite(batches) else None  # rich uses None for an unknown total
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
        # After an evaluation, `eval_batch` and `eval_total` have the values of the last dataloader.
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
