from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from instep.big_models import init_empty_weights, load_checkpoint_in_model
from instep.errors import CheckpointError, SettingError
from instep.strategies.materialize import await_weights, builds_empty, deferred_weights, materialize_module


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(2)
        self.norm.num_batches_tracked = None


def saved(folder: Path) -> tuple[dict[str, Any], Path]:
    state = {
        name: torch.rand(value.shape)
        for name, value in Tied().state_dict().items()
        if value.is_floating_point() and name != "head.weight"
    }
    save_file(state, folder / "model.safetensors")
    return state, folder / "model.safetensors"


def test_a_block_without_values_notes_where_they_lie(tmp_path: Path) -> None:
    state, file = saved(tmp_path)
    assert not builds_empty()
    for block in (init_empty_weights(), torch.device("meta")):
        with block:
            assert builds_empty()
            model = Tied()
            load_checkpoint_in_model(model, file, dtype=torch.float64)
        assert deferred_weights(model).keys() >= dict(model.named_parameters()).keys()
        assert model.state_dict().keys() == Tied().state_dict().keys()
        copied = copy.deepcopy(model)  # as peft copies what it saves whole, and an average its model
        before = {name: id(p) for name, p in model.named_parameters()}
        materialize_module(copied, torch.device("cpu"))
        materialize_module(model, torch.device("cpu"))
        assert {name: id(p) for name, p in model.named_parameters()} == before  # what an optimizer has
        for each in (model, copied):
            assert each.head.weight is each.embedding.weight
            assert not deferred_weights(each)
            for name, value in each.named_parameters():
                assert value.dtype == torch.float64
                assert torch.equal(value, state[name].double())
            variance: Any = each.norm.running_var
            assert torch.equal(variance, state["norm.running_var"].to(variance.dtype))


def test_what_a_checkpoint_of_the_run_brings_is_not_read(tmp_path: Path) -> None:
    state, file = saved(tmp_path)
    with init_empty_weights():
        model = Tied()
        load_checkpoint_in_model(model, file)
    shapes: dict[str, torch.Size | None] = {"norm.weight": torch.Size([2]), "norm.bias": torch.Size([3])}
    skipped = await_weights(model, shapes)
    assert list(skipped) == ["norm.weight"]
    assert torch.equal(skipped["norm.weight"].read(), state["norm.weight"])  # type: ignore[union-attr]
    file.unlink()
    save_file({**state, "norm.weight": torch.full((2,), 7.0)}, file)
    materialize_module(model, torch.device("cpu"))
    assert torch.equal(model.norm.bias, state["norm.bias"])
    assert model.norm.weight.tolist() != [7.0, 7.0]


def test_what_a_checkpoint_lacks_is_initialized_or_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"0.weight": torch.eye(2), "0.bias": torch.ones(2), "1.weight": torch.full((2,), 3.0)}, file)

    def built(own: bool) -> Any:
        with init_empty_weights():
            model: Any = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
            if own:
                model.scale = nn.Parameter(torch.ones(2))  # no reset_parameters sets it
            with pytest.warns(UserWarning, match=r"lacks .*1\.bias"):
                load_checkpoint_in_model(model, file)
        return model

    model = built(own=False)
    materialize_module(model, torch.device("cpu"))
    assert [value.tolist() for value in model.parameters()] == [[[1, 0], [0, 1]], [1, 1], [3, 3], [0, 0]]
    with pytest.raises(SettingError, match="without values: scale"):
        materialize_module(built(own=True), torch.device("cpu"))
    with init_empty_weights(), pytest.raises(CheckpointError, match=r"lacks .*1\.bias"):
        load_checkpoint_in_model(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), file, strict=True)
