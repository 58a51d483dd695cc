"""Rank 0 reads for all, in two real processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from instep.data import CombinedLoader, PreparedLoader, base, prepare_loader
from instep.data.plan import gradient_correction, rank_weight, window_scale
from instep.distributed import gather_object
from instep.errors import DataError, DistributedError, RemoteError, SettingError
from instep.state import PartialState
from tests.data.helpers import Numbers, rank
from tests.helpers.spawn import run_ranks

pytestmark = pytest.mark.dist


def prepare(loader: Any, **options: Any) -> PreparedLoader:
    return prepare_loader(loader, rank=rank(), world_size=2, **{"dispatch": True, **options})


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length).tolist())


class Stateful(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < self.length:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Pair(NamedTuple):
    x: torch.Tensor
    names: list[str]


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    label: str


def run(source: PreparedLoader, stop: int | None = None) -> list[Any]:
    """What counts of each batch, what else is known of it, and whether it is the last."""
    steps = []
    for _number, batch in enumerate(source, source.first_batch):
        mine, total = source.share[:2]
        steps.append((batch.tolist()[:mine], (mine, total), source.share.last))
        if len(steps) == stop:
            break
    return steps


def _structures() -> list[Any]:
    batches = [
        {
            "half": torch.arange(6).half().view(3, 2),
            "flag": torch.tensor([True, False, True]),
            "name": ["a", "b", "c"],
            "note": "whole",
            "scale": torch.tensor(2.5, dtype=torch.float64),
            "none": torch.empty(3, 0),
            "big": torch.arange(3) + 2**40,
        },
        Pair(torch.ones(4, 1), ["a", "b", "c", "d"]),
        Sample(torch.arange(2.0), "whole"),
        [torch.arange(5), ("p", "q", "r", "s", "t")],
        torch.arange(1),
        ["only", "text", "here"],
        torch.empty(0, 2),
    ]
    source = prepare(batches, split_batches=True)
    return [(batch, source.share[:2], source.share.last) for number, batch in enumerate(source)]


def test_structures_arrive_as_they_were() -> None:
    first, second = run_ranks(_structures, 2)
    assert [step[1] for step in first] == [(2, 3), (2, 4), (1, 2), (3, 5), (1, 1), (2, 3), (0, 0)]
    assert [step[1] for step in second] == [(1, 3), (2, 4), (1, 2), (2, 5), (0, 1), (1, 3), (0, 0)]
    assert [step[2] for step in first] == [step[2] for step in second] == [False] * 6 + [True]
    tree = second[0][0]
    assert tree["half"].dtype == torch.half
    assert tree["half"].tolist() == [[4, 5]]
    assert tree["flag"].tolist() == [True]
    assert (tree["name"], tree["note"], tree["none"].shape) == (["c"], "whole", (1, 0))
    assert (tree["scale"].item(), tree["scale"].dtype, tree["big"].tolist()) == (2.5, torch.float64, [2 + 2**40])
    assert isinstance(second[1][0], Pair)
    assert second[1][0].names == ["c", "d"]
    assert (second[2][0].x.tolist(), second[2][0].label) == ([1.0], "whole")
    assert (second[3][0][0].tolist(), second[3][0][1]) == ([3, 4], ("s", "t"))
    assert second[4][0].tolist() == [0]  # replayed
    assert (first[5][0], second[5][0]) == (["only", "text"], ["here"])
    assert second[6][0].shape == (0, 2)


def _only_rank_0() -> tuple[int, list[Any], Any]:
    data = Numbers(9)
    source = prepare(DataLoader(data, batch_size=2))
    steps = run(source)
    return data.reads, steps, (len(source), source.batch_size, source.rank_state)


def test_only_rank_0_reads() -> None:
    first, second = run_ranks(_only_rank_0, 2)
    assert (first[0], second[0]) == (9, 0)
    assert first[1] == [([0, 1], (2, 4), False), ([4, 5], (2, 4), False), ([8], (1, 1), True)]
    assert second[1] == [([2, 3], (2, 4), False), ([6, 7], (2, 4), False), ([], (0, 1), True)]
    assert first[2] == second[2] == (3, 2, False)


def _fails(numbers: Any) -> Iterator[torch.Tensor]:
    for number in range(3):
        if number == 2 and rank() == 0:
            raise OSError("the disk is gone")
        yield torch.tensor([number, number])


class Failing:
    def __iter__(self) -> Iterator[torch.Tensor]:
        return _fails(3)


def _errors() -> list[Any]:
    found: list[Any] = []
    source = prepare(Failing())
    taken = []
    try:
        for batch in source:
            taken.append(batch.tolist())  # noqa: PERF401
    except (OSError, RemoteError) as error:
        found.append((type(error).__name__, str(error), taken))
    for batch in ([{"x": torch.ones(4), "flat": torch.ones(7)}], [object()]):
        try:
            list(prepare(batch, split_batches=True))
        except (DataError, RemoteError) as error:
            found.append((type(error).__name__, str(error)))
    try:
        prepare(Failing(), limit=0.5)
    except (SettingError, RemoteError) as error:
        found.append((type(error).__name__, str(error)))
    source = prepare(DataLoader(Numbers(4)))
    try:
        source.load_state_dict({"kind": "combined"})
    except (DataError, RemoteError) as error:
        found.append((type(error).__name__, str(error)))
    return [*found, run(source)]


def test_errors_of_rank_0_reach_all_ranks() -> None:
    first, second = run_ranks(_errors, 2)
    assert [error[0] for error in first[:-1]] == ["OSError", "DataError", "DataError", "SettingError", "DataError"]
    assert [error[0] for error in second[:-1]] == ["RemoteError"] * 5
    assert "reading a batch on rank 0 failed on rank 0" in second[0][1]
    assert "the disk is gone" in second[0][1]
    assert (first[0][2], second[0][2]) == ([], [])  # rank 0 reads a batch ahead: nobody has used half of a step
    assert "a batch of 4 samples has a Tensor of shape (7,)" in first[1][1]
    assert "object, has no tensor and no list" in first[2][1]
    assert "limit_train_batches" in first[3][1]
    assert "another kind" in second[4][1]
    assert [step[0] for step in first[-1]] == [[0], [2]]


def loaders() -> dict[str, Any]:
    return {
        "map": lambda: DataLoader(Numbers(11), batch_size=2, shuffle=True),
        "workers": lambda: DataLoader(
            Numbers(11), batch_size=2, shuffle=True, num_workers=1, multiprocessing_context="fork"
        ),
        "stream": lambda: DataLoader(Stream(11), batch_size=2),
        "stateful data set": lambda: DataLoader(Stateful(11), batch_size=2),
        "batches": lambda: [torch.tensor([2 * i, 2 * i + 1]) for i in range(5)],
    }


def _resume() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    passes = {}
    for name, make in loaders().items():
        source = prepare(make(), seed=3)
        source.set_epoch(1)
        passes[name] = [run(source)]
        for stop in (1, 2, 3):
            source = prepare(make(), seed=3)
            source.set_epoch(1)
            source.history = 2
            started = run(source, stop)
            for done in {stop, stop - 1}:
                state = source.state_dict(done)
                states = [None, None]
                torch.distributed.all_gather_object(states, state)
                resumed = prepare(make(), seed=4)
                resumed.load_state_dict(states[0])  # type: ignore[arg-type]
                resumed.set_epoch(1)
                assert resumed.first_batch == done
                passes[name].append(started[:done] + run(resumed))
                own = prepare(make(), seed=4)
                own.load_state_dict(state)  # of a rank that does not read, on it again
                own.set_epoch(1)
                passes[name].append(started[:done] + run(own))
                resumed.set_epoch(1)
                resumed.start_at(done)
                passes[name].append(started[:done] + run(resumed))
    return passes


def test_resume_after_every_batch() -> None:
    first, second = run_ranks(_resume, 2)
    for name in loaders():
        for passes in (first[name], second[name]):
            assert len(passes) == 19
            assert all(again == passes[0] for again in passes), name
        taken = [row for step in zip(first[name][0], second[name][0], strict=True) for part in step for row in part[0]]
        assert sorted(taken) == list(range(10 if name == "batches" else 11))


def _elsewhere() -> tuple[list[int], Any, Any]:
    source = prepare(DataLoader(Numbers(11), batch_size=2, shuffle=True), seed=3)
    taken = [row for step in run(source, 2) for row in step[0]]
    stream = prepare(DataLoader(Stream(11), batch_size=2))
    run(stream, 2)
    return taken, source.state_dict(2), stream.state_dict(2)


def test_one_process_goes_on_where_two_stopped() -> None:
    first, second = run_ranks(_elsewhere, 2)
    alone = prepare_loader(DataLoader(Numbers(11), batch_size=3, shuffle=True))
    alone.load_state_dict(first[1])
    rest = [row for batch in alone for row in batch.tolist()]
    assert sorted(first[0] + second[0] + rest) == list(range(11))
    whole = torch.cat(list(prepare_loader(DataLoader(Stream(11), batch_size=4), seed=first[2]["seed"]))).tolist()
    for size in (2, 4):
        alone = prepare_loader(DataLoader(Stream(11), batch_size=size))
        alone.load_state_dict(first[2])
        with pytest.warns(UserWarning, match="are read again"):
            assert torch.cat(list(alone)).tolist() == whole[8:]


def _limits() -> list[Any]:
    lengths = []
    for limit in (0, 2, 0.5):
        for loader in (DataLoader(Numbers(11), batch_size=2), [torch.tensor([i]) for i in range(6)]):
            source = prepare(loader, limit=limit)
            lengths.append((len(source), len(run(source)), len(run(source, 1)), len(run(source))))
    return lengths


def test_limits_count_steps() -> None:
    first, second = run_ranks(_limits, 2)
    assert first == second == [(0, 0, 0, 0)] * 2 + [(2, 2, 1, 2)] * 2 + [(1, 1, 1, 1)] * 2


def _unknown() -> list[Any]:
    source = prepare([{"n": 1}, {"n": 2}, {"n": 3}])
    return [
        (batch["n"], source.share[:2], rank_weight(source), source.share.last) for number, batch in enumerate(source)
    ]


def test_batches_that_cannot_be_counted_are_given_whole() -> None:
    first, second = run_ranks(_unknown, 2)
    assert first == [(1, (None, None), 1.0, False), (3, (None, None), 2.0, True)]
    assert second == [(2, (None, None), 1.0, False), (3, (0, None), 0.0, True)]


def _combined() -> list[Any]:
    parts = {"a": DataLoader(Numbers(7), batch_size=2), "b": DataLoader(Stateful(9), batch_size=2)}
    source = CombinedLoader(parts, "max_size_cycle").map(prepare)
    steps = [
        ({key: part.tolist() for key, part in batch.items()}, source.share[:2], source.share.last)
        for number, batch in enumerate(source)
    ]
    again = CombinedLoader(parts, "max_size_cycle").map(prepare)
    for number, _ in enumerate(again):
        if number == 1:
            break
    states = [None, None]
    torch.distributed.all_gather_object(states, again.state_dict(2))
    resumed = CombinedLoader(parts, "max_size_cycle").map(prepare)
    resumed.load_state_dict(states[0])  # type: ignore[arg-type]
    rest = [{key: part.tolist() for key, part in batch.items()} for batch in resumed]
    assert rest == [step[0] for step in steps[2:]]
    return steps


def test_a_dispatched_loader_combines_with_others_and_ends_with_the_last() -> None:
    first, second = run_ranks(_combined, 2)
    assert [step[1] for step in first] == [(4, 8), (4, 7), (3, 5)]
    assert [step[1] for step in second] == [(4, 8), (3, 7), (2, 5)]
    assert [step[2] for step in first] == [step[2] for step in second] == [False, False, True]


def test_data_that_is_spread_already_is_not_dispatched() -> None:
    data = Numbers(4)
    spread = DataLoader(data, sampler=DistributedSampler(data, 2, 0))
    with pytest.raises(SettingError, match="rank 0 cannot read it alone"):
        prepare_loader(spread, world_size=2, dispatch=True)
    with pytest.raises(SettingError, match="rank 0 cannot read it alone"):
        prepare_loader([1], world_size=2, dispatch=True, use_distributed_sampler=False)
    with pytest.raises(SettingError, match="rank 0 cannot read it alone"):
        prepare_loader(DataLoader(IterableWrapper([1])), world_size=2, dispatch=True)


def test_alone_nothing_is_sent() -> None:
    source = prepare_loader(DataLoader(Numbers(3), batch_size=2), dispatch=True, split_batches=True)
    assert [batch.tolist() for batch in source] == [[0, 1], [2]]


class Items(IterableDataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def _zipped(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))


def _samples() -> list[Any]:
    texts = Items([(f"source {i}", f"target {i}") for i in range(7)])
    taken: list[Any] = [[list(map(list, batch)) for batch in prepare(DataLoader(texts, batch_size=2))]]
    seen = Items([(torch.full((3, 2, 2), float(i)), i) for i in range(7)])
    for images, labels in prepare(DataLoader(seen, batch_size=2, collate_fn=_zipped)):
        assert {tuple(image.shape) for image in images} == {(3, 2, 2)}
        taken.append(([image.mean().item() for image in images], list(labels)))
    try:
        list(prepare(DataLoader(Items([1] * 4), batch_size=2, collate_fn=lambda batch: torch.tensor(batch * 2))))
    except (DataError, RemoteError) as error:
        taken.append("should have at most 4 samples has 8" in str(error))
    return taken


def test_columns_are_not_taken_for_samples() -> None:
    ranks = run_ranks(_samples, 2)
    for taken, steps in zip(ranks, ([[0, 1], [4, 5]], [[2, 3], [6]]), strict=True):
        assert taken[0] == [[[f"{side} {i}" for i in step] for side in ("source", "target")] for step in steps]
        assert taken[1:] == [*((step, step) for step in steps), True]


def _window_means(make: Any, accumulate: int, **options: Any) -> list[float]:
    """Each window's loss, where a batch's loss is its mean; of this rank."""
    means, total = [], 0.0
    source = prepare(make(), **options)
    for number, batch in enumerate(source, source.first_batch):
        scale = (
            1 / accumulate
            if number < source.plan.full_batches(accumulate)
            else window_scale(source, number, accumulate)
        )
        total += batch.double().mean().item() * scale
        if (number + 1) % accumulate == 0 or source.share.last:
            means.append(total * gradient_correction(source, number, accumulate))
            total = 0.0
    return means


def windowed() -> dict[str, Any]:
    def pieces(sizes: list[int]) -> list[torch.Tensor]:
        return list(torch.arange(sum(sizes)).split(sizes))

    return {  # the loader, samples of a window, and settings
        "known end": (lambda: DataLoader(Numbers(6), batch_size=2), [6], {}),
        "known end, more windows": (lambda: DataLoader(Numbers(17), batch_size=2), [8, 8, 1], {}),
        "a tail for one rank": (lambda: DataLoader(Numbers(5), batch_size=2), [5], {"even_batches": False}),
        "unknown end": (lambda: DataLoader(Items(list(range(6))), batch_size=2), [6], {}),
        "unknown end, more windows": (lambda: DataLoader(Items(list(range(17))), batch_size=2), [8, 8, 1], {}),
        "batches of all sizes": (lambda: pieces([2, 6, 3, 4, 5]), [8, 7, 5], {"split_batches": True}),
        "whole batches": (lambda: pieces([2, 6, 3, 4, 5]), [15, 5], {}),
        "batch sampler": (
            lambda: DataLoader(Numbers(9), batch_sampler=[[0, 1, 2], [3], [4, 5], [6], [7, 8]]), [7, 2], {}
        ),
    }  # fmt: skip


def _windows() -> dict[str, list[float]]:
    return {name: _window_means(make, 2, **options) for name, (make, _, options) in windowed().items()}


def test_a_window_is_one_large_batch() -> None:
    first, second = run_ranks(_windows, 2)
    for name, (_, sizes, _) in windowed().items():
        expected = [part.double().mean().item() for part in torch.arange(sum(sizes)).split(sizes)]
        alone = [0.0] * (len(first[name]) - len(second[name]))  # of ranks that end earlier
        got = [(a + b) / 2 for a, b in zip(first[name], second[name] + alone, strict=True)]
        assert got == pytest.approx(expected), name


def _known_lengths() -> list[Any]:
    found: list[Any] = []
    for length in (1, 4, 5, 8):
        for even in (True, False):
            source = prepare(DataLoader(Numbers(length), batch_size=2), even_batches=even)
            source.start_at(1)
            source.set_epoch(0)
            assert source.plan.total_is_final
            assert len(run(source)) == len(source) - source.first_batch
            found.append((length, even, len(source), source.plan.full_batches(1)))
    return found


def test_all_ranks_know_what_is_to_come() -> None:
    first, second = run_ranks(_known_lengths, 2)
    for length, even, batches, full in first:
        assert (batches, full) == (-(-length // 4), max(1, length // 4))
        mine = batches - (not even and length % 4 == 1 and length > 1)
        assert (length, even, mine, full) in second


def _apart() -> list[str]:
    PartialState(cpu=True, debug=True)
    source = prepare(DataLoader(Numbers(8), batch_size=2))
    try:
        if rank() == 0:
            next(iter(source))
        else:
            gather_object(1)
    except DistributedError as error:
        return str(error).splitlines()
    return []


def test_checked_mode_names_what_rank_0_sends() -> None:
    for lines in run_ranks(_apart, 2):
        assert "dispatch: position" in lines[1]
        assert "gather_object" in lines[2]


def _long_pass() -> list[Any]:
    found = []
    for kept in (4, 10_000):
        base._KEPT = kept
        source = prepare([torch.arange(2 + number % 3) for number in range(90)], split_batches=True)
        source.history = 3
        weights = []
        for number, _ in enumerate(source):
            weights.append((window_scale(source, number, 3), gradient_correction(source, number, 3)))
        found.append((weights, len(source._seen)))
    return found


def test_a_long_pass_remembers_the_sizes_of_its_last_steps_alone() -> None:
    for (weights, remembered), (expected, _) in run_ranks(_long_pass, 2):
        assert weights == expected
        assert remembered <= 14
