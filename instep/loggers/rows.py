"""Read rows of metrics from the files of loggers; each reading continues where the last one ended.

A row is `(step, seconds, values)`; the seconds are those of the wall clock, or None if the file has no times. A
`Forget` object means that all rows from a step on are invalid, because a resumed run has written them again.
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
MOST_RECORD_BYTES = 2**24  # limit in bytes; longer records are skipped (a record with an image is large)
_BLOCK = 2**15  # size of a block in a W&B file, in bytes
_PIECE = 2**18
_IS_NUMBER = re.compile(r"-?[0-9]{1,300}(\.[0-9]*)?([eE][-+]?[0-9]{1,9})?").fullmatch


@dataclass(frozen=True)
class Forget:
    """Marker between rows: of the rows before the marker, those from this step on are invalid."""

    step: float


Row = tuple[float, float | None, list[tuple[str, float]]]


class LogFile:
    """Base class of the readers of log files, which may grow while they are read.

    Args:
        path: path of the file.

    Attributes:
        problems: messages about what could not be read, at most five.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self._inode = self._offset = self._row = 0
        self._header: list[str] = []

    def replaced(self) -> bool:
        """Return True if the file that was read has been replaced by a different file, or has become shorter."""
        try:
            now = os.stat(self.path)
        except OSError:
            return False
        return bool(self._inode) and (now.st_ino != self._inode or now.st_size < self._offset)

    def read(self) -> Iterator[Row | Forget]:
        """Yield the rows that were added to the file since the last call."""
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
        """Parse records as protobuf messages of a class, and skip damaged ones."""
        for data in records:
            try:
                message = kind.FromString(data)
            except Exception as error:  # noqa: BLE001  each build of protobuf has its own DecodeError
                self._complain(f"the record before byte {self._offset:,} is damaged: {error!s:.200}")
                continue
            yield message

    def _lines(self, file: FileIO) -> Iterator[str]:
        """Yield complete lines; an incomplete last line may still be in the middle of being written."""
        rest, passed = b"", 0  # `passed`: bytes read so far of a line that is too long
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
    """Reader of `metrics.csv`, as instep's and Lightning's CSVLogger write it."""

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
    """Reader of `metrics.jsonl`, as JSONLinesLogger writes it: each line is a JSON object with "step" and "time"."""

    def _rows(self, file: FileIO) -> Iterator[Row]:
        for line in self._lines(file):
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("it is no object")
            except (ValueError, RecursionError) as error:
                self._complain(f"line {self._row}: {error!s:.200}")
                continue
            if isinstance(row.get("kind"), str):  # the line has no metrics, but a text, a table or pictures
                continue
            step, time_s = _number(row.pop("step", None)), _number(row.pop("time", None))
            pairs = [(name, number) for name, value in row.items() if (number := _number(value)) is not None]
            yield self._row - 1.0 if step is None else step, time_s, pairs


def _number(value: Any) -> float | None:
    """Convert a JSON value to a float; None if it is no number. Strings such as "NaN" become floats too."""
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value) if abs(value) < 2**1000 else math.inf
    return float(value) if type(value) is str and value.lower().strip("+-") in ("nan", "inf", "infinity") else None


class TensorBoardFile(LogFile):
    """Reader of a TensorBoard event file, which uses the message classes of TensorBoard's library.

    This class does not use the library's reader, which follows any link, accepts any length of a record, and spends
    most of its time on checksums in Python.
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
                elif kind == "tensor" and len(value.tensor.float_val) == 1:  # scalars as TensorBoard 2 writes them
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
                # The record is not complete yet, or this is not an event file.
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
    """Reader of `run-<id>.wandb`, in which Weights & Biases stores its messages in LevelDB's log format.

    Attributes:
        config: the hyperparameters that were read so far.
        exit_code: exit code of the run; None if the run has not ended.
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
                    # JSON has no nan and infinity, so W&B writes them as text.
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
                if not kind and not length:  # padding up to the end of the block
                    if self._offset <= at - _BLOCK:
                        return  # stop at the second empty block: a sparse file may have billions of them
                    at += left
                    buffered.seek(at)
                    continue
                data = buffered.read(length)
                if len(data) < length:
                    return  # the record is not complete yet
                at, parts = at + 7 + length, (b"" if kind in (1, 2) else parts) + data
                if len(parts) > MOST_RECORD_BYTES:
                    parts = b""
                if kind in (1, 4):
                    self._offset = at
                    yield parts
                    parts = b""


def _parsed(text: str) -> Any:
    """Parse a JSON value; return the text itself if it is not JSON, such as a nan without quotes."""
    try:
        return parse_json(text)
    except ValueError:
        return text
