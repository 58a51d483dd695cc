"""A loop with Lightning's Fabric: `setup`, `setup_dataloaders`, `backward`.

It has no `self.log`: a running sum of the detached loss stands for it. `everything` adds its TensorBoard and CSV
loggers every 50 steps; it has no bar and saves only when told to.
"""

from __future__ import annotations

import logging
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from workload import loss_of, make_net, make_optimizer

from contenders import Save


def train(case: str, loader: Any, root: Path, log_every_n_steps: int = 50) -> Save:
    """One epoch; ready batches, which are no DataLoader, are not set up."""
    lightning: Any = import_module("lightning.fabric")
    loggers: Any = import_module("lightning.fabric.loggers")
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    everything = case == "everything"
    own = [loggers.TensorBoardLogger(root), loggers.CSVLogger(root)] if everything else None
    fabric = lightning.Fabric(accelerator="cpu", devices=1, loggers=own)
    fabric.launch()
    net = make_net()
    net, optimizer = fabric.setup(net, make_optimizer(net))
    if isinstance(loader, DataLoader):
        loader = fabric.setup_dataloaders(loader)
    total = 0.0
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        if case != "bare":
            total += loss.detach()
        fabric.backward(loss)
        optimizer.step()
        if everything and step % log_every_n_steps == 0:
            fabric.log("loss", loss.item(), step=step)
    return lambda folder: fabric.save(folder / "state.ckpt", {"net": net, "optimizer": optimizer})
