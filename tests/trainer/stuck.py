"""A training that gets stuck where a signal handler written in Python cannot run; run by test_deadline.py."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from instep import Callback
from instep.callbacks import ModelCheckpoint
from tests.trainer.toys import Toy, loader, quiet


class Stuck(Callback):
    """At the end of the third step: tell the parent, then wait in C, or in Python, or in a commit."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step != 3:
            return
        if self.where == "waits for the other rank" and trainer.global_rank == 0:
            return
        print("stuck", flush=True)
        if self.where == "C":
            lock = ctypes.create_string_buffer(64)
            for _ in range(2):  # a lock that is taken twice: no signal ends the wait
                ctypes.CDLL(None).pthread_mutex_lock(lock)
        else:
            threading.Event().wait()


def main() -> None:
    root, where, grace_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    # Nothing but the wake-up descriptor tells that a signal came.
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    trainer = quiet(
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(every_n_train_steps=1), *([] if where == "nowhere" else [Stuck(where)])],
        default_root_dir=root,
        grace_period_s=grace_s,
        devices=2 if where == "waits for the other rank" else "auto",
    )
    module = Toy()
    trainer.fit(module, loader(), ckpt_path="auto")
    name = f"weights-{os.environ.get('RANK', '0')}"
    torch.save({key: value.clone() for key, value in module.state_dict().items()}, root / name)


if __name__ == "__main__":
    main()
