"""`Snapshot`: records objects before a trial, and restores them after the trial."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from instep.errors import UsageError
from instep.utils.seed import rng_state, set_rng_state

Restore = Callable[[], Any]


class Snapshot:
    """Snapshot of objects that can be restored several times.

    Tensors get their old values back in the same memory. Containers (dicts, lists, sets, at any depth) and random
    generators get their old content back. Any other attribute is set to its old object. Copies of tensors are kept in
    CPU memory, so that a trial has as much device memory as the run.

    Example:
        >>> layer, snapshot = nn.Linear(2, 2), Snapshot()
        >>> snapshot.keep_module(layer)
        >>> before = layer.weight.clone()
        >>> layer.weight.data.add_(1); layer.count = 3  # doctest: +ELLIPSIS
        tensor(...)
        >>> snapshot.restore()
        >>> bool((layer.weight == before).all()), hasattr(layer, "count")
        (True, False)
    """

    def __init__(self) -> None:
        self._puts: list[Restore] = []
        # id of an object -> the object, which is kept so that no other object gets this id, and its restore function
        self._known: dict[int, tuple[Any, Restore]] = {}

    def restore(self) -> None:
        """Restore all recorded objects."""
        with torch.inference_mode(False), torch.no_grad():
            for put in self._puts:
                put()

    def keep(self, put: Restore) -> None:
        """Add a function that restores one more object."""
        self._puts.append(put)

    def capture_attributes(self, owner: Any) -> None:
        """Record an object's attributes with their content.

        Hooks that are registered on the object are left as they are.
        """
        with torch.inference_mode(False):
            captured = {name: self._captured(value) for name, value in vars(owner).items() if not _is_hooks(name)}
        self._puts.append(partial(_put_attributes, owner, captured))

    def keep_module(self, module: nn.Module) -> None:
        """Record weights, buffers, gradients, modes and plain attributes of a module and all of its parts.

        Raises:
            UsageError: a weight has no shape yet.
        """
        lazy = next((name for name, p in module.named_parameters() if is_lazy(p)), None)
        if lazy is not None:
            raise UsageError(
                f"{lazy} has no shape before the first batch, so it could not be put back after trying steps. Run one "
                "batch through the module first."
            )
        for part in module.modules():
            self.capture_attributes(part)
        with torch.inference_mode(False):
            for p in module.parameters():
                self._puts.append(self._of_gradient(p))

    def keep_plain_attributes(self, module: nn.Module) -> None:
        """Record the plain attributes of a module and its parts, and which parameters need gradients.

        Weights, buffers, submodules and hooks are not recorded. So if the module is moved to another device before
        `restore`, it stays on this device, and keeps its new attributes.
        """
        with torch.inference_mode(False):
            for part in module.modules():
                plain = {
                    name: self._captured(value)
                    for name, value in vars(part).items()
                    if name not in _OF_TORCH and not _is_hooks(name)
                }
                self._puts.append(partial(_put_plain, part, plain))
        needed = {name: p.requires_grad for name, p in module.named_parameters()}
        self._puts.append(partial(_put_needed, module, needed))

    def keep_optimizer(self, optimizer: Optimizer) -> None:
        """Record an optimizer's states and parameter groups."""
        self.capture_attributes(optimizer)

    def keep_random(self) -> None:
        """Record the state of every random generator of this process."""
        state = rng_state()
        self._puts.append(lambda: set_rng_state(state))

    def _of_gradient(self, p: Tensor) -> Restore:
        requires_grad, gradient = p.requires_grad, p.grad
        put = None if gradient is None else self._captured(gradient)

        def back() -> None:
            p.requires_grad_(requires_grad)
            p.grad = None if put is None else put()

        return back

    def _captured(self, value: Any) -> Restore:
        """Record a value, and return a function that restores the value and returns it."""
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        make = next((make for kind, make in _KINDS if isinstance(value, kind)), None)
        if make is None and type(value).__module__.startswith("numpy.random"):
            make = Snapshot._of_numpy
        if make is None:
            return lambda: value
        later: list[Restore] = []
        self._known[id(value)] = value, lambda: later[0]()  # the value may be a container that holds itself
        later.append(make(self, value))
        self._known[id(value)] = value, later[0]
        return later[0]

    def _of_dict(self, value: dict[Any, Any]) -> Restore:
        puts = [(key, self._captured(item)) for key, item in value.items()]
        busy = False

        def back() -> dict[Any, Any]:
            nonlocal busy
            if not busy:
                busy = True
                items = [(key, put()) for key, put in puts]
                value.clear()
                value.update(items)
                busy = False
            return value

        return back

    def _of_list(self, value: list[Any]) -> Restore:
        puts = [self._captured(item) for item in value]
        busy = False

        def back() -> list[Any]:
            nonlocal busy
            if not busy:
                busy = True
                value[:] = [put() for put in puts]
                busy = False
            return value

        return back

    def _of_set(self, value: set[Any]) -> Restore:
        items = set(value)

        def back() -> set[Any]:
            value.clear()
            value.update(items)
            return value

        return back

    def _of_tensor(self, value: Tensor) -> Restore:
        local = getattr(value, "_local_tensor", value)  # local shard of a DTensor
        if local.is_meta or local.is_sparse or is_lazy(local):
            return lambda: value
        copy = local.detach().to("cpu", copy=True)

        def back() -> Tensor:
            here = getattr(value, "_local_tensor", value).detach()
            if here.shape == copy.shape:
                here.copy_(copy)
            else:
                value.data = copy.to(here.device)
            return value

        return back

    def _of_generator(self, value: torch.Generator) -> Restore:
        state = value.get_state()

        def back() -> torch.Generator:
            value.set_state(state)
            return value

        return back

    def _of_numpy(self, value: Any) -> Restore:
        # the value is a numpy Generator or RandomState
        bits = getattr(value, "bit_generator", getattr(value, "_bit_generator", value))
        state = deepcopy(getattr(bits, "state", None))

        def back() -> Any:
            if state is not None:
                bits.state = state
            return value

        return back

    def _of_random(self, value: random.Random) -> Restore:
        state = value.getstate()

        def back() -> random.Random:
            value.setstate(state)
            return value

        return back


_OF_TORCH = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_trainer", "_log_buffer")


def _is_hooks(name: str) -> bool:
    return name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))


def _put_attributes(owner: Any, captured: dict[str, Restore]) -> None:
    there = vars(owner)
    for name in [name for name in there if name not in captured and not _is_hooks(name)]:
        del there[name]
    there.update({name: put() for name, put in captured.items()})


def _put_plain(part: nn.Module, plain: dict[str, Restore]) -> None:
    vars(part).update({name: put() for name, put in plain.items()})


def _put_needed(module: nn.Module, needed: dict[str, bool]) -> None:
    for name, p in module.named_parameters():
        if needed.get(name, p.requires_grad) != p.requires_grad:
            p.requires_grad_(needed[name])


_KINDS: tuple[tuple[type, Callable[[Snapshot, Any], Restore]], ...] = (
    (Tensor, Snapshot._of_tensor),
    (dict, Snapshot._of_dict),
    (list, Snapshot._of_list),
    (set, Snapshot._of_set),
    (torch.Generator, Snapshot._of_generator),
    (random.Random, Snapshot._of_random),
)
