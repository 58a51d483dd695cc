"""A loop of your own around an Accelerator: train on handwritten digits, evaluate on all processes, count exactly.

    python examples/accelerator_loop.py
    torchrun --nproc-per-node 2 examples/accelerator_loop.py           # the same global batch on two processes
    torchrun --nproc-per-node 2 examples/accelerator_loop.py --resume  # go on from the newest state
    python examples/accelerator_loop.py --evaluate runs/accelerator/checkpoints/step-...   # the same counts again

The images ship with scikit-learn: `pip install 'instep[examples]'`. The 297 test images are no multiple of any batch:
some processes get fewer in the end, and `gather_for_metrics` knows.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import Accelerator
from instep.accelerator import DataLoaderConfiguration, ProjectConfiguration, set_seed
from instep.checkpoint import load_weights

TRAIN = 1500  # the remaining 297 images are the test set
GLOBAL_BATCH = 64  # samples per optimizer step over all processes


def main() -> None:
    """Train and evaluate, or evaluate one state."""
    args = parse_arguments()
    torch.set_num_threads(1)  # the net is so small that threads cost more by waiting for each other than they give
    set_seed(0)
    accelerator = Accelerator(
        cpu=args.cpu or None,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulate,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        project_config=ProjectConfiguration(project_dir=args.root, automatic_checkpoint_naming=True, total_limit=2),
        log_with="csv",
    )
    model = make_model()
    if args.evaluate is not None:
        model.load_state_dict(load_weights(args.evaluate))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
    train, test = make_loaders(args.accumulate)
    model, optimizer, scheduler, train, test = accelerator.prepare(model, optimizer, scheduler, train, test)

    if args.evaluate is None:
        accelerator.init_trackers("digits", config={"epochs": args.epochs, "processes": accelerator.num_processes})
        first_epoch = 0
        if args.resume:
            accelerator.print(f"resuming from {accelerator.load_state()}")
            first_epoch = train.next_epoch
        for epoch in range(first_epoch, args.epochs):
            model.train()
            for images, labels in train:
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(images), labels)
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            correct, samples = evaluate(accelerator, model, test)
            accelerator.log({"accuracy": correct / samples}, step=accelerator.step)
            accelerator.print(
                f"epoch {epoch + 1}: {correct} of {samples} correct, learning rate {scheduler.get_last_lr()}"
            )
            accelerator.save_state()
        accelerator.print(f"trained {accelerator.step} steps on {accelerator.num_processes} process(es)")
    correct, samples = evaluate(accelerator, model, test)
    accelerator.print(f"test accuracy {correct / samples:.2%}: {correct} of {samples} correct")
    accelerator.end_training()


def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any) -> tuple[int, int]:
    """How many images are recognised, and how many there are: the same on any number of processes."""
    model.eval()
    correct = samples = 0
    with torch.inference_mode():
        for images, labels in loader:
            predicted, true = accelerator.gather_for_metrics((model(images).argmax(dim=1), labels))
            correct += int((predicted == true).sum())
            samples += len(true)
    return correct, samples


def make_model() -> nn.Module:
    """Logits, shape (batch, 10), of images, shape (batch, 1, 8, 8)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def make_loaders(accumulate: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Training and test images, float32 in 0..1; with `split_batches` the batch size is that of all processes."""
    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div_(16).unsqueeze(1)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order.tensor_split([TRAIN])
    return (
        DataLoader(TensorDataset(images[train], labels[train]), GLOBAL_BATCH // accumulate, shuffle=True),
        DataLoader(TensorDataset(images[test], labels[test]), 100),
    )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with a loop of your own.")
    parser.add_argument("--cpu", action="store_true", help="use the CPU although there is an accelerator")
    parser.add_argument("--mixed-precision", default="no", help="no, bf16 or fp16 (default: no)")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches per step (default: 1)")
    parser.add_argument("--epochs", type=int, default=8, metavar="N", help="(default: 8)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest state under --root")
    parser.add_argument("--evaluate", metavar="STATE", help="evaluate this state instead of training")
    parser.add_argument("--root", type=Path, default=Path("runs/accelerator"), help="(default: runs/accelerator)")
    args = parser.parse_args()
    if not (args.resume or args.evaluate) and any(args.root.glob("checkpoints/step-*")):
        # The first save would refuse to mix them with another run's, after an epoch of training.
        parser.error(f"{args.root} has the states of a run: go on with --resume, or give another folder by --root")
    return args


if __name__ == "__main__":
    main()
