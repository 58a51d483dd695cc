"""A training script whose data has a corrupt sample; run by test_worker_errors.py as a real program.

It notes when it began, and when each process of it raised, on the machine's monotonic clock.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from instep import Accelerator, Trainer, debug_launcher
from tests.trainer.toys import Toy

CORRUPT = 31


class Note:
    """Notes of all processes of the job.

    Args:
        root: the folder they are in.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, what: str) -> None:
        with open(self.root / what, "a") as file:
            file.write(f"{time.monotonic_ns()} {os.getpid()}\n")


class Samples(Dataset[Any]):
    """Forty samples; where `where` says so, one of them cannot be had.

    Args:
        note: notes when that was.
        where: "dataset", "collate", "init", "stuck" (as "dataset", and the other workers do not come back), or "".
    """

    def __init__(self, note: Note, where: str) -> None:
        self.note, self.where = note, where

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if self.where in ("dataset", "stuck") and index == CORRUPT:
            self.fail()
        if self.where == "stuck" and index > CORRUPT and get_worker_info() is not None:
            time.sleep(3600)
        return torch.full((4,), float(index)), torch.tensor(float(index))

    def collate(self, batch: list[Any]) -> Any:
        if self.where == "collate" and any(y == CORRUPT for _, y in batch):
            self.fail()
        return default_collate(batch)

    def init(self, worker_id: int) -> None:
        info = get_worker_info()
        where = getattr(info and info.dataset, "where", "")
        if where == "init" and worker_id == 1:
            self.fail()

    def fail(self) -> None:
        self.note("raised")
        raise ValueError(f"corrupt on purpose in {self.where}")


def train_with_trainer(args: argparse.Namespace, loader: DataLoader[Any], max_epochs: int = 1) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices,
        max_epochs=max_epochs,
        logger=False,
        default_root_dir=args.root,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Toy(lr=1e-5), loader)


def train_with_accelerator(args: argparse.Namespace, loader: DataLoader[Any]) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer, prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-5), loader)
    for x, y in prepared:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(x).squeeze(-1), y))
        optimizer.step()


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    note = Note(args.root)
    note("began")
    data = Samples(note, args.where)
    loader: DataLoader[Any] = DataLoader(
        data,
        batch_size=4,
        num_workers=args.workers,
        collate_fn=data.collate,
        worker_init_fn=data.init,
        persistent_workers=args.persistent,
    )
    train = train_with_trainer if args.loop == "trainer" else train_with_accelerator
    if args.then == "raise":
        train(args, loader)
        return
    try:
        train(args, loader)
    except ValueError as error:
        caught = error  # kept with its traceback, and so with all that the frames hold
        print(f"caught {type(caught).__name__}", flush=True)
    else:
        raise AssertionError("nothing was raised")
    if args.then == "again":
        data.where = ""
        train(args, loader)
        print("trained again", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path)
    parser.add_argument("--where", default="dataset")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--loop", default="trainer")
    parser.add_argument("--then", choices=["raise", "end", "again"], default="raise")
    parser.add_argument("--devices", default="auto", type=lambda text: text if text == "auto" else int(text))
    parser.add_argument("--forked", type=int, help="run as so many ranks of debug_launcher")
    parser.add_argument("--max-restarts", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    given = parse()
    if given.forked:
        debug_launcher(main, (given,), given.forked, max_restarts=given.max_restarts)
    else:
        main(given)
