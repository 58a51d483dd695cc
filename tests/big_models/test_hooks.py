"""Tests of hooks around a module's forward."""

from __future__ import annotations

import pickle
import threading
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.big_models import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_layerwise_casting_hooks,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from instep.errors import SettingError
from tests.helpers import gpu

_X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Added(ModelHook):
    """Adds before the forward."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (args[0] + 1, *args[1:]), kwargs


class Doubled(ModelHook):
    """Doubles the output."""

    def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
        return 2 * output


def test_hooks_replace_each_other_or_run_in_turn_and_go() -> None:
    layer: Any = nn.Linear(4, 4)
    plain, later = layer(_X), layer(_X + 1)
    add_hook_to_module(layer, Doubled())
    add_hook_to_module(layer, Added())
    assert torch.equal(layer(_X), later)
    add_hook_to_module(layer, Doubled(), append=True)
    assert isinstance(layer._hf_hook, SequentialHook)
    assert torch.equal(layer(_X), 2 * later)
    assert (layer.forward.__name__, [*signature(layer.forward).parameters]) == ("forward", ["input"])
    remove_hook_from_module(layer)
    assert torch.equal(layer(_X), plain)
    assert not {"forward", "_old_forward", "_hf_hook"} & set(vars(layer))


class Wrapper(nn.Module):
    """Hands attributes that it does not have on to the module within, as peft's models do."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_wrapper_that_hands_attributes_on_has_hooks_of_its_own(layers: int) -> None:
    base: Any = nn.Linear(4, 4)
    plain = base(_X)
    add_hook_to_module(base, AlignDevicesHook("cpu", offload=True))
    model: Any = base
    for _ in range(layers):
        model = Wrapper(model)
    remove_hook_from_module(model)
    assert base.weight.is_meta
    add_hook_to_module(model, Doubled(), append=True)
    assert torch.equal(model(_X), 2 * plain)
    remove_hook_from_module(model)
    assert torch.equal(model(_X), plain)
    add_hook_to_module(model, Doubled())
    remove_hook_from_submodules(model)
    assert torch.equal(model(_X), plain)
    assert not base.weight.is_meta


def test_a_hook_without_gradients() -> None:
    hook = ModelHook()
    layer = add_hook_to_module(nn.Linear(4, 4), hook)
    assert layer(_X).requires_grad
    hook.no_grad = True
    assert not layer(_X).requires_grad


class Twice(nn.Module):
    """Calls one layer twice, and itself once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 0.5)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        x = self.layer(self.layer(x @ self.weight))
        return self(x, again=False) @ self.weight if again else x


def test_offloaded_weights_are_there_for_each_forward_and_only_then() -> None:
    model = Twice()
    expected, values = model(_X), {name: value.clone() for name, value in model.state_dict().items()}
    attach_align_device_hook(model, "cpu", offload=True)
    assert torch.equal(model(_X), expected)
    assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 9))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(pickle.loads(pickle.dumps(model))(_X), expected)
    remove_hook_from_submodules(model)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def test_threads_share_a_module() -> None:
    model = Twice()
    expected = model(_X)
    attach_align_device_hook(model, "cpu", offload=True)
    right: list[bool] = []
    threads = [
        threading.Thread(target=lambda: right.extend(torch.equal(model(_X), expected) for _ in range(20)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert right == [True] * 60
    assert model.weight.is_meta


def test_layers_keep_a_narrower_dtype_between_forwards() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, skip_modules_pattern="2")
    assert model(_X).dtype == torch.float32
    assert [each.dtype for each in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 4
    for dtype in ("float8_e4m3fn", torch.int8):
        with pytest.raises(SettingError, match="storage_dtype"):
            attach_layerwise_casting_hooks(nn.Linear(2, 2), dtype, torch.float32)  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
def test_inputs_and_weights_come_to_the_device_and_outputs_go_back() -> None:
    layer = nn.Linear(4, 4)
    expected = layer(_X)
    add_hook_to_module(layer, AlignDevicesHook(gpu.IN_A_MAP, offload=True, io_same_device=True))
    output = layer(_X)
    assert output.device.type == "cpu"
    assert layer.weight.is_meta
    assert torch.allclose(output, expected, atol=1e-5)
