"""1,000 steps of Muon under every way to divide a matrix, beside what rounding alone does to one process.

    python benchmarks/studies/muon_thousand.py                    # writes benchmarks/results/muon_thousand.json
    python benchmarks/studies/muon_thousand.py --steps 20 --to -  # a rehearsal, which is printed

The model is the tests' small transformer with `WholeMatrix(torch.optim.Muon(...))` for the matrices of its blocks. Each
run's losses are compared with those of one process, step by step. "noise" is one process whose window of 16 samples is
summed in another order: four micro-batches in place of two, or samples in reverse.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch

from tests.helpers.spawn import run_ranks
from tests.strategies.parity_table import CASES
from tests.strategies.tiny_gpt import MuonGPT, train

RESULT = ROOT / "benchmarks" / "results" / "muon_thousand.json"
NAMES = ("DDP x2", "FSDP x2", "TP x2", "HSDP 2x2")
PRECISIONS = ("32-true", "bf16-mixed")
MARKS = (1, 10, 100, 300, 1000)  # steps up to which differences are shown


class Reversed(MuonGPT):
    """The same, whose sums over a micro-batch begin with the last sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([part.flip(0) for part in batch], batch_idx)


def losses(name: str, precision: str, steps: int, batch_size: int | None = None, module: Any = MuonGPT) -> list[float]:
    """Losses of a run, by optimizer step; called in each of its ranks."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    settings = CASES[name].settings() | {"gradient_clip_val": None, "precision": precision, "max_epochs": -1}
    if batch_size is not None:
        settings["batch_size"] = batch_size
    return train(steps=steps, module=module(), **settings).losses


def difference(found: Sequence[float], alone: Sequence[float]) -> dict[str, float]:
    """Largest difference up to each mark, and that of the means of the last tenth."""
    apart = [abs(a - b) for a, b in zip(found, alone, strict=True)]
    last = max(1, len(apart) // 10)
    marks = {str(mark): max(apart[:mark]) for mark in MARKS if mark <= len(apart)}
    return marks | {"mean of the last tenth": abs(sum(found[-last:]) - sum(alone[-last:])) / last}


def study(steps: int, write: Callable[[dict[str, Any]], None]) -> None:
    """Run everything; what is found so far is written after each run."""
    about = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    result: dict[str, Any] = {"steps": steps, "machine": about, "precisions": {}}
    for precision in PRECISIONS:
        [alone] = run_ranks(losses, 1, "single process", precision, steps)
        rows: dict[str, Any] = {}
        result["precisions"][precision] = {"first": alone[0], "last": sum(alone[-10:]) / 10, "differences": rows}
        runs = {
            "noise: four micro-batches": (1, "single process", precision, steps, 4),
            "noise: reversed samples": (1, "single process", precision, steps, None, Reversed),
            **{name: (CASES[name].ranks, name, precision, steps) for name in NAMES},
        }
        for name, (ranks, *arguments) in runs.items():
            print(f"{precision}: {name}", file=sys.stderr, flush=True)
            found = run_ranks(losses, ranks, *arguments, timeout_s=1800)[0]
            rows[name] = difference(found, alone)
            write(result)


def main() -> None:
    """Run the study, and write or print what it finds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--to", default=str(RESULT), help="the file that is written; - to print it")
    options = parser.parse_args()

    def write(result: dict[str, Any]) -> None:
        text = json.dumps(result, indent=2)
        if options.to == "-":
            print(text, flush=True)
        else:
            Path(options.to).write_text(f"{text}\n", encoding="utf-8")

    study(options.steps, write)


if __name__ == "__main__":
    main()
