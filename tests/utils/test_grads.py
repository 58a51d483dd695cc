from __future__ import annotations

import pytest
import torch
from torch import nn

from instep.errors import SettingError
from instep.utils.grads import grad_norm


@pytest.mark.parametrize(("order", "of_first", "of_all"), [(1, 7.0, 19.0), (2.0, 5.0, 13.0), ("inf", 4.0, 12.0)])
def test_norms_of_each_parameter_and_of_all(order: float | str, of_first: float, of_all: float):
    net = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in ("a", "b", "without")})
    net["a"].grad, net["b"].grad = torch.tensor([3.0, -4.0]), torch.tensor([12.0, 0.0])
    norms = grad_norm(net, order, group_separator=":")
    name = f"grad_{float(order)}_norm"
    assert list(norms) == [f"{name}:a", f"{name}:b", f"{name}_total"]
    assert (float(norms[f"{name}:a"]), float(norms[f"{name}_total"])) == (of_first, of_all)


def test_nothing_without_gradients_and_no_order_below_zero():
    assert grad_norm(nn.Linear(1, 1), 2) == {}
    with pytest.raises(SettingError, match="norm_type=0"):
        grad_norm(nn.Linear(1, 1), 0)
