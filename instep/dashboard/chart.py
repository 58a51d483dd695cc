"""Turn the curves of runs into the options of an ECharts plot.

Only this module sets the keys of the ECharts options: the browser runs the value of a key that begins with ":" as code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from instep.runs import Curve
from instep.utils.untrusted_files import clean

COLOURS = ("#3b7ddd", "#e07b39", "#2e9e6b", "#c2477f", "#8a63d2", "#b08d1e", "#1fa3b5", "#d6455d")
LABEL = {"color": "#8590a2", "fontSize": 11}  # a text color that is readable on light and on dark
LINE = {"lineStyle": {"color": "rgba(133, 144, 162, .18)"}}
TOOLTIP = {"renderMode": "richText", "confine": True}  # rich text is ECharts' own markup, never HTML
_PLOT, _TOP, _EACH = 195, 34, 259  # pixels: height of a plot, space above the first plot, height of a plot with labels


def options(
    curves: Mapping[str, Sequence[tuple[str, int, Curve]]], log: bool = False, by_time: bool = False
) -> dict[str, Any]:
    """Return the options of plots for several metrics, one below the other, with a line for each run.

    Args:
        curves: for each metric, a list of lines: the run's name, the number of its color, and its curve.
        log: whether the axis of the values is logarithmic.
        by_time: whether curves are drawn over the time of day instead of steps; points without a time are left out.
    """
    grids, titles, across, up, series = [], [], [], [], []
    for index, (metric, lines) in enumerate(curves.items()):
        top = _TOP + index * _EACH
        grids.append({"left": 58, "right": 14, "top": top, "height": _PLOT})
        titles.append({"text": shown(metric[:80]), "left": 8, "top": top - 26, "textStyle": {**LABEL, "fontSize": 13}})
        wide = {"min": "dataMin", "max": "dataMax", "splitLine": {"show": False}, "axisLine": LINE}
        across.append(_axis("time" if by_time else "value", index, **wide))
        up.append(_axis("log" if log else "value", index, scale=True, splitLine=LINE))
        series += [_line(name, colour, index, _points(curve, log, by_time)) for name, colour, curve in lines]
    return {
        "animation": False,
        "grid": grids,
        "title": titles,
        "xAxis": across,
        "yAxis": up,
        "series": series,
        "legend": {"type": "scroll", "bottom": 0, "itemWidth": 14, "itemHeight": 8, "icon": "rect", "textStyle": LABEL},
        "tooltip": {"trigger": "axis", **TOOLTIP},
        "axisPointer": {"link": [{"xAxisIndex": "all"}]},
    }


def shown(text: str) -> str:
    """Return untrusted text in a form that ECharts may draw, with added characters that are invisible.

    The added characters prevent two errors: a text such as `__proto__` breaks ECharts' cache of text widths, which is a
    JavaScript object with texts as keys; and in a tooltip, `{` may begin a style.
    """
    return clean(text, "").replace("{", "{\u200b") + "\u200b"


def draw(plot: Any, instead: Any, drawn: dict[str, Any], legend: int = 22) -> None:
    """Show a plot in NiceGUI's element, at the height that it needs; if it has no metric, show another element.

    Args:
        plot: NiceGUI's element for the plot.
        instead: element that is shown if there is no metric.
        drawn: options of the plot, from `options`.
        legend: height of the legend, in pixels.
    """
    count = len(drawn["grid"])
    plot.set_visibility(count > 0)
    instead.set_visibility(not count)
    plot.style(f"height: {count * _EACH + legend}px")
    plot.options.clear()
    plot.options.update(drawn)
    plot.update()


def _axis(kind: str, index: int, **more: Any) -> dict[str, Any]:
    return {"type": kind, "gridIndex": index, "axisLabel": {**LABEL, "hideOverlap": True}, **more}


def _line(name: str, colour: int, index: int, points: list[tuple[float, float]]) -> dict[str, Any]:
    ink = COLOURS[colour % len(COLOURS)]
    at = {"xAxisIndex": index, "yAxisIndex": index, "showSymbol": len(points) < 3, "emphasis": {"focus": "series"}}
    drawn = {"color": ink, "lineStyle": {"width": 1.6, "color": ink}}
    return {"type": "line", "name": shown(name[-60:]), "data": points, **at, **drawn}


def _points(curve: Curve, log: bool, by_time: bool) -> list[tuple[float, float]]:
    at = [None if time is None else time * 1000 for time in curve.times] if by_time else curve.steps
    pairs = zip(at, curve.values, strict=True)
    return [(x, value) for x, value in pairs if x is not None and (value > 0 or not log)]
