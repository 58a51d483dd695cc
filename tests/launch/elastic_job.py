"""An agent whose ranks train a little and are killed at random steps; run as a program, one on each node.

    python -m tests.launch.elastic_job FOLDER '{"nproc": 4, "max_restarts": 10}' [--kills 10] [--steps 40]

`--hold 12=go` makes a rank wait at step 12 for the file `FOLDER/go`; `--digits` trains on images of digits instead.

The ranks are forked from the agent, which has loaded torch by then. They write one line for each step into
`FOLDER/steps-<restart>-<rank>`: the step, the epoch and the samples' numbers. Rank 0 writes `FOLDER/result.json`.
`ckpt_path` is not given: that the training goes on is the agent's and the Trainer's doing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from instep import TrainModule, seed_everything
from instep.callbacks import Callback, ModelCheckpoint
from instep.launch.agent import run_agent
from instep.launch.engine import LaunchSpec
from instep.launch.forked import Forked
from tests.helpers.spawn import HANG_S
from tests.trainer.toys import quiet

SAMPLES, GLOBAL_BATCH = 96, 12


class Net(TrainModule):
    """Has dropout, momentum and a schedule, so that whatever is not restored shows."""

    def __init__(self, log: Path, holds: dict[int, str]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
        self._log, self._holds = log, holds
        self.inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(7))

    def loss(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return (self.net(x) - x.sum(1, keepdim=True)).square().mean()

    def accuracy(self) -> float | None:
        """Of images that it has not seen; None where it has none."""
        return None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, numbers = batch
        with open(self._log, "a") as file:
            file.write(json.dumps([self.trainer.global_step, self.trainer.current_epoch, numbers.tolist()]) + "\n")
        held = self._log.parent / self._holds.get(self.trainer.global_step, ".")
        deadline = time.monotonic() + HANG_S
        while not held.exists():
            assert time.monotonic() < deadline, f"nobody made {held}"
            time.sleep(0.02)  # another process's file: there is nothing to wait on
        return self.loss(x, numbers)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    def train_dataloader(self) -> Any:
        data = torch.utils.data.TensorDataset(self.inputs, torch.arange(SAMPLES))
        return torch.utils.data.DataLoader(data, batch_size=GLOBAL_BATCH // int(os.environ["WORLD_SIZE"]), shuffle=True)


class DigitsNet(Net):
    """The example's classifier of digits, and a few of its images."""

    def __init__(self, log: Path, holds: dict[int, str]) -> None:
        from digits import Digits, DigitsData  # late: loads scikit-learn

        super().__init__(log, holds)
        self.net = Digits(dropout=0.1).net
        data = DigitsData()
        data.setup("fit")
        self.inputs, self._labels = data.train[:SAMPLES]
        self._test = data.test[:]

    def loss(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(x), self._labels[numbers])

    def accuracy(self) -> float | None:
        images, labels = self._test
        return (self.net.eval()(images).argmax(1) == labels).float().mean().item()


class Kill(Callback):
    """SIGKILL to one rank within the next few steps, in each of the first starts."""

    def __init__(self, kills: int, folder: Path) -> None:
        self._kills, self._folder = kills, folder

    def on_train_start(self, trainer: Any, module: Any) -> None:
        restart, world = int(os.environ["INSTEP_RESTART"]), int(os.environ["WORLD_SIZE"])
        rng = random.Random(f"{self._folder}-{restart}")
        victim = rng.randrange(world) if restart < self._kills else None
        self._at = trainer.global_step + rng.randint(1, 6) if victim == int(os.environ["RANK"]) else -1

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, num_nodes: int, steps: int, kills: int, holds: dict[int, str], digits: bool) -> None:
    """What each rank does."""
    seed_everything(3)
    rank, restart = os.environ["RANK"], os.environ["INSTEP_RESTART"]
    net = (DigitsNet if digits else Net)(folder / f"steps-{restart}-{rank}", holds)
    trainer = quiet(
        enable_checkpointing=True,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=num_nodes,
        max_steps=steps,
        global_batch_size=GLOBAL_BATCH,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(every_n_train_steps=3), Kill(kills, folder)],
    )
    trainer.fit(net)
    if trainer.is_global_zero:
        digest = hashlib.sha256()
        for tensor in [*net.state_dict().values(), *_states(trainer.optimizers[0])]:
            digest.update(tensor.numpy().tobytes())
        result = {"digest": digest.hexdigest(), "world": trainer.world_size, "restart": int(restart)}
        result["accuracy"] = net.accuracy()
        (folder / "result.json").write_text(json.dumps({**result, "steps": trainer.global_step}))


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state[name] for state in optimizer.state.values() for name in sorted(state)]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser()
    for name in ("torch._dynamo", "torch.nn.parallel", "instep.checkpoint", "instep.strategies.ddp"):
        importlib.import_module(name)  # once, for all that are forked
    parser.add_argument("folder", type=Path)
    parser.add_argument("spec", type=json.loads)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--hold", action="append", default=[], metavar="STEP=FILE")
    parser.add_argument("--digits", action="store_true")
    args = parser.parse_args()
    if args.digits:
        sys.path.append(str(Path(__file__).parents[2] / "examples"))
        importlib.import_module("digits")
    spec = LaunchSpec(command=("forked",), **args.spec)
    torch.set_num_threads(1)
    holds = {int(step): file for step, _, file in (hold.partition("=") for hold in args.hold)}
    how = (args.folder, spec.num_nodes, args.steps, args.kills, holds, args.digits)
    forked = Forked(train, how)
    return run_agent(spec, forked)


if __name__ == "__main__":
    sys.exit(main())
