"""Curves as options of an ECharts plot. Keys are ours alone: a key that begins with ":" would be run by the browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from instep.runs import Curve
from instep.runs.status import clean

COLOURS = ("#3b7ddd", "#e07b39", "#2e9e6b", "#c2477f", "#8a63d2", "#b08d1e", "#1fa3b5", "#d6455d")
_INK, _LINE = "#8590a2", "rgba(133, 144, 162, .18)"  # readable on light and on dark
_HEIGHT, _TOP, _GAP = 190, 34, 44


def options(
    curves: Mapping[str, Sequence[tuple[str, int, Curve]]], log: bool = False, by_time: bool = False
) -> dict[str, Any]:
    """Draw metrics one below the other, with a line for each run.

    Args:
        curves: by metric: the run's name, the number of its colour, and the curve.
        log: the values on a logarithmic axis.
        by_time: over the time of day instead of steps, for curves that have it.
    """
    grids, titles, across, up, series = [], [], [], [], []
    label = {"color": _INK, "fontSize": 11}
    for index, (metric, lines) in enumerate(curves.items()):
        top = _TOP + index * (_HEIGHT + _GAP)
        grids.append({"left": 58, "right": 14, "top": top, "height": _HEIGHT - 20})
        titles.append({"text": clean(metric)[:80], "left": 8, "top": top - 26, "textStyle": {**label, "fontSize": 13}})
        across.append(
            {
                "type": "time" if by_time else "value",
                "gridIndex": index,
                "min": "dataMin",
                "max": "dataMax",
                "axisLabel": {**label, "hideOverlap": True},
                "axisLine": {"lineStyle": {"color": _LINE}},
                "splitLine": {"show": False},
            }
        )
        up.append(
            {
                "type": "log" if log else "value",
                "gridIndex": index,
                "scale": True,
                "axisLabel": {**label, "hideOverlap": True},
                "splitLine": {"lineStyle": {"color": _LINE}},
            }
        )
        for name, colour, curve in lines:
            colour = COLOURS[colour % len(COLOURS)]
            series.append(
                {
                    "type": "line",
                    "name": clean(name)[-60:],
                    "xAxisIndex": index,
                    "yAxisIndex": index,
                    "showSymbol": len(curve.steps) < 3,
                    "color": colour,
                    "lineStyle": {"width": 1.6, "color": colour},
                    "emphasis": {"focus": "series"},
                    "data": _points(curve, log, by_time),
                }
            )
    return {
        "animation": False,
        "backgroundColor": "transparent",
        "grid": grids,
        "title": titles,
        "xAxis": across,
        "yAxis": up,
        "series": series,
        "legend": {
            "type": "scroll",
            "bottom": 0,
            "icon": "roundRect",
            "itemWidth": 14,
            "itemHeight": 8,
            "textStyle": label,
        },
        "tooltip": {"trigger": "axis", "renderMode": "richText", "confine": True},
        "axisPointer": {"link": [{"xAxisIndex": "all"}]},
    }


def draw(plot: Any, drawn: dict[str, Any], count: int) -> None:
    """Put options into NiceGUI's element, high enough for so many metrics."""
    plot.style(f"height: {max(count, 1) * (_HEIGHT + _GAP) + 22}px")
    plot.options.clear()
    plot.options.update(drawn)
    plot.update()


def _points(curve: Curve, log: bool, by_time: bool) -> list[tuple[float, float]]:
    at = [None if time is None else time * 1000 for time in curve.times] if by_time else curve.steps
    pairs = zip(at, curve.values, strict=True)
    return [(x, value) for x, value in pairs if x is not None and (value > 0 or not log)]
