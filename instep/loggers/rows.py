"""Files of loggers, read as rows of metrics; each reading continues where the last one ended.

A row is `(step, seconds, values)`: the time is that of the wall clock, or None if the file has none. A `Forget` removes
the rows from a step on, which a resumed run writes again.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from instep.utils.imports import require
from instep.utils.untrusted_files import open_regular, parse_json

MOST_LINE_BYTES = 2**20
MOST_RECORD_BYTES = 2**24  # bytes; a row with an image may be large, and a larger row is skipped
_BLOCK = 2**15  # bytes of a block in a W&B file
_PIECE = 2**18
_IS_NUMBER = re.compile(r"-?[0-9]{1,300}(\.[0-9]*)?([eE][-+]?[0-9]{1,9})?").fullmatch


@dataclass(frozen=True)
class Forget:
    """Mark that rows from this step on are no longer valid."""

    step: float


Row = tuple[float, float | None, list[tuple[str, float]]]


class LogFile:
    """A growing file of a logger; there is a subclass for each kind.

    Args:
        path: path of the file.

    Attributes:
        problems: what could not be read, one line each.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self._inode = self._offset = self._row = 0
        self._header: list[str] = []

    def replaced(self) -> bool:
        """Return True if another file has replaced the file that was read."""
        try:
            now = os.stat(self.path)
        except OSError:
            return False
        return bool(self._inode) and (now.st_ino != self._inode or now.st_size < self._offset)

    def read(self) -> Iterator[Row | Forget]:
        """Yield the rows that were added since the last reading."""
        try:
            with open_regular(self.path) as file:
                self._inode = os.fstat(file.fileno()).st_ino
                file.seek(self._offset)
                yield from self._rows(file)
        except OSError as error:
            self._complain(error.strerror or str(error))

    def _rows(self, file: FileIO) -> Iterator[Row | Forget]:
        raise NotImplementedError

    def _complain(self, problem: str) -> None:
        if len(self.problems) < 5:
            self.problems.append(f"{self.path.name}: {problem}")

    def _messages(self, kind: Any, records: Iterator[bytes]) -> Iterator[Any]:
        """Yield the records as messages of protobuf."""
        for data in records:
            try:
                message = kind.FromString(data)
            except Exception as error:  # noqa: BLE001  each build of protobuf has its own DecodeError
                self._complain(f"the record before byte {self._offset:,} is damaged: {error!s:.200}")
                continue
            yield message

    def _lines(self, file: FileIO) -> Iterator[str]:
        """Yield whole lines; text after the last line end is still being written, or was cut off."""
        rest, passed = b"", 0  # `passed` counts the bytes of a line that is too long
        while piece := file.read(_PIECE):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                self._offset += passed + len(line) + 1
                self._row += 1
                if passed + len(line) > MOST_LINE_BYTES:
                    self._complain(f"line {self._row} of {passed + len(line):,} bytes is passed over")
                else:
                    yield line.decode("utf-8", "replace")
                passed = 0
            if passed + len(rest) > MOST_LINE_BYTES:
                rest, passed = b"", passed + len(rest)
            if passed > MOST_RECORD_BYTES:
                self._complain(f"line {self._row + 1} has no end")
                return


class CSVFile(LogFile):
    """A `metrics.csv` of CSVLogger, or of Lightning's."""

    def _rows(self, file: FileIO) -> Iterator[Row]:
        for line in self._lines(file):
            try:
                cells = next(csv.reader([line])) if '"' in line else line.rstrip("\r").split(",")
                if not self._header:
                    self._header = cells
                    continue
                named = zip(self._header, cells, strict=False)
                values = [(name, float(cell)) for name, cell in named if cell]
            except (ValueError, csv.Error) as error:
                self._complain(f"line {self._row}: {error!s:.200}")
                continue
            step = next((value for name, value in values if name == "step"), self._row - 2.0)
            yield step, None, [pair for pair in values if pair[0] != "step"]


class JSONLinesFile(LogFile):
    """A `metrics.jsonl` of JSONLinesLogger: one object for each row, with "step", "time" and metrics."""

    def _rows(self, file: FileIO) -> Iterator[Row]:
        for line in self._lines(file):
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("it is no object")
            except (ValueError, RecursionError) as error:
                self._complain(f"line {self._row}: {error!s:.200}")
                continue
            if isinstance(row.get("kind"), str):  # the row is a text, a table, or the files of a picture
                continue
            step, time_s = _number(row.pop("step", None)), _number(row.pop("time", None))
            pairs = [(name, number) for name, value in row.items() if (number := _number(value)) is not None]
            yield self._row - 1.0 if step is None else step, time_s, pairs


def _number(value: Any) -> float | None:
    """Return a JSON value as a number, else None. JSON has no nan: a logger writes it as text, or without quotes."""
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value) if abs(value) < 2**1000 else math.inf
    return float(value) if type(value) is str and value.lower().strip("+-") in ("nan", "inf", "infinity") else None


class TensorBoardFile(LogFile):
    """An event file of TensorBoard, parsed by its library's message classes.

    The library's reader follows any path, accepts any length that a record claims, and spends most of its time on
    checksums in Python. So this class reads the frames of the records itself.
    """

    def _rows(self, file: FileIO) -> Iterator[Row | Forget]:
        events = require("tensorboard.compat.proto.event_pb2", extra=None, purpose="reading event files")
        for event in self._messages(events.Event, self._records(file)):
            if event.HasField("session_log") and event.session_log.status == events.SessionLog.START:
                yield Forget(event.step)
            pairs = []
            for value in event.summary.value:
                kind = value.WhichOneof("value")
                if kind == "simple_value":
                    pairs.append((value.tag, value.simple_value))
                elif kind == "tensor" and len(value.tensor.float_val) == 1:  # scalars of TensorBoard 2
                    pairs.append((value.tag, value.tensor.float_val[0]))
            if pairs:
                yield float(event.step), event.wall_time, pairs

    def _records(self, file: FileIO) -> Iterator[bytes]:
        size = os.fstat(file.fileno()).st_size
        with BufferedReader(file, _PIECE) as buffered:
            buffered.seek(self._offset)
            while len(head := buffered.read(12)) == 12:
                (length,) = struct.unpack_from("<Q", head)
                end = self._offset + length + 16
                # the record is still being written or was cut off, or this is not an event file
                if not length or end > size:
                    return
                if length > MOST_RECORD_BYTES:
                    self._complain(f"a record of {length:,} bytes is passed over")
                    buffered.seek(end)
                    self._offset = end
                    continue
                data = buffered.read(length + 4)[:length]
                self._offset = end
                yield data


class WandbFile(LogFile):
    """A `run-<id>.wandb` of Weights & Biases: a LevelDB log of its messages.

    Attributes:
        config: the hyperparameters that were read so far.
        exit_code: exit code of the run; None before its end.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.config: dict[str, Any] = {}
        self.exit_code: int | None = None

    def _rows(self, file: FileIO) -> Iterator[Row]:
        messages = require("wandb.proto.wandb_internal_pb2", extra=None, purpose="reading runs of W&B")
        for record in self._messages(messages.Record, self._records(file)):
            kind = record.WhichOneof("record_type")
            if kind in ("run", "config"):
                for item in (record.run.config if kind == "run" else record.config).update:
                    self.config["/".join(item.nested_key) or item.key] = _parsed(item.value_json)
            elif kind == "exit":
                self.exit_code = record.exit.exit_code
            elif kind == "history":
                row: dict[str, float] = {}
                for item in record.history.item:
                    text = item.value_json
                    # JSON has no nan, so it is written as text.
                    number = float(text) if _IS_NUMBER(text) else _number(text.strip('"'))
                    if number is not None:
                        row["/".join(item.nested_key) or item.key] = number
                step = row.get("trainer/global_step", row.get("_step", float(record.history.step.num)))
                pairs = [pair for pair in row.items() if not pair[0].startswith(("_", "trainer/global_step"))]
                yield step, row.get("_timestamp"), pairs

    def _records(self, file: FileIO) -> Iterator[bytes]:
        if not self._offset:
            if file.read(4) != b":W&B":
                self._complain("it is no file of W&B")
                return
            self._offset = 7
        size, at, parts = os.fstat(file.fileno()).st_size, self._offset, b""
        file.seek(at)
        with BufferedReader(file, _PIECE) as buffered:
            while at < size:
                left = _BLOCK - at % _BLOCK
                head = buffered.read(7) if left >= 7 else bytes(7)
                if len(head) < 7:
                    return
                _, length, kind = struct.unpack("<IHB", head)
                if not kind and not length:  # the rest of the block is padding
                    if self._offset <= at - _BLOCK:
                        return  # stop after one empty block, since a sparse file may have billions of them
                    at += left
                    buffered.seek(at)
                    continue
                data = buffered.read(length)
                if len(data) < length:
                    return  # the record is still being written, or was cut off
                at, parts = at + 7 + length, (b"" if kind in (1, 2) else parts) + data
                if len(parts) > MOST_RECORD_BYTES:
                    parts = b""
                if kind in (1, 4):
                    self._offset = at
                    yield parts
                    parts = b""


def _parsed(text: str) -> Any:
    """Parse a value of W&B; return it as text if it is not JSON, such as a nan without quotes."""
    try:
        return parse_json(text)
    except ValueError:
        return text
