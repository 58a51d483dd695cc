"""Tests of weights that lie elsewhere, read by code outside of their module."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from instep.big_models import (
    attach_align_device_hook,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    remove_hook_from_submodules,
    set_module_tensor_to_device,
)
from instep.errors import UsageError

_X = torch.linspace(-1, 1, 12).reshape(3, 4)
Operation = Callable[[Tensor, Tensor], Tensor]


class Table(nn.Module):
    """Holds what others read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("buffer", torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[0]


class Sibling(nn.Module):
    """Reads a weight of a module that is not its own."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))
        self.tables = (table,)

    def forward(self, x: Tensor, operation: Operation) -> Tensor:
        return operation(x, self.tables[0].weight) + self.bias.sum()


class Reader(nn.Module):
    """Computes with a weight of each kind of owner."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = Table(), nn.Linear(4, 4)
        self.sibling = Sibling(self.table)
        self.listed = nn.ParameterList([torch.randn(4, 4)])
        self.named = nn.ParameterDict({"a": torch.randn(4, 4)})

    def forward(self, x: Tensor, operation: Operation) -> list[Tensor]:
        x = self.layer(self.table(x))
        own: Any = (self.table.weight, self.table.buffer, self.listed[0], self.named["a"])
        return [*(operation(x, weight) for weight in own), self.sibling(x, operation)]


def _made() -> Reader:
    torch.manual_seed(0)
    return Reader().eval()


def _loaded(model: nn.Module, folder: Path) -> nn.Module:
    save_file({name: value.clone() for name, value in model.state_dict().items()}, str(folder / "model.safetensors"))
    with init_empty_weights():
        empty = type(model)()
    return load_checkpoint_and_dispatch(empty, folder / "model.safetensors", {"": "disk"}, offload_buffers=True)


def _dispatched(model: nn.Module, folder: Path) -> nn.Module:
    devices = {name: "cpu" if name in ("layer", "sibling") else "disk" for name, _ in model.named_children()}
    return dispatch_model(model, devices, offload_dir=folder, offload_buffers=True)


def _attached(model: nn.Module, _: Path) -> nn.Module:
    attach_align_device_hook(model, "cpu", offload=True, offload_buffers=True)
    return model


PLACES: dict[str, Callable[[Any, Path], Any]] = {
    "memory": lambda model, _: cpu_offload(model, offload_buffers=True),
    "disk": lambda model, folder: disk_offload(model, folder, offload_buffers=True),
    "map": _dispatched,
    "loaded": _loaded,
    "attached": _attached,
}


class Product(torch.autograd.Function):
    """A function that is given a weight as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] @ ctx.saved_tensors[0].t(), None


RIGHT: dict[str, Operation] = {
    "matmul": lambda x, w: x @ w,
    "linear": lambda x, w: F.linear(x, w),
    "linear with bias": lambda x, w: F.linear(x, w, w[0]),
    "conv": lambda x, w: F.conv1d(x[None], w[:3, :3, None], w[0, :3]),
    "embedding": lambda x, w: F.embedding(torch.tensor([1, 2]), w),
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "addmm": lambda x, w: torch.addmm(w[0], x, w),
    "layer_norm": lambda x, w: F.layer_norm(x, (4,), w[0], w[1]),
    "in place, into the input": lambda x, w: x.clone().mul_(w[0]),
    "slicing": lambda x, w: x @ w[:, 1:3],
    "data": lambda x, w: x @ w.data + x @ w.detach(),
    "values": lambda x, w: torch.tensor([w.sum().item(), *w[0].tolist()]) + float(w.detach().numpy()[0, 0]),
    "operator": lambda x, w: torch.ops.aten.mm.default(x, w),
    "list": lambda x, w: torch.stack(torch._foreach_mul([w, w], 2.0)),
    "vmap": lambda x, w: torch.vmap(lambda row: row @ w)(x),
    "function": Product.apply,  # type: ignore[dict-item]
    "autocast": lambda x, w: torch.autocast("cpu", torch.bfloat16)(F.linear)(x, w),
    "device": lambda x, w: x.to(w.device) @ torch.eye(4, device=w.device) + w.new_ones(4),
}


@pytest.mark.parametrize("place", PLACES)
def test_code_outside_of_a_module_computes_with_its_offloaded_weights(place: str, tmp_path: Path) -> None:
    expected = {name: _made()(_X, operation) for name, operation in RIGHT.items()}
    model = PLACES[place](_made(), tmp_path)
    for _ in range(2):
        for name, operation in RIGHT.items():
            found = model(_X, operation)
            assert all(torch.equal(one, other) for one, other in zip(found, expected[name], strict=True)), name
    assert all(weight.is_meta and weight.device.type == "meta" for weight in model.table.parameters())


WRONG: dict[str, Operation] = {
    "mul_": lambda x, w: w.mul_(2),
    "__setitem__": lambda x, w: w.__setitem__(0, 0.0),  # type: ignore[func-returns-value]
    "__iadd__": lambda x, w: w.__iadd__(1),
    "data": lambda x, w: setattr(w, "data", x),  # type: ignore[func-returns-value]
    "data.copy_": lambda x, w: w.data.copy_(w.data * 2),
    "out": lambda x, w: torch.mul(w, 2, out=w),
    "foreach": lambda x, w: torch._foreach_mul_([w], 2.0),
    "init": lambda x, w: nn.init.zeros_(w),
    "past the functions": lambda x, w: _past(x, w),
    "grad": lambda x, w: torch.func.grad(lambda weight: F.linear(x, weight).sum())(w),
}


def _past(x: Tensor, weight: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return F.linear(x, weight)


@torch.no_grad()
@pytest.mark.parametrize("place", PLACES)
def test_what_an_offloaded_weight_cannot_do_raises_with_its_name(place: str, tmp_path: Path) -> None:
    model = PLACES[place](_made(), tmp_path)
    before = model(_X, torch.matmul)
    for name, operation in WRONG.items():
        with pytest.raises(UsageError, match=r"table\.weight"):
            model.sibling(_X, operation)
        with pytest.raises(UsageError, match=r"listed\.0"):
            operation(_X, model.listed[0])
        assert all(torch.equal(one, other) for one, other in zip(model(_X, torch.matmul), before, strict=True)), name


def test_compiled_functions_and_copies_read_offloaded_weights() -> None:
    model = _made()
    expected = model(_X, F.linear)
    cpu_offload(model)
    with torch.no_grad():
        for other, operation in (
            (copy.deepcopy(model), F.linear),
            (pickle.loads(pickle.dumps(model)), F.linear),
            (model, torch.compile(_linear, backend="eager")),
            (torch.compile(model, backend="eager"), F.linear),
        ):
            assert all(torch.equal(one, two) for one, two in zip(other(_X, operation), expected, strict=True))


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def test_a_placeholder_has_the_metadata_of_its_weight() -> None:
    model: Any = cpu_offload(_made())
    weight = model.table.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.numel(), weight.stride()) == ((4, 4), torch.float32, 16, (4, 1))
    assert weight.to(torch.float32) is weight
    assert "table.weight" in repr(weight)
    model.requires_grad_(False)
    assert not weight.requires_grad
    assert not model(_X, torch.matmul)[0].requires_grad
    flat = torch.nn.utils.parameters_to_vector(model.parameters())
    assert torch.equal(flat, torch.nn.utils.parameters_to_vector(_made().parameters()))
    remove_hook_from_submodules(model)
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    assert torch.equal(model.table.weight, weight)


def test_a_value_that_users_put_in_place_of_an_offloaded_weight_is_used() -> None:
    model = cpu_offload(nn.Sequential(nn.Linear(4, 4)))
    given = {"0.weight": torch.ones(4, 4), "0.bias": torch.zeros(4)}
    expected = F.linear(_X, given["0.weight"])
    assert torch.equal(torch.func.functional_call(model, given, (_X,)), expected)
    assert not torch.equal(model(_X), expected)
    for name, value in given.items():
        set_module_tensor_to_device(model, name, "cpu", value=value)
    assert torch.equal(model(_X), expected)


def test_a_list_that_holds_weights_without_values_computes_once_they_are_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Holding()
    assert torch.equal(_loaded(model, tmp_path)(_X), model(_X))


class Holding(nn.Module):
    """Keeps its weight in a list that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weights = (self.layer.weight,)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.weights[0]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_of_torch_takes_its_fast_path_where_it_is_offloaded() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2).eval()
    padding = torch.tensor([[False, False, True]])
    expected = encoder(_X[None], src_key_padding_mask=padding)
    cpu_offload(encoder)
    assert torch.equal(encoder(_X[None], src_key_padding_mask=padding), expected)
    assert all(weight.is_meta for weight in encoder.parameters())
