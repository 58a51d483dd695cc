"""`CSVLogger`: write metrics as a table into `metrics.csv`, and hyperparameters into `hparams.yaml`."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from instep.loggers.appended import AppendedFile
from instep.loggers.backlog import Record, Row, RowKey
from instep.loggers.row_file import RowFile, RowFileLogger
from instep.types import PathLike
from instep.utils.checks import at_least


class CSVLogger(RowFileLogger):
    """Write metrics into `metrics.csv` of the run folder: one row per call of `log_metrics`, one column per metric.

    The first column is `step`; the cell of a metric that a call did not log is empty. Numbers are written so that
    reading them gives the same float64. New metrics get their columns at the next flush, by one rewrite of the
    file; until then their rows wait in the logger's queue. A resumed run appends to the file, after it has removed the
    rows of steps after its checkpoint, since it logs those steps again.

    Args:
        save_dir: parent folder of the run folders; the first logger with a `save_dir` chooses the run folder. None:
            write into the run folder.
        name: name of a folder below `save_dir`; used only with `save_dir`.
        version: number or name of the run's folder in `<save_dir>/<name>`; used only with `save_dir`. None: the next
            free number.
        prefix: text to put before every metric's name, joined by "-".
        flush_logs_every_n_steps: steps after which waiting rows are written to the file. They are also written when
            there are 500 of them, at a checkpoint and at the end of the run.
        **options: further arguments of `Logger`, such as `x_axis`.

    Raises:
        SettingError: `flush_logs_every_n_steps` is not a positive number.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     logger = CSVLogger(folder, version="first")
        ...     logger.log_metrics({"loss": 0.5}, step=1)
        ...     logger.log_metrics({"loss": 0.25, "accuracy": 1.0}, step=2)
        ...     logger.finalize()
        ...     print(Path(folder, "first", "metrics.csv").read_text())
        step,loss,accuracy
        1,0.5,
        2,0.25,1.0
        <BLANKLINE>
    """

    def __init__(
        self,
        save_dir: PathLike | None = None,
        name: str | None = None,
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
        **options: Any,
    ) -> None:
        super().__init__(save_dir, name, version, prefix, **options)
        check = at_least(1, "1 flushes at every step")
        self._rows = self._file = _Table(check("flush_logs_every_n_steps", flush_logs_every_n_steps))


class _Table(RowFile):
    """The CSV file of a logger, whose table may get new columns."""

    NAME, COUNTED = "metrics.csv", "rows"

    def __init__(self, flush_steps: int) -> None:
        super().__init__()
        self._flush_steps = flush_steps
        self._columns: dict[str, None] = {"step": None}
        self._columns_in_file = 0
        self._flushed_step: int | None = None

    def open(self, folder: Path, keep: int | None, last_step: float) -> None:
        self._columns, self._columns_in_file, self._flushed_step = {"step": None}, 0, None
        super().open(folder, keep, last_step)

    def parse(self, content: bytes) -> list[list[str]]:
        header, *rows = csv.reader(content.decode().splitlines(keepends=True)) if content else [[]]
        self._columns = dict.fromkeys(header) or {"step": None}
        self._columns_in_file = len(header)
        return rows

    def key(self, row: list[str]) -> RowKey:
        names = (name for name, cell in zip(list(self._columns)[1:], row[1:], strict=False) if cell)
        return RowKey(float(row[0] or 0), frozenset(names))

    def replace(self, rows: list[list[str]]) -> None:
        _write_table(self.opened, list(self._columns)[: self._columns_in_file], rows)

    def is_due(self, first: Record, last: Record) -> bool:
        if first.hook != "_log_metrics" or last.hook != "_log_metrics":
            return True
        flushed = first.args[1] if self._flushed_step is None else self._flushed_step
        return abs(last.args[1] - flushed) >= self._flush_steps

    def add(self, rows: list[Row]) -> None:
        # A metric called "step" replaces the global step: this is how Lightning's users choose their own x-axis.
        named: list[dict[str, float]] = [{"step": row.step, **row.metrics} for row in rows]
        with self.opened.turn() as changed:
            if changed:  # another logger has written to the same file
                self._read_columns()
            self._append(named)
        self.rows += len(rows)
        self._flushed_step = rows[-1].step

    def _append(self, named: list[dict[str, float]]) -> None:
        for row in named:
            if not row.keys() <= self._columns.keys():
                self._columns |= dict.fromkeys(row)
        columns = list(self._columns)
        if len(columns) > self._columns_in_file:
            _write_table(self.opened, columns, self._read()[1:])
            self._columns_in_file = len(columns)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([row.get(name, "") for name in columns] for row in named)
        self.opened.append(text.getvalue().encode())

    def _read(self) -> list[list[str]]:
        with self.opened.path.open(newline="", encoding="utf-8") as file:
            return list(csv.reader(file))

    def _read_columns(self) -> None:
        header, *rows = self._read() or [[]]
        self.rows = len(rows)
        self._columns = dict.fromkeys(header or ["step"]) | self._columns
        self._columns_in_file = len(header)


def _write_table(table: AppendedFile, header: list[str], rows: list[list[str]]) -> None:
    """Replace the file by a table atomically; rows with fewer cells than the header get empty cells."""
    with table.replacing() as part, part.open("w", newline="", encoding="utf-8") as file:
        if header:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(header)
            writer.writerows(row + [""] * (len(header) - len(row)) for row in rows)
