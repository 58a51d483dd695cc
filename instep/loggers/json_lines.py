"""`JSONLinesLogger`: write all logged values as lines of JSON into `metrics.jsonl`, and media files beside it."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

from instep.loggers.appended import check_no_link
from instep.loggers.backlog import Row, RowKey
from instep.loggers.row_file import RowFile, RowFileLogger
from instep.types import PathLike
from instep.utils.atomic import replace

if TYPE_CHECKING:
    from instep.loggers.kinds import Audio, Histogram, Image, Table, Video


class JSONLinesLogger(RowFileLogger):
    """Write one line of JSON for each logging call into `metrics.jsonl` of the run folder, immediately.

    A line of metrics is `{"step": 50, "time": 1763900000.0, "loss": 0.5}`: the position on the x-axis, seconds since
    1970, and the exact numbers; a number that is not finite is the string "NaN", "Infinity" or "-Infinity". A line for
    any other value has a "kind": `{"step": 50, "time": ..., "kind": "text", "name": "sample", "value": "Once"}`. For
    pictures, sounds and videos the value is a list of files in `media/`. Hyperparameters are in `hparams.yaml`. A
    resumed run appends to the file, after it has removed the lines of steps after its checkpoint, since it logs those
    steps again.

    Args:
        save_dir: parent folder of the run folders; the first logger with a `save_dir` chooses the run folder. None:
            write into the run folder.
        name: name of a folder below `save_dir`; used only with `save_dir`.
        version: number or name of the run's folder in `<save_dir>/<name>`; used only with `save_dir`. None: the next
            free number.
        **options: further arguments of `Logger`, such as `prefix` and `x_axis`.

    Example:
        >>> import json
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     logger = JSONLinesLogger(folder, version="first")
        ...     logger.log_metrics({"loss": 0.5}, step=1)
        ...     logger.finalize()
        ...     json.loads(Path(folder, "first", "metrics.jsonl").read_text())["loss"]
        0.5
    """

    def __init__(
        self,
        save_dir: PathLike | None = None,
        name: str | None = None,
        version: int | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(save_dir, name, version, **options)
        self._rows = self._lines = self._file = _Lines()

    def _log_text(self, name: str, text: str, step: int) -> None:
        self._write("text", name, text, step)

    def _log_image(self, name: str, images: list[Image], step: int) -> None:
        self._log_files("image", name, [image.png() for image in images], "png", step)

    def _log_audio(self, name: str, audios: list[Audio], step: int) -> None:
        self._log_files("audio", name, [audio.wav() for audio in audios], "wav", step)

    def _log_video(self, name: str, videos: list[Video], step: int) -> None:
        self._log_files("video", name, [video.gif() for video in videos], "gif", step)

    def _log_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        value = {"counts": histogram.counts.tolist(), "edges": histogram.edges.tolist()}
        self._write("histogram", name, value, step)

    def _log_table(self, name: str, table: Table, step: int) -> None:
        rows = [[_number(cell) if isinstance(cell, float) else cell for cell in row] for row in table.rows]
        self._write("table", name, {"columns": table.columns, "rows": rows}, step)

    def _log_files(self, kind: str, name: str, contents: list[bytes], suffix: str, step: int) -> None:
        folder = self.delivery.folder / "media"
        check_no_link(folder)
        folder.mkdir(exist_ok=True)
        stem = f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)[:80]}-{step}"
        files = [folder / f"{stem}-{i}.{suffix}" for i in range(len(contents))]
        for file, content in zip(files, contents, strict=True):
            replace(file, content)
        self._write(kind, name, [f"media/{file.name}" for file in files], step)

    def _write(self, kind: str, name: str, value: Any, step: int) -> None:
        self._lines.append([(step, self.delivery.time_s, {"kind": kind, "name": name, "value": value})])


class _Lines(RowFile):
    """The file `metrics.jsonl` of a logger; each of its lines is a JSON object."""

    NAME, COUNTED = "metrics.jsonl", "lines"

    def parse(self, content: bytes) -> list[bytes]:
        return content.splitlines(keepends=True)

    def key(self, row: bytes) -> RowKey:
        try:
            values: dict[str, Any] = json.loads(row)
            step = float(values["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return RowKey(math.inf, frozenset())  # a line that instep has not written
        if "kind" in values and isinstance(values.get("name"), str):
            return RowKey(step, frozenset({f"_log_{values['kind']}:{values['name']}"}))
        return RowKey(step, frozenset(values) - {"step", "time"})

    def replace(self, rows: list[bytes]) -> None:
        with self.opened.replacing() as part:
            part.write_bytes(b"".join(rows))

    def add(self, rows: list[Row]) -> None:
        # A metric called "step" replaces the global step: this is how Lightning's users choose their own x-axis.
        self.append(
            [(row.step, row.time_s, {name: _number(value) for name, value in row.metrics.items()}) for row in rows]
        )

    def append(self, rows: list[tuple[int, float, dict[str, Any]]]) -> None:
        """Append a line for each tuple of a step, a time in seconds since 1970, and named values."""
        lines = [
            json.dumps({"step": step, "time": round(time_s, 3), **values}, ensure_ascii=False) + "\n"
            for step, time_s, values in rows
        ]
        with self.opened.turn():
            # UTF-8 cannot encode half of a surrogate pair, so it is written as a JSON escape.
            self.opened.append("".join(lines).encode("utf-8", "backslashreplace"))
        self.rows += len(rows)


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
