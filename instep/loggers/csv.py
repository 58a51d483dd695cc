"""Metrics as a table in `metrics.csv`, hyperparameters in `hparams.yaml`."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from instep.loggers.appended import AppendedFile
from instep.loggers.backlog import Record, Row, RowKey
from instep.loggers.base import Logger
from instep.loggers.hparams import NAME, ensure_file, merge_file, move_file
from instep.types import PathLike
from instep.utils.checks import at_least
from instep.utils.untrusted_files import open_regular


class CSVLogger(Logger):
    """Writes metrics into `metrics.csv` of the run folder: one row per call, one column per metric.

    The first column is `step`; a cell that a call did not log is empty. Numbers are written so that reading them gives
    the same float64. A metric that appears later gets its column at the next flush, by one rewrite of the file, however
    many rows it comes in. Until then rows wait in the logger's queue. A resumed run appends: rows that were written
    after its checkpoint for later steps are removed first, since they are about to be written again.

    Args:
        save_dir: where run folders go; the first logger that has one decides. None: the run folder.
        name: with `save_dir`, the folder below it.
        version: with `save_dir`, the folder below that; see `Logger`.
        prefix: put before every metric's name, joined by "-".
        flush_logs_every_n_steps: rows go to the disk when the step has advanced by this many, when 500 wait, and at a
            checkpoint's and a run's end.
        **options: `x_axis` and the others of `Logger`.

    Raises:
        SettingError: `flush_logs_every_n_steps` is not a positive number.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> logger = CSVLogger()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     logger.start(folder)
        ...     logger.log_metrics({"loss": 0.5}, step=1)
        ...     logger.log_metrics({"loss": 0.25, "accuracy": 1.0}, step=2)
        ...     logger.finalize()
        ...     print((Path(folder) / "metrics.csv").read_text())
        step,loss,accuracy
        1,0.5,
        2,0.25,1.0
        <BLANKLINE>
    """

    NAME_HPARAMS_FILE = NAME
    _writers = frozenset({"_appended"})

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
        self._flush_steps = check("flush_logs_every_n_steps", flush_logs_every_n_steps)
        self._columns: dict[str, None] = {"step": None}
        self._columns_in_file = 0
        self._rows_in_file = 0
        self._rows_to_keep: int | None = None
        self._later_rows: list[RowKey] = []  # of what came after the checkpoint
        self._resumed_step = -1  # later rows go on from here; `_last_step` may be of a user's own axis
        self._flushed_step: int | None = None

    @property
    def path(self) -> Path | None:
        """The table's path; None before the start."""
        return None if self._log_dir is None else self._log_dir / "metrics.csv"

    def state_dict(self) -> dict[str, Any]:
        """Return the base's state, and the number of rows."""
        return {**super().state_dict(), "rows": self._rows_in_file}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue below the row of this state."""
        rows = state_dict.get("rows")
        if rows is not None and (type(rows) is not int or rows < 0):
            raise ValueError(f"rows={rows!r:.80}, where a number of rows is expected")
        super().load_state_dict(state_dict)
        self._rows_to_keep = rows
        self._resumed_step = state_dict.get("global_step", self._last_step)

    def _start(self) -> None:
        assert self._log_dir is not None
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._columns = {"step": None}
        self._columns_in_file = self._rows_in_file = 0
        self._later_rows = []
        self._had_rows, self._flushed_step = (0, frozenset()), None
        path = self._log_dir.absolute() / "metrics.csv"
        self._appended = AppendedFile(path)  # a folder that cannot be written is an error before the first step
        with self._appended.turn():
            if path.stat().st_size:
                self._take_over(path)
        self._rows_to_keep = None

    def _take_over(self, path: Path) -> None:
        assert self._appended is not None
        with open_regular(path) as file:  # the folder may be another's run that goes on
            text = file.readall().decode()
        whole = text[: text.rfind("\n") + 1]  # a process killed while writing leaves half a row
        header, *rows = csv.reader(whole.splitlines(keepends=True)) if whole else [[]]
        front, later = len(rows), dict[int, list[str]]()
        if self._rows_to_keep is not None:
            front = self._rows_to_keep
            later = {i: row for i, row in enumerate(rows) if i >= front and float(row[0] or 0) <= self._resumed_step}
            for row in later.values():
                names = (name for name, cell in zip(header[1:], row[1:], strict=False) if cell)
                self._later_rows.append(RowKey(float(row[0] or 0), frozenset(names)))
        kept = [*rows[:front], *later.values()]
        if len(kept) < len(rows) or whole != text:
            _write_table(self._appended, header, kept)
        self._columns = dict.fromkeys(header) or {"step": None}
        self._columns_in_file = len(header)
        self._rows_in_file = len(kept)
        self._had_rows = front, frozenset(later)

    def _kept_rows(self) -> list[RowKey]:
        return self._later_rows

    def _row_count(self) -> int | None:
        return None if self._appended is None or self._appended.is_shared else self._rows_in_file

    def _due(self, first: Record, last: Record) -> bool:
        if first.hook != "_log_metrics" or last.hook != "_log_metrics":
            return True
        flushed = first.args[1] if self._flushed_step is None else self._flushed_step
        return abs(last.args[1] - flushed) >= self._flush_steps

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self._log_rows([Row(metrics, step, self._now_s)])

    def _log_rows(self, rows: list[Row]) -> None:
        assert self._appended is not None
        # A metric called "step" wins: logging one is how users of other trainers choose their own x axis.
        named: list[dict[str, float]] = [{"step": row.step, **row.metrics} for row in rows]
        with self._appended.turn() as changed:
            if changed:  # by another logger of this folder
                self._read_columns(self._appended.path)
            self._add(self._appended, named)
        self._rows_in_file += len(rows)
        self._flushed_step = rows[-1].step

    def _add(self, file: AppendedFile, named: list[dict[str, float]]) -> None:
        for row in named:
            if not row.keys() <= self._columns.keys():
                self._columns |= dict.fromkeys(row)
        columns = list(self._columns)
        if len(columns) > self._columns_in_file:
            self._widen(file, columns)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([row.get(name, "") for name in columns] for row in named)
        file.append(text.getvalue().encode())

    def _read_columns(self, path: Path) -> None:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.reader(file)
            header = next(table, [])
            self._rows_in_file = sum(1 for _ in table)
        self._columns = dict.fromkeys(header or ["step"]) | self._columns
        self._columns_in_file = len(header)

    def _log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None) -> None:
        assert self._log_dir is not None
        merge_file(self._log_dir / NAME, params)
        if metrics:
            self._log_metrics(metrics, self._step)

    def _widen(self, file: AppendedFile, columns: list[str]) -> None:
        rows: list[list[str]] = []
        if self._columns_in_file:
            with file.path.open(newline="", encoding="utf-8") as table:
                rows = list(csv.reader(table))[1:]
        _write_table(file, columns, rows)
        self._columns_in_file = len(columns)

    def _finalize(self, status: str) -> None:
        assert self._log_dir is not None
        assert self._appended is not None
        self._appended.close()
        ensure_file(self._log_dir / NAME)

    def _take_along(self, earlier: Path) -> None:
        assert self._log_dir is not None
        move_file(earlier / NAME, self._log_dir)
        path = earlier / "metrics.csv"
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                step = row.pop("step")
                self._log_metrics({name: float(text) for name, text in row.items() if text}, int(float(step)))
        path.unlink()


def _write_table(table: AppendedFile, header: list[str], rows: list[list[str]]) -> None:
    """Replace the file by this table in one step; short rows are filled with empty cells."""
    with table.replacing() as part, part.open("w", newline="", encoding="utf-8") as file:
        if header:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(header)
            writer.writerows(row + [""] * (len(header) - len(row)) for row in rows)
