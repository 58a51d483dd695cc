"""Give values to weights on the meta device: read them from files, or initialize them.

`defer_weights` records in which files the values are stored. When a strategy has sharded or placed the module,
`read_values` reads these values, and `Materializer` initializes weights without a record. The record is a plain
attribute of the module that has the weights: it is not part of a state dict, a copy of the module has it too, and
wrapping the module (in an adapter or an engine) does not change it.
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
"""Name of the attribute that marks a model placed by `instep.big_models.dispatch_model`."""
_PLACES = "_stored_weights"
# dtypes without nan: their lowest value marks a missing value, since it is never a valid index.
_INDICES = (torch.int32, torch.int64)


# ---- recording where the values of weights are stored


def defer_weights(model: nn.Module, stored: Mapping[str, Stored]) -> set[str]:
    """Record where the values of a model's weights and buffers on the meta device are stored, to read them later.

    A strategy reads the values when it prepares a module that contains the model. Each rank reads only its part.

    Args:
        model: the model; its weights that are not on the meta device are not changed.
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
    """Return the stored tensor that `defer_weights` has recorded for a module's own weight or buffer, or None."""
    return vars(owner).get(_PLACES, {}).get(key)


def deferred_weights(model: nn.Module) -> dict[str, Stored]:
    """Return, by name, the stored tensors that are recorded for weights and buffers on the meta device."""
    found = ((name, place_of(owner, key)) for name, owner, key, _ in _meta_entries(model))
    return {name: place for name, place in found if place is not None}


def await_weights(model: nn.Module, coming: Mapping[str, torch.Size | None]) -> dict[str, Stored]:
    """Make `read_values` skip recorded values that the run's checkpoint will replace, so that none is read twice.

    Args:
        model: the model. For its recorded weights that the checkpoint has in the same shape, `read_values` allocates
            memory, but reads no values.
        coming: shapes of the weights in the checkpoint, by name.

    Returns:
        Stored tensors of the skipped weights, by name. Load a stored tensor if the checkpoint turns out not to have it.
    """
    skipped = {name: place for name, place in deferred_weights(model).items() if coming.get(name) == place.shape}
    for name, place in skipped.items():
        owner, _, key = name.rpartition(".")
        vars(model.get_submodule(owner))[_PLACES][key] = _Coming(place.shape, place.dtype)
    return skipped


class _Coming:
    """Stored tensor whose `read` allocates memory but sets no values, since a checkpoint will set them."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def read(self, box: tuple[slice, ...] | None = None) -> Tensor:
        """Return an uninitialized tensor for the whole tensor, or for a box of it."""
        sizes = self.shape if box is None else [side.stop - side.start for side in box]
        return torch.empty(sizes, dtype=self.dtype)


def builds_empty() -> bool:
    """Return True if the default device is the meta device: modules are then built without values."""
    probe = nn.Module()
    probe.weight = nn.Parameter(torch.empty(0))
    return probe.weight.is_meta


def _meta_entries(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield each weight and buffer on the meta device: full name, owner module, name in the owner, and tensor."""
    for name, owner in model.named_modules(remove_duplicate=False):
        for entries in (owner._parameters, owner._buffers):
            held: Any = entries
            for key, value in held.items():
                if value is not None and value.is_meta:
                    yield f"{name}.{key}" if name else key, owner, key, value


# ---- reading and initializing values


class Materializer:
    """Allocate and initialize weights and buffers that are on the meta device, module by module.

    A module's own weights and buffers are initialized on the device by its `reset_parameters` (or `_reset_parameters`),
    which torch's layers have. In a model of transformers, the model's own initialization is used. A tied weight is
    initialized by the first module that holds it, as in an ordinary model. Weights with a record of stored values
    (`instep.big_models.load_checkpoint_in_model`) stay on the meta device for `read_values`.

    Args:
        device: device of the new weights.
        kept: weights that stay on the meta device, because a device map has offloaded them.
    """

    def __init__(self, device: torch.device, kept: Collection[Tensor] = ()) -> None:
        self.device, self._kept = device, set(kept)
        self.without_values: set[str] = set()
        """Names of weights and buffers that could not be initialized: they are nan until values are loaded."""
        self._made: dict[Tensor, Tensor] = {}
        self._adapter_values: dict[str, Any] = {}
        """Name of an adapter of peft -> its setting `init_lora_weights`, which says how its values are initialized."""
        self._models: list[tuple[str, Any]] = []
        """Names and models of the package transformers; such a model can initialize its own submodules."""

    def make_all(self, module: nn.Module, name: str = "") -> dict[Tensor, Tensor]:
        """Materialize a module and all its submodules; return a dict from each replaced tensor to the new one."""
        self.make(module, name)
        for key, child in module.named_children():
            self.make_all(child, f"{name}.{key}" if name else key)
        self.finish(module, name)
        return self._made

    def make(self, module: nn.Module, name: str) -> None:
        """Materialize a module's own weights and buffers, not those of its submodules.

        Args:
            module: the module; if it is not on the meta device, nothing is done.
            name: name of the module in the root module.
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
                # Initialize the whole tensor and then shard it, so that the values do not depend on the sharding.
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
                # Imported late: slow to import, and the Trainer imports this file.
                from torch.distributed.tensor import distribute_tensor

                drawn = distribute_tensor(entries[key].detach(), value.device_mesh, value.placements)
                self._made[value] = _parameter_like(value, drawn)
            entries[key] = self._made[value]

    def _ways(self, module: nn.Module, name: str) -> Iterator[Callable[[], Any]]:
        """Yield functions that may be able to initialize a module's values, the preferred one first."""
        for prefix, model in reversed(self._models):
            if not prefix or f"{name}.".startswith(f"{prefix}."):
                yield partial(model._init_weights, module)
                break
        for method in ("reset_parameters", "_reset_parameters"):
            if hasattr(module, method):
                yield getattr(module, method)

    def finish(self, module: nn.Module, name: str) -> None:
        """Initialize the LoRA adapters of a layer; do nothing if the layer has none.

        One half of an adapter's weights must begin at 0. The initialization in `make` does not see to this.

        Args:
            module: layer whose submodules are materialized already.
            name: name of the layer in the root module.
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
    """Read the recorded values of all weights and buffers that are on the meta device.

    The tensors stay the same objects, so that tied weights and optimizers remain valid.

    Args:
        module: the root module; its tensors without a record stay on the meta device.
        device: device for the values.
        part_of: function that reads this rank's part from a stored tensor, given the stored tensor and the weight.

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
    """Return True if a tensor is a DTensor, without importing torch.distributed.tensor."""
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
            made.__dict__.update(value.__dict__)  # keep attributes that users have set on the parameter
    return made


# ---- functions for a whole module


def materialize_module(module: nn.Module, device: torch.device) -> Mapping[Tensor, Tensor]:
    """Give values to all weights and buffers on the meta device: read recorded values, or initialize them.

    Args:
        module: module to change in place.
        device: device for the values.

    Returns:
        A dict from each initialized tensor to its new tensor. Tensors whose values were read stay the same objects.

    Raises:
        SettingError: a weight can neither be read nor initialized.
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
    """Return the error for weights and buffers on the meta device that can neither be read nor initialized."""
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
    """Return the weights and buffers of models with a device map, which must stay on their devices.

    Args:
        module: module that may contain models with a device map, from `dispatch_model` or from transformers.
    """
    parts = [part for part in module.modules() if DISPATCHED in vars(part) or "hf_device_map" in vars(part)]
    return {tensor for part in parts for tensor in (*part.parameters(), *part.buffers())}


def refuse_dispatched(strategy: str, module: nn.Module) -> None:
    """Raise an error if a module contains a model with a device map, for use by strategies that shard weights.

    Raises:
        SettingError: the module contains a model with a device map.
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
    """Raise an error if an optimizer has offloaded weights, which are in memory only during a forward.

    Weights of a dispatched model that are trained on the CPU are copied to new memory, since they may be memory-mapped:
    other models in this process that were loaded from the same file would change too.

    Raises:
        SettingError: an optimizer has an offloaded weight.
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
    """Copy rank 0's weights and buffers to every rank. Collective: all ranks call it.

    Args:
        module: module on its training device.
        skip: function that returns True for tensors not to copy, because each rank has its own part or no values.
    """
    if PartialState().num_processes > 1:
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers(), *quantized_tensors(module)):
                # Skip a tensor of torchao, since `quantized_tensors` returns the plain tensors inside it.
                if not skip(tensor) and not is_of_torchao(tensor):
                    tensor.copy_(broadcast(tensor))
