"""A training script that does something to itself at a given step; run by test_launch.py as a real program."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from instep import Trainer, seed_everything
from instep.callbacks import Callback
from instep.loggers import CSVLogger
from tests.trainer.resuming import Augmented, Net, Plain


class Event(Callback):
    """At the end of a step, on one rank: raise, or send a signal to this process or to its group."""

    def __init__(self, what: str, step: int, rank: int) -> None:
        self.what = what
        self.step = step
        self.rank = rank

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self.step or trainer.global_rank != self.rank:
            return
        if self.what == "raise":
            (Path(trainer.default_root_dir) / "raised").touch()
            raise ValueError("boom on purpose")
        if self.what.startswith("group-"):
            os.killpg(os.getpgrp(), signal.Signals[self.what.removeprefix("group-")])
        else:
            os.kill(os.getpid(), signal.Signals[self.what])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path)
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--do", default="")
    parser.add_argument("--step", type=int, default=4)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--early", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(3)
    with open(args.root / "started", "a") as file:
        file.write(f"{os.environ.get('RANK')}\n")
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices if args.devices == "auto" else int(args.devices),
        max_epochs=3,
        logger=CSVLogger(),
        default_root_dir=args.root,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        trigger_every=1,
        callbacks=[Event(args.do, args.step, args.rank)] if args.do else [],
    )
    if args.early and trainer.logger is not None:
        trainer.logger.log_metrics({"early": 1.0}, step=0)
        trainer.logger.save()
    module = Net()
    train = DataLoader(Augmented(22), batch_size=4, shuffle=True, num_workers=args.workers)
    trainer.fit(module, train, DataLoader(Plain(7), batch_size=3), ckpt_path="auto")
    module.test_step = lambda batch, batch_idx: module.log("count", float(len(batch[0])), reduce_fx="sum")  # type: ignore[method-assign]
    tested = trainer.test(module, DataLoader(Plain(7), batch_size=3), verbose=False)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()
    result = {"weights": digest, "tested": tested, "step": trainer.global_step, "world_size": trainer.world_size}
    (args.root / f"result-{trainer.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
