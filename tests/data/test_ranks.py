"""Two real processes: what one process cannot show."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset, TensorDataset, random_split

from instep.data import CombinedLoader, PreparedLoader, prepare_loader
from instep.data.plan import rank_weight, window_scale
from instep.errors import DataError
from tests.data.helpers import Numbers, rank
from tests.helpers.spawn import run_ranks

pytestmark = pytest.mark.dist


def everyone(value: float) -> float:
    """A collective in the step: it hangs unless all ranks run the same steps."""
    total = torch.tensor(float(value))
    dist.all_reduce(total)
    return total.item()


class Mine(IterableDataset[int]):
    """As many samples as this rank is to have, with a place that can be resumed."""

    def __init__(self, lengths: list[int], stateful: bool = False) -> None:
        self.length = lengths[rank()]
        self.offset = 100 * rank()
        self.place = 0
        if stateful:
            self.state_dict = lambda: {"place": self.place}
            self.load_state_dict = lambda state: setattr(self, "place", state["place"])

    def __iter__(self) -> Iterator[int]:
        while self.place < self.length:
            self.place += 1
            yield self.offset + self.place
        self.place = 0


def stream(lengths: list[int], uneven: str, stateful: bool = False, **options: Any) -> PreparedLoader:
    loader = DataLoader(Mine(lengths, stateful), batch_size=2)
    return prepare_loader(loader, rank=rank(), world_size=2, uneven=uneven, **options)


def run(source: Any, stop: int | None = None) -> list[tuple[list[int], tuple[Any, Any], float, bool]]:
    steps = []
    for number, batch in enumerate(source, source.first_batch):
        weights = everyone(rank_weight(source))
        assert weights == pytest.approx(2.0)
        steps.append((batch.tolist(), source.share[:2], window_scale(source, number, 2), source.share.last))
        if len(steps) == stop:
            break
    return steps


def _stop() -> list[Any]:
    return run(stream([7, 4], "stop"))


def test_stop_at_the_first_exhausted_rank() -> None:
    first, second = run_ranks(_stop, 2)
    assert [step[0] for step in first] == [[1, 2], [3, 4]]
    assert [step[0] for step in second] == [[101, 102], [103, 104]]
    assert [step[1] for step in first + second] == [(2, 4)] * 4
    assert [step[2] for step in first + second] == [0.5] * 4
    assert [step[3] for step in first] == [step[3] for step in second] == [False, True]


def _without_cpu() -> list[list[int]]:
    dist.init_process_group("cuda:gloo")  # as NCCL, which takes no tensors of the CPU
    return [batch.tolist() for batch in stream([7, 4], "stop")]


def test_ranks_agree_where_the_default_group_takes_no_tensors_of_the_cpu() -> None:
    assert run_ranks(_without_cpu, 2) == [[[1, 2], [3, 4]], [[101, 102], [103, 104]]]


def _weights() -> list[Any]:
    source = stream([3, 4], "stop")
    assert not source.plan.uniform
    assert source.plan.full_batches(2) == 0
    return run(source)


def test_last_batches_of_different_size_weigh_by_their_samples() -> None:
    first, second = run_ranks(_weights, 2)
    assert [step[1] for step in first] == [(2, 4), (1, 3)]
    assert [step[2] for step in second] == pytest.approx([0.5, 2 * 2 / 3 / 2])


def _join() -> tuple[list[Any], ...]:
    whole = run(stream([7, 3], "join"))
    again = []
    for stateful in (False, True):
        for stop in range(1, 5):
            source = stream([7, 3], "join", stateful)
            started = run(source, stop)
            resumed = stream([7, 3], "join", stateful)
            resumed.load_state_dict(source.state_dict(stop))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                again.append(started + run(resumed))
            resumed.set_epoch(1)
            again.append(run(resumed))
    return whole, *again


def test_join_replays_with_weight_zero_until_all_are_exhausted() -> None:
    (first, *first_again), (second, *second_again) = run_ranks(_join, 2)
    assert [step[0] for step in first] == [[1, 2], [3, 4], [5, 6], [7]]
    assert [step[0] for step in second] == [[101, 102], [103], [103], [103]]
    assert [step[1] for step in second] == [(2, 4), (1, 3), (0, 2), (0, 1)]
    assert [step[2] for step in first] == pytest.approx([0.5, 2 / 3, 1.0, 1.0])
    assert [step[2] for step in second][2:] == [0.0, 0.0]
    for whole, passes in ((first, first_again), (second, second_again)):
        for again in passes:  # all but the scale: a pass resumed within a window has a shorter window
            assert [(batch, counts, last) for batch, counts, _, last in again] == [
                (batch, counts, last) for batch, counts, _, last in whole
            ]


def _error() -> str:
    with pytest.raises(DataError) as caught:
        run(stream([5, 4], "error"))
    return str(caught.value)


def test_uneven_data_can_be_an_error() -> None:
    first, second = run_ranks(_error, 2)
    assert "1 of 2 ranks have no batch 2 (rank 0 has one)" in first
    assert "rank 1 has none" in second


class Claiming(Mine):
    """The same with a length, which is a claim."""

    def __len__(self) -> int:
        return self.length


def _claims() -> list[int]:
    def given(uneven: str, limit: float) -> int:
        loader = DataLoader(Claiming([9, 15]), batch_size=2)
        return len(run(prepare_loader(loader, rank=rank(), world_size=2, uneven=uneven, limit=limit)))

    return [given(uneven, limit) for uneven in ("stop", "join") for limit in (0.5, 4, 6)]


def test_limits_of_claimed_lengths_are_alike_on_all_ranks() -> None:
    assert run_ranks(_claims, 2) == [[2, 4, 5, 4, 4, 6]] * 2


def _limits() -> list[int]:
    steps = []
    for lengths, limit in [([9, 9], 3), ([9, 9], 0), ([0, 4], None), ([0, 0], None), ([1, 1], None), ([9, 9], 1)]:
        source = stream(lengths, "stop", limit=limit)
        steps.append(len(run(source)))
        for _ in source:  # broken off in the middle: the agreement of the next pass must not be disturbed
            break
        steps.append(len(run(source)))
    return steps


def test_limits_and_empty_streams() -> None:
    assert run_ranks(_limits, 2) == [[3, 2, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]] * 2


def _shared() -> list[list[int]]:
    taken = []
    for length, workers in [(1, 0), (2, 1), (7, 1), (8, 0)]:
        options: Any = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        loader: Any = DataLoader(Numbers(length), batch_size=2, shuffle=True, **options)
        source = prepare_loader(loader, rank=rank(), world_size=2)
        mine = []
        for number, step in enumerate(run(source)):
            mine += step[0][: step[1][0]]
            assert step[2] == window_scale(source, number, 2)
        taken.append(mine)
    return taken


def test_collectives_in_the_step_with_fewer_samples_than_ranks() -> None:
    first, second = run_ranks(_shared, 2)
    for a, b, length in zip(first, second, (1, 2, 7, 8), strict=True):
        assert sorted(a + b) == list(range(length))


def _lists() -> tuple[int, int, str]:
    batches = [torch.tensor([i]) for i in range(3 + rank())]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stopped = run(prepare_loader(batches, rank=rank(), world_size=2))
    joined = run(prepare_loader(batches, rank=rank(), world_size=2, uneven="join"))
    own: Any = DataLoader(Numbers(5 + 2 * rank()), batch_size=2)
    options = {"rank": rank(), "world_size": 2, "use_distributed_sampler": False, "uneven": "join"}
    assert len(run(prepare_loader(own, **options))) == prepare_loader(own, **options).num_batches == 4
    assert len(run(prepare_loader(own, batch_size=3, **options))) == 3
    assert len(run(prepare_loader(own, limit=3, **options))) == 3
    assert len(run(prepare_loader(own, limit=0.5, **options))) == 2
    assert joined[-1][1] == ((0, 1) if rank() == 0 else (1, 1))
    return len(stopped), len(joined), str(caught[0].message) if caught else ""


def test_lists_of_different_lengths() -> None:
    first, second = run_ranks(_lists, 2)
    assert first[:2] == second[:2] == (3, 4)
    assert "rank 0: 3, rank 1: 4" in first[2]
    assert not second[2]


class OwnRandom(Sampler[int]):
    """Draws from a generator that instep does not know, and so differs per rank."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(rank()).sample(range(8), 8))


def _refused() -> list[str]:
    errors = []
    with pytest.raises(DataError) as caught:
        prepare_loader(DataLoader(Numbers(5 + rank())), rank=rank(), world_size=2)
    errors.append(str(caught.value))
    source = prepare_loader(DataLoader(Numbers(8), sampler=OwnRandom()), rank=rank(), world_size=2)
    with pytest.raises(DataError) as caught:
        run(source)
    errors.append(str(caught.value))
    for own in (
        Subset(Numbers(8), range(rank(), 8, 2)),
        *random_split(Numbers(8), [4, 4], _unlike()),
        Subset(_mine(), [1]),
    ):
        with pytest.raises(DataError) as caught:
            prepare_loader(DataLoader(own), rank=rank(), world_size=2)
        errors.append(str(caught.value))
        kept = prepare_loader(DataLoader(own), rank=rank(), world_size=2, use_distributed_sampler=False)
        assert [batch.tolist() for batch in kept] == [[item] for item in own]
    return errors


def _unlike() -> torch.Generator:
    return torch.Generator().manual_seed(rank())


def _mine() -> Any:
    return Subset(Numbers(8), torch.tensor([rank(), 2 + rank()]))


def test_data_that_differs_between_ranks_is_refused() -> None:
    for errors in run_ranks(_refused, 2):
        assert "length is 6 on rank 1 but 5 on rank 0" in errors[0]
        assert "OwnRandom gives rank 1 another order" in errors[1]
        assert all("Subset has other samples on rank 1 than on rank 0" in error for error in errors[2:])
        assert len(errors) == 6


def _generator() -> list[int]:
    generator = torch.Generator().manual_seed(rank())
    loader: Any = DataLoader(Numbers(8), shuffle=True, generator=generator)
    return [step[0][0] for step in run(prepare_loader(loader, rank=rank(), world_size=2))]


class Shard:
    """A part of a table, as Hugging Face's datasets shard one: its rows have transforms that may be random."""

    _fingerprint = "a"

    def __init__(self, plain: bool = False) -> None:
        self.plain = plain

    def with_format(self, kind: None) -> Shard:
        return Shard(plain=True)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, int]:
        assert self.plain or index not in (0, 3), "the ends are read without transforms"
        return {"x": 2 * index + rank()}


def _divided() -> list[list[str]]:
    told = []
    alike = [float(i) for i in range(8)]
    for data in (alike[rank() :: 2], TensorDataset(torch.arange(8)[rank() :: 2]), Shard(), alike, Numbers(8)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            prepare_loader(DataLoader(data), rank=rank(), world_size=2)  # pyright: ignore[reportArgumentType]
            prepare_loader(DataLoader(data), rank=rank(), world_size=2, use_distributed_sampler=False)
        told.append([str(one.message) for one in caught])
    return told


def test_data_that_ranks_have_divided_themselves_is_warned_of_where_it_is_divided_again() -> None:
    first, second = run_ranks(_divided, 2)
    assert [len(texts) for texts in first] == [1, 1, 1, 0, 0]
    assert all("of each rank's samples only a part" in text for texts in first for text in texts)
    assert not any(second)


def test_generators_seeded_differently_still_give_one_order() -> None:
    first, second = run_ranks(_generator, 2)
    assert sorted(first + second) == list(range(8))


def _combined() -> tuple[list[Any], list[Any]]:
    def make() -> CombinedLoader:
        raw = CombinedLoader(
            {"sized": DataLoader(Numbers(7), batch_size=2), "stream": DataLoader(Mine([9, 12]), batch_size=2)},
            "max_size_cycle",
        )
        return raw.map(lambda loader: prepare_loader(loader, rank=rank(), world_size=2))

    def steps(source: CombinedLoader, stop: int | None = None) -> list[Any]:
        taken = []
        for _number, batch in enumerate(source, source.first_batch):
            everyone(rank_weight(source))
            taken.append(({key: part.tolist() for key, part in batch.items()}, source.share[:2], source.share.last))
            if len(taken) == stop:
                break
        return taken

    source = make()
    whole = steps(source)
    started = steps(source, 3)
    resumed = make()
    resumed.load_state_dict(source.state_dict(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return whole, started + steps(resumed)


def test_combined_loaders_agree_and_resume() -> None:
    (first, first_again), (second, second_again) = run_ranks(_combined, 2)
    assert first == first_again
    assert second == second_again
    assert len(first) == len(second) == 5
    assert [step[1][1] for step in first] == [step[1][1] for step in second] == [8, 7, 8, 7, 7]


def _alone() -> list[Any]:
    """Each rank to its own end; no collective in the step."""
    found = []
    lists = [torch.tensor([rank()])] * (2 + rank())
    for loader in (DataLoader(Mine([7, 4]), batch_size=2), lists, DataLoader(Numbers(5 + 3 * rank()), batch_size=2)):
        source = prepare_loader(
            loader, rank=rank(), world_size=2, even_batches=False, use_distributed_sampler=False, limit=None
        )
        flags = [source.share.last for _ in source]
        assert flags == [False] * (len(flags) - 1) + [True]
        source.start_at(len(flags) - 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert len(list(source)) == 1
        found.append(len(flags))
    return found


def test_every_rank_may_end_alone() -> None:
    assert run_ranks(_alone, 2) == [[4, 2, 3], [2, 3, 4]]


def _skipped() -> list[Any]:
    found = []
    for loader in (DataLoader(Mine([7, 3]), batch_size=2), [torch.tensor([i]) for i in range(4 - 2 * rank())]):
        source = prepare_loader(loader, rank=rank(), world_size=2, uneven="join")
        source.start_at(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(run(source))
    return found


def test_joined_ranks_skip_past_their_own_end() -> None:
    first, second = run_ranks(_skipped, 2)
    assert [step[:2] for step in first[0] + first[1]] == [([7], (1, 1)), ([3], (1, 1))]
    assert [step[:2] for step in second[0] + second[1]] == [([7], (0, 1)), ([1], (0, 1))]


def _own_lengths() -> list[Any]:
    found: list[Any] = []
    for world_alike in (False, True):
        length = 4 if world_alike else [4, 6][rank()]

        def make(length: int = length) -> PreparedLoader:
            return prepare_loader(
                DataLoader(range(length), batch_size=2),  # type: ignore[arg-type]
                rank=rank(), world_size=2, even_batches=False, use_distributed_sampler=False,
            )  # fmt: skip

        source = make()
        batches = [batch.tolist() for batch in source]
        states: list[Any] = [None, None]
        dist.all_gather_object(states, source.state_dict(min(2, len(batches))))
        resumed = make()
        resumed.load_state_dict(states[rank() if resumed.rank_state else 0])
        found.append((resumed.rank_state, batches[:2] + [batch.tolist() for batch in resumed] == batches))
    return found


def test_ranks_that_end_alone_resume_alone() -> None:
    for found in run_ranks(_own_lengths, 2):
        assert found == [(True, True), (False, True)]


def _shared_ranks() -> list[Any]:
    loader = DataLoader(Mine([4, 6, 6, 6]), batch_size=2) if rank() < 2 else DataLoader(Mine([6] * 4), batch_size=2)
    source = prepare_loader(loader, rank=rank() // 2, world_size=2)
    return [source.share[:2] for _ in source]


def test_processes_that_share_a_rank_count_as_one() -> None:
    for found in run_ranks(_shared_ranks, 4):
        assert found == [(2, 4)] * 2
