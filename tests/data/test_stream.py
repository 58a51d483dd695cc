from __future__ import annotations

import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import RandomSampler as TorchRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from instep.data import PreparedLoader, prepare_loader
from instep.data.plan import gradient_correction, window_scale
from instep.errors import DataError, MissingPackageError, SettingError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata with a new torch
replays = pytest.mark.filterwarnings("ignore:.* cannot say where it stands")


class Stream(IterableDataset[Any]):
    """Unsized; order and noise are drawn from the global generators while it is read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.length).tolist()
        for number in order:
            yield torch.tensor([number, random.random(), np.random.rand(), torch.rand(()).item()])


class Claiming(Stream):
    def __len__(self) -> int:
        return self.length


class Stateful(IterableDataset[Any]):
    """Keeps its place, over epochs too."""

    def __init__(self, length: int = 11) -> None:
        self.length = length
        self.place = 0
        self.total = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.length:
            self.place += 1
            self.total += 1
            yield torch.tensor([self.place, self.total, random.random()])
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.total = state["place"], state["total"]


class Custom:
    """A loader of the user's own, with a length."""

    def __init__(self, batches: int, says: int | None = None) -> None:
        self.batches = batches
        self.says = batches if says is None else says

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.batches):
            yield torch.tensor([number, random.random()])


def run(source: PreparedLoader, stop: int | None = None) -> list[Any]:
    taken, flags = [], []
    for batch in source:
        torch.rand(3)  # what the training draws is nobody's business
        random.random()
        taken.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
        flags.append(source.share.last)
        if len(taken) == stop:
            break
    if stop is None and taken:
        assert flags == [False] * (len(taken) - 1) + [True]
    return taken


def kinds() -> dict[str, Any]:
    return {
        "stream": lambda: DataLoader(Stream(11), batch_size=2),
        "stream, workers": lambda: DataLoader(Stream(11), batch_size=2, num_workers=1),
        "claiming": lambda: DataLoader(Claiming(11), batch_size=2),
        "stateful data set": lambda: DataLoader(Stateful(), batch_size=2),
        "custom": lambda: Custom(6),
        "list": lambda: [[i] for i in range(6)],
        "subclass": lambda: type("Mine", (DataLoader,), {})(torch.arange(11.0), batch_size=2, shuffle=True),
        "torchdata": lambda: StatefulDataLoader(torch.arange(11.0), batch_size=2, shuffle=True),  # type: ignore[arg-type]
        "torchdata, generator": lambda: StatefulDataLoader(
            torch.arange(11.0),
            batch_size=2,
            shuffle=True,
            generator=torch.Generator().manual_seed(7),  # type: ignore[arg-type]
        ),
        "torchdata, stream": lambda: StatefulDataLoader(Stateful(), batch_size=2),
        "torchdata, workers": lambda: StatefulDataLoader(torch.arange(11.0), batch_size=2, shuffle=True, num_workers=1),  # type: ignore[arg-type]
    }


@replays
@replays
def test_a_stream_goes_on_with_another_batch_size() -> None:
    source = prepare_loader(DataLoader(Stream(8), batch_size=2))
    states, order = [source.state_dict(0)], []
    for number, batch in enumerate(source):
        states.append(source.state_dict(number + 1))
        order += [int(row[0]) for row in batch]
    for done, state in enumerate(states):
        other = prepare_loader(DataLoader(Stream(8), batch_size=3))
        other.load_state_dict(state)
        assert [int(row[0]) for batch in other for row in batch] == order[2 * done :]


@replays
@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("kind", kinds())
def test_resume_at_every_batch(kind: str, limit: int | None) -> None:
    def make() -> PreparedLoader:
        return prepare_loader(kinds()[kind](), seed=3, limit=limit)

    source = make()
    epochs = []
    for epoch in range(3):
        source.set_epoch(epoch)
        epochs.append(run(source))
    assert len(epochs[0]) == (6 if limit is None else 4)
    stops = range(1, len(epochs[1]) + 1) if "workers" not in kind else (2, len(epochs[1]))
    for given in stops:
        source = make()
        source.set_epoch(0)
        source.state_dict(0)  # a save before the first batch changes nothing
        assert run(source) == epochs[0]
        source.set_epoch(1)
        started = run(source, stop=given)
        assert started == epochs[1][:given]
        for done in (given, given - 1) if "workers" not in kind else (given,):
            state = source.state_dict(done)
            assert state["finished"] == (done == len(epochs[1]))
            torch.manual_seed(77 + given)  # a new process
            resumed = make()
            resumed.load_state_dict(state)
            resumed.set_epoch(1)
            assert resumed.first_batch == done
            assert run(resumed) == epochs[1][done:], f"after {done} of {given} batches"
            resumed.set_epoch(2)
            assert run(resumed) == epochs[2], f"the epoch after, {done} of {given} batches"
            if done == len(epochs[1]):  # a loop that knows it is done goes on with the next epoch at once
                resumed = make()
                resumed.load_state_dict(state)
                resumed.set_epoch(2)
                assert run(resumed) == epochs[2]


def test_training_and_data_do_not_share_random_numbers() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[union-attr]
    for _ in prepare_loader(DataLoader(Stream(5), batch_size=2)):
        pass
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()  # type: ignore[index]


def test_ranks_and_epochs_differ() -> None:
    drawn = []
    for rank, epoch in [(0, 0), (0, 1), (1, 0)]:
        source = prepare_loader(DataLoader(Stream(30), batch_size=30), rank=rank, seed=3)
        source.set_epoch(epoch)
        drawn.append(str(run(source)))
    assert len(set(drawn)) == 3
    frozen = prepare_loader(DataLoader(Stream(30), batch_size=30), seed=3, shuffle_allowed=False)
    frozen.set_epoch(1)
    assert str(run(frozen)) == drawn[0]


def test_resume_by_reading_again_says_so() -> None:
    source = prepare_loader(DataLoader(Stream(6), batch_size=2))
    run(source, stop=2)
    state = source.state_dict(2)
    source.load_state_dict(state)
    with pytest.warns(UserWarning, match="2 batches are read again"):
        run(source)


def test_a_stream_has_a_length_only_where_it_claims_one() -> None:
    unsized = prepare_loader(DataLoader(Stream(11), batch_size=2))
    assert unsized.num_batches is None
    assert unsized  # not by its length
    with pytest.raises(TypeError, match="no length"):
        len(unsized)
    claiming = prepare_loader(DataLoader(Claiming(11), batch_size=2))
    assert (claiming.num_batches, claiming.plan.total_is_final) == (6, False)
    assert len(prepare_loader(DataLoader(Claiming(11), batch_size=2), limit=0.5)) == 3

    class Modest(Stream):
        def __len__(self) -> int:
            return 2

    assert len(list(prepare_loader(DataLoader(Modest(11), batch_size=2), limit=4))) == 4
    assert len(prepare_loader(Custom(6), limit=4)) == 4
    limited = prepare_loader(DataLoader(Stream(11), batch_size=2), limit=4)
    assert (limited.num_batches, len(run(limited))) == (4, 4)
    with pytest.raises(SettingError, match="fraction"):
        prepare_loader(DataLoader(Stream(11)), limit=0.5)
    assert run(prepare_loader(DataLoader(Stream(0)))) == []
    assert run(prepare_loader([])) == []
    assert run(prepare_loader(Custom(3), limit=0)) == []


def test_a_length_that_is_not_kept_is_an_error() -> None:
    assert len(run(prepare_loader(Custom(5, says=3)))) == 3
    with pytest.raises(DataError, match="length of 5 batches but gave only 3"):
        run(prepare_loader(Custom(3, says=5)))


def test_a_generator_serves_one_pass() -> None:
    source = prepare_loader(iter([[1], [2]]))
    assert run(source) == [[1], [2]]
    with pytest.raises(DataError, match="can be iterated again"):
        run(source)


class Shuffled:
    """Batches of one index each, in the order of a sampler with a generator of the user's."""

    def __init__(self, seed: int) -> None:
        self.sampler = TorchRandomSampler(range(8), generator=torch.Generator().manual_seed(seed))

    def __iter__(self) -> Any:
        return ([index] for index in self.sampler)


def shuffled_by_torchdata(seed: int) -> Any:
    return StatefulDataLoader(torch.arange(8.0), shuffle=True, generator=torch.Generator().manual_seed(seed))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [Shuffled, shuffled_by_torchdata])
def test_the_seed_of_the_users_own_generator_decides_the_order(make: Callable[[int], Any]) -> None:
    first, again, other = (run(prepare_loader(make(seed))) for seed in (1, 1, 2))
    assert first == again != other


def test_windows_of_data_without_an_end() -> None:
    source = prepare_loader(DataLoader(Stream(10), batch_size=2))
    source.history = 3
    gradients = []
    total = 0.0
    for number, _ in enumerate(source):
        total += window_scale(source, number, 3)
        if (number + 1) % 3 == 0 or source.share.last:
            gradients.append(total * gradient_correction(source, number, 3))
            total = 0.0
    assert gradients == pytest.approx([1.0, 1.0])


@replays
def test_windows_of_a_resumed_pass() -> None:
    source = prepare_loader(DataLoader(Stream(10), batch_size=2))
    source.start_at(1)
    assert source.plan.full_batches(3) == 0
    total, sums = 0.0, []
    for number, _ in enumerate(source, source.first_batch):
        total = (total + window_scale(source, number, 3)) * gradient_correction(source, number, 3)
        if (number + 1) % 3 == 0 or source.share.last:
            sums.append(total)
            total = 0.0
    assert sums == pytest.approx([1.0, 1.0])


class Counting:
    """Batches of an object that goes on where it was left, and begins again at its end."""

    def __init__(self, batches: int, sized: bool) -> None:
        self.at, self.batches = 0, batches
        if sized:
            self.__class__ = type("Sized", (type(self),), {"__len__": lambda self: self.batches})

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.batches:
            self.at += 1
            yield [self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


@pytest.mark.parametrize("sized", [True, False])
def test_data_that_begins_again_at_its_end_gives_all_of_it_in_each_pass(sized: bool) -> None:
    source = prepare_loader(Counting(3, sized))
    assert [run(source) for _ in range(3)] == [[[0], [1], [2]]] * 3


def test_an_epochs_end_that_knows_no_place_is_gone_on_from_without_reading() -> None:
    before, data = prepare_loader(Custom(3)), Counting(3, sized=True)
    run(before)
    source = prepare_loader(data)
    source.load_state_dict(before.state_dict(3))
    assert (data.at, run(source)) == (0, [])
    source.set_epoch(1)
    assert run(source) == [[0], [1], [2]]


def test_an_evaluation_that_was_left_begins_anew() -> None:
    source = prepare_loader(Counting(4, sized=True), stage="val")
    assert run(source, stop=2) == [[0], [1]]
    assert [run(source) for _ in range(2)] == [[[0], [1], [2], [3]]] * 2


@pytest.mark.parametrize("listed", [True, False])
def test_samples_of_a_window_weigh_alike_whatever_the_sizes_of_its_batches(listed: bool) -> None:
    batches = [torch.zeros(size) for size in (3, 1, 2, 2, 4)]
    source = prepare_loader(batches if listed else iter(batches))
    source.history = 3
    weights, sums = [], []
    for number, batch in enumerate(source):
        weights.append(window_scale(source, number, 3) / len(batch))
        if number == 2 or source.share.last:
            sums += [weight * gradient_correction(source, number, 3) for weight in weights]
            weights = []
    assert sums == pytest.approx([1 / 6] * 3 + [1 / 6] * 2)


@pytest.mark.parametrize("listed", [True, False])
def test_batches_of_ranks_that_end_apart_weigh_the_same_whatever_their_sizes(listed: bool) -> None:
    batches = [torch.zeros(size) for size in (3, 1, 2, 2, 4)]
    data = batches if listed else iter(batches)
    source = prepare_loader(data, streams="as_is", world_size=2, rank=0, even_batches=False)
    source.history = 3
    weights = [window_scale(source, number, 3) for number, _ in enumerate(source)]
    assert weights == pytest.approx([1 / 3] * 3 + ([1 / 2] if listed else [1 / 3]) * 2)
    assert source.share == (None, None, True, None)


def test_windows_of_unknown_sizes() -> None:
    source = prepare_loader([[1]] * 5)
    source.history = 2
    assert [window_scale(source, number, 2) for number in range(5)] == [0.5, 0.5, 0.5, 0.5, 1.0]
    assert source.share[:2] == (None, None)


def test_a_state_too_far_back_is_refused() -> None:
    source = prepare_loader(DataLoader(Stateful(), batch_size=1))
    run(source, stop=6)
    with pytest.raises(UsageError, match="after 2 batches is gone"):
        source.state_dict(2)
    source.history = 4
    run(source, stop=6)
    assert source.state_dict(2)["batches"] == 2


def test_another_world_size_is_refused_within_an_epoch() -> None:
    source = prepare_loader(DataLoader(Stateful(), batch_size=2))
    run(source, stop=2)
    state = source.state_dict(2)
    with pytest.raises(DataError, match="taken within an epoch by 4 processes"):
        source.load_state_dict({**state, "world_size": 4})
    source.load_state_dict({**state, "world_size": 4, "finished": True})
    with pytest.raises(DataError, match="another kind"):
        source.load_state_dict({"kind": "index"})


@pytest.mark.parametrize(("stage", "copies"), [("train", 7), ("val", 0)])
def test_states_are_copied_for_training_only(stage: str, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    state_dict = Stateful.state_dict
    monkeypatch.setattr(Stateful, "state_dict", lambda self: asked.append(self) or state_dict(self))
    source = prepare_loader(DataLoader(Stateful(), batch_size=2), stage=stage)
    assert len(run(source)) == 6
    assert len(asked) == copies


def test_torchdatas_silent_trap_is_refused() -> None:
    data: Any = torch.arange(4)
    with pytest.raises(SettingError, match="shuffle=True"):
        prepare_loader(StatefulDataLoader(data, sampler=TorchRandomSampler(data)))


def test_a_stateful_loader_must_shard_itself_too() -> None:
    data: Any = torch.arange(4)
    with pytest.raises(SettingError, match="StatefulDistributedSampler"):
        prepare_loader(StatefulDataLoader(data, shuffle=True), world_size=2)


def test_seed_samples_is_not_ignored_silently() -> None:
    with pytest.warns(UserWarning, match="seed_samples=True has no effect"):
        prepare_loader([1, 2], seed_samples=True)


def test_batch_size_of_a_stream() -> None:
    generator = torch.Generator()
    source = prepare_loader(DataLoader(Stream(11), batch_size=2, generator=generator), batch_size=4)
    assert [len(batch) for batch in run(source)] == [4, 4, 3]
    assert source.batch_size == 4
    assert source.loader.generator is generator  # type: ignore[attr-defined]


def test_set_epoch_reaches_the_data_set() -> None:
    class Told(Stream):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    data = Told(2)
    prepare_loader(DataLoader(data)).set_epoch(4)
    assert data.epoch == 4


def test_stateful_reads_iterable_data_through_torchdata(recwarn: pytest.WarningsRecorder) -> None:
    def make(**options: Any) -> PreparedLoader:
        loader = DataLoader(Stateful(), batch_size=2, num_workers=1, drop_last=True)
        return prepare_loader(loader, stateful=True, **options)

    source = make(batch_size=3)
    assert isinstance(source.loader, StatefulDataLoader)
    source = make(batch_size=3)
    started = run(source, stop=1)
    resumed = make(batch_size=3)
    resumed.load_state_dict(source.state_dict(1))
    places = [[sample[0] for sample in batch] for batch in started + run(resumed)]
    assert places == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert not [warning for warning in recwarn if "cannot say where it stands" in str(warning.message)]
    assert type(make(stage="val").loader) is DataLoader
    mapped = DataLoader([1, 2])  # type: ignore[arg-type]
    assert prepare_loader(mapped, stateful=True).loader is mapped


def test_close_ends_the_workers_of_a_pass_that_was_left() -> None:
    source = prepare_loader(StatefulDataLoader(torch.arange(11.0), batch_size=2, num_workers=1))  # type: ignore[arg-type]
    before = multiprocessing.active_children()
    run(source, stop=1)
    (worker,) = (process for process in multiprocessing.active_children() if process not in before)
    source.close()
    assert not worker.is_alive()
    assert len(run(source)) == 6
    source.close()


def test_a_stateful_loader_without_torchdata_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata", None)
    monkeypatch.delitem(sys.modules, "torchdata.stateful_dataloader")
    with pytest.raises(MissingPackageError, match=r"pip install 'instep\[data\]'"):
        prepare_loader(DataLoader(Stream(3)), stateful=True)


@pytest.mark.parametrize("data", [Stream(11), Stateful()])
def test_a_position_in_a_stream_that_is_not_divided_is_of_its_world_and_a_state_of_its_rank(data: Any) -> None:
    source = prepare_loader(DataLoader(data, batch_size=2), streams="as_is")
    run(source, stop=2)
    state = source.state_dict(2)
    with pytest.raises(DataError, match=r"by rank 0 of 4; this is rank 0 of 1"):
        source.load_state_dict({**state, "world_size": 4})
    source.load_state_dict({**state, "world_size": 4, "batches": 0})
    other = prepare_loader(DataLoader(type(data)(11), batch_size=2), streams="as_is")
    other.load_state_dict({**state, "world_size": 4, "finished": True})
    assert [len(run(other)) for _ in range(2)] == [0, 6], "the next epoch is whole"
    if isinstance(data, Stateful):
        with pytest.raises(DataError, match=r"by rank 1 of 1; this is rank 0 of 1"):
            source.load_state_dict({**state, "rank": 1})
    else:
        source.load_state_dict({**state, "rank": 1})
        assert source.first_batch == 2


def test_a_position_in_batches_of_another_size_is_refused_where_the_stream_is_not_divided() -> None:
    source = prepare_loader(DataLoader(Stream(11), batch_size=2), streams="as_is")
    run(source, stop=2)
    state = source.state_dict(2)
    other = prepare_loader(DataLoader(Stream(11), batch_size=3), streams="as_is")
    with pytest.raises(DataError, match="2 batches of 2 samples"):
        other.load_state_dict(state)
    other.load_state_dict({**state, "finished": True})
