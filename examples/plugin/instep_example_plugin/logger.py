"""A logger that writes a database file, `metrics.db`, in the run's folder."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path
from typing import Any

from instep import Logger


class SQLiteLogger(Logger):
    """Write metrics into a table of SQLite: one row for each value.

    The hooks below run in the logger's own thread, so a slow disk holds up no step.
    """

    def _start(self) -> None:
        folder = Path(str(self.log_dir))
        folder.mkdir(parents=True, exist_ok=True)
        self.database = sqlite3.connect(folder / "metrics.db", check_same_thread=False)
        self.database.execute("CREATE TABLE IF NOT EXISTS metrics (step, name, value, PRIMARY KEY (step, name))")

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        # A resumed run trains some steps again: REPLACE keeps one row of each.
        rows = [(step, name, value) for name, value in metrics.items()]
        with self.database:
            self.database.executemany("REPLACE INTO metrics VALUES (?, ?, ?)", rows)

    def _finalize(self, status: str) -> None:
        self.database.close()


def read(folder: str | Path) -> list[tuple[int, dict[str, float]]]:
    """Return the rows of a run's database: pairs of a step and one number by its name."""
    database = sqlite3.connect(Path(folder) / "metrics.db")
    rows: list[Any] = database.execute("SELECT step, name, value FROM metrics ORDER BY step").fetchall()
    database.close()
    # SQLite keeps NaN as NULL, which comes back as None.
    return [(step, {name: math.nan if value is None else value}) for step, name, value in rows]
