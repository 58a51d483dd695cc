"""What a progress bar shows: counters and metrics as text. No terminal, no thread, no clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_WINDOW = 40  # readings: ten seconds at four a second

_TITLES = {
    "train": "Epoch",
    "sanity": "Sanity check",
    "validate": "Validation",
    "test": "Test",
    "predict": "Predict",
}


class Speed:
    """Batches per second over the last seconds."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self.value: float | None = None

    def pause(self) -> None:
        """What follows is another stretch of time; the last value is kept until there is a new one."""
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
    metrics: dict[str, float | int | str] = field(default_factory=dict)

    @property
    def fraction(self) -> float | None:
        """How much is done, from 0 to 1; None where the total is unknown."""
        return min(1.0, self.done / self.total) if self.total else None

    def parts(self) -> list[str]:
        """The texts right of the bar: count, times, speed."""
        parts = [f"{self.done}/{self.total}" if self.total is not None else f"{self.done}"]
        if self.note:
            parts.append(self.note)
        parts.append(clock(self.elapsed_s))
        if self.total is not None and self.done < self.total:
            left = None if not self.speed else max(0, self.total - self.done) / self.speed
            parts.append(f"{clock(left)} left")
        if self.speed:
            parts.append(f"{self.speed:.1f} it/s" if self.speed >= 1 else f"{1 / self.speed:.2f} s/it")
        return parts

    def metric_text(self) -> str:
        """The metrics in one line."""
        return "  ".join(f"{name}: {number(value)}" for name, value in self.metrics.items())

    def plain(self) -> str:
        """The whole as one line without a bar."""
        return "  ".join(filter(None, [self.title, *self.parts(), self.metric_text()]))


def title(stage: str, epoch: int, max_epochs: int | None, dataloader_idx: int) -> str:
    """A loop's name: epochs count from 1 here."""
    if stage == "train":
        return f"Epoch {epoch + 1}/{max_epochs}" if max_epochs is not None and max_epochs > 0 else f"Epoch {epoch + 1}"
    name = _TITLES.get(stage, stage)
    return f"{name} {dataloader_idx + 1}" if dataloader_idx else name


def showable(metrics: Mapping[str, Any]) -> dict[str, float | int | str]:
    """Those metrics that can be read without waiting for a device: numbers, texts and one-element CPU tensors."""
    shown: dict[str, float | int | str] = {}
    # A copy first: the training thread adds to the dict meanwhile.
    for name, value in dict(metrics).items():
        if isinstance(value, (float, int, str)):
            shown[name] = value
        elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
            shown[name] = value.item()
    return shown


def number(value: float | int | str) -> str:
    """A metric's value: four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def clock(seconds: float | None) -> str:
    """Seconds as 1:02:03 or 2:03; None as -:--.

    Example:
        >>> clock(3723.4), clock(5), clock(None)
        ('1:02:03', '0:05', '-:--')
    """
    if seconds is None or seconds > 359_999_999:
        return "-:--"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
