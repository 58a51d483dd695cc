from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from instep.big_models import (
    check_device_map,
    clean_device_map,
    compute_module_sizes,
    find_tied_parameters,
    get_balanced_memory,
    infer_auto_device_map,
    load_checkpoint_in_model,
    named_module_tensors,
)
from instep.big_models.device_map import device_of, resolve_device_map
from instep.errors import SettingError


def linear(n: int = 4) -> nn.Linear:
    return nn.Linear(n, n, bias=False)  # 4 * n * n bytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(), linear()
        self.register_buffer("mask", torch.zeros(4))  # 64 + 64 + 16 bytes


def chain(n: int) -> Any:
    return nn.Sequential(*(linear() for _ in range(n)))


def test_parts_go_where_there_is_room():
    # Device 0 and main memory keep 64 bytes for a layer that is offloaded later, device 1 does not.
    limits = {0: 128, 1: 128, "cpu": 128}
    assert infer_auto_device_map(chain(6), limits) == {"0": 0, "1": 1, "2": 1, "3": "cpu", "4": "disk", "5": "disk"}
    assert infer_auto_device_map(chain(6), limits, dtype="float16") == {
        **dict.fromkeys("012", 0), **dict.fromkeys("345", 1)
    }  # fmt: skip
    assert infer_auto_device_map(chain(2), {0: 128}) == {"": 0}
    assert infer_auto_device_map(chain(2), {0: 128}, clean_result=False) == {"0": 0, "1": 0}


def test_a_model_that_is_one_layer():
    assert infer_auto_device_map(linear()) == {"weight": "cpu"}
    assert infer_auto_device_map(nn.Linear(4, 4), {"cpu": 4}) == {"": "disk"}


def test_blocks_are_split_unless_they_must_not_be():
    model = nn.Sequential(Block(), Block())
    limits = {0: 0, 1: 230, "cpu": "1GB"}
    assert infer_auto_device_map(model, limits) == {"0": 1, "1.mask": 1, "1.up": 1, "1.down": "cpu"}
    assert infer_auto_device_map(model, limits, ["Block", "Sequential"]) == {"0": 1, "1": "cpu"}
    assert check_device_map(model, infer_auto_device_map(model, {0: 160})) is None


def test_ties_stay_together():
    model = chain(5)
    model[4].weight = model[0].weight
    assert infer_auto_device_map(model, {0: 192, "cpu": "1GB"}) == {
        **dict.fromkeys("014", 0), **dict.fromkeys("23", "cpu")
    }  # fmt: skip
    # Through a third one, at the model's own level, and as one module at two places.
    model[1] = nn.Sequential(linear(), linear())
    model[1][1].weight = model[0].weight
    model[3].weight = model[1][0].weight
    model.register_parameter("own", model[0].weight)
    model[2] = model[3]
    found = infer_auto_device_map(model, {0: 0, 1: 100, "cpu": 64})
    assert found == {**dict.fromkeys(("own", "0", "1.1", "4"), 1), **dict.fromkeys(("1.0", "2", "3"), "cpu")}


def grown(r: random.Random, depth: int) -> Any:
    """A module at random, with tensors of its own beside modules."""
    if not depth or r.random() < 0.3:
        return r.choice([nn.Linear(r.randint(1, 8), r.randint(1, 8)), nn.BatchNorm1d(r.randint(1, 6)), nn.ReLU()])
    module = r.choice([nn.Module, Block])()
    module.own = nn.Parameter(torch.zeros(r.randint(1, 9)))
    module.register_buffer("table", torch.zeros(r.randint(1, 9)), persistent=False)
    for n in range(r.randint(1, 4)):
        module.add_module(f"{n}", grown(r, depth - 1))
    return module


def test_random_models_are_covered_and_within_limits():
    for seed in range(25):
        r = random.Random(seed)
        model = nn.Sequential(*(grown(r, 3) for _ in range(4)))
        owners = [(m, key) for m in model.modules() for key, p in m._parameters.items() if p is not None]
        for _ in range(min(3, len(owners) // 2)):
            (one, key), (other, there) = r.sample(owners, 2)
            one._parameters[key] = other._parameters[there]
        sizes = compute_module_sizes(model)
        limits: Any = {device: int(sizes[""] * r.uniform(0, 0.6)) for device in (0, 1, "cpu")}
        options: Any = {"no_split_module_classes": r.choice([None, "Block"]), "fallback_allocation": seed % 2 == 0}
        found: Any = infer_auto_device_map(model, limits, **options, offload_buffers=True)
        used = dict.fromkeys((*limits, "disk"), 0)
        for name, _ in named_module_tensors(model, recurse=True):
            used[device_of(name, found)] += sizes[name]
        assert sum(used.values()) == sizes[""], seed
        assert all(used[device] <= limits[device] for device in limits), seed
        for group in find_tied_parameters(model):
            assert len({device_of(name, found) for name in group}) == 1, seed
        check_device_map(model, found)


def test_a_later_part_where_the_next_does_not_fit():
    model = nn.Sequential(linear(8), nn.ReLU(), nn.Sequential(linear(8), linear()))
    limits = {0: 256 + 64}
    expected = {**dict.fromkeys(("0", "1", "2.0"), "disk"), "2.1": 0}
    assert infer_auto_device_map(model, limits, fallback_allocation=True) == expected
    assert infer_auto_device_map(model, limits) == {"": "disk"}


def test_buffers_of_offloaded_layers_need_room():
    model = nn.Sequential(Block(), Block())
    with pytest.warns(UserWarning, match="offload_buffers"):
        infer_auto_device_map(model, {0: 10, "cpu": "1GB"})
    infer_auto_device_map(model, {0: 10, "cpu": "1GB"}, offload_buffers=True)


def test_what_does_not_fit_is_an_error_where_the_disk_is_limited():
    with pytest.raises(SettingError, match=r"384 bytes does not fit .* 4 parts from '2' on"):
        infer_auto_device_map(chain(6), {"cpu": 192, "disk": 0})
    assert infer_auto_device_map(chain(6), {"cpu": 192, "disk": 256})["5"] == "disk"


def test_steps_are_printed(capsys):
    infer_auto_device_map(nn.Sequential(Block()), {0: 100}, verbose=True)
    assert "0 is split" in capsys.readouterr().out


def test_balanced_memory_gives_devices_like_shares():
    model = chain(6)  # shares of 384 / n + 1.25 of a layer
    assert get_balanced_memory(model, {0: 500, 1: 500, 2: 500, "cpu": 9}) == {0: 208, 1: 208, 2: 500, "cpu": 9}
    assert get_balanced_memory(model, {0: 0, 1: 500, 3: 500}) == {0: 0, 1: 272, 3: 500}
    assert get_balanced_memory(model, {0: 500, 2: 150, 3: 170}, low_zero=True) == {0: 64, 2: 150, 3: 170}
    assert get_balanced_memory(model, {0: 500, "disk": 9}) == {0: 500, "disk": 9}
    blocks = nn.Sequential(linear(), Block())
    assert get_balanced_memory(blocks, {0: 500, 1: 500}, "Block")[0] == (64 + 144) // 2 + 144 * 5 // 4


def test_a_map_is_what_was_asked_for():
    model = nn.Sequential(Block(), Block())
    limits = {"cpu": 280}
    assert resolve_device_map(model, "auto", limits)["1.down"] == "disk"
    assert resolve_device_map(model, {"0": "disk", "1": torch.device("cpu")}) == {"0": "disk", "1": torch.device("cpu")}
    wrong = {"auot": "Did you mean 'auto'", "": "balanced_low_0"}
    for word, said in wrong.items():
        with pytest.raises(SettingError, match=said):
            resolve_device_map(model, word)
    for device, said in {99: "99 is not here", "cuda:77": "not here", "tpu": "no device", None: "no device"}.items():
        with pytest.raises(SettingError, match=said):
            resolve_device_map(model, {"": device})
    with pytest.raises(SettingError, match="99 is not here"):
        resolve_device_map(model, "sequential", {99: "1GB"})


def test_a_map_is_checked_against_the_model():
    model: Any = nn.Sequential(Block(), Block())
    with pytest.warns(UserWarning, match="did you mean 1.down"), pytest.raises(SettingError, match=r"1\.down\.weight"):
        check_device_map(model, {"0": 0, "1.up": 0, "1.mask": 0, "1.dwon": 0})
    check_device_map(model, {"": "disk", "1.mask": 0})
    with pytest.raises(SettingError, match=r"device_map='auto': expected names .* infer_auto_device_map\(\)"):
        load_checkpoint_in_model(model, "weights", device_map="auto")
    model[1].up.weight = model[0].up.weight
    with pytest.warns(UserWarning, match="one tied parameter on several devices"):
        check_device_map(model, {"": "cpu", "1.up": 0})


def test_entries_of_one_device_are_joined():
    assert clean_device_map({"a.x": 0, "a.y.0": 1, "a.y.1": 1, "b": "cpu"}) == {"a.x": 0, "a.y": 1, "b": "cpu"}
    assert clean_device_map({"a": 0, "b.c": 0}) == {"": 0}


def test_classes_that_no_module_is_of_are_warned_of():
    model = nn.Sequential(Block(), Block())
    with pytest.warns(UserWarning, match=r"blocks may be split.*Linear \(4 times\), Block \(2 times\)"):
        infer_auto_device_map(model, {"cpu": 1000}, no_split_module_classes=["Blok"])
