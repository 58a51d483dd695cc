"""Measure where the time of a run goes, at no measurable cost to a step.

Validation and saving are rare, and are timed every time. Waiting for data, forward, backward and the optimizer happen
in every step; they are sampled in bursts of a few batches. The distance between two bursts is random and grows by 5%
each time, also across epochs, so a run of any length has some hundred bursts. Between the bursts, the loop calls the
same functions as without a clock. During a burst, the variables that hold these functions hold timed versions of them
(`watch`). On CUDA, events time the parts of a step. The events are read after the device has passed them, so the host
never waits for the device.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, compress, count, islice
from types import CellType, FunctionType
from typing import Any

import torch

STEP_PARTS = ("data", "forward", "backward", "optimizer")
_SHOWN = {"other": "idle and other"}
_BURST = 4
# Batches between two bursts: the first gap, the growth of the gap, and the largest gap.
_FIRST_GAP, _GROWTH, _LARGEST_GAP = 8.0, 1.05, 1_000_000.0

Function = Callable[..., Any]
# A timed call: name of its part of a step, name of the part around it or None, CUDA events at its start and end.
_Timed = tuple[str, str | None, Any, Any]


@dataclass(frozen=True)
class RunSummary:
    """Result of a fit, and where its time went; `trainer.run_summary` is the summary of the last fit.

    Attributes:
        why: why the fit ended: the limit that was reached, who asked for the stop, or the signal or error.
        wall_s: seconds from the start to the end of the fit.
        steps: number of optimizer steps in this fit, without steps before a resume.
        batches: number of training batches in this fit, on this rank.
        epoch: epoch in which the fit ended, from 0.
        time_s: seconds by part: start, data, forward, backward, optimizer, validation, saving, and other (hooks,
            logging and, on a device, waiting for the host). The sum of all parts is `wall_s`. The parts from data to
            optimizer are estimated from sampled steps.
        best_checkpoint: path of the best checkpoint, or without a `monitor` of the newest; None if there is none.
        best_score: score of this checkpoint.
        monitor: name of the metric that is the score.
        metrics: last logged values, by name.
        recompiles: how often torch compiled a function again, if the module is compiled.
        recompile_reason: torch's reason for the first time that it compiled again; "" if there is none.
        mode: "min" or "max": which value of the metric `monitor` is the best.

    Example:
        >>> print(RunSummary("max_steps=8 reached", 10.0, 8, 8, 0, {"forward": 6.0, "other": 4.0}))
        8 steps in 10.0 s: forward 60%, idle and other 40%
    """

    why: str
    wall_s: float
    steps: int
    batches: int
    epoch: int
    time_s: dict[str, float]
    best_checkpoint: str | None = None
    best_score: float | None = None
    monitor: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    recompiles: int = 0
    recompile_reason: str = ""
    mode: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        shares = [(_SHOWN.get(name, name), s / self.wall_s) for name, s in self.time_s.items() if self.wall_s]
        shown = sorted((part for part in shares if part[1] >= 0.005), key=lambda part: -part[1])
        lines = [f"{self.steps:,} steps in {duration(self.wall_s)}"]
        if shown:
            lines[0] += f": {', '.join(f'{name} {share:.0%}' for name, share in shown)}"
        if self.recompiles:
            times = "once" if self.recompiles == 1 else f"{self.recompiles} times"
            why = f", first because of {self.recompile_reason}" if self.recompile_reason else ""
            lines.append(f"compiled again {times}{why}; TORCH_LOGS=recompiles shows each")
        if self.best_checkpoint:
            score = "" if self.best_score is None else f" ({self.monitor}={self.best_score:.6g})"
            which = "newest" if self.monitor is None else "best"
            lines.append(f"{which} checkpoint{score}: {self.best_checkpoint}")
        return "\n".join(lines)


def duration(seconds: float) -> str:
    """Format a duration for people.

    Example:
        >>> duration(2.5), duration(75), duration(7500)
        ('2.5 s', '1 min 15 s', '2 h 05 min')
    """
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes} min {left:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


class RunClock:
    """Clock of one run on one rank.

    Attributes:
        device: device on which the steps run; None until it is known.
    """

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self._began = time.perf_counter()
        self._loop_began: float | None = None
        self._rare: dict[str, float] = {"validation": 0.0, "saving": 0.0}
        self._rare_before_loop = 0.0
        self._inner = 0.0  # seconds that belong to parts inside the part that is being timed
        self._watched: dict[str, tuple[CellType, Function, Function]] = {}
        self._burst: dict[str, float] = {}  # seconds of each part in the current burst
        # Seconds of the first batch, counted apart, since it compiles and warms up.
        self._first: dict[str, float] | None = None
        # For each burst: number of batches that it represents, and seconds per batch by part.
        self._bursts: list[tuple[int, dict[str, float]]] = []
        # Bursts that the device has not finished yet.
        self._pending: list[tuple[int, int, dict[str, float], list[_Timed]]] = []
        self._open_events: list[_Timed] = []
        self._region: str | None = None
        self._gap, self._random = _FIRST_GAP, random.Random(0)
        self._left = 0  # number of batches until the next burst

    # ---- parts that run rarely, such as validation

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Time a block that runs rarely, without the time of timed blocks inside it."""
        outer, self._inner = self._inner, 0.0
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self._rare[part] += spent - self._inner
            self._inner = outer + spent

    def start_loop(self) -> None:
        """Record that the training loop begins."""
        self._loop_began, self._rare_before_loop = time.perf_counter(), sum(self._rare.values())

    # ---- parts of a step

    def watch(self, part: str, closure: FunctionType, name: str, index: int | None = None) -> None:
        """Time a function of the step during bursts, by replacing it in the closure variable that holds it.

        Args:
            part: name of the part, one of `STEP_PARTS`.
            closure: function that calls the timed function.
            name: name of the variable that holds the timed function, a free variable of `closure`.
            index: number of this closure, if several closures of the same function are watched.
        """
        cell = (closure.__closure__ or ())[closure.__code__.co_freevars.index(name)]
        function = cell.cell_contents
        self._watched[f"{closure.__qualname__}.{name}.{index}"] = cell, function, self._timed(part, function)

    def sampled(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, and time some of them. Between two bursts, this method runs no Python code."""
        return chain.from_iterable(self._segments(iter(batches)))

    def _segments(self, batches: Iterator[Any]) -> Iterator[Iterable[Any]]:
        while True:
            if self._left:
                given = count(1)
                try:
                    # `compress` yields every batch, since `given` counts from 1, and takes one number of `given` for
                    # each batch. So the next number of `given` is one more than the number of yielded batches.
                    yield islice(compress(batches, given), self._left)
                finally:
                    self._left -= next(given) - 1
                if self._left:
                    return  # the epoch ended before the next burst began
            done = 0
            self._switch(on=True)
            try:
                for done in range(1, _BURST + 1):
                    start = time.perf_counter()
                    try:
                        batch = next(batches)
                    except StopIteration:
                        done -= 1
                        return
                    self._burst["data"] = self._burst.get("data", 0.0) + time.perf_counter() - start
                    yield (batch,)
                    if self._first is None:
                        self._first, self._burst, self._open_events = self._burst, {}, []
                        done = 0
                        break
            finally:
                self._switch(on=False)
                self._end_burst(done)

    def _switch(self, on: bool) -> None:
        for cell, function, timed in self._watched.values():
            cell.cell_contents = timed if on else function

    def _timed(self, part: str, function: Function) -> Function:
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            parent, self._region = self._region, part
            event = self._event()
            start = time.perf_counter()
            try:
                result = function(*args, **kwargs)
                # record the event here, not in `finally`: after an error, a failed device would raise another error
                if event is not None:
                    self._open_events.append((part, parent, event, self._event()))
                return result
            finally:
                spent = time.perf_counter() - start
                self._burst[part] = self._burst.get(part, 0.0) + spent - self._inner
                self._inner, self._region = outer + spent, parent

        return timed

    def _event(self) -> Any:
        if self.device is None or self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _end_burst(self, done: int) -> None:
        """Record a burst of `done` batches; its times also represent the batches until the next burst."""
        if done:
            self._left = gap = int(self._gap * (0.5 + self._random.random()))
            self._gap = min(self._gap * _GROWTH, _LARGEST_GAP)
            per_batch = {part: self._burst.get(part, 0.0) / done for part in STEP_PARTS}
            self._pending.append((done + gap, done, per_batch, self._open_events))
        self._burst, self._open_events = {}, []
        self._take_finished()

    def _take_finished(self) -> None:
        """Record the times of bursts that the device has finished, without waiting for the device."""
        # A failed device ends the run at its next use; an error raised here would hide that error.
        with suppress(RuntimeError):
            while self._pending and all(end.query() for _, _, _, end in self._pending[0][3]):
                weight, done, per_batch, events = self._pending.pop(0)
                if events:
                    per_batch |= dict.fromkeys(STEP_PARTS[1:], 0.0)
                for part, parent, start, end in events:
                    seconds = start.elapsed_time(end) / 1000 / done
                    per_batch[part] += seconds
                    if parent is not None:
                        per_batch[parent] -= seconds
                self._bursts.append((weight, per_batch))

    # ---- the result: seconds of each part

    def seconds(self, batches: int) -> dict[str, float]:
        """Return the seconds of each part so far.

        Args:
            batches: number of finished training batches.
        """
        self._take_finished()
        now, rare, first = time.perf_counter(), sum(self._rare.values()), self._first or {}
        wall = now - self._began
        loop = 0.0 if self._loop_began is None else now - self._loop_began - (rare - self._rare_before_loop)
        left = max(0.0, loop - sum(first.values()))
        rates = {part: self._rate(part) * max(0, batches - 1) for part in STEP_PARTS}
        computing = sum(rates.values()) - rates["data"]
        scale = min(1.0, left / computing) if computing else 1.0
        parts = {part: first.get(part, 0.0) + rates[part] * scale for part in STEP_PARTS}
        # If the device computes while the host waits for data, this wait costs nothing, so it does not count.
        parts["data"] = first.get("data", 0.0) + min(rates["data"], max(0.0, left - computing * scale))
        parts |= self._rare
        start = wall if self._loop_began is None else self._loop_began - self._began
        parts = {"start": max(0.0, start - self._rare_before_loop), **parts}
        return {**parts, "other": max(0.0, wall - sum(parts.values()))}

    def _rate(self, part: str) -> float:
        """Estimate the seconds per batch of a part: for data the mean of the bursts, for other parts the median."""
        total = sum(weight for weight, _ in self._bursts)
        if part == "data":
            return sum(weight * burst[part] for weight, burst in self._bursts) / total if total else 0.0
        passed = 0.0
        for seconds, weight in sorted((burst[part], weight) for weight, burst in self._bursts):
            passed += weight
            if passed >= total / 2:
                return max(0.0, seconds)
        return 0.0
