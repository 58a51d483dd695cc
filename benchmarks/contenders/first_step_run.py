"""The program that `first_step.py` starts: trains a small MLP and notes when its first step was done.

    first_step_run.py FRAMEWORK FOLDER      # also starts itself, with instep and Lightning, where no launcher did

Each rank writes `rank-<i>.json`: seconds on the machine's monotonic clock, the same for all processes.
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from workload import FEATURES, loss_of, make_net, make_optimizer, regression

STEPS = 3


class Marks:
    """The times of one rank."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.times = {"began": BEGAN, "imported": 0.0, "stepped": 0.0}

    def imported(self) -> None:
        """The framework is loaded."""
        self.times["imported"] = time.monotonic()

    def stepped(self) -> None:
        """An optimizer step is done; the first one counts."""
        if not self.times["stepped"]:
            self.times["stepped"] = time.monotonic()

    def write(self) -> None:
        """Into a file of this rank's own."""
        rank, world = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")), dist.get_world_size()
        (self.folder / f"rank-{rank}.json").write_text(json.dumps({**self.times, "world_size": world}))


def data() -> TensorDataset:
    """A few batches."""
    x = torch.randn(STEPS * 16, FEATURES, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def handwritten(marks: Marks) -> None:
    """DDP by hand."""
    from torch.nn.parallel import DistributedDataParallel  # late, as below: each run pays for its own framework only
    from torch.utils.data.distributed import DistributedSampler

    marks.imported()
    dist.init_process_group("gloo")
    net = DistributedDataParallel(make_net())
    optimizer = make_optimizer(net)
    for batch in DataLoader(data(), 8, sampler=DistributedSampler(data())):
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
        marks.stepped()
    marks.write()
    dist.destroy_process_group()


def instep(marks: Marks) -> None:
    """The Trainer."""
    from instep import Trainer, TrainModule

    marks.imported()
    fit(marks, Trainer, TrainModule)


def accelerate(marks: Marks) -> None:
    """Hugging Face Accelerate's loop."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]  # of the bench extra

    marks.imported()
    accelerator = Accelerator(cpu=True)
    net = make_net()
    net, optimizer, loader = accelerator.prepare(net, make_optimizer(net), DataLoader(data(), 8))
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_of(net, batch))
        optimizer.step()
        marks.stepped()
    marks.write()
    accelerator.end_training()


def lightning(marks: Marks) -> None:
    """Lightning's Trainer."""
    from lightning.pytorch import LightningModule, Trainer  # pyright: ignore[reportMissingImports]  # as above

    marks.imported()
    fit(marks, Trainer, LightningModule, strategy="ddp")


def fit(marks: Marks, trainer: Any, base: Any, **settings: Any) -> None:
    """Train with a Trainer and a module of its framework: nothing but the training."""

    class Marked(regression(base)):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            marks.stepped()

        def on_train_end(self) -> None:
            marks.write()

    trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        default_root_dir=marks.folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    ).fit(Marked(), DataLoader(data(), 8))


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](Marks(sys.argv[2]))
