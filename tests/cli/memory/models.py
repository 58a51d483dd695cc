"""Modules whose memory is estimated and measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import TrainModule

BATCH = 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(TrainModule):
    """14 million parameters in three blocks."""

    def __init__(self, width: int = 768, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Looks(Net):
    """Its step asks for a value."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else None


def data(width: int = 768, steps: int = 3, batch_size: int = BATCH) -> DataLoader[Any]:
    """Batches for Net."""
    count = steps * batch_size
    return DataLoader(
        TensorDataset(torch.randn(count, width), torch.zeros(count, dtype=torch.int64)), batch_size=batch_size
    )
