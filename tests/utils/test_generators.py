"""States of random generators that no generator can have: refused, before a library reads past its arrays."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from instep.checkpoint.codec import decode, encode
from instep.errors import CorruptCheckpointError
from instep.utils.seed import rng_state, set_rng_state

HERE = Path("step-00000003-1")
TWISTERS = ("PCG64", "PCG64DXSM", "Philox", "SFC64", "MT19937")


def put(*keys: Any, value: Any) -> Callable[[Any], None]:
    """What changes one value of a nested state."""

    def change(state: Any) -> None:
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = value

    return change


def torch_head(left: int, after: int, seeded: int = 1) -> Callable[[Any], None]:
    def change(state: Any) -> None:
        raw = bytearray(state["torch"].numpy().tobytes())
        struct.pack_into("<QiiQ", raw, 0, 1, left, seeded, after)
        state["torch"] = torch.frombuffer(raw, dtype=torch.uint8)

    return change


WRONG = {
    "numpy far": put("numpy", 2, value=100_000_000),
    "numpy 625": put("numpy", 2, value=625),
    "numpy -1": put("numpy", 2, value=-1),
    "numpy float": put("numpy", 2, value=1.5),
    "numpy kind": put("numpy", 0, value="PCG64"),
    "numpy short": put("numpy", 1, value=[1, 2]),
    "numpy word": put("numpy", 1, 5, value=2**32),
    "numpy text": put("numpy", 1, 5, value="x"),
    "numpy gauss": put("numpy", 4, value="x"),
    "numpy flag": put("numpy", 3, value=2),
    "numpy none": put("numpy", value=None),
    "python position": put("python", 1, 624, value=625),
    "python word": put("python", 1, 0, value=-1),
    "python version": put("python", 0, value=2),
    "python short": put("python", 1, value=[0] * 624),
    "python gauss": put("python", 2, value=[]),
    "python list": put("python", value=[3]),
    "torch short": put("torch", value=torch.zeros(100, dtype=torch.uint8)),
    "torch zeros": put("torch", value=torch.zeros(5056, dtype=torch.uint8)),
    "torch floats": put("torch", value=torch.zeros(5056)),
    "torch flat": put("torch", value=torch.zeros(1, 5056, dtype=torch.uint8)),
    "torch text": put("torch", value="x"),
    "torch past the end": torch_head(624, 624),
    "torch far": torch_head(1, 2**40),
    "torch left": torch_head(2**31 - 1, 1),
    "torch seeded": torch_head(1, 0, seeded=7),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_wrong_state_changes_no_generator(change: Callable[[Any], None]) -> None:
    state = rng_state()
    change(state)
    before = rng_state()
    with pytest.raises(CorruptCheckpointError, match=f"generators' states in {HERE} are damaged: ") as caught:
        set_rng_state(state, HERE)
    assert caught.value.path == HERE
    after = rng_state()
    assert torch.equal(before.pop("torch"), after.pop("torch"))
    assert before == after


def test_every_position_that_a_generator_reaches_is_taken() -> None:
    for _ in range(1300):  # two rounds of 624 words
        random.random(), np.random.random_sample(3), torch.rand(1)
        state = rng_state()
        set_rng_state(state, HERE)
        assert rng_state()["python"] == state["python"]


@pytest.mark.parametrize("missing", ["python", "torch"])
def test_a_missing_generator_in_a_checkpoint_is_named(missing: str) -> None:
    state = rng_state()
    del state[missing]
    with pytest.raises(CorruptCheckpointError, match=f"those of {missing} are missing"):
        set_rng_state(state, HERE)


def bits(name: str) -> np.random.Generator:
    return np.random.Generator(getattr(np.random, name)(3))


GENERATORS: list[tuple[Any, Callable[[Any], None]]] = [
    (np.random.RandomState(3), put("v", "state", "pos", value=10**8)),
    (np.random.RandomState(3), put("v", "has_gauss", value=3)),
    (bits("MT19937"), put("v", "state", "pos", value=10**8)),
    (bits("Philox"), put("v", "buffer_pos", value=10**8)),
    (bits("PCG64"), put("v", "has_uint32", value=-1)),
    (bits("PCG64"), put("v", "state", "inc", value=2**128)),
    (bits("PCG64DXSM"), put("v", "uinteger", value=2**32)),
    (bits("SFC64"), put("v", "state", "state", value=[1])),
    (random.Random(3), put("v", 1, 624, value=10**8)),
]


@pytest.mark.parametrize(("generator", "change"), GENERATORS)
def test_generators_of_a_state_are_checked_too(generator: Any, change: Callable[[Any], None]) -> None:
    tree, tensors = encode(generator)
    assert type(decode(tree, tensors)) is type(generator)
    change(tree)
    with pytest.raises(CorruptCheckpointError, match="expected"):
        decode(tree, tensors)


def test_torch_generators_of_a_state_are_checked_too() -> None:
    tree, tensors = encode(torch.Generator().manual_seed(3))
    assert isinstance(decode(tree, tensors), torch.Generator)
    state = {"torch": torch.Generator().manual_seed(3).get_state()}
    torch_head(624, 624)(state)
    with pytest.raises(CorruptCheckpointError, match="goes on at 624"):
        decode(tree, dict.fromkeys(tensors, state["torch"]))


@pytest.mark.slow
def test_no_state_that_passes_ends_the_process() -> None:
    """States with random values in every place, set and drawn from in a forked child."""
    pick = random.Random(7)
    values = (-1, 0, 1, 2, 3, 623, 624, 625, 10**8, 2**32, 2**64, 2**128, 0.5, "x", None, [], True)
    child = os.fork()
    if not child:
        taken = 0
        for _ in range(3000):
            state = rng_state()
            name = pick.choice(("numpy", "python", "torch"))
            place = pick.choice((0, 1, 2, 3, 4))
            if name == "torch":
                torch_head(
                    pick.choice((0, 1, 2, 623, 624, 625, -5)), pick.choice((0, 1, 2, 622, 623, 624, 625, 2**40))
                )(state)
            elif place < len(state[name]):
                state[name][place] = pick.choice(values)
            try:
                set_rng_state(state, HERE)
            except CorruptCheckpointError:
                continue
            taken += 1
            random.random(), random.gauss(0, 1), np.random.randn(700), np.random.random(700), torch.randn(3000)
        os._exit(0 if taken > 100 else 3)
    assert os.waitpid(child, 0)[1] == 0
