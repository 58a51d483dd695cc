"""Models divided over devices; offloaded weights are in main memory or on the disk, and are loaded for each forward."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from instep.big_models.device_map import Memory, check_device, device_of, resolve_device_map
from instep.big_models.hooks import (
    AlignDevicesHook,
    CpuOffload,
    Device,
    ForwardHook,
    Prefixed,
    UserCpuOffloadHook,
    add_hook_to_module,
    as_device,
    attach_align_device_hook,
    attach_hooks,
    offloading_hook,
    reads_within,
    remove_hook_from_module,
    tensor_like,
)
from instep.big_models.offload import (
    Stored,
    WeightsMap,
    forget_offloaded_weights,
    offload_weights,
    offloaded_weights,
    open_offload_folder,
    set_offloaded_weights,
)
from instep.big_models.placeholder import Placeholder
from instep.big_models.prefetch import prefetch_blocks, stop_prefetching
from instep.big_models.sizes import as_dtype
from instep.checkpoint.lazy import join_tensors, read_parts
from instep.errors import CheckpointError, SettingError, UsageError
from instep.strategies.materialize import DISPATCHED
from instep.types import PathLike
from instep.utils.checks import wrong
from instep.utils.paths import local_path
from instep.utils.rank_zero import rank_zero_info

DISK = "disk"
_MOVES = ("to", "cuda", "cpu", "xpu", "half", "float", "double", "bfloat16", "to_empty")


def dispatch_model(
    model: nn.Module,
    device_map: str | Mapping[str, Device],
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: PathLike | None = None,
    offload_index: Mapping[str, Mapping[str, str]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
    max_memory: Memory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
) -> nn.Module:
    """Divide a model over devices, so that it runs as before.

    A module computes on its device. A module on "cpu" or "disk" computes on the main device, to which its weights are
    copied for its forward; if the main device is the CPU, weights on "cpu" stay where they are. Between forwards,
    weights on "disk" are on the meta device. If the main device is the CPU, their forward uses them without a copy,
    memory-mapped from their file. For other devices, a thread reads the next block while one block computes.

    `model.state_dict()` has the values of all weights, offloaded ones too. The values of offloaded weights cannot be
    changed, so trainable weights must be on a device.

    Args:
        model: model with values, or a model after `load_checkpoint_in_model` with the same map; changed in place.
        device_map: device by module name, or "auto", "balanced", "balanced_low_0", "sequential".
        main_device: device where offloaded modules compute; None: the first accelerator of the map, else the CPU.
        state_dict: values of modules on "cpu" and "disk", by full name; None: the model's own values.
        offload_dir: folder for weights on "disk" that are not in a file yet.
        offload_index: for each weight on "disk": its file ("safetensors_file") and its name in the file
            ("weight_name").
        offload_buffers: whether buffers are offloaded too.
        skip_keys: keyword arguments of forwards that are not moved between devices, such as a cache.
        preload_module_classes: names of classes whose forward uses weights of submodules without calling the
            submodules.
        force_hooks: whether hooks move inputs to the model's device even if the model is on a single device.
        max_memory: limits for a map such as "auto", as for `infer_auto_device_map`.
        no_split_module_classes: for a map such as "auto", as for `infer_auto_device_map`.

    Returns:
        The model, whose `hf_device_map` is the map.

    Raises:
        SettingError: the map leaves weights without a device, or weights for the disk have no `offload_dir`.
        CheckpointError: `offload_dir` holds the weights of another model.
        UsageError: the model is dispatched already, or there are no values for weights on the meta device.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        ...     model = dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=folder)
        ...     model(torch.ones(1, 2)).shape, model[1].weight.device
        (torch.Size([1, 2]), device(type='meta'))

    Source: the function of this name in Hugging Face Accelerate.
    """
    _check_model(model, state_dict)
    if main_device is not None:
        check_device("main_device", main_device)
    devices = resolve_device_map(
        model, device_map, max_memory, no_split_module_classes, offload_buffers=offload_buffers
    )
    kinds = set(devices.values())
    if len(kinds) == 1 and DISK not in kinds and not force_hooks:
        _check_values(model, [name for name, value in model.state_dict().items() if value.is_meta])
        model.to(as_device(next(iter(kinds))))
        vars(model)["hf_device_map"] = devices
        return model
    if main_device is None:
        main_device = next((device for device in devices.values() if device not in ("cpu", DISK)), "cpu")
    main = as_device(main_device)
    away = {DISK} if main.type in ("cpu", "mps") else {"cpu", DISK}
    where = _Where(devices, main, away)
    weights = _weights_of(model, where, state_dict, offload_dir, offload_index, offload_buffers)
    several = {where.device(name) for name, _ in model.named_modules()} != {torch.device("cpu")}
    shared: dict[Any, Any] = {}
    if weights:
        add_hook_to_module(model, ForwardHook(), append=True)
    add_hook_to_module(model, _InputsHook(main, io_same_device=True, skip_keys=skip_keys), append=True)

    def make(module: nn.Module, prefix: str) -> AlignDevicesHook | None:
        """Make the hook of a module with offloaded weights, or with inputs that may be on another device."""
        name = prefix.removesuffix(".")
        whole = where.is_away(name) and reads_within(module, preload_module_classes or ())
        own = [key for key, _ in (*module.named_parameters(recurse=whole), *module.named_buffers(recurse=whole))]
        offload = any(prefix + key in weights for key in own)
        if not offload and not (several and own):
            return None
        inner = Prefixed(weights, prefix) if offload else None
        return AlignDevicesHook(
            where.device(name), offload, False, inner, offload_buffers, whole, skip_keys, tied_params_map=shared
        )

    attach_hooks(model, make)
    shared.clear()  # the dict would keep in main memory the originals of weights that are now on a device
    _Dispatched(model, weights)
    prefetch_blocks(model, weights, {name: where.device(name) for name in devices if where.is_away(name)})
    if weights:
        kept = " and ".join(sorted(str(kind) for kind in kinds & away))
        rank_zero_info(f"Some parameters are on the meta device because they were offloaded to the {kept}.")
    vars(model)["hf_device_map"] = devices
    return model


def _check_model(model: nn.Module, values: Mapping[str, Tensor] | None) -> None:
    """Raise if a model is dispatched already, or if the shapes of `values` are not those of the model's weights."""
    if offloaded_names(model):
        raise UsageError(f"{type(model).__name__} is dispatched already: call remove_hook_from_submodules(model) first")
    own = {} if values is None else model.state_dict()
    for name, value in (values or {}).items():
        if name in own and own[name].shape != value.shape:
            shapes = f"{tuple(value.shape)}, and {tuple(own[name].shape)} in {type(model).__name__}"
            raise SettingError(f"state_dict[{name!r}] has the shape {shapes}", field="state_dict", got=value.shape)


def _check_values(model: nn.Module, empty: Sequence[str]) -> None:
    if empty:
        raise UsageError(
            f"{len(empty)} weights of {type(model).__name__} are on the meta device and have no values: "
            f"{', '.join(empty[:8])}. Use load_checkpoint_and_dispatch, or load_checkpoint_in_model with a map."
        )


class _Where:
    """Map from a model's modules and weights to their devices.

    Args:
        devices: the device map.
        main: device where offloaded modules compute.
        away: devices of the map whose modules are offloaded, such as "disk".
    """

    def __init__(self, devices: Mapping[str, Device], main: torch.device, away: Collection[Device]) -> None:
        self._devices, self._main, self._away = devices, main, away

    def _entry(self, name: str) -> Device:
        found = device_of(name, self._devices)
        return self._main if found is None else found  # the device map may name only the inner modules of a module

    def is_away(self, name: str) -> bool:
        """Return whether a module or weight is offloaded."""
        return self._entry(name) in self._away

    def is_on_disk(self, name: str) -> bool:
        """Return whether a module or weight is on the disk."""
        return self._entry(name) == DISK

    def device(self, name: str) -> torch.device:
        """Return the device where a module or weight computes."""
        entry = self._entry(name)
        return self._main if entry in self._away else as_device(entry)


def _weights_of(
    model: nn.Module,
    where: _Where,
    given: Mapping[str, Tensor] | None,
    folder: PathLike | None,
    index: Mapping[str, Mapping[str, str]] | None,
    offload_buffers: bool,
) -> WeightsMap:
    """Return the values of all offloaded weights; write those that belong on the disk and are in no file yet."""
    loaded = offloaded_weights(model) or {}
    indexed = {} if index is None else _indexed(index)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    if offload_buffers:
        unsaved = {name for name, _ in model.named_buffers(remove_duplicate=False)} - set(
            model.state_dict(keep_vars=True)
        )
        buffers = dict(model.named_buffers(remove_duplicate=False))
        tensors |= {name: buffer for name, buffer in buffers.items() if name not in unsaved}
    staying = {id(tensor) for name, tensor in tensors.items() if not where.is_away(name) and not tensor.is_meta}
    found: dict[str, Stored] = {}
    written: dict[str, Tensor] = {}
    empty: list[str] = []
    for name, tensor in tensors.items():
        if not where.is_away(name) or (id(tensor) in staying and where.device(name).type == "cpu"):
            if tensor.is_meta:
                empty.append(name)
        elif name in indexed:
            found[name] = indexed[name]
        elif given is not None and name in given:
            (written if where.is_on_disk(name) else found)[name] = given[name].to("cpu")
        elif name in loaded:
            found[name] = loaded[name]
        elif not tensor.is_meta:
            if where.is_on_disk(name) and index is None:
                written[name] = tensor
            else:
                found[name] = tensor.data.to("cpu")
        else:
            empty.append(name)
    shapes = {name: value.shape for name, value in model.state_dict(keep_vars=True).items()}
    if empty and folder is not None and not written:
        there = open_offload_folder(folder, shapes)
        for name in [*empty]:
            kept = next((other for other in there if tensors.get(other) is tensors[name]), None)
            if kept is not None:
                found[name] = there.stored[kept]
                empty.remove(name)
    _check_values(model, empty)
    if written and folder is None:
        raise SettingError(
            f"{len(written)} weights for the disk, such as {next(iter(written))}, lie in no file yet. Give an "
            "offload_dir.",
            field="offload_dir",
            got=None,
        )
    if written:
        assert folder is not None
        found |= _write(folder, shapes, written)
    return WeightsMap(found)


def _write(folder: PathLike, shapes: Mapping[str, torch.Size], values: Mapping[str, Tensor]) -> dict[str, Stored]:
    """Write weights to an offload folder, tied weights once; return the stored weights under all their names."""
    first: dict[int, str] = {}
    kept = {name: first.setdefault(id(value), name) for name, value in values.items()}
    there = offload_weights(folder, shapes, {name: values[name].detach().to("cpu") for name in first.values()})
    return {name: there[other] for name, other in kept.items()}


def _indexed(index: Mapping[str, Mapping[str, str]]) -> dict[str, Stored]:
    """Open the weights of an index of safetensors files."""
    wrong_entry = next((name for name, entry in index.items() if "safetensors_file" not in entry), None)
    if wrong_entry is not None:
        raise wrong(f"offload_index[{wrong_entry!r}]", index[wrong_entry], "'safetensors_file', and 'weight_name'")
    files: dict[str, Any] = {}
    for entry in index.values():
        file = str(entry["safetensors_file"])
        if file not in files:
            files[file] = join_tensors([read_parts(local_path(file))])
    found: dict[str, Stored] = {}
    for name, entry in index.items():
        there, stored = files[str(entry["safetensors_file"])], str(entry.get("weight_name", name))
        if stored not in there:
            file = entry["safetensors_file"]
            raise CheckpointError(f"{file} has no {stored}, which offload_index names", path=Path(file))
        found[name] = there[stored]
    return found


class _InputsHook(AlignDevicesHook):
    """Hook of a whole model that moves inputs to the model's main device, and outputs back to the inputs' device."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module


class _Dispatched:
    """Changes to a dispatched model, which `undo` takes back.

    `state_dict` gets the offloaded weights. Moving or converting the model raises, and so does loading other values
    into offloaded weights.

    Args:
        model: the model.
        weights: the offloaded weights.
    """

    def __init__(self, model: nn.Module, weights: WeightsMap) -> None:
        self._model = model
        own = vars(model)
        own[DISPATCHED] = self
        for name in (*_MOVES, "_apply"):
            if hasattr(model, name):
                own[name] = _Stays(model, name)
        set_offloaded_weights(model, weights)
        self._handles = [
            model.register_load_state_dict_pre_hook(_RefusesValues(weights)),
            *(
                module.register_state_dict_post_hook(_GivesValues(weights, name, hook.names))
                for name, module in model.named_modules()
                if (hook := offloading_hook(module)) is not None
            ),
        ]

    def undo(self) -> None:
        """Take these changes back. The modules keep their hooks, which `remove_hook_from_module` removes."""
        own = vars(self._model)
        for name in (*_MOVES, "_apply", DISPATCHED):
            own.pop(name, None)
        for handle in self._handles:
            handle.remove()
        forget_offloaded_weights(self._model)
        for module in self._model.modules():
            stop_prefetching(module)


class _GivesValues:
    """Hook of a module's `state_dict` that adds the values of offloaded weights.

    Args:
        weights: offloaded weights of the whole model, by full name.
        name: the module's full name.
        leaves: names of the module's own offloaded weights, without the module's name.
    """

    def __init__(self, weights: WeightsMap, name: str, leaves: Sequence[str]) -> None:
        self._weights = weights
        self._names = {leaf: f"{name}.{leaf}".removeprefix(".") for leaf in leaves}

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for leaf, name in self._names.items():
            if isinstance(state.get(prefix + leaf), Placeholder):
                state[prefix + leaf] = tensor_like(state[prefix + leaf], self._weights.at_rest(name))


class _RefusesValues:
    """Hook of `load_state_dict` that raises if a state dict would change offloaded weights."""

    def __init__(self, weights: WeightsMap) -> None:
        self._weights = weights

    def __call__(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        found = [name for name in self._weights if prefix + name in state]
        if found:
            raise UsageError(
                f"load_state_dict would change {len(found)} offloaded weights of {type(module).__name__}, such as "
                f"{found[0]}, which are read where they lie. Load another checkpoint by load_checkpoint_and_dispatch, "
                "or leave these weights out (strict=False)."
            )


class _Stays:
    """Replacement for a method that would move a dispatched model; calling the replacement raises an error."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model, self._name = model, name

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        kind = type(self._model).__name__
        if self._name != "_apply":
            raise UsageError(
                f"{kind}.{self._name}: the model is dispatched to the devices of its hf_device_map and stays there. "
                "Dispatch it with another map or dtype, or call remove_hook_from_submodules(model) first."
            )
        if args[0](torch.empty(0)).dtype != torch.float32:  # the call would convert the model to another dtype
            raise UsageError(
                f"{kind} is dispatched, and its weights cannot be converted. Give load_checkpoint_and_dispatch the "
                "dtype, or use precision='bf16-mixed' in place of 'bf16-true'."
            )
        return self._model  # the call has moved only an outer module, and the dispatched model stays on its devices


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and its submodules, and bring offloaded weights back.

    Example:
        >>> model = cpu_offload(nn.Sequential(nn.Linear(2, 2)))
        >>> remove_hook_from_submodules(model)
        >>> model[0].weight.device
        device(type='cpu')

    Source: the function of this name in Hugging Face Accelerate.
    """
    remove_hook_from_module(module, recurse=True)


# ---- offloading whole models


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Offload all weights of a model to main memory; each module's weights come to the device for its forward.

    Args:
        model: the model, changed in place.
        execution_device: device where modules compute; None: the device of the first weight.
        offload_buffers: whether buffers are offloaded too.
        state_dict: values of the weights, by full name; None: the model's own values.
        preload_module_classes: as for `dispatch_model`.

    Returns:
        The model.

    Example:
        >>> model = cpu_offload(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        >>> model[0].weight.device, model(torch.ones(1, 2)).device
        (device(type='meta'), device(type='cpu'))

    Source: the function of this name in Hugging Face Accelerate.
    """
    _check_model(model, state_dict)
    given = model.state_dict() if state_dict is None else state_dict
    _check_values(model, [name for name, value in given.items() if value.is_meta])
    values = {name: value.to("cpu") for name, value in given.items()}
    return _offload_all(model, execution_device, WeightsMap(values), offload_buffers, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: PathLike,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Offload all weights of a model to a folder; each module's weights come to the device for its forward.

    Args:
        model: the model, changed in place.
        offload_dir: folder into which the weights are written, as one safetensors file. A folder that holds another
            model is refused.
        execution_device: device where modules compute; None: the device of the first weight.
        offload_buffers: whether buffers are offloaded too.
        preload_module_classes: as for `dispatch_model`.

    Returns:
        The model.

    Raises:
        CheckpointError: the folder holds another model's weights, or cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = disk_offload(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), folder)
        ...     print(model[0].weight.device, model(torch.ones(1, 2)).device)
        meta cpu

    Source: the function of this name in Hugging Face Accelerate.
    """
    _check_model(model, None)
    values = model.state_dict(keep_vars=True)  # keep_vars=True, so that tied weights are the same object
    _check_values(model, [name for name, value in values.items() if value.is_meta])
    weights = WeightsMap(_write(offload_dir, {name: value.shape for name, value in values.items()}, values))
    return _offload_all(model, execution_device, weights, offload_buffers, preload_module_classes)


def _offload_all(
    model: nn.Module,
    execution_device: Device | None,
    weights: WeightsMap,
    offload_buffers: bool,
    preload_module_classes: Collection[str] | None,
) -> nn.Module:
    if execution_device is None:
        first = next(iter(model.parameters()), None)
        execution_device = "cpu" if first is None or first.is_meta else first.device
    check_device("execution_device", execution_device)
    device = as_device(execution_device)
    add_hook_to_module(model, _InputsHook(device, io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        device,
        offload=True,
        weights_map=weights,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
        tied_params_map={},
    )
    _Dispatched(model, weights)
    prefetch_blocks(model, weights, {"": device})
    return model


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model in main memory until its forward, and then on the device until the returned hook offloads it.

    Use it for several models that run in turn, each many times.

    Args:
        model: the model, changed in place.
        execution_device: device where the model computes; None: the accelerator, if there is one.
        prev_module_hook: hook of another model. That model leaves the device when this one comes to the device.

    Returns:
        The model, and the hook, whose `offload()` brings the model back to main memory.

    Example:
        >>> first, first_hook = cpu_offload_with_hook(nn.Linear(2, 2))
        >>> second, second_hook = cpu_offload_with_hook(nn.Linear(2, 2), prev_module_hook=first_hook)
        >>> second(first(torch.ones(1, 2))).shape
        torch.Size([1, 2])
        >>> second_hook.offload()

    Source: the function of this name in Hugging Face Accelerate.
    """
    if execution_device is not None:
        check_device("execution_device", execution_device)
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


# ---- reading and changing the weights of single modules


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether a module's own weights are offloaded between its forwards.

    Example:
        >>> has_offloaded_params(nn.Linear(2, 2)), has_offloaded_params(cpu_offload(nn.Linear(2, 2)))
        (False, True)

    Source: the function of this name in Hugging Face Accelerate.
    """
    return offloading_hook(module) is not None


def offloading_hooks(model: nn.Module) -> Iterator[tuple[str, AlignDevicesHook]]:
    """Yield the hooks that hold offloaded weights, each with the name of its module."""
    for name, module in model.named_modules():
        hook = offloading_hook(module)
        if hook is not None and hook.names:
            yield name, hook


def offloaded_names(model: nn.Module) -> list[str]:
    """List the names of a model's weights that hooks leave on the meta device between forwards."""
    return [f"{name}.{each}".removeprefix(".") for name, hook in offloading_hooks(model) for each in hook.names]


@contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Bring a module's own weights to a device in a `with` block, for code that reads them outside of the forward.

    Args:
        module: the module. Its weights may be offloaded.
        execution_device: the device; None: the device where an offloaded module computes, else where the weights are.

    Example:
        >>> model = cpu_offload(nn.Sequential(nn.Linear(2, 2)))
        >>> with align_module_device(model[0]):
        ...     model[0].weight.device
        device(type='cpu')
        >>> model[0].weight.device
        device(type='meta')

    Source: the function of this name in Hugging Face Accelerate.
    """
    hook = offloading_hook(module)
    device = None if execution_device is None else as_device(execution_device)
    if hook is not None:
        hook.load(device)
        try:
            yield
        finally:
            hook.unload()
        return
    before = {parameter: parameter.data for parameter in module.parameters(recurse=False)}
    try:
        for parameter, data in before.items():
            parameter.data = data if device is None else data.to(device)
        yield
    finally:
        for parameter, data in before.items():
            # The data are copied back, which keeps changes that the block has made.
            parameter.data = parameter.data.to(data.device)


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
) -> None:
    """Bring one parameter or buffer of a module to a device, or give it a new value on that device.

    Args:
        module: the module.
        tensor_name: full name of the parameter or buffer in the module.
        device: the device.
        value: the new value, of the same shape; needed if the old value is on the meta device.
        dtype: dtype of the new value. With None, a parameter keeps the dtype it had, and a buffer gets that of `value`.

    Raises:
        UsageError: the module has no such tensor, the value is missing, or the value has a different shape.

    Example:
        >>> layer = nn.Linear(2, 2, device="meta")
        >>> set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2))
        >>> layer.weight.device, layer.bias.device
        (device(type='cpu'), device(type='meta'))

    Source: the function of this name in Hugging Face Accelerate.
    """
    prefix, _, leaf = tensor_name.rpartition(".")
    owner: Any = module.get_submodule(prefix)
    holder: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
    kind = type(module).__name__
    if leaf not in holder:
        raise UsageError(f"{kind} has no parameter or buffer {tensor_name!r}")
    old, to = holder[leaf], as_device(device)
    if value is None and (old is None or (old.is_meta and to.type != "meta")):
        raise UsageError(f"{tensor_name} is on the meta device and has no value: give the value that it gets on {to}")
    if value is not None and old is not None and value.shape != old.shape:
        raise UsageError(
            f"{tensor_name} of {kind} has the shape {tuple(old.shape)}, and the value has {tuple(value.shape)}"
        )
    new: Any = old if value is None else value
    wanted = None if dtype is None else as_dtype(dtype)
    if wanted is None and value is not None and isinstance(old, nn.Parameter):
        wanted = old.dtype
    with torch.no_grad():
        data = new.detach().to(to, wanted if wanted is not None else new.dtype)
    holder[leaf] = data if old is None else tensor_like(old, data)
