"""The page of a sweep: many runs as one table, against each other, over their seeds. A page of `instep dashboard`.

- `source`: the runs and their table, read once for all open pages; the table is that of `instep runs ls`.
- `curves`: smoothing, and bands over runs that differ in a seed alone; `plots`: options of ECharts plots of many runs.
- `beside`: two runs, line by line; `media`: pictures, tables and texts that a run logged; both as plain values.
- `panels`: what stands beside the table, a panel for each tab; `page`: the table and all around it, on NiceGUI.

Text of a run is a stranger's, as in `instep.dashboard`: it reaches the page as text alone. A row of the table is known
to the browser by a number, never by a path. Only `panels.Notes` writes, into `label.json`, for who has the token.
"""

from typing import Any

__all__: list[str] = []  # internal: may change in any release


def define(source: Any) -> None:
    """Define the page, over the `Source` of the dashboard."""
    from instep.sweeps.page import define_page  # late: it loads NiceGUI, which the server has checked for

    define_page(source)
