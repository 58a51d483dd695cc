"""Models on the meta device or with a device map: where their values are stored, and how they are loaded.

`defer_weights` records where values are stored. `Materializer` and `read_values` make the weights real once a strategy
has placed the module. The record is a plain attribute of the module that owns the weights: no state dict has it, a copy
of the module has it too, and wrappers of the module (an adapter, an engine) do not change it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import swap_tensors

from instep.distributed import broadcast
from instep.errors import SettingError
from instep.state import PartialState
from instep.strategies.quantized_state import is_of_torchao, quantized_tensors
from instep.utils.optimizer_state import whole

if TYPE_CHECKING:
    from instep.checkpoint.tensors import StoredTensor

Stored: TypeAlias = "StoredTensor | Tensor"

DISPATCHED = "_dispatched"
"""Attribute of a model that `instep.big_models.dispatch_model` has placed."""
_PLACES = "_stored_weights"
# dtypes without nan; their lowest value is never an index, so it marks a missing value
_INDICES = (torch.int32, torch.int64)


# ---- where values are stored


def defer_weights(model: nn.Module, stored: Mapping[str, Stored]) -> set[str]:
    """Record where the values of a model's weights and buffers on the meta device are stored, to read them later.

    A strategy reads them when it prepares a module that contains the model. Each rank reads the part that it keeps.

    Args:
        model: model; its weights that are not on the meta device are not changed.
        stored: stored tensors by name, with the shapes of the model's weights. One name of a tied weight is enough.

    Returns:
        The recorded names, including all names of tied weights.

    Example:
        >>> from instep.big_models import init_empty_weights
        >>> with init_empty_weights():
        ...     model = nn.Linear(2, 2, bias=False)
        >>> defer_weights(model, {"weight": torch.eye(2)})
        {'weight'}
    """
    entries = [(name, *entry) for name, *entry in _meta_entries(model)]
    found = {value: stored[name] for name, _, _, value in entries if name in stored}
    for _, owner, key, value in entries:
        if value in found:
            vars(owner).setdefault(_PLACES, {})[key] = found[value]
    return {name for name, _, _, value in entries if value in found}


def place_of(owner: nn.Module, key: str) -> Stored | None:
    """Return where the values of a module's own weight or buffer are stored; None if that is not recorded."""
    return vars(owner).get(_PLACES, {}).get(key)


def deferred_weights(model: nn.Module) -> dict[str, Stored]:
    """Return where the missing values of a model are stored, by name."""
    found = ((name, place_of(owner, key)) for name, owner, key, _ in _meta_entries(model))
    return {name: place for name, place in found if place is not None}


def await_weights(model: nn.Module, coming: Mapping[str, torch.Size | None]) -> dict[str, Stored]:
    """Do not read weights that the run's checkpoint will fill, so that nothing is read twice.

    Args:
        model: model; its deferred weights that the checkpoint has with the same shape get memory, but no values.
        coming: shapes of the weights in the checkpoint, by name.

    Returns:
        Where the skipped values are stored, by name. Load those that the checkpoint finally did not have.
    """
    skipped = {name: place for name, place in deferred_weights(model).items() if coming.get(name) == place.shape}
    for name, place in skipped.items():
        owner, _, key = name.rpartition(".")
        vars(model.get_submodule(owner))[_PLACES][key] = _Coming(place.shape, place.dtype)
    return skipped


class _Coming:
    """Stored tensor without values, since these come from elsewhere."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def read(self, box: tuple[slice, ...] | None = None) -> Tensor:
        """Allocate memory for the tensor, or for a box of it."""
        sizes = self.shape if box is None else [side.stop - side.start for side in box]
        return torch.empty(sizes, dtype=self.dtype)


def builds_empty() -> bool:
    """Return True if a module that is built now would have its weights on the meta device."""
    probe = nn.Module()
    probe.weight = nn.Parameter(torch.empty(0))
    return probe.weight.is_meta


def _meta_entries(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield name, owner, name in the owner, and tensor of each weight and buffer on the meta device."""
    for name, owner in model.named_modules(remove_duplicate=False):
        for entries in (owner._parameters, owner._buffers):
            held: Any = entries
            for key, value in held.items():
                if value is not None and value.is_meta:
                    yield f"{name}.{key}" if name else key, owner, key, value


# ---- values


class Materializer:
    """Materializer of modules: allocates memory and sets values, in the order of the calls.

    A module's own weights and buffers are initialized on the device by its `reset_parameters` (or `_reset_parameters`),
    which torch's layers have. In a model of transformers, the model's own initialization is used. A tied weight is
    initialized by the first module that holds it, as in an ordinary model. Weights whose values are in a checkpoint
    (`instep.big_models.load_checkpoint_in_model`) are left for `read_values`.

    Args:
        device: device of the new weights.
        kept: weights that stay on the meta device, because a device map has offloaded them.
    """

    def __init__(self, device: torch.device, kept: Collection[Tensor] = ()) -> None:
        self.device, self._kept = device, set(kept)
        self.without_values: set[str] = set()
        """Names of weights and buffers that nothing gave values to: they are nan until they are loaded."""
        self._made: dict[Tensor, Tensor] = {}
        self._adapter_values: dict[str, Any] = {}
        """How peft's adapters begin, by name."""
        self._models: list[tuple[str, Any]] = []
        """Models of transformers, which know how their modules begin."""

    def make_all(self, module: nn.Module, name: str = "") -> dict[Tensor, Tensor]:
        """Materialize a module and its parts; return the new tensor for each replaced one."""
        self.make(module, name)
        for key, child in module.named_children():
            self.make_all(child, f"{name}.{key}" if name else key)
        self.finish(module, name)
        return self._made

    def make(self, module: nn.Module, name: str) -> None:
        """Materialize a module's own weights and buffers, not those of its parts.

        Args:
            module: the module; nothing is done if it is not on the meta device.
            name: name of the module in the whole module.
        """
        for adapter, config in dict(getattr(module, "peft_config", None) or {}).items():
            self._adapter_values[adapter] = getattr(config, "init_lora_weights", True)
        library: Any = sys.modules.get("transformers.modeling_utils")
        if library is not None and isinstance(module, library.PreTrainedModel):
            self._models.append((name, module))
        tied: list[tuple[Tensor, Tensor]] = []
        fresh: list[str] = []
        cut: list[tuple[dict[str, Any], str, Any]] = []
        for holder in (module._parameters, module._buffers):
            entries: dict[str, Any] = holder
            for key, value in entries.items():
                if value is None or not value.is_meta or value in self._kept or place_of(module, key) is not None:
                    continue
                made = self._made.get(value)
                # initialized whole and then sharded, so that the values are those of one process
                if _is_sharded(value):
                    cut.append((entries, key, value))
                    if made is None:
                        fresh.append(key)
                    made = _empty_like(value, self.device)
                elif made is None:
                    made = self._made[value] = _empty_like(value, self.device)
                    fresh.append(key)
                else:
                    tied.append((made, made.detach().clone()))
                entries[key] = made
        if not (fresh or tied or cut):
            return
        with torch.no_grad():
            for draw in self._ways(module, name):
                draw()
                fresh = [key for key in fresh if _lacks_values(getattr(module, key))]
                if not fresh:
                    break
            for made, first in tied:
                made.copy_(first)
        self.without_values |= {f"{name}.{key}" if name else key for key in fresh}
        for entries, key, value in cut:
            if value not in self._made:
                # Imported late: slow, and the Trainer imports this file
                from torch.distributed.tensor import distribute_tensor

                drawn = distribute_tensor(entries[key].detach(), value.device_mesh, value.placements)
                self._made[value] = _parameter_like(value, drawn)
            entries[key] = self._made[value]

    def _ways(self, module: nn.Module, name: str) -> Iterator[Callable[[], Any]]:
        """Yield functions that may initialize a module's values, best one first."""
        for prefix, model in reversed(self._models):
            if not prefix or f"{name}.".startswith(f"{prefix}."):
                yield partial(model._init_weights, module)
                break
        for method in ("reset_parameters", "_reset_parameters"):
            if hasattr(module, method):
                yield getattr(module, method)

    def finish(self, module: nn.Module, name: str) -> None:
        """Initialize what a module sets in its parts, such as LoRA adapters, half of which begin at 0.

        Args:
            module: module whose parts are materialized.
            name: name of the module in the whole module.
        """
        reset = getattr(module, "reset_lora_parameters", None)
        if reset is None:
            return
        drawn = set(self._made.values())
        for adapter in getattr(module, "r", ()):
            parts = [(kind, getattr(module, kind)) for kind in module.adapter_layer_names]  # type: ignore[union-attr]
            own = {
                f"{name}.{kind}.{key}": p
                for kind, part in parts
                for key, p in part.named_parameters()
                if key.partition(".")[0] == adapter
            }
            if drawn.isdisjoint(own.values()):
                continue
            with torch.no_grad():
                reset(adapter, self._adapter_values.get(adapter, True))
            self.without_values -= {key for key in own if ".lora_magnitude_vector." not in key}


def read_values(module: nn.Module, device: torch.device, part_of: Callable[[Stored, Tensor], Tensor]) -> bool:
    """Read the recorded values of a module's weights and buffers on the meta device.

    The tensors stay the same objects, so tied weights and optimizers stay valid.

    Args:
        module: the whole module; its tensors without a record stay on the meta device.
        device: device of the values.
        part_of: function that reads, from a stored tensor, the part that this rank keeps of a tensor of the module.

    Returns:
        True if a value was read.

    Raises:
        CorruptCheckpointError: a file is damaged.
    """
    done = False
    for owner in module.modules():
        for entries in (owner._parameters, owner._buffers):
            held: Any = entries
            for key, value in held.items():
                place = place_of(owner, key)
                if place is not None and value is not None and value.is_meta:
                    read = part_of(place, value).to(device, value.dtype)
                    swap_tensors(value, _parameter_like(value, read))
                    done = True
    return done


def _lacks_values(value: Tensor) -> bool:
    if value.dtype in _INDICES:
        return bool((value == torch.iinfo(value.dtype).min).any())
    return value.is_floating_point() and bool(value.isnan().any())


def _is_sharded(value: Tensor) -> bool:
    """Return True if a tensor is a DTensor, without importing that class."""
    return hasattr(value, "device_mesh")


def _empty_like(value: Tensor, device: torch.device) -> Tensor:
    made = torch.empty(value.shape, dtype=value.dtype, device=device)
    if made.is_floating_point():
        made.fill_(torch.nan)
    elif made.dtype in _INDICES:
        made.fill_(torch.iinfo(made.dtype).min)
    return _parameter_like(value, made)


def _parameter_like(value: Tensor, made: Any) -> Any:
    if isinstance(value, nn.Parameter):
        made = nn.Parameter(made, requires_grad=value.requires_grad)
        if not _is_sharded(value):
            made.__dict__.update(value.__dict__)  # attributes that users have set on it
    return made


# ---- a whole module


def materialize_module(module: nn.Module, device: torch.device) -> Mapping[Tensor, Tensor]:
    """Materialize everything that a module has on the meta device: read stored values, or initialize them.

    Args:
        module: changed in place.
        device: device of the values.

    Returns:
        The new tensor for each initialized one. Tensors whose values were read stay the same objects.

    Raises:
        SettingError: nothing gives a weight its values.
    """
    kept = dispatched_weights(module)
    if not any(tensor.is_meta and tensor not in kept for tensor in (*module.parameters(), *module.buffers())):
        return {}
    maker = Materializer(device, kept)
    exchanged = maker.make_all(module)
    if maker.without_values:
        raise no_values(module, maker.without_values)
    read_values(module, device, lambda stored, _: whole(stored))
    return exchanged


def no_values(module: nn.Module, without: Iterable[str]) -> SettingError:
    """Return the error for weights and buffers that were built on the meta device and got no values."""
    names = sorted(without)
    return SettingError(
        f"weights of {type(module).__name__} that were built on the meta device are without values: "
        f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}. Give them those of a "
        "checkpoint by instep.big_models.load_checkpoint_in_model in configure_model, give the modules that hold them "
        "a reset_parameters(), which sets their own weights and buffers, or load a checkpoint of the run. Buffers keep "
        "theirs where the model is built under init_empty_weights() in place of meta_init=True.",
        field="meta_init",
    )


def dispatched_weights(module: nn.Module) -> set[Tensor]:
    """Return weights and buffers of models with a device map inside a module, which must stay on their devices.

    Args:
        module: module with or without models from `instep.big_models.dispatch_model`.
    """
    parts = [part for part in module.modules() if DISPATCHED in vars(part) or "hf_device_map" in vars(part)]
    return {tensor for part in parts for tensor in (*part.parameters(), *part.buffers())}


def refuse_dispatched(strategy: str, module: nn.Module) -> None:
    """Raise an error for a model with a device map under a strategy that shards weights.

    Raises:
        SettingError: the module contains such a model.
    """
    if dispatched_weights(module):
        raise SettingError(
            f"strategy={strategy!r} spreads the weights over processes, and a model in {type(module).__name__} is "
            "spread by a device map already. Load it by load_checkpoint_in_model, without a device map; or use "
            "strategy='ddp', where each process has a copy of its own, mapped from the same files.",
            field="strategy",
            got=strategy,
        )


def check_offloaded(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise an error if offloaded weights are to be trained, since they do not exist between forwards.

    Weights of a dispatched model that are trained on the CPU are copied into new memory. They may be mapped from a
    file, and other models of this process from the same file would see the changes.

    Raises:
        SettingError: an optimizer has such a weight.
    """
    stepped = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    kept = dispatched_weights(module) if stepped else set()
    lost = [name for name, p in module.named_parameters() if p.is_meta and p in stepped and p in kept]
    if lost:
        raise SettingError(
            f"{len(lost)} weights of {type(module).__name__} that the optimizer is to train are offloaded by the "
            f"model's device map, such as {lost[0]}. Freeze the model (requires_grad_(False)) and train what is beside "
            "it; adapters of peft are put there by prepare_offloaded_training(model), before the optimizer is made. Or "
            "give a device map that keeps on a device what is trained.",
            field="device_map",
        )
    for p in stepped & kept:
        if p.device.type == "cpu":
            p.data = p.data.clone()


def broadcast_weights(module: nn.Module, skip: Callable[[Tensor], bool] = lambda tensor: False) -> None:
    """Copy rank 0's weights and buffers to every rank. Collective.

    Args:
        module: module on the device on which it is trained.
        skip: function that returns True for tensors to skip, because each rank holds a part of them, or nothing.
    """
    if PartialState().num_processes > 1:
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers(), *quantized_tensors(module)):
                # The parts of a torchao tensor are sent separately.
                if not skip(tensor) and not is_of_torchao(tensor):
                    tensor.copy_(broadcast(tensor))
