"""A file of rows, from which a resumed run removes those after its checkpoint, and the base of loggers with one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from instep.loggers.appended import AppendedFile, OutputFile
from instep.loggers.backlog import Record, Row, RowKey
from instep.loggers.base import Logger
from instep.loggers.hparams import NAME, ensure_file, merge_file
from instep.utils.untrusted_files import open_regular


class RowFile(OutputFile, ABC):
    """File of rows, one for each record. A subclass knows the format, and counts the rows that it adds in `rows`."""

    NAME: ClassVar[str]
    COUNTED: ClassVar[str]
    """Name of the number of rows in the logger's state."""

    def __init__(self) -> None:
        self.rows = 0
        # Rows in the file at the start: the number of leading rows, and the later rows that were kept.
        self._had: tuple[int, frozenset[int]] = 0, frozenset()

    @abstractmethod
    def parse(self, content: bytes) -> list[Any]:
        """Parse whole lines as rows."""

    @abstractmethod
    def key(self, row: Any) -> RowKey:
        """Return the key of the record that became a row; a row of another program gets an infinite step."""

    @abstractmethod
    def replace(self, rows: list[Any]) -> None:
        """Replace the file with these rows."""

    @abstractmethod
    def add(self, rows: list[Row]) -> None:
        """Append rows of metrics: all, or none."""

    def open(self, folder: Path, keep: int | None, last_step: float) -> None:
        """Open the file, with the rows that a resumed run keeps.

        Args:
            folder: folder of the file.
            keep: number of rows that the file had at the checkpoint; None keeps all rows.
            last_step: step of the checkpoint. Later rows up to this step are kept too; the resumed run logs them again.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.rows, self.later_rows, self._had = 0, [], (0, frozenset())
        path = folder.absolute() / self.NAME
        self.appended = AppendedFile(path)  # raises before the first step if the folder cannot be written to
        with self.appended.turn():
            if path.stat().st_size:
                self._take_over(path, keep, last_step)

    def _take_over(self, path: Path, keep: int | None, last_step: float) -> None:
        # an earlier run may have left the path; anything but a regular file is refused
        with open_regular(path) as file:
            content = file.readall()
        whole = content[: content.rfind(b"\n") + 1]  # a process killed while writing leaves half a row
        rows = self.parse(whole)
        front = len(rows) if keep is None else keep
        keys = {i: self.key(row) for i, row in enumerate(rows) if i >= front}
        later = {i: key for i, key in keys.items() if key.step <= last_step}
        kept = [row for i, row in enumerate(rows) if i < front or i in later]
        if len(kept) < len(rows) or whole != content:
            self.replace(kept)
        self.rows, self.later_rows, self._had = len(kept), list(later.values()), (front, frozenset(later))

    def holds(self, record: Record) -> bool:
        front, others = self._had
        return record.row is not None and (record.row < front or record.row in others)

    def row_count(self) -> int | None:
        return None if self.appended is None or self.appended.is_shared else self.rows


class RowFileLogger(Logger):
    """Logger whose records become rows of one file in the run folder, beside `hparams.yaml`."""

    NAME_HPARAMS_FILE = NAME
    _rows: RowFile  # the subclass sets this attribute, and `_file` to the same object
    # Number of rows to keep, and the checkpoint's step. A user's own x-axis may have other rows.
    _keep: tuple[int | None, float] = None, -1

    @property
    def path(self) -> Path | None:
        """The file's path; None before the start."""
        folder = self.delivery.log_dir
        return None if folder is None else folder / self._rows.NAME

    def state_dict(self) -> dict[str, Any]:
        """Return the base's state, and the number of rows."""
        return {**super().state_dict(), self._rows.COUNTED: self._rows.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the row of this state."""
        counted = self._rows.COUNTED
        rows = state_dict.get(counted)
        if rows is not None and (type(rows) is not int or rows < 0):
            raise ValueError(f"{counted}={rows!r:.80}, where a number of {counted} is expected")
        super().load_state_dict(state_dict)
        self._keep = rows, state_dict.get("global_step", self.delivery.last_step)

    def _start(self) -> None:
        self._rows.open(self.delivery.folder, *self._keep)
        self._keep = None, -1

    def _log_rows(self, rows: list[Row]) -> None:
        self._rows.add(rows)

    def _log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None) -> None:
        merge_file(self.delivery.folder / NAME, params)
        if metrics:
            self._log_metrics(metrics, self.delivery.step)

    def _finalize(self, status: str) -> None:
        self._rows.opened.close()
        ensure_file(self.delivery.folder / NAME)
