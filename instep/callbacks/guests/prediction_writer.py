"""Write predictions to disk: `BasePredictionWriter` to derive from, and `PredictionWriter`, ready to use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from instep.callbacks.base import Callback
from instep.distributed.nested import map_leaves
from instep.distributed.objects import gather_object, raise_together
from instep.errors import DataError, DistributedError, SettingError
from instep.types import PathLike
from instep.utils.atomic import replacing
from instep.utils.checks import choice

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

INTERVALS = ("batch", "epoch", "batch_and_epoch")
_PART = re.compile(r"\d{8,}-\d{5,}\.(safetensors|jsonl)")
_ROWS = 4096  # number of rows to copy at a time when files are joined


class BasePredictionWriter(Callback):
    """Base class of callbacks that write predictions: override `write_on_batch_end`, `write_on_epoch_end` or both.

    The two methods are called on every rank with that rank's own predictions. A batch that a rank repeats because other
    ranks have more batches is left out.

    Args:
        write_interval: "batch": call `write_on_batch_end`. "epoch": call `write_on_epoch_end`; until then all
            predictions of this rank are kept in CPU memory. "batch_and_epoch": call both.

    Raises:
        SettingError: `write_interval` has another value.

    Example:
        >>> class SaveEach(BasePredictionWriter):
        ...     def write_on_batch_end(
        ...         self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx
        ...     ):
        ...         torch.save(prediction, f"{dataloader_idx}-{trainer.global_rank}-{batch_idx}.pt")
        >>> SaveEach("batch").interval
        'batch'

    Source: the names are those of Lightning's `BasePredictionWriter`.
    """

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        if write_interval not in INTERVALS:
            raise SettingError(
                f"`write_interval` should be one of {list(INTERVALS)}, got {write_interval!r}",
                field="write_interval",
                got=write_interval,
            )
        self.interval = write_interval
        self._predictions: list[list[Any]] = []
        self._indices: list[list[list[Any] | None]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        prediction: Any,
        batch_indices: Sequence[Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the predictions of one batch.

        Args:
            trainer: the Trainer.
            module: the module.
            prediction: what `predict_step` returned.
            batch_indices: indices of this batch's samples in the data set; None if they are not known.
            batch: the batch.
            batch_idx: index of the batch on this rank.
            dataloader_idx: index of the dataloader.
        """
        raise NotImplementedError(f"{type(self).__name__} has interval={self.interval!r}: it needs write_on_batch_end")

    def write_on_epoch_end(
        self, trainer: Trainer, module: TrainModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write the predictions of all batches of this rank.

        Args:
            trainer: the Trainer.
            module: the module.
            predictions: list of what `predict_step` returned for each batch; with several dataloaders, a list of such
                lists.
            batch_indices: a list for each dataloader, with the indices in the data set of each batch's samples.
        """
        raise NotImplementedError(f"{type(self).__name__} has interval={self.interval!r}: it needs write_on_epoch_end")

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._predictions, self._indices = [], []

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        indices = trainer.batch_indices(batch_idx)
        if self.interval != "epoch":
            self.write_on_batch_end(trainer, module, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.interval != "batch":
            while len(self._predictions) <= dataloader_idx:
                self._predictions.append([])
                self._indices.append([])
            self._predictions[dataloader_idx].append(map_leaves(_to_cpu, outputs))
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self.interval == "batch":
            return
        predictions, indices = self._predictions, self._indices
        self._predictions, self._indices = [], []
        only = predictions[0] if len(predictions) == 1 else predictions
        self.write_on_epoch_end(trainer, module, only, indices)


class PredictionWriter(BasePredictionWriter):
    """Write predictions as safetensors or JSON lines: a file for each batch, or one file in the order of the data set.

    Each batch is written as soon as it is computed, so memory holds the predictions of one batch only. With
    `write_interval="epoch"` the main process joins the files of the batches at the end into `predictions.safetensors`
    (or `.jsonl`), and deletes the files of the batches. Rows are sorted by the samples' indices in the data set, or by
    batch and rank if the indices are not known. Every sample occurs once, with any number of processes. A file appears
    under its name only when it is complete, and replaces the file of an earlier run. With several dataloaders the files
    are called `predictions-0`, `predictions-1` and so on.

    What `predict_step` returns must have one row per sample. A tensor is written under the name `predictions`, and each
    entry of a dict or tuple under its key or number. With JSON lines, entries may also be lists of strings or of other
    values. The samples' indices in the data set are written under the name `index`.

    Args:
        output_dir: the folder to write into. With "epoch" and several machines, it must be shared by all of them.
        write_interval: "batch": write the files `predictions/<batch>-<rank>.<format>`; "epoch": write the joined file;
            "batch_and_epoch": write both.
        file_format: "safetensors", or "jsonl" with one sample per line.

    Raises:
        SettingError: an argument is wrong.
        DataError: what `predict_step` returned does not have one row per sample, or cannot be written in this format.
        DistributedError: the main process does not find the files of other ranks.

    Example:
        >>> writer = PredictionWriter("out", write_interval="epoch", file_format="jsonl")
        >>> writer.output_dir
        PosixPath('out')
    """

    def __init__(
        self,
        output_dir: PathLike,
        write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "epoch",
        file_format: Literal["safetensors", "jsonl"] = "safetensors",
    ) -> None:
        super().__init__(write_interval)
        self.output_dir = Path(output_dir)
        self.file_format = choice("safetensors", "jsonl")("file_format", file_format)
        self._written: dict[int, list[str]] = {}  # names of the files that this rank wrote, by dataloader
        self._writes = True

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._written = {}
        if trainer.is_global_zero:
            for folder in (self.output_dir / "predictions", *self.output_dir.glob("predictions-*")):
                _clear(folder)  # remove files that an earlier run has left
        readers: list[int] = gather_object(trainer.strategy.data_rank)
        # If several ranks read the same data (model parallelism), only the first of them writes.
        self._writes = readers.index(trainer.strategy.data_rank) == trainer.global_rank

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not self._writes:
            return
        indices = trainer.batch_indices(batch_idx)
        columns = _columns(map_leaves(_to_cpu, outputs), None if indices is None else len(indices))
        if indices is not None:
            columns = {"index": _as_column(indices), **columns}
        folder = self._folder(dataloader_idx, len(trainer.num_predict_batches))
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{batch_idx:08d}-{trainer.global_rank:05d}.{self.file_format}"
        with replacing(folder / name, sync=False) as path:
            _WRITE[self.file_format](path, columns)
        self._written.setdefault(dataloader_idx, []).append(name)

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self.interval == "batch":
            return
        error: BaseException | None = None
        everyone: list[dict[int, list[str]]] = gather_object(self._written)
        loaders = len(trainer.num_predict_batches)
        if trainer.is_global_zero:
            try:
                for loader in range(loaders):
                    names = sorted(name for written in everyone for name in written.get(loader, ()))
                    self._join(self._folder(loader, loaders), names)
            except Exception as caught:  # noqa: BLE001  raised below, on all ranks
                error = caught
        raise_together(error, "joining the files of predictions")

    def _folder(self, loader: int, loaders: int) -> Path:
        return self.output_dir / (f"predictions-{loader}" if loaders > 1 else "predictions")

    def _join(self, folder: Path, names: list[str]) -> None:
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise DistributedError(
                f"the main process does not see {len(missing)} of {len(names)} files of predictions, such as "
                f"{folder / missing[0]}. Give PredictionWriter an output_dir that all machines share, or "
                "write_interval='batch' and read each machine's files."
            )
        if names:
            with replacing(folder.with_name(f"{folder.name}.{self.file_format}")) as path:
                _JOIN[self.file_format](path, [folder / name for name in names])
        if self.interval == "epoch":
            _clear(folder)


def _clear(folder: Path) -> None:
    """Delete the files of single batches in a folder, and the folder too if it is empty afterwards."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if _PART.fullmatch(path.name):
            path.unlink()
    with suppress(OSError):  # a folder with other files cannot be removed, and stays
        folder.rmdir()


# ---- columns


def _to_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def _columns(outputs: Any, rows: int | None, prefix: str = "") -> dict[str, Any]:
    """Flatten what `predict_step` returned into a dict of columns; check that each column has a row per sample."""
    if isinstance(outputs, Mapping):
        parts = [(str(key), value) for key, value in outputs.items()]
    elif isinstance(outputs, tuple) or _are_columns(outputs, rows):
        parts = [(str(number), value) for number, value in enumerate(outputs)]
    else:
        name = prefix or "predictions"
        length = len(outputs) if hasattr(outputs, "__len__") and getattr(outputs, "ndim", 1) else None
        if length is None or isinstance(outputs, str) or (rows is not None and length != rows):
            raise DataError(
                f"PredictionWriter writes a row per sample, and {name!r} of what predict_step returned is "
                f"{_described(outputs)}, where the batch has {'some' if rows is None else rows} samples. Return "
                "tensors or lists whose first dimension is the sample, or write them by a BasePredictionWriter."
            )
        return {name: outputs}
    columns: dict[str, Any] = {}
    for key, value in parts:
        columns |= _columns(value, rows, f"{prefix}/{key}" if prefix else key)
    return columns


def _are_columns(outputs: Any, rows: int | None) -> bool:
    """Return whether a list's items are columns (tensors with a row per sample) rather than one value per sample."""
    if not isinstance(outputs, list) or not outputs:
        return False
    return all(isinstance(value, Tensor) and value.ndim and len(value) == (rows or len(value)) for value in outputs)


def _described(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return f"a {type(value).__name__}{shape}"


def _as_column(indices: list[Any]) -> Any:
    plain = all(type(index) is int for index in indices)
    return torch.tensor(indices, dtype=torch.int64) if plain else [repr(index) for index in indices]


def _order(indices: list[Any]) -> np.ndarray | None:
    """Return the order that sorts rows by index; None if they are sorted already, or not all have an integer index."""
    if not all(isinstance(part, np.ndarray) for part in indices):
        return None
    joined = np.concatenate(indices)
    return None if np.all(joined[1:] >= joined[:-1]) else np.argsort(joined, kind="stable")


# ---- safetensors


def _write_tensors(path: Path, columns: dict[str, Any]) -> None:
    from safetensors.torch import save_file  # imported late: not needed for training

    wrong = next((name for name, column in columns.items() if not isinstance(column, Tensor)), None)
    if wrong == "index":
        # Indices that are not integers are left out, since a safetensors file holds only tensors.
        columns = {name: column for name, column in columns.items() if name != "index"}
    elif wrong is not None:
        raise DataError(
            f"safetensors hold tensors only, and {wrong!r} of what predict_step returned is "
            f"{_described(columns[wrong])}: use PredictionWriter(file_format='jsonl')"
        )
    save_file({name: column.contiguous() for name, column in columns.items()}, path)


def _join_tensors(path: Path, parts: list[Path]) -> None:
    """Join safetensors files into one sorted file, with a few thousand rows in memory at a time."""
    from safetensors import safe_open  # imported late: needed only for safetensors files

    from instep.checkpoint.tensors import framing

    rows: dict[str, Tensor] = {}  # the first row of each column, for its dtype and shape
    counts: list[int] = []
    indices: list[Any] = []
    for part in parts:
        with safe_open(part, "pt") as file:
            count = 0
            for name in file.keys():  # noqa: SIM118  it is no dict
                column = file.get_slice(name)
                count, row = column.get_shape()[0], column[:1]
                first = rows.setdefault(name, row)
                if (first.dtype, first.shape) != (row.dtype, row.shape):
                    raise DataError(
                        f"{name!r} has rows of {_row(first)} in {parts[0].name} and of {_row(row)} in {part.name}: "
                        "one file cannot hold both. Use file_format='jsonl', or write_interval='batch'."
                    )
            counts.append(count)
            indices.append(file.get_tensor("index").numpy() if "index" in rows else None)
    order = _order(indices)
    starts = np.concatenate([[0], np.cumsum(counts)])
    place = np.empty(starts[-1], np.int64)
    place[np.arange(starts[-1]) if order is None else order] = np.arange(starts[-1])
    # Expand one row to the shape of the whole column for the file's header: an expanded tensor takes no memory.
    head, whole = framing({name: row.expand(int(starts[-1]), *row.shape[1:]) for name, row in rows.items()})
    with open(path, "wb") as joined:
        joined.write(head)
        begin = len(head)
        for name, column in whole.items():
            row_bytes = rows[name].nbytes
            for number, part in enumerate(parts):
                with safe_open(part, "pt") as file:
                    data = file.get_tensor(name).contiguous().view(counts[number], -1).view(torch.uint8).numpy()
                for first_row, last_row, at in _runs(place[starts[number] : starts[number + 1]]):
                    joined.seek(begin + at * row_bytes)
                    joined.write(data[first_row:last_row].tobytes())
            begin += column.nbytes


def _row(row: Tensor) -> str:
    return f"{str(row.dtype).removeprefix('torch.')} {list(row.shape[1:])}"


def _runs(places: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of rows that stay together when sorted: first row, end (exclusive), place of the first row.

    Args:
        places: for each row, its place after sorting.
    """
    cuts: list[int] = (np.flatnonzero(np.diff(places) != 1) + 1).tolist()
    for first, last in zip([0, *cuts], [*cuts, len(places)], strict=True):
        for begin in range(first, last, _ROWS):
            yield begin, min(begin + _ROWS, last), int(places[begin])


# ---- JSON lines


def _write_lines(path: Path, columns: dict[str, Any]) -> None:
    lists = {name: column.tolist() if hasattr(column, "tolist") else column for name, column in columns.items()}
    with open(path, "w", encoding="utf-8") as file:
        for row in zip(*lists.values(), strict=True):
            try:
                line = json.dumps(dict(zip(lists, row, strict=True)), default=_plain, ensure_ascii=False)
            except TypeError as error:
                raise DataError(f"PredictionWriter(file_format='jsonl') cannot write a row: {error}") from None
            file.write(line + "\n")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON value. Return tensors, numbers, texts, lists and dicts.")


def _join_lines(path: Path, parts: list[Path]) -> None:
    """Join JSON-lines files into one sorted file; memory holds only the position of each line."""
    places: list[tuple[int, int]] = []
    indices: list[Any] = []
    for number, part in enumerate(parts):
        with open(part, "rb") as file:
            begin, found = 0, []
            for line in file:
                places.append((number, begin))
                begin += len(line)
                found.append(json.loads(line).get("index"))
        known = all(type(index) is int for index in found)
        indices.append(np.asarray(found, np.int64) if known else None)
    order = _order(indices)
    with open(path, "wb") as joined:
        opened = -1, open(parts[0], "rb")  # noqa: SIM115  one at a time is open
        try:
            for at in range(len(places)) if order is None else order.tolist():
                number, begin = places[at]
                if number != opened[0]:
                    opened[1].close()
                    opened = number, open(parts[number], "rb")  # noqa: SIM115
                opened[1].seek(begin)
                joined.write(opened[1].readline())
        finally:
            opened[1].close()


_WRITE: dict[str, Any] = {"safetensors": _write_tensors, "jsonl": _write_lines}
_JOIN: dict[str, Any] = {"safetensors": _join_tensors, "jsonl": _join_lines}
