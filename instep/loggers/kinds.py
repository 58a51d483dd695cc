"""Plain forms of logged pictures, sounds, videos, histograms, tables and files, and their conversion to JSON.

A value is converted to its plain form when it is logged, since it waits in a queue and the user may change the object
afterwards.
"""

from __future__ import annotations

import base64
import inspect
import io
import json
import math
import subprocess
import sys
import wave
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from instep.errors import LogError
from instep.utils.atomic import replace

Array: TypeAlias = "np.ndarray[Any, Any]"
Cell: TypeAlias = "bool | int | float | str | None"

_CHANNELS = (1, 3, 4)
_MOST_PATCH_BYTES = 2**20  # limit in bytes; a larger patch is not stored, since it likely contains data files


@dataclass(frozen=True, eq=False)
class Image:
    """A picture: a uint8 array of shape (height, width, channels) with 1, 3 or 4 channels."""

    array: Array
    caption: str | None = None

    def png(self) -> bytes:
        """Return the picture as a PNG file."""
        return _encoded(_pillow(self.array), "PNG")


@dataclass(frozen=True, eq=False)
class Audio:
    """A sound: a float32 array of shape (samples, channels) with values from -1 to 1, and the sample rate in Hz."""

    array: Array
    sample_rate: int
    caption: str | None = None

    def wav(self) -> bytes:
        """Return the sound as a WAV file with 16 bits per sample."""
        data = io.BytesIO()
        with wave.open(data, "wb") as file:
            file.setnchannels(self.array.shape[1])
            file.setsampwidth(2)
            file.setframerate(self.sample_rate)
            file.writeframes((np.clip(self.array, -1, 1) * 32767).astype("<i2").tobytes())
        return data.getvalue()


@dataclass(frozen=True, eq=False)
class Video:
    """A video: a uint8 array of shape (frames, height, width, 3), and the number of frames per second."""

    array: Array
    fps: int = 4
    caption: str | None = None

    def gif(self) -> bytes:
        """Return the frames as an animated GIF file."""
        first, *rest = [_pillow(frame) for frame in self.array]
        return _encoded(first, "GIF", save_all=True, append_images=rest, duration=1000 // self.fps, loop=0)


@dataclass(frozen=True, eq=False)
class Histogram:
    """A histogram: counts of values (int64, shape (bins,)) between bin edges (float64, shape (bins + 1,))."""

    counts: Array
    edges: Array


@dataclass(frozen=True)
class Table:
    """A table: column names, and rows whose cells are plain values."""

    columns: list[str]
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Artifact:
    """A file or folder to store with the run: its path, a name, and a type such as "model" or "dataset"."""

    path: Path
    name: str
    type: str = "file"


@dataclass(frozen=True)
class Code:
    """The version of the running program: git commit, uncommitted changes as a patch, and the script's path."""

    commit: str | None
    branch: str | None
    remote: str | None
    is_dirty: bool
    patch: str
    script: str | None


# ---- conversion of logged values to these classes


def to_image(name: str, value: Any, caption: str | None = None) -> Image:
    """Convert a value to an `Image`.

    Args:
        name: name of the image, for the error text.
        value: a tensor of shape (channels, height, width) or (height, width) with floats from 0 to 1 or integers from 0
            to 255; a NumPy array of such a shape or of (height, width, channels); a PIL image; or the path of a
            picture.
        caption: text to show with the image.

    Raises:
        LogError: the value has a type or shape that is not listed above.
    """
    if isinstance(value, Image):
        return value
    channels_first = hasattr(value, "detach")
    if isinstance(value, str | Path):
        from PIL import Image as pillow

        value = pillow.open(value).convert("RGBA" if str(value).lower().endswith("png") else "RGB")
    array = _array(value)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim == 3 and array.shape[0] in _CHANNELS and (channels_first or array.shape[2] not in _CHANNELS):
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in _CHANNELS or not array.size:
        raise LogError(
            f"the image {name!r} has the shape {tuple(array.shape)}: give (channels, height, width) with 1, 3 or 4 "
            "channels, (height, width), a PIL image or a picture's path"
        )
    return Image(_bytes(array), caption)


def to_audio(name: str, value: Any, sample_rate: int = 44_100, caption: str | None = None) -> Audio:
    """Convert a tensor or array to an `Audio`.

    The values are floats from -1 to 1. The shape is (samples,), (samples, channels) or (channels, samples); the larger
    of two dimensions is that of the samples.

    Raises:
        LogError: the value has none of these shapes.
    """
    if isinstance(value, Audio):
        return value
    array = _array(value).astype(np.float32)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim == 2 and array.shape[0] < array.shape[1]:
        array = array.T
    if array.ndim != 2 or not array.size:
        raise LogError(f"the audio {name!r} has the shape {tuple(array.shape)}: give (samples,) or (samples, channels)")
    return Audio(np.ascontiguousarray(array), int(sample_rate), caption)


def to_video(name: str, value: Any, fps: int = 4, caption: str | None = None) -> Video:
    """Convert a tensor or array to a `Video`.

    The shape is (frames, channels, height, width) or (frames, height, width, channels).

    Raises:
        LogError: the value has none of these shapes.
    """
    if isinstance(value, Video):
        return value
    array = _array(value)
    if array.ndim == 5 and array.shape[0] == 1:  # TensorBoard's videos have a batch dimension
        array = array[0]
    if array.ndim == 4 and array.shape[1] in (1, 3) and array.shape[3] not in (1, 3):
        array = array.transpose(0, 2, 3, 1)
    if array.ndim != 4 or array.shape[3] not in (1, 3) or not array.size:
        raise LogError(f"the video {name!r} has the shape {tuple(array.shape)}: give (frames, channels, height, width)")
    return Video(np.broadcast_to(_bytes(array), (*array.shape[:3], 3)).copy(), int(fps), caption)


def to_histogram(name: str, values: Any, bins: int = 64) -> Histogram:
    """Count the finite values in bins of equal width; or convert a pair of bin counts and edges."""
    if isinstance(values, Histogram):
        return values
    if isinstance(values, tuple):
        counts, edges = values
        return Histogram(_array(counts).astype(np.int64), _array(edges).astype(np.float64))
    try:
        flat = _array(values).reshape(-1).astype(np.float64)
    except (TypeError, ValueError):
        raise LogError(f"the histogram {name!r} takes numbers, and got {values!r:.80}") from None
    counts, edges = np.histogram(flat[np.isfinite(flat)], bins=bins)
    return Histogram(counts.astype(np.int64), edges.astype(np.float64))


def to_table(
    name: str,
    table: Table | None = None,
    columns: Sequence[str] | None = None,
    data: Iterable[Sequence[Any]] | None = None,
    dataframe: Any = None,
) -> Table:
    """Make a `Table` from column names and rows, or from a pandas-like dataframe.

    Raises:
        LogError: `columns` or `data` is not a list, or a row does not have one cell per column.
    """
    if table is not None:
        return table
    if dataframe is not None:
        columns, data = [str(column) for column in dataframe.columns], dataframe.to_numpy().tolist()
    if isinstance(columns, str) or not isinstance(data, Iterable | None):
        raise LogError(f"the table {name!r} takes columns, a list of names, and data, a list of rows")
    rows = [[_cell(cell) for cell in row] for row in data or ()]
    columns = list(columns) if columns is not None else [f"column {i + 1}" for i in range(len(rows[0]) if rows else 0)]
    wrong = next((i for i, row in enumerate(rows) if len(row) != len(columns)), None)
    if wrong is not None:
        raise LogError(f"the table {name!r} has {len(columns)} columns, and {len(rows[wrong])} cells in row {wrong}")
    return Table(columns, rows)


def to_figure(name: str, figure: Any, close: bool = True) -> Image:
    """Draw a matplotlib figure as an `Image`.

    Raises:
        LogError: the value is not a matplotlib figure.
    """
    figure = getattr(figure, "figure", figure)  # a matplotlib Axes has its figure in this attribute
    if not hasattr(figure, "savefig"):
        raise LogError(
            f"the figure {name!r} is a {type(figure).__name__}: give a matplotlib figure; of other packages write a "
            "file, and log that by log_artifact(path)"
        )
    data = io.BytesIO()
    figure.savefig(data, format="png")
    if close and "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close(figure)
    from PIL import Image as pillow

    return Image(np.asarray(pillow.open(data).convert("RGBA")))


def code_state(folder: Path | None = None) -> Code:
    """Return the git commit, uncommitted changes and the script's path; outside of a git repository, only the path."""

    def git(*command: str) -> str | None:
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(["git", *command], cwd=folder, capture_output=True, timeout=10, check=True)
            return done.stdout.decode(errors="replace").strip()
        return None

    commit = git("rev-parse", "HEAD")
    patch = (git("diff", "HEAD") or "") if commit else ""
    remote = git("config", "--get", "remote.origin.url")
    if remote and "@" in remote and "://" in remote:  # the URL may contain a password
        scheme, _, rest = remote.partition("://")
        remote = f"{scheme}://{rest.rpartition('@')[2]}"
    branch = git("rev-parse", "--abbrev-ref", "HEAD")
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return Code(commit, branch, remote, bool(patch), patch[:_MOST_PATCH_BYTES], main)


def write_code(code: Code, folder: Path) -> None:
    """Write a program's git commit and script path to `git.json`, and uncommitted changes to `git.patch`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {field.name: getattr(code, field.name) for field in fields(code) if field.name != "patch"}
    replace(folder / "git.json", json.dumps(content, indent=1).encode())
    if code.patch:
        replace(folder / "git.patch", code.patch.encode())


def _array(value: Any) -> Array:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    return np.asarray(value)


def _bytes(array: Array) -> Array:
    """Convert pixels to uint8; floats are expected from 0 to 1, as in torchvision."""
    if array.dtype == np.bool_ or np.issubdtype(array.dtype, np.floating):
        array = np.nan_to_num(array.astype(np.float32)).clip(0, 1) * 255 + 0.5
    return np.ascontiguousarray(array.clip(0, 255).astype(np.uint8))


def _cell(value: Any) -> Cell:
    if value is None or isinstance(value, bool | str):
        return value
    if (hasattr(value, "item") and getattr(value, "size", 1) in (1, ())) or hasattr(value, "numel"):
        with suppress(ValueError, RuntimeError, TypeError):
            value = value.item()
    return value if isinstance(value, bool | int | float | str) else str(value)


def _pillow(array: Array) -> Any:
    from PIL import Image as pillow

    return pillow.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def _encoded(image: Any, format: str, **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, format=format, **options)
    return data.getvalue()


def _each(make: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return a function that calls `make` for one value or for each of several, and returns a list."""

    def make_each(name: str, values: Any, **options: Any) -> list[Any]:
        batch = make is to_image and getattr(values, "ndim", 0) == 4  # a batch of pictures, as in Accelerate
        values = list(values) if batch or isinstance(values, list | tuple) else [values]
        known = [option for option in inspect.signature(make).parameters if option not in ("name", "value")]
        for option, given in options.items():
            if option not in known:
                raise LogError(f"{name!r}: there is no option {option!r}; there are {', '.join(known)}")
            if isinstance(given, list | tuple) and len(given) != len(values):
                raise LogError(f"{name!r} has {len(values)} values, and {len(given)} of {option}")
        return [
            make(
                name,
                value,
                **{o: given[i] if isinstance(given, list | tuple) else given for o, given in options.items()},
            )
            for i, value in enumerate(values)
        ]

    return make_each


MAKERS: dict[str, Callable[..., Any]] = {
    "text": lambda name, value: str(value),
    "image": _each(to_image),
    "figure": _each(to_figure),
    "audio": _each(to_audio),
    "video": _each(to_video),
    "histogram": to_histogram,
    "table": to_table,
}
"""For each kind of value that is logged with a name and a step: the function that makes the plain form of a value."""


# ---- conversion to JSON and back, for the file of waiting records

_KINDS = {kind.__name__: kind for kind in (Image, Audio, Video, Histogram, Table, Artifact, Code)}


def to_json(value: Any) -> Any:
    """Convert a plain value, or an object of a class in this module, to JSON values."""
    if isinstance(value, np.ndarray):
        data = io.BytesIO()
        np.save(data, value, allow_pickle=False)
        return {"array": base64.b64encode(data.getvalue()).decode()}
    if isinstance(value, Path):
        return {"path": str(value)}
    if type(value).__name__ in _KINDS and isinstance(value, _KINDS[type(value).__name__]):
        parts = [to_json(getattr(value, field.name)) for field in fields(value)]
        return {"kind": type(value).__name__, "parts": parts}
    if isinstance(value, dict):
        return {"dict": {str(name): to_json(item) for name, item in value.items()}}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def from_json(value: Any) -> Any:
    """Convert the JSON values that `to_json` returned back to the original value; tuples become lists.

    Raises:
        ValueError: the value is not a result of `to_json`.
    """
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"array": str(data)}:
            return np.load(io.BytesIO(base64.b64decode(data)), allow_pickle=False)
        case {"path": str(path)}:
            return Path(path)
        case {"kind": str(kind), "parts": list(parts)} if kind in _KINDS and len(parts) == len(fields(_KINDS[kind])):
            return _KINDS[kind](*map(from_json, parts))
        case {"dict": dict(items)}:
            return {name: from_json(item) for name, item in items.items()}
    raise ValueError(f"{str(value)[:80]} is no record of a logger")


def size_of(value: Any) -> int:
    """Estimate the bytes of memory that a plain value takes."""
    if isinstance(value, dict):
        return 100 * len(value)
    if isinstance(value, list | tuple):
        return sum(map(size_of, value)) + 50
    if isinstance(value, Table):
        return 50 * math.prod((len(value.rows), len(value.columns)))
    array = getattr(value, "array", None)
    return 200 + (array.nbytes if isinstance(array, np.ndarray) else len(value) if isinstance(value, str) else 0)
