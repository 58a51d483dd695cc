"""Norms of a module's gradients, for logging."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from instep.errors import SettingError


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Compute the norm of each parameter's gradient, and of all of them together, without waiting for the device.

    Under strategies that cut parameters, those are the norms of this rank's part.

    Args:
        module: parameters without a gradient are left out.
        norm_type: the order of the norm, such as 2; "inf" for the largest element.
        group_separator: stands in the names between what the value is and the parameter's name.

    Returns:
        The norms, as `grad_2.0_norm/layer.weight`, and `grad_2.0_norm_total` last, for `self.log_dict`; nothing where
        there is no gradient.

    Raises:
        SettingError: the order is not above 0.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> layer.weight.grad = torch.full((1, 1), -3.0)
        >>> grad_norm(layer, 2)
        {'grad_2.0_norm/weight': tensor(3.), 'grad_2.0_norm_total': tensor(3.)}
    """
    order = float(norm_type)
    if not order > 0:
        raise SettingError(
            f"norm_type={norm_type!r}: expected a number above 0, or 'inf'", field="norm_type", got=order
        )
    norms = {
        f"grad_{order}_norm{group_separator}{name}": parameter.grad.detach().norm(order)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        norms[f"grad_{order}_norm_total"] = torch.stack(list(norms.values())).norm(order)
    return norms
