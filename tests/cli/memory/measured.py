"""The peak of resident memory of a training, above what the process had before.

python -m tests.cli.memory.measured STRATEGY:PRECISION ...    # in each of torchrun's ranks, or alone
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import warnings
from pathlib import Path

import torch

from instep import Trainer
from tests.cli.memory.models import Net, data


def measure(strategy: str, precision: str, devices: int = 1, width: int = 768) -> int:
    """Train a few steps and give the peak in bytes, of this rank."""
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD: what is freed goes back to the system at once
        libc.mallopt(option, 65536)
    warnings.simplefilter("ignore")
    _fit(strategy, precision, devices, width=32)  # what is loaded and made once
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    _fit(strategy, precision, devices, width)
    return _status("VmHWM") - before


def _fit(strategy: str, precision: str, devices: int, width: int) -> None:
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, precision=precision, max_steps=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(width), data(width, 3 * devices))


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def measure_all(cases: list[tuple[str, str]], devices: int, width: int = 768) -> list[int]:
    """One after the other in this process."""
    return [measure(strategy, precision, devices, width) for strategy, precision in cases]


if __name__ == "__main__":
    pairs = [(case.partition(":")[0], case.partition(":")[2]) for case in sys.argv[2:]]
    peaks = measure_all(pairs, int(os.environ.get("WORLD_SIZE", "1")), int(sys.argv[1]))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(peaks))
