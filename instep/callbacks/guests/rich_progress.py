"""Rich's own progress bars in the place of the live view: its columns and styles, fed with the same counters."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.progress_bar import ProgressBar as RichBar
from rich.style import Style
from rich.text import Text

from instep.callbacks.progress.bar import LiveProgressBar
from instep.callbacks.progress.progress_bar import ProgressBar
from instep.callbacks.progress.view import View
from instep.utils.checks import Check, is_number, wrong

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

_MOST_PER_S = 10.0  # redraws, each of which makes the training wait for a millisecond or two
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


class CustomBarColumn(BarColumn):
    """A bar, which moves to and fro where the data have no length."""

    def render(self, task: Task) -> RichBar:
        return RichBar(
            total=task.total,
            completed=task.completed,
            width=None if self.bar_width is None else max(1, self.bar_width),
            pulse=task.total is None,
            animation_time=task.get_time(),
            style=self.style,
            complete_style=self.complete_style,
            finished_style=self.finished_style,
            pulse_style=self.pulse_style,
        )


class _Styled(ProgressColumn):
    def __init__(self, style: str | Style) -> None:
        self.style = style
        super().__init__()


class BatchesProcessedColumn(_Styled):
    """Batches done, and how many there are."""

    def render(self, task: Task) -> Text:
        return Text(f"{int(task.completed)}/{'--' if task.total is None else int(task.total)}", style=self.style)


class CustomTimeColumn(_Styled):
    """Time, and time left."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        times = (task.finished_time if task.finished else task.elapsed, task.time_remaining)
        texts = ["-:--:--" if time_s is None else str(timedelta(seconds=int(time_s))) for time_s in times]
        return Text(" • ".join(texts), style=self.style)


class ProcessingSpeedColumn(_Styled):
    """Batches per second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:.2f}it/s", style=self.style)


class MetricsTextColumn(_Styled):
    """The metrics, behind the bar of the training.

    Args:
        bar: the bar whose theme holds.
    """

    def __init__(self, bar: RichProgressBar) -> None:
        super().__init__(bar.theme.metrics)
        self._bar = bar
        self._metrics: Mapping[str, Any] = {}

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Take the metrics to show."""
        self._metrics = metrics

    def render(self, task: Task) -> Text:
        if task.id != self._bar.train_progress_bar_id:
            return Text()
        theme = self._bar.theme
        texts = [f"{name}: {_formatted(value, theme.metrics_format)}" for name, value in self._metrics.items()]
        return Text(theme.metrics_text_delimiter.join(texts), justify="left", style=self.style)


def _formatted(value: Any, spec: str) -> str:
    try:
        return str(value) if isinstance(value, str) else format(value, spec)
    except (TypeError, ValueError):
        return str(value)


@dataclass
class _Bars(View):
    """What rich draws; the plain line for a log file is the live view's."""

    progress: Progress = field(kw_only=True)

    def draw(self, width: int, ascii_only: bool = False) -> Any:
        return self.progress.get_renderable()

    def __rich_console__(self, console: Console, options: Any) -> Iterable[Any]:
        yield self.progress.get_renderable()


def _length(total: int | float) -> int | float | None:
    """Return what rich takes for a number of batches: None where there is no end."""
    return total if math.isfinite(total) else None


class RichProgressBar(LiveProgressBar):
    """A progress bar of rich's columns, with Lightning's look.

    It works as `LiveProgressBar` does: a thread draws it from counters, and a training step pays nothing for it. So
    `get_metrics` is called when it is drawn, and not at every batch.

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
        self._metrics_column: MetricsTextColumn | None = None
        self._forget_bars()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "progress": None, "_metrics_column": None}

    def _forget_bars(self) -> None:
        self.train_progress_bar_id: TaskID | None = None
        self.val_sanity_progress_bar_id: TaskID | None = None
        self.val_progress_bar_id: TaskID | None = None
        self.test_progress_bar_id: TaskID | None = None
        self.predict_progress_bar_id: TaskID | None = None

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
        return self._task(self.train_progress_bar_id)

    @property
    def val_sanity_check_bar(self) -> Task:
        """Rich's task of the sanity check."""
        return self._task(self.val_sanity_progress_bar_id)

    @property
    def val_progress_bar(self) -> Task:
        """Rich's task of the validation."""
        return self._task(self.val_progress_bar_id)

    @property
    def test_progress_bar(self) -> Task:
        """Rich's task of the test."""
        return self._task(self.test_progress_bar_id)

    @property
    def predict_progress_bar(self) -> Task:
        """Rich's task of the prediction."""
        return self._task(self.predict_progress_bar_id)

    def _task(self, number: TaskID | None) -> Task:
        assert self.progress is not None, "the run has not begun"
        assert number is not None, "this stage has not begun"
        return self.progress.tasks[number]

    def get_metrics(self, trainer: Trainer, module: TrainModule) -> dict[str, Any]:
        """Return the metrics to show; override to change them. Runs in the bar's thread: must not touch a device."""
        return ProgressBar.get_metrics(self, trainer, module)

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        """Return rich's columns; override to choose others. The metrics stand behind them."""
        return [
            TextColumn("[progress.description]{task.description}"),
            CustomBarColumn(
                complete_style=self.theme.progress_bar,
                finished_style=self.theme.progress_bar_finished,
                pulse_style=self.theme.progress_bar_pulse,
            ),
            BatchesProcessedColumn(style=self.theme.batch_progress),
            CustomTimeColumn(style=self.theme.time),
            ProcessingSpeedColumn(style=self.theme.processing_speed),
        ]

    # ---- bars of the stages: made at their start, and set by the thread and at their end

    def _open(self, trainer: Trainer, module: TrainModule) -> None:
        self._forget_bars()
        self._metrics_column = MetricsTextColumn(self)
        # It is never started: the live view's screen draws what it renders. So its console is not used.
        console = Console(file=io.StringIO())
        self.progress = Progress(*self.configure_columns(trainer), self._metrics_column, console=console)
        super()._open(trainer, module)

    def _add(self, description: str, total: int | float) -> TaskID | None:
        if self.progress is None or self._thread is None:
            return None
        return self.progress.add_task(self._styled(description), total=_length(total))

    def _styled(self, description: str) -> str:
        return f"[{self.theme.description}]{description}" if self.theme.description else description

    def _set(self, number: TaskID | None, done: int, **changed: Any) -> None:
        if number is not None and self.progress is not None:
            self.progress.update(number, completed=done, **changed)

    def _get_train_description(self, current_epoch: int) -> str:
        last = self.trainer.max_epochs
        text = f"Epoch {current_epoch}" if last in (None, -1) else f"Epoch {current_epoch}/{last - 1}"
        return text.ljust(len(self.validation_description))

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_train_epoch_start(trainer, module)
        total, text = self.total_train_batches, self._get_train_description(trainer.current_epoch)
        if self.train_progress_bar_id is None:
            self.train_progress_bar_id = self._add(text, total)
        elif self.progress is not None:
            number, text = self.train_progress_bar_id, self._styled(text)
            self.progress.reset(number, total=_length(total), description=text, visible=True)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_train_epoch_end(trainer, module)
        self._set(self.train_progress_bar_id, trainer.progress.outer_batch)

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_validation_start(trainer, module)
        self.reset_dataloader_idx_tracker()
        if self.is_disabled:
            return
        total = self.total_val_batches_current_dataloader
        if trainer.sanity_checking:
            self.val_sanity_progress_bar_id = self._add(self.sanity_check_description, total)
        elif self.val_progress_bar_id is None:
            self.val_progress_bar_id = self._add(self.validation_description, total)
        elif self.progress is not None:
            self.progress.reset(self.val_progress_bar_id, total=_length(total), visible=True)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        number = self.val_sanity_progress_bar_id if trainer.sanity_checking else self.val_progress_bar_id
        done, total = trainer.progress.eval_batch, trainer.progress.eval_total  # of the last loader
        self._set(number, done, total=total, visible=self._run == "validate")
        super().on_validation_end(trainer, module)

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_test_start(trainer, module)
        self.reset_dataloader_idx_tracker()
        if self.is_enabled:
            self.test_progress_bar_id = self._add(self.test_description, self.total_test_batches_current_dataloader)

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._set(self.test_progress_bar_id, trainer.progress.eval_batch, total=trainer.progress.eval_total)
        super().on_test_end(trainer, module)

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_predict_start(trainer, module)
        self.reset_dataloader_idx_tracker()
        if self.is_enabled:
            total = self.total_predict_batches_current_dataloader
            self.predict_progress_bar_id = self._add(self.predict_description, total)

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._set(self.predict_progress_bar_id, trainer.progress.eval_batch, total=trainer.progress.eval_total)
        super().on_predict_end(trainer, module)

    def _read(self, trainer: Trainer, module: TrainModule) -> View | None:
        view = super()._read(trainer, module)
        if view is None or self.progress is None or self._metrics_column is None:
            return view
        self._metrics_column.update(view.metrics)
        stage, done = trainer.progress.stage, trainer.progress.batch
        if stage == "train":
            self._set(self.train_progress_bar_id, done)
        else:
            numbers = {
                "sanity": self.val_sanity_progress_bar_id,
                "validate": self.val_progress_bar_id,
                "test": self.test_progress_bar_id,
                "predict": self.predict_progress_bar_id,
            }
            self._set(numbers.get(stage or ""), done, total=trainer.progress.total)
        return _Bars(view.lines, view.metrics, view.best, view.facts, view.curve, progress=self.progress)
