"""The program with which every way of launching is tested: it trains the digits and writes down what came of it.

    python tests/launch/digits_job.py OUT.json                  # one process, or as many as a launcher started
    python tests/launch/digits_job.py OUT.json --devices 2      # starts itself
    python tests/launch/digits_job.py OUT.json --root RUNS      # saves every 4 steps, goes on from what is there

Rank 0 writes the file, in one piece: the world size, the number of nodes, the launcher, the steps and a digest of the
weights, which is the same to the last bit for all jobs of one world size. `ways.same_weights` checks that.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from instep import Trainer, seed_everything
from instep.callbacks import Callback, ModelCheckpoint
from instep.state import read_environment

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from digits import GLOBAL_BATCH, Digits, DigitsData

STEPS = 24  # 1.3 epochs
SAVE_EVERY_STEPS = 4


def train(
    out: str | os.PathLike[str],
    devices: int | str = "auto",
    root: str | os.PathLike[str] | None = None,
    steps: int = STEPS,
    callbacks: tuple[Callback, ...] = (),
) -> dict[str, Any]:
    """Train as this process's launcher says, and return what rank 0 writes to `out`."""
    torch.set_num_threads(1)
    seed_everything(0)
    place = read_environment()
    saving = [] if root is None else [ModelCheckpoint(every_n_train_steps=SAVE_EVERY_STEPS, save_last=True)]
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=place.num_nodes,
        max_steps=steps,
        global_batch_size=GLOBAL_BATCH,
        default_root_dir=Path(out).parent if root is None else root,
        callbacks=[*saving, *callbacks],
        enable_checkpointing=root is not None,
        logger=False,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Digits(dropout=0.0)
    trainer.fit(module, datamodule=DigitsData(), ckpt_path="auto" if root is not None else None)
    result = {
        "world_size": trainer.world_size,
        "num_nodes": place.num_nodes,
        "launcher": place.launcher,
        "step": trainer.global_step,
        "weights": digest(module),
    }
    if trainer.is_global_zero:
        unfinished = Path(f"{os.fspath(out)}.unfinished")
        unfinished.write_text(json.dumps(result))
        unfinished.replace(out)
    return result


def digest(module: nn.Module) -> str:
    """A checksum of all weights with their names."""
    parts = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        parts.update(name.encode())
        parts.update(tensor.cpu().numpy().tobytes())
    return parts.hexdigest()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    train(args.out, args.devices, args.root, args.steps)


if __name__ == "__main__":
    main()
