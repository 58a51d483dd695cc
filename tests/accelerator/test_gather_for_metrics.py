"""Evaluation on several processes counts every sample once, whatever the lengths.

One process looks at lengths 0 to 40 and batch sizes 1 to 8, several at half of the `endings` of these.
INSTEP_LENGTHS_EVERY=1 runs all of them there too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from instep import Accelerator
from instep.accelerator import DataLoaderConfiguration, skip_first_batches
from tests.data.helpers import EVERY, LENGTHS, SIZES, endings
from tests.helpers.spawn import run_ranks


def cases(mode: str, world: int) -> list[tuple[int, int, int]]:
    """Lengths and batch sizes that are looked at, and how many rounds of all ranks are skipped before."""
    chosen = [(length, size) for length in LENGTHS for size in SIZES] if world == 1 else endings(world)
    if world > 1 and not EVERY:  # the ways share them
        chosen = chosen[MODES.index(mode) % 2 :: 2]
    if mode != "skipped":
        return [(length, size, 0) for length, size in chosen]
    if EVERY or world == 1:
        return [(length, size, number % 3) for number, (length, size) in enumerate(chosen)]
    later = [(length + skip * size * world, size, skip) for length, size in chosen for skip in (1, 2)]
    return [case for case in later if case[0] in LENGTHS]


class Numbers(IterableDataset[Any]):
    """0 to length - 1, each rank its own part unless it is told to give all."""

    def __init__(self, length: int, part: tuple[int, int] = (0, 1)) -> None:
        self.length = length
        self.part = part

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor(float(i)) for i in range(self.part[0], self.length, self.part[1]))


def gathered(accelerator: Accelerator, batches: Any) -> list[float]:
    """One pass; what may differ from a plain gather, the last batch, in all the ways there are, which must agree."""
    rows: list[float] = []
    for batch in batches:
        (x,) = batch if isinstance(batch, (list, tuple)) else (batch,)
        out = accelerator.gather_for_metrics({"x": x, "many": (torch.stack([x, x], 1),)})
        assert torch.equal(out["x"], out["many"][0][:, 1])
        if not accelerator.gradient_state.end_of_dataloader:
            rows += out["x"].tolist()
            continue
        tokens = accelerator.gather_for_metrics(x.repeat_interleave(3), per_sample=False)
        assert torch.equal(tokens, out["x"].repeat_interleave(3))
        assert accelerator.gather_for_metrics(x.tolist(), use_gather_object=True) == out["x"].tolist()
        rows += out["x"].tolist()
    return rows


def check(mode: str) -> int:
    """Every case of one way of sharing the data; how many were looked at."""
    split, dispatch = mode == "split", True if mode in ("dispatched", "dispatched stream") else None
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=split, dispatch_batches=dispatch)
    )
    world = accelerator.num_processes
    looked = cases(mode, world)
    for length, size, skip in looked:
        if mode == "dispatched stream":
            loader: Any = DataLoader(Numbers(length), size)
        else:
            loader = DataLoader(TensorDataset(torch.arange(length).float()), size * world if split else size)
        batches = accelerator.prepare(loader)
        expected = [float(i) for i in range(length)]
        if mode == "skipped":
            batches = skip_first_batches(batches, skip)
            expected = expected[skip * size * world :]
        rows = gathered(accelerator, batches)
        assert rows == expected, (mode, length, size, rows)
        accelerator.dataloaders.clear()
    accelerator.free_memory()
    return len(looked)


MODES = ("sharded", "split", "dispatched", "dispatched stream", "skipped")


@pytest.mark.parametrize("mode", MODES)
def test_every_row_once_in_order_on_one_process(mode: str) -> None:
    assert check(mode) == len(LENGTHS) * len(SIZES)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.campaign), 3])
def test_every_row_once_in_order_on_several(world: int) -> None:
    assert run_ranks(check_all, world) == [[len(cases(mode, world)) for mode in MODES]] * world


def check_all() -> list[int]:
    return [check(mode) for mode in MODES]


def own_streams() -> list[list[float]]:
    """Iterable data that each rank shards by itself; ranks may have as many batches only."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    part = (accelerator.process_index, accelerator.num_processes)
    found = []
    for length in (8, 10, 11, 12):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ranks of unlike length: said once, and what this test is about
            batches = accelerator.prepare(DataLoader(Numbers(length, part), 2))
            rows = gathered(accelerator, batches)
        assert len(set(rows)) == len(rows)
        found.append(sorted(rows))
    accelerator.free_memory()
    return found


@pytest.mark.dist
def test_no_row_twice_where_each_rank_reads_its_own_stream() -> None:
    for found in run_ranks(own_streams, 2):
        # The rank that is exhausted first ends the pass for all: rows may be missing, none is there twice.
        assert all(set(rows) <= set(range(length)) for rows, length in zip(found, (8, 10, 11, 12), strict=True))
        assert found[0] == [float(i) for i in range(8)]
        assert found[3] == [float(i) for i in range(12)]


def test_a_streams_last_batch_counts_its_samples_where_a_loss_is_repeated_for_a_whole_batch() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(10), batch_size=4))
    rows = [accelerator.gather_for_metrics({"loss": batch.mean().repeat(4)})["loss"] for batch in loader]
    assert [len(row) for row in rows] == [4, 4, 2]
    assert torch.cat(rows).mean() == 4.5
    accelerator.end_training()
