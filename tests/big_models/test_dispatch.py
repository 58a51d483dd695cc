"""Tests of models that are divided over devices."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from instep import Accelerator
from instep.big_models import (
    ModelHook,
    add_hook_to_module,
    align_module_device,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    remove_hook_from_submodules,
    set_module_tensor_to_device,
)
from instep.errors import CheckpointError, SettingError, UsageError
from instep.strategies.materialize import refuse_dispatched
from tests.helpers import gpu

dispatch: Any = dispatch_model  # for arguments of wrong types
_IDS = torch.tensor([[1, 2, 5]])


class Tied(nn.Module):
    """A small language model: its head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.embed(ids))))


def _made() -> tuple[Tied, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Tied().eval()
    return model, model(_IDS).detach(), {name: value.clone() for name, value in model.state_dict().items()}


def _map(embed: str, block: str, head: str) -> dict[str, Any]:
    return {"embed": embed, "block": block, "norm": "cpu", "head": head}


def _empty(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]


@pytest.mark.parametrize(
    "devices", [_map("cpu", "disk", "cpu"), _map("disk", "disk", "disk"), _map("disk", "cpu", "disk"), {"": "disk"}]
)
def test_a_divided_model_computes_saves_and_comes_back(devices: dict[str, Any], tmp_path: Path) -> None:
    model, expected, values = _made()
    dispatch_model(model, devices, offload_dir=tmp_path / "offloaded")
    with torch.no_grad():  # the encoder's fast path uses weights of modules that it does not call
        assert torch.allclose(model(_IDS), expected, atol=1e-6)
    assert torch.equal(model(_IDS), expected)
    assert model.hf_device_map == devices
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.block.state_dict()["linear1.weight"], values["block.linear1.weight"])
    saved = load_file(str(Accelerator(cpu=True).save_model(model, tmp_path / "saved")))
    assert all(torch.equal(value, values[name]) for name, value in saved.items())
    remove_hook_from_submodules(model)
    assert torch.equal(model(_IDS), expected)
    assert model.head.weight is model.embed.weight
    assert not _empty(model)
    with torch.no_grad():
        model.embed.weight.zero_()  # in this process only
    for file in (tmp_path / "offloaded").glob("*.safetensors"):
        stored = load_file(str(file))
        assert all(torch.equal(value, values[name]) for name, value in stored.items())
        assert not {"embed.weight", "head.weight"} <= set(stored)  # a tied weight is written once


def test_a_model_on_one_device_is_an_ordinary_one_without_its_map() -> None:
    model = dispatch_model(nn.Linear(2, 2), {"": "cpu"})
    assert model.hf_device_map == {"": "cpu"}
    remove_hook_from_submodules(model)
    refuse_dispatched("fsdp", model)


def test_copies_and_compiled_models_are_divided_too(tmp_path: Path) -> None:
    model, expected, _ = _made()
    dispatch_model(model, _map("cpu", "disk", "cpu"), offload_dir=tmp_path)
    compiled: Any = torch.compile(model, backend="eager")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), compiled):
        assert torch.allclose(other(_IDS), expected, atol=1e-6)
        assert _empty(other)


def test_resident_weights_get_gradients(tmp_path: Path) -> None:
    model, _, _ = _made()
    model(_IDS).sum().backward()
    expected = model.norm.weight.grad
    assert expected is not None
    model.zero_grad()
    dispatch_model(model, _map("cpu", "disk", "cpu"), offload_dir=tmp_path)
    model(_IDS).sum().backward()
    again = model.norm.weight.grad
    assert again is not None
    assert torch.equal(again, expected)


def test_what_would_break_a_divided_model_is_refused(tmp_path: Path) -> None:
    model, expected, values = _made()
    with pytest.raises(SettingError, match="offload_dir"):
        dispatch_model(model, _map("cpu", "disk", "cpu"))
    assert not _empty(model)
    dispatch_model(model, _map("cpu", "disk", "cpu"), offload_dir=tmp_path)
    for change in (lambda: model.to("cpu"), model.half, lambda: model.load_state_dict(values)):
        with pytest.raises(UsageError):
            change()
    with pytest.raises(UsageError, match="dispatched already"):
        dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        disk_offload(nn.Linear(2, 2), tmp_path)
    assert torch.equal(model(_IDS), expected)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda model, folder: dispatch(model, {0: "cpu"}), "names of modules"),
        (lambda model, folder: dispatch(model, {"": ["cpu"]}), "is no device"),
        (lambda model, folder: dispatch(model, "auto", max_memory=5), "max_memory=5"),
        (lambda model, folder: dispatch(model, "auto", no_split_module_classes=[Tied]), "names of classes"),
        (lambda model, folder: dispatch(model, {"": "cpu"}, main_device="gpu"), "main_device: 'gpu' is no"),
        (lambda model, folder: dispatch(model, {"": "cpu"}, state_dict={"head.weight": torch.ones(3)}), "shape"),
        (lambda model, folder: dispatch(model.to("meta"), {"": "cpu"}), "no values"),
        (lambda model, folder: cpu_offload(model, "cuda:99"), "not here"),
        (lambda model, folder: cpu_offload(cpu_offload(model)), "dispatched already"),
        (lambda model, folder: cpu_offload(model.to("meta")), "no values"),
        (lambda model, folder: disk_offload(model.to("meta"), folder), "no values"),
        (lambda model, folder: cpu_offload_with_hook(model, "gpu"), "execution_device: 'gpu' is no device"),
        (lambda model, folder: set_module_tensor_to_device(model, "head.weight", "cpu", dtype="float3"), "float3"),
    ],
)
def test_wrong_arguments_are_named(call: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises((SettingError, UsageError), match=match):
        call(Tied(), tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_divided_model_gets_another_hook(tmp_path: Path) -> None:
    model, expected, values = _made()
    dispatch_model(model, _map("cpu", "disk", "cpu"), offload_dir=tmp_path)
    add_hook_to_module(model, ModelHook(), append=True)
    assert torch.equal(model(_IDS), expected)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    with pytest.raises(UsageError):
        model.half()


def test_whole_models_are_offloaded(tmp_path: Path) -> None:
    for offload in (cpu_offload, lambda model: disk_offload(model, tmp_path)):
        model, expected, values = _made()
        offload(model)
        assert "embed.weight" in _empty(model)
        assert torch.equal(model(_IDS), expected)
        with align_module_device(model.head):
            assert torch.equal(model.head.weight, values["head.weight"])
        assert model.head.weight.is_meta


def test_models_follow_each_other_on_a_device() -> None:
    first, first_hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    second, second_hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu", prev_module_hook=first_hook)
    assert second(first(torch.ones(1, 2))).shape == (1, 2)
    second_hook.offload()
    first_hook.remove()
    assert "forward" not in vars(first)


def test_a_tensor_of_a_module_gets_a_value() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="shape"):
        set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(3, 3))
    set_module_tensor_to_device(layer, "weight", "meta")
    with pytest.raises(UsageError, match="no value"):
        set_module_tensor_to_device(layer, "weight", "cpu")
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2))
    assert layer.weight.sum() == 4


@pytest.mark.gpu
def test_a_model_on_a_device_memory_and_disk(tmp_path: Path) -> None:
    model, expected, _ = _made()
    device = gpu.IN_A_MAP
    dispatch_model(model, {"embed": device, "block": "disk", "norm": "cpu", "head": device}, offload_dir=tmp_path)
    output = model(_IDS)
    assert output.device.type == "cpu"
    assert torch.allclose(output, expected, atol=1e-5)
    assert model.block.linear1.weight.is_meta
    assert model.embed.weight.device.type == gpu.DEVICE
    assert model.head.weight is model.embed.weight
    if gpu.on_device("that what the CPU keeps comes for its forward alone"):
        assert model.norm.weight.is_meta


def test_prepare_leaves_a_dispatched_model_where_it_is(tmp_path: Path) -> None:
    model, expected, _ = _made()
    dispatch(model, _map("cpu", "disk", "cpu"), offload_dir=tmp_path)
    prepared = Accelerator(cpu=True).prepare(model)
    assert torch.equal(prepared(_IDS), expected)
    assert _empty(model)
