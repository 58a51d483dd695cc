"""Runs for a list: name, hyperparameters, and last and best values of each metric, which are cached in an index.

The index is a cache in the user's own cache folder, one JSON file for each folder that was searched. A run is read
again if the times or sizes of its files have changed. All runs are read again if the index is missing or damaged.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from instep.errors import UsageError
from instep.health.run_status import in_short
from instep.loggers.hparams import flatten
from instep.runs.folder import DEPTH, Run, Stamp, below, look_at, path_below, updated
from instep.runs.label import label_of
from instep.runs.metrics import Curve, MetricsReader
from instep.runs.naming import call, options_of
from instep.runs.status import STATES, STATUS, RunStatus
from instep.utils.atomic import replace as replace_file
from instep.utils.untrusted_files import INDEX_BYTES, parse_object, read_regular

Plain = bool | int | float | str
_VERSION = 1
_MOST_FILES = 64  # maximum number of files in the cache, one for each searched folder
_MOST_METRICS, _MOST_PARAMS_BYTES = 200, 2**14  # limits for a run in the cache; a larger run is read each time
_KEPT = ("exit_code", "signal", "run_id", "host", "pid", "checkpoint", "command", "started", "ended")
_LIVE, _LIMITS = ("starting", "running"), ("max_epochs=", "max_steps=", "max_samples=", "max_tokens=")


@dataclass(frozen=True)
class Ends:
    """Last value of a curve and its two extremes, each with its step; a value that is missing is nan.

    Args:
        last: the last value, which may be nan.
        last_step: step of the last value.
        least: the smallest finite value.
        least_step: step of the smallest value.
        greatest: the largest finite value.
        greatest_step: step of the largest value.
        first_bad: step of the first value that is nan or infinite; nan if all values are finite.
        count: number of points of the curve.
        not_finite: number of values that are nan or infinite.
    """

    last: float
    last_step: float
    least: float
    least_step: float
    greatest: float
    greatest_step: float
    first_bad: float
    count: int
    not_finite: int

    def describe(self) -> dict[str, float | None]:
        """Return the values as JSON for programs; a missing value is None, but a last value of nan stays nan."""
        return {name: None if name != "last" and math.isnan(value) else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Entry:
    """A run with its hyperparameters and metrics, for a list of runs.

    Args:
        run: folder, status and label of the run. If it comes from the index, the status has only the parts that lists
            show.
        params: hyperparameters in one level, with names such as `model/width`.
        ends: last and best values of each metric, by name.
        monitor: metric by which the run's checkpoints were ranked; "" if there is none.
        name: name of the run in lists (`instep.runs.naming`).
        mode: "min" or "max": which value of `monitor` is the best; "" if unknown.
    """

    run: Run
    params: dict[str, Plain]
    ends: dict[str, Ends]
    monitor: str = ""
    name: str = field(default="", compare=False)
    mode: str = ""

    @property
    def bad(self) -> str:
        """Name of a metric whose last value is nan or infinite; "" if there is none.

        If there are several, the monitored metric comes first, and then a loss.
        """
        bad = (name for name, ends in self.ends.items() if not math.isfinite(ends.last))
        return min(bad, key=lambda name: (name != self.monitor, "loss" not in name), default="")

    @property
    def outcome(self) -> str:
        """State under which the run is counted: its state, or "ended nan" if it finished and a metric is nan.

        If the last value of the metric is infinite, the text is "ended inf" or "ended -inf".
        """
        state = self.run.status.state
        return f"ended {self.ends[self.bad].last:g}" if self.bad and state == "finished" else state

    @property
    def why(self) -> str:
        """Why the run ended, in one line; "" if a limit was reached. If a rank caused the end, it is named last.

        A limit is `max_epochs`, `max_steps`, `max_samples` or `max_tokens`. Other reasons of a finished run are named.
        If a metric's last value is nan or infinite, the reason names the metric and the first step with such a value.
        """
        status = self.run.status
        if self.bad and status.state in ("finished", *_LIVE):
            return f"{self.bad} is {self.ends[self.bad].last:g}, first at step {self.ends[self.bad].first_bad:.0f}"
        reached = status.state == "finished" and status.cause.startswith(_LIMITS)
        return "" if reached else re.sub(r"^(rank \d+): (.+)", r"\2 (\1)", in_short(status.cause))

    @property
    def updated(self) -> str:
        """Time of the run's last change in ISO 8601."""
        return datetime.fromtimestamp(self.run.updated, timezone.utc).isoformat(timespec="seconds")

    def describe(self) -> dict[str, Any]:
        """Return the run as JSON for programs; epochs count from 0, as in the run's files."""
        run, status = self.run, self.run.status
        return {
            "name": self.name,
            "path": run.name,
            "folder": str(run.folder),
            "state": status.state,
            "cause": status.cause,
            "why": self.why,
            "by_rank": status.by_rank,
            "step": status.step,
            "epoch": status.epoch,
            "updated": self.updated,
            **{key: status.said.get(key) for key in ("exit_code", "signal", "run_id", "host", "pid", "checkpoint")},
            "label": asdict(run.label),
            "hparams": self.params,
            "metrics": {name: ends.describe() for name, ends in self.ends.items()},
        }


def read_entries(folder: str | os.PathLike[str], depth: int = DEPTH) -> list[Entry]:
    """Read the runs at a folder and below it, the newest first; unchanged runs are taken from the index.

    Args:
        folder: folder to search.
        depth: how many levels of folders below it are searched.

    Raises:
        UsageError: there is no such folder.

    Example:
        >>> import tempfile
        >>> from instep.loggers import CSVLogger
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for number, lr in enumerate((0.1, 0.2)):
        ...         logger = CSVLogger(folder, version=number)
        ...         logger.log_hyperparams({"lr": lr})
        ...         logger.log_metrics({"loss": lr}, step=1)
        ...         logger.finalize()
        ...     sorted((entry.name, entry.ends["loss"].least) for entry in read_entries(folder))
        [('lr=0.1', 0.1), ('lr=0.2', 0.2)]
    """
    root = Path(os.path.abspath(folder))
    if not root.is_dir():
        raise UsageError(f"{folder} is no folder: give a run folder, or one that has runs in it")
    index = _index_of(root)
    kept, found, rows = _load(index, root), list[Entry](), dict[str, Any]()
    for path, stamp in below(root, depth):
        key = str(path)
        entry = _restore(kept.get(key), path, root, stamp)
        rows[key] = kept.get(key)
        if entry is None:
            entry = _read(look_at(path, root, stamp))
            rows[key] = _row(entry)
        elif entry.run.status.state in _LIVE:  # look again: its process may have died, which changes no file
            entry = replace(entry, run=look_at(path, root, stamp))
        found.append(entry)
    rows = {key: row for key, row in rows.items() if row is not None}
    if rows != kept:
        _save(index, root, rows)
    names = call([(entry.run, entry.params) for entry in found])
    found = [replace(entry, name=name) for entry, name in zip(found, names, strict=True)]
    return sorted(found, key=lambda entry: (entry.run.updated, entry.run.name), reverse=True)


def without_metrics(runs: Sequence[Run]) -> list[Entry]:
    """Return runs for a list that shows no metrics, and read none; the names are the same as in `read_entries`."""
    params = [params_of(run) for run in runs]
    names = call(list(zip(runs, params, strict=True)))
    return [Entry(run, of, {}, "", name) for run, of, name in zip(runs, params, names, strict=True)]


def params_of(run: Run) -> dict[str, Plain]:
    """Return a run's hyperparameters in one level; if it has none, return the options of its command."""
    return flatten(run.hparams) or flatten(options_of(run.status.said.get("command")))


def at_path(path: str) -> list[Entry]:
    """Return the runs that `path` means: all runs at and below a folder, or the run with this name.

    If `path` is the folder of a run, the run gets the name that it has in a list of all runs in the parent folder.

    Args:
        path: a folder, or a name that `instep runs ls` shows.

    Raises:
        UsageError: there is neither a folder nor a run of that name.
    """
    folder = Path(os.path.abspath(path))
    if not folder.is_dir():
        return _named(path)
    if next(below(folder, 0), None) is None:
        return read_entries(folder)
    beside = {entry.run.folder: entry for entry in read_entries(folder.parent, 1)}
    # If this folder itself is a run, return only this run: folders inside it are not runs of their own.
    if folder in beside and os.path.lexists(folder / STATUS):
        return [beside[folder]]
    found = read_entries(folder)
    return [replace(entry, name=beside.get(entry.run.folder, entry).name) for entry in found]


def _named(name: str) -> list[Entry]:
    entries = read_entries(".")
    found = [entry for entry in entries if name in (entry.name, entry.run.name)]
    if not found:
        raise UsageError(
            f"{name} is no folder, and none of the {len(entries):,} runs below this folder is called so: give a run "
            "folder, one that has runs in it, or a name that `instep runs ls` shows"
        )
    return found


def find_one(word: str) -> Entry:
    """Find one run, given by its folder or by its name.

    Raises:
        UsageError: no run, or several runs, have this folder or name.
    """
    found, folder = at_path(word), Path(os.path.abspath(word))
    if folder.is_dir():
        # Keep only the run of this folder itself, and not the runs in folders below it.
        found = [entry for entry in found if entry.run.folder == folder]
    if len(found) == 1:
        return found[0]
    some = "; ".join(f"{entry.name} ({entry.run.name})" for entry in found[:8])
    raise UsageError(
        f"{len(found):,} runs are at {word!r}: {some}. Name one of them"
        if found
        else f"{word!r} is no folder of a run. `instep runs ls {word}` looks below it"
    )


def _read(run: Run) -> Entry:
    summary = run.status.said.get("summary")
    monitor, mode = (str(summary.get(key) or "") if isinstance(summary, dict) else "" for key in ("monitor", "mode"))
    ends = {name: ends_of(curve) for name, curve in MetricsReader(run.folder, None, 4).read().curves.items()}
    return Entry(run, params_of(run), ends, monitor, mode=mode)


def ends_of(curve: Curve) -> Ends:
    """Return the last value and the extremes of a curve.

    The curve may have only some of its points, but the lowest and the highest are always among them.
    """
    points = list(zip(curve.values, curve.steps, strict=True)) or [(math.nan, math.nan)]
    extremes = (*min(points), *max(points, key=lambda at: (at[0], -at[1])))
    bad = math.nan if curve.first_bad is None else curve.first_bad
    return Ends(curve.last, curve.last_step, *extremes, bad, curve.count, curve.not_finite)


# ---- the index of earlier readings


def _index_of(root: Path) -> Path:
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # the user has no home folder, so nothing is cached
        home = Path(os.devnull)
    name = hashlib.blake2b(os.fsencode(root), digest_size=12).hexdigest()
    return home / "instep" / "runs" / f"{name}.json"


def _load(index: Path, root: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        said = parse_object(read_regular(index, INDEX_BYTES))
        if said.get("version") == _VERSION and said.get("root") == str(root) and isinstance(said.get("runs"), dict):
            return said["runs"]
    return {}


def _save(index: Path, root: Path, rows: dict[str, Any]) -> None:
    text = json.dumps({"version": _VERSION, "root": str(root), "runs": rows}, separators=(",", ":"), allow_nan=False)
    with suppress(OSError):  # if the cache cannot be written, nothing breaks: the next call reads all runs again
        index.parent.mkdir(parents=True, exist_ok=True)
        replace_file(index, text.encode("utf-8", "surrogatepass"))
        files = sorted(index.parent.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in files[_MOST_FILES:]:
            old.unlink()


def _row(entry: Entry) -> list[Any] | None:
    run, status = entry.run, entry.run.status
    size = sum(len(name) + len(str(value)) for name, value in entry.params.items())
    if len(entry.ends) > _MOST_METRICS or size > _MOST_PARAMS_BYTES:
        return None
    said = {key: status.said[key] for key in _KEPT if key in status.said}
    ends = {name: [_number(value) for value in astuple(ends)] for name, ends in entry.ends.items()}
    told = [status.state, status.cause, status.step, status.epoch, {str(k): v for k, v in status.by_rank.items()}, said]
    row = [[list(each) for each in run.stamp], told, asdict(run.label), entry.params, ends, entry.monitor, entry.mode]
    # Convert the row to the form that it has when it is read from the file, so that rows can be compared.
    return json.loads(json.dumps(row))


def _number(value: float) -> Any:
    return value if math.isfinite(value) else str(value)


def _restore(row: Any, folder: Path, root: Path, stamp: Stamp) -> Entry | None:
    """Return a run from the index; None if the run has changed, or the index entry is not valid."""
    try:
        seen, (state, cause, step, epoch, by_rank, said), label, params, ends, monitor, mode = row
        if seen != [list(each) for each in stamp] or state not in STATES:
            return None
        _check([cause, monitor, mode, *params, *ends], str)
        _check([number for number in (step, epoch) if number is not None], int)
        _check(params.values(), (bool, int, float, str))
        status = RunStatus(state, cause, {int(k): str(v) for k, v in by_rank.items()}, step, epoch, dict(said))
        run = Run(path_below(folder, root), folder, status, updated(stamp), stamp)
        run.__dict__["label"] = label_of(label)  # set the cached property, so that the label is not read from its file
        return Entry(run, params, {name: _ends(*of) for name, of in ends.items()}, monitor, mode=mode)
    except (TypeError, ValueError, AttributeError, OverflowError):
        return None


def _ends(*said: Any) -> Ends:
    *xs, count, bad = said
    # All nan values are the same object, since other nan objects would be unequal, even inside a container.
    return Ends(*(math.nan if math.isnan(x) else x for x in map(float, xs)), count=int(count), not_finite=int(bad))


def _check(values: Iterable[Any], kinds: Any) -> None:
    if not all(isinstance(value, kinds) for value in values):
        raise TypeError
