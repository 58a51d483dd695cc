"""The panels beside the table, one for each tab. A thread reads the values; a panel draws them if they changed."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nicegui import ui

from instep.dashboard.details import Shown, box, fill, text_table
from instep.dashboard.source import Source, in_thread
from instep.errors import UsageError
from instep.runs import Curve
from instep.runs.entries import Entry
from instep.runs.label import Label, read_label, write_label
from instep.runs.table import Metric, Table, metric_of
from instep.sweeps import beside, curves, plots
from instep.sweeps.media import ALL_BYTES, Media, MediaReader
from instep.sweeps.source import Sweep, SweepTable, by_group
from instep.utils.untrusted_files import clean

MOST_DRAWN, _MOST_METRICS = 50, 4
_ALONE = ""  # the choice "nothing: a line for each run", in place of bands
_SEEDS = ("seed", "random_seed", "random_state")


@dataclass
class Desk:
    """State that the table and the panels of one browser share.

    Args:
        source: source of the runs' curves, shared by all pages.
        sweep: the runs and their table, shared by all pages.
        may_write: whether this browser has the dashboard's token, and so may change labels.
        changed: function that is called after a label was written.
        view: the table that the page shows.
        chosen: the runs that are ticked in the table.
    """

    source: Source
    sweep: Sweep
    may_write: bool
    changed: Callable[[], Any]
    view: SweepTable = field(default_factory=lambda: SweepTable(Table([], [], [])))
    chosen: list[Entry] = field(default_factory=list)

    def metric(self) -> Metric | None:
        """Return the metric by which runs are compared."""
        if self.view.sort in self.view.metrics:
            return metric_of(self.view.sort, self.view.table.entries)
        return next(iter(self.view.table.metrics), None)

    def seed(self) -> str:
        """Return the hyperparameter that is a seed; "" if no seed differs between the runs."""
        return next((key for key in self.view.params if key.rpartition("/")[2].lower() in _SEEDS), "")


class SweepPanel:
    """Base of the panels that show the chosen runs.

    Args:
        desk: state of the page, with the chosen runs.
    """

    def __init__(self, desk: Desk) -> None:
        self.desk, self._shown, self._turn = desk, Shown(), 0

    def build(self) -> None:
        """Make the elements of the panel."""

    async def refresh(self) -> None:
        """Read the values that the panel shows, and draw what has changed."""

    def stop(self) -> None:
        """Discard values that a thread is still reading for this panel, since another panel replaces it."""
        self._turn += 1

    async def _read(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run `work` in a thread; return None if another reading was requested before `work` ended."""
        self._turn += 1
        turn = self._turn
        data = await in_thread(work, *args)
        return data if turn == self._turn else None

    def _select(self, label: str, **options: Any) -> ui.select:
        select = ui.select([], label=label, on_change=self.refresh, **options)
        return select.props("dense options-dense").classes("pick")

    def _offer(self, select: ui.select, names: dict[Any, str], default: Any) -> None:
        """Set the options of a select element, and keep the chosen option if it still exists."""
        if not self._shown.changed(f"select {select.id}", names):
            return
        value = select.value
        kept = [each for each in value if each in names] if isinstance(value, list) else value
        is_there = bool(kept) if isinstance(kept, list) else kept in names
        select.set_options(names, value=kept if is_there else default)


def _marks(entries: Sequence[Entry]) -> list[Any]:
    """Return a value that changes when runs change. It contains no metrics, since nan would count as a change."""
    return [(entry.run.folder, entry.run.stamp, entry.run.status.state, entry.name) for entry in entries]


def _names(words: Sequence[str]) -> dict[Any, str]:
    return {word: clean(word, "") for word in words}


def _draw(plot: ui.echart, options: dict[str, Any]) -> None:
    plot.options.clear()
    plot.options.update(options)
    plot.update()


class Curves(SweepPanel):
    """Panel with curves of the chosen runs: a line per run, or bands over a hyperparameter such as the seed."""

    def build(self) -> None:
        self._kept: dict[Path, tuple[Any, dict[str, Curve]]] = {}
        with box("controls"):
            self._metrics = self._select("Metrics", multiple=True).props("use-chips")
            self._over = self._select("Bands over")
            with box("slide"):
                ui.label("Smoothing").classes("quiet")
                self._weight = ui.slider(min=0, max=0.98, step=0.02, value=0)
                self._weight.props("dense label aria-label=Smoothing").on("change", self.refresh)
            self._log = ui.checkbox("log scale", on_change=self.refresh).props("dense")
        self._plot = ui.echart({}).classes("plot").props("role=img aria-label='curves of the chosen runs'")
        self._empty = ui.label("Tick runs in the table to draw their curves.").classes("quiet")

    async def refresh(self) -> None:
        desk, metric = self.desk, self.desk.metric()
        default = [metric.name] if metric and metric.name in desk.view.metrics else desk.view.metrics[:1]
        self._offer(self._metrics, _names(desk.view.metrics), default)
        self._offer(self._over, {_ALONE: "nothing: a line for each run", **_names(desk.view.params)}, desk.seed())
        chosen = desk.chosen[:MOST_DRAWN]
        wanted = list(self._metrics.value or ())[:_MOST_METRICS]
        over, weight = self._over.value or "", float(self._weight.value or 0)
        found = await self._read(self._lines, chosen, wanted, over, weight)
        if found is None:
            return
        if self._shown.changed("plot", (found, self._log.value)):
            curves.draw(self._plot, self._empty, found, bool(self._log.value))

    def _curves(self, entry: Entry, names: list[str]) -> tuple[Any, dict[str, Curve]]:
        """Return curves of a run, which are read only if its files changed; the panel keeps them for all chosen runs.

        Returns:
            A value that changes only when the files or the names change; and the curves, by name.
        """
        mark, kept = (entry.run.stamp, names), self._kept.get(entry.run.folder)
        if kept is not None and kept[0] == mark:
            return kept
        found = self.desk.source.metrics(entry.run).curves
        return mark, {name: found[name] for name in names if name in found}

    def _lines(self, chosen: list[Entry], names: list[str], over: str, weight: float) -> Any:
        read = self._kept = {entry.run.folder: self._curves(entry, names) for entry in chosen}
        groups = by_group(chosen, over) if over else {entry.name: [entry] for entry in chosen}
        lines: dict[str, list[curves.PlotLine]] = {name: [] for name in names}
        for name, of in lines.items():
            for group, entries in groups.items():
                there = [read[entry.run.folder][1].get(name) for entry in entries]
                there = [curve for curve in there if curve is not None and curve.values]
                if len(there) > 1:
                    of.append(curves.band_of(group, there, weight))
                elif there:
                    of.append(curves.line_of(group, there[0], weight))
        return lines


class Against(SweepPanel):
    """Panel with plots of hyperparameters against the metric by which runs are compared, for all runs in the table."""

    def build(self) -> None:
        self._about = ui.label().classes("quiet")
        self._lines = ui.echart({}).classes("plot lines").props("role=img aria-label='hyperparameters of each run'")
        with box("controls"):
            self._across = self._select("Across")
        self._points = ui.echart({}).classes("plot points").props("role=img aria-label='one against the metric'")

    async def refresh(self) -> None:
        desk, metric = self.desk, self.desk.metric()
        entries, params = desk.view.table.entries, desk.view.table.params or desk.view.params
        self._offer(self._across, _names([*params, *desk.view.metrics]), next(iter(params), None))
        for plot in (self._lines, self._points):
            plot.set_visibility(metric is not None)
        if metric is None:
            self._about.set_text("No run has a metric yet.")
            return
        self._about.set_text("All runs of the table. The thick line is the best run; dotted ones have no best value.")
        chosen = {entry.run.folder for entry in desk.chosen}
        if self._shown.changed("plots", (_marks(entries), params, metric, chosen, self._across.value)):
            _draw(self._lines, plots.parallel(entries, params, metric))
            _draw(self._points, plots.scatter(entries, str(self._across.value or ""), metric, chosen))


class _OfRuns(SweepPanel):
    """Base of the panels that show one or two runs, which the user picks in the panel."""

    def _select_run(self, label: str) -> ui.select:
        return self._select(label, with_input=True).classes("run-pick")

    def _offer_runs(self, *selects: ui.select) -> list[Entry]:
        """Offer the ticked runs, or the table's first runs if none is ticked; return the runs picked in this panel."""
        runs = {str(entry.run.folder): entry for entry in self.desk.chosen or self.desk.view.table.entries[:MOST_DRAWN]}
        names, order = {key: clean(entry.name, "") for key, entry in runs.items()}, list(runs)
        for number, select in enumerate(selects):
            self._offer(select, names, order[min(number, len(order) - 1)] if order else None)
        return [runs[select.value] for select in selects if select.value in runs]


class Beside(_OfRuns):
    """Panel that compares two runs: their settings, code and metrics, and the curves of one metric."""

    def build(self) -> None:
        with box("controls"):
            self._one, self._other = self._select_run("First run"), self._select_run("Second run")
            self._same = ui.checkbox("what is the same, too", on_change=self.refresh).props("dense")
        self._tables = []
        for title, last in (("Settings", "≠"), ("State and code", "≠"), ("Last values", "Difference")):
            ui.label(title).classes("title")
            self._tables.append(text_table("", "First", "Second", last))
        self._patch = ui.label().classes("log")
        self._plot = ui.echart({}).classes("plot").props("role=img aria-label='curves of both runs'")
        self._none = ui.label("Neither run has a curve of the metric.").classes("quiet")

    async def refresh(self) -> None:
        pair, metric = self._offer_runs(self._one, self._other), self.desk.metric()
        asked = metric.name if metric else "", bool(self._same.value)
        if len(pair) < 2 or not self._shown.changed("pair", (_marks(pair), asked)):
            return
        data = await self._read(self._compare, *pair, *asked)
        if data is None:
            return
        *tables, patch, lines = data
        for table, rows in zip(self._tables, tables, strict=True):
            fill(table, rows)
        self._patch.set_text(clean(patch))
        self._patch.set_visibility(bool(patch))
        curves.draw(self._plot, self._none, lines)

    def _compare(self, one: Entry, other: Entry, metric: str, same: bool) -> Any:
        codes = beside.code_of(one.run.folder), beside.code_of(other.run.folder)
        found = [(entry.name, self.desk.source.metrics(entry.run).curves.get(metric)) for entry in (one, other)]
        lines = {metric: [curves.line_of(name, curve, 0.0) for name, curve in found if curve is not None]}
        facts = beside.facts(one, other, codes)
        return beside.settings(one, other, same), facts, beside.metrics(one, other), beside.patches(*codes), lines


class Logged(_OfRuns):
    """Panel with pictures, tables and texts that a run logged."""

    def build(self) -> None:
        with box("controls"):
            self._run = self._select_run("Run")
        self._box = box("media")

    async def refresh(self) -> None:
        for entry in self._offer_runs(self._run):
            if self._shown.changed("run", (entry.run.folder, entry.run.stamp)):
                if self._shown.changed("folder", entry.run.folder):
                    self._reader = MediaReader(entry.run.folder)
                data = await self._read(self._reader.read)
                if data is not None and self._shown.changed("media", data):
                    found, left_out = data
                    self._box.clear()
                    with self._box:
                        for media in found:
                            self._show(media)
                        if left_out:
                            ui.label(f"{left_out:,} pictures do not fit into {ALL_BYTES >> 20} MiB.").classes("quiet")
                        elif not found:
                            ui.label(
                                "This run has no pictures, tables or texts in its own folder. JSONLinesLogger and "
                                "TensorBoardLogger keep them there; CSVLogger keeps none, and a tracker keeps its own."
                            ).classes("quiet")

    @staticmethod
    def _show(media: Media) -> None:
        with box("medium" if media.picture else "medium wide", "figure"):
            with box("", "figcaption"):
                ui.label(clean(media.name, "")[:120]).classes("title")
                ui.label(f"step {media.step:,.0f}").classes("quiet")
            if media.picture:
                picture = box("", "img")
                picture.props["src"] = f"data:image/{media.kind};base64,{base64.b64encode(media.picture).decode()}"
                picture.props["alt"] = clean(f"{media.name}, step {media.step:g}", "")[:200]
            elif media.rows:
                fill(text_table(*(clean(cell, "") for cell in media.rows[0])), media.rows[1:])
            else:
                ui.label(clean(media.text)).classes("log")


class Notes(_OfRuns):
    """Panel with name, tags and note of a run; a browser with the token may change them."""

    def build(self) -> None:
        with box("controls"):
            self._run = self._select_run("Run")
        self._name = ui.input("Name")
        self._tags = ui.input("Tags, with blanks between them")
        self._note = ui.textarea("Note").props("autogrow")
        self._archived = ui.checkbox("archived: the table leaves the run out").props("dense")
        self._fields: tuple[Any, ...] = (self._name, self._tags, self._note, self._archived)
        self._folder: Path | None = None
        self._before: tuple[Any, ...] = ("", "", "", False)
        with box("line"):
            self._save = ui.button("Save", on_click=self._write).props("no-caps outline")
            self._said = ui.label().classes("quiet").props("role=status")
        if not self.desk.may_write:
            for each in (*self._fields, self._save):
                each.disable()
            self._said.set_text("To write, open the address that `instep dashboard` printed: it has the token.")

    async def refresh(self) -> None:
        # While a person types, the panel still shows the same run, even if the filter of the table hides it.
        types = self._run.value == str(self._folder) and self._given() != self._before
        if not types:
            picked = self._offer_runs(self._run)
            self._folder = picked[0].run.folder if picked else None
        label = Label() if self._folder is None else await in_thread(read_label, self._folder)
        values = label.name, " ".join(label.tags), label.note, label.archived
        for element, value, given, before in zip(self._fields, values, self._given(), self._before, strict=True):
            if not types or given == before:
                element.set_value(value)
        self._before = values

    def _given(self) -> tuple[Any, ...]:
        """Return the current contents of the input fields: name, tags, note, and whether the run is archived."""
        return *(str(each.value or "").strip() for each in self._fields[:3]), self._archived.value is True

    async def _write(self) -> None:
        """Write only the fields that the user changed here, so that changes from another page or the command remain."""
        if not self.desk.may_write or self._folder is None:
            return
        pairs = zip(("name", "tags", "note", "archived"), self._given(), self._before, strict=True)
        changes: dict[str, Any] = {field: value for field, value, before in pairs if value != before}
        if "tags" in changes:
            changes["tags"] = tuple(dict.fromkeys(changes["tags"].split()))
        try:
            await in_thread(_write, self._folder, changes)
        except (UsageError, OSError) as error:
            self._said.set_text(clean(f"Not saved: {error}"))
            return
        self._before = self._given()
        self._said.set_text("Saved.")
        self.desk.sweep.forget()
        await self.desk.changed()


def _write(folder: Path, changes: dict[str, Any]) -> None:
    write_label(folder, replace(read_label(folder), **changes))


PANELS: dict[str, type[SweepPanel]] = {
    "Curves": Curves,
    "Hyperparameters": Against,
    "Two runs": Beside,
    "Logged": Logged,
    "Notes": Notes,
}
