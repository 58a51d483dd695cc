"""Everything that is logged as lines of JSON in `metrics.jsonl`; pictures and sounds as files beside it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.loggers.appended import AppendedFile, check_no_link
from instep.loggers.backlog import Row, RowKey
from instep.loggers.base import Logger
from instep.loggers.hparams import NAME, ensure_file, merge_file, move_file
from instep.types import PathLike
from instep.utils.atomic import replace
from instep.utils.untrusted_files import open_regular

if TYPE_CHECKING:
    from instep.loggers.kinds import Audio, Histogram, Image, Table, Video

FILE = "metrics.jsonl"


class JSONLinesLogger(Logger):
    """Writes one line of JSON for each call into `metrics.jsonl` of the run folder, as soon as it comes.

    A line of metrics is `{"step": 50, "time": 1763900000.0, "loss": 0.5}`: the place on the x-axis, seconds since 1970,
    and the numbers, exact; what is not finite is the text "NaN", "Infinity" or "-Infinity". Anything else has a kind:
    `{"step": 50, "time": ..., "kind": "text", "name": "sample", "value": "Once"}`; of pictures, sounds and videos the
    value is a list of files in `media/`. Hyperparameters stand in `hparams.yaml`. A resumed run appends: lines that
    were written after its checkpoint for later steps are removed first, since they are about to be written again.

    Args:
        save_dir: where run folders go; the first logger that has one decides. None: the run folder.
        name: with `save_dir`, the folder below it.
        version: with `save_dir`, the folder below that; see `Logger`.
        **options: `prefix`, `x_axis` and the others of `Logger`.

    Example:
        >>> import json
        >>> import tempfile
        >>> from pathlib import Path
        >>> logger = JSONLinesLogger()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     logger.start(folder)
        ...     logger.log_metrics({"loss": 0.5}, step=1)
        ...     logger.finalize()
        ...     json.loads((Path(folder) / "metrics.jsonl").read_text())["loss"]
        0.5
    """

    _writers = frozenset({"_appended"})

    NAME_HPARAMS_FILE = NAME

    def __init__(
        self,
        save_dir: PathLike | None = None,
        name: str | None = None,
        version: int | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(save_dir, name, version, **options)
        self._lines = 0
        self._lines_to_keep: int | None = None
        self._later_rows: list[RowKey] = []  # of what came after the checkpoint
        self._resumed_step = -1

    @property
    def path(self) -> Path | None:
        """The file's path; None before the start."""
        return None if self._log_dir is None else self._log_dir / FILE

    def state_dict(self) -> dict[str, Any]:
        """Return the base's state, and the number of lines."""
        return {**super().state_dict(), "lines": self._lines}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue below the line of this state."""
        lines = state_dict.get("lines")
        if lines is not None and (type(lines) is not int or lines < 0):
            raise ValueError(f"lines={lines!r:.80}, where a number of lines is expected")
        super().load_state_dict(state_dict)
        self._lines_to_keep = lines
        self._resumed_step = state_dict.get("global_step", self._last_step)

    def _start(self) -> None:
        assert self._log_dir is not None
        self._log_dir.mkdir(parents=True, exist_ok=True)
        path, self._lines = self._log_dir.absolute() / FILE, 0
        self._had_rows, self._later_rows = (0, frozenset()), []
        self._appended = AppendedFile(path)
        with self._appended.turn():
            if path.stat().st_size:
                self._take_over(path)
        self._lines_to_keep = None

    def _take_over(self, path: Path) -> None:
        assert self._appended is not None
        with open_regular(path) as file:  # the folder may be another's run that goes on
            content = file.readall()
        whole = content[: content.rfind(b"\n") + 1]  # a process killed while writing leaves half a line
        lines = whole.splitlines(keepends=True)
        front, later = len(lines), dict[int, bytes]()
        if self._lines_to_keep is not None:
            front = self._lines_to_keep
            later = {i: line for i, line in enumerate(lines) if i >= front and _step(line) <= self._resumed_step}
            self._later_rows = [_key(line) for line in later.values()]
        kept = [*lines[:front], *later.values()]
        if len(kept) < len(lines) or whole != content:
            with self._appended.replacing() as part:
                part.write_bytes(b"".join(kept))
        self._lines = len(kept)
        self._had_rows = front, frozenset(later)

    def _kept_rows(self) -> list[RowKey]:
        return self._later_rows

    def _row_count(self) -> int | None:
        return None if self._appended is None or self._appended.is_shared else self._lines

    def _write(self, step: int, values: dict[str, Any]) -> None:
        self._append([(step, self._now_s, values)])

    def _append(self, rows: list[tuple[int, float, dict[str, Any]]]) -> None:
        assert self._appended is not None
        lines = [
            json.dumps({"step": step, "time": round(time_s, 3), **values}, ensure_ascii=False) + "\n"
            for step, time_s, values in rows
        ]
        with self._appended.turn():
            self._appended.append("".join(lines).encode("utf-8", "backslashreplace"))  # half a surrogate, as in JSON
        self._lines += len(rows)

    def _log_rows(self, rows: list[Row]) -> None:
        # A metric called "step" wins: logging one is how users of other trainers choose their own x axis.
        self._append(
            [(row.step, row.time_s, {name: _number(value) for name, value in row.metrics.items()}) for row in rows]
        )

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self._log_rows([Row(metrics, step, self._now_s)])

    def _log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None) -> None:
        assert self._log_dir is not None
        merge_file(self._log_dir / NAME, params)
        if metrics:
            self._log_metrics(metrics, self._step)

    def _log_text(self, name: str, text: str, step: int) -> None:
        self._write(step, {"kind": "text", "name": name, "value": text})

    def _log_image(self, name: str, images: list[Image], step: int) -> None:
        self._keep("image", name, [image.png() for image in images], "png", step)

    def _log_audio(self, name: str, audios: list[Audio], step: int) -> None:
        self._keep("audio", name, [audio.wav() for audio in audios], "wav", step)

    def _log_video(self, name: str, videos: list[Video], step: int) -> None:
        self._keep("video", name, [video.gif() for video in videos], "gif", step)

    def _log_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        value = {"counts": histogram.counts.tolist(), "edges": histogram.edges.tolist()}
        self._write(step, {"kind": "histogram", "name": name, "value": value})

    def _log_table(self, name: str, table: Table, step: int) -> None:
        rows = [[_number(cell) if isinstance(cell, float) else cell for cell in row] for row in table.rows]
        self._write(step, {"kind": "table", "name": name, "value": {"columns": table.columns, "rows": rows}})

    def _keep(self, kind: str, name: str, contents: list[bytes], suffix: str, step: int) -> None:
        assert self._log_dir is not None
        folder = self._log_dir / "media"
        check_no_link(folder)
        folder.mkdir(exist_ok=True)
        stem = f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)[:80]}-{step}"
        files = [folder / f"{stem}-{i}.{suffix}" for i in range(len(contents))]
        for file, content in zip(files, contents, strict=True):
            replace(file, content)
        self._write(step, {"kind": kind, "name": name, "value": [f"media/{file.name}" for file in files]})

    def _finalize(self, status: str) -> None:
        assert self._log_dir is not None
        assert self._appended is not None
        self._appended.close()
        ensure_file(self._log_dir / NAME)

    def _take_along(self, earlier: Path) -> None:
        assert self._log_dir is not None
        assert self._appended is not None
        move_file(earlier / NAME, self._log_dir)
        with open_regular(earlier / FILE) as file:
            lines = file.readall().splitlines(keepends=True)
        self._appended.append(b"".join(lines))
        self._lines += len(lines)
        (earlier / FILE).unlink()
        if (earlier / "media").is_dir():
            (earlier / "media").rename(self._log_dir / "media")


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _key(line: bytes) -> RowKey:
    """Return the key of the record that became a line."""
    row: dict[str, Any] = json.loads(line)
    if "kind" in row and isinstance(row.get("name"), str):
        return RowKey(row["step"], frozenset({f"_log_{row['kind']}:{row['name']}"}))
    return RowKey(row["step"], frozenset(row) - {"step", "time"})


def _step(line: bytes) -> float:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf  # no line of ours
    return step if isinstance(step, int | float) else math.inf
