"""Load checkpoints into models, on one device or several; weights that do not fit stay in the files.

All weights are checked against the headers of the files before the first weight changes. So a checkpoint that is wrong,
cut off or of another model is an error, and leaves the model unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from instep.big_models.device_map import Device, Memory, check_device_map, device_of, resolve_device_map
from instep.big_models.dispatch import dispatch_model
from instep.big_models.hub import PICKLED, PICKLED_INDEX, SAFE, SAFE_INDEX, download, is_repository, owned, parts_of
from instep.big_models.offload import (
    FILE,
    Stored,
    WeightsMap,
    identity_of,
    offload_weights,
    put_tensor,
    set_offloaded_weights,
)
from instep.big_models.pages import prefer_huge, read_ahead, will_need
from instep.big_models.sizes import as_dtype
from instep.checkpoint.lazy import LazyTensor
from instep.checkpoint.names import MANIFEST
from instep.checkpoint.tensors import dtype_from_name, dtype_name, why_unsavable
from instep.checkpoint.weights import stored_weights
from instep.distributed.collectives import broadcast
from instep.distributed.rank_zero import on_rank_zero
from instep.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, SettingError
from instep.strategies.materialize import builds_empty, defer_weights
from instep.types import Location, PathLike
from instep.utils.checks import wrong
from instep.utils.paths import to_path
from instep.utils.warn import warn_user

DISK = "disk"
_AT_ONCE = 64 * 2**20  # number of bytes that are read ahead while earlier bytes are used
_SHOWN = 8  # maximum number of names in an error text
_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json")  # a name that ends like this is no hub repository


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: Location,
    device_map: Mapping[str, Device] | None = None,
    offload_folder: PathLike | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint into a model, each weight to its device. To run a divided model, call `dispatch_model` then.

    Without a device map, a weight that has values is overwritten in its memory, and a weight on the meta device gets
    new memory. But inside a block that builds modules without values (`init_empty_weights`; `configure_model` under
    `FSDPStrategy(meta_init=True)`) weights stay on the meta device, and their places in the files are recorded. After a
    strategy has placed the module, it reads these weights, each rank only its own part. It initializes weights that the
    checkpoint lacks, and weights that are added to the module after this call, such as those of adapters.

    With a device map, a weight on "cpu" is memory-mapped from its file and read now. A weight on "disk" stays on the
    meta device, and is read when it is used. Mapped weights take no anonymous memory, and a change in place stays in
    this process. While they are used, the file may be deleted or replaced by a rename, but not truncated or overwritten
    in place.

    Args:
        model: model with values, or without (`init_empty_weights`).
        checkpoint: a safetensors file, a .bin, .pt, .pth or .ckpt file of a state dict (read with weights_only=True),
            the .index.json of several such files, a folder with one of these, a checkpoint folder that
            `instep.checkpoint.load_weights` reads, or a repository of the Hugging Face hub ("user/model"), which is
            read from the hub's cache if it is there.
        device_map: module name -> device, "cpu" or "disk"; "" is the model. For "auto", call
            `load_checkpoint_and_dispatch`.
        offload_folder: folder for weights on "disk" that cannot be used in the checkpoint's file: weights that get
            another dtype, and weights of a pickled file. The folder is used again for the same model and checkpoint,
            and refused for others.
        dtype: dtype of floating-point weights; None: the model's own.
        offload_state_dict: accepted for scripts that set it, and without effect, since no weight is ever in memory
            twice.
        offload_buffers: whether buffers of modules on "disk" stay on the disk too.
        keep_in_fp32_modules: names of modules, or last parts of them, whose weights are float32 whatever `dtype` says.
        offload_8bit_bnb: must be False: `load_and_quantize_model` offloads 8-bit weights.
        strict: whether a name that only the model or only the checkpoint has is an error; otherwise it is a warning.
        full_state_dict: must be True: files hold whole weights.
        broadcast_from_rank0: whether rank 0 alone reads, and sends each weight to all ranks, which must all call this.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        CorruptCheckpointError: the checkpoint is damaged.
        CheckpointError: the checkpoint does not fit the model, or lacks a weight on the meta device that no strategy
            initializes later.
        SettingError: a module has no device, a weight for "disk" needs an `offload_folder`, or an argument is wrong.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> from torch import nn
        >>> from instep.big_models import init_empty_weights
        >>> with init_empty_weights():
        ...     model = nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file(nn.Linear(2, 1).state_dict(), f"{folder}/model.safetensors")
        ...     load_checkpoint_in_model(model, f"{folder}/model.safetensors")
        >>> model.weight.device
        device(type='cpu')

        In `configure_model`, each rank of a sharded strategy reads its part of the weights:

        >>> from instep import TrainModule
        >>> class Tuned(TrainModule):
        ...     def configure_model(self):
        ...         with init_empty_weights():
        ...             self.model = nn.Linear(2, 1)
        ...             load_checkpoint_in_model(self.model, "model.safetensors")

    Source: the function of this name in Hugging Face Accelerate.
    """
    later = device_map is None and builds_empty()
    _check_flags(offload_8bit_bnb, full_state_dict, broadcast_from_rank0 and (later or device_map is not None))
    if device_map is not None:
        check_device_map(model, device_map)
    kind = None if dtype is None else as_dtype(dtype)
    if kind is not None and not kind.is_floating_point:
        raise wrong("dtype", dtype, "a floating-point dtype; load_and_quantize_model makes weights of integers")
    source = _open_on_rank_zero(checkpoint) if broadcast_from_rank0 else open_checkpoint(checkpoint)
    weights = _match(model, source, strict, later)
    for weight in weights:
        weight.dtype = _wanted_dtype(weight, kind, keep_in_fp32_modules or ())
        weight.device = None if device_map is None else _device_of(weight, device_map, offload_buffers)
    if later:
        weights = _defer(model, weights)
    offloaded = _offload(model, source, weights, offload_folder)
    with torch.no_grad():
        made = [(weight, _value(weight, mapped)) for weight, mapped in _ahead(weights, in_place=False)]
        # The model is changed only from here on, after every value has been made without an error.
        for weight, value in made:
            put_tensor(model, weight.names, weight.old, value)
        for weight, mapped in _ahead(weights, in_place=True):
            assert mapped is not None
            weight.old.copy_(mapped)
    if offloaded:
        set_offloaded_weights(model, WeightsMap(offloaded))


def _check_flags(offload_8bit_bnb: bool, full_state_dict: bool, broadcast_in_vain: bool) -> None:
    """Raise SettingError for values of `load_checkpoint_in_model`'s arguments that Accelerate allows and instep not."""
    refused = {
        "offload_8bit_bnb=True": offload_8bit_bnb and "load_and_quantize_model offloads 8-bit weights itself: use that",
        "full_state_dict=False": not full_state_dict
        and "files hold whole weights, each rank reads its part: leave it out",
        "broadcast_from_rank0=True": broadcast_in_vain
        and "with a device map, or a strategy's empty weights, each rank reads what it needs: leave it out",
    }
    for argument, reason in refused.items():
        if reason:
            field = argument.partition("=")[0]
            raise SettingError(f"{argument} is not possible here: {reason}", field=field, got=argument.endswith("True"))


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: Location,
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: Memory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    offload_folder: PathLike | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model that may be larger than the memory, and make it run.

    Args:
        model: model that was made under `init_empty_weights`, whose weights take no memory yet.
        checkpoint: as for `load_checkpoint_in_model`.
        device_map: "auto" or "balanced": accelerators get equal shares; "balanced_low_0": little on the first;
            "sequential": fill one after the other; then the host's memory, then the disk. Or the device of each
            module, by name. None: only load the weights.
        max_memory: bytes that weights may take on each device (by its number, "cpu" or "disk"), such as
            {0: "10GiB", "cpu": "30GiB"}; None: the memory that is free now.
        no_split_module_classes: classes whose modules stay on one device, such as layers with a residual connection.
        offload_folder: as for `load_checkpoint_in_model`.
        offload_buffers: as for `load_checkpoint_in_model`.
        dtype: as for `load_checkpoint_in_model`.
        offload_state_dict: as for `load_checkpoint_in_model`.
        skip_keys: as for `dispatch_model`.
        preload_module_classes: as for `dispatch_model`.
        force_hooks: as for `dispatch_model`.
        strict: as for `load_checkpoint_in_model`.
        full_state_dict: as for `load_checkpoint_in_model`.
        broadcast_from_rank0: as for `load_checkpoint_in_model`.

    Returns:
        The model.

    Raises:
        CheckpointError: as for `load_checkpoint_in_model`, which may raise other errors too.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from safetensors.torch import save_file
        >>> from torch import nn
        >>> from instep.big_models import init_empty_weights
        >>> with init_empty_weights():
        ...     model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(3)))  # 40,400 bytes each
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     weights = nn.Sequential(*(nn.Linear(100, 100) for _ in range(3))).state_dict()
        ...     save_file(weights, f"{folder}/model.safetensors")
        ...     model = load_checkpoint_and_dispatch(model, folder, device_map="auto", max_memory={"cpu": "90KB"})
        ...     model.hf_device_map, model(torch.ones(1, 100)).shape
        ({'0': 'cpu', '1': 'disk', '2': 'disk'}, torch.Size([1, 100]))

    Source: the function of this name in Hugging Face Accelerate.
    """
    devices = None
    if device_map is not None:
        devices = resolve_device_map(model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers)
    load_checkpoint_in_model(
        model,
        checkpoint,
        devices,
        offload_folder,
        dtype,
        offload_state_dict,
        offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if devices is None:
        return model
    return dispatch_model(
        model,
        devices,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


# ---- opening the checkpoint


@dataclass(frozen=True)
class Source:
    """Weights of a checkpoint, which are read later.

    Args:
        path: path that the user gave, or the folder in the hub's cache.
        main: the file, index or folder that was opened at this path.
        weights: the weights, by the names that the files have.
    """

    path: Path
    main: Path
    weights: Mapping[str, Stored]

    @property
    def files(self) -> set[Path]:
        """The files whose content determines the weights."""
        if self.main.is_dir():
            return {path for path in self.main.rglob("*") if path.is_file() and path.name != FILE}
        return {self.main, *_of_index(self.main)}


def open_checkpoint(checkpoint: Location) -> Source:
    """Open the weights for `load_checkpoint_in_model`; safetensors files are not read yet.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or no weights in it.
        CorruptCheckpointError: the checkpoint is damaged.
        CheckpointError: the checkpoint cannot be read without running code, or a link or a name in its index leads out
            of its folder.
    """
    path = to_path(checkpoint)
    named = isinstance(checkpoint, str) and is_repository(checkpoint) and path.suffix not in _FILES
    if named and not path.exists():
        try:
            path = download(str(checkpoint), pickled=True)
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(f"there is no file or folder {checkpoint} here, and {error}") from error
    if not path.exists():
        raise CheckpointNotFoundError(
            f"{checkpoint} does not exist. Give a file or folder of weights, or a repository of the Hugging Face hub.",
            path=path,
        )
    main = _main_file(path) if path.is_dir() else path
    try:
        weights = stored_weights(main)
    except CheckpointNotFoundError as error:  # this error mentions only checkpoints of runs, so name the other files
        raise CheckpointNotFoundError(
            f"{error}; and no {SAFE} or {SAFE_INDEX}, {PICKLED} or {PICKLED_INDEX}. Give the path of the weights.",
            path=path,
        ) from error
    for name, weight in weights.items():
        try:
            dtype_from_name(str(weight.dtype).removeprefix("torch."))
        except ValueError as error:
            raise CorruptCheckpointError(f"{path}: {name} cannot be used: {error}", path=path) from error
        if isinstance(weight, LazyTensor):
            weight.check_whole()
        problem = why_unsavable(weight) if isinstance(weight, Tensor) else None
        if problem is not None:  # a pickled file may contain any kind of tensor
            raise CheckpointError(f"{path}: {name} cannot be used: it is {problem}", path=path)
    return Source(path, main, weights)


def _open_on_rank_zero(checkpoint: Location) -> Source:
    """Open a checkpoint that only rank 0 can see; reading one of its weights is a collective."""
    here: list[Source] = []

    def opened() -> tuple[str, dict[str, tuple[list[int], str]]]:
        here.append(open_checkpoint(checkpoint))
        heads = {name: (list(weight.shape), dtype_name(weight.dtype)) for name, weight in here[0].weights.items()}
        return str(here[0].path), heads

    path, heads = on_rank_zero(opened, f"opening {checkpoint}")
    mine = here[0].weights if here else {}
    weights = {
        name: _Sent(torch.Size(shape), dtype_from_name(dtype), mine.get(name)) for name, (shape, dtype) in heads.items()
    }
    return Source(Path(path), Path(path), weights)


class _Sent:
    """Weight that rank 0 reads and sends to all ranks."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, stored: Stored | None) -> None:
        self.shape, self.dtype, self._stored = shape, dtype, stored

    def read(self, box: tuple[slice, ...] | None = None) -> Tensor:
        """Read the weight, or the part that slices select; all ranks must call this."""
        stored = self._stored
        value = torch.empty(self.shape, dtype=self.dtype) if stored is None else stored
        sent = broadcast(value if isinstance(value, Tensor) else value.read())
        return sent if box is None else sent[box]


def _main_file(folder: Path) -> Path:
    """Choose the path to open in a folder: the file or index of weights, else the folder itself."""
    if (folder / MANIFEST).exists():
        return folder
    indexes = sorted(path.name for path in folder.glob("*.index.json"))
    for single, index in ((SAFE, SAFE_INDEX), (PICKLED, PICKLED_INDEX)):
        for name in (single, index):
            if (folder / name).exists():
                return _checked(folder / name)
    if len(indexes) > 1:
        raise CheckpointError(
            f"{folder} has several indexes, {', '.join(indexes[:_SHOWN])}: give the path of one of them", path=folder
        )
    return _checked(folder / indexes[0]) if indexes else folder


def _checked(path: Path) -> Path:
    """Return a file after checking that it, and each file it names, lies in its folder or in the hub's cache."""
    if isinstance(path, Path):  # a local file may be a link; an object store has no links
        for each in (path, *_of_index(path)):
            owned(each)
    return path


def _of_index(path: Path) -> list[Path]:
    return parts_of(path) if path.name.endswith(".index.json") else []


# ---- matching the weights and choosing their devices


@dataclass(eq=False)
class _Weight:
    """One weight of the model, under all its names, and its stored tensor."""

    names: list[str]
    old: Tensor
    is_parameter: bool
    stored: Stored
    dtype: torch.dtype = torch.float32
    device: Device | None = None

    @property
    def mapped(self) -> Tensor | None:
        """The whole weight mapped from its file; None if it must be read."""
        return self.stored.map() if isinstance(self.stored, LazyTensor) and self.stored.mappable else None

    @property
    def in_place(self) -> bool:
        """Whether the weight can be read directly into the memory that the model has for it, without conversion."""
        has_memory = self.device is None and not self.old.is_meta and self.old.dtype == self.dtype
        return has_memory and isinstance(self.stored, LazyTensor) and self.stored.mappable

    @property
    def place(self) -> tuple[str, int]:
        """File of the weight, and the byte at which the weight begins."""
        parts = self.stored.parts if isinstance(self.stored, LazyTensor) else ()
        return (str(parts[0].path), parts[0].begin) if parts else ("", 0)


def _match(model: nn.Module, source: Source, strict: bool, later: bool) -> list[_Weight]:
    """Match the model's weights with the checkpoint's weights; raise if some do not fit.

    Args:
        model: the model.
        source: the checkpoint's weights.
        strict: as for `load_checkpoint_in_model`.
        later: whether weights without a value may get one later, from the strategy that places the model.
    """
    groups: dict[int, tuple[Tensor, list[str]]] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in {**parameters, **_saved_buffers(model)}.items():
        groups.setdefault(id(tensor), (tensor, []))[1].append(name)
    found: list[_Weight] = []
    missing: list[str] = []
    empty: list[str] = []
    wrong: list[str] = []
    for old, names in groups.values():
        stored = next((source.weights[name] for name in names if name in source.weights), None)
        if stored is None:
            missing.append(names[0])
            empty.extend(names[:1] if old.is_meta else [])
            continue
        found.append(_Weight(names, old, names[0] in parameters, stored))
        if tuple(stored.shape) != tuple(old.shape):
            wrong.append(f"{names[0]} has shape {tuple(stored.shape)}, and {tuple(old.shape)} in the model")
        elif _kind(stored.dtype) != _kind(old.dtype):
            wrong.append(f"{names[0]} is of {stored.dtype}, and of {old.dtype} in the model")
    known = {name for _, names in groups.values() for name in names}
    unexpected = [name for name in source.weights if name not in known]
    text = _differences(missing, unexpected)
    what = f"{source.path} does not fit {type(model).__name__}: "
    advice = " Nothing was loaded. Give the checkpoint of this model."
    if wrong:
        raise CheckpointError(f"{what}{_some(wrong, '; ')}.{advice}", path=source.path)
    if not found or (strict and text):
        raise CheckpointError(f"{what}{text or 'it holds no weights'}.{advice}", path=source.path)
    tied = bool(empty) and hasattr(model, "tie_weights")
    tie = " If these are tied to others, call the model's tie_weights() first." * tied
    if empty and not later:
        raise CheckpointError(
            f"{what}it lacks {_some(empty)}, which the model has on the meta device, without values.{advice}{tie}",
            path=source.path,
        )
    if text:
        warn_user(f"{source.path} does not fit {type(model).__name__} wholly: {text}. The rest was loaded.{tie}")
    return found


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


def _differences(missing: list[str], unexpected: list[str]) -> str:
    said = [f"it lacks {_some(missing)}"] * bool(missing)
    said += [f"the model has no {_some(unexpected)}"] * bool(unexpected)
    return ", and ".join(said)


def _some(names: Sequence[str], between: str = ", ") -> str:
    more = f"{between}and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return between.join(name[:200] for name in names[:_SHOWN]) + more


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _wanted_dtype(weight: _Weight, dtype: torch.dtype | None, in_fp32: Sequence[str]) -> torch.dtype:
    if dtype is None or not weight.stored.dtype.is_floating_point:
        return weight.old.dtype if dtype is None else weight.stored.dtype
    kept = any(f".{each}." in f".{name}." for each in in_fp32 for name in weight.names)
    return torch.float32 if kept else dtype


def _device_of(weight: _Weight, device_map: Mapping[str, Device], offload_buffers: bool) -> Device:
    """Return a weight's device; of several tied names, the first that is not on the disk decides."""
    devices = [device_of(name, device_map) for name in weight.names]
    chosen = next((device for device in devices if device not in (None, DISK)), DISK)
    return "cpu" if chosen == DISK and not weight.is_parameter and not offload_buffers else chosen


# ---- reading weights into the model


class _Converted:
    """Weight that is converted to another dtype when it is read."""

    def __init__(self, stored: Stored, dtype: torch.dtype) -> None:
        self._stored, self.dtype = stored, dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self._stored.shape

    def read(self, box: tuple[slice, ...] | None = None) -> Tensor:
        """Read the weight, or the part that slices select."""
        value = self._stored[box or ...] if isinstance(self._stored, Tensor) else self._stored.read(box)
        return value.to(self.dtype)


def _defer(model: nn.Module, weights: Iterable[_Weight]) -> list[_Weight]:
    """Record where the values of weights on the meta device are in files, and return the other weights."""
    waiting = {weight: weight.old.is_meta for weight in weights}
    for weight in (weight for weight, waits in waiting.items() if waits):
        weight.old.data = weight.old.data.to(weight.dtype)
    defer_weights(model, {weight.names[0]: weight.stored for weight, waits in waiting.items() if waits})
    return [weight for weight, waits in waiting.items() if not waits]


def _offload(
    model: nn.Module, source: Source, weights: Iterable[_Weight], folder: PathLike | None
) -> dict[str, Stored]:
    """Find or write the files of weights whose device is "disk"; return the stored weights under all their names."""
    found: dict[str, Stored] = {}
    written: dict[str, Stored] = {}
    lying = [weight for weight in weights if weight.device == DISK]
    for weight in lying:
        as_it_is = isinstance(weight.stored, LazyTensor) and weight.stored.dtype == weight.dtype
        (found if as_it_is else written)[weight.names[0]] = (
            weight.stored if as_it_is else _Converted(weight.stored, weight.dtype)
        )
    if written and folder is None:
        name, weight = next((each.names[0], each) for each in lying if each.names[0] in written)
        raise SettingError(
            f"{len(written)} weights for the disk cannot be used where they are (the first, {name}, is of "
            f"{weight.stored.dtype} in {source.path}, {weight.dtype} is wanted). Give an offload_folder to write them "
            "to, or the dtype of the checkpoint.",
            field="offload_folder",
            got=None,
        )
    if written:
        assert folder is not None
        shapes = {name: value.shape for name, value in model.state_dict(keep_vars=True).items()}
        found.update(offload_weights(folder, shapes, written, identity_of(source.files)))
    return {name: found[weight.names[0]] for weight in lying for name in weight.names}


def _ahead(weights: Iterable[_Weight], in_place: bool) -> Iterator[tuple[_Weight, Tensor | None]]:
    """Yield the weights with this value of `in_place`, each with its mapped value or None, in the order of their files.

    While the caller uses a weight, the disk reads later ones.
    """
    windows: list[list[tuple[_Weight, Tensor | None]]] = [[]]
    room = _AT_ONCE
    for weight in sorted(weights, key=lambda weight: weight.place):
        if weight.in_place != in_place:
            continue
        mapped = None if weight.device == DISK else weight.mapped
        if room < 0:
            windows.append([])
            room = _AT_ONCE
        windows[-1].append((weight, mapped))
        room -= 0 if mapped is None else mapped.nbytes
    for number, window in enumerate(windows):
        for later in windows[number + 1 : number + 2]:
            will_need(mapped for _, mapped in later if mapped is not None)
        read_ahead(mapped for _, mapped in window if mapped is not None)
        yield from window


def _value(weight: _Weight, mapped: Tensor | None) -> Tensor:
    """Make the tensor that the model gets: mapped if there is a device map, else in memory of its own."""
    stored, device = weight.stored, weight.device
    if device == DISK:
        return torch.empty(weight.old.shape, dtype=weight.dtype, device="meta")
    value = mapped if mapped is not None else stored if isinstance(stored, Tensor) else stored.read()
    if device is None:
        device = "cpu" if weight.old.is_meta else weight.old.device
        if mapped is not None and torch.device(device).type == "cpu":
            return prefer_huge(torch.empty(value.shape, dtype=weight.dtype)).copy_(value)
    return value.to(device, weight.dtype)
