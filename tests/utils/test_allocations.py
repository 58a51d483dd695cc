"""The limit on new tensors: what counts, and that nothing else changes."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from instep.utils.allocations import AllocationLimit


def limit(size: int) -> AllocationLimit:
    return AllocationLimit(size, lambda: MemoryError("too much"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(10**6, 10**6),
        lambda: torch.empty(2**40, 2**40),
        lambda: torch.Tensor(10**6, 10**6),
        lambda: torch.arange(10**13),
        lambda: torch.ones(1).repeat(10**13),
        lambda: torch.ones(10**6)[:, None] * torch.ones(10**6),
        lambda: nn.functional.one_hot(torch.tensor([0]), 10**12),
        lambda: [torch.ones(100) for _ in range(10**9)],
        lambda: copy.deepcopy([nn.Linear(9, 9)] * 3) and [copy.deepcopy(nn.Linear(9, 9)) for _ in range(10**9)],
    ],
)
def test_too_much_is_refused_before_it_is_taken(make: Any) -> None:
    with pytest.raises(MemoryError, match="too much"), limit(10**7):
        make()


def test_views_and_what_lies_on_the_meta_device_are_free() -> None:
    held = torch.ones(10)
    with limit(0):
        held.view(2, 5).t().add_(1)
        torch.empty(10**12, device="meta").mul(2)
    both = limit(100)
    with both:
        torch.ones(20)
    with pytest.raises(MemoryError), both:  # one sum for all of its contexts
        torch.ones(20)


def _orthogonal() -> nn.Module:
    layer = nn.utils.parametrizations.weight_norm(nn.LSTM(int(torch.linspace(1, 5, 3)[1].item()), 8), "weight_ih_l0")
    nn.init.orthogonal_(layer.weight_hh_l0)
    return copy.deepcopy(layer)


def test_what_is_made_has_the_same_values() -> None:
    torch.manual_seed(1)
    plain = _orthogonal().state_dict()
    torch.manual_seed(1)
    with limit(10**6):
        held = _orthogonal().state_dict()
    assert all(torch.equal(held[name], plain[name]) for name in plain)
    assert held.keys() == plain.keys()


def test_it_does_not_load_the_compiler() -> None:
    program = (
        "import sys, torch; from instep.utils.allocations import AllocationLimit\n"
        "with AllocationLimit(1000, MemoryError): torch.nn.Linear(3, 3)\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=False, timeout=60).returncode == 0
