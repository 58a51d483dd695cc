"""Every sample of every epoch exactly once, whatever was killed and resumed, at any world size, batch size and workers.

Ranks are simulated in one process: the sampler and the loader alone decide.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from instep.data import prepare_loader
from tests.checkpoint.victim import SAMPLES, Way, train
from tests.data.test_exact import Numbers
from tests.helpers.spawn import RanksFailed, run_ranks

EPOCHS = 2


@dataclass(frozen=True)
class Part:
    """One start of the run; the last one is not killed.

    Args:
        world: ranks.
        batch_size: of each rank.
        accumulate: batches of an accumulation window.
        workers: of the loader.
        steps: optimizer steps until it is killed.
        save_every: optimizer steps between saves.
    """

    world: int
    batch_size: int
    accumulate: int
    workers: int
    steps: int
    save_every: int


@dataclass
class Saved:
    """What the last save knew."""

    epoch: int
    data: dict[str, Any] | None
    seen: dict[int, list[int]]


def run(part: Part, saved: Saved, length: int, shuffle: bool, killed: bool) -> Saved:
    """Go on from a save, as all ranks do; what the last save knows when the run is killed or done."""
    seen = {epoch: list(samples) for epoch, samples in saved.seen.items()}
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if part.workers else {}
    loader: DataLoader[Any] = DataLoader(
        Numbers(length), part.batch_size, shuffle=shuffle, num_workers=part.workers, collate_fn=torch.tensor, **options
    )
    ranks = [prepare_loader(loader, rank=rank, world_size=part.world, seed=7) for rank in range(part.world)]
    steps, data = 0, saved.data
    for epoch in range(saved.epoch, EPOCHS):
        for source in ranks:
            source.set_epoch(epoch)
            if data is not None:
                source.load_state_dict(data)
        data = None
        for number, batches in enumerate(zip(*ranks, strict=True), ranks[0].first_batch):
            for source, batch in zip(ranks, batches, strict=True):
                count = source.share.mine
                assert count is not None
                seen.setdefault(epoch, []).extend(batch.tolist()[:count])
            if (number + 1) % part.accumulate and not ranks[0].share.last:
                continue
            steps += 1
            if steps % part.save_every == 0:
                states = [source.state_dict(number + 1) for source in ranks]
                assert all(state == states[0] for state in states), "any rank's state is the run's"
                saved = Saved(epoch, states[0], {key: list(value) for key, value in seen.items()})
            if killed and steps == part.steps:
                return saved
    return Saved(EPOCHS, None, seen)


def check(length: int, shuffle: bool, parts: list[Part]) -> None:
    saved = Saved(0, None, {})
    for part in parts[:-1]:
        saved = run(part, saved, length, shuffle, killed=True)
    seen = run(parts[-1], saved, length, shuffle, killed=False).seen
    assert list(seen) == [*range(EPOCHS)]
    for samples in seen.values():
        assert Counter(samples) == Counter(range(length))


def parts(workers: st.SearchStrategy[int]) -> st.SearchStrategy[list[Part]]:
    part = st.builds(
        Part,
        world=st.integers(1, 5),
        batch_size=st.integers(1, 7),
        accumulate=st.integers(1, 4),
        workers=workers,
        steps=st.integers(1, 12),
        save_every=st.integers(1, 3),
    )
    return st.lists(part, min_size=1, max_size=5)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(length=st.integers(1, 60), shuffle=st.booleans(), parts=parts(st.just(0)))
def test_each_sample_of_each_epoch_once(length: int, shuffle: bool, parts: list[Part]) -> None:
    check(length, shuffle, parts)


@pytest.mark.slow
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(length=st.integers(5, 30), shuffle=st.booleans(), parts=parts(st.integers(0, 2)))
def test_each_sample_of_each_epoch_once_with_loader_workers(length: int, shuffle: bool, parts: list[Part]) -> None:
    check(length, shuffle, parts[:2])


# ---- real processes


def train_and_die(root: str, way: Way, step: int | None) -> dict[str, Any]:
    """The same with a Trainer: killed after a step, or what it has seen in the end."""
    return train(Path(root), way, kill_after=step)


# Ranks, batch size, accumulation and workers of each start, and the step after which it is killed.
REAL = {
    "fewer ranks": [(Way(ranks=2), 4), (Way(ranks=1), None)],
    "more ranks": [(Way(ranks=1, batch_size=4), 3), (Way(ranks=2), None)],
    "other windows": [(Way(ranks=2, accumulate=3), 2), (Way(ranks=2, accumulate=1, batch_size=3), None)],
    "other workers": [(Way(ranks=1, workers=2), 7), (Way(ranks=1, workers=0, batch_size=5), None)],
    "twice": [(Way(ranks=2, accumulate=1), 3), (Way(ranks=1, batch_size=3), 8), (Way(ranks=2, background=True), None)],
}
FURTHER = ("fewer ranks", "more ranks", "other windows", "other workers")  # cases of `make test-all`


@pytest.mark.timeout(3600)
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.campaign) if n in FURTHER else n for n in REAL])
@pytest.mark.filterwarnings("ignore:.*was saved in the middle of an epoch")
def test_each_sample_once_in_real_runs_that_are_killed(name: str, tmp_path: Path) -> None:
    for way, step in REAL[name]:
        if step is not None:
            with pytest.raises(RanksFailed, match="exit code -9"):
                run_ranks(train_and_die, way.ranks, str(tmp_path), way, step)
        else:
            result = run_ranks(train_and_die, way.ranks, str(tmp_path), way, step)[0]
    assert sorted(result["batches"]) == ["0", "1"]
    for batches in result["batches"].values():
        assert Counter(index for batch in batches for index in batch) == Counter(range(SAMPLES))
