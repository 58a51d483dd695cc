"""Modules that were built on the meta device, made real: values are drawn, or read from where they were noted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from instep.big_models.deferred import Stored, place_of

_INDICES = (torch.int32, torch.int64)  # without a nan; their least value is no index, and stands for one


class Materializer:
    """Gives modules memory and values, in the order in which it gets them.

    A module's own weights and buffers come from its `reset_parameters` (or `_reset_parameters`), as torch's layers
    have it, drawn on the device; in a model of transformers, from that model's way for such a module. A tied weight is
    drawn by its first holder; so are an ordinary module's. Those whose values lie in a checkpoint
    (`instep.big_models.load_checkpoint_in_model`) are left for `read_values`.

    Args:
        device: where to.
        kept: what stays on the meta device: the weights that a device map has offloaded.
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
        """Make a module and its parts real; return what was exchanged for what."""
        self.make(module, name)
        for key, child in module.named_children():
            self.make_all(child, f"{name}.{key}" if name else key)
        self.finish(module, name)
        return self._made

    def make(self, module: nn.Module, name: str) -> None:
        """Make a module's own weights and buffers real, not those of its parts.

        Args:
            module: nothing is done where it is real already.
            name: in the whole module.
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
                if _is_sharded(value):  # drawn as a whole and cut then: the values are those of one process
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
                from torch.distributed.tensor import distribute_tensor  # late: slow, and the Trainer imports this file

                drawn = distribute_tensor(entries[key].detach(), value.device_mesh, value.placements)
                self._made[value] = _parameter_like(value, drawn)
            entries[key] = self._made[value]

    def _ways(self, module: nn.Module, name: str) -> Iterator[Callable[[], Any]]:
        """Give the functions that may draw a module's values, the best one first."""
        for prefix, model in reversed(self._models):
            if not prefix or f"{name}.".startswith(f"{prefix}."):
                yield partial(model._init_weights, module)
                break
        for method in ("reset_parameters", "_reset_parameters"):
            if hasattr(module, method):
                yield getattr(module, method)

    def finish(self, module: nn.Module, name: str) -> None:
        """Draw what a module gives its parts: a LoRA layer of peft its adapters, of which one half begins at zero.

        Args:
            module: its parts were made.
            name: in the whole module.
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
    """Give the weights and buffers of a module that are left on the meta device the values that were noted for them.

    The tensors stay the same objects, so that tied weights and optimizers keep what they hold.

    Args:
        module: all of it; what it has on the meta device without such a note stays there.
        device: where to.
        part_of: reads the part of a stored tensor that this rank keeps of a tensor of the module.

    Returns:
        Whether there was any.

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
    """Return whether a tensor is a DTensor, without importing its class."""
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
            made.__dict__.update(value.__dict__)  # attributes that users put on it
    return made
