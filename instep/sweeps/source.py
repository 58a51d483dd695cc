"""The runs of a sweep and the table of runs: threads read them once for all browsers that show the page."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from instep.errors import UsageError
from instep.runs import naming, where
from instep.runs.entries import Entry, read_entries
from instep.runs.naming import differing
from instep.runs.table import Metric, Table, search, usual_metric, value_is_plain

# Runs are read again after `FRESH_S` seconds or `SHARE` times the duration of the last reading, whichever is longer.
FRESH_S, SHARE = 2.0, 10.0


@dataclass(frozen=True)
class Wish:
    """What the user asks the page to show.

    Args:
        text: a condition such as "lr<0.1", or a part of a run's name, path, tag or note.
        sort: name to sort by: a hyperparameter, a metric, or a property such as "state" or "step". None: the metric
            that is shown by default; "": the newest run first.
        columns: names of hyperparameters and metrics; empty: the hyperparameters that differ, and one metric.
        archived: whether archived runs are shown too.
    """

    text: str = ""
    sort: str | None = None
    columns: tuple[str, ...] = ()
    archived: bool = False


@dataclass(frozen=True)
class SweepTable:
    """Table of the runs that the user asked for, with the names of columns that can be chosen.

    Args:
        table: table of the runs, in order.
        params: names of the hyperparameters that differ among all runs.
        metrics: names of all metrics.
        sort: name by which the table is sorted; "": the newest run first.
        total: number of runs, with archived runs only if the user asked for them.
    """

    table: Table
    params: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    sort: str = ""
    total: int = 0


class Sweep:
    """The runs below a folder, with the last values of their metrics.

    Args:
        folder: a run folder, or a folder that has runs in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        self._until = -1.0

    def entries(self) -> list[Entry]:
        """Return the runs, the newest first."""
        with self._lock:
            begun = time.monotonic()
            if begun >= self._until:
                with suppress(UsageError):  # if the folder was deleted, show its runs as they were
                    self._entries = read_entries(self.folder)
                now = time.monotonic()
                self._until = now + max(FRESH_S, SHARE * (now - begun))
            return self._entries

    def forget(self) -> None:
        """Read the runs again at the next request, for example after a label has changed."""
        with self._lock:
            self._until = -1.0

    def view(self, wish: Wish) -> SweepTable:
        """Make the table of runs that a user asked for.

        Raises:
            UsageError: the condition cannot be parsed, or names a hyperparameter or metric that no run has.
        """
        entries = [entry for entry in self.entries() if wish.archived or not entry.run.label.archived]
        names = dict.fromkeys(name for entry in entries for name in entry.ends if name not in ("epoch", "hp_metric"))
        usual = usual_metric(entries)
        sort = (usual.name if usual else "") if wish.sort is None else wish.sort
        found, condition = _found(entries, wish.text)

        def is_known(word: str) -> bool:
            return value_is_plain(word, found) or any(word in entry.ends for entry in found)

        columns = list(filter(is_known, wish.columns))
        table = Table.of(found, columns, sort if is_known(sort) else "", condition)
        return SweepTable(table, differing([entry.params for entry in entries]), list(names), sort, len(entries))


def _found(entries: list[Entry], text: str) -> tuple[list[Entry], str]:
    """Find the runs for a text that the user typed: a condition, or a part of a name, path, tag or note.

    Returns:
        If the text is a condition, or empty: all runs, and the text. Else: the runs that contain the text, and "".

    Raises:
        UsageError: no run contains the text, and it has a sign of a condition (<, > or =).
    """
    try:
        if text.strip():
            where.parse(text)
    except UsageError:
        runs = {run.folder for run in search(entries, text)}
        if not runs and any(sign in text for sign in "<>="):
            raise
    else:
        return entries, text
    return [entry for entry in entries if entry.run.folder in runs], ""


def by_group(entries: Sequence[Entry], over: str) -> dict[str, list[Entry]]:
    """Group runs that differ only in one hyperparameter; the name of a group says how it differs from other groups.

    Args:
        entries: the runs.
        over: hyperparameter in which runs of a group may differ, such as the seed.
    """
    keys = [key for key in differing([entry.params for entry in entries]) if key != over]
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault(tuple(repr(entry.params.get(key)) for key in keys), []).append(entry)
    named: dict[str, list[Entry]] = {}
    for group in groups.values():
        params = group[0].params
        said = " ".join(f"{naming.short(key, keys)}={naming.value(params[key])}" for key in keys if key in params)
        # a number is added if another group has the same name
        named[f"{said} #{len(named) + 1}" if said in named else said or "all"] = group
    return named


def means(entries: Sequence[Entry], metric: Metric, over: str) -> list[tuple[str, float, float, float, int]]:
    """Return name, mean, least, greatest and number of best values for each group of `by_group`, the best mean first.

    Only finished runs that have a best value of the metric count.
    """
    rows = []
    for name, group in by_group(entries, over).items():
        values = [best[0] for e in group if e.run.status.state == "finished" and (best := metric.best(e))]
        if values:
            rows.append((name, sum(values) / len(values), min(values), max(values), len(values)))
    return sorted(rows, key=lambda row: -row[1] if metric.greatest else row[1])
