from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from instep.activations.recompute import recompute
from instep.errors import SettingError
from instep.strategies.wrapping import check_policy, select, untie


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.down(torch.tanh(self.up(x)))


class Experts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Block(), Experts()])
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def wrapped(policy: Any) -> list[str]:
    return list(select("wrap", check_policy("wrap", policy), Net()))


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (None, ["blocks.0", "blocks.1"]),
        (Block, ["blocks.0", "blocks.1"]),
        ("Experts", ["blocks.1"]),
        (["Block", nn.Embedding], ["embed", "blocks.0", "blocks.1"]),  # a class stands for those that inherit from it
        (40, ["embed", "blocks.0.up", "blocks.1", "blocks.1.up", "head"]),  # 36 are left of the first block
        (np.int64(76), ["blocks.0", "blocks.1"]),
        (lambda name, module: name.endswith("down"), ["blocks.0.down", "blocks.1.down"]),
    ],
)
def test_what_a_policy_means(policy: Any, names: list[str]) -> None:
    assert wrapped(policy) == names


def test_a_transformers_model_says_itself_what_must_not_be_split() -> None:
    net: Any = Net()
    net._no_split_modules = ["Experts"]
    assert list(select("wrap", None, net)) == ["blocks.1"]


def test_a_module_without_blocks_is_one_part() -> None:
    assert select("wrap", None, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == {}
    assert select("wrap", None, nn.Sequential(Block(), Experts().experts[0])) == {}


def test_blocks_may_stand_in_a_sequential() -> None:
    blocks = nn.Sequential(nn.Dropout(), Experts(), Experts(), nn.Dropout(), nn.LayerNorm(4))
    assert list(select("wrap", None, blocks)) == ["1", "2"]  # and not the experts, which are within
    net: Any = Net()
    net.blocks = blocks
    assert list(select("wrap", None, net)) == ["blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("Blok", r"wrap='Blok' is not known.*Did you mean 'Block'\?"),
        ([Block, nn.Conv2d], "wrap='Conv2d' is not known"),
        (10_000, "wrap=10000 means no part of Net"),
        (lambda name, module: False, "means no part of Net"),
    ],
)
def test_what_matches_nothing_is_refused(policy: Any, text: str) -> None:
    with pytest.raises(SettingError, match=text) as caught:
        wrapped(policy)
    assert caught.value.field == "wrap"


@pytest.mark.parametrize("policy", [0, True, 1.5, [], [3], int, [Block()]])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises(SettingError, match="expected a module class or its name"):
        check_policy("wrap", policy)


def test_parts_that_share_weights_with_others_are_no_parts() -> None:
    net: Any = Net()
    units = select("wrap", ("Embedding", "Block"), net)
    left, shared = untie(net, units)
    assert list(left) == ["blocks.0", "blocks.1"]
    assert shared == ["embed.weight"]
    net.blocks[0].up.weight = net.blocks[1].up.weight
    assert untie(net, units)[0] == {}


def test_activations_are_computed_again_and_gradients_stay() -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(3, 4)
    block(x).sum().backward()
    expected = [p.grad.clone() for p in block.parameters() if p.grad is not None]
    names = list(block.state_dict())
    block.zero_grad()
    recompute(block)
    block.calls = 0
    block(x).sum().backward()
    assert block.calls == 2
    assert list(block.state_dict()) == names
    assert isinstance(block, Block)
    assert all(
        torch.equal(p.grad, it) for p, it in zip(block.parameters(), expected, strict=True) if p.grad is not None
    )
    with torch.no_grad():
        block(x)
    assert block.calls == 3
