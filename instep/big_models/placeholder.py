"""Placeholders of offloaded weights. Each has its weight's metadata, and reads the value when code computes with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from instep.errors import UsageError

_METADATA = frozenset(
    {
        *("__hash__", "__len__", "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset"),
        *("element_size", "data_ptr", "untyped_storage", "_typed_storage", "storage", "get_device"),
        *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_pinned", "is_shared", "is_inference"),
        *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
    }
)
"""Methods that are called on the placeholder itself; any other function gets the value of the weight."""
_OF_DEVICE = frozenset({"device", "get_device", "is_meta", "is_cpu", "is_cuda", "is_mps", "is_xpu", "is_xla"})
"""Attributes and methods that return a weight's device: in a forward, the device on which the weight computes."""
_CONVERSIONS = frozenset({"to", "float", "double", "half", "bfloat16"})
"""Methods that return the tensor itself if it already has the dtype that is asked for."""
_VIEWS = frozenset({"T", "H", "mT", "mH", "real", "imag"})
"""Properties that need the value of the weight; all other properties are metadata."""


class Source(Protocol):
    """Provider of the value of an offloaded weight."""

    requires_grad: bool

    @property
    def device(self) -> torch.device:
        """Device where the weight's module computes."""
        ...

    @property
    def full_name(self) -> str:
        """Name of the weight in the model."""
        ...

    def read(self) -> Tensor:
        """Return the weight on the device where it computes."""
        ...


class Placeholder:
    """Tensor on the meta device that stands for an offloaded weight; it is a mixin for the weight's class.

    Reading its shape, dtype and the like costs nothing. Its device is the weight's device while the model computes,
    else the meta device. If a torch function gets a placeholder, the value is read for that call. So code outside of
    the weight's module gets the same results as without offloading. Changing the value raises. So does code that does
    not go through torch's functions, since torch's kernels would compute with a meta tensor, or return uninitialized
    memory.
    """

    offloaded_class: type[Tensor]
    """Class of the weight that the placeholder stands for."""
    offloaded_source: Source

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            eager: Any = torch.compiler.disable(_answer)
            return eager(func, args, kwargs or {})
        return _answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found: list[str] = []
        tree_map_only(Placeholder, lambda each: found.append(each.offloaded_source.full_name), (args, kwargs))
        raise UsageError(
            f"{func} reads {' and '.join(dict.fromkeys(found)) or 'a weight'}, which is offloaded, past torch's "
            "functions that would read its value. Call it with weight.clone(), or name the class whose forward does "
            "this in preload_module_classes."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        weight: Any = self
        about = f"{self.offloaded_source.full_name}, size={tuple(weight.shape)}, dtype={weight.dtype}"
        return f"{type(self).__name__}({about}, requires_grad={weight.requires_grad})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        make, arguments, own, *_ = self.__reduce_ex__(4)
        memo[id(self)] = new = make(*arguments)
        _update(new, deepcopy(own, memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        weight: Any = self
        about = self.offloaded_class, weight.size(), weight.stride(), weight.dtype, weight.requires_grad
        return _again, about, vars(self), None, None, _update


def _answer(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Compute the result of a torch function that got a placeholder."""
    name = getattr(func, "__name__", "")
    accesses = name in ("__get__", "__set__", "__delete__")
    field = _property(func) if accesses else ""
    if name == "detach" or (name == "__get__" and field == "data"):
        return placeholder_of(args[0], args[0].offloaded_source, Tensor, requires_grad=False)
    if (field or name) in _OF_DEVICE and _computes():
        return func(torch.empty(0, device=args[0].offloaded_source.device))
    converts = name in _CONVERSIONS and not any(map(_is_place, (*args[1:], *kwargs.values())))
    if converts and _unread(func, args, kwargs) is args[0]:
        return args[0]
    sets_data = (name, field) == ("__set__", "data")
    if sets_data and _source(args[0]) is _source(args[1]):
        return None
    if name in _METADATA or (accesses and field not in _VIEWS and not sets_data):
        found = _unread(func, args, kwargs)
        if (name, field) == ("__set__", "requires_grad") or name == "requires_grad_":
            _follow(args[0])
        return found
    for source in filter(None, map(_source, _targets(name, args, kwargs))):
        raise UsageError(
            f"{field or name} would change {source.full_name}, which is offloaded: its value is read where it lies and "
            "cannot be changed. Give its module a device in the device_map, or call remove_hook_from_submodules(model) "
            "first."
        )
    args, kwargs = tree_map_only(Placeholder, _value, (args, dict(kwargs)))
    return func(*args, **kwargs)


def _unread(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function on a placeholder without reading the value, on the meta device."""
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        return func(*args, **kwargs)


_forwards = threading.local()  # number of running forwards of models with placeholders, for each thread


def count_forwards(more: int) -> None:
    """Count the start (1) or end (-1) of a forward of a model with placeholders."""
    _forwards.depth = getattr(_forwards, "depth", 0) + more


def _computes() -> bool:
    """Return whether a model computes in this thread: in a forward, or in a part of one that the backward repeats."""
    return getattr(_forwards, "depth", 0) > 0 or torch._C._current_graph_task_id() != -1


def placeholder_of(
    weight: Tensor, source: Source, kind: type[Tensor] | None = None, requires_grad: bool | None = None
) -> Any:
    """Make the placeholder of a weight.

    Args:
        weight: the weight, on any device, or its placeholder.
        source: source of the weight's value.
        kind: class of the weight; None: its own.
        requires_grad: whether the placeholder requires a gradient; None: as the weight does.
    """
    kind = kind or kind_of(weight)
    requires_grad = weight.requires_grad if requires_grad is None else requires_grad
    new = _again(kind, weight.size(), weight.stride(), weight.dtype, requires_grad)
    if issubclass(kind, nn.Parameter):  # copy the attributes that users set on the parameter
        vars(new).update(vars(weight))
    new.offloaded_source = source
    return new


def kind_of(weight: Tensor) -> type[Tensor]:
    """Return the class of a weight; for a placeholder, the class of its weight."""
    return weight.offloaded_class if isinstance(weight, Placeholder) else type(weight)


def _again(kind: type[Tensor], size: Any, stride: Any, dtype: torch.dtype, requires_grad: bool) -> Any:
    empty = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    return Tensor._make_subclass(_class_of(kind), empty, requires_grad)


def _update(weight: Any, own: Mapping[str, Any]) -> None:
    vars(weight).update(own)


@cache
def _class_of(kind: type[Tensor]) -> Any:
    """Make a subclass of a weight's class and of `Placeholder`."""
    return type(kind)(f"Offloaded{kind.__name__}", (Placeholder, kind), {"offloaded_class": kind})


def _property(func: Any) -> str:
    """Return the name of the tensor property that an accessor function reads, sets or deletes."""
    owner = func.__self__
    return getattr(owner, "__name__", None) or getattr(getattr(owner, "fget", None), "__name__", "")


def _source(value: Any) -> Source | None:
    return value.offloaded_source if isinstance(value, Placeholder) else None


def _is_place(argument: Any) -> bool:
    """Return True if an argument of `to` names a device, or is a tensor, which stands for its device and dtype."""
    return type(argument) in (str, int, torch.device) or isinstance(argument, Tensor)


def _targets(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a function would write to."""
    out = kwargs.get("out")
    found = [*out] if isinstance(out, tuple | list) else [out]
    name = name.partition(".")[0]  # remove the overload from the name of an operator
    special = name.startswith("__")
    changes = name in ("__set__", "__setitem__") or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    if changes if special else name.endswith("_") or kwargs.get("inplace") is True:
        first = args[0] if args else next(iter(kwargs.values()), None)
        found += [*first] if isinstance(first, tuple | list) else [first]
    return found


_NOT_IN_PLACE = ("__invert__", "__index__", "__int__", "__iter__")


def _follow(weight: Any) -> None:
    """Freeze or unfreeze a weight's value if its placeholder was frozen or unfrozen."""
    if isinstance(weight, weight.offloaded_class) and issubclass(weight.offloaded_class, nn.Parameter):
        weight.offloaded_source.requires_grad = weight.requires_grad


def _value(weight: Any) -> Tensor:
    value = weight.offloaded_source.read()
    return value if weight.offloaded_class is kind_of(value) else value.detach()
