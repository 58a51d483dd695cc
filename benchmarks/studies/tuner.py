"""`Tuner.lr_find` and `Tuner.scale_batch_size` beside Lightning's: the same answers, and the time they take.

    python benchmarks/studies/tuner.py              # some 3 minutes; needs lightning
    python benchmarks/studies/tuner.py --rounds 2

The same convolutional net, scikit-learn's digits in a fixed order, seeds and CPU thread for both. A process of each
takes turns with one of the other on one CPU; in each, a first search of either kind warms up and is not counted, then
each is timed. `lr_find` tries 100 rates; the grid point is the index among them. `scale_batch_size` searches by
"power", and by "binsearch" with a module that runs out of memory above 300 samples. Medians over the rounds; the ratio
is the median of those within a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # of the harness, shared with the programs kept green

import harness

MOST = 300  # samples of a batch that "fit into memory"
SEARCHES = ("lr_find", "power", "binsearch")


def classes_of(package: str) -> tuple[Any, Any, Any]:
    """Return the package's module, Trainer and Tuner."""
    import logging

    if package == "instep":
        import instep

        return instep.TrainModule, instep.Trainer, instep.Tuner
    import lightning.pytorch as lightning  # pyright: ignore[reportMissingImports]
    from lightning.pytorch.tuner import Tuner  # pyright: ignore[reportMissingImports]

    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return lightning.LightningModule, lightning.Trainer, Tuner


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Search by one package in this process: answers, and seconds."""
    import torch
    from sklearn.datasets import load_digits
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    base, trainer_of, tuner_of = classes_of(request["package"])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div_(16).unsqueeze(1)[:1280]
    data = TensorDataset(images, torch.tensor(digits.target)[:1280])

    class Digits(base):
        def __init__(self, short: bool) -> None:
            super().__init__()
            self.lr, self.batch_size, self.short = 1e-3, 64, short
            self.net = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
            )

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.short and len(batch[0]) > MOST:
                raise RuntimeError("CUDA out of memory.")
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def train_dataloader(self) -> Any:
            return DataLoader(data, self.batch_size)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    def search(kind: str) -> tuple[Any, float]:
        torch.manual_seed(0)
        module = Digits(short=kind == "binsearch")
        trainer = trainer_of(
            max_epochs=20, accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False,
            enable_progress_bar=False,
        )  # fmt: skip
        tuner = tuner_of(trainer)
        started = time.perf_counter()
        if kind == "lr_find":
            found = tuner.lr_find(module)
            seconds = time.perf_counter() - started
            return (found.results["lr"].index(found.suggestion()), found.suggestion()), seconds
        size = tuner.scale_batch_size(module, mode=kind, max_trials=8)
        return size, time.perf_counter() - started

    with tempfile.TemporaryDirectory() as folder:  # Lightning's trial writes a checkpoint
        os.chdir(folder)
        for kind in SEARCHES:
            search(kind)
        answers = {kind: search(kind) for kind in SEARCHES}
        os.chdir("/")
    return {kind: {"found": found, "seconds": seconds} for kind, (found, seconds) in answers.items()}


def main() -> None:
    """Measure, print and write."""
    args = parse_arguments()
    rounds: list[dict[str, Any]] = []
    progress = harness.Progress(args.rounds)
    for number in range(args.rounds):
        order = ("instep", "lightning") if number % 2 == 0 else ("lightning", "instep")
        rounds.append({package: harness.run_child(__file__, {"package": package}) for package in order})
        progress.step(f"round {number + 1}")
    rows: list[tuple[Any, ...]] = []
    results: dict[str, dict[str, Any]] = {}
    for kind in SEARCHES:
        ours, theirs = ([one[package][kind] for one in rounds] for package in ("instep", "lightning"))
        ratios = [own["seconds"] / other["seconds"] for own, other in zip(ours, theirs, strict=True)]
        results[kind] = {
            package: {"found": ones[0]["found"], "ms": harness.spread([1e3 * one["seconds"] for one in ones], 1)}
            for package, ones in (("instep", ours), ("lightning", theirs))
        }
        results[kind]["ratio"] = harness.spread(ratios, 3)
        medians = [statistics.median(1e3 * one["seconds"] for one in each) for each in (ours, theirs)]
        rows.append((kind, ours[0]["found"], theirs[0]["found"], *(f"{each:.0f}" for each in medians),
                     f"{statistics.median(ratios):.2f}"))  # fmt: skip
    harness.print_table(("search", "instep found", "Lightning found", "instep ms", "Lightning ms", "ratio"), rows)
    harness.write_results(args.out, "tuner", {"rounds": args.rounds, "results": results})


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="The Tuner beside Lightning's.")
    parser.add_argument("--rounds", type=int, default=7, help="processes of each (default: 7)")
    harness.add_out(parser)
    return parser.parse_args()


if __name__ == "__main__":
    if "--child" in sys.argv:
        harness.answer(measure)
    else:
        main()
