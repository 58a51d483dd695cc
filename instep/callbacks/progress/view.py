"""The layout of the progress bar: as a rich text of any width, or as one plain line for a log file.

Each redraw makes one `rich.text.Text`, laid out by this module. A table of rich would take eight times as long (1.4
ms), and training waits for Python's interpreter lock while it is drawn.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from instep.utils.untrusted_files import clean

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_WINDOW = 40  # number of readings for the speed: sixteen seconds at 2.5 readings per second
_POINTS = 64  # largest number of points in a curve
_BAR = (8, 40)  # smallest and largest width of a bar, in characters
_LEVELS = "▁▂▃▄▅▆▇█"
_STAGES = {"sanity": "Sanity check", "validate": "Validation", "test": "Test", "predict": "Predict"}

_LOWER = re.compile(r"loss|err|perplexity|ppl|(^|_)(mae|mse|rmse|wer|cer|nll)", re.IGNORECASE)
_HIGHER = re.compile(r"acc|f1|auc|auroc|iou|dice|bleu|rouge|precision|recall|score|psnr|ssim", re.IGNORECASE)
_EVALUATED = re.compile(r"(val|eval|dev)", re.IGNORECASE)


# ---- values over time


class Speed:
    """Measure the speed in batches per second over the last 40 readings, which are sixteen seconds by default."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self.value: float | None = None

    def pause(self) -> None:
        """Start a new measurement; `value` keeps the last speed until a new one is known."""
        self._readings.clear()

    def read(self, now_s: float, batch: int) -> float | None:
        """Add a reading of the batch counter, and return the speed; None while the speed is not known."""
        if self._readings and batch < self._readings[-1][1]:
            self._readings.clear()  # the counter began again at 0: a new epoch
        self._readings.append((now_s, batch))
        (first_s, first), (last_s, last) = self._readings[0], self._readings[-1]
        if last_s > first_s and last > first:
            self.value = (last - first) / (last_s - first_s)
        return self.value


class Curve:
    """The values of a metric over the run in at most 64 points; each point is the mean of the same number of readings.

    Example:
        >>> curve = Curve("loss")
        >>> for value in range(256):
        ...     curve.add(255.0 - value)
        >>> curve.sparkline(8)
        '█▇▆▅▄▃▂▁'
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.points: list[float] = []
        self._per_point = 1
        self._readings: list[float] = []
        self._last: float | None = None

    def add(self, value: float) -> None:
        """Add a value to the curve; ignore a value that is not finite or that equals the value added before."""
        if value == self._last or not math.isfinite(value):
            return
        self._last = value
        self._readings.append(value)
        if len(self._readings) < self._per_point:
            return
        self.points.append(sum(self._readings) / self._per_point)
        self._readings = []
        if len(self.points) == _POINTS:
            self.points = _means(self.points, _POINTS // 2)
            self._per_point *= 2

    def sparkline(self, width: int) -> str:
        """Draw the curve with one character per point, in at most `width` columns."""
        points = _means(self.points, width)
        low, span = min(points), max(points) - min(points)
        return "".join(_LEVELS[int((point - low) / span * 7.999) if span > 0 else 0] for point in points)


def _means(points: Sequence[float], count: int) -> list[float]:
    """Reduce points to at most `count` means of neighboring points."""
    if len(points) <= count:
        return list(points)
    edges = [len(points) * i // count for i in range(count + 1)]
    return [sum(points[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


class Best:
    """The best values of metrics over the validations of a run.

    Args:
        modes: "min" or "max" for each metric that a ModelCheckpoint or EarlyStopping monitors. Another metric is
            included if its name begins with "val", "eval" or "dev" and also shows whether lower or higher is better:
            lower for a loss or an error, higher for an accuracy or a score.
    """

    def __init__(self, modes: Mapping[str, str] | None = None) -> None:
        self._modes = dict(modes or {})
        self.values: dict[str, float] = {}

    def mode(self, name: str) -> str | None:
        """Return "min" or "max" for a metric; None if it is not known whether lower or higher is better."""
        if name not in self._modes and is_evaluated(name):
            if _LOWER.search(name):
                return "min"
            return "max" if _HIGHER.search(name) else None
        return self._modes.get(name)

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Update the best values with the metrics of a validation."""
        for name, value in metrics.items():
            mode = self.mode(name)
            if mode is None or not isinstance(value, (int, float)) or not math.isfinite(value):
                continue
            best = self.values.get(name, value)
            self.values[name] = min(best, value) if mode == "min" else max(best, value)


# ---- what one redraw shows


@dataclass
class Line:
    """The bar of one loop: `done` of `total` batches (None: unknown), seconds since its start, batches per second."""

    title: str
    done: int
    total: int | None
    elapsed_s: float
    speed: float | None
    note: str = ""
    end: int | None = None
    """Number of batches after which `max_steps` ends the loop, perhaps before `total`; None without a limit."""

    @property
    def fraction(self) -> float | None:
        """Fraction of the batches that is done, from 0 to 1; None if the total is unknown."""
        return min(1.0, self.done / self.total) if self.total else None

    @property
    def count(self) -> str:
        return f"{self.done}/{self.total}" if self.total is not None else f"{self.done}"

    @property
    def left(self) -> str:
        """The time left, as text; "" if no end is known or the end is reached."""
        last = min((n for n in (self.total, self.end) if n is not None), default=None)
        if last is None or self.done >= last:
            return ""
        return f"{clock(None if not self.speed else (last - self.done) / self.speed)} left"

    @property
    def rate(self) -> str:
        if not self.speed:
            return ""
        return f"{self.speed:.1f} it/s" if self.speed >= 1 else f"{1 / self.speed:.2f} s/it"

    def plain(self) -> str:
        """Format the loop as one line without a bar."""
        parts = [self.title, self.count, self.note, clock(self.elapsed_s), self.left, self.rate]
        return "  ".join(filter(None, parts))


@dataclass
class View:
    """What the progress bar shows at one time.

    These are a line for each running loop (outermost first), the metrics and their best values, further facts such as
    samples per second, and the loss curve.
    """

    lines: list[Line]
    metrics: Mapping[str, float | int | str] = field(default_factory=dict)
    best: Mapping[str, float] = field(default_factory=dict)
    facts: Sequence[str] = ()
    curve: Curve | None = None

    def plain(self) -> str:
        """Format the view as one line, for a log file."""
        lines = " | ".join(line.plain() for line in self.lines)
        return "  ".join(filter(None, [lines, *self.facts, metric_text(self.metrics, self.best)]))

    def draw(self, width: int, ascii_only: bool = False) -> Text:
        """Draw the view for a terminal of `width` columns."""
        from rich.text import Text  # slow to import, so imported only when something is drawn

        text = Text(no_wrap=True, overflow="ellipsis", end="")
        for number, row in enumerate(self._rows(width, ascii_only)):
            text.append("\n" if number else "")
            for part, style in row:
                text.append(part, style)
        return text

    def __rich_console__(self, console: Console, options: Any) -> Iterable[Text]:
        yield self.draw(options.max_width, options.ascii_only)

    def _rows(self, width: int, ascii_only: bool) -> Iterable[list[_Span]]:
        curve = None if ascii_only or self.curve is None or len(self.curve.points) < 2 else self.curve
        name = "" if curve is None else clean(curve.name, "")[:16]
        titles = max(len(title) for title in (name, *(line.title for line in self.lines)))
        tails, below = self._tails(width - titles - 4 - _BAR[0])
        bar = max(_BAR[0], min(_BAR[1], width - titles - 4 - max(map(len, tails))))
        for line, tail in zip(self.lines, tails, strict=True):
            head = _Span(line.title.ljust(titles + 2), "bold")
            yield [head, *_bar(line.fraction, bar, ascii_only), _Span(f"  {tail}")]
        if curve is not None:
            low, high = min(curve.points), max(curve.points)
            drawn = curve.sparkline(bar).ljust(bar)
            scale = f"  {number(low)} to {number(high)}"
            yield [_Span(name.ljust(titles + 2)), _Span(drawn, "cyan"), _Span(scale, "bright_black")]
        metrics = [self._metric(name, value, ascii_only) for name, value in self.metrics.items()]
        yield from _flow(metrics, width)
        notes = [line.note for line in self.lines]
        yield from _flow([[_Span(fact, "bright_black")] for fact in (*notes, *below, *self.facts) if fact], width)

    def _tails(self, room: int) -> tuple[list[str], list[str]]:
        """Return the text to the right of each bar, and a list of texts that have no room there."""
        columns = {
            "count": [line.count.rjust(max(len(line.count) for line in self.lines)) for line in self.lines],
            "elapsed": [clock(line.elapsed_s) for line in self.lines],
            "left": [line.left for line in self.lines],
            "rate": [line.rate for line in self.lines],
        }
        below = []
        for name in ("elapsed", "rate", "left"):
            if sum(max(map(len, column)) + 2 for column in columns.values()) - 2 <= room:
                break
            texts = columns.pop(name)
            below += texts[-1:] if name != "elapsed" else []  # the last text is that of the innermost loop
        padded = [[text.ljust(max(map(len, column))) for text in column] for column in columns.values() if any(column)]
        return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)], below

    def _metric(self, name: str, value: float | int | str, ascii_only: bool) -> list[_Span]:
        spans = [_Span(f"{name} ", "bright_black"), _Span(number(value))]
        best = self.best.get(name)
        if best is not None and best == value:
            spans[1] = _Span(number(value), "bold green")
            spans.append(_Span(" *" if ascii_only else " ★", "bold green"))
        elif best is not None:
            spans.append(_Span(f" (best {number(best)})", "bright_black"))
        return spans


class _Span(NamedTuple):
    text: str
    style: str = ""


def _bar(fraction: float | None, width: int, ascii_only: bool) -> list[_Span]:
    full, half, rest = ("#", "", "-") if ascii_only else ("━", "╸", "━")
    if fraction is None:
        return [_Span(" " * width)]
    halves = int(fraction * width * 2)
    done = full * (halves // 2) + (half if halves % 2 else "")
    return [_Span(done, "green" if fraction == 1 else "cyan"), _Span(rest * (width - len(done)), "bright_black")]


def _flow(items: Iterable[list[_Span]], width: int) -> Iterable[list[_Span]]:
    """Arrange items side by side, as many in a line as its width allows."""
    row: list[_Span] = []
    used = 0
    for item in items:
        size = sum(len(span.text) for span in item)
        if row and used + 3 + size > width:
            yield row
            row, used = [], 0
        if row:
            # The separator and the item's first span become one span, and the previous span joins them if it has the
            # same style, since rich's drawing time grows with the number of spans.
            first = f"   {item[0].text}"
            if row[-1].style == item[0].style:
                first = row.pop().text + first
            row += [_Span(first, item[0].style), *item[1:]]
        else:
            row = list(item)
        used += size + (3 if used else 0)
    if row:
        yield row


# ---- texts


def title(stage: str, epoch: int, max_epochs: int | None, dataloader_idx: int) -> str:
    """Return the title of a loop's bar, such as "Epoch 3/10"; epochs count from 1."""
    if stage == "train":
        return f"Epoch {epoch + 1}/{max_epochs}" if max_epochs is not None and max_epochs > 0 else f"Epoch {epoch + 1}"
    name = _STAGES.get(stage, stage)
    return f"{name} {dataloader_idx + 1}" if dataloader_idx else name


def is_evaluated(name: str) -> bool:
    """Return whether a metric's name begins with "val", "eval" or "dev"."""
    return _EVALUATED.match(name) is not None


def showable(metrics: Mapping[str, Any]) -> dict[str, float | int | str]:
    """Return the metrics that can be read without waiting for a device: numbers, strings, one-element CPU tensors."""
    shown: dict[str, float | int | str] = {}
    # Copy first, since the training thread may add to the dict at the same time.
    for given, value in dict(metrics).items():
        name = clean(str(given), "")
        if isinstance(value, (float, int, str)):
            shown[name] = value
        elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
            shown[name] = value.item()
    return shown


def metric_text(metrics: Mapping[str, float | int | str], best: Mapping[str, float]) -> str:
    """Format the metrics in one line, with "(best)" after a value that is the best so far."""
    marks = {name: " (best)" for name, value in metrics.items() if best.get(name) == value}
    return "  ".join(f"{name}: {number(value)}{marks.get(name, '')}" for name, value in metrics.items())


def number(value: float | int | str) -> str:
    """Write a metric's value; a float gets four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def amount(value: float) -> str:
    """Format a number; from 10,000 on, with a unit: k for thousands, M for millions, G for billions.

    Example:
        >>> amount(7.25), amount(812.3), amount(81234.0), amount(2.5e7)
        ('7.2', '812', '81.2k', '25.0M')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 10 * size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


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
