"""Plots of hyperparameters against a metric, with a mark for each run.

This module chooses all keys of the ECharts options, so that none comes from a run: the browser would run the value of a
key that begins with ":" as code.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from instep.dashboard.chart import COLOURS, LABEL, LINE, TOOLTIP, shown
from instep.runs.entries import Entry
from instep.runs.naming import short, value
from instep.runs.table import Metric

FAILED = "#d23f57"
_SCALE = ["#2e9e6b", "#c9a227", "#8a63d2"]  # colors, from the color of the best run to that of the worst
_MOST_AXES = 9
_MISSING = "-"  # text that ECharts takes for a missing value
_FEW = 8
_DECADES = 30.0  # positive numbers get a logarithmic axis if the largest is at least this many times the smallest


def parallel(entries: Sequence[Entry], params: Sequence[str], metric: Metric) -> dict[str, Any]:
    """Return the options of a plot in which each run is a line through its hyperparameters and its best value.

    The best run is thick. Runs without a best value are dotted, and end at the last hyperparameter.
    """
    keys = list(params)[:_MOST_AXES]
    bests = [_best(entry, metric) for entry in entries]
    scales = [_scaled([entry.params.get(key) for entry in entries], _FEW) for key in keys] + [_scaled(bests)]
    names = [*(short(key, keys) for key in keys), f"{metric.title} {metric.name}"]
    axes = [
        {"dim": dim, "name": _cut(name), **axis}
        for dim, (name, (axis, _)) in enumerate(zip(names, scales, strict=True))
    ]
    rows = [
        {"name": _cut(entry.name), "value": list(of)}
        for entry, *of in zip(entries, *(column for _, column in scales), strict=True)
    ]
    has = [row for row, best in zip(rows, bests, strict=True) if best is not None]
    lacks = [row for row, best in zip(rows, bests, strict=True) if best is None]
    top = (max if metric.greatest else min)((row["value"][-1] for row in has), default=None)
    known = [row["value"][-1] for row in has]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    style: dict[str, Any] = {"type": "parallel", "smooth": 0.15, "lineStyle": {"width": 1.6, "opacity": 0.75}}
    return {
        "animation": False,
        "parallel": {"left": 34, "right": 58, "top": 44, "bottom": 40},
        "parallelAxis": [
            {**axis, "nameTextStyle": LABEL, "axisLabel": LABEL, "nameTruncateLength": 18} for axis in axes
        ],
        "visualMap": {
            "show": False,
            "seriesIndex": 0,
            "dimension": len(keys),
            "min": low,
            "max": high,
            "inRange": {"color": _SCALE[::-1] if metric.greatest else _SCALE},
        },
        "series": [
            {**style, "data": [row for row in has if row["value"][-1] != top]},
            {**style, "data": lacks, "lineStyle": {"color": FAILED, "type": "dotted", "width": 1.6}},
            {
                **style,
                "data": [row for row in has if row["value"][-1] == top],
                "lineStyle": {"color": COLOURS[0], "width": 4, "opacity": 1},
            },
        ],
        "tooltip": {**TOOLTIP},
    }


def scatter(entries: Sequence[Entry], across: str, metric: Metric, chosen: Collection[Path]) -> dict[str, Any]:
    """Return the options of a plot with a point for each run: x is a hyperparameter or metric, y the best value."""
    there = [
        (entry, x, best)
        for entry in entries
        if (x := entry.params.get(across, _last(entry, across))) is not None
        and (best := _best(entry, metric)) is not None
    ]
    over, xs = _scaled([x for _, x, _ in there])
    up, ys = _scaled([best for *_, best in there])
    points: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for (entry, *_), x, y in zip(there, xs, ys, strict=True):
        points[entry.run.folder in chosen].append({"name": _cut(entry.name), "value": [x, y]})
    grown = {"splitLine": LINE, "nameTextStyle": LABEL, "nameLocation": "middle", "axisLabel": LABEL}
    named = ((True, "chosen", COLOURS[0]), (False, "not chosen", "#8590a2"))
    return {
        "animation": False,
        "grid": {"left": 66, "right": 18, "top": 30, "bottom": 62},
        "legend": {"top": 0, "textStyle": LABEL, "itemHeight": 8},
        "xAxis": {**over, **grown, "name": _cut(across), "nameGap": 28},
        "yAxis": {**up, **grown, "name": _cut(f"{metric.title} {metric.name}"), "nameGap": 50},
        "series": [
            {"type": "scatter", "name": name, "color": colour, "symbolSize": 10, "data": points[is_chosen]}
            for is_chosen, name, colour in named
        ],
        "tooltip": {"trigger": "item", **TOOLTIP},
    }


def _best(entry: Entry, metric: Metric) -> float | None:
    best = metric.best(entry)
    return None if best is None else best[0]


def _last(entry: Entry, metric: str) -> float | None:
    ends = entry.ends.get(metric)
    return ends.last if ends is not None and math.isfinite(ends.last) else None


def _scaled(column: Sequence[Any], few: int = 0) -> tuple[dict[str, Any], list[Any]]:
    """Choose an axis for values, and convert the values for it; numbers far apart get a logarithmic axis.

    Texts have equal distances on the axis; so have numbers, if there are at most `few` different ones.
    """
    there = [each for each in column if each is not None]
    numbers = all(type(each) in (int, float) and math.isfinite(each) and abs(each) < 2**53 for each in there)
    if not numbers or len(set(there)) <= few:
        order = sorted(set(there)) if numbers else there
        # ECharts needs texts here, since it would read a number as a position.
        texts = [_MISSING if each is None else _cut(value(each)) for each in column]
        return {"type": "category", "data": list(dict.fromkeys(_cut(value(each)) for each in order))}, texts
    plain = [_MISSING if each is None else each for each in column]
    if there and min(there) > 0 and max(there) / min(there) >= _DECADES:
        return {"type": "log"}, plain
    return {"type": "value", "scale": True}, plain


def _cut(text: str) -> str:
    return shown(text[:60])
