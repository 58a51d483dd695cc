"""The page: a list of runs, a plot of the picked runs, and the details of the open run."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from nicegui import ui

from instep.dashboard import chart
from instep.dashboard.details import PANELS, Panel, Shown, ago, box, header
from instep.dashboard.source import Source, in_thread
from instep.runs import Run
from instep.runs.entries import Entry, without_metrics
from instep.runs.status import STATES
from instep.runs.table import search
from instep.utils.untrusted_files import clean

PERIOD_S = 2.0
_ROWS = 12  # number of rows in the list, so that the size of the page does not grow with the number of runs
_MOST_PICKED, _MOST_METRICS = 8, 6


def define(source: Source, tensorboard: str, pages: Sequence[str]) -> None:
    """Define the page; each browser that opens it gets a page of its own.

    Args:
        source: source of the runs that the page shows.
        tensorboard: address of a TensorBoard, for a link.
        pages: names of further pages, for links.
    """
    links = {name: f"/{name.lower()}" for name in pages}

    @ui.page("/", title=f"{clean(source.folder.name)} - instep", reconnect_timeout=60.0)
    def home(run: str = "") -> None:
        LivePage(source, tensorboard, links, run).build()


class Refreshing:
    """Page that a timer or a click refreshes; only one refresh runs at a time, and at most one more waits."""

    def __init__(self) -> None:
        self._shown, self._turn, self._is_due = Shown(), asyncio.Lock(), False

    async def refresh(self) -> None:
        """Read the data again, and show what changed; a call during a refresh starts another refresh after it."""
        self._is_due = True
        if not self._turn.locked():
            async with self._turn:
                while self._is_due:
                    self._is_due = False
                    await self._refresh()

    async def _refresh(self) -> None:
        """Read the data again, and show what changed."""


class LivePage(Refreshing):
    """The page of one browser.

    Args:
        source: source of the runs that the page shows.
        tensorboard: address of a TensorBoard, for a link.
        links: addresses of further pages, by name.
        asked: name of the run that is open at first; the newest run if there is no run of this name.
    """

    def __init__(self, source: Source, tensorboard: str, links: Mapping[str, str], asked: str) -> None:
        self._source, self._tensorboard, self._links, self._asked = source, tensorboard, links, asked
        self._runs, self._names = list[Entry](), dict[Path, str]()
        self._open: Run | None = None
        self._picked: dict[Path, int] | None = None  # the picked runs, each with the index of its color
        self._metrics: list[str] | None = None
        self._panel: Panel | None = None
        super().__init__()

    def build(self) -> None:
        """Make the elements of the page; the first refresh fills them."""
        self._counts = header(self._source.folder, self._links)
        with box("sheet", "main"):
            with box("card side", "section"):
                self._build_list()
            with box("card", "section"):
                self._build_plot()
            with box("card", "section") as self._card:
                self._build_details()
        ui.timer(PERIOD_S, self.refresh)

    def _tell_tensorboard(self) -> ui.dialog:
        with ui.dialog() as dialog, box("card narrow"):
            ui.label("Images, histograms, graphs, profiles").classes("title")
            ui.label("TensorBoard shows them. Start it beside this page:").classes("quiet")
            ui.label(f"tensorboard --logdir {shlex.quote(clean(str(self._source.folder)))}").classes("log")
            ui.link(f"Open {self._tensorboard}", self._tensorboard, new_tab=True)
        return dialog

    def _build_list(self) -> None:
        with box("line"):
            self._text = ui.input(placeholder="Find runs", on_change=self._search).props("dense borderless clearable")
            self._state = ui.select(["all", *STATES], value="all", on_change=self._search)
            self._state.props("dense options-dense borderless")
        self._list = box("runs")
        self._page = ui.pagination(1, 1, on_change=self.refresh).props("max-pages=5 boundary-numbers size=sm")

    def _build_plot(self) -> None:
        with box("line"):
            self._chosen = ui.select([], multiple=True, with_input=True, label="Metrics", on_change=self._choose)
            self._chosen.props("dense options-dense borderless use-chips").classes("wide")
            self._log = ui.checkbox("log", on_change=self.refresh).props("dense")
            self._by_time = ui.checkbox("time", on_change=self.refresh).props("dense")
            ui.button("TensorBoard", on_click=self._tell_tensorboard().open).props("flat dense no-caps")
        self._plot = ui.echart({}).classes("plot")
        self._no_plot = ui.label("Reading ...").classes("quiet")

    def _build_details(self) -> None:
        with box("line"):
            self._name = ui.label().classes("title")
            self._chip = ui.label().classes("chip")
        self._tabs = ui.tabs(on_change=self._change_tab)
        with self._tabs.props("dense no-caps align=left inline-label outside-arrows"):
            for name in PANELS:
                ui.tab(name)
        self._reading = ui.spinner(size="sm").classes("reading")
        self._details = box("stack")
        self._tabs.set_value("Overview")

    # ---- actions of the user

    def _search(self) -> Any:
        self._page.value = 1
        return self.refresh()

    def _choose(self, event: Any) -> Any:
        self._metrics = list(event.value)[:_MOST_METRICS]
        return self.refresh()

    def _pick(self, run: Run, is_picked: bool) -> Any:
        assert self._picked is not None
        if is_picked:
            number = next((number for number in range(_MOST_PICKED) if number not in self._picked.values()), None)
            if number is None:
                ui.notify(f"The plot takes {_MOST_PICKED} runs: take another one out first.")
            else:
                self._picked[run.folder] = number
        else:
            self._picked.pop(run.folder, None)
        self._shown.pop("list", None)
        return self.refresh()

    def _select(self, run: Run) -> Any:
        self._open, self._panel = run, None
        # the address has the run's name, so that the page shows the same run after a reload
        ui.navigate.history.replace(f"/?{urlencode({'run': run.name})}")
        ui.run_javascript("if (innerWidth < 900) document.querySelectorAll('section')[2].scrollIntoView()")
        self._show_list()
        return self._show_details()

    def _change_tab(self) -> Any:
        self._panel = None
        return self._show_details()

    # ---- refreshing the page by a timer

    async def _refresh(self) -> None:
        self._runs = await in_thread(lambda: without_metrics(self._source.runs()))
        self._names = {entry.run.folder: entry.name for entry in self._runs}
        self._open_default()
        self._show_list()
        await asyncio.gather(self._show_details(), self._show_plot())

    def _open_default(self) -> None:
        by_folder = {entry.run.folder: entry.run for entry in self._runs}
        run = self._open or next((run for run in by_folder.values() if run.name == self._asked), None)
        self._open = by_folder.get(run.folder) if run else next(iter(by_folder.values()), None)
        if self._picked is None and self._runs:
            self._picked = {folder: number for number, folder in enumerate(list(by_folder)[:3])}

    def _show_list(self) -> None:
        found = search(self._runs, self._text.value or "", self._state.value)
        self._page.max = max(1, -(-len(found) // _ROWS))
        start = (min(self._page.value or 1, self._page.max) - 1) * _ROWS
        rows = [(run, ago(run.updated), run is self._open) for run in found[start : start + _ROWS]]
        running = sum(entry.run.status.state == "running" for entry in self._runs)
        self._counts.set_text(f"{len(self._runs):,} run{'s' * (len(self._runs) != 1)}, {running:,} running")
        self._page.set_visibility(self._page.max > 1)
        if not self._shown.changed("list", rows):
            return
        self._list.clear()
        with self._list:
            for run, age, is_open in rows:
                self._show_row(run, age, is_open)
            if not rows:
                ui.label("No runs yet." if not self._runs else "No run fits.").classes("quiet")

    def _show_row(self, run: Run, age: str, is_open: bool) -> None:
        number = (self._picked or {}).get(run.folder)
        with box("run open" if is_open else "run"):
            pick = ui.checkbox(value=number is not None, on_change=lambda event: self._pick(run, bool(event.value)))
            pick.props("dense aria-label='show in the plot'")
            if number is not None:
                pick.style(f"--run: {chart.COLOURS[number]}")
            with box("open-run", "button").on("click", lambda: self._select(run)):
                ui.label(self._names[run.folder]).classes("name")
                ui.label(run.status.cause[:200] or f"step {run.status.step or 0:,}").classes("cause")
            with box("right"):
                ui.label(run.status.state).classes(f"chip {run.status.state}")
                ui.label(age).classes("quiet")

    async def _show_details(self) -> None:
        run, tab = self._open, self._tabs.value
        self._card.set_visibility(run is not None)
        if run is None:
            return
        self._name.set_text(self._names[run.folder])
        self._chip.set_text(run.status.state)
        self._chip.classes(replace=f"chip {run.status.state}")
        panel = self._panel
        if panel is None:
            self._panel = panel = PANELS[str(tab)](self._source, run)
            self._shown.pop("panel", None)
            self._details.clear()
            self._reading.set_visibility(True)
            self._details.set_visibility(False)
            with self._details:
                panel.build()
        panel.run = run
        data = await in_thread(panel.read)
        if panel is self._panel and self._shown.changed("panel", data):
            panel.show(data)
            self._reading.set_visibility(False)
            self._details.set_visibility(True)

    async def _show_plot(self) -> None:
        colours, log, by_time = self._picked or {}, bool(self._log.value), bool(self._by_time.value)
        picked = [entry.run for entry in self._runs if entry.run.folder in colours]
        curves = [(run, (await in_thread(self._source.metrics, run)).curves) for run in picked]
        names = dict.fromkeys(name for _, found in curves for name in found)
        if self._metrics is None and names:
            self._metrics = sorted(names, key=lambda name: ("loss" not in name.lower(), name.startswith("epoch")))[:1]
        chosen = [name for name in self._metrics or () if name in names]
        if self._shown.changed("names", (list(names), chosen)):
            self._chosen.set_options({name: clean(name) for name in names}, value=chosen)
        drawn = {
            name: [(self._names[run.folder], colours[run.folder], of[name]) for run, of in curves if name in of]
            for name in chosen
        }
        if self._shown.changed("plot", (drawn, log, by_time)):
            self._no_plot.set_text("Pick runs in the list, and metrics above.")
            chart.draw(self._plot, self._no_plot, chart.options(drawn, log, by_time))
