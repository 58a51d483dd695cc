"""Build modules without values: parameters move to another device, usually the meta device, when they are made."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from instep.utils.checks import wrong

_META = torch.device("meta")


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build modules whose parameters have shapes and dtypes and take no memory.

    This is the same as `init_on_device("meta")`. A model without values cannot compute. Give it values by
    `load_checkpoint_and_dispatch`, or by `module.to_empty(device=...)` and an initialization of your own.

    Args:
        include_buffers: True: buffers are built without values too. By default buffers have their values, because a
            buffer that is computed when the module is built, such as a table of positions, is often in no checkpoint.

    Example:
        >>> with init_empty_weights():
        ...     model = nn.Sequential(*(nn.Linear(10_000, 10_000) for _ in range(1000)))
        >>> sum(p.numel() for p in model.parameters()), model[0].weight.device
        (100010000000, device(type='meta'))

    Source: the names and their meaning are Accelerate's.
    """
    with init_on_device(_META, include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Build modules whose parameters are on a device.

    The block affects only its own thread and does not patch `nn.Module`: torch calls a hook with each parameter that a
    module gets. In nested blocks, the innermost one counts. Parameters that are tied while the module is built stay
    tied.

    Args:
        device: device of the parameters.
        include_buffers: True: all tensors of the block, buffers too, are made on the device, as in torch's own
            `with torch.device(...)`. By default, only parameters are on the device: each is moved after its module has
            made it.

    Raises:
        SettingError: torch has no such device.

    Example:
        >>> with init_on_device("meta"):
        ...     norm = nn.BatchNorm1d(4)
        >>> norm.weight.is_meta, norm.running_mean.is_meta
        (True, False)

    Source: the names and their meaning are Accelerate's.
    """
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise wrong("device", device, "a device of torch, such as 'meta', 'cpu' or 'cuda:0'") from error
    _watch_registrations()
    stack = _stack()
    stack.append(_Block(device))
    try:
        with device if include_buffers else nullcontext():
            yield
    finally:
        stack.pop()


class _Block:
    """One `with init_on_device(...)` block: the device for parameters, and the new object of each moved parameter.

    A tied parameter is moved once, so that it stays one object.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: Any = WeakTensorKeyDictionary()

    def moved(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return the parameter on the device that replaces a parameter; None if it is on the device already."""
        if nn.parameter.is_lazy(parameter) or _is_on(parameter, self._device):
            return None
        if parameter not in self._moved:
            # The constructor is not called, since those of subclasses, such as bitsandbytes' parameters, do more than
            # store data.
            data = Tensor.to(parameter.data, self._device)
            new = Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
            vars(new).update(vars(parameter))
            self._moved[parameter] = new
        return self._moved[parameter]


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device == device or (device.index is None and tensor.device.type == device.type)


_blocks = threading.local()
_watching = threading.Lock()
_is_watched = False


def _stack() -> list[_Block]:
    """Return this thread's open `init_on_device` blocks, the innermost last."""
    if not hasattr(_blocks, "stack"):
        _blocks.stack = []
    return _blocks.stack


def _watch_registrations() -> None:
    """Register torch's hook for parameters that a module gets, once for the process.

    The hook is never removed: other threads that build modules iterate over torch's dictionary of hooks, and removing
    an entry would be an error there.
    """
    global _is_watched
    with _watching:
        if not _is_watched:
            register_module_parameter_registration_hook(_on_registration)  # pyright: ignore[reportArgumentType]
            _is_watched = True


def _on_registration(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Return the parameter to register in a module instead of the given one; None: keep the given one."""
    stack = getattr(_blocks, "stack", None)
    return stack[-1].moved(parameter) if stack and parameter is not None else None
