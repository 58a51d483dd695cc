"""A stream without a length is divided over ranks and workers: each sample counts once, in the order of one process."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from instep.data import BatchSource, prepare_loader
from instep.errors import DataError, LoaderWorkerError, RemoteError, SettingError
from instep.streams import divide
from tests.data.helpers import rank
from tests.helpers.spawn import run_ranks

FORK: dict[str, Any] = {"multiprocessing_context": "fork"}
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
replays = pytest.mark.filterwarnings("ignore:.* cannot say where it stands")


class Numbers(IterableDataset[Any]):
    """The numbers from 0; with `by` only this rank's, this worker's, or both."""

    def __init__(self, length: int = 48, by: str = "", reader: tuple[int, int] = (0, 1)) -> None:
        self.length, self.by, self.reader = length, by, reader

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None or "worker" not in self.by else (info.id, info.num_workers)
        own, ranks = self.reader if "rank" in self.by else (0, 1)
        yield from range(own * workers + worker, self.length, ranks * workers)


class Shuffled(Numbers):
    """In an order that the global generators draw, with noise of each of them."""

    def __iter__(self) -> Iterator[Any]:
        for number in torch.randperm(self.length).tolist():
            yield torch.tensor([number, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class Placed(Numbers):
    """Has a state: the place it has come to. It notes how many samples were read."""

    def __init__(self, length: int = 48) -> None:
        super().__init__(length)
        self.place = self.read = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.length:
            self.place, self.read = self.place + 1, self.read + 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def make(data: Any, rank: int, ranks: int, workers: int = 0, size: int | None = 4, **options: Any) -> BatchSource:
    """A rank's source. Without a process group each rank is asked by itself."""
    given = {key: options.pop(key) for key in ("drop_last", "persistent_workers") if key in options}
    loader: DataLoader[Any] = DataLoader(data, size, num_workers=workers, **(FORK if workers else {}), **given)
    return prepare_loader(loader, rank=rank, world_size=ranks, seed=3, **options)


def read(sources: list[BatchSource], epoch: int = 0, steps: int | None = None) -> tuple[list[Any], Any]:
    """Read a pass of all ranks side by side, up to so many steps: the samples in their order, and rank 0's state."""
    taken: list[Any] = []
    state = None
    for source in sources:
        source.set_epoch(epoch)
    passes = [iter(source) for source in sources]
    done = sources[0].first_batch
    while steps is None or steps:
        batches = [next(one, None) for one in passes]
        if all(batch is None for batch in batches):
            break
        for batch in batches:
            taken += [] if batch is None else batch.tolist() if isinstance(batch, torch.Tensor) else [batch]
        done, steps = done + 1, None if steps is None else steps - 1
        state = sources[0].state_dict(done)
    for source in sources:
        source.close()
    return taken, state


# ---- each sample once, in the order of one process


@pytest.mark.parametrize("size", [1, 4, 5, None])
@pytest.mark.parametrize("workers", [0, 2, pytest.param(3, marks=pytest.mark.campaign)])
def test_ranks_and_workers_share_the_order_of_one_process(workers: int, size: int | None) -> None:
    for ranks in (1, 3):
        for stage in ("train", "val"):
            taken, _ = read([make(Numbers(), one, ranks, workers, size, stage=stage) for one in range(ranks)])
            assert taken == [*range(48)]


def test_an_order_and_noise_of_the_global_generators_are_the_same_for_all_readers() -> None:
    training, whole = torch.get_rng_state(), read([make(Shuffled(), 0, 1)])[0]
    for ranks, workers in ((2, 0), (3, 0), (1, 1), (2, 2), (1, 3)):
        assert read([make(Shuffled(), one, ranks, workers) for one in range(ranks)])[0] == whole
    assert read([make(Shuffled(), one, 2) for one in range(2)], epoch=1)[0] != whole
    assert torch.equal(training, torch.get_rng_state())


def test_a_last_step_that_is_not_full_is_dropped_where_that_was_asked_for() -> None:
    for workers in (0, 2):
        sources = [make(Numbers(30), one, 2, workers, drop_last=True) for one in range(2)]
        assert len(read(sources)[0]) in (24, 28)  # the ranks agree on the last step only where they are processes


def test_a_loader_that_is_left_as_it_is_repeats_every_sample() -> None:
    assert sorted(read([make(Numbers(), 0, 1, 2, streams="as_is")])[0]) == sorted([*range(48)] * 2)
    with pytest.raises(SettingError, match="leaves the data as it is"):
        make(Numbers(), 0, 1, streams="divide", use_distributed_sampler=False)


def test_a_claimed_length_is_one_of_all_ranks_together() -> None:
    class Sized(Numbers):
        def __len__(self) -> int:
            return self.length

    assert [make(Sized(50), 0, ranks).num_batches for ranks in (1, 2, 3)] == [13, 7, 5]
    assert make(Sized(50), 0, 2, limit=0.5).num_batches == 3
    assert make(Sized(50), 0, 2, drop_last=True).num_batches == 6


# ---- a position


@replays
@pytest.mark.parametrize(
    "data",
    [pytest.param(Numbers, marks=pytest.mark.campaign), pytest.param(Shuffled, marks=pytest.mark.campaign), Placed],
)
def test_every_sample_comes_once_through_stops_and_resizes(data: type[Numbers]) -> None:
    schedules(random.Random(5), 4, data)


def schedules(draw: random.Random, count: int, data: type[Numbers]) -> None:
    """Stop and go on, `count` times, with ranks and workers that are drawn anew: the samples of one process."""
    for _ in range(count):
        length, epoch, size = draw.randint(1, 60), draw.randint(0, 3), draw.choice((1, 2, 3, 4, 5, 8))
        whole, _ = read([make(data(length), 0, 1, size=size)], epoch)
        taken: list[Any] = []
        state: Any = None
        story: list[Any] = [(length, epoch, size)]
        while True:
            ranks, workers = draw.randint(1, 4), draw.choice((0, 0, 0, 1, 2, 3))
            sources = [make(data(length), one, ranks, workers, size) for one in range(ranks)]
            for source in sources:
                if state is not None:
                    source.load_state_dict(state)
            steps = draw.choice((1, 1, 2, 3, 5, None))
            story.append((ranks, workers, steps))
            some, after = read(sources, epoch, steps)
            taken += some
            state = after or state
            if steps is None or not some:
                break
        assert taken == whole, story


def test_a_state_of_the_data_set_saves_reading_again() -> None:
    data = [Placed(400) for _ in range(2)]
    taken, state = read([make(one, number, 2) for number, one in enumerate(data)], steps=40)
    assert taken == [*range(320)]
    assert not make(Placed(), 0, 1).rank_state, "several ranks go on where one stopped"
    for ranks in (1, 2, 3):
        again = [Placed(400) for _ in range(ranks)]
        sources = [make(one, number, ranks) for number, one in enumerate(again)]
        for source in sources:
            source.load_state_dict(state)
        assert read(sources)[0] == [*range(320, 400)]
        assert all(one.read <= 80 + 8 for one in again), "a step's worth, and what is left"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdatas_loader_brings_the_state_of_its_workers() -> None:
    taken, state = read([make(Placed(400), one, 2, 2, stateful=True) for one in range(2)], steps=40)
    assert taken == [*range(320)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*are read again")
        for ranks, workers in ((2, 2), (3, 1), (1, 0)):
            sources = [make(Placed(400), one, ranks, workers, stateful=True) for one in range(ranks)]
            for source in sources:
                source.load_state_dict(state)
            assert read(sources)[0] == [*range(320, 400)]


def test_what_must_be_read_again_is_said_with_the_seconds() -> None:
    _, state = read([make(Numbers(), 0, 1, 2)], steps=6)
    source = make(Numbers(), 0, 1)
    source.load_state_dict(state)
    with pytest.warns(UserWarning, match="24 samples are read again and thrown away to resume, about 0 s"):
        assert read([source])[0] == [*range(24, 48)]
    shorter = make(Numbers(20), 0, 1)
    shorter.load_state_dict(state)
    with pytest.warns(UserWarning, match="are read again"), pytest.raises(DataError, match="ended after 20 samples"):
        read([shorter])


def test_what_reading_for_the_others_costs_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divide, "_COSTS_S", 0.0)  # any time at all
    monkeypatch.setattr(divide, "_COSTS", 0.0)
    source = make(Numbers(), 0, 2)
    with pytest.warns(UserWarning, match="reads the whole DataLoader of a Numbers, 2 times what it uses"):
        read([source])
    read([source], epoch=1)


# ---- who reads what is found out


def _found() -> list[Any]:
    """Read data of every kind on real ranks: each rank's samples, and its warnings."""
    own, ranks, found = rank(), 3, []
    for by in ("", "rank", "worker", "rank and worker"):
        for workers in (0, 2):
            source = make(Numbers(48, by, (own, ranks)), own, ranks, workers)
            for epoch in range(2):
                source.set_epoch(epoch)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    found.append([x for batch in source if source.share.mine for x in batch.tolist()])
            source.close()
    return found


@pytest.mark.dist
def test_data_that_divides_itself_is_left_as_it_is() -> None:
    for parts in zip(*run_ranks(_found, 3), strict=True):
        assert sorted(chain(*parts)) == [*range(48)]


class Own(IterableDataset[Any]):
    """Samples made by a function of this rank's."""

    def __init__(self, samples: list[Any], error_at: int | None = None) -> None:
        self.samples, self.error_at = samples, error_at

    def __iter__(self) -> Iterator[Any]:
        for number, sample in enumerate(self.samples):
            if number == self.error_at:
                raise OSError("the disk is gone")
            yield sample


def _doubtful() -> list[Any]:
    own, found = rank(), []
    shuffled = random.Random(own).sample(range(48), 48)
    repeated = [*range(1000 * own, 1000 * own + 100), -1]
    cases: list[Any] = [
        ({"data": Own(shuffled)}, None),
        ({"data": Own(shuffled), "streams": "as_is"}, None),
        ({"data": Own(repeated)}, None),  # an empty line that all have is no sign
        ({"data": Own([{"beside": {1, 2}}] * 5), "size": None}, None),
        ({"data": Own([*range(5)] if own else [])}, None),
        ({"data": Own([*range(9)], error_at=3 if own else None)}, None),
        ({"data": Own([*range(9)], error_at=3 if own else None), "workers": 2}, None),
        ({"data": Numbers(48, "worker"), "workers": 2, "streams": "divide"}, None),
    ]
    for case, _ in cases:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            source = make(rank=own, ranks=2, uneven="join", **{"size": 1, **case})
            try:
                count = sum(1 for _ in source if source.share.mine != 0)
            except Exception as error:
                count = f"{type(error).__name__}: {error}"  # type: ignore[assignment]
            source.close()
        found.append((count, [str(warning.message) for warning in caught]))
    return found


@pytest.mark.dist
def test_what_cannot_be_told_is_asked_for_and_an_error_reaches_all() -> None:
    first, second = run_ranks(_doubtful, 2)
    for text, _ in (first[0], second[0]):
        assert text.startswith("DataError: ranks or workers read some of the same samples of the DataLoader of a Own")
        assert "streams='dispatch'" in text
    assert [one[1] for one in (first, second)] == [(48, [])] * 2
    assert [one[2] for one in (first, second)] == [(101, [])] * 2
    assert [one[3][0] for one in (first, second)] == [5, 5]
    assert [sum("cannot be compared" in text for text in one[3][1]) for one in (first, second)] == [1, 0]
    assert [one[4][0] for one in (first, second)] == [0, 5]
    for number in (5, 6):
        assert first[number][0].startswith(RemoteError.__name__)
        assert second[number][0].startswith("OSError: ")
        assert "the disk is gone" in second[number][0]
    assert sum(one[7][0] for one in (first, second)) == 48


class Dies(Numbers):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None and info.id == 1:
            os._exit(3)
        yield from range(self.length)


def _raise(worker: int) -> None:
    if worker:
        raise ValueError("no such shard")


def test_a_worker_that_fails_before_its_first_sample_is_told_of() -> None:
    with pytest.raises(LoaderWorkerError, match="exit code 3"):
        list(make(Dies(), 0, 1, 2))
    loader: DataLoader[Any] = DataLoader(Numbers(), 4, num_workers=2, worker_init_fn=_raise, **FORK)
    with pytest.raises(ValueError, match="no such shard"):
        list(prepare_loader(loader))


def _batches() -> list[list[int]]:
    """Whole batches of loaders of the user's own."""

    class Again:
        def __iter__(self) -> Iterator[Any]:
            for start in range(0, 22, 2):
                yield torch.arange(start, start + 2)

    found = []
    for loader in (Again(), iter(Again()), (torch.arange(n, n + 2) for n in range(0, 22, 2))):
        source = prepare_loader(loader, rank=rank(), world_size=2)
        found.append([x for batch in source if source.share.mine for x in batch.tolist()])
    return found


@pytest.mark.dist
def test_whole_batches_of_other_loaders_are_divided() -> None:
    first, second = run_ranks(_batches, 2)
    assert first == [[0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21]] * 3
    assert second == [[2, 3, 6, 7, 10, 11, 14, 15, 18, 19]] * 3


if __name__ == "__main__":  # python -m tests.streams.test_divide SEED COUNT
    warnings.simplefilter("ignore")
    for kind in (Numbers, Shuffled, Placed):
        schedules(random.Random(int(sys.argv[1])), int(sys.argv[2]), kind)
