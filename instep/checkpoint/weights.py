"""Read a model's weights from checkpoints and files of many formats, and write them as plain safetensors files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor

from instep.checkpoint.edge import dict_of, reading, text
from instep.checkpoint.files import LocalFiles, patiently
from instep.checkpoint.foreign import find_foreign_folder, read_torch_file
from instep.checkpoint.lazy import FileSlice, join_tensors, read_parts
from instep.checkpoint.names import inside
from instep.checkpoint.reader import Reader
from instep.checkpoint.remote import files_of
from instep.checkpoint.scan import find_checkpoint
from instep.checkpoint.tensors import StoredTensor, content_of, framing, read_tensors, why_unsavable, write_tensors
from instep.distributed.rank_zero import on_rank_zero
from instep.errors import CheckpointError, CorruptCheckpointError, UnsavableStateError
from instep.types import Location, PathLike
from instep.utils.atomic import creating, replacing
from instep.utils.optimizer_state import clean_name
from instep.utils.paths import local_path, to_path
from instep.utils.untrusted_files import INDEX_BYTES, parse_object
from instep.utils.warn import warn_user

_FOREIGN = (".pt", ".pth", ".ckpt", ".bin")
_INDEX = ".json"  # ending of an index: a file that names the files of a large model's weights
_NESTED = ("state_dict", "model", "model_state_dict")  # keys of the weights in files of Lightning and of common scripts

_HUB_INDEX = "model.safetensors.index.json"  # name of the index on the Hugging Face hub
# names of weight files on the Hugging Face hub, by the argument `safe` of `save_weights`
_NAMES = {True: "model.safetensors", False: "pytorch_model.bin"}
_Weights: TypeAlias = "Mapping[str, StoredTensor] | Mapping[str, Tensor]"


def load_weights(path: Location, which: str | None = None) -> dict[str, Tensor]:
    """Read a model's weights from a checkpoint or a file.

    A file of torch.save is read with `weights_only=True`, so a file that needs to run code is refused.

    Args:
        path: path or URL of a checkpoint folder; of a .safetensors file; of a .pt, .pth, .ckpt or .bin file whose
            content is a state dict, or has one under the key "state_dict", "model" or "model_state_dict"; of the
            .index.json of several such files; or of a folder that DeepSpeed or torch.distributed.checkpoint wrote. The
            name of a checkpoint folder ends with "-<attempt>", which counts the saves of one step and may be left out.
        which: set of weights in a checkpoint of a run with WeightAveraging: "live" (trained) or "averaged". None: the
            set in `model.safetensors`.

    Returns:
        Tensors on the CPU by the name of the parameter or buffer. A tied tensor is under each of its names.

    Raises:
        CheckpointNotFoundError: the path does not exist, or has no weights.
        CorruptCheckpointError: the checkpoint or file is damaged.
        CheckpointError: the file cannot be read without running code, or contains no state dict.

    Example:
        >>> import tempfile
        >>> import torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"state_dict": torch.nn.Linear(2, 1).state_dict()}, f"{folder}/model.ckpt")
        ...     weights = load_weights(f"{folder}/model.ckpt")
        >>> torch.nn.Linear(2, 1).load_state_dict(weights)
        <All keys matched successfully>
    """
    path = to_path(path)
    if path.is_file():
        if path.suffix not in (*_FOREIGN, _INDEX):
            _check_plain(path, which)
            return read_tensors(path)
        found = _stored_in(path)
    else:
        found = _stored_folder(path)
        if found is None:
            return Reader(find_checkpoint(path)).weights(which)
    _check_plain(path, which)
    return {name: tensor if isinstance(tensor, Tensor) else tensor.read() for name, tensor in found.items()}


def _check_plain(path: Path, which: str | None) -> None:
    if which is not None:
        raise CheckpointError(
            f"{path} is no checkpoint of instep, and has one set of weights: leave out which_weights={which!r}",
            path=path,
        )


def stored_weights(path: Path, which: str | None = None) -> Mapping[str, StoredTensor] | Mapping[str, Tensor]:
    """Open the weights that `load_weights` would read; each tensor is read from its file only when needed.

    Args:
        path: path as in `load_weights`, but a `Path`. Files of torch.save and folders of DeepSpeed are read completely.
        which: set of weights: "live" (trained) or "averaged". None: the set in `model.safetensors`.

    Returns:
        `StoredTensor` objects by name; tensors if they were read completely.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or no weights in it.
        CorruptCheckpointError: the checkpoint is damaged.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from instep.checkpoint import CheckpointStore
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     weights = {"weight": torch.arange(6.0)}
        ...     path = CheckpointStore(folder).save(10, lambda writer: writer.tensors("model.safetensors", weights))
        ...     stored = stored_weights(path)["weight"]
        ...     stored.shape, stored.read((slice(2, 4),))
        (torch.Size([6]), tensor([2., 3.]))
    """
    foreign = _stored_in(path) if path.is_file() else _stored_folder(path)
    if foreign is None:
        return Reader(find_checkpoint(path)).stored_weights(which)
    _check_plain(path, which)
    return foreign


def _stored_folder(path: Path) -> Mapping[str, StoredTensor] | Mapping[str, Tensor] | None:
    """Open the weights in a folder that DeepSpeed or torch.distributed.checkpoint wrote; None for another folder."""
    found = find_foreign_folder(path)
    return None if found is None else found[0].open_folder(found[1], _NESTED)


def _stored_in(path: Path) -> Mapping[str, StoredTensor] | Mapping[str, Tensor]:
    files = indexed_files(path) if path.suffix == _INDEX else [path]
    if all(file.suffix in _FOREIGN for file in files):
        return {name: tensor for file in files for name, tensor in _load_foreign(file).items()}
    parts = {file: read_parts(file) for file in files}
    if path.suffix == _INDEX:
        _check_index(path, parts)
    return join_tensors(parts.values())


def _check_index(path: Path, parts: Mapping[Path, Mapping[str, FileSlice]]) -> None:
    """Raise an error if an index gives the wrong file for a tensor, or if two files contain the same tensor."""
    for name, file in weight_map(path).items():
        if name not in parts[path.parent / file]:
            raise CorruptCheckpointError(f"{path} names {name} in {file}, which has no such tensor", path=path)
    whole: dict[str, Path] = {}
    for file, found in parts.items():
        for name, part in found.items():
            if part.sizes == part.shape and whole.setdefault(name, file) != file:
                raise CorruptCheckpointError(
                    f"{name} is in two files that {path} names: {whole[name].name} and {file.name}", path=path
                )


def indexed_files(path: Path) -> list[Path]:
    """Return the files that an index (`*.index.json`, as on the Hugging Face hub) names; all must be in its folder.

    Raises:
        CorruptCheckpointError: the file is not an index.
        CheckpointError: the index names a file outside of its folder, or cannot be read.
    """
    with reading(path, "is no index of weights' files"):
        return [inside(path.parent, file, path) for file in sorted(set(weight_map(path).values()))]


def weight_map(path: Path) -> dict[str, str]:
    """Read an index (`*.index.json`): return the name of the file for each weight.

    Raises:
        CorruptCheckpointError: the file is not an index.
    """
    with reading(path, "is no index of weights' files"):
        named = parse_object(patiently(lambda: files_of(path).read(path, INDEX_BYTES)))["weight_map"]
        if not named or not dict_of(text)(named):
            raise ValueError("its weight_map is no object of names")
        return named


def plain_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return plain tensors without attributes that a file may have added; tied tensors stay the same object."""
    once: dict[int, Tensor] = {}
    return {str(name): once.setdefault(id(tensor), torch.Tensor.detach(tensor)) for name, tensor in state.items()}


def _load_foreign(path: Path) -> dict[str, Tensor]:
    loaded = read_torch_file(path)
    nested = [loaded.get(key) for key in _NESTED] if isinstance(loaded, Mapping) else []
    for candidate in (*nested, loaded):
        if _is_state_dict(candidate):
            return plain_tensors(candidate)
    keys = ", ".join(map(str, list(loaded)[:8])) if isinstance(loaded, Mapping) else type(loaded).__name__
    raise CheckpointError(
        f"{path} holds no state dict: expected names with tensors, by themselves or under {', '.join(_NESTED)}; "
        f"got {keys}",
        path=path,
    )


def _is_state_dict(value: Any) -> TypeGuard[Mapping[str, Tensor]]:
    return isinstance(value, Mapping) and len(value) > 0 and all(isinstance(v, Tensor) for v in value.values())


def merge(path: Location, file: PathLike, which: str | None = None) -> Path:
    """Write the weights of a checkpoint as one safetensors file, which can be read without instep.

    If the checkpoint's weights are in safetensors files, one tensor is read and written at a time, so that the memory
    never holds the whole model. Tied weights are written under each of their names, so that `load_state_dict` finds
    all. Every file of the checkpoint that is read is verified. The new file is written completely or not at all.

    Args:
        path: path as in `load_weights`; one rank or several may have written the checkpoint.
        file: path of the new file, which must not exist.
        which: set of weights: "live" (trained) or "averaged". None: the set in `model.safetensors`.

    Returns:
        Path of the new file.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or no weights in it.
        CorruptCheckpointError: the checkpoint is damaged.
        CheckpointError: the file exists already, or cannot be written.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from safetensors.torch import load_file
        >>> from instep.checkpoint import CheckpointStore
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     weights = {"weight": torch.ones(2)}
        ...     path = CheckpointStore(folder).save(10, lambda writer: writer.tensors("model.safetensors", weights))
        ...     load_file(merge(path, f"{folder}/model.safetensors"))
        {'weight': tensor([1., 1.])}
    """
    weights = stored_weights(to_path(path), which)
    return write_new(local_path(file), lambda part: write_plain(weights, part))


def merge_in_parts(path: Location, folder: PathLike, max_bytes: int, which: str | None = None) -> Path:
    """Write the weights of a checkpoint as several safetensors files with an index, as on the Hugging Face hub.

    Args:
        path: path as in `load_weights`.
        folder: path of the new folder, which must not exist.
        max_bytes: largest size of the tensors in a file, in bytes. A larger tensor gets its own file. If all tensors
            fit into one file, it is `model.safetensors`, without an index.
        which: set of weights: "live" (trained) or "averaged". None: the set in `model.safetensors`.

    Returns:
        Path of the new folder.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, CheckpointError: for the same reasons as in `merge`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from instep.checkpoint import CheckpointStore
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     weights = {"a": torch.ones(2), "b": torch.ones(2)}  # 8 bytes each
        ...     path = CheckpointStore(folder).save(10, lambda writer: writer.tensors("model.safetensors", weights))
        ...     for file in sorted(merge_in_parts(path, f"{folder}/hub", max_bytes=8).iterdir()):
        ...         print(file.name)
        model-00001-of-00002.safetensors
        model-00002-of-00002.safetensors
        model.safetensors.index.json
    """
    weights = stored_weights(to_path(path), which)
    files, index = parts_of(weights, max_bytes)

    def write(temporary: Path) -> None:
        temporary.mkdir()
        for file, names in files.items():
            write_plain(weights, temporary / file, names)
        if index:
            LocalFiles().write_file(temporary / _HUB_INDEX, index)
        LocalFiles().sync_folder(temporary)

    return write_new(local_path(folder), write)


def parts_of(
    weights: _Weights, max_bytes: int, name: str = "model.safetensors"
) -> tuple[dict[str, list[str]], bytes | None]:
    """Divide weights into files of limited size, as on the Hugging Face hub for large models.

    Args:
        weights: weights by name.
        max_bytes: largest size of the tensors in each file, in bytes; a larger tensor gets its own file.
        name: name of the file if all weights fit into one; several files get "-<number>-of-<count>" before the ending.

    Returns:
        The names of the weights in each file, by file name; and the content of the index (None for a single file).
    """
    sizes = {name: tensor.dtype.itemsize * tensor.shape.numel() for name, tensor in weights.items()}
    parts: list[list[str]] = [[]]
    room = max_bytes
    for weight, size in sizes.items():
        if size > room and parts[-1]:
            parts.append([])
            room = max_bytes
        parts[-1].append(weight)
        room -= size
    count = len(parts)
    if count == 1:
        return {name: parts[0]}, None
    stem, suffix = name.split(".")
    files = {f"{stem}-{i:05}-of-{count:05}.{suffix}": names for i, names in enumerate(parts, 1)}
    places = {weight: file for file, names in files.items() for weight in names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
    return files, json.dumps(index, indent=2).encode()


def write_plain(
    weights: Mapping[str, Tensor | StoredTensor],
    file: Path,
    names: Iterable[str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write weights as one plain safetensors file, reading one stored tensor at a time.

    Tied weights are written under each of their names.

    Args:
        weights: weights by name: tensors, or `StoredTensor` objects, which are read one by one.
        file: path of the new file, which must not exist.
        names: names of the weights to write. None: all.
        metadata: strings to store in the file's header.
    """
    names = list(weights if names is None else names)
    for name in names:
        tensor = weights[name]
        problem = why_unsavable(tensor) if isinstance(tensor, Tensor) else None
        if problem is not None:
            raise UnsavableStateError(f"{name} is {problem}")
    # Placeholders for the header, with the right shapes and dtypes: an expanded tensor takes no memory.
    shells = {name: torch.empty((), dtype=weights[name].dtype).expand(weights[name].shape) for name in names}
    head, order = framing(shells, metadata)
    with LocalFiles().create(file, len(head) + sum(tensor.nbytes for tensor in order.values())) as out:
        out.write(head)
        for name in order:
            tensor = weights[name]
            out.write(content_of(tensor if isinstance(tensor, Tensor) else tensor.read()))
        out.close()


def write_new(target: Path, write: Callable[[Path], Any]) -> Path:
    """Write a file or folder under a temporary name, and rename it when it is complete; never replace an existing one.

    Raises:
        CheckpointError: the target exists already, or cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with creating(target) as part:
            write(part)
    except FileExistsError as error:
        text = f"{target} exists already; nothing is overwritten. Give another name."
        raise CheckpointError(text, path=target) from error
    except OSError as error:
        text = f"could not write {target}: {error.strerror or error}. Give a place that can be written to."
        raise CheckpointError(text, path=target) from error
    return target


# ---- writing a model's weights with the file names of the Hugging Face hub


def save_weights(state: Mapping[str, Any], folder: Path, max_bytes: int, safe: bool = True) -> Path:
    """Write a model's weights with the file names of the Hugging Face hub. Collective: the main process writes.

    Each file is written under a temporary name and then renamed.

    Args:
        state: tensors by name, used on the main process only; values that are not tensors are left out.
        folder: folder to write into, which is created if it does not exist.
        max_bytes: largest size of the tensors in each file, in bytes.
        safe: True: write safetensors. False: write files of torch.save.

    Returns:
        Path of the file; for several files, path of their index.
    """

    def write() -> Path:
        weights = {clean_name(name): value for name, value in state.items() if isinstance(value, Tensor)}
        files, index = parts_of(weights, max_bytes, _NAMES[safe])
        target = folder / (_NAMES[safe] if index is None else f"{_NAMES[safe]}.index.json")
        folder.mkdir(parents=True, exist_ok=True)
        parts = folder.glob(_NAMES[safe].replace(".", "-*-of-*."))
        old = [*parts, folder / _NAMES[safe], folder / f"{_NAMES[safe]}.index.json"]
        for file, names in files.items():
            write_object({name: weights[name] for name in names}, folder / file, safe)
        if index is not None:
            with replacing(target) as temporary:
                temporary.write_bytes(index)
        for path in old:  # remove other files of an earlier save, which readers would find too
            if path.name not in files and path != target:
                path.unlink(missing_ok=True)
        if not safe and (others := [name for name in (_NAMES[True], _HUB_INDEX) if (folder / name).exists()]):
            warn_user(f"{folder} also has {others[0]}, which readers take first: delete it if it is older")
        return target

    return on_rank_zero(write, f"saving a model's weights in {folder}")


def write_object(obj: Any, file: Path, safe: bool) -> None:
    """Write a dict of tensors as safetensors, or any object by `torch.save`; replace the file atomically."""
    with replacing(file) as temporary:
        if safe:
            write_tensors(temporary, obj, {"format": "pt"})
        else:
            torch.save(obj, temporary)
