"""Arguments of `self.log`: checks of names and values, with errors that name the wrong value and a remedy."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from instep.errors import LogError


def is_metric(value: Any) -> bool:
    """Return whether a value is a metric object, which computes its own value."""
    return not isinstance(value, Tensor) and callable(getattr(value, "compute", None))


def items_to_log(given: Any) -> Iterable[tuple[str, Any]]:
    """Return the names and values of a dict or of a collection of metrics. Metrics are returned without a copy."""
    if not hasattr(given, "items"):
        raise LogError(
            f"self.log_dict got {type(given).__name__}; it takes a dict of names and values, or a collection"
        )
    if hasattr(given, "compute_groups"):
        # With compute groups, metrics share their state and must keep sharing it, so `copy_state` is False. Without
        # them it is True, torchmetrics' default. Lightning passes the same values.
        return given.items(keep_base=False, copy_state=not getattr(given, "_enable_compute_groups", True))
    return given.items()


def text_of(name: Any) -> str:
    """Return a name as a plain str, also if its class is a subclass of str, such as an Enum of texts.

    Raises:
        LogError: the name is not a str.
    """
    if isinstance(name, str):
        return str.__str__(name)
    raise LogError(
        f"self.log({name!r}, ...): a name must be a text, got {type(name).__name__}. Use str(...) or an f-string."
    )


def check_number(name: str, value: Any) -> None:
    """Raise a `LogError` for a number, or a tensor of one element, that cannot be converted to a float."""
    if isinstance(value, Tensor):
        problem = (
            "complex; log its parts: .real and .imag, or .abs()"
            if value.is_complex()
            else "on the meta device, and has no value"
            if value.is_meta
            else "nested; log .values().mean()"
            if value.is_nested
            else "quantized; use .dequantize()"
            if value.is_quantized
            else "sparse; use .to_dense()"
            if value.layout is not torch.strided
            else ""
        )
        if problem:
            raise LogError(f"self.log({name!r}) got a tensor that is {problem}.")
    elif isinstance(value, complex):
        raise LogError(
            f"self.log({name!r}) got the complex number {value!r}; log its parts: .real and .imag, or abs(...)."
        )
    elif isinstance(value, Real):
        try:
            float(value)
        except (OverflowError, ValueError):
            raise LogError(
                f"self.log({name!r}) got a number that is too large for a float (1.8e308 at most). Log its logarithm."
            ) from None


def check_value(name: str, value: Any) -> None:
    """Raise a `LogError` if `self.log` does not accept a value."""
    check_number(name, value)
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise LogError(
                f"self.log({name!r}) got a tensor of shape {tuple(value.shape)}; it takes one number. "
                "Reduce it first, for instance with .mean()."
            )
    elif isinstance(value, dict):
        raise LogError(f"self.log({name!r}) got a dict; use self.log_dict for several values at once.")
    elif is_metric(value) and hasattr(value, "items"):
        raise LogError(
            f"self.log({name!r}) got a {type(value).__name__}; use self.log_dict for several metrics at once."
        )
    elif not isinstance(value, Real) and not is_metric(value):
        raise LogError(
            f"self.log({name!r}) got {type(value).__name__} {value!r}; it takes a number, a tensor with one element, "
            "or a metric object with compute()."
        )


def ranks_of(name: str, group: Any) -> tuple[int, ...]:
    """Return the ranks of a `sync_dist_group`."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise LogError(
            f"self.log({name!r}, sync_dist_group={group!r}): use a process group of torch, from "
            "torch.distributed.new_group, or leave it out."
        ) from None


def check_attribute(name: str, value: Any, attribute: str, module: nn.Module) -> None:
    """Raise a `LogError` if `metric_attribute` does not name this metric object in the module."""
    if dict(module.named_modules()).get(attribute) is not value:
        raise LogError(
            f"self.log({name!r}, metric_attribute={attribute!r}): Could not find the `{type(module).__name__}` "
            f"attribute for this metric under that name. Set self.{attribute} to it, or leave metric_attribute out."
        )
