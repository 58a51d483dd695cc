from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from instep.accelerator.rng import set_seed, synchronize_rng_states
from instep.distributed import gather_object
from instep.errors import SettingError
from instep.state import PartialState
from tests.helpers.spawn import run_ranks


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_set_seed_repeats() -> None:
    assert set_seed(5) == 5
    first = draw()
    set_seed(5)
    assert draw() == first
    set_seed(6)
    assert draw() != first
    with pytest.raises(ValueError, match="expected an integer from 0"):
        set_seed(-1)


def test_set_seed_turns_deterministic_algorithms_on() -> None:
    try:
        set_seed(0, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_only_what_was_asked_for_is_touched() -> None:
    state = torch.get_rng_state()
    synchronize_rng_states(["python"])
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(SettingError, match=r"types='pyhton'.*Did you mean 'python'"):
        synchronize_rng_states(["pyhton"])
    with pytest.raises(SettingError, match=r"generator="):
        synchronize_rng_states(["generator"])


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_devices_generator_stays_as_rank_0_has_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.tensor([2])]  # of this rank, which is not 0
    device = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        get_rng_state=lambda: states[-1],
        set_rng_state=states.append,
        get_rng_state_all=lambda: states[-1:],
        set_rng_state_all=states.extend,
    )
    monkeypatch.setattr(torch, kind, device)
    monkeypatch.setattr("instep.accelerator.rng.broadcast_object", lambda chosen: {kind: torch.tensor([0])})
    synchronize_rng_states([kind])
    assert int(states[-1]) == 0


def on_ranks() -> dict[str, Any]:
    rank = PartialState(cpu=True).process_index
    seeds = [set_seed(3), set_seed(3, device_specific=True)]
    result: dict[str, Any] = {"seeds": seeds, "apart": gather_object(draw())}
    generator = torch.Generator().manual_seed(rank)
    synchronize_rng_states(["python"])
    result["python only"] = gather_object(draw())
    synchronize_rng_states(generator=generator)
    result["together"] = gather_object((*draw(), float(torch.rand((), generator=generator))))
    return result


@pytest.mark.dist
def test_seeds_of_ranks_differ_until_they_are_synchronized() -> None:
    for rank, result in enumerate(run_ranks(on_ranks, 2)):
        assert result["seeds"] == [3, 3 + rank]
        first, second = result["apart"]
        assert all(a != b for a, b in zip(first, second, strict=True))
        first, second = result["python only"]
        assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, False]
        first, second = result["together"]
        assert first == second
