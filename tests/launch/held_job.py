"""The digits' program, which in its first life waits at a step until it is asked to stop.

    python tests/launch/held_job.py OUT.json RUNS HELD     # HELD: a folder; each rank leaves a file there when it waits

`SLOW_S` in the environment: so many seconds rank 0 takes to end once it has saved.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from instep import Trainer
from instep.callbacks import Callback

sys.path.append(str(Path(__file__).parent))
from digits_job import train

STEP = 10
WAITS_S = 900.0  # who starts it ends it


class Held(Callback):
    """Waits at the step until a signal has come; in a later life of the job, which finds the files, it does not."""

    def __init__(self, folder: Path) -> None:
        self.first = not folder.exists() or not list(folder.iterdir())
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if not self.first or trainer.global_step != STEP:
            return
        (self.folder / f"{trainer.global_rank}-{os.getpid()}").touch()
        deadline = time.monotonic() + WAITS_S
        while not trainer._ctx.triggers.pending:  # type: ignore[union-attr]
            assert time.monotonic() < deadline, "no signal came"
            time.sleep(0.02)  # a handler sets it, and a signal's other event, the wake-up fd, is the Trainer's

    def teardown(self, trainer: Trainer, *args: Any) -> None:
        if trainer.is_global_zero and "SLOW_S" in os.environ:
            time.sleep(float(os.environ["SLOW_S"]))  # what is tested: that the others wait for it
            print(f"rank 0 ended in step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    out, runs, held = map(Path, sys.argv[1:])
    train(out, root=runs, callbacks=(Held(held),))
