"""A handwritten loop, in all cases the same: what the others are measured against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from workload import loss_of, make_net, make_optimizer

from contenders import Save


def train(case: str, loader: Any, root: Path) -> Save:
    """Zero the gradients, forward, loss, backward, step; nothing else."""
    net = make_net()
    optimizer = make_optimizer(net)
    net.train()
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        loss.backward()
        optimizer.step()

    def save(folder: Path) -> None:
        folder.mkdir()
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, folder / "checkpoint.pt")

    return save
