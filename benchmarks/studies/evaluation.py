"""What the Trainer adds to a batch of validation and of prediction, over a handwritten loop.

    python benchmarks/studies/evaluation.py            # about a minute
    python benchmarks/studies/evaluation.py --quick    # seconds

1,000 batches of 8 samples, an MLP 32-32-1, one thread, `torch.inference_mode`. The clock sits in the data: it is read
when batch 100 is asked for and when the last one is. The handwritten loop, the Trainer with and without `self.log`, and
the handwritten loop again (the noise) take turns in one process, in a random order in each of 15 rounds. A round gives
the difference to the handwritten loop of that round, in microseconds a batch of this thread's processor time.

The bar: 10 microseconds a batch, without logging.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # of the harness, shared with the programs kept green

import harness
import torch
from torch import Tensor, nn

from instep import Trainer, TrainModule

FIRST = 100
BAR_US = 10.0


class Clocked:
    """Ready batches, with the processor time at which batch `FIRST` and the last one were asked for."""

    def __init__(self, count: int) -> None:
        self.batches = [(torch.randn(8, 32), torch.randn(8, 1)) for _ in range(50)]
        self.count = count
        self.us_per_batch = 0.0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for index in range(self.count):
            if index == FIRST:
                start = time.thread_time_ns()
            if index == self.count - 1:
                self.us_per_batch = (time.thread_time_ns() - start) / (self.count - 1 - FIRST) / 1000
            yield self.batches[index % 50]


class Quiet(TrainModule):
    """Computes a loss, and logs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


class Logs(Quiet):
    """Logs the loss of each batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().validation_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def ways(data: Clocked) -> dict[str, Callable[[], Any]]:
    """What takes turns; each goes through the data once."""
    quiet, logs = Quiet().eval(), Logs().eval()
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    def by_hand() -> None:
        with torch.inference_mode():
            for index, batch in enumerate(data):
                quiet.validation_step(batch, index)

    def predict_by_hand() -> None:
        outputs = []
        with torch.inference_mode():
            for index, batch in enumerate(data):
                outputs.append(quiet.predict_step(batch, index))

    return {
        "handwritten": by_hand,
        "noise": by_hand,
        "validate": lambda: trainer.validate(quiet, data, verbose=False),
        "validate, one log": lambda: trainer.validate(logs, data, verbose=False),
        "predict by hand": predict_by_hand,
        "predict": lambda: trainer.predict(quiet, data),
        "predict, nothing kept": lambda: trainer.predict(quiet, data, return_predictions=False),
    }


def main() -> int:
    """Take turns, print and write what was found; status 1 where the bar is missed, but for --quick."""
    parser = argparse.ArgumentParser(description="Microseconds a batch that validate and predict add.")
    parser.add_argument("--quick", action="store_true", help="few rounds of few batches: whether all of it runs")
    harness.add_out(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = Clocked(300 if args.quick else 1000 + FIRST)
    every, dice = ways(data), random.Random(0)
    rounds: list[dict[str, float]] = []
    for _ in range(2 if args.quick else 16):
        took = {}
        for name in dice.sample(list(every), len(every)):
            every[name]()
            took[name] = data.us_per_batch
        rounds.append(took)
    rounds = rounds[1:]  # the first warms up
    base = {name: "predict by hand" if name.startswith("predict") else "handwritten" for name in every}
    added = {
        name: harness.spread([took[name] - took[base[name]] for took in rounds]) for name in every if base[name] != name
    }
    alone = {name: harness.spread([took[name] for took in rounds]) for name in set(base.values())}
    rows = [(name, alone[base[name]]["median"], found["median"], found["min"]) for name, found in added.items()]
    harness.print_table(("", "by hand, us", "added, us", "smallest"), rows)
    held = all(added[name]["median"] <= BAR_US for name in ("validate", "predict", "predict, nothing kept"))
    print(f"\nbar {BAR_US} us a batch without logging: {'holds' if held else 'missed'}")
    name = "evaluation_quick" if args.quick else "evaluation"
    harness.write_results(args.out, name, {"handwritten_us": alone, "added_us": added, "bar_us": BAR_US})
    return 0 if held or args.quick else 1


if __name__ == "__main__":
    raise SystemExit(main())
