from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.errors import SettingError
from instep.utils.seed import derive_seed, isolate_rng, rng_state, seed_everything, seed_process, set_rng_state


def draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(np.random.randn()), float(torch.rand(()))


def test_what_is_drawn_in_isolation_was_not_drawn():
    with isolate_rng():
        inside = draw()
    assert draw() == inside


def test_derive_seed_is_pinned():
    """Data orders of old runs depend on these values: they never change."""
    assert derive_seed(0) == 8493733112532773764
    assert derive_seed(0, "order", 0, 0) == 3240643256997181863
    assert derive_seed(7, "order", 3, 1) == 3663230990530550030


@given(st.lists(st.one_of(st.integers(), st.text()), min_size=1, max_size=4))
def test_derived_seeds_are_usable(parts):
    assert 0 <= derive_seed(*parts) < 2**63


def test_derived_seeds_differ():
    seeds = {
        derive_seed(seed, name, epoch) for seed in range(10) for name in ("order", "worker") for epoch in range(10)
    }
    assert len(seeds) == 200


@pytest.mark.parametrize("seed", [0, np.int64(7), 2**32, 2**63 - 1])
def test_seed_everything_repeats_every_generator(seed):
    assert seed_everything(seed) == seed
    first = draw()
    seed_everything(seed)
    assert draw() == first
    assert torch.initial_seed() == seed


@pytest.mark.parametrize("seed", [-1, 2**63, "7", None, 7.0, torch.tensor(7)])
def test_seed_out_of_range(seed):
    with pytest.raises(SettingError, match=r"seed=.*: expected an integer from 0 to"):
        seed_everything(seed)


class Devices:
    """Stands for torch.cuda, with generators that are numbers."""

    def __init__(self, generators: list[int]) -> None:
        self.generators = generators

    def is_available(self) -> bool:
        return bool(self.generators)

    is_initialized = is_available

    def device_count(self) -> int:
        return len(self.generators)

    def get_rng_state_all(self) -> list[int]:
        return list(self.generators)

    def set_rng_state_all(self, states: list[int]) -> None:
        for index, state in enumerate(states):
            self.generators[index] = state


@pytest.mark.parametrize(
    ("there", "here", "expected"),
    [([1, 2], [3, 4], [1, 2]), ([1, 2, 3], [4], [1]), ([1], [4, 5], [1, 5]), ([], [4], [4])],
)
def test_every_device_takes_the_state_it_had(monkeypatch: pytest.MonkeyPatch, there: list, here: list, expected: list):
    monkeypatch.setattr(torch, "xpu", Devices(there))
    state = rng_state()
    assert ("xpu" in state) == bool(there)
    monkeypatch.setattr(torch, "xpu", Devices(here))
    set_rng_state(state)
    assert torch.xpu.generators == expected  # pyright: ignore[reportAttributeAccessIssue]


def test_rng_state_restores_every_generator():
    seed_process(3)
    draw()  # leaves a second gaussian waiting in python's and numpy's generator
    state = rng_state()
    first = [draw() for _ in range(3)]
    seed_process(99)
    set_rng_state(state)
    assert [draw() for _ in range(3)] == first


def test_rng_state_is_tensors_and_json():
    state = rng_state()
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    assert set(tensors) == {"torch"}
    rest = {key: value for key, value in state.items() if key not in tensors and key != "cuda"}
    set_rng_state({**json.loads(json.dumps(rest)), **tensors})
    assert json.dumps(rng_state()["python"]) == json.dumps(state["python"])
