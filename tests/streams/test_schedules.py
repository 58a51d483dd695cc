"""Drawn schedules of stops, ranks, workers and batch sizes: each epoch is that of one process, in its order.

Ranks are simulated in one process. INSTEP_STREAMS_EVERY=1 runs 300 schedules.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from instep.data import StreamDataset, StreamMixture, prepare_loader
from tests.streams.files import number, write_shards

EVERY = os.environ.get("INSTEP_STREAMS_EVERY") == "1"
EPOCHS = 2


def books(record: Any) -> int:
    return 1000 + record["n"]


def draw_stream(dice: random.Random, folder: Path) -> Any:
    """Draw files, and a stream of them; sometimes a mixture."""
    counts = [dice.randint(1, 25) for _ in range(dice.randint(1, 5))]
    suffix = dice.choice(("jsonl", "txt", "arrow", "tar", "parquet"))
    write_shards(folder, suffix, counts)
    settings: dict[str, Any] = {"window": dice.choice((1, 4, 11, 1000)), "cache": folder / "cache", "keep_bytes": 2000}
    stream = StreamDataset(folder / f"*.{suffix}", number, **settings)
    if dice.random() < 0.6:
        return stream
    (folder / "books").mkdir()
    write_shards(folder / "books", "jsonl", [dice.randint(1, 9), 4])
    other = StreamDataset(folder / "books/*.jsonl", books, **settings)
    return StreamMixture([stream, other], {0: [3, 1], 1024: [1, 2]}, size=dice.randint(30, 80))


def order_of(stream: Any, shuffle: bool, size: int) -> list[list[int]]:
    """Return the samples of each epoch on one process."""
    source = prepare_loader(DataLoader(stream, size, shuffle=shuffle, collate_fn=list), seed=7)
    epochs = []
    for epoch in range(EPOCHS):
        source.set_epoch(epoch)
        epochs.append([sample for batch in source for sample in batch])
    return epochs


def run(dice: random.Random, stream: Any, shuffle: bool) -> list[list[int]]:
    """Read the epochs in parts, each on other ranks; return what was visited."""
    seen: list[list[int]] = [[] for _ in range(EPOCHS)]
    epoch, state = 0, None
    while epoch < EPOCHS:
        world, workers = dice.randint(1, 4), dice.choice((0, 0, 0, 0, 0, 1, 2, 3))
        options: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
        loader: DataLoader[Any] = DataLoader(
            stream, dice.randint(1, 9), shuffle=shuffle, num_workers=workers, collate_fn=list, **options
        )
        ranks = [prepare_loader(loader, rank=rank, world_size=world, seed=7) for rank in range(world)]
        for source in ranks:
            source.set_epoch(epoch)
            if state is not None:
                source.load_state_dict(state)
        stop = dice.randint(1, 12)
        state = None
        for done, batches in enumerate(zip(*ranks, strict=True), ranks[0].first_batch + 1):
            for source, batch in zip(ranks, batches, strict=True):
                seen[epoch] += batch[: source.share.mine]
            if (stop := stop - 1) == 0 and not ranks[0].share.last:
                states = [source.state_dict(done) for source in ranks]
                assert all(each == states[0] for each in states), "any rank's state is the run's"
                state = states[0]
                break
        for source in ranks:
            source.close()
        epoch += state is None
    return seen


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("seed", range(300 if EVERY else 12))
def test_every_epoch_is_that_of_one_process(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    stream, shuffle = draw_stream(dice, tmp_path), dice.random() < 0.8
    whole = order_of(stream, shuffle, 5)
    if isinstance(stream, StreamDataset):
        assert [sorted(epoch) for epoch in whole] == [list(range(len(stream)))] * EPOCHS
    assert run(dice, stream, shuffle) == whole
