"""Stop all processes at one step because one of them says so.

    python examples/early_stop_trigger.py
    torchrun --nproc-per-node 3 examples/early_stop_trigger.py --setter 2

Every process looks at a loss of its own. The one given by `--setter` finds its loss low enough at some step and sets a
trigger; all leave the loop together, so that nobody waits for gradients that will not come.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from instep import Accelerator
from instep.accelerator import set_seed
from instep.distributed import gather_object


def main() -> None:
    """Train until one process has seen enough."""
    args = parse_arguments()
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    x = torch.randn(20_000, 8)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    setter = args.setter % accelerator.num_processes

    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.process_index == setter and loss.item() < args.below:
            accelerator.set_trigger("enough", f"loss {loss.item():.4f}")
        if args.blocking:
            stop = accelerator.check_trigger("enough")  # waits for all processes in each step
        else:
            # Waits for nobody: what is set now is agreed on a few steps later, at the same step everywhere.
            stop = any(trigger.name == "enough" for trigger in accelerator.triggers.tick(accelerator.step))
        if stop:
            break

    steps = gather_object(accelerator.step)
    accelerator.print(f"stopped at steps {steps} of {len(loader)} because rank {setter} had enough")
    accelerator.end_training()


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Stop all processes because one of them says so.")
    parser.add_argument("--setter", type=int, default=0, metavar="RANK", help="who sets the trigger (default: 0)")
    parser.add_argument("--below", type=float, default=0.01, metavar="LOSS", help="when (default: 0.01)")
    parser.add_argument("--blocking", action="store_true", help="agree in every step, at once")
    return parser.parse_args()


if __name__ == "__main__":
    main()
