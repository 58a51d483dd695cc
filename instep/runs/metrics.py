"""Read the curves of a run, downsampled while reading: only the points that are shown stay in memory."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from instep.health.run_status import NAME as STATUS
from instep.loggers.rows import CSVFile, Forget, JSONLinesFile, LogFile, TensorBoardFile, WandbFile
from instep.runs.status import own

MOST_NAMES = 2000  # maximum number of metrics of a run that are read if no names are given
_OF_RANK = re.compile(r"rank-\d+").fullmatch
_Point = tuple[float, float, float | None]  # a point: its step, its value, and its time or None
# Kinds of loggers' files. Files with exact numbers come first; TensorBoard's come last, since they have float32.
_KINDS: tuple[tuple[str, type[LogFile], tuple[str, ...]], ...] = (
    ("jsonl", JSONLinesFile, ("metrics.jsonl", "rank-*/metrics.jsonl")),
    ("csv", CSVFile, ("metrics.csv", "rank-*/metrics.csv")),
    ("wandb", WandbFile, ("run-*.wandb", "wandb/*/run-*.wandb")),
    ("tensorboard", TensorBoardFile, tuple(f"{below}events.out.tfevents.*" for below in ("", "*/", "*/*/"))),
)


@dataclass(frozen=True)
class Curve:
    """Values of a metric over the steps.

    Args:
        name: name of the metric.
        steps: steps of the points, as they were logged.
        values: values of the points. Each part of a long curve keeps its least and its greatest value, so spikes stay.
        times: wall-clock times of the points, in seconds; None if the logger keeps no times.
        count: number of points of the whole curve.
        last: the last value, which may be nan.
        least: the smallest finite value.
        greatest: the largest finite value.
        not_finite: number of values that are nan or infinite; these are not among the points.
        first_bad: step of the first value that is nan or infinite; None if all values are finite.
        last_step: step of the last value.
    """

    name: str
    steps: list[float]
    values: list[float]
    times: list[float | None]
    count: int
    last: float
    least: float
    greatest: float
    not_finite: int = 0
    first_bad: float | None = None
    last_step: float = math.nan


@dataclass(frozen=True)
class Metrics:
    """Curves of a run.

    Args:
        curves: the curves by name, in the order of their first points.
        problems: files and lines that could not be read, one line of text each.
        source: loggers whose files were read, joined by "+": "jsonl", "csv", "wandb", "tensorboard"; "" if there are
            none.
    """

    curves: dict[str, Curve] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    source: str = ""


class _Buckets:
    """A curve that is being read, in buckets with equal numbers of points; each keeps its least and greatest point."""

    def __init__(self, most: int) -> None:
        self._most = max(1, (most - 2) // 2)
        self._width = 2  # number of points in a bucket; a bucket keeps both of two points, so a short curve is complete
        # For each bucket: the number of its points, the least point and the greatest point.
        self._buckets: list[list] = []
        self.count = self.not_finite = 0
        self.first: _Point | None = None
        self.last: _Point = (0.0, math.nan, None)
        self.first_bad: float | None = None

    def add(self, point: _Point) -> None:
        self.count += 1
        self.last = point
        value = point[1]
        if not -math.inf < value < math.inf:
            self.not_finite += 1
            if self.first_bad is None:
                self.first_bad = point[0]
            return
        if self.first is None:
            self.first = point
        buckets = self._buckets
        if buckets and buckets[-1][0] < self._width:
            last = buckets[-1]
            last[0] += 1
            if value < last[1][1]:
                last[1] = point
            elif value >= last[2][1]:
                last[2] = point
            return
        if len(buckets) >= self._most:
            self._halve()
        self._buckets.append([1, point, point])

    def _halve(self) -> None:
        self._width *= 2
        pairs = [self._buckets[i : i + 2] for i in range(0, len(self._buckets), 2)]
        self._buckets = [
            [
                sum(one[0] for one in pair),
                min((one[1] for one in pair), key=lambda point: point[1]),
                max((one[2] for one in pair), key=lambda point: point[1]),
            ]
            for pair in pairs
        ]

    def forget(self, step: float) -> None:
        """Drop the points from a step on; the bucket that contains this step keeps its earlier points."""
        before = self.points(False)
        if self.last[0] >= step:
            kept = [point for point in before if point[0] < step]
            self._buckets = [[2, *sorted(kept[i : i + 2], key=lambda p: p[1])] for i in range(0, len(kept) - 1, 2)]
            if len(kept) % 2:
                self._buckets.append([1, kept[-1], kept[-1]])
            self.count = round(self.count * len(kept) / len(before)) if before else 0
            self.first, self.last = (kept[0], kept[-1]) if kept else (None, (0.0, math.nan, None))
            if self.first_bad is not None and self.first_bad >= step:
                self.not_finite, self.first_bad = 0, None

    def points(self, ends: bool = True) -> list[_Point]:
        inner = [point for _, *two in self._buckets for point in sorted(two, key=lambda point: point[0])]
        points = [self.first, *inner, self.last] if ends and self.first is not None else inner
        out: list[_Point] = []
        for point in points:
            if math.isfinite(point[1]) and (not out or out[-1] is not point):
                out.append(point)
        return out

    def curve(self, name: str) -> Curve:
        points = self.points()
        return Curve(
            name,
            [point[0] for point in points],
            [point[1] for point in points],
            [point[2] for point in points],
            self.count,
            self.last[1],
            min((point[1] for point in points), default=math.nan),
            max((point[1] for point in points), default=math.nan),
            self.not_finite,
            self.first_bad,
            self.last[0],
        )


class MetricsReader:
    """Reader of the metrics of a run that may still grow; each `read` reads only what was added since the last call.

    Args:
        folder: the run folder.
        names: names of the metrics; None: all metrics of the first logger that has values. A metric that rank 1 logged
            itself has a name such as "rank-1/loss".
        max_points: maximum number of points in a curve.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from instep.loggers import JSONLinesLogger
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     logger, reader = JSONLinesLogger(folder, version="run"), MetricsReader(Path(folder, "run"))
        ...     logger.log_metrics({"loss": 0.5}, step=1)
        ...     logger.log_metrics({"loss": 0.25}, step=2)
        ...     logger.finalize()
        ...     reader.read().curves["loss"].values
        [0.5, 0.25]
    """

    def __init__(self, folder: Path, names: Sequence[str] | None = None, max_points: int = 1000) -> None:
        self._folder, self._names, self._max_points = folder, None if names is None else set(names), max_points
        self._files: dict[str, dict[Path, LogFile]] = {kind: {} for kind, *_ in _KINDS}
        self._curves: dict[str, dict[str, _Buckets]] = {kind: {} for kind, *_ in _KINDS}
        self._too_many = False

    def read(self) -> Metrics:
        """Read what was added since the last call, and return the whole curves, earlier points included."""
        curves: dict[str, Curve] = {}
        problems: list[str] = []
        sources: list[str] = []
        for kind, make, patterns in _KINDS:
            self._read_kind(kind, make, log_files(self._folder, patterns))
            problems += [line for file in self._files[kind].values() for line in file.problems]
            found = {name: line.curve(name) for name, line in self._curves[kind].items() if name not in curves}
            sources += [kind] if found else []
            curves |= found
            if curves and (self._names is None or self._names <= curves.keys()):
                break
        if self._too_many:
            problems.append(f"there are more than {MOST_NAMES:,} metrics; ask for the others by name")
        return Metrics(curves, problems, "+".join(sources))

    def _read_kind(self, kind: str, make: type[LogFile], paths: Iterable[Path]) -> None:
        files = self._files[kind]
        for path in paths:
            files.setdefault(path, make(path))
        # If a file was rewritten, all files of its logger are read again.
        if any(file.replaced() for file in files.values()):
            self._curves[kind] = {}
            files.update({path: make(path) for path in files})
        lines, names = self._curves[kind], self._names
        for path in sorted(files, key=_age):
            # A folder "rank-N" belongs to a logger with per_rank=True.
            prefix = f"{path.parent.name}/" if _OF_RANK(path.parent.name) else ""
            for row in files[path].read():
                if isinstance(row, Forget):
                    for name, line in lines.items():
                        if name.startswith(prefix) and (prefix or not _OF_RANK(name.partition("/")[0])):
                            line.forget(row.step)
                    continue
                step, time_s, values = row
                if not math.isfinite(step):
                    continue
                for name, value in values:
                    name = prefix + name if prefix else name
                    line = lines.get(name)
                    if line is None:
                        if (names is not None and name not in names) or len(lines) >= MOST_NAMES:
                            self._too_many = self._too_many or names is None
                            continue
                        line = lines[name] = _Buckets(self._max_points)
                    line.add((step, value, time_s))


def _age(path: Path) -> list[str]:
    """Return a sort key for a logger's files that puts the oldest first, by the numbers in their names."""
    return [part.rjust(20, "0") if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


_ALL = tuple(pattern for *_, patterns in _KINDS for pattern in patterns)


def log_files(folder: Path, patterns: Iterable[str] = _ALL) -> list[Path]:
    """List the loggers' files in a run folder, but not in checkpoints, in other runs or behind links."""
    is_run = os.path.lexists(folder / STATUS)  # folders below a folder that is not a run may be runs themselves
    found = sorted(path for pattern in patterns if is_run or "/" not in pattern for path in folder.glob(pattern))
    return [path for path in found if own(path, folder) and "checkpoints" not in path.relative_to(folder).parts]
