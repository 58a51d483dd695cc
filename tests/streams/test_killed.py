"""Streams in real runs that are killed and go on with other ranks, workers and batch sizes.

Two schedules are run by default, `-m campaign` runs three more, and with INSTEP_STREAMS_EVERY=1 ten more.
"""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from instep import TrainModule, seed_everything
from instep.callbacks import Callback, ModelCheckpoint
from instep.data import StreamDataset, StreamMixture
from tests.helpers.spawn import RanksFailed, run_ranks
from tests.streams.files import number, write_shards
from tests.trainer.toys import quiet

MORE = range(2, 12 if os.environ.get("INSTEP_STREAMS_EVERY") == "1" else 5)
COUNTS, EPOCHS, SIZE = (130, 70, 300, 10), 3, 700
WIDEST = 40  # samples of a batch


@dataclass(frozen=True)
class Leg:
    """One start of the run.

    Args:
        ranks: processes.
        workers: of each one's loader.
        batch_size: of each rank.
        save_every: optimizer steps between saves.
        kill: the rank that is killed, and after how many steps of this start; None: it runs to its end.
        later: weights of the phase that begins after the first epoch, where it is a mixture.
    """

    ranks: int = 1
    workers: int = 0
    batch_size: int = 20
    save_every: int = 1000
    kill: tuple[int, int] | None = None
    later: tuple[int, int] = (1, 2)


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.weight * batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-6)


class Visits(Callback):
    """Samples of all ranks in the order of the run, by epoch: a part of the checkpoint, so what counted is there."""

    def __init__(self, kill: tuple[int, int] | None) -> None:
        self.epochs: dict[int, list[int]] = {}
        self._kill, self._steps = kill, 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        mine = torch.full((WIDEST,), -1)
        count = trainer._run.source.share.mine
        mine[:count] = batch[:count]
        taken = module.all_gather(mine).flatten()
        self.epochs.setdefault(trainer.current_epoch, []).extend(taken[taken >= 0].tolist())
        self._steps += 1
        if self._kill == (trainer.global_rank, self._steps):
            os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = {int(epoch): list(samples) for epoch, samples in state_dict["epochs"].items()}


def books(record: Any) -> int:
    return 10_000 + record["n"]


def train(root: str, data: str, suffix: str, leg: Leg) -> dict[int, list[int]]:
    folder = Path(data)
    stream: Any = StreamDataset(folder / f"*.{suffix}", number, window=90, cache=folder / "cache", keep_bytes=5000)
    if (folder / "books").exists():
        other = StreamDataset(folder / "books/*.jsonl", books, window=50, cache=folder / "cache")
        stream = StreamMixture([stream, other], {0: [3, 1], 1024: leg.later}, size=SIZE)
    seed_everything(5)
    visits = Visits(leg.kill)
    trainer = quiet(
        max_epochs=EPOCHS,
        default_root_dir=root,
        enable_checkpointing=True,
        callbacks=[visits, ModelCheckpoint(every_n_train_steps=leg.save_every, save_top_k=1)],
        devices="auto",
    )
    loader: DataLoader[Any] = DataLoader(stream, leg.batch_size, shuffle=True, num_workers=leg.workers)
    trainer.fit(Net(), loader, ckpt_path="auto")
    return visits.epochs


def draw(dice: random.Random, number: int) -> Leg:
    ranks, batch_size = dice.randint(1, 4), dice.randint(7, WIDEST)
    steps = dice.randint(2, 600 // (ranks * batch_size))  # the first start ends within the first epoch
    later = (1, 2) if number else (9, 1)
    return Leg(ranks, dice.randint(0, 3), batch_size, dice.randint(1, 3), (dice.randrange(ranks), steps), later)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in MORE)])
def test_a_run_that_is_killed_and_resized_visits_what_one_process_does(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    suffix, mixture = dice.choice(("jsonl", "parquet", "tar", "arrow", "txt")), seed % 2 == 1
    data = tmp_path / "data"
    (data / "books").mkdir(parents=True) if mixture else data.mkdir()
    write_shards(data, suffix, COUNTS)
    if mixture:
        write_shards(data / "books", "jsonl", [60, 45])
    (whole,) = run_ranks(train, 1, str(tmp_path / "whole"), str(data), suffix, Leg())
    legs = [draw(dice, number) for number in range(dice.randint(2, 4))]
    for leg in legs:
        with pytest.raises(RanksFailed, match="exit code -9"):
            run_ranks(train, leg.ranks, str(tmp_path / "killed"), str(data), suffix, leg)
    last = Leg(dice.randint(1, 4), dice.randint(0, 3), dice.randint(7, WIDEST))
    found = run_ranks(train, last.ranks, str(tmp_path / "killed"), str(data), suffix, last)
    assert found == [whole] * last.ranks, (legs, last)
    if not mixture:
        assert [sorted(epoch) for epoch in whole.values()] == [[*range(sum(COUNTS))]] * EPOCHS
    else:
        assert len({sample for epoch in whole.values() for sample in epoch if sample >= 10_000}) == 105
