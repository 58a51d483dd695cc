"""What users of other packages reported about streams, as it is here. Each test names the report that it answers."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.datapipes.iter import IterableWrapper

from instep import Accelerator
from instep.accelerator import DataLoaderConfiguration
from instep.data import StreamDataset, StreamMixture, prepare_loader
from tests.data import helpers
from tests.data.test_foreign_data import train
from tests.helpers.spawn import RanksFailed, run_ranks
from tests.streams.files import number, write_shards
from tests.streams.test_divide import FORK, Numbers, Placed, read

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'set_vital' is deprecated")


def hugging_face(length: int = 48) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": [*range(length)]}).to_iterable_dataset(num_shards=4)


def xs(rows: list[Any]) -> list[int]:
    return [row["x"] if isinstance(row, dict) else row for row in rows]


def source_of(data: Any, workers: int, rank: int = 0, ranks: int = 1, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(data, 4, num_workers=workers, collate_fn=xs, **(FORK if workers else {}), **options)
    return prepare_loader(loader, rank=rank, world_size=ranks, seed=3)


def read_lists(sources: list[Any], epoch: int = 0, steps: int | None = None) -> tuple[list[int], Any]:
    """Read as `read` does; a batch is a list."""
    taken, state = read(sources, epoch, steps)
    return [sample for batch in taken for sample in batch], state


@pytest.mark.parametrize("data", [Placed, Numbers, pytest.param(hugging_face, marks=pytest.mark.datasets)])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.filterwarnings("ignore:.* cannot say where it stands")
def test_epochs_after_a_resume_are_whole_also_where_workers_persist(workers: int, data: Any) -> None:
    """Later epochs had what was left of the first one: huggingface/datasets#7447."""

    def epochs(source: Any) -> list[list[int]]:
        found = []
        for epoch in range(3):
            source.set_epoch(epoch)
            found.append([sample for batch in source for sample in batch])
        source.close()
        return found

    whole = epochs(source_of(data(), workers, persistent_workers=True))
    assert [sorted(epoch) for epoch in whole] == [[*range(48)]] * 3
    before, state = read_lists([source_of(data(), workers, persistent_workers=True)], steps=5)
    source = source_of(data(), workers, persistent_workers=True)
    source.load_state_dict(state)
    rest = epochs(source)
    assert [before + rest[0], *rest[1:]] == whole


@pytest.mark.parametrize("data", [Placed, pytest.param(hugging_face, marks=pytest.mark.datasets)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_is_resumed_again_and_again_goes_on_each_time(workers: int, data: Any) -> None:
    """After a first resume the state stood still, so a second one began anew: huggingface/datasets#8308."""
    whole, _ = read_lists([source_of(data(240), workers)])
    assert sorted(whole) == [*range(240)]
    taken: list[int] = []
    state = None
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*are read again")
        while len(taken) < 240:
            source = source_of(data(240), workers)
            if state is not None:
                source.load_state_dict(state)
            some, state = read_lists([source], steps=12)
            taken += some
    assert taken == whole


class Texts(Numbers):
    """Token ids of different lengths, without end tokens: a collator pads them."""

    def __iter__(self) -> Any:
        for index in super().__iter__():
            yield torch.full((1 + index % 5,), index)


class Indexed(Dataset[Any]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return torch.full((1 + index % 5,), index)


def padded(rows: list[Any]) -> Any:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def _stateful(workers: int) -> Any:
    """Read 4 batches, keep the state, and read the rest in another accelerator; beside it what one pass has."""
    found = []
    for data in (Texts(), Indexed()):
        passes: list[list[int]] = []
        state = None
        for stop in (None, 4, None):
            accelerator = Accelerator(
                cpu=True,
                dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=False),
            )
            options: Any = FORK if workers else {}
            loader: Any = DataLoader(data, 3, collate_fn=padded, num_workers=workers, **options)
            loader = accelerator.prepare(loader)
            if len(passes) == 2:
                loader.load_state_dict(state)
            seen: list[int] = []
            for done, batch in enumerate(loader, 1):
                seen += accelerator.gather_for_metrics(batch[:, 0]).tolist()
                if done == stop:
                    state = loader.state_dict()
                    break
            passes.append(seen)
            accelerator.free_memory()
        found.append(passes)
    return found


@pytest.mark.dist
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_serves_several_ranks_with_workers(workers: int) -> None:
    """Ranks with workers failed, and a state in mid-epoch repeated samples: huggingface/accelerate#3080, PR 3952."""
    ranks = run_ranks(_stateful, 2, workers)
    assert ranks[0] == ranks[1]
    for whole, before, after in ranks[0]:
        assert sorted(whole) == [*range(48)]
        assert len(before) == 24
        assert before + after == whole


def _piped(shards: bool) -> list[list[int]]:
    accelerator = Accelerator(cpu=True)
    pipe: Any = IterableWrapper([*range(9)]).shuffle()
    loader = accelerator.prepare(DataLoader(pipe.sharding_filter() if shards else pipe, 2))
    return [[x for batch in loader for x in accelerator.gather_for_metrics(batch).tolist()] for _ in range(2)]


@pytest.mark.dist
@pytest.mark.parametrize("shards", [False, True])
def test_a_shuffled_data_pipe_serves_several_ranks(shards: bool) -> None:
    """All ranks waited for each other for ever: huggingface/accelerate PR 1709."""
    first, second = run_ranks(_piped, 2, shards)
    assert first == second
    assert [sorted(epoch) for epoch in first] == [[*range(9)]] * 2


def _resized(ranks: int, state: Any) -> Any:
    loader: DataLoader[Any] = DataLoader(hugging_face(), 4, collate_fn=xs)
    source = prepare_loader(loader, rank=helpers.rank(), world_size=ranks, seed=3)
    if state is not None:
        source.load_state_dict(state)
    for done, _ in enumerate(source, 1):
        if done == 3:
            break
    return source.state_dict(3)


@pytest.mark.dist
@pytest.mark.datasets
def test_a_stream_that_is_divided_by_files_says_how_it_could_have_been_resized() -> None:
    states = run_ranks(_resized, 2, 2, None)
    for ranks in (1, 4):
        with pytest.raises(RanksFailed, match=r"taken within an epoch by 2 processes.*begins with streams='divide'"):
            run_ranks(_resized, ranks, ranks, states[0])


@pytest.mark.filterwarnings("ignore:.* cannot say where it stands")
@pytest.mark.parametrize("stream", [False, True])
def test_a_run_goes_on_inside_an_epoch_without_a_loader_of_its_own(stream: bool, tmp_path: Path) -> None:
    """Resuming inside an epoch needed a loader with a state, or a sampler that skips: Lightning#19764."""
    data: Any = Numbers(40)
    if stream:
        write_shards(tmp_path, "jsonl", [16, 24])
        data = StreamDataset(tmp_path / "*.jsonl", number, window=7, cache=tmp_path)
    loader: DataLoader[Any] = DataLoader(data, 4, shuffle=True if stream else None)
    torch.manual_seed(1)
    whole, _ = train(loader, tmp_path)
    torch.manual_seed(1)
    before, trainer = train(loader, tmp_path, max_steps=7)
    trainer.save_checkpoint(tmp_path / "one")
    after, _ = train(loader, tmp_path, ckpt_path=tmp_path / "one")
    assert before + after == whole
    assert sorted(whole[40:]) == [*range(40)]


def test_a_mixture_goes_on_at_another_size_with_the_samples_that_are_left(tmp_path: Path) -> None:
    """A mixture that is resumed inside an epoch on other ranks, workers and batch sizes."""
    write_shards(tmp_path, "jsonl")
    stream = StreamDataset(tmp_path / "*.jsonl", number, window=9, cache=tmp_path)
    mixture = StreamMixture([stream, [*range(100, 117)]], [3, 1], size=60)
    dice = random.Random(2)

    def ranks_of(world: int, size: int) -> list[Any]:
        loader: DataLoader[Any] = DataLoader(mixture, size, shuffle=True)
        return [prepare_loader(loader, rank=rank, world_size=world, seed=3) for rank in range(world)]

    whole = read(ranks_of(1, 5))[0]
    for _ in range(10):
        taken: list[int] = []
        state = None
        while len(taken) < 60:
            sources = ranks_of(dice.randint(1, 4), dice.randint(1, 3))
            for source in sources:
                if state is not None:
                    source.load_state_dict(state)
            some, state = read(sources, steps=dice.randint(1, 4))
            taken += some
        assert taken[:60] == whole
