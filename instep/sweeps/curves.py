"""Curves of many runs, as numbers and as options of ECharts: smoothed, or as bands over runs with different seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from instep.dashboard import chart
from instep.dashboard.chart import COLOURS, shown
from instep.runs import Curve

POINTS = 200  # maximum number of steps at which the mean, least and greatest value of several runs are computed
_PLAIN = 8  # maximum number of names in a legend that does not scroll


@dataclass(frozen=True)
class PlotLine:
    """A line of a plot.

    Args:
        name: name of a run or of a group of runs.
        steps: steps of the points.
        values: values of the points, smoothed if the user asked for that.
        raw: the values before smoothing; empty if they are not smoothed.
        least: least value of the group's runs at each step; empty for a single run.
        greatest: greatest value of the group's runs at each step; empty for a single run.
    """

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    raw: Sequence[float] = ()
    least: Sequence[float] = field(default=())
    greatest: Sequence[float] = field(default=())


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential moving average of values, corrected for its bias to zero at the start.

    Args:
        values: finite numbers.
        weight: weight of the earlier values, from 0 (no smoothing) to below 1.

    Example:
        >>> smooth([1.0, 1.0, 4.0], 0.5)
        [1.0, 1.0, 2.7142857142857144]
    """
    average, share, out = 0.0, 0.0, []
    for value in values:
        average, share = weight * average + (1 - weight) * value, weight * share + 1 - weight
        out.append(average / share)
    return out


def line_of(name: str, curve: Curve, weight: float) -> PlotLine:
    """Return the line of a single run, smoothed with a weight."""
    values = smooth(curve.values, weight) if weight else curve.values
    return PlotLine(name, curve.steps, values, curve.values if weight else ())


def band_of(name: str, curves: Sequence[Curve], weight: float) -> PlotLine:
    """Return the mean of several runs at each step, with the least and the greatest value.

    The values are computed at up to 200 steps; between two points of a run, its value is interpolated. Before its first
    step and after its last step, a run does not count.
    """
    every = np.unique(np.concatenate([np.asarray(curve.steps) for curve in curves]))
    steps = every if len(every) <= POINTS else np.linspace(every[0], every[-1], POINTS)
    table = np.full((len(curves), len(steps)), math.nan)
    for row, curve in enumerate(curves):
        order = np.argsort(curve.steps, kind="stable")
        at, values = np.asarray(curve.steps)[order], np.asarray(curve.values)[order]
        values = np.asarray(smooth(values.tolist(), weight)) if weight else values
        inside = (steps >= at[0]) & (steps <= at[-1])
        table[row, inside] = np.interp(steps[inside], at, values)
    seen = ~np.isnan(table).all(0)
    steps, table = steps[seen], table[:, seen]
    least, mean, greatest = (of(table, 0).tolist() for of in (np.nanmin, np.nanmean, np.nanmax))
    return PlotLine(f"{name} ({len(curves)})", steps.tolist(), mean, (), least, greatest)


def options(lines: Mapping[str, Sequence[PlotLine]], log: bool) -> dict[str, Any]:
    """Return the options of plots for several metrics: a line for each run, a line with a band for each group of runs.

    Args:
        lines: lines of each metric.
        log: whether the axis of the values is logarithmic; values that are not above zero are then left out.
    """
    names = dict.fromkeys(line.name for each in lines.values() for line in each)
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    series = [
        part
        for index, each in enumerate(lines.values())
        for number, line in enumerate(each)
        for part in _series(line, colours[line.name], index, f"{index}-{number}", log)
    ]
    drawn = chart.options(dict.fromkeys(lines, ()), log)
    kind, data = "plain" if len(names) <= _PLAIN else "scroll", [shown(name[-60:]) for name in names]
    legend = {**drawn["legend"], "type": kind, "data": data}
    return {**drawn, "series": series, "legend": legend}


def draw(plot: Any, instead: Any, lines: Mapping[str, Sequence[PlotLine]], log: bool = False) -> None:
    """Draw lines into `plot`, an element of NiceGUI; if there are no lines, show the element `instead`."""
    chart.draw(plot, instead, options({name: each for name, each in lines.items() if each}, log), legend=50)


def _series(line: PlotLine, colour: str, index: int, key: str, log: bool) -> list[dict[str, Any]]:
    # The value comes first in a point, since ECharts stacks the first number if both axes are numbers.
    at = {"type": "line", "xAxisIndex": index, "yAxisIndex": index, "encode": {"x": 1, "y": 0}, "color": colour}
    at |= {"showSymbol": len(line.steps) < 3}
    quiet = {**at, "silent": True, "showSymbol": False, "tooltip": {"show": False}}
    found = []
    if line.least:
        rows = zip(line.steps, line.least, line.greatest, strict=True)
        inside = [row for row in rows if row[1] > 0 or not log]
        stacked = {**quiet, "stack": key, "stackStrategy": "all", "lineStyle": {"width": 0}}
        found += [
            {**stacked, "data": [[least, step] for step, least, _ in inside]},
            {**stacked, "data": [[top - least, step] for step, least, top in inside], "areaStyle": {"opacity": 0.18}},
        ]
    if line.raw:
        found.append({**quiet, "data": _points(line.steps, line.raw, log), "lineStyle": {"width": 1, "opacity": 0.25}})
    main = {"name": shown(line.name[-60:]), "data": _points(line.steps, line.values, log), "lineStyle": {"width": 1.7}}
    return [*found, {**at, **main, "emphasis": {"focus": "series"}}]


def _points(steps: Sequence[float], values: Sequence[float], log: bool) -> list[list[float]]:
    return [[value, step] for step, value in zip(steps, values, strict=True) if value > 0 or not log]
