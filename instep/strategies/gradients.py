"""`Gradients`: unscale, check and clip gradients between the backward and the optimizer step, and take the step."""

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
    """Protocol with the attributes of a strategy that `Gradients` uses: the module and the precision of the run."""

    module: nn.Module
    precision: Precision


class Gradients:
    """The handling of gradients in one run: scaling, clipping and the optimizer step.

    A strategy that shards gradients sets its `gradients_class` to a subclass of this class. In each optimizer step the
    methods are called in this order: `scale` for each loss, `unscale`, `multiply`, `find_nonfinite`, `clip`, `step`.
    All but `scale` and `step` are optional.

    Args:
        strategy: strategy whose module has the gradients. `Strategy.connect` makes a new `Gradients` for each run.

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
        self.strategy: Any = strategy  # `Any`, since each subclass uses another class of strategy
        self.step_was_skipped = False
        """Whether the last call of `step` skipped the optimizer step, because a scaled gradient was not finite."""
        self._unscaled: set[int] = set()
        # Ids of optimizers that have stepped or cleared their gradients since the scaler's last update.
        self._finished: set[int] = set()
        self._ones: dict[torch.device, Tensor] = {}

    @property
    def precision(self) -> Precision:
        """The precision of the run, which has the gradient scaler."""
        return self.strategy.precision

    def leaves(self) -> Iterable[Tensor]:
        """Return the tensors for which a backward computes gradients: by default the module's parameters."""
        return self.strategy.module.parameters()

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the gradient scaler's factor; return it unchanged if there is no scaler."""
        if self.precision.scaler is None:
            return loss
        self.update_scaler()
        return self.precision.scaler.scale(loss)

    def update_scaler(self) -> None:
        """Update the scaler's factor after optimizer steps; called before the next loss is scaled and before a save.

        It is not called right after each step: with several optimizers, an update would make the scaler forget which
        gradients of the others it has checked.
        """
        if self._finished and self._unscaled <= self._finished and self.precision.scaler is not None:
            self.precision.scaler.update()
            self._unscaled.clear()
            self._finished.clear()

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide gradients by the scaler's factor, before they are clipped or read.

        Further calls in the same optimizer step do nothing.
        """
        if self.precision.scaler is not None and id(optimizer) not in self._unscaled and _has_gradients(optimizer):
            self.precision.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def unscale_together(self, optimizers: Sequence[Optimizer]) -> None:
        """Call `unscale` for several optimizers: if gradients of one have overflowed, none of them will step."""
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
        """Record that an optimizer's gradients were cleared without a step, so that new ones are unscaled again."""
        if id(optimizer) in self._unscaled:
            self._finished.add(id(optimizer))

    def multiply(self, optimizer: Optimizer, factor: Tensor | float) -> None:
        """Multiply the gradients of one optimizer in place, before they are clipped."""
        for p in parameters_of(optimizer):
            if p.grad is not None:
                p.grad.mul_(factor)

    def find_nonfinite(self, tensors: Sequence[Tensor], found: Tensor) -> None:
        """Set `found` to 1 if any value on any rank is nan or inf, without making the host wait. Collective.

        Args:
            tensors: losses and gradients of this rank, of any dtype and device; for sharded gradients, this rank's
                shards.
            found: 0-dim float32 tensor on the run's device.
        """
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in tensors:
            tensor = tensor._values() if tensor.is_sparse else tensor
            tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        with torch.no_grad():
            for (device, dtype), group in groups.items():
                here = found if device == found.device else torch.zeros((), dtype=torch.float32, device=device)
                if dtype in _SCALED:
                    one = self._ones.get(device)
                    if one is None:
                        one = self._ones[device] = torch.ones((), dtype=torch.float32, device=device)
                    # The gradient scaler's kernel, with a scale of 1, needs one pass and costs an eighth of isfinite on
                    # a CPU.
                    torch._amp_foreach_non_finite_check_and_unscale_(group, here, one)
                # Leave out empty tensors, since they have no largest element.
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
            value: limit for the norm over all ranks ("norm"), or for the absolute value of each element ("value").
            algorithm: "norm" or "value".
            norm_type: order of the norm.

        Returns:
            The norm before clipping, a 0-dim tensor; None if it was not computed.
        """
        if algorithm == "value":
            with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
            if with_gradient:  # clip_grad_value_ raises an error without any gradient
                nn.utils.clip_grad_value_(with_gradient, value)
            return None
        return nn.utils.clip_grad_norm_(parameters, value, norm_type)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> None:
        """Step one optimizer; with a gradient scaler, skip the step if gradients have overflowed.

        Args:
            optimizer: the optimizer without wrappers.
            closure: function that computes the gradients and returns the loss.
            kwargs: further arguments of the optimizer's `step`.
        """
        scaler = self.precision.scaler
        if scaler is None:
            optimizer.step(closure=closure, **kwargs) if closure is not None else optimizer.step(**kwargs)
            return
        if closure is not None:
            closure()  # GradScaler.step does not take a closure
        self.step_was_skipped = False
        if not _has_gradients(optimizer):
            return  # GradScaler.step raises an error if no gradient was unscaled
        stepped: list[bool] = []
        hook = optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        try:
            scaler.step(optimizer, **kwargs)
        finally:
            hook.remove()
        # The hook does not show whether a fused optimizer has skipped the step: its `step` always runs, and the kernel
        # checks for overflow itself.
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            found = scaler._found_inf_per_device(optimizer).values()
            self.step_was_skipped = any(bool(value.item()) for value in found)
        else:
            self.step_was_skipped = not stepped
        self._unscaled.add(id(optimizer))
        self._finished.add(id(optimizer))


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for p in parameters_of(optimizer))
