"""The page of a sweep: the summary, the table of the runs, and the panels beside the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from fastapi import Request
from nicegui import ui

from instep.dashboard.details import ago, box, header
from instep.dashboard.page import Refreshing
from instep.dashboard.source import Source, in_thread
from instep.errors import UsageError
from instep.runs import naming
from instep.runs.entries import Entry
from instep.runs.facts import number
from instep.sweeps.panels import MOST_DRAWN, PANELS, Desk, SweepPanel
from instep.sweeps.source import Sweep, SweepTable, Wish, means
from instep.utils.untrusted_files import clean

PERIOD_S = 3.0
_GONE_S = 60.0  # seconds for which a page keeps its state after its browser has lost the connection
# Up to this many runs are all ticked when a page opens; of more runs only the first `_FEW` of the table, by default the
# best ones.
_FIRST = 24
_FEW = 8
_TOLD = 4  # maximum number of runs that the summary names for each state
# `Column.rank` of best values. Columns up to this rank come first in the table, so that nobody must scroll to see them.
_ALWAYS = 2
_TEXT = 300  # maximum number of characters in a cell
_FACTS = {"": "newest first", "name": "name", "state": "state", "step": "step", "updated": "updated"}
_STYLE = (Path(__file__).parent / "page.css").read_text()
_PATH = "/sweep"
_TEXT_OF = "p => p.data['c' + p.colDef.field.slice(1)]"
_ON_ROWS = """e => {
  const nodes = [], shown = e.api.getColumnDefs().map(column => column.headerName);
  e.api.forEachNode(node => { nodes.push(node); shown.push(node.id) });
  for (const newValue of [false, true])
    e.api.setNodesSelected({nodes: nodes.filter(node => node.data.ticked === newValue), newValue});
  if (e.api.fitted !== String(shown)) requestAnimationFrame(() => e.api.autoSizeAllColumns());
  e.api.fitted = String(shown);
}"""  # while only values change, the columns keep the widths that a user has set
_GRID = {  # the browser runs the value of a key that begins with ":" as code, so no such value has text of runs
    "columnDefs": [],
    "rowData": [],
    ":getRowId": "p => p.data.id",
    ":onFirstDataRendered": _ON_ROWS,
    ":onRowDataUpdated": _ON_ROWS,
    ":rowClassRules": "({best: p => p.data && p.data.best})",
    "rowSelection": {"mode": "multiRow", "headerCheckbox": True, "enableClickSelection": False},
    "selectionColumnDef": {"pinned": "left", "width": 42, "resizable": False},
    "defaultColDef": {"minWidth": 50, "cellDataType": False, ":valueFormatter": _TEXT_OF},
    "autoSizeStrategy": {"type": "fitCellContents"},
    "rowHeight": 29,
    "headerHeight": 34,
    "enableCellTextSelection": True,
    "ensureDomOrder": True,
    "animateRows": False,
}


def define_page(source: Source) -> None:
    """Define the page of a sweep; each browser that opens it gets a page of its own."""
    sweep = Sweep(source.folder)

    @ui.page(_PATH, title=f"{clean(source.folder.name)} - sweep - instep", reconnect_timeout=_GONE_S)
    def home(request: Request) -> None:
        Page(source, sweep, request.scope.get("may_write") is True).build()


class Page(Refreshing):
    """The page of a sweep in one browser.

    Args:
        source: source of the runs' curves.
        sweep: the runs and their table.
        may_write: whether this browser may change names, tags and notes.
    """

    def __init__(self, source: Source, sweep: Sweep, may_write: bool) -> None:
        super().__init__()
        self._desk = Desk(source, sweep, may_write, self.refresh)
        self._ids: dict[Path, str] = {}
        self._ticked: set[Path] | None = None
        self._panel: SweepPanel | None = None

    def build(self) -> None:
        """Make the elements of the page; the first refresh fills them."""
        self._counts = header(self._desk.source.folder, {"Live": "/", "Sweep": _PATH})
        ui.add_css(_STYLE)
        with box("sweep", "main"):
            with box("card whole", "section"):
                self._summary = box("summary", "dl")
            with box("card", "section"):
                self._build_controls()
                with box("grid"):  # made before the runs are read, so that the browser loads its code meanwhile
                    self._grid = ui.aggrid(_GRID, theme="quartz", auto_size_columns=False).classes("rows")
                    self._grid.on("selectionChanged", self._tick, js_handler="e => e.source == 'api' || emit()")
            with box("card", "section"):
                with ui.tabs(on_change=self._change_tab) as self._tabs:
                    self._tabs.props("dense no-caps align=left inline-label outside-arrows mobile-arrows")
                    for name in PANELS:
                        ui.tab(name)
                self._details = box("stack")
                self._tabs.set_value("Curves")
        ui.timer(PERIOD_S, self.refresh)

    def _build_controls(self) -> None:
        with box("controls"):
            self._text = ui.input("Filter", placeholder="a part of a name, or lr<0.1 and state=finished")
            self._text.on_value_change(self.refresh).props("dense clearable debounce=300").classes("filter")
            self._sort = ui.select(_FACTS, label="Sort by", on_change=self.refresh).props("dense options-dense")
            self._columns = ui.select([], label="Columns", multiple=True, on_change=self.refresh)
            self._columns.props("dense options-dense").classes("pick")
            self._archived = ui.checkbox("archived", on_change=self.refresh).props("dense")
        self._problem = ui.label().classes("problem").props("role=status")

    # ---- actions of the user

    async def _tick(self) -> None:
        folders = {key: folder for folder, key in self._ids.items()}
        try:
            rows = await self._grid.run_grid_method("getSelectedRows", timeout=_GONE_S)
        except TimeoutError:  # the browser has lost its connection
            return
        shown = {entry.run.folder for entry in self._desk.view.table.entries}
        chosen = {folders[row["id"]] for row in rows if row.get("id") in folders}
        self._ticked = (self._ticked or set()) - shown | chosen  # runs that the filter hides keep their ticks
        if len(self._ticked) > MOST_DRAWN:
            ui.notify(f"The first {MOST_DRAWN} of {len(self._ticked):,} runs are drawn.")
        self._choose()
        if self._panel is not None:
            await self._panel.refresh()

    def _choose(self) -> None:
        ticked = self._ticked or ()
        self._desk.chosen = [entry for entry in self._desk.view.table.entries if entry.run.folder in ticked]

    async def _change_tab(self) -> None:
        if self._panel is not None:
            self._panel.stop()
        self._panel = None
        await self._show_panel()

    # ---- refreshing the page by a timer

    async def _refresh(self) -> None:
        await self._show(await self._read())

    async def _read(self) -> SweepTable | None:
        wish = Wish(self._text.value or "", self._sort.value, (*self._columns.value,), bool(self._archived.value))
        try:
            view = await in_thread(self._desk.sweep.view, wish)
        except UsageError as error:
            self._problem.set_text(clean(str(error)))
            return None
        self._problem.set_text("")
        return view

    async def _show(self, view: SweepTable | None) -> None:
        if view is None:
            return
        self._desk.view = view
        entries = view.table.entries
        self._counts.set_text(view.table.summary(told=True)[0])
        names = {name: clean(name, "") for name in (*view.metrics, *view.params)}
        if self._shown.changed("names", names):
            self._sort.set_options({**names, **_FACTS}, value=view.sort)
            self._columns.set_options(names, value=[name for name in self._columns.value or () if name in names])
        if self._ticked is None and entries:
            self._ticked = {entry.run.folder for entry in (entries if len(entries) <= _FIRST else entries[:_FEW])}
        self._choose()
        self._show_summary()
        self._show_rows()
        await self._show_panel()

    def _show_summary(self) -> None:
        facts = _summary(self._desk)
        if self._shown.changed("summary", facts):
            self._summary.clear()
            with self._summary:
                for title, lines in facts:
                    with box("fact"):
                        with box("name", "dt"):
                            ui.label(title)
                        with box("value", "dd"):
                            for line in lines:
                                ui.label(clean(line))

    def _show_rows(self) -> None:
        columns, rows = self._cells()
        is_other, is_new = self._shown.changed("columns", columns), self._shown.changed("rows", rows)
        ticked = {self._ids[folder] for folder in self._ticked or ()}
        rows = [{**row, "ticked": row["id"] in ticked} for row in rows]
        if is_other:
            self._grid.run_grid_method("setGridOption", "columnDefs", columns)
        if is_new or is_other:
            self._grid.run_grid_method("setGridOption", "rowData", rows)

    def _cells(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the grid's columns and rows; each cell has a text and the value by which its column is sorted."""
        table = self._desk.view.table
        metric = next(iter(table.metrics), None)
        best = next(iter(metric.rank(table.entries)), None) if metric else None
        columns = table.columns(lambda said: ago(datetime.fromisoformat(said).timestamp()))
        columns.sort(key=lambda column: column.rank if column.rank <= _ALWAYS else _ALWAYS + 1)
        defs = [
            {"field": f"v{place}", "headerName": clean(column.header, "")[:60], **_looks(place, column)}
            for place, column in enumerate(columns)
        ]
        rows = []
        for place, entry in enumerate(table.entries):
            row: dict[str, Any] = {"id": self._ids.setdefault(entry.run.folder, str(len(self._ids)))}
            row["best"] = entry is best
            for number_, column in enumerate(columns):
                text = clean(" ".join(column.cells[place].split()), "")[:_TEXT]
                row |= {f"c{number_}": text, f"v{number_}": _sorted_by(column.header, text, entry)}
            rows.append(row)
        return defs, rows

    async def _show_panel(self) -> None:
        if self._ticked is None:  # before the first reading there are no runs, so a panel could not choose a metric
            return
        if self._panel is None:
            self._panel = PANELS[str(self._tabs.value)](self._desk)
            self._details.clear()
            with self._details:
                self._panel.build()
        await self._panel.refresh()


def _looks(place: int, column: Any) -> dict[str, Any]:
    if place == 0:
        return {"pinned": "left", "maxWidth": 190, "tooltipField": "c0"}
    if column.header == "state":
        return {":cellClass": "p => 'state ' + p.value"}
    return {"type": "rightAligned"} if column.right else {"maxWidth": 320, "tooltipField": f"c{place}"}


def _sorted_by(header_: str, text: str, entry: Entry) -> str | float | None:
    if header_ == "updated":
        return -entry.run.updated
    try:
        number_ = float(text.rstrip("* "))
    except ValueError:
        return text or None
    # A value of nan is unequal to itself, and would make the table count as changed at each refresh.
    return number_ if math.isfinite(number_) else None


def _summary(desk: Desk) -> list[tuple[str, list[str]]]:
    """Summarize the runs of the table: the best run, what differs, what went wrong, and what still runs."""
    table = desk.view.table
    _, *bests = table.summary(told=True)
    metric, seed, mean_of = desk.metric(), desk.seed(), list[str]()
    if metric is not None and seed and len(rows := means(table.entries, metric, seed)) > 1:
        (name, mean, least, greatest, count), after = rows[0], rows[1]
        span = f"{number(mean)} over {clean(seed, '')} ({count} finished runs, {number(least)} to {number(greatest)})"
        mean_of.append(f"{name} with {span}, better by {number(abs(after[1] - mean))} than the next, {after[0]}")
    running = [entry for entry in table.entries if entry.run.status.state in ("running", "starting")]
    wrong = [entry for entry in table.entries if _went_wrong(entry) and entry not in running]
    facts = [
        ("Best run (*)", [line.removeprefix("best (*) ") for line in bests] or ["no run has a metric yet"]),
        *([("Best mean", mean_of)] if mean_of else []),
        ("Differs", [_differs(table.entries, desk.view.params)]),
        ("Went wrong", _few([f"{entry.name}: {entry.run.status.state}: {entry.why}" for entry in wrong])),
        ("Still runs", _few([f"{entry.name}: {_doing(entry)}" for entry in running])),
    ]
    return [(title, lines or ["none"]) for title, lines in facts]


def _went_wrong(entry: Entry) -> bool:
    """Return True if a run did not finish, or finished with a metric that is not finite."""
    return bool(entry.bad if entry.run.status.state == "finished" else entry.why)


def _few(lines: Sequence[str]) -> list[str]:
    return [*(line[:_TEXT] for line in lines[:_TOLD]), *([f"and {len(lines) - _TOLD:,} more"] * (len(lines) > _TOLD))]


def _doing(entry: Entry) -> str:
    status = entry.run.status
    epoch = "" if status.epoch is None else f", epoch {status.epoch + 1:,}"
    return f"step {status.step or 0:,}{epoch}, {ago(entry.run.updated)}" + (f"; {entry.why}" if entry.why else "")


def _differs(entries: Sequence[Entry], params: Sequence[str]) -> str:
    said = []
    for key in params[:_FEW]:
        values: list[Any] = list(dict.fromkeys(entry.params[key] for entry in entries if key in entry.params))
        with suppress(TypeError):  # numbers and texts together cannot be sorted
            values.sort()
        shown = ", ".join(map(naming.value, values)) if len(values) <= _FEW else f"{len(values):,} values"
        said.append(f"{naming.short(key, params)}: {shown}")
    more = [f"and {len(params) - _FEW:,} more"] * (len(params) > _FEW)
    return " · ".join([*said, *more]) or "nothing"
