"""The page of a sweep: many runs in one table, compared with each other and over their seeds.

A page of `instep dashboard`.

- `source`: the runs and their table, read once for all open pages; the table is that of `instep runs ls`.
- `curves`: smoothing, and bands over runs that differ only in a seed; `plots`: options of ECharts plots of many runs.
- `beside`: two runs, line by line; `media`: pictures, tables and texts that a run logged; both as plain values.
- `panels`: the panels beside the table, one for each tab; `page`: the table and all around it, on NiceGUI.

Text of a run is not trusted, as in `instep.dashboard`: the page shows it as text only. The browser knows a row of the
table by a number, never by a path. Only `panels.Notes` writes: into `label.json`, for browsers that have the token.
"""

from typing import Any

__all__: list[str] = []  # internal: may change in any release


def define(source: Any) -> None:
    """Define the page, over the `Source` of the dashboard."""
    from instep.sweeps.page import define_page  # imported late, since it loads NiceGUI

    define_page(source)
