"""Metrics as a table in `metrics.csv`, hyperparameters in `hparams.yaml`."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from instep.loggers.base import Logger
from instep.loggers.hparams import NAME, ensure_file, merge_file, move_file
from instep.types import PathLike
from instep.utils.atomic import replacing
from instep.utils.checks import at_least
from instep.utils.untrusted_files import open_regular

_MOST_ROWS = 10_000  # in memory


class CSVLogger(Logger):
    """Writes metrics into `metrics.csv` of the run folder: one row per call, one column per metric.

    The first column is `step`; a cell that a call did not log is empty. Numbers are written so that reading them gives
    the same float64. A metric that appears later gets its column at the next flush, by one rewrite of the file, however
    many rows it comes in. A resumed run appends: rows that were written after its checkpoint for later steps are
    removed first, since they are about to be written again.

    Args:
        save_dir: where run folders go; the first logger that has one decides. None: the run folder.
        name: with `save_dir`, the folder below it.
        version: with `save_dir`, the folder below that; see `Logger`.
        prefix: put before every metric's name, joined by "-".
        flush_logs_every_n_steps: rows go to the disk when the step has advanced by this many, and at a checkpoint's
            and a run's end.
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
        self._rows: list[dict[str, float]] = []
        self._rows_in_file = 0
        self._rows_to_keep: int | None = None
        self._has: dict[str, int] = {}  # of what came after the checkpoint
        self._resumed_step = -1  # later rows go on from here; `_last_step` may be of a user's own axis
        self._flushed_step = -1

    @property
    def path(self) -> Path | None:
        """The table's path; None before the start."""
        return None if self._log_dir is None else self._log_dir / "metrics.csv"

    def state_dict(self) -> dict[str, Any]:
        """Return the base's state, and the number of rows."""
        return {**super().state_dict(), "rows": self._rows_in_file + len(self._rows)}

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
        path = self._log_dir / "metrics.csv"
        if path.exists():
            self._take_over(path)
        self._rows_to_keep = None
        path.open("a").close()  # a folder that cannot be written is an error before the first step

    def _take_over(self, path: Path) -> None:
        with open_regular(path) as file:  # the folder may be another's run that goes on
            text = file.readall().decode()
        whole = text[: text.rfind("\n") + 1]  # a process killed while writing leaves half a row
        table = list(csv.reader(whole.splitlines(keepends=True)))
        if not table:
            path.unlink()
            return
        header, rows = table[0], table[1:]
        kept = rows
        if self._rows_to_keep is not None:
            later = [row for row in rows[self._rows_to_keep :] if float(row[0] or 0) <= self._resumed_step]
            kept = rows[: self._rows_to_keep] + later
            for row in later:
                self._has |= {name: int(float(row[0])) for name, cell in zip(header, row, strict=False) if cell}
        if len(kept) < len(rows) or whole != text:
            _write_table(path, header, kept)
        self._columns = dict.fromkeys(header)
        self._columns_in_file = len(self._columns)
        self._rows_in_file = len(kept)

    def _delivered(self) -> dict[str, int]:
        return self._has

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        # A metric called "step" wins: logging one is how users of other trainers choose their own x axis.
        row: dict[str, float] = {"step": step, **metrics}
        self._rows.append(row)
        for name in row:
            if name not in self._columns:
                self._columns[name] = None
        if self._flushed_step < 0:
            self._flushed_step = step
        # By rows too, since a user's own axis may stand still.
        if abs(step - self._flushed_step) >= self._flush_steps or len(self._rows) >= _MOST_ROWS:
            self._flushed_step = step
            self._save()

    def _log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None) -> None:
        assert self._log_dir is not None
        merge_file(self._log_dir / NAME, params)
        if metrics:
            self._log_metrics(metrics, self._step)

    def _save(self) -> None:
        if not self._rows:
            return
        assert self._log_dir is not None
        columns = list(self._columns)
        if len(columns) > self._columns_in_file:
            self._widen(columns)
        with (self._log_dir / "metrics.csv").open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(
                [row.get(name, "") for name in columns] for row in self._rows
            )
        self._rows_in_file += len(self._rows)
        self._rows = []

    def _widen(self, columns: list[str]) -> None:
        assert self._log_dir is not None
        path = self._log_dir / "metrics.csv"
        rows: list[list[str]] = []
        if self._columns_in_file:
            with path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.reader(file))[1:]
        _write_table(path, columns, rows)
        self._columns_in_file = len(columns)

    def _finalize(self, status: str) -> None:
        self._save()
        assert self._log_dir is not None
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


def _write_table(path: Path, header: list[str], rows: list[list[str]]) -> None:
    """Replace the file by this table in one step; short rows are filled with empty cells."""
    with replacing(path, sync=False) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(row + [""] * (len(header) - len(row)) for row in rows)
