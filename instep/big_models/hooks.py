"""Hooks around a module's forward: they bring weights and inputs to the module's device, and move them back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import swap_tensors

from instep.big_models.placeholder import Placeholder, count_forwards, kind_of, placeholder_of
from instep.big_models.sizes import non_persistent_buffers
from instep.distributed.nested import send_to_device
from instep.strategies.materialize import DISPATCHED

Device = torch.device | int | str
_META = torch.device("meta")
_READ_WITHIN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_counting = threading.Lock()  # lock for the counts of running forwards of modules with hooks


class ModelHook:
    """Base of hooks, which run around the forward of a module and may change its arguments and its output.

    Example:
        >>> class Doubled(ModelHook):
        ...     def post_forward(self, module, output):
        ...         return 2 * output
        >>> add_hook_to_module(nn.Identity(), Doubled())(torch.ones(2))
        tensor([2., 2.])

    Source: the class of this name in Hugging Face Accelerate.
    """

    no_grad = False
    """Whether the forward runs without gradients."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare a module when the hook is added; return the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run before the forward; return the arguments for the forward."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run after the forward; return the output of the forward."""
        return output

    def after_error(self, module: nn.Module) -> None:
        """Run instead of `post_forward` if the forward raised an error."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo what `init_hook` did, when the hook is removed; return the module."""
        return module


class SequentialHook(ModelHook):
    """Hook that runs several hooks of one module, one after the other.

    Args:
        hooks: the hooks, in the order in which they run.

    Example:
        >>> class AddOne(ModelHook):
        ...     def post_forward(self, module, output):
        ...         return output + 1
        >>> add_hook_to_module(nn.Identity(), SequentialHook(AddOne(), AddOne()))(torch.zeros(2))
        tensor([2., 2.])
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    @property
    def no_grad(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether one of the hooks asks for a forward without gradients."""
        return any(hook.no_grad for hook in self.hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        done: list[ModelHook] = []
        try:
            for hook in self.hooks:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
                done.append(hook)
        except BaseException:
            for hook in done:
                hook.after_error(module)
            raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def after_error(self, module: nn.Module) -> None:
        for hook in self.hooks:
            hook.after_error(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


class _HookedForward:
    """The forward of a module with a hook. It is a class so that the module can be copied and pickled."""

    __name__ = "forward"

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            eager: Any = torch.compiler.disable(_hooked)
            return eager(self.module, args, kwargs)
        return _hooked(self.module, args, kwargs)

    @property
    def __signature__(self) -> Any:
        """Signature of the module's own forward, which transformers reads."""
        from inspect import signature  # imported late, since only code that reads signatures needs it

        return signature(self.module._old_forward)


def _hooked(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    try:
        if hook.no_grad:
            with torch.no_grad():
                output = module._old_forward(*args, **kwargs)
        else:
            output = module._old_forward(*args, **kwargs)
    except BaseException:
        hook.after_error(module)
        raise
    return hook.post_forward(module, output)


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Add a hook to a module, to run around its forward.

    Args:
        module: the module, changed in place.
        hook: the new hook, which replaces the module's present hook unless `append` is True.
        append: whether to keep the present hook too; the new hook then runs after the present one.

    Returns:
        The module.

    Example:
        >>> class Doubled(ModelHook):
        ...     def post_forward(self, module, output):
        ...         return 2 * output
        >>> layer = add_hook_to_module(nn.Identity(), Doubled())
        >>> add_hook_to_module(layer, Doubled(), append=True)(torch.ones(2))
        tensor([4., 4.])

    Source: the function of this name in Hugging Face Accelerate.
    """
    subject: Any = module
    # Read `vars`, since `getattr` of a module that wraps another may return the attribute of the inner module.
    before = vars(subject).get("_hf_hook")
    if before is not None:
        _detach(module)
    if append and before is not None:
        hook = SequentialHook(before, hook)
    subject = hook.init_hook(module)
    subject._hf_hook = hook
    if getattr(subject.forward, "__func__", None) is nn.Module.forward:
        return subject  # a list or dict of parameters is never called, so it needs no hook
    if "_old_forward" not in vars(subject):
        subject._old_forward = subject.forward
    _set_forward(subject, _HookedForward(subject))
    return subject


def _set_forward(module: Any, forward: Any) -> None:
    # A GraphModule has a class of its own, whose `recompile` overwrites the forward.
    if isinstance(module, GraphModule):
        type(module).forward = forward
    else:
        module.forward = forward


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook of a module, and undo what it did.

    Args:
        module: the module, changed in place.
        recurse: whether to remove the hooks of submodules too.

    Returns:
        The module.

    Example:
        >>> layer = add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook("cpu", offload=True))
        >>> remove_hook_from_module(layer).weight.device
        device(type='cpu')

    Source: the function of this name in Hugging Face Accelerate.
    """
    if DISPATCHED in vars(module):
        vars(module)[DISPATCHED].undo()
    vars(module).pop("hf_device_map", None)  # a model on a single device has this attribute, but no hooks
    _detach(module)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def _detach(subject: Any) -> None:
    """Remove a module's own hook; a dispatched model stays dispatched."""
    if "_hf_hook" in vars(subject):
        subject._hf_hook.detach_hook(subject)
        del subject._hf_hook
    if "_old_forward" in vars(subject):
        own = getattr(subject._old_forward, "__func__", None)
        if own is not None and own is getattr(type(subject), "forward", None):
            del subject.forward  # without this attribute, the class's own forward is used again
        else:
            _set_forward(subject, subject._old_forward)
        del subject._old_forward


# ---- moving weights and inputs to where a module computes


class _Slot:
    """Location of an offloaded weight in a module; it also reads the weight for code outside of the forward.

    Args:
        hook: the module's hook, which has the weights map.
        name: name of the weight in the weights map.
        holder: the `_parameters` or `_buffers` that hold it.
        leaf: name of the weight in `holder`.
    """

    def __init__(self, hook: AlignDevicesHook, name: str, holder: dict[str, Any], leaf: str) -> None:
        self.hook, self.name, self.holder, self.leaf = hook, name, holder, leaf
        self.original: torch.device = holder[leaf].device
        self.requires_grad: bool = holder[leaf].requires_grad
        self.empty: Tensor = placeholder_of(holder[leaf], self)
        if self.original == _META and not isinstance(holder[leaf], Placeholder):
            with suppress(RuntimeError):  # a tensor in a graph, or with weak references, cannot be swapped
                # The tensors are swapped, so that other references to the weight, as in a list of the module, get the
                # placeholder too.
                swap_tensors(holder[leaf], self.empty)
                self.empty = holder[leaf]
        self._there: Tensor | None = None  # the weight in the module during a forward
        # the weight that is kept for the next forward, and the value in the map of weights from which it was made
        self._value: Tensor | None = None
        self._kept: Tensor | None = None
        # The value from which the weight was made last. If the map of weights returns it again, the weight is kept.
        self._seen: ref[Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """Device where the weight's module computes."""
        return self.read().device if self.hook.device is None else self.hook.device

    @property
    def full_name(self) -> str:
        """Name of the weight in the model."""
        return f"{self.hook.prefix}{self.name}"

    def load(self, value: Tensor, device: torch.device | None) -> None:
        """Put a weight into the module, on a device, unless the user has set another weight in its place."""
        holder, leaf = self.holder, self.leaf
        if holder.get(leaf) is self.empty:
            # The usual case is handled here, not in a further function: a model may load thousands of small weights.
            kept = self._kept
            if kept is None or self._value is not value or kept.requires_grad is not self.requires_grad:
                kept = self._made(value, device)
            self._there = holder[leaf] = kept

    def read(self) -> Tensor:
        """Return the weight on the device where its module computes."""
        weights = self.hook.weights_map
        assert weights is not None
        return self._made(weights[self.name], self.hook.device)

    def _made(self, value: Tensor, device: torch.device | None) -> Tensor:
        """Make the weight on a device from its value; a value that is on this device already is not copied."""
        kept = self._kept if self._value is value else None
        if kept is None:
            there = value if device is None or value.device == device else value.to(device)
            kept = tensor_like(self.empty, there)
            # Keep the weight for the next forward only if this takes no extra memory: it is the value itself, and the
            # map of weights holds the value anyway.
            stays = there is value and value.device.type == "cpu" and self._seen is not None and self._seen() is value
            self._value, self._kept = (value, kept) if stays else (None, None)
            self._seen = ref(value)
        # The user has frozen or unfrozen the weight since `kept` was made.
        elif kept.requires_grad is not self.requires_grad:
            kept.requires_grad_(self.requires_grad)
        return kept

    def __getstate__(self) -> dict[str, Any]:
        nothing = dict.fromkeys(("_there", "_value", "_kept", "_seen"))
        return {**vars(self), **nothing}  # a copy of the module reads its weights from the map

    def unload(self) -> None:
        """Put the placeholder back in place of the loaded weight, unless the user has set another weight there."""
        there, holder, leaf = self._there, self.holder, self.leaf
        if there is not None and holder.get(leaf) is there:
            holder[leaf] = self.empty
        self._there = None

    def place(self) -> None:
        """Put the placeholder into the module."""
        self.holder[self.leaf] = self.empty


class AlignDevicesHook(ModelHook):
    """Hook that brings inputs and weights to the device where a module computes.

    Args:
        execution_device: device where the module computes; None: nothing is moved.
        offload: whether the module's weights are on the meta device except during its forward. Their values then come
            from `weights_map`; values that are on the execution device already are not copied.
        io_same_device: whether outputs are moved to the device of the inputs.
        weights_map: weights by their names in the module; None: the module's current weights, kept in main memory.
        offload_buffers: whether buffers are offloaded too, except those that are in no state dict.
        place_submodules: whether this hook handles the weights of submodules too.
        skip_keys: keyword arguments that are not moved.
        tied_params_map: one dict for all hooks of a model, so that each device holds a tied weight once.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> layer = add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True))
        >>> layer.weight.device, layer(torch.ones(1, 2)).device
        (device(type='meta'), device(type='cpu'))

    Source: the class of this name in Hugging Face Accelerate.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Sequence[str] | None = None,
        tied_params_map: MutableMapping[Any, Any] | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
        self.tied_params_map = {} if tied_params_map is None else tied_params_map
        self.input_device: torch.device | None = None
        self.device: torch.device | None = None if execution_device is None else as_device(execution_device)
        self.prefix = ""
        """Name of the module in its model, followed by a dot, for error messages."""
        self._slots: list[_Slot] = []
        self._users = 0  # number of running forwards, since a module may call itself or run in several threads

    def __repr__(self) -> str:
        told = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in told)})"

    def init_hook(self, module: nn.Module) -> nn.Module:
        left_out = non_persistent_buffers(module, self.place_submodules)
        tensors: dict[str, Any] = {}
        places: list[tuple[str, dict[str, Any], str]] = []
        for name, holder, leaf in _places(module, self.place_submodules):
            offloaded = isinstance(holder[leaf], nn.Parameter) or (self.offload_buffers and name not in left_out)
            if self.offload and offloaded and (self.weights_map is None or name in self.weights_map):
                tensors[name] = holder[leaf]
                places.append((name, holder, leaf))
            elif self.device is not None:
                holder[leaf] = _placed(holder[leaf], self.device, self.tied_params_map)
        if self.offload and self.weights_map is None:
            self.weights_map = {name: tensor.data.to("cpu") for name, tensor in tensors.items()}
        self._slots = [_Slot(self, *place) for place in places]
        for slot in self._slots:
            slot.place()
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self.input_device = find_device((args, kwargs))
        device = self.device
        if device is not None:
            args = tuple(moved(value, device) for value in args)
            for key in kwargs:
                if key not in self.skip_keys:
                    kwargs[key] = moved(kwargs[key], device)
        if self._slots:
            self.load()
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self._slots:
            self.unload()
        if self.io_same_device and self.input_device is not None:
            output = moved(output, self.input_device, self.skip_keys)
        return output

    def after_error(self, module: nn.Module) -> None:
        if self._slots:
            self.unload()

    @property
    def names(self) -> list[str]:
        """Names of the weights that are offloaded."""
        return [slot.name for slot in self._slots]

    @property
    def empty(self) -> list[Tensor]:
        """The tensors that replace offloaded weights in the module between forwards."""
        return [slot.empty for slot in self._slots]

    def load(self, device: torch.device | None = None) -> None:
        """Put the weights into the module.

        Args:
            device: device for the weights; None: the device where the module computes.
        """
        weights = self.weights_map
        assert weights is not None
        with _counting:
            self._users += 1
            if self._users > 1:
                return
            try:
                for slot in self._slots:
                    slot.load(weights[slot.name], device or self.device)
            except BaseException:
                self._users = 0
                for slot in self._slots:
                    slot.unload()
                raise

    def unload(self) -> None:
        """Put placeholders on the meta device in place of the weights, if no other forward of the module runs."""
        with _counting:
            self._users -= 1
            if self._users == 0:
                for slot in self._slots:
                    slot.unload()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for slot in self._slots:
            assert self.weights_map is not None
            value = self.weights_map[slot.name]
            # If the weight was on the meta device before the hook, its value stays in memory or mapped from its file.
            slot.load(value, None if slot.original == _META else slot.original)
            made = slot.holder[slot.leaf]
            # Tied weights become one parameter again.
            if isinstance(made, nn.Parameter) and value.numel():
                place = (value.data_ptr(), value.shape, value.dtype, made.device)
                slot.holder[slot.leaf] = self.tied_params_map.setdefault(place, made)
        self._slots = []
        return module


def _places(module: nn.Module, recurse: bool) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield for each parameter and buffer its name, the dict that holds it, and its name in that dict."""
    for prefix, owner in module.named_modules() if recurse else [("", module)]:
        for holder in (owner._parameters, owner._buffers):
            entries: dict[str, Any] = holder
            for leaf in [leaf for leaf, value in entries.items() if value is not None]:
                yield f"{prefix}.{leaf}".removeprefix("."), entries, leaf


def _placed(tensor: Tensor, device: torch.device, shared: MutableMapping[Any, Any]) -> Tensor:
    """Bring a weight of a module to a device; tied names that compute on one device share one object."""
    if tensor.device == device or device == _META or tensor.is_meta:
        return tensor if device != _META or tensor.is_meta else tensor_like(tensor, tensor.data.to(device))
    # The entry keeps the tensor alive, so that no other tensor gets the same id.
    there = shared.setdefault(id(tensor), {"of": tensor})
    if device not in there:
        there[device] = tensor_like(tensor, tensor.data.to(device))
    return there[device]


def tensor_like(old: Tensor, value: Tensor) -> Tensor:
    """Make a parameter or buffer from a value, with the attributes that users set on `old`, which it replaces."""
    if not isinstance(old, nn.Parameter):
        return value
    if isinstance(value, nn.Parameter):
        value = value.data
    kind = kind_of(old)
    if kind is nn.Parameter:
        new: Any = nn.Parameter(value, requires_grad=old.requires_grad)
    # the constructor is not called, since those of subclasses, such as bitsandbytes' parameters, do more than store
    # data
    else:
        new = Tensor._make_subclass(kind, value, old.requires_grad)
    new.__dict__.update(old.__dict__)
    # If `old` is a placeholder, it has this attribute, which no other tensor may have.
    new.__dict__.pop("offloaded_source", None)
    return new


def as_device(device: Device) -> torch.device:
    """Return a device of torch; a number means the accelerator with that number."""
    if isinstance(device, int):
        accelerator = torch.accelerator.current_accelerator()
        return torch.device(accelerator.type if accelerator else "cuda", device)
    device = torch.device(device)
    if device.index is None and device.type not in ("cpu", "meta", "mps"):
        # Add the index of the current device, since the devices of tensors have an index.
        return torch.device(device.type, torch.get_device_module(device).current_device())
    return device


def moved(data: Any, device: torch.device, skip_keys: Collection[str] = ()) -> Any:
    """Bring the tensors in nested data to a device; data on that device are returned unchanged.

    Args:
        data: nested data.
        device: the device.
        skip_keys: keys of mappings; their values stay where they are.
    """
    if isinstance(data, Mapping) and skip_keys:
        there = {key: value if key in skip_keys else moved(value, device) for key, value in data.items()}
        if all(there[key] is value for key, value in data.items()):
            return data
        copied: Any = copy(data)
        for key, value in there.items():
            copied[key] = value
        return copied
    return data if _is_there(data, device) else send_to_device(data, device)


def _is_there(data: Any, device: torch.device) -> bool:
    if isinstance(data, Tensor):
        return data.device == device
    if isinstance(data, nn.Module):  # peft passes layers as arguments; offloaded layers have hooks of their own
        return all(isinstance(each, Placeholder) or each.device == device for each in data.parameters())
    if data is None or isinstance(data, bool | int | float | str):
        return True
    if isinstance(data, tuple | list):
        return all(_is_there(item, device) for item in data)
    if isinstance(data, Mapping):
        return all(_is_there(item, device) for item in data.values())
    return False


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in nested data."""
    if isinstance(data, Tensor):
        return data.device
    items = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple | list) else ()
    return next((found for item in items if (found := find_device(item)) is not None), None)


class Prefixed(Mapping[str, Tensor]):
    """View of the part of a weight map that belongs to a module, by the module's own names.

    Args:
        weights: the model's weights, by full name.
        prefix: the module's name with a dot; "" for the model.
    """

    def __init__(self, weights: Mapping[str, Tensor], prefix: str) -> None:
        self._weights, self._prefix = weights, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._weights if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._weights


class ForwardHook(ModelHook):
    """Hook of a whole model with offloaded weights that counts the model's running forwards."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        count_forwards(1)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        count_forwards(-1)
        return output

    def after_error(self, module: nn.Module) -> None:
        count_forwards(-1)


class FirstLayerHook(ModelHook):
    """Hook of torch's TransformerEncoder that loads the weights of its first layer, which the encoder itself reads."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for hook in self._hooks(module):
            hook.load()
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.after_error(module)
        return output

    def after_error(self, module: nn.Module) -> None:
        for hook in self._hooks(module):
            hook.unload()

    def _hooks(self, module: Any) -> list[AlignDevicesHook]:
        return [hook for part in module.layers[0].modules() if (hook := offloading_hook(part)) is not None]


def offloading_hook(module: nn.Module) -> AlignDevicesHook | None:
    """Return the hook that holds a module's offloaded weights; None if no weights are offloaded."""
    hook = vars(module).get("_hf_hook")
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    return next((each for each in hooks if isinstance(each, AlignDevicesHook) and each.offload), None)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: MutableMapping[Any, Any] | None = None,
) -> None:
    """Add an `AlignDevicesHook` to a module and its submodules, if they have parameters or buffers of their own.

    With `offload`, a module whose forward reads weights of its submodules gets one hook for all these weights.

    Args:
        module: the module.
        execution_device: as for the hook.
        offload: as for the hook.
        weights_map: weights by full name; None: the module's current weights, kept in main memory.
        offload_buffers: as for the hook.
        module_name: full name of the module.
        skip_keys: as for the hook.
        preload_module_classes: names of classes whose forward uses weights of submodules without calling the
            submodules. They get all weights of their submodules when their forward begins.
        tied_params_map: as for the hook.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> attach_align_device_hook(model, "cpu", offload=True)
        >>> model[1].weight.is_meta, model(torch.ones(1, 2)).shape
        (True, torch.Size([1, 2]))

    Source: the function of this name in Hugging Face Accelerate.
    """
    if offload and not module_name:
        add_hook_to_module(module, ForwardHook(), append=True)

    def make(part: nn.Module, prefix: str) -> AlignDevicesHook | None:
        whole = offload and reads_within(part, preload_module_classes or ())
        if not whole and next(_places(part, recurse=False), None) is None:
            return None
        return AlignDevicesHook(
            execution_device,
            offload,
            weights_map=None if weights_map is None else Prefixed(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )

    attach_hooks(module, make, module_name)


def attach_hooks(module: nn.Module, make: Callable[[nn.Module, str], AlignDevicesHook | None], name: str = "") -> None:
    """Add hooks to a module and its submodules, except submodules whose weights an outer module's hook handles.

    Args:
        module: the module.
        make: function that returns the hook for a module, or None; its second argument is the prefix of the module's
            weights in the model.
        name: full name of the module.
    """
    prefix = f"{name}." * bool(name)
    hook = make(module, prefix)
    if hook is not None:
        hook.prefix = prefix
        add_hook_to_module(module, hook, append=True)
        if hook.place_submodules:
            return
    if isinstance(module, nn.TransformerEncoder):
        add_hook_to_module(module, FirstLayerHook(), append=True)
    for key, child in module.named_children():
        attach_hooks(child, make, prefix + key)


def reads_within(module: nn.Module, classes: Collection[str]) -> bool:
    """Return whether a module reads weights of submodules without calling them, so that it needs all of them loaded."""
    return type(module).__name__ in classes or isinstance(module, _READ_WITHIN)


# ---- models that take turns on a device


class CpuOffload(ModelHook):
    """Hook that brings a whole model to a device at its first forward; the model stays there until it is offloaded.

    Args:
        execution_device: device where the model computes; None: the accelerator if there is one, else the CPU.
        prev_module_hook: hook of another model. That model leaves the device when this one comes to the device.

    Example:
        >>> model = add_hook_to_module(nn.Linear(2, 2), CpuOffload("cpu"))
        >>> model(torch.ones(1, 2)).shape
        torch.Size([1, 2])

    Source: the class of this name in Hugging Face Accelerate.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        if execution_device is None:
            execution_device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self.execution_device = as_device(execution_device)
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.prev_module_hook is not None and find_device(list(module.parameters())) != self.execution_device:
            self.prev_module_hook.offload()
            if self.execution_device.type != "cpu":
                torch.accelerator.memory.empty_cache()
        module.to(self.execution_device)
        return tuple(moved(value, self.execution_device) for value in args), {
            key: moved(value, self.execution_device) for key, value in kwargs.items()
        }


class UserCpuOffloadHook:
    """Handle from `cpu_offload_with_hook` that offloads the model, or removes its hook.

    Args:
        model: the model.
        hook: hook of the model.

    Example:
        >>> from instep.big_models import cpu_offload_with_hook
        >>> model, handle = cpu_offload_with_hook(nn.Linear(2, 2))
        >>> handle.offload()
        >>> next(model.parameters()).device
        device(type='cpu')
        >>> handle.remove()
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        """Bring the model to main memory."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook."""
        remove_hook_from_module(self.model)
