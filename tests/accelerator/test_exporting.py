"""Weights and objects as files for anybody to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from instep.accelerator import save
from instep.checkpoint import load_weights
from instep.errors import SettingError, UnsavableStateError
from tests.accelerator.loops import Net


@pytest.mark.parametrize("safe", [True, False])
def test_any_model_is_saved_in_one_file_or_several(make: Any, tmp_path: Path, safe: bool) -> None:
    accelerator, model = make(), Net()
    weights = model.state_dict()
    name = "model.safetensors" if safe else "pytorch_model.bin"
    one = accelerator.save_model(model, tmp_path, safe_serialization=safe)
    assert one == tmp_path / name
    assert load_weights(one).keys() == weights.keys()
    prepared = accelerator.prepare(model)
    index = accelerator.save_model(prepared, tmp_path, max_shard_size=100, safe_serialization=safe)
    assert index == tmp_path / f"{name}.index.json"
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) > 2, files
    assert name not in files, "readers would find two models"
    again = load_weights(index)
    assert all(torch.equal(again[key], value) for key, value in weights.items())
    accelerator.save_model(prepared, tmp_path, max_shard_size="1GB", safe_serialization=safe)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(SettingError, match="max_shard_size='much'"):
        accelerator.save_model(prepared, tmp_path, max_shard_size="much")


@pytest.mark.parametrize(("size", "name"), [("1GB", "model.safetensors"), (100, "model.safetensors.index.json")])
def test_pickled_weights_beside_safetensors_are_warned_of(make: Any, tmp_path: Path, size: Any, name: str) -> None:
    accelerator, model = make(), Net()
    (tmp_path / "model_ema.safetensors").touch()
    accelerator.save_model(model, tmp_path, safe_serialization=False)  # a warning would be an error
    accelerator.save_model(model, tmp_path, size)
    with pytest.warns(UserWarning, match=f"also has {name}, which readers take first"):
        accelerator.save_model(model, tmp_path, safe_serialization=False)


def test_states_of_models_that_were_not_prepared(make: Any) -> None:
    accelerator, model = make(), Net()
    assert accelerator.get_state_dict(torch.nn.DataParallel(model)).keys() == model.state_dict().keys()
    wrapped = accelerator.get_state_dict(torch.nn.DataParallel(model), unwrap=False)
    assert all(name.startswith("module.") for name in wrapped)


def test_objects_are_saved_as_torch_does_or_as_safetensors(make: Any, tmp_path: Path) -> None:
    save({"x": torch.ones(2)}, tmp_path / "a.pt", save_on_each_node=True)
    make().save({"x": torch.ones(2)}, tmp_path / "a.safetensors", safe_serialization=True)
    assert torch.load(tmp_path / "a.pt")["x"].tolist() == load_file(tmp_path / "a.safetensors")["x"].tolist() == [1, 1]
    with pytest.raises(UnsavableStateError, match="Give a dict of tensors"):
        save([1], tmp_path / "a.safetensors", safe_serialization=True)


def test_a_state_is_always_safetensors(make: Any, tmp_path: Path) -> None:
    accelerator = make()
    accelerator.prepare(Net())
    with pytest.warns(UserWarning, match="safe_serialization=False.* no effect"):
        path = accelerator.save_state(tmp_path / "state", safe_serialization=False)
    assert (path / "model.safetensors").exists()
