from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from instep.utils.flops import FlopCounter


def test_forward_and_backward_of_attention_and_of_layers():
    given = torch.rand(2, 3, 8, 4, requires_grad=True)  # batch, heads, length, size of a head
    with FlopCounter() as counter:
        attended = F.scaled_dot_product_attention(given, given, given)
        forward = counter.total
        attended.sum().backward()
    products = 2 * 2 * 3 * 8 * 8 * 4  # one of two matrices a head
    assert forward == 2 * products
    assert counter.total == forward + 5 * products
    with FlopCounter() as counter:
        nn.Conv2d(1, 3, 3)(torch.ones(2, 1, 8, 8)).sum().backward()
    assert list(counter.counts.values()) == [2 * 2 * 3 * 6 * 6 * 9] * 2
