"""Read pictures, tables and texts that a run logged, if they are in files of the run folder.

`JSONLinesLogger` writes all three into `metrics.jsonl` and `media/`. `TensorBoardLogger` writes them into its event
files, a table as Markdown text. `CSVLogger` writes none of them. Values that went to W&B, MLflow or another tracker are
only in the tracker.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from instep.loggers.rows import JSONLinesFile, LogFile, TensorBoardFile
from instep.runs.metrics import log_files
from instep.runs.status import own
from instep.utils.imports import require
from instep.utils.untrusted_files import read_regular

# Limits: values for each name, number of names, rows of a table, and characters of a text.
STEPS, NAMES, ROWS, CHARACTERS = 3, 40, 100, 4000
PICTURE_BYTES, ALL_BYTES = 2**20, 6 * 2**20
_EVENTS = tuple(f"{below}events.out.tfevents.*" for below in ("", "*/", "*/*/"))
_KINDS = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"))


@dataclass(frozen=True)
class Media:
    """A logged value that is not a number.

    Args:
        name: name under which the value was logged.
        step: step at which the value was logged.
        picture: bytes of a PNG, JPEG or GIF file; empty if the value is not a picture.
        kind: kind of picture: "png", "jpeg" or "gif"; "" if the value is not a picture.
        rows: rows of a table, the header first; each cell is a text. Empty if the value is not a table.
        text: plain text; "" if the value is not a text.
    """

    name: str
    step: float
    picture: bytes = b""
    kind: str = ""
    rows: tuple[tuple[str, ...], ...] = ()
    text: str = ""


class MediaReader:
    """Reader of a run's logged values that are not numbers; each reading continues where the last one ended.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._files, self._kept = dict[Path, LogFile](), dict[str, deque[Media]]()

    def read(self) -> tuple[list[Media], int]:
        """Read what was logged since the last reading; keep the newest few values of each name.

        Returns:
            The values, sorted by name and with the newest first; and the number of pictures that were left out, because
            all pictures together would be larger than `ALL_BYTES`.
        """
        with self._lock:
            if any(file.replaced() for file in self._files.values()):
                self._files, self._kept = {}, {}
            for kind, names in ((_JSONLines, ("metrics.jsonl",)), (_Events, _EVENTS)):
                for path in log_files(self._folder, names):
                    self._keep(self._files.setdefault(path, kind(path)).read())
            found, free = list[Media](), ALL_BYTES
            kept = [media for of in self._kept.values() for media in of]
            for media in sorted(kept, key=lambda media: (media.name, -media.step)):
                if len(media.picture) <= free:
                    free -= len(media.picture)
                    found.append(media)
            return found, len(kept) - len(found)

    def _keep(self, found: Iterator[Any]) -> None:
        for media in found:
            if media.name in self._kept or len(self._kept) < NAMES:
                self._kept.setdefault(media.name, deque(maxlen=STEPS)).append(media)


def _picture(name: str, step: float, content: bytes) -> Iterator[Media]:
    kind = next((kind for head, kind in _KINDS if content.startswith(head)), "")
    if kind and len(content) <= PICTURE_BYTES:
        yield Media(name, step, content, kind)


def _table(name: str, step: float, rows: Any) -> Iterator[Media]:
    if isinstance(rows, list) and rows and all(isinstance(row, list) for row in rows):
        width = min(len(rows[0]), 30)
        cells = [tuple("" if cell is None else str(cell)[:200] for cell in row[:width]) for row in rows[: ROWS + 1]]
        yield Media(name, step, rows=tuple(row + ("",) * (width - len(row)) for row in cells))


class _JSONLines(JSONLinesFile):
    """Reader of those lines of a JSONLinesLogger whose values are not numbers."""

    def _rows(self, file: FileIO) -> Iterator[Any]:
        for line in self._lines(file):
            if '"kind"' not in line:
                continue
            try:
                row = json.loads(line)
                yield from self._media(row["kind"], str(row["name"]), float(row["step"]), row["value"])
            except (ValueError, RecursionError, KeyError, TypeError, OverflowError, OSError):
                continue  # the line is damaged, or the picture was deleted

    def _media(self, kind: Any, name: str, step: float, value: Any) -> Iterator[Media]:
        if kind == "text":
            yield Media(name, step, text=str(value)[:CHARACTERS])
        elif kind == "table":
            yield from _table(name, step, [value["columns"], *value["rows"]])
        elif kind in ("image", "video"):
            folder = self.path.parent
            paths = [folder / "media" / Path(str(each)).name for each in value[:8]]
            for number, path in enumerate(path for path in paths if own(path, folder)):
                shown = f"{name}/{number}" if len(paths) > 1 else name
                yield from _picture(shown, step, read_regular(path, PICTURE_BYTES))


class _Events(TensorBoardFile):
    """Reader of those events of TensorBoard whose values are not numbers."""

    def _rows(self, file: FileIO) -> Iterator[Any]:
        events = require("tensorboard.compat.proto.event_pb2", extra=None, purpose="reading event files")
        for event in self._messages(events.Event, self._records(file)):
            for value in event.summary.value:
                kind = value.WhichOneof("value")
                if kind == "image":
                    yield from _picture(value.tag, event.step, value.image.encoded_image_string)
                elif kind == "tensor" and value.tensor.string_val:
                    yield from self._of_strings(value.tag, event.step, list(value.tensor.string_val))

    @staticmethod
    def _of_strings(tag: str, step: float, strings: list[bytes]) -> Iterator[Media]:
        for content in strings[:8]:
            # TensorFlow's writer stores pictures as strings too.
            if any(content.startswith(head) for head, _ in _KINDS):
                yield from _picture(tag, step, content)
                continue
            text = content.decode("utf-8", "replace")
            name = tag.removesuffix("/text_summary")
            if text.startswith("| ") and "\n| --- |" in text:
                lines = text.split("\n", ROWS + 3)[: ROWS + 2]
                cells = [[cell.strip().replace("\0", "|") for cell in _cells(line)] for line in lines]
                yield from _table(name, step, [cells[0], *cells[2:]])
            else:
                yield Media(name, step, text=text[:CHARACTERS])


def _cells(line: str) -> list[str]:
    return line.replace("\\|", "\0").strip("| ").split("|")
