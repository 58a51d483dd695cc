"""The part of the page that shows one run, with a panel for each tab.

A thread reads the values; the page draws them if they changed.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from nicegui import ui

from instep.dashboard import chart
from instep.dashboard.source import Source, in_thread, look_at_machine
from instep.health.run_status import how_to_go_on
from instep.loggers.hparams import flatten
from instep.runs import Run
from instep.runs.facts import metric_rows
from instep.runs.folder import tail
from instep.runs.ranks import read_paces
from instep.utils.untrusted_files import clean

# upper limits of what is shown, since the run folder of another user may have much more
_LOG_LINES, _REPORTS, _ROWS, _TEXT = 200, 10, 2000, 2000
_STYLE = (Path(__file__).parent / "page.css").read_text()
_DEVICE = ("DeviceStatsMonitor.", "ThroughputMonitor.", "system/")
_HARDWARE = 6  # maximum number of plots of a run's hardware values; one GPU may have a hundred values


def box(classes: str, tag: str = "div") -> ui.element:
    """Make an HTML element with CSS classes of the page's own style."""
    return ui.element(tag).classes(classes)


class Shown(dict[str, Any]):
    """What a page shows at present: name of a part of the page -> the data in this part."""

    def changed(self, part: str, data: Any) -> bool:
        """Record what a part shows now, and return True if it has changed."""
        before, self[part] = self.get(part, ...), data
        return before != data


def header(folder: Path, links: Mapping[str, str]) -> ui.label:
    """Make the bar at the top of a page, with links to other pages; return the label for the number of runs."""
    ui.add_css(_STYLE)
    with box("top", "header"):
        ui.label("instep").classes("brand")
        with box("line", "nav"):
            for name, address in links.items():
                ui.link(name, address)
        ui.label(clean(str(folder))).classes("where")
        counts = ui.label().classes("quiet")
        dark = ui.button(icon="contrast", on_click=lambda: ui.run_javascript("Quasar.Dark.toggle()"))
        dark.props("flat dense round aria-label='light or dark'")
    return counts


def ago(then: float) -> str:
    """Format how long ago a time is.

    Example:
        >>> ago(time.time() - 125)
        '2 min ago'
    """
    age_s = max(0.0, time.time() - then)
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= seconds:
            return f"{age_s / seconds:.0f} {unit} ago"
    return "now"


class Panel:
    """Base of the panels that show one run.

    Args:
        source: source of the run's data.
        run: the run that the panel shows.
    """

    def __init__(self, source: Source, run: Run) -> None:
        self.source, self.run = source, run

    def read(self) -> Any:
        """Read the values that the panel shows, in a thread, as plain values that can be compared."""

    def build(self) -> None:
        """Make the elements of the panel."""

    def show(self, data: Any) -> None:
        """Show the values that were read."""


_FORMAT = {":format": "value => typeof value === 'number' ? value.toLocaleString('en') : value"}


_SAID = ("exit_code", "signal", "world_size", "strategy", "device", "host", "pid", "cwd", "checkpoint")


def _title(key: str) -> str:
    return key.replace("_", " ").capitalize()


def text_table(*columns: str) -> ui.table:
    """Make an empty table of texts with these columns; `fill` puts rows into it."""
    fields: Any = [
        {"name": str(index), "field": str(index), "label": label, "align": "left", "sortable": True, **_FORMAT}
        for index, label in enumerate(columns)
    ]
    table = ui.table(columns=fields, rows=[], row_key="row", pagination=20)
    return table.classes("table").props("flat dense wrap-cells hide-pagination")


def fill(table: ui.table, rows: Iterable[Sequence[Any]]) -> None:
    """Put rows into a table of texts."""
    found = [
        {"row": number, **{str(i): _text(cell) for i, cell in enumerate(row)}}
        for number, row in enumerate(islice(rows, _ROWS))
    ]
    table.props(remove="hide-pagination") if len(found) > 20 else table.props("hide-pagination")
    table.update_rows(found)


def _text(value: Any) -> str | float | int:
    if isinstance(value, bool) or value is None or not isinstance(value, int | float):
        return "" if value is None else clean(str(value))[:_TEXT]
    return value if isinstance(value, int) and abs(value) < 2**53 else f"{value:.6g}"


class Overview(Panel):
    """Panel of a run's state, the reason of its end, and its last metrics."""

    def read(self) -> Any:
        status, metrics = self.run.status, self.source.metrics(self.run)
        said, now = status.said, status.progress if status.state == "running" else {}
        facts = {
            "Cause": status.cause,
            "Step": status.step,
            "Epoch": None if status.epoch is None else status.epoch + 1,
            **{_title(key): now.get(key) for key in ("stage", "phase", "batch", "batches", "steps_per_s")},
            **{_title(key): said.get(key) for key in _SAID},
            "Goes on with": how_to_go_on(said) if status.state not in ("running", "finished") else None,
            "Command": shlex.join(map(str, command)) if isinstance(command := said.get("command"), list) else command,
            "Folder": str(self.run.folder),
            "Cannot be read": "\n".join([*self.run.problems, *metrics.problems]),
        }
        shown = [(name, str(_text(value))) for name, value in facts.items() if value not in (None, "")]
        return shown, [(name, last, points) for name, last, *_, points, _ in metric_rows(metrics)]

    def build(self) -> None:
        self._facts = box("facts")
        self._metrics = text_table("Metric", "Last value", "Points")

    def show(self, data: Any) -> None:
        facts, metrics = data
        self._facts.clear()
        with self._facts:
            for name, text in facts:
                ui.label(name).classes("name")
                ui.label(text).classes("value")
        fill(self._metrics, metrics)
        self._metrics.set_visibility(bool(metrics))


class Checkpoints(Panel):
    """Panel of a run's checkpoints, and of whether they are complete."""

    def read(self) -> Any:
        columns = ("step", "state", "kind", "score", "bytes", "created", "note", "name")
        return [[found.get(name) for name in columns] for found in self.source.checkpoints(self.run)]

    def build(self) -> None:
        with box("line"):
            ui.label("Only sizes are compared. Verify compares every byte with its checksum.").classes("quiet")
            self._button = ui.button("Verify", on_click=self._verify).props("flat dense no-caps")
        self._rows = text_table("Step", "State", "Kind", "Score", "MB", "Saved", "Note", "Name")

    async def _verify(self) -> None:
        self._button.props("loading")
        await in_thread(self.source.verify, self.run)
        self._button.props(remove="loading")
        self.show(await in_thread(self.read))

    def show(self, data: Any) -> None:
        fill(self._rows, ([*row[:4], f"{(row[4] or 0) / 1e6:,.1f}", *row[5:]] for row in data))


class Ranks(Panel):
    """Panel of the ranks that failed, hung or are slow."""

    def read(self) -> Any:
        failures = {failure["rank"]: failure for failure in self.run.status.failures}
        failed = [
            (rank, *(failures.get(rank, {}).get(key) for key in ("host", "step", "phase")), text)
            for rank, text in self.run.status.by_rank.items()
        ]
        reports = [(str(path.relative_to(self.run.folder)), tail(path, 400)) for path in self.run.reports()[:_REPORTS]]
        return failed, reports, read_paces(self.run.folder)

    def build(self) -> None:
        self._box = box("stack")

    def show(self, data: Any) -> None:
        failed, reports, paces = data
        self._box.clear()
        with self._box:
            if not failed and not reports:
                ui.label("No rank has reported a failure or a hang.").classes("quiet")
            if failed:
                fill(text_table("Rank", "Host", "Step", "Doing", "Failed with"), failed)
            if paces.ranks:
                with box("line"):
                    ui.label("Time of a step by rank").classes("title")
                    ui.label(f"measured {ago(paces.time_s)}").classes("quiet")
                rows = ((*row, "the others wait for it" if row[0] in paces.slow else "") for row in paces.ranks)
                fill(text_table("Rank", "Host", "Step (s)", "Own work (s)", "Data (s)", ""), rows)
            for name, text in reports:
                with ui.expansion(clean(name)).classes("report"):
                    ui.label(text).classes("log")


class Hardware(Panel):
    """Panel of the hardware of this machine now, and of the hardware values that the run logged."""

    def read(self) -> Any:
        curves = self.source.metrics(self.run).curves
        names = [name for name in curves if name.startswith(_DEVICE)][:_HARDWARE]
        return look_at_machine(self.source.folder), {name: curves[name] for name in names}

    def build(self) -> None:
        ui.label("This machine, now").classes("title")
        self._now = box("bars")
        ui.label("Logged by the run").classes("title")
        self._nothing = ui.label("Nothing yet: Trainer(callbacks=[DeviceStatsMonitor()]) logs it.").classes("quiet")
        self._chart = ui.echart({}).classes("plot")
        self._drawn = Shown()

    def show(self, data: Any) -> None:
        now, curves = data
        self._now.clear()
        with self._now:
            for name, part, text in now:
                with box("bar"):
                    ui.label(name).classes("name")
                    ui.linear_progress(min(1.0, part), show_value=False).props(f"rounded size=6px aria-label='{name}'")
                    ui.label(text).classes("quiet")
        if self._drawn.changed("curves", curves):
            drawn = {name.rpartition("/")[2]: [(self.run.name, 0, curve)] for name, curve in curves.items()}
            chart.draw(self._chart, self._nothing, chart.options(drawn))


_NO_LOG = "No log in the run folder. `instep launch --log-dir DIR` keeps what the ranks print."


class Log(Panel):
    """Panel of the last lines that the run printed, by default from the log file that was written last."""

    _chosen: str | None = None

    def read(self) -> Any:
        paths = {str(path.relative_to(self.run.folder)): path for path in self.run.logs()}
        name = self._chosen if self._chosen in paths else next(iter(paths), None)
        return sorted(paths), name, _NO_LOG if name is None else tail(paths[name], _LOG_LINES)

    def build(self) -> None:
        self._select = ui.select([], on_change=self._choose).props("dense options-dense borderless").classes("wide")
        self._output = ui.label().classes("log tall")

    async def _choose(self, event: Any) -> None:
        if self._shown != event.value:
            self._chosen = event.value
            self.show(await in_thread(self.read))

    def show(self, data: Any) -> None:
        names, self._shown, text = data
        self._select.set_options({name: clean(name) for name in names}, value=self._shown)
        self._select.set_visibility(bool(names))
        self._output.set_text(text)


class Hyperparameters(Panel):
    """Panel of the hyperparameters; a nested hyperparameter is shown under its full name."""

    def read(self) -> Any:
        return list(flatten(self.run.hparams).items())

    def build(self) -> None:
        self._rows = text_table("Name", "Value")

    def show(self, data: Any) -> None:
        fill(self._rows, data)


_ALL: tuple[type[Panel], ...] = (Overview, Checkpoints, Ranks, Hardware, Log, Hyperparameters)
PANELS = {panel.__name__: panel for panel in _ALL}
