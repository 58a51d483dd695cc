from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import numpy as np
import torch

from instep.data.seeding import RandomStream, SeededBatch, SeededDataset, SeededIndex, seed_generators, seeded


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_a_stream_is_its_own_and_leaves_no_trace() -> None:
    seed_generators(1)
    expected = [draw(), draw()]
    seed_generators(1)
    stream = RandomStream(5, "data")
    assert draw() == expected[0]
    with stream.at(0):
        first = draw()
    with stream.at(1):
        second = draw()
    assert draw() == expected[1]
    with stream.at(0):
        assert draw() == first
    assert len({first, second}) == 2


def test_a_stream_is_left_after_an_error() -> None:
    seed_generators(1)
    state = copy.deepcopy(random.getstate())
    try:
        with RandomStream(5).at(0):
            draw()
            raise ValueError
    except ValueError:
        pass
    assert random.getstate() == state


class Data:
    tag = 1

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return index, draw()


def test_a_seeded_data_set_is_the_one_it_wraps() -> None:
    data = SeededDataset(Data(), restore=False)
    assert len(data) == 3
    assert data.tag == 1
    data.tag = 7
    assert data._dataset.tag == 7
    data = pickle.loads(pickle.dumps(data))
    assert data._dataset.tag == 7
    assert [index for index, _ in data.__getitems__([2, 0])] == [2, 0]
    assert data[1][0] == 1


def test_seeds_by_batch_and_by_sample() -> None:
    data = SeededDataset(Data(), restore=True)
    by_batch = data.__getitems__(SeededBatch([0, 1], 5))
    assert data.__getitems__(SeededBatch([0, 1], 5)) == by_batch != data.__getitems__(SeededBatch([0, 1], 6))
    by_sample = data.__getitems__(SeededBatch([0, 1], 5, per_sample=True))
    assert data.__getitems__(SeededBatch([1], 5, per_sample=True)) == by_sample[1:]
    assert data[SeededIndex(1, 5, True)] == by_sample[1]
    assert data[SeededIndex(1, 5, False)] == data[SeededIndex(1, 5, False)]


def test_seeded_batches_travel_to_workers() -> None:
    batches = list(seeded(iter([[1, 2], [3]]), 0, "x", first=4, per_sample=False, single=False))
    again = pickle.loads(pickle.dumps(batches))
    assert again == [[1, 2], [3]]
    assert [batch.seed for batch in again] == [batch.seed for batch in batches]
    assert batches[0].seed != batches[1].seed
    later = list(seeded(iter([[3]]), 0, "x", first=5, per_sample=False, single=False))
    assert later[0].seed == batches[1].seed
