"""Draw metrics of runs over the steps: in the terminal, as a picture, or as a page of HTML.

Without `--metrics` the first few of the newest run are drawn. A long curve keeps the least and the greatest value of
each of its parts, so a spike of one step is seen. A page of HTML needs no network.

Examples:
  instep runs plot instep_runs -m val_loss                       the newest runs, in the terminal
  instep runs plot a b -m loss,val_loss --log --out loss.png     also .svg and .pdf
  instep runs plot runs -m val_loss --x time --out runs.html     to zoom and read values
  instep runs plot run -m loss --json                            the points
"""

from __future__ import annotations

import argparse
import html
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from instep.cli import output
from instep.cli.runs.chosen import add_paths, find, titles
from instep.errors import UsageError
from instep.runs import Curve, Run
from instep.utils.imports import require
from instep.utils.untrusted_files import clean

_FEW = 4  # metrics that are drawn where none are named
_MOST = 1e100  # of what is drawn: a difference of two larger ones may be infinite
_PICTURES = (".png", ".svg", ".pdf")

Line = tuple[str, list[float], list[float]]  # a run's title, x, y


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_paths(parser, 8)
    parser.add_argument("-o", "--out", metavar="FILE", help=f"{', '.join(_PICTURES)} or .html, instead of the terminal")
    parser.add_argument("--x", choices=("step", "time"), default="step", help="time: hours since the first point")
    parser.add_argument("--log", action="store_true", help="a logarithmic y axis")
    parser.add_argument(
        "--points", type=int, default=1000, metavar="N", help="points of a curve, at most (default: 1000)"
    )


def run(args: argparse.Namespace) -> int:
    """Draw."""
    ending = Path(args.out).suffix.lower() if args.out else ""
    if args.out and ending not in (*_PICTURES, ".html"):
        raise UsageError(f"{args.out}: what kind of file? Its name ends with {', '.join(_PICTURES)} or .html")
    if not 10 <= args.points <= 100_000:
        raise UsageError(f"--points {args.points}: from 10 to 100000")
    runs = find(args.paths, args.limit)
    plots = _plots(runs, args)
    if args.json:
        lines = {name: {title: {"x": x, "y": y} for title, x, y in lines} for name, lines in plots.items()}
        output.say_json({"x": args.x, "metrics": lines})
    elif not args.out:
        for name, lines in plots.items():
            _draw_in_terminal(name, lines, args)
    else:
        draw = _draw_page if ending == ".html" else _draw_picture
        draw(plots, args)
        output.say(f"{output.count(len(plots), 'metric')} of {output.count(len(runs), 'run')}: {args.out}")
    return 0


def _plots(runs: Sequence[Run], args: argparse.Namespace) -> dict[str, list[Line]]:
    """Read the curves: by metric the runs that have it."""
    read = [run.metrics(args.metrics, args.points) for run in runs]
    for problem in (problem for metrics in read for problem in metrics.problems):
        sys.stderr.write(f"instep: {clean(problem)}\n")
    there = list(dict.fromkeys(name for metrics in read for name in metrics.curves))
    if absent := [name for name in args.metrics or () if name not in there]:
        known = ", ".join(list(runs[0].metrics(None, 10).curves)[:20]) or "none"
        raise UsageError(f"no run has a metric {absent[0]!r}; those of {runs[0].name} are: {known}")
    if not there:
        raise UsageError(f"there are no metrics in {', '.join(args.paths)}")
    there = [name for name in there if name != "epoch" or args.metrics] or there
    shown = args.metrics or there[:_FEW]
    if len(there) > len(shown):
        sys.stderr.write(f"instep: {len(there) - len(shown)} more: -m {','.join(map(clean, there[_FEW : _FEW + 8]))}\n")
    plots: dict[str, list[Line]] = {name: [] for name in shown}
    for title, metrics in zip(titles(runs), read, strict=True):
        for name in shown:
            if name in metrics.curves:
                x, y = _axis(metrics.curves[name], args.x, title)
                if args.log:
                    x, y = [a for a, b in zip(x, y, strict=True) if b > 1 / _MOST], [b for b in y if b > 1 / _MOST]
                if not args.json:
                    x, y = ([max(-_MOST, min(_MOST, value)) for value in axis] for axis in (x, y))
                if x:
                    plots[name].append((clean(title), x, y))
    return {clean(name): lines for name, lines in plots.items()}


def _axis(curve: Curve, kind: str, run: str) -> tuple[list[float], list[float]]:
    if kind == "step":
        return curve.steps, curve.values
    begin = curve.times[0] if curve.times else None
    if begin is None:
        raise UsageError(f"{run}: its logger keeps no times of {curve.name}; draw it without --x time")
    hours = [((time_s or begin) - begin) / 3600 for time_s in curve.times]
    return hours, curve.values


def _label(args: argparse.Namespace) -> str:
    return "step" if args.x == "step" else "hours"


def _draw_in_terminal(name: str, lines: list[Line], args: argparse.Namespace) -> None:
    plotext = require("plotext", extra="plots", purpose="instep runs plot in the terminal")
    colours = sys.stdout.isatty()
    figure = plotext.figure
    figure.clear()
    figure.plot_size(min(shutil.get_terminal_size((100, 24)).columns, 160), 18)
    figure.title(f"{'log10 of ' * args.log}{name} by {_label(args)}")
    marks = "abcdefghijklmnopqrstuvwxyz"
    for number, (title, x, y) in enumerate(lines):
        marker = {} if colours or len(lines) == 1 else {"marker": marks[number % len(marks)]}
        y = [math.log10(value) for value in y] if args.log else y  # its own scale fails on a flat curve
        signal = figure.signal(x, y, **marker).lines()
        figure.draw(signal.label(title) if colours and len(lines) > 1 else signal)
    drawn = figure.build().string()
    sys.stdout.write(f"{drawn if colours else plotext.uncolorize(drawn)}\n")
    if not colours and len(lines) > 1:
        output.say("  ".join(f"{marks[number % len(marks)]} {title}" for number, (title, *_) in enumerate(lines)))
    if not lines:
        output.say("(no finite point)")


def _draw_picture(plots: dict[str, list[Line]], args: argparse.Namespace) -> None:
    require("matplotlib", extra="plots", purpose="a picture of instep runs plot")
    from matplotlib.figure import Figure  # late: optional and slow; without pyplot no display is looked for

    figure = Figure(figsize=(8, 1 + 3.2 * len(plots)), layout="constrained")
    for axes, (name, lines) in zip(figure.subplots(len(plots), squeeze=False)[:, 0], plots.items(), strict=True):
        for title, x, y in lines:
            axes.plot(x, y, linewidth=1, label=_no_math(title))
        axes.set(title=_no_math(name), xlabel=_label(args), yscale="log" if args.log else "linear")
        axes.grid(alpha=0.3)
        if lines:
            axes.legend(fontsize="small")
    figure.savefig(args.out, dpi=120)


def _no_math(text: str) -> str:
    return text.replace("$", r"\$").lstrip("_")  # matplotlib reads TeX between dollars, and hides labels with "_"


def _draw_page(plots: dict[str, list[Line]], args: argparse.Namespace) -> None:
    subplots = require("plotly.subplots", extra="plots", purpose="a page of instep runs plot")
    names = [html.escape(name) for name in plots]
    figure = subplots.make_subplots(rows=len(plots), cols=1, subplot_titles=names)
    titles_seen: dict[str, int] = {}
    for row, lines in enumerate(plots.values(), 1):
        for title, x, y in lines:
            first = title not in titles_seen
            colour = _COLOURS[titles_seen.setdefault(title, len(titles_seen)) % len(_COLOURS)]
            figure.add_scatter(
                x=x,
                y=y,
                name=html.escape(title),
                legendgroup=title,
                showlegend=first,
                line={"color": colour, "width": 1.5},
                mode="lines" if len(x) > 1 else "markers",
                row=row,
                col=1,
            )
    figure.update_layout(
        height=140 + 320 * len(plots) + 22 * len(titles_seen),
        template="plotly_white",
        hovermode="x unified",
        legend={"orientation": "h", "y": 0.0, "yref": "container", "yanchor": "bottom"},
        margin={"l": 60, "r": 20, "b": 80 + 22 * len(titles_seen)},
    )
    figure.update_xaxes(title_text=_label(args))
    if args.log:
        figure.update_yaxes(type="log")
    page = figure.to_html(include_plotlyjs=True, config={"responsive": True})
    phone = '<head><meta name="viewport" content="width=device-width, initial-scale=1">'
    Path(args.out).write_text(page.replace("<head>", phone, 1), encoding="utf-8")


_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
