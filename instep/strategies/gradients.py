"""Gradients between a backward and the optimizer's step: scaled, checked, clipped, and used for the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.distributed import all_reduce_
from instep.strategies.precision import Precision

_SCALED = (torch.float16, torch.float32, torch.float64)  # dtypes for which the gradient scaler has a CUDA kernel


class Stepped(Protocol):
    """The attributes of a strategy that `Gradients` needs: the module and the precision of the run."""

    module: nn.Module
    precision: Precision


class Gradients:
    """Gradients of one run, with methods that scale, clip and apply them.

    A strategy that spreads its gradients over ranks names a subclass of this as its `gradients_class`. In each
    optimizer step the calls come in this order: `scale` for each loss, `unscale`, `multiply`, `find_nonfinite`, `clip`,
    `step`. All calls but `scale` and `step` are optional.

    Args:
        strategy: the strategy whose module has the gradients. `Strategy.connect` makes a new object of this class for
            each run.

    Example:
        >>> from instep.strategies import DDPStrategy
        >>> class Counted(Gradients):
        ...     steps = 0
        ...
        ...     def step(self, optimizer, closure=None, **kwargs):
        ...         super().step(optimizer, closure, **kwargs)
        ...         self.steps += 1
        >>> class CountedDDP(DDPStrategy):  # for Trainer(strategy=CountedDDP())
        ...     gradients_class = Counted
    """

    def __init__(self, strategy: Stepped) -> None:
        self.strategy: Any = strategy  # untyped, since each subclass knows its own class of strategy
        self.step_was_skipped = False
        """Whether `step` left its last step out, because a scaled gradient was not finite."""
        self._unscaled: set[int] = set()
        # Optimizers that have stepped or dropped their gradients since the scaler's last update.
        self._finished: set[int] = set()
        self._ones: dict[torch.device, Tensor] = {}

    @property
    def precision(self) -> Precision:
        """The run's precision, with its gradient scaler."""
        return self.strategy.precision

    def leaves(self) -> Iterable[Tensor]:
        """Return the tensors for which a backward computes gradients: the parameters as the step sees them."""
        return self.strategy.module.parameters()

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the gradient scaler's factor. Return it unchanged if the precision does not scale."""
        if self.precision.scaler is None:
            return loss
        self.update_scaler()
        return self.precision.scaler.scale(loss)

    def update_scaler(self) -> None:
        """Adapt the scaler's factor to the steps since the last call. Called before a loss is scaled and before a save.

        It is not called after each step, since it makes the scaler forget its checks of other optimizers' gradients.
        """
        if self._finished and self._unscaled <= self._finished and self.precision.scaler is not None:
            self.precision.scaler.update()
            self._unscaled.clear()
            self._finished.clear()

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide gradients by the scaler's factor, before clipping or reading them.

        Only the first call in a step does this.
        """
        if self.precision.scaler is not None and id(optimizer) not in self._unscaled and _has_gradients(optimizer):
            self.precision.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def unscale_together(self, optimizers: Sequence[Optimizer]) -> None:
        """Call `unscale` for optimizers that step together: if gradients of one overflowed, none of them steps."""
        for optimizer in optimizers:
            self.unscale(optimizer)
        scaler = self.precision.scaler
        if scaler is None or len(optimizers) == 1:
            return
        unscaled = [optimizer for optimizer in optimizers if id(optimizer) in self._unscaled]
        found = [flag for optimizer in unscaled for flag in scaler._found_inf_per_device(optimizer).values()]
        if len(found) > 1:
            any_found = torch.stack([flag.to(found[0].device) for flag in found]).amax()
            for flag in found:
                flag.copy_(any_found)

    def forget(self, optimizer: Optimizer) -> None:
        """Record that gradients were cleared without a step, so that the next ones are scaled anew."""
        if id(optimizer) in self._unscaled:
            self._finished.add(id(optimizer))

    def multiply(self, optimizer: Optimizer, factor: Tensor | float) -> None:
        """Multiply the gradients of one optimizer in place, before they are clipped."""
        for p in parameters_of(optimizer):
            if p.grad is not None:
                p.grad.mul_(factor)

    def find_nonfinite(self, tensors: Sequence[Tensor], found: Tensor) -> None:
        """Set `found` to 1 if a value is nan or inf, on any rank. Collective; the host does not wait.

        Args:
            tensors: losses and gradients of this rank, of any dtype and device. If gradients are sharded, all shards
                are checked, because the ranks combine their results.
            found: 0-dim float32 tensor on the run's device.
        """
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.is_sparse or tensor.is_complex():
                tensor = _values(tensor)
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        with torch.no_grad():
            for (device, dtype), group in groups.items():
                here = found if device == found.device else torch.zeros((), dtype=torch.float32, device=device)
                if dtype in _SCALED:
                    one = self._ones.get(device)
                    if one is None:
                        one = self._ones[device] = torch.ones((), dtype=torch.float32, device=device)
                    # The gradient scaler's kernel with a scale of 1: one pass, and an eighth of the cost of isfinite on
                    # a CPU.
                    torch._amp_foreach_non_finite_check_and_unscale_(group, here, one)
                # Empty tensors have no largest element.
                elif filled := [tensor for tensor in group if tensor.numel()]:
                    largest = torch.stack(torch._foreach_norm(filled, math.inf))
                    torch.maximum(here, largest.isfinite().logical_not().any().to(here.dtype), out=here)
                if here is not found:
                    torch.maximum(found, here.to(found.device, non_blocking=True), out=found)
        all_reduce_(found, "max")

    def clip(
        self, parameters: Sequence[Tensor], value: float, algorithm: str = "norm", norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip gradients in place.

        Args:
            parameters: parameters whose gradients are clipped; those without a gradient are skipped.
            value: the largest norm over all ranks (`norm`) or the largest absolute value of an element (`value`).
            algorithm: `norm` or `value`.
            norm_type: order of the norm.

        Returns:
            The norm before clipping, a 0-dim tensor; None if it was not computed.
        """
        if algorithm == "value":
            with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
            if with_gradient:  # torch raises an error if there is no gradient
                nn.utils.clip_grad_value_(with_gradient, value)
            return None
        return nn.utils.clip_grad_norm_(parameters, value, norm_type)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> None:
        """Step one optimizer.

        Args:
            optimizer: the unwrapped optimizer.
            closure: function that computes the gradients and returns the loss.
            kwargs: passed to the optimizer's `step`.
        """
        scaler = self.precision.scaler
        if scaler is None:
            optimizer.step(closure=closure, **kwargs) if closure is not None else optimizer.step(**kwargs)
            return
        if closure is not None:
            closure()  # the scaler takes no closure
        self.step_was_skipped = False
        if not _has_gradients(optimizer):
            return  # the scaler refuses an optimizer without checked gradients
        stepped: list[bool] = []
        hook = optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        try:
            scaler.step(optimizer, **kwargs)
        finally:
            hook.remove()
        # a fused optimizer checks the gradients in its own kernel
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            found = scaler._found_inf_per_device(optimizer).values()
            self.step_was_skipped = any(bool(value.item()) for value in found)
        else:
            self.step_was_skipped = not stepped
        self._unscaled.add(id(optimizer))
        self._finished.add(id(optimizer))


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer's groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _values(tensor: Tensor) -> Tensor:
    """Return the real numbers of a sparse or complex tensor, as a view."""
    tensor = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for p in parameters_of(optimizer))
