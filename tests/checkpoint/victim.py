"""The training that is killed: two ranks, a save after every step, old ones deleted, validation within epochs.

`train` is what the job runs, first and again after each kill: one command. It writes its state of affairs into a
`Board`, which outlives a SIGKILL, and at its end a digest of everything the run came to.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import signal
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from instep import Trainer, TrainModule, seed_everything
from instep.callbacks import Callback, ModelCheckpoint
from instep.checkpoint import CheckpointStore
from instep.checkpoint.manifest import read_manifest
from instep.loggers import CSVLogger
from tests.trainer.resuming import Augmented, Plain

PHASES = ("start-up", "training", "validation", "exit")
SAMPLES = 42  # 11 batches of 2 ranks with 2 samples each, the last with 1 each: 6 optimizer steps an epoch


@dataclass(frozen=True)
class Way:
    """One way to train."""

    workers: int = 0
    background: bool = False
    epochs: int = 2
    accumulate: int = 2
    batch_size: int = 2
    ranks: int = 2
    strategy: str = "auto"
    policy: str = ""  # of POLICIES: what is kept is ranked by a metric, and the newest state is the run's own
    savers: str = "one"  # or "one folder", "two folders": of two ModelCheckpoints

    @property
    def most(self) -> int:
        """Checkpoints that the policies keep at most."""
        return POLICIES[self.policy].get("save_top_k", 1) * (1 if self.savers == "one" else 2)


POLICIES: dict[str, dict[str, Any]] = {
    "best": {},
    "two best": {"save_top_k": 2},
    "weights": {"save_weights_only": True},
    "steps": {"every_n_train_steps": 3},
}


class Board:
    """What a run is doing, in a file that is mapped into memory.

    Args:
        path: the file; made where it is missing.
    """

    # Phase, saves and deletes under way; the last step that a save returned for, the last that must be on the disk, and
    # the most checkpoints that were seen beyond what the policies keep, right after a save and between two steps.
    _FORMAT = "=bbbiiii"

    def __init__(self, path: Path) -> None:
        size = struct.calcsize(self._FORMAT)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.ftruncate(fd, size)
        self._lock = threading.RLock()
        self._map = mmap.mmap(fd, size)
        os.close(fd)

    def read(self) -> tuple[int, ...]:
        return struct.unpack(self._FORMAT, self._map[:])

    def clear(self) -> None:
        """A new start: nothing is under way. What was saved stays saved."""
        self._write(0, 0, 0, *self.read()[3:])

    def enter(self, phase: str) -> None:
        with self._lock:
            self._write(PHASES.index(phase), *self.read()[1:])

    def saved(self, step: int) -> None:
        with self._lock:
            self._write(*self.read()[:3], step, *self.read()[4:])

    def note(self, step: int, most: int, rest: int) -> None:
        """Note a step that must be on the disk from here on, and numbers of checkpoints."""
        with self._lock:
            *before, must, most_before, rest_before = self.read()
            self._write(*before, max(must, step), max(most, most_before), max(rest, rest_before))

    @contextmanager
    def doing(self, what: int) -> Iterator[None]:
        """Count a save (1) or a delete (2) that is under way."""
        self._add(what, 1)
        try:
            yield
        finally:
            self._add(what, -1)

    def _add(self, what: int, change: int) -> None:
        with self._lock:  # a save in the background runs beside a delete
            state = list(self.read())
            state[what] += change
            self._write(*state)

    @property
    def where(self) -> str:
        """Save and delete go before what happens meanwhile."""
        phase, saves, deletes = self.read()[:3]
        return "delete" if deletes else "save" if saves else PHASES[phase]

    def _write(self, *state: int) -> None:
        struct.pack_into(self._FORMAT, self._map, 0, *state)


class Tells(Callback):
    """Writes the phase of the run onto the board."""

    def __init__(self, board: Board) -> None:
        self.board = board

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.board.enter("training")

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.board.enter("validation")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.board.enter("training")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.board.enter("exit")


class Seen(Callback):
    """The samples of every batch of all ranks, by epoch: part of the checkpoint, so the final list is what counted."""

    def __init__(self) -> None:
        self.batches: dict[int, list[list[int]]] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        count = trainer._run.source.share.mine
        mine = torch.full((8,), -1)
        mine[:count] = batch[2][:count]
        taken = module.all_gather(mine).flatten()
        self.batches.setdefault(trainer.current_epoch, []).append(taken[taken >= 0].tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]

    def counts(self) -> dict[int, Counter[int]]:
        return {epoch: Counter(i for batch in batches for i in batch) for epoch, batches in self.batches.items()}


class Counts(Callback):
    """Notes on the board what must be on the disk after each occasion to save, and how many checkpoints there are."""

    def __init__(self, board: Board, root: Path, way: Way) -> None:
        self._board, self._root, self._way = board, root, way
        self._occasions = [0, 0]
        self.saved = False

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self._way.policy != "steps":
            self._occasions.append(trainer.global_step)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if self._way.policy == "steps" and step % 3 == 0 and step != self._occasions[-1]:
            self._occasions.append(step)
        # What is saved in the background is waited for at the next occasion.
        must = self._occasions[-2 if self._way.background else -1]
        self._board.note(must, 0, self.beyond() if self.saved and not self._way.background else 0)

    def beyond(self) -> int:
        found = [path for folder in folders_of(self._root) for path in folder.glob("[!.]*/manifest.json")]
        return len(found) - self._way.most


def folders_of(root: Path) -> list[Path]:
    """List the folders in which a victim may save."""
    return [
        folder
        for place in ("instep_runs/*/checkpoints", "logs/exp/*/checkpoints", "kept*")
        for folder in root.glob(place)
    ]


def savers_of(root: Path, way: Way) -> list[ModelCheckpoint]:
    """Make the ModelCheckpoints of a way."""
    if not way.policy:
        return [
            ModelCheckpoint(every_n_train_steps=1, **_background(way)),
            ModelCheckpoint(monitor="val_loss", save_top_k=2, **_background(way)),
        ]
    what = {"monitor": "swing", "save_on_train_epoch_end": False, **POLICIES[way.policy], **_background(way)}
    if way.savers == "one":
        return [ModelCheckpoint(root / "kept", **what)]
    return [
        ModelCheckpoint(root / "kept", filename="least", **what),
        ModelCheckpoint(
            root / ("kept" if way.savers == "one folder" else "kept2"), filename="most", mode="max", **what
        ),
    ]


class Victim(TrainModule):
    """Dropout, augmentation by three random generators, AdamW and a scheduler: all of it must come back."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        self.log("swing", float(self.global_step * 7 % 5))  # the best is long ago, most of the time

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"},
        }


class Dies(Callback):
    """SIGKILL to this rank once a step is done."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and trainer.position.batch == trainer.position.window_batch:
            os.kill(os.getpid(), signal.SIGKILL)


def train(root: Path, way: Way, kill_after: int | None = None) -> dict[str, Any]:
    """The command: train, or go on, and leave `result-<rank>.json` in the folder."""
    seed_everything(3)
    board = Board(root / f"board-{os.environ.get('RANK', '0')}")
    seen = Seen()
    savers = savers_of(root, way)
    best = savers[0] if way.policy else savers[1]
    counts = [Counts(board, root, way)] if way.policy else []
    trainer = Trainer(
        accelerator="cpu",
        devices="auto",
        strategy=way.strategy,
        logger=CSVLogger(root / "logs", "exp") if way.background else False,  # each layout of run folders in its turn
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        max_epochs=way.epochs,
        accumulate_grad_batches=way.accumulate,
        val_check_interval=4,
        num_sanity_val_steps=0,
        trigger_every=1,
        callbacks=[
            *([] if kill_after is None else [Dies(kill_after)]),
            *(seen, Tells(board), *counts, *savers),
        ],
    )
    module = Victim()
    options: dict[str, Any] = {"num_workers": way.workers}
    if way.workers:
        options["multiprocessing_context"] = "fork"
    loader = DataLoader(Augmented(SAMPLES), batch_size=way.batch_size, shuffle=True, **options)
    with watched(board, *counts):
        trainer.fit(module, loader, DataLoader(Plain(7), batch_size=3), ckpt_path="auto")
    result = {
        "weights": digest(module.state_dict()),
        "optimizer": digest(trainer.optimizers[0].state_dict()),
        "scheduler": digest(trainer.lr_scheduler_configs[0].scheduler.state_dict()),
        "position": trainer.position.state_dict(),
        "metrics": {name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
        "best": sorted(map(float, best.best_k_models.values())),
        "best are there": all(Path(path).is_dir() for path in best.best_k_models),
        "batches": {str(epoch): batches for epoch, batches in seen.batches.items()},
        "exactly once": all(count == Counter(range(SAMPLES)) for count in seen.counts().values()),
    }
    temporary = root / f".result-{trainer.global_rank}.json"
    temporary.write_text(json.dumps(result))
    temporary.rename(root / f"result-{trainer.global_rank}.json")
    return result


@contextmanager
def watched(board: Board, counts: Counts | None = None) -> Iterator[None]:
    """Note every save and delete on the board."""
    save, delete = CheckpointStore.save, CheckpointStore.delete

    def saving(store: CheckpointStore, step: int, *args: Any, **kwargs: Any) -> Path:
        with board.doing(1):
            path = save(store, step, *args, **kwargs)
        if counts is None or read_manifest(path).info["kind"] == "full":
            board.saved(step)
        if counts is not None:
            counts.saved = True
            board.note(0, counts.beyond(), 0)
        return path

    def deleting(store: CheckpointStore, path: Any) -> None:
        with board.doing(2):
            delete(store, path)

    with mock.patch.object(CheckpointStore, "save", saving), mock.patch.object(CheckpointStore, "delete", deleting):
        yield


def digest(tree: Any) -> str:
    """Of every bit of a state dict that this rank holds."""
    parts = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                parts.update(repr(key).encode())
                add(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                add(inner)
        elif isinstance(value, Tensor):
            value = value.detach()
            parts.update(value.to_local().numpy().tobytes() if isinstance(value, DTensor) else value.numpy().tobytes())
        else:
            parts.update(repr(value).encode())

    add(tree)
    return parts.hexdigest()


def _background(way: Way) -> dict[str, Any]:
    return {"background": True} if way.background else {}
