"""The base of loggers that write a file of rows, from which a resumed run takes back those after its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from instep.loggers.appended import AppendedFile
from instep.loggers.backlog import Row, RowKey
from instep.loggers.base import Logger
from instep.loggers.hparams import NAME, ensure_file, merge_file
from instep.utils.untrusted_files import open_regular


class RowFileLogger(Logger):
    """Logger whose records become rows of one file in the run folder, beside `hparams.yaml`.

    A subclass writes in `_log_rows`, adds what it wrote to `_rows_in_file`, and reads rows by the methods below.
    """

    NAME_HPARAMS_FILE = NAME
    _writers = frozenset({"_appended"})
    _FILE: ClassVar[str]
    _COUNTED: ClassVar[str]
    """What a row is called in the logger's state."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._rows_in_file = 0
        self._rows_to_keep: int | None = None
        self._later_rows: list[RowKey] = []  # of what came after the checkpoint
        self._resumed_step = -1  # later rows go on from here; `_last_step` may be of a user's own axis

    @property
    def path(self) -> Path | None:
        """The file's path; None before the start."""
        return None if self._log_dir is None else self._log_dir / self._FILE

    def state_dict(self) -> dict[str, Any]:
        """Return the base's state, and the number of rows."""
        return {**super().state_dict(), self._COUNTED: self._rows_in_file}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue below the row of this state."""
        rows = state_dict.get(self._COUNTED)
        if rows is not None and (type(rows) is not int or rows < 0):
            raise ValueError(f"{self._COUNTED}={rows!r:.80}, where a number of {self._COUNTED} is expected")
        super().load_state_dict(state_dict)
        self._rows_to_keep = rows
        self._resumed_step = state_dict.get("global_step", self._last_step)

    # ---- what a subclass has

    def _parse(self, content: bytes) -> list[Any]:
        """Return the rows of whole lines."""
        raise NotImplementedError

    def _step_of(self, row: Any) -> float:
        """Return the step of a row."""
        raise NotImplementedError

    def _key_of(self, row: Any) -> RowKey:
        """Return the key of the record that became a row."""
        raise NotImplementedError

    def _replace(self, rows: list[Any]) -> None:
        """Write the file anew with these rows."""
        raise NotImplementedError

    # ---- the file

    def _start(self) -> None:
        assert self._log_dir is not None
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._rows_in_file, self._later_rows, self._had_rows = 0, [], (0, frozenset())
        path = self._log_dir.absolute() / self._FILE
        self._appended = AppendedFile(path)  # a folder that cannot be written is an error before the first step
        with self._appended.turn():
            if path.stat().st_size:
                self._take_over(path)
        self._rows_to_keep = None

    def _take_over(self, path: Path) -> None:
        with open_regular(path) as file:  # the folder may be another's run that goes on
            content = file.readall()
        whole = content[: content.rfind(b"\n") + 1]  # a process killed while writing leaves half a row
        rows = self._parse(whole)
        front, later = len(rows), dict[int, Any]()
        if self._rows_to_keep is not None:
            front = self._rows_to_keep
            later = {i: row for i, row in enumerate(rows) if i >= front and self._step_of(row) <= self._resumed_step}
            self._later_rows = [self._key_of(row) for row in later.values()]
        kept = [*rows[:front], *later.values()]
        if len(kept) < len(rows) or whole != content:
            self._replace(kept)
        self._rows_in_file = len(kept)
        self._had_rows = front, frozenset(later)

    def _kept_rows(self) -> list[RowKey]:
        return self._later_rows

    def _row_count(self) -> int | None:
        return None if self._appended is None or self._appended.is_shared else self._rows_in_file

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self._log_rows([Row(metrics, step, self._now_s)])

    def _log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None) -> None:
        assert self._log_dir is not None
        merge_file(self._log_dir / NAME, params)
        if metrics:
            self._log_metrics(metrics, self._step)

    def _finalize(self, status: str) -> None:
        assert self._log_dir is not None
        assert self._appended is not None
        self._appended.close()
        ensure_file(self._log_dir / NAME)
