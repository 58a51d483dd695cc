"""Show a sweep as a table: choose and order its columns, find the best run, and fit the table into a terminal."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from instep.errors import UsageError
from instep.runs import naming, where
from instep.runs.entries import Entry
from instep.runs.facts import number
from instep.runs.folder import Run
from instep.utils.untrusted_files import clean

MARK = "\u200e"
"""Unicode's left-to-right mark: an invisible character after which a line goes on from left to right."""
_GAP, _LEAST = 2, 10  # number of blanks between columns, and the smallest width to which a text is cut
_LONG = 100  # maximum number of characters of a text if nothing else limits the width
_ALWAYS = 2  # names are cut to keep the columns with a `rank` up to this one (name, state, best value)
_FEW = 8  # maximum number of runs for which the lines below the table say why they ended
# Matches the beginning of a word in the name of a metric whose greatest value is the best.
_UP = re.compile(r"acc|au(c|roc|pr)|f1|bleu|rouge|dice|iou|precision|recall|score|reward|r2|map(?!e)|psnr|ssim").match
_FACTS: dict[str, Callable[[Entry], Any]] = {
    "name": lambda entry: entry.name,
    "path": lambda entry: entry.run.name,
    "state": lambda entry: entry.run.status.state,
    "step": lambda entry: entry.run.status.step,
    "epoch": lambda entry: None if entry.run.status.epoch is None else entry.run.status.epoch + 1,
    "tag": lambda entry: entry.run.label.tags,
    "note": lambda entry: entry.run.label.note,
    "why": lambda entry: entry.why,
    "updated": lambda entry: entry.run.updated,
}
_SAID = ("state", "step", "epoch", "note", "why")


@dataclass(frozen=True)
class Metric:
    """A metric in a table, and whether its least or its greatest value is the best.

    Args:
        name: name of the metric.
        greatest: whether the greatest value is the best; otherwise the least value is.
    """

    name: str
    greatest: bool

    @property
    def title(self) -> str:
        """Word for the best value in the header of its column: "greatest" or "least"."""
        return "greatest" if self.greatest else "least"

    def best(self, entry: Entry) -> tuple[float, float] | None:
        """Return the best value of a run and its step; None if the run has no value, or ended with nan or infinity."""
        ends = entry.ends.get(self.name)
        if ends is None or not math.isfinite(ends.last):
            return None
        return (ends.greatest, ends.greatest_step) if self.greatest else (ends.least, ends.least_step)

    def rank(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return the runs that have a best value, the best run first."""
        found = [(best[0], index, entry) for index, entry in enumerate(entries) if (best := self.best(entry))]
        return [entry for *_, entry in sorted(found, key=lambda at: (-at[0] if self.greatest else at[0], at[1]))]


def metric_of(word: str, entries: Iterable[Entry] = ()) -> Metric:
    """Return the metric for a name such as `val_loss`; `:min` or `:max` after the name says which value is best.

    For other names, a run that ranked its checkpoints by this metric says it, or else the words of the name.

    Example:
        >>> metric_of("val_loss").greatest, metric_of("val_acc").greatest, metric_of("x:max").greatest
        (False, True, True)
    """
    name, _, way = word.rpartition(":")
    if not name or way not in ("min", "max"):
        name, way = word, next((entry.mode for entry in entries if entry.monitor == word and entry.mode), "")
    if way:
        return Metric(name, way == "max")
    parts = word.lower().replace("/", "_").replace("-", "_").split("_")
    return Metric(word, "loss" not in parts and any(map(_UP, parts)))


def usual_metric(entries: Sequence[Entry]) -> Metric | None:
    """Choose the metric by which runs are compared: the one that ranked most runs' checkpoints.

    If no run ranked its checkpoints, choose a metric of validation, preferably a loss. Without such a metric, choose a
    loss or an accuracy.
    """
    monitors = Counter(entry.monitor for entry in entries if entry.monitor in entry.ends)
    if monitors:
        return metric_of(monitors.most_common(1)[0][0], entries)
    counts = Counter(name for entry in entries for name in entry.ends if name not in ("epoch", "hp_metric"))
    order = sorted(counts, key=lambda name: ("val" not in name, "loss" not in name, -counts[name], name))
    found = next((name for name in order if "val" in name or "loss" in name or "acc" in name), None)
    return None if found is None else metric_of(found, entries)


@dataclass(frozen=True)
class Column:
    """Column of a table of runs.

    Args:
        header: header of the column.
        cells: text for each run.
        right: whether the texts are aligned to the right.
        rank: position by importance; 0 for the column with names. Without enough room, the columns with the greatest
            `rank` are left out first.
        cut: whether the texts may be cut.
    """

    header: str
    cells: list[str]
    right: bool = False
    rank: int = 4
    cut: bool = False

    @cached_property
    def width(self) -> int:
        """Width of the column, in cells of a terminal."""
        return max(map(width_of, [self.header, *self.cells]), default=0)


@dataclass(frozen=True)
class Table:
    """Table of runs with chosen hyperparameters and metrics.

    Args:
        entries: the runs, in the order of the rows.
        params: names of the hyperparameters.
        metrics: the metrics.
    """

    entries: list[Entry]
    params: list[str]
    metrics: list[Metric]

    @classmethod
    def of(cls, entries: Sequence[Entry], columns: Sequence[str] = (), sort: str = "", condition: str = "") -> Table:
        """Make a table: choose the runs that fulfil a condition, sort them, and choose the columns.

        Args:
            entries: all runs.
            columns: hyperparameters and metrics; if empty, the hyperparameters that differ, and one metric.
            sort: name of a hyperparameter, a metric or a property such as "step"; the best or smallest value is first,
                or the greatest one if `:max` is added to the name.
            condition: condition on the runs (`instep.runs.where`); if empty, all runs are chosen.

        Raises:
            UsageError: no run has such a name, or the condition cannot be parsed.
        """
        for word in (*columns, *filter(None, [sort]), *where.names_in(condition)):
            _check_known(word, entries)
        holds = where.parse(condition) if condition.strip() else lambda _: True
        chosen = [entry for entry in entries if holds(lambda name, entry=entry: value_of(entry, name))]
        if sort:
            chosen.sort(key=_order(sort, entries))
        if columns:
            is_param = {word: any(word in entry.params for entry in entries) for word in columns}
            metrics = [metric_of(word, entries) for word in columns if not is_param[word] and word not in _FACTS]
            return cls(chosen, [word for word in columns if is_param[word]], metrics)
        usual = usual_metric(chosen)
        by_sort = [each for each in [metric_of(sort, entries)] if any(each.name in entry.ends for entry in chosen)]
        return cls(chosen, naming.differing([entry.params for entry in chosen]), by_sort or ([usual] if usual else []))

    def csv(self) -> str:
        """Return the whole table as CSV; a text that a spreadsheet would read as a formula gets an apostrophe."""
        heads = [
            title
            for metric in self.metrics
            for title in (metric.name, f"{metric.title} {metric.name}", f"at step {metric.name}")
        ]
        rows: list[list[Any]] = [["name", "folder", *_SAID, "updated", "tags", *self.params, *heads]]
        for entry in self.entries:
            row = [entry.name, entry.run.folder, *(_FACTS[name](entry) for name in _SAID), entry.updated]
            row += [" ".join(entry.run.label.tags), *(entry.params.get(key) for key in self.params)]
            for metric in self.metrics:
                ends = entry.ends.get(metric.name)
                row += [None if ends is None else ends.last, *(metric.best(entry) or (None, None))]
            rows.append(row)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([[_cell(value) for value in row] for row in rows])
        return text.getvalue().rstrip("\n")

    def columns(self, age: Callable[[str], str]) -> list[Column]:
        """Return all columns that are not empty, the column with names first.

        Args:
            age: function that formats how long ago a time in ISO 8601 was.
        """
        entries, several = self.entries, len(self.metrics) > 1
        columns = [
            Column("run", [entry.name for entry in entries], rank=0, cut=True),
            Column("state", self._facts("state"), rank=1),
        ]
        # True if the names of the runs already contain the settings; the columns of settings are then less important.
        said = all(not entry.run.label.name and "=" in entry.name for entry in entries)
        for place, key in enumerate(self.params):
            cells = [naming.value(entry.params[key]) if key in entry.params else "" for entry in entries]
            title = naming.short(key, self.params)
            columns.append(Column(title, cells, True, (40 if said and place < 4 else 20) + place))
        for place, metric in enumerate(self.metrics):
            columns += self._of_metric(metric, several, 3 * place)
        columns += [
            Column("step", self._facts("step"), True, 30),
            Column("epoch", self._facts("epoch"), True, 32),
            Column("tags", [" ".join(entry.run.label.tags) for entry in entries], rank=33, cut=True),
            Column("note", [entry.run.label.note for entry in entries], rank=35, cut=True),
            Column("updated", [age(entry.updated) for entry in entries], rank=31),
            Column("why", [entry.why for entry in entries], rank=10, cut=True),
        ]
        return [column for column in columns if any(column.cells)]

    def _facts(self, name: str) -> list[str]:
        values = [_FACTS[name](entry) for entry in self.entries]
        return ["" if value is None else str(value) for value in values]

    def _of_metric(self, metric: Metric, several: bool, more: int) -> list[Column]:
        bests = [metric.best(entry) for entry in self.entries]
        top = next(map(metric.best, metric.rank(self.entries)), None)
        marks = ["*" if top and best and best[0] == top[0] else " " for best in bests]
        ends = [entry.ends.get(metric.name) for entry in self.entries]
        title = clean(metric.name, "")
        best_cells = [f"{number(best[0])}{mark}" if best else "" for best, mark in zip(bests, marks, strict=True)]
        steps = [f"{best[1]:.0f}" if best else "" for best in bests]
        return [
            Column(title, ["" if each is None else number(each.last) for each in ends], True, 22 + more),
            Column(f"{metric.title} {title}", best_cells, True, 2 + more),
            Column(f"at step {title}" if several else "at step", steps, True, 23 + more),
        ]

    def summary(self, told: bool, gone: Sequence[str] = ()) -> list[str]:
        """Return lines on how many runs are in each state, which run is best and by how much, and what went wrong.

        Args:
            told: whether the table already shows, uncut, why each run ended.
            gone: headers of the columns that were left out.
        """
        counts = Counter(entry.outcome for entry in self.entries)
        states = ", ".join(f"{count:,} {state}" for state, count in counts.most_common()) or "none fits"
        lines = [f"{len(self.entries):,} run{'s' * (len(self.entries) != 1)}: {states}"]
        lines += [line for metric in self.metrics if (line := self._best(metric))]
        ended = sorted((e for e in self.entries if e.why), key=lambda entry: entry.run.status.state == "finished")
        if ended and not told:
            lines += [f"{upright(entry.name)}: {entry.run.status.state}: {entry.why}" for entry in ended[:_FEW]]
            lines += [f"and {len(ended) - _FEW:,} more with a reason"] * (len(ended) > _FEW)
        return [*lines, *([f"columns left out at this width: {', '.join(gone)}"] if gone else [])]

    def _best(self, metric: Metric) -> str:
        tops = [(entry.name, *best) for entry in metric.rank(self.entries)[:2] if (best := metric.best(entry))]
        if not tops:
            return ""
        (name, value, step), *after = tops
        line = f"best (*) by {metric.title} {metric.name}: {upright(name)} with {number(value)} at step {step:.0f}"
        for other, its_value, _ in after:
            apart = abs(its_value - value)
            part = f" ({apart / abs(its_value):.1%})" if its_value else ""
            than = f"better by {number(apart)}{part} than" if apart else "as good as"
            line += f", {than} the next, {upright(other)}"
        return line


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = _line(str(value))
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def search(entries: Iterable[Entry], text: str, state: str = "all") -> list[Run]:
    """Find the runs that fulfil a condition, or that have a text in their name, path, tags or note.

    Args:
        entries: the runs.
        text: the text, which is also tried as a condition (`instep.runs.where`); "" for all runs.
        state: state that the runs must have; "all" for any state.
    """
    condition = None
    with suppress(UsageError):
        condition = where.parse(text)
    text = text.strip().lower()

    def fits(entry: Entry) -> bool:
        label = entry.run.label
        said = (entry.name, entry.run.name, *label.tags, label.note)
        as_text = any(text in part.lower() for part in said)
        return as_text or (condition is not None and condition(lambda name: value_of(entry, name)))

    return [entry.run for entry in entries if state in ("all", entry.run.status.state) and fits(entry)]


def value_of(entry: Entry, name: str) -> Any:
    """Return a run's value for a name: of a property such as "state", a hyperparameter, or the last of a metric.

    If the run has none of these, return None.
    """
    if name in _FACTS:
        return _FACTS[name](entry)
    if name in entry.params:
        return entry.params[name]
    ends = entry.ends.get(metric_of(name).name)
    return None if ends is None else ends.last


def _check_known(word: str, entries: Sequence[Entry]) -> None:
    names = (word, word.removesuffix(":max").removesuffix(":min"))
    if any(name in _FACTS or any(name in entry.params or name in entry.ends for entry in entries) for name in names):
        return
    there = dict.fromkeys(name for entry in entries[:20] for name in (*entry.params, *entry.ends))
    known = f"; there are {', '.join([*there][:20])}" if there else ""
    raise UsageError(f"no run has a hyperparameter or metric {word!r}{known}; and {', '.join(_FACTS)}")


def _order(sort: str, entries: Sequence[Entry]) -> Callable[[Entry], tuple[int, float, str]]:
    metric = metric_of(sort, entries)
    plain = sort if value_is_plain(sort, entries) else metric.name
    by_metric = not value_is_plain(plain, entries)

    def key(entry: Entry) -> tuple[int, float, str]:
        value = (metric.best(entry) or (None,))[0] if by_metric else value_of(entry, plain)
        if isinstance(value, (int, float)) and not math.isnan(value):
            turned = metric.greatest if by_metric else sort.endswith(":max")
            return 0, -float(value) if turned else float(value), ""
        return (2, 0.0, "") if value is None else (1, 0.0, str(value))

    return key


def value_is_plain(name: str, entries: Sequence[Entry]) -> bool:
    """Return True if a name is that of a run's property, such as "state", or of a hyperparameter, not of a metric."""
    return name in _FACTS or any(name in entry.params for entry in entries)


# ---- fitting the table into a terminal


def width_of(text: str) -> int:
    """Return the cells that a text takes on a terminal: two for a Chinese character, none for a combining accent."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # imported late, since few tables have texts that are not ASCII

    return cell_len(text)


def cut(text: str, width: int) -> str:
    """Cut a text to a width and add an ellipsis; cut between two words if the first word fits.

    Example:
        >>> cut("RuntimeError: out of memory", 20), cut("baseline", 5)
        ('RuntimeError: out…', 'base…')
    """
    if width_of(text) <= width:
        return text
    end = next(end for end in range(len(text)) if width_of(text[: end + 1]) >= width)
    kept = text[:end]
    words = kept if text[end] == " " else kept.rpartition(" ")[0]
    return f"{words.rstrip() or kept}…"


def fit(columns: Sequence[Column], width: int | None) -> tuple[list[str], list[str], bool]:
    """Lay out a table within a width, with one line for each run.

    If there is not enough room, the least important columns (with the highest `rank`) are left out first. Then texts
    are cut; names are cut last.

    Args:
        columns: all columns, the column with names first.
        width: number of cells in a line of the terminal; None if nothing limits it. Texts other than names are then
            still cut to `_LONG`.

    Returns:
        The lines, the header first; the headers of the columns that were left out; and whether the column `why` (why
        each run ended) is shown uncut, which is False if it was left out.
    """
    kept = [replace(column, cells=[_line(cell) for cell in column.cells]) for column in columns]
    if width is None:
        widths = [min(column.width, _LONG) if column.cut and column.rank else column.width for column in kept]
    else:
        always = [column.width + _GAP for column in kept if column.rank <= _ALWAYS]
        if len(always) > 2 and sum(always) - _GAP > width >= sum(always) - always[1] - _GAP:
            del kept[1]  # without the state column all names fit; the summary below the table shows the states too
        while len(kept) > 1 and _needed(kept) > width:
            kept.remove(max(kept, key=lambda column: column.rank))
        widths = [min(size, width) for size in _least(kept)]
        room = width - _needed(kept)
        for index in sorted(range(len(kept)), key=lambda index: kept[index].rank):
            more = min(room, kept[index].width - widths[index])
            widths[index] += max(0, more)
            room -= max(0, more)
    rows = zip(*([column.header, *column.cells] for column in kept), strict=True)
    lines = [
        (" " * _GAP).join(
            _pad(cut(text, size), size, column.right) for text, size, column in zip(row, widths, kept, strict=True)
        )
        for row in rows
    ]
    there = {column.header: size >= column.width for column, size in zip(kept, widths, strict=True)}
    gone = [column.header for column in columns if column.header not in there]
    return [line.rstrip() for line in lines], gone, there.get("why", "why" not in gone)


def _least(columns: Sequence[Column]) -> list[int]:
    """Return the least width of each column; names are not cut while another column can be left out."""
    last = all(column.rank <= _ALWAYS for column in columns)
    least = [column.width if not column.cut else _LEAST if last else 2 * _LEAST for column in columns]
    return [
        column.width if column.rank == 0 and not last else min(column.width, size)
        for column, size in zip(columns, least, strict=True)
    ]


def _needed(columns: Sequence[Column]) -> int:
    return sum(_least(columns)) + _GAP * (len(columns) - 1)


def _line(text: str) -> str:
    return clean(" ".join(text.split()), "")


def _pad(text: str, width: int, right: bool) -> str:
    blanks = " " * (width - width_of(text))
    return blanks + upright(text) if right else upright(text) + blanks


def upright(text: str) -> str:
    """Add a mark to a text that is written from right to left, so that the text after it is not reversed."""
    if text.isascii() or not any(0x590 <= ord(char) < 0x900 or 0xFB1D <= ord(char) < 0xFEFD for char in text):
        return text
    return f"{MARK}{text}{MARK}"
