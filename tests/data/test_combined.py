from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from instep.data import BatchSource, CombinedLoader, prepare_loader
from instep.data.plan import rank_weight, window_scale
from instep.errors import DataError, SettingError


@pytest.fixture(autouse=True)
def no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.data.loader.gather_object", lambda obj: [obj])


class Stream(IterableDataset[int]):
    """Unsized; shuffles a little by the global generator."""

    def __init__(self, length: int, offset: int = 0) -> None:
        self.length = length
        self.offset = offset

    def __iter__(self) -> Iterator[int]:
        for i in range(self.length):
            yield self.offset + i * 10 + random.randrange(10)


def loaders(a: int = 10, b: int = 5, *, stream: bool = False) -> dict[str, Any]:
    second: Any = Stream(b, 1000) if stream else range(100, 100 + b)
    return {
        "a": DataLoader(range(a), batch_size=2, shuffle=True),  # type: ignore[arg-type]
        "b": DataLoader(second, batch_size=2, shuffle=not stream),
    }


def combined(
    mode: str, *, world: int = 1, rank: int = 0, stream: bool = False, a: int = 10, b: int = 5
) -> CombinedLoader:
    raw = CombinedLoader(loaders(a, b, stream=stream), mode)
    return raw.map(lambda loader: prepare_loader(loader, rank=rank, world_size=world, seed=3))


def as_lists(batches: Any) -> list[Any]:
    def one(part: Any) -> Any:
        return part.tolist() if isinstance(part, torch.Tensor) else part

    return [
        {key: one(part) for key, part in batch.items()} if isinstance(batch, dict) else tuple(map(one, batch))
        for batch in batches
    ]


def run(source: BatchSource, stop: int | None = None) -> list[Any]:
    """The batches of a pass; `is_last` and the length are checked unless it is cut."""
    taken, flags = [], []
    for batch in source:
        taken.append(batch)
        flags.append(source.share.last)
        if len(taken) == stop:
            break
    if stop is None and taken:
        assert flags == [False] * (len(taken) - 1) + [True]
        if source.plan.total_is_final:
            assert source.num_batches == source.first_batch + len(taken)
    return as_lists(taken)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "mode, steps, a_batches, b_batches",
    [("min_size", 3, 3, 3), ("max_size_cycle", 5, 5, 5), ("max_size", 5, 5, 3)],
)
def test_each_mode_of_a_combined_loader_takes_its_number_of_batches(
    mode: str, steps: int, a_batches: int, b_batches: int, stream: bool
) -> None:
    source = combined(mode, stream=stream)
    assert source.num_batches == (None if stream else steps)
    batches = run(source)
    assert len(batches) == steps
    assert sum(batch["a"] is not None for batch in batches) == a_batches
    assert sum(batch["b"] is not None for batch in batches) == b_batches
    if mode != "min_size":
        assert sorted(chain.from_iterable(batch["a"] for batch in batches)) == list(range(10))
        assert len(set(chain.from_iterable(batch["b"] for batch in batches[:3]))) == 5


def test_sequential_gives_the_loaders_one_after_the_other() -> None:
    batches = run(combined("sequential"))
    assert [(number, index) for _, number, index in batches] == [(n, 0) for n in range(5)] + [(n, 1) for n in range(3)]
    assert sorted(chain.from_iterable(batch for batch, _, _ in batches)) == [*range(10), *range(100, 105)]


def test_cycles_are_shuffled_anew() -> None:
    source = combined("max_size_cycle", a=60, b=20)
    batches = run(source)
    parts = [tuple(chain.from_iterable(batch["b"] for batch in batches[i : i + 10])) for i in (0, 10, 20)]
    assert all(sorted(part) == list(range(100, 120)) for part in parts)
    assert len(set(parts)) == 3


def test_loaders_of_equal_length_are_not_shuffled_alike() -> None:
    batches = run(combined("min_size", a=20, b=20))
    assert any([100 + i for i in batch["a"]] != batch["b"] for batch in batches)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size", "sequential"])
@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.filterwarnings("ignore:DataLoader cannot say where it stands")
def test_resume_at_every_batch(mode: str, stream: bool, behind: int) -> None:
    epochs = []
    source = combined(mode, stream=stream, a=22, b=5)
    for epoch in range(3):
        source.set_epoch(epoch)
        epochs.append(run(source))
    for given in range(max(1, behind), len(epochs[1]) + 1):
        source.set_epoch(1)
        assert run(source, stop=given) == epochs[1][:given]
        done = given - behind
        state = source.state_dict(done)
        resumed = combined(mode, stream=stream, a=22, b=5)
        resumed.load_state_dict(state)
        resumed.set_epoch(1)
        assert resumed.first_batch == done
        assert resumed.state_dict(done) == state
        assert run(resumed) == epochs[1][done:], f"after {done} batches"
        resumed.set_epoch(2)
        assert run(resumed) == epochs[2]


def test_resume_twice_and_repeat_the_epoch() -> None:
    source = combined("max_size_cycle", a=22, b=5)
    whole = run(source)
    run(source, stop=4)
    second = combined("max_size_cycle", a=22, b=5)
    second.load_state_dict(source.state_dict(4))
    assert run(second, stop=4) == whole[4:8]
    third = combined("max_size_cycle", a=22, b=5)
    third.load_state_dict(second.state_dict(8))
    assert run(third) == whole[8:]
    assert run(third) == whole


def test_resume_at_another_world_size() -> None:
    source = combined("max_size_cycle", a=16, b=7)
    taken = run(source, stop=6)
    state = source.state_dict(6)
    ranks = [combined("max_size_cycle", world=2, rank=rank, a=16, b=7) for rank in range(2)]
    for resumed in ranks:
        resumed.load_state_dict(state)
    passes = [run(resumed) for resumed in ranks]
    assert [len(batches) for batches in passes] == [1, 1]
    rest = chain.from_iterable(batch["a"] for batches in passes for batch in batches)
    assert sorted([*chain.from_iterable(batch["a"] for batch in taken), *rest]) == list(range(16))


def test_start_at_is_the_same_as_a_state() -> None:
    for mode in ("min_size", "max_size_cycle", "max_size", "sequential"):
        source = combined(mode, a=22, b=5)
        whole = run(source)
        for done in range(len(whole) + 1):
            source.start_at(done)
            assert run(source) == whole[done:], (mode, done)


def test_counts_and_weights_of_ranks() -> None:
    ranks = [combined("max_size", world=2, rank=rank, a=10, b=5) for rank in range(2)]
    assert [source.num_batches for source in ranks] == [3, 3]
    assert not ranks[0].plan.uniform
    assert [source.plan.full_batches(1) for source in ranks] == [1, 1]
    seen: Counter[int] = Counter()
    for number, _ in enumerate(zip(*ranks, strict=True)):
        counts = [source.share[:2] for source in ranks]
        assert counts[0][1] == counts[1][1] == sum(local or 0 for local, _ in counts)
        assert sum(rank_weight(source) for source in ranks) == pytest.approx(2)
        assert window_scale(ranks[0], number, 2) == pytest.approx(rank_weight(ranks[0]) / (2 if number < 2 else 1))
        seen[number] = counts[0][1] or 0
    assert list(seen.values()) == [8, 5, 2]
    assert ranks[0].sample_indices(2) == [ranks[0].flattened[0].sample_indices(2), None]


def test_a_limit_shortens_a_combined_loader() -> None:
    source = combined("max_size_cycle")
    source.limit(2)
    whole = run(source)
    assert len(whole) == source.num_batches == 2
    assert source.state_dict(2)["finished"]
    source.limit(0.5)
    assert source.num_batches == 2
    source.limit(1.0)
    assert source.num_batches == 5
    source.limit(0)
    assert run(source) == []
    unsized = combined("min_size", stream=True)
    unsized.limit(2)
    assert len(run(unsized)) == unsized.num_batches == 2
    with pytest.raises(SettingError, match="limit_train_batches"):
        unsized.limit(0.5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "mode, lengths",
    [("min_size", [2, 0, 3]), ("max_size_cycle", [3, 3, 5]), ("max_size", [3, 3, 5]), ("sequential", [5, 3, 8])],
)
def test_limits_of_each_loader(mode: str, lengths: list[int], stream: bool) -> None:
    raw = CombinedLoader(loaders(stream=stream), mode)
    for limits, length in zip(([2, 3], [0, 3], float("inf")), lengths, strict=True):
        raw.limits = limits  # type: ignore[assignment]  # read as a list, set as a number too
        assert len(list(raw)) == len(list(raw)) == length
        assert stream or len(raw) == length
    raw.limits = [1, 1]
    if mode != "sequential":
        prepared = raw.map(lambda loader: prepare_loader(loader, seed=3))
        assert len(run(prepared)) == 1
        assert prepared.state_dict(1)["finished"]


def test_loaders_shown_and_started_again() -> None:
    source = CombinedLoader([range(3), {"x": (range(5, 7), DataLoader(range(4)))}])  # type: ignore[arg-type]
    first = next(iter(source))
    source.reset()
    assert next(iter(source)) == first == [0, {"x": (5, 0)}]
    assert source.flattened[0] == range(3)
    assert source.sampler[1]["x"][1] is source.flattened[2].sampler
    for limits in ([1, 2], -1, 0.5):
        with pytest.raises(DataError, match="limits"):
            source.limits = limits  # type: ignore[assignment]


def test_nested_collections_and_raw_loaders() -> None:
    source = CombinedLoader([range(3), {"x": (range(5, 7), [range(4)][0])}])
    assert list(source) == [[0, {"x": (5, 0)}], [1, {"x": (6, 1)}]]
    inner = CombinedLoader([range(2), range(4)], "max_size_cycle")
    outer = CombinedLoader({"pair": inner, "single": range(3)}, "max_size")
    assert [batch["pair"] for batch in outer] == [[0, 0], [1, 1], [0, 2], [1, 3]]
    outer.close()


@pytest.mark.parametrize(
    ("loaders", "batches"),
    [
        ({"a": [0, 1], "b": [2, 3]}, [{"a": 0, "b": 2}, {"a": 1, "b": 3}]),
        ([["x", "y"], ((0.5, 1.5), range(2))], [["x", (0.5, 0)], ["y", (1.5, 1)]]),
    ],
)
def test_plain_lists_are_loaders(loaders: Any, batches: list[Any]) -> None:
    assert list(CombinedLoader(loaders)) == batches


def test_combined_loaders_with_an_empty_one_end_as_their_mode_says() -> None:
    assert list(CombinedLoader([range(3), range(0)])) == []
    assert list(CombinedLoader([range(2), range(0)], "max_size")) == [[0, None], [1, None]]
    assert [batch for batch, *_ in CombinedLoader([range(0), range(2), range(0)], "sequential")] == [0, 1]
    with pytest.raises(DataError, match="cannot be cycled"):
        list(CombinedLoader([range(2), range(0)], "max_size_cycle"))


def test_wrong_uses_of_a_combined_loader_are_named() -> None:
    with pytest.raises(SettingError, match="max_size_cycle"):
        CombinedLoader([range(2)], "max_cycle")
    with pytest.raises(DataError, match="no loader"):
        CombinedLoader({})
    with pytest.raises(DataError, match="None in place"):
        CombinedLoader({"a": range(2), "b": [None]})
    with pytest.raises(DataError, match="another combination"):
        combined("min_size").load_state_dict(combined("max_size").state_dict(0))


@pytest.mark.parametrize("empty", [[], (), range(0)], ids=["list", "tuple", "range"])
def test_an_empty_list_within_is_a_loader_as_a_filled_one_is(empty: Any) -> None:
    assert list(CombinedLoader([empty, [1, 2, 3]], "sequential")) == [(1, 0, 1), (2, 1, 1), (3, 2, 1)]
    nested = CombinedLoader({"a": {"b": empty}, "c": [1, 2]}, "max_size")
    assert list(nested) == [{"a": {"b": None}, "c": 1}, {"a": {"b": None}, "c": 2}]
    assert len(CombinedLoader([empty, [1, 2, 3]], "min_size")) == 0
