from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.big_models import init_empty_weights, init_on_device
from instep.errors import SettingError


class Tied(nn.Module):
    """Two ties: by assignment of what a module has already, and of one parameter to two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        shared = nn.Parameter(torch.ones(4), requires_grad=False)
        self.first.bias = shared
        self.second.bias = shared
        self.register_parameter("nothing", None)


class Marked(nn.Parameter):
    """A parameter as quantisation packages make them: with a constructor and attributes of its own."""

    bits: int

    def __new__(cls, data: torch.Tensor, bits: int) -> Marked:
        made: Any = torch.Tensor._make_subclass(cls, data, False)
        made.bits = bits
        return made


def test_parameters_are_empty_and_buffers_are_kept():
    with instep.init_empty_weights():
        norm: Any = nn.BatchNorm1d(4)
    assert norm.weight.is_meta
    assert norm.weight.requires_grad
    assert torch.equal(norm.running_var, torch.ones(4))
    with init_empty_weights(include_buffers=True):
        assert all(tensor.is_meta for tensor in nn.BatchNorm1d(4).state_dict().values())
    assert not nn.Linear(2, 2).weight.is_meta


def test_empty_weights_of_a_terabyte_take_no_memory():
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(50_000, 50_000, bias=False) for _ in range(100)))
    assert sum(p.nbytes for p in model.parameters()) == 10**12


def test_ties_classes_and_attributes_stay():
    with init_empty_weights():
        model: Any = Tied()
        model.marked = Marked(torch.ones(3), bits=4)  # pyright: ignore[reportCallIssue]
        lazy = nn.LazyLinear(3)
    assert model.first.weight is model.second.weight
    assert model.first.bias is model.second.bias
    assert not model.first.bias.requires_grad
    assert isinstance(model.marked, Marked)
    assert model.marked.is_meta
    assert model.marked.bits == 4
    assert lazy(torch.ones(1, 2)).shape == (1, 3)


def test_the_innermost_block_decides():
    with init_empty_weights():
        with init_on_device("cpu"):
            inner = nn.Linear(2, 2)
        with pytest.raises(ZeroDivisionError), init_on_device("cpu", include_buffers=True):
            _ = nn.Linear(2, 2).weight / (1 // 0)
        assert nn.Linear(2, 2).weight.is_meta
    assert not inner.weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_device_that_torch_does_not_know():
    with pytest.raises(SettingError, match="device='gpu'"), init_on_device("gpu"):
        pass


def test_other_threads_are_left_alone():
    made, enter, leave = {}, threading.Event(), threading.Event()

    def build_empty() -> None:
        with init_empty_weights():
            enter.set()
            made["empty"] = [nn.Linear(2, 2) for _ in range(300)]
            assert leave.wait(60)

    thread = threading.Thread(target=build_empty)
    thread.start()
    assert enter.wait(60)
    made["full"] = [nn.Linear(2, 2) for _ in range(300)]
    leave.set()
    thread.join()
    assert {p.is_meta for layer in made["empty"] for p in layer.parameters()} == {True}
    assert {p.is_meta for layer in made["full"] for p in layer.parameters()} == {False}
