"""A page of `instep dashboard` for a sweep: many runs in one table, compared by settings, metrics and seeds.

- `source`: the runs and their table, read once for all open pages; `instep runs ls` prints the same table.
- `curves`: smoothing, and bands over runs that differ only in a seed; `plots`: options of ECharts plots of many runs.
- `beside`: two runs, compared line by line; `media`: pictures, tables and texts that a run logged. Both return plain
  values.
- `panels`: the panels beside the table, one for each tab; `page`: the whole page, with the table, on NiceGUI.

Text in a run folder is not trusted, as in `instep.dashboard`: the page shows it as text only. The browser knows a row
of the table by a number, never by a path. Only `panels.Notes` writes a file, `label.json`, and only for a browser that
has the dashboard's secret token.
"""

from typing import Any

__all__: list[str] = []  # this package is internal, and may change in any release


def define(source: Any) -> None:
    """Define the page of a sweep, with the `Source` that the dashboard's pages share."""
    from instep.sweeps.page import define_page  # imported late, since it loads NiceGUI

    define_page(source)
