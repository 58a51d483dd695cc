"""What `Fabric.setup` and `Fabric.setup_dataloaders` return: modules, optimizers and loaders that use the strategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from instep.accelerator.unwrapping import without_compile
from instep.distributed import send_to_device
from instep.distributed.nested import map_leaves
from instep.state import PartialState
from instep.types import ReadOnly
from instep.utils.optimizers import OptimizerProxy

_STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")
in_backward: list[bool] = []  # not empty while `Fabric.backward` runs


class _FabricModule(nn.Module):
    """A module that is called through the strategy; its attributes and state dict are those of the user's module.

    Args:
        forward_module: the module in the strategy's wrapper.
        strategy: strategy of this module.
        original_module: the user's module; None: the same as `forward_module`.
    """

    def __init__(self, forward_module: Any, strategy: Any, original_module: Any = None) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = forward_module if original_module is None else original_module
        self._strategy = strategy
        self._forward_methods: set[str] = set(_STEP_METHODS)
        self._is_made = True

    module: ReadOnly[Any] = ReadOnly(lambda m: m._original_module, "The user's module.")
    device: ReadOnly[torch.device] = ReadOnly(
        lambda m: next((p.device for p in m._original_module.parameters()), torch.device("cpu")),
        "Device of the weights.",
    )
    dtype: ReadOnly[torch.dtype] = ReadOnly(
        lambda m: next((p.dtype for p in m._original_module.parameters()), torch.get_default_dtype()), "Their dtype."
    )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module in the precision of the Fabric."""
        precision = self._strategy.precision
        args, kwargs = precision.convert_input((args, kwargs))
        with precision.forward_context():
            output = self._forward_module(*args, **kwargs)
        output = precision.convert_output(output)
        if getattr(precision, "scaler", None) is not None:
            map_leaves(_watch_backward, output)
        return output

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the user's module."""
        return self._original_module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict into the user's module."""
        return self._original_module.load_state_dict(state_dict, strict=strict, assign=assign)

    def mark_forward_method(self, method: MethodType | str) -> None:
        """Make a method of the module run like its `forward`: through the strategy, in the precision of the Fabric.

        Raises:
            AttributeError: the module has no such method, or it is `forward`.
        """
        name = method if isinstance(method, str) else method.__name__
        if name == "forward" or not isinstance(getattr(self._original_module, name, None), MethodType):
            kind = type(self._original_module).__name__
            raise AttributeError(
                f"`{kind}.{name}` cannot be marked: it is `forward` itself, or no method of the module"
            )
        self._forward_methods.add(name)

    def _through_forward(self, name: str) -> Callable[..., Any]:
        module = self._original_module

        def call_forward_module(*args: Any, **kwargs: Any) -> Any:
            own = vars(module).get("forward")

            def forward(*args: Any, **kwargs: Any) -> Any:
                restore()  # restores the original forward, since the method may call it
                return getattr(module, name)(*args, **kwargs)

            def restore() -> None:
                vars(module).pop("forward", None)
                if own is not None:
                    module.forward = own

            module.forward = forward
            try:
                return self.forward(*args, **kwargs)
            finally:
                restore()

        return call_forward_module

    def _outside(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap a method, so that it raises if it runs the module without the strategy."""

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            called: list[Any] = []
            hooks = [one.register_forward_hook(lambda *_: called.append(1)) for one in self._original_module.modules()]
            try:
                output = method(*args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()
            if called:
                raise RuntimeError(
                    f"You are calling the method `{type(self._original_module).__name__}.{name}()` from outside the "
                    f"model, past the strategy: call `fabric_model.mark_forward_method({name!r})` first."
                )
            return output

        return call

    def __getattr__(self, name: str) -> Any:
        own = vars(self).get("_modules", {})
        # `_original_module` is missing while the module is made or copied.
        if name in own or "_original_module" not in own:
            return super().__getattr__(name)
        found = getattr(self._original_module, name)
        if self._forward_module is self._original_module:
            return found
        if name in self._forward_methods:
            return self._through_forward(name)
        return self._outside(found, name) if inspect.ismethod(found) else found

    def __setattr__(self, name: str, value: Any) -> None:
        made = "_is_made" in vars(self)
        ours, theirs = name in dir(self), made and hasattr(self._original_module, name)
        if made and (theirs or not ours):
            setattr(self._original_module, name, value)
        if ours or not made:
            super().__setattr__(name, value)


def _watch_backward(leaf: Any) -> Any:
    def check(_: Tensor) -> None:
        if not in_backward:
            raise RuntimeError(
                "This precision scales losses: it requires you to call `fabric.backward(loss)` instead of "
                "`loss.backward()`."
            )

    if torch.is_tensor(leaf) and leaf.requires_grad:
        leaf.register_hook(check)
    return leaf


class _FabricOptimizer(OptimizerProxy):
    """An optimizer that the strategy steps; all other attributes are those of the user's optimizer.

    Args:
        optimizer: the user's optimizer.
        strategy: strategy that makes the step.
        call: `Fabric.call`, which calls a hook of the callbacks; None: no hook is called.
    """

    def __init__(self, optimizer: Any, strategy: Any, call: Callable[..., Any] | None = None) -> None:
        super().__init__(optimizer)
        self._strategy, self._call = strategy, call

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make an optimizer step, and return the loss of the closure."""
        losses: list[Any] = []
        again = None if closure is None else lambda: losses.append(closure()) or losses[-1]
        self._strategy.gradients.step(self.optimizer, again)
        if self._call is not None:
            self._call("on_after_optimizer_step", strategy=self._strategy, optimizer=self.optimizer)
        return losses[0] if losses else None

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(*args, **kwargs)
        self._strategy.gradients.forget(self.optimizer)


class _FabricDataLoader:
    """A loader that moves batches to the device; its state dict is the position in the data.

    Args:
        dataloader: the loader of torch.
        device: device to which batches are moved; None: batches are not moved.
    """

    def __init__(self, dataloader: Any, device: torch.device | None = None) -> None:
        self._dataloader, self.device = dataloader, device
        self._passes = self._batches = 0
        self._random = torch.get_rng_state()
        self._resumed: Tensor | None = None

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        now, self._resumed = self._resumed, None
        skipped = 0 if now is None else self._batches
        if now is not None:
            torch.set_rng_state(self._random if skipped else now)
        if not skipped:
            self._passes, self._random = self._passes + 1, torch.get_rng_state()
        for sampler in (self._dataloader.sampler, getattr(self._dataloader.batch_sampler, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._passes - 1)
                break
        self._batches = 0
        for batch in self._dataloader:
            self._batches += 1
            if self._batches > skipped:
                yield batch if self.device is None else send_to_device(batch, self.device)
            elif self._batches == skipped and now is not None:
                torch.set_rng_state(now)
        self._batches = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, and torch's random states at two times: at the start of this pass, and now.

        If the loader of torch has a state dict of its own, return that one.
        """
        if hasattr(self._dataloader, "state_dict"):
            return self._dataloader.state_dict()
        place = {"passes": self._passes, "batches": self._batches}
        return {**place, "random": self._random, "now": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch of a saved state.

        Rank 0 then continues with the saved random state, and each other rank with the random state that it has now. If
        the loader of torch has a `load_state_dict` of its own, only that one is called.
        """
        if hasattr(self._dataloader, "load_state_dict"):
            self._dataloader.load_state_dict(state)
            return
        self._passes, self._batches, self._random = state["passes"], state["batches"], state["random"]
        self._resumed = state["now"] if PartialState().is_main_process else torch.get_rng_state()

    def __getattr__(self, name: str) -> Any:
        if name == "_dataloader":  # `_dataloader` is not set yet while the loader is being copied
            raise AttributeError(name)
        return getattr(self._dataloader, name)


def is_wrapped(obj: Any) -> bool:
    """Return True if an object was returned by a setup method of Fabric."""
    return isinstance(without_compile(obj), _FabricModule | _FabricOptimizer | _FabricDataLoader)


def unwrapped(obj: Any) -> Any:
    """Return the user's object inside an object that Fabric returned; return any other object unchanged."""
    inner = without_compile(obj) if isinstance(obj, nn.Module) else obj
    if isinstance(inner, _FabricModule):
        return without_compile(inner._forward_module)
    if isinstance(inner, _FabricOptimizer):
        return inner.optimizer
    return inner._dataloader if isinstance(inner, _FabricDataLoader) else inner


def _unwrap_objects(collection: Any) -> Any:
    """Replace the objects that Fabric returned by the user's objects, in a nested collection."""
    return map_leaves(unwrapped, collection)
