"""Train one small net on scikit-learn's handwritten digits with many optimizers and learning-rate schedules.

    python examples/optimizers.py                                    # a table of all optimizers: some seconds each
    python examples/optimizers.py --optimizer muon --schedule wsd    # one of them
    python examples/optimizers.py --devices 2                        # the same steps on two processes
    python examples/optimizers.py --smoke                            # one epoch each, to see that it works

It shows options of parameter groups by name (`instep.optim`), schedules by name (`instep.schedules`), two optimizers
that step together (Muon takes matrices only), and one that evaluates the loss several times in a step (L-BFGS).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import PartialState, Trainer, TrainModule, schedules, seed_everything
from instep.optim import biases_and_norms, param_groups

# Of each: the class, its learning rate, and other options. Muon also needs an optimizer for what is no matrix.
OPTIMIZERS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "sgd": ("SGD", 0.1, {"momentum": 0.9, "nesterov": True}),
    "adamw": ("AdamW", 3e-3, {}),
    "nadam": ("NAdam", 3e-3, {"decoupled_weight_decay": True}),
    "radam": ("RAdam", 3e-3, {"decoupled_weight_decay": True}),
    "adafactor": ("Adafactor", 1e-2, {}),
    "lbfgs": ("LBFGS", 1.0, {"max_iter": 4, "line_search_fn": "strong_wolfe"}),
    "muon": ("Muon", 0.02, {}),
}
GLOBAL_BATCH = 50  # of 1,500 images for training


class Digits(TrainModule):
    """A net of three layers; trained by the optimizer and the schedule of these names."""

    def __init__(self, optimizer: str = "adamw", schedule: str = "cosine", width: int = 128) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(64, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, shape (batch, 10), of images, shape (batch, 64)."""
        return self.head(F.gelu(self.body(images)))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("accuracy", (self(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        kind, lr, options = OPTIMIZERS[self.hparams.optimizer]
        make = getattr(optim, kind)
        if kind == "LBFGS":  # takes one group, and no weight decay
            made = [make(self.parameters(), lr=lr, **options)]
        elif kind == "Muon":  # for the matrices inside; AdamW for the last layer, biases and norms
            matrices = [p for p in self.body.parameters() if p.ndim == 2]
            others = [p for p in self.parameters() if not any(p is one for one in matrices)]
            made = [make(matrices, lr=lr, weight_decay=0.01), optim.AdamW(others, lr=3e-3, weight_decay=0.0)]
        else:
            groups = param_groups(self, {biases_and_norms: {"weight_decay": 0.0}}, lr=lr, weight_decay=0.01)
            made = [make(groups, **options)]
        steps = self.trainer.estimated_stepping_batches
        name, warmup = self.hparams.schedule, max(1, int(0.1 * steps))
        return made, [schedules.make(name, one, total_steps=steps, warmup_steps=warmup) for one in made]


def data() -> tuple[TensorDataset, TensorDataset]:
    """The images for training and validation, split once and for all; float32 in 0..1, shape (64,)."""
    digits: Any = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32).div_(16), torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, val = order.tensor_split([1500])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[val], labels[val])


def train(name: str, schedule: str, epochs: int, devices: int) -> tuple[float, float]:
    """Train with one optimizer; return the accuracy on the validation images, and the seconds."""
    seed_everything(1)
    train_data, val_data = data()
    batch = len(train_data) if name == "lbfgs" else GLOBAL_BATCH  # its line search wants the same loss each time
    trainer = Trainer(
        accelerator="cpu", devices=devices, max_epochs=epochs, global_batch_size=batch, gradient_clip_val=None,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    began = time.perf_counter()
    loaders = DataLoader(train_data, batch, shuffle=True), DataLoader(val_data, 297)
    trainer.fit(Digits(name, schedule), *loaders)
    return float(trainer.callback_metrics["accuracy"]), time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train as the arguments say; return the accuracies by optimizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, action="append", help="default: all of them")
    parser.add_argument("--schedule", choices=schedules.SCHEDULES, default="cosine")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="one epoch each")
    args = parser.parse_args(argv)
    reached: dict[str, float] = {}
    for name in args.optimizer or OPTIMIZERS:
        reached[name], seconds = train(name, args.schedule, 1 if args.smoke else args.epochs, args.devices)
        PartialState().print(f"{name:10} accuracy {reached[name]:.4f}   {seconds:5.1f} s")
    return reached


if __name__ == "__main__":
    main()
