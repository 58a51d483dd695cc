"""A sweep of 24 runs: three rates, two batch sizes, four seeds. Two crashed, one ended with nan, one runs."""

from __future__ import annotations

import json
import math
import os
import random
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from instep.loggers import JSONLinesLogger

RATES, SIZES, SEEDS = (0.001, 0.01, 0.1), (16, 64), (0, 1, 2, 3)
MEMORY = "rank 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
DISK = "OSError: [Errno 28] No space left on device: 'train.bin'"
FAILS = {(0.1, 64, 2): MEMORY, (0.001, 64, 1): DISK}
NAN, RUNS = (0.1, 16, 3), (0.01, 64, 3)
_FLOOR = {0.001: 0.34, 0.01: 0.21, 0.1: 0.29}  # of the loss, by rate


def make_run(folder: Path, params: dict[str, Any], steps: int = 400, age_s: float = 3600.0, **said: Any) -> Path:
    """Write a run as a job leaves it, with a loss that falls to a floor of its rate."""
    folder.mkdir(parents=True)
    lr, batch, seed = params["lr"], params["batch"], params["seed"]
    draw = random.Random(f"{lr} {batch} {seed}")
    floor = _FLOOR[lr] + 0.0004 * batch + draw.uniform(-0.03, 0.03)
    fast = 4 + 3 * math.log10(lr * 1000) + draw.uniform(-0.8, 0.8)
    content = {"status": "done", "exit_code": 0, "global_step": steps, "epoch": steps // 100, "host": "node-1"}
    content |= {"pid": 4242, "command": ["python", "train.py", "--lr", str(lr), "--batch", str(batch)]}
    (folder / "status.json").write_text(json.dumps({**content, **said}))
    (folder / "hparams.yaml").write_text("".join(f"{key}: {value}\n" for key, value in params.items()))
    (folder / "git.json").write_text(json.dumps({"commit": f"{batch:040x}", "branch": "main", "is_dirty": seed == 1}))
    with open(folder / "metrics.csv", "w") as file:
        file.write("step,train_loss,val_loss\n")
        for step in range(5, steps + 1, 5):
            loss = floor + (2.3 - floor) * math.exp(-step * fast / 400)
            nan = said.get("nan_from", steps + 1) <= step
            validated = "" if step % 20 else f"{'nan' if nan else f'{loss + 0.03 + draw.gauss(0, 0.004):.5f}'}"
            file.write(f"{step},{'nan' if nan else f'{loss + draw.gauss(0, 0.03):.5f}'},{validated}\n")
    age(folder, age_s)
    return folder


def age(folder: Path, age_s: float) -> None:
    """Set back the times of a run's files."""
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - age_s, time.time() - age_s))


def make_sweep(root: Path) -> Path:
    """Write the runs; the one that runs is this process."""
    for number, (lr, batch, seed) in enumerate(product(RATES, SIZES, SEEDS)):
        said: dict[str, Any] = {}
        steps, age_s = 400, 90_000 - number * 3000.0
        if (lr, batch, seed) in FAILS:
            steps, said = 140, {"status": "failed", "exit_code": 1, "error": FAILS[lr, batch, seed]}
        if (lr, batch, seed) == NAN:
            said = {"nan_from": 240}
        if (lr, batch, seed) == RUNS:
            steps, age_s = 260, 2.0
            said = {"status": "running", "exit_code": None, "pid": os.getpid(), "host": os.uname().nodename}
        params = {"lr": lr, "batch": batch, "seed": seed, "width": 256, "optimizer": "adamw"}
        make_run(root / f"version_{number}", params, steps, age_s, **said)
    return root


def log_media(folder: Path) -> None:
    """Log a picture and a table into a run, by a logger of ours."""
    logger = JSONLinesLogger(folder.parent, version=folder.name)
    y, x = np.mgrid[0:48, 0:64] / 48
    logger.log_image("samples", [np.stack([x % 1, y, 1 - y], -1), np.stack([y, x % 1, y], -1)], step=400)
    logger.log_table("confusion", columns=["digit", "right", "wrong"], data=[["3", 97, 3], ["8", 91, 9]], step=400)
    logger.finalize()
