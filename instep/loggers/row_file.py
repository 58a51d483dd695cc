"""Base classes for loggers that write rows into one file, from which a resumed run removes rows it logs again."""

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
    """Output file with one row per record. A subclass defines the format, and adds the number of new rows to `rows`."""

    NAME: ClassVar[str]
    COUNTED: ClassVar[str]
    """Key of the number of rows in the logger's state dict."""

    def __init__(self) -> None:
        self.rows = 0
        # Rows that the file had when it was opened: the number up to the checkpoint, and the indices of later rows that
        # were kept.
        self._had: tuple[int, frozenset[int]] = 0, frozenset()

    @abstractmethod
    def parse(self, content: bytes) -> list[Any]:
        """Split the file's content, which ends with a complete line, into rows."""

    @abstractmethod
    def key(self, row: Any) -> RowKey:
        """Return step and names of a row; the step is infinite if another program has written the row."""

    @abstractmethod
    def replace(self, rows: list[Any]) -> None:
        """Replace the content of the file by these rows."""

    @abstractmethod
    def add(self, rows: list[Row]) -> None:
        """Append rows of metrics, either all or none."""

    def open(self, folder: Path, keep: int | None, last_step: float) -> None:
        """Open the file, and remove the rows that a resumed run does not keep.

        Args:
            folder: folder of the file.
            keep: number of rows that the file had at the checkpoint. None: keep all rows.
            last_step: step of the checkpoint. Rows after the first `keep` ones are kept if their step is not larger.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.rows, self.later_rows, self._had = 0, [], (0, frozenset())
        path = folder.absolute() / self.NAME
        self.appended = AppendedFile(path)  # raises an error now, before the first training step, if it cannot write
        with self.appended.turn():
            if path.stat().st_size:
                self._take_over(path, keep, last_step)

    def _take_over(self, path: Path, keep: int | None, last_step: float) -> None:
        # Accept only a regular file, since any program may have put something else at this path.
        with open_regular(path) as file:
            content = file.readall()
        whole = content[: content.rfind(b"\n") + 1]  # without an incomplete row that a killed process left
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
    """Base class of loggers that write each record as a row of one file, and hyperparameters into `hparams.yaml`."""

    NAME_HPARAMS_FILE = NAME
    _rows: RowFile  # a subclass sets this attribute, and `_file` to the same object
    # Arguments `keep` and `last_step` of `RowFile.open` at the next start.
    _keep: tuple[int | None, float] = None, -1

    @property
    def path(self) -> Path | None:
        """Path of the file; None before the logger is opened."""
        folder = self.delivery.log_dir
        return None if folder is None else folder / self._rows.NAME

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `Logger` and the number of rows in the file."""
        return {**super().state_dict(), self._rows.COUNTED: self._rows.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next start continue the file after the number of rows in this state."""
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
