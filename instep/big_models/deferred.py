"""Weights on the meta device, and where their values lie: a strategy reads them once it has placed the module.

The places stand with the modules that own the weights, as a plain attribute: no state dict has it, a copy of a module
takes it along, and what wraps a module (an adapter, an engine) changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from instep.checkpoint.tensors import StoredTensor

Stored: TypeAlias = "StoredTensor | Tensor"

_PLACES = "_stored_weights"


def defer_weights(model: nn.Module, stored: Mapping[str, Stored]) -> set[str]:
    """Note where the values of a model's weights and buffers on the meta device lie, to be read later.

    A strategy reads them when it prepares a module that has the model in it: each rank the part that it keeps.

    Args:
        model: those of its weights that are real stay as they are.
        stored: by name, of the shapes of the model's own. One name of a tied weight is enough.

    Returns:
        The names that were noted; those that are tied to one another all count.

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
    """Return where the values of a module's own weight or buffer lie; None where that was not noted."""
    return vars(owner).get(_PLACES, {}).get(key)


def deferred_weights(model: nn.Module) -> dict[str, Stored]:
    """Return where the values lie that a model still waits for, by name."""
    found = ((name, place_of(owner, key)) for name, owner, key, _ in _meta_entries(model))
    return {name: place for name, place in found if place is not None}


def await_weights(model: nn.Module, coming: Mapping[str, torch.Size | None]) -> dict[str, Stored]:
    """Let weights that a checkpoint of a run brings be empty until then, so that nothing is read twice.

    Args:
        model: what it waits for and the checkpoint brings in the same shape gets memory, and no values.
        coming: the shapes of what the checkpoint brings, by name.

    Returns:
        Where those values lie that are not read now, by name: to be loaded where the checkpoint did not bring them
        after all.
    """
    skipped = {name: place for name, place in deferred_weights(model).items() if coming.get(name) == place.shape}
    for name, place in skipped.items():
        owner, _, key = name.rpartition(".")
        vars(model.get_submodule(owner))[_PLACES][key] = _Coming(place.shape, place.dtype)
    return skipped


class _Coming:
    """Stored tensor of no values: they come from elsewhere."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def read(self, box: tuple[slice, ...] | None = None) -> Tensor:
        """Make memory for the tensor, or for a box of it."""
        sizes = self.shape if box is None else [side.stop - side.start for side in box]
        return torch.empty(sizes, dtype=self.dtype)


def builds_empty() -> bool:
    """Tell whether a module that is built here and now would have its weights on the meta device."""
    probe = nn.Module()
    probe.weight = nn.Parameter(torch.empty(0))
    return probe.weight.is_meta


def _meta_entries(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Give the name, the owner, the owner's name and the tensor of each weight and buffer on the meta device."""
    for name, owner in model.named_modules(remove_duplicate=False):
        for entries in (owner._parameters, owner._buffers):
            held: Any = entries
            for key, value in held.items():
                if value is not None and value.is_meta:
                    yield f"{name}.{key}" if name else key, owner, key, value
