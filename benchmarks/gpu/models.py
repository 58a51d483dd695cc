"""The nets that rows train: GPT-2, and small layers whose kernels have next to nothing to do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep import TrainModule

# Layers, width, heads, tokens and vocabulary, which is padded to a multiple of 64.
GPT2_124M = (12, 768, 12, 1024, 50304)
TINY = (2, 32, 2, 16, 64)


class Block(nn.Module):
    """Causal attention and a feed-forward net, each behind a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.before_attention(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_feed_forward(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 with tied embeddings, the same weights each time.

    Args:
        layers: number of blocks, in a `ModuleList`, so that `regions=True` compiles each of them.
        width: of the residual stream.
        heads: of the attention.
        tokens: longest text.
        vocabulary: number of token ids.
    """

    def __init__(self, layers: int, width: int, heads: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.width, self.tokens, self.vocabulary = layers, width, tokens, vocabulary
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.apply(_draw)

    def forward(self, text: Tensor) -> Tensor:
        """Return the loss of the next token, of ids of shape (batch, tokens + 1)."""
        ids = text[:, :-1]
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.loss(self.norm(x), text[:, 1:])

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of hidden states of shape (batch, tokens, width)."""
        return F.cross_entropy((hidden @ self.embedding.weight.T).flatten(0, 1), targets.flatten())

    def texts(self, batch_size: int, device: str, seed: int = 0) -> Tensor:
        """Return drawn ids of shape (batch, tokens + 1) on the device."""
        drawn = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.vocabulary, (batch_size, self.tokens + 1), generator=drawn).to(device)

    def flops_per_token(self) -> float:
        """Return operations of forward and backward, attention over all pairs: as PaLM's appendix B counts."""
        return 6 * sum(p.numel() for p in self.parameters()) + 12 * self.layers * self.width * self.tokens


def _draw(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def adamw(net: nn.Module, device: str) -> torch.optim.Optimizer:
    """Return the optimizer that every contender trains GPT-2 with."""
    return torch.optim.AdamW(net.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda")


class Language(TrainModule):
    """A GPT-2 for the Trainer."""

    def __init__(self, net: GPT2, device: str) -> None:
        super().__init__()
        self.net, self.kind = net, device

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        return adamw(self, self.kind)


def small_layers(count: int) -> nn.Sequential:
    """Return a net from 64 features to one, of many kernels with nearly nothing to do; the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 1))
