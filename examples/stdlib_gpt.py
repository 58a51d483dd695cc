"""Train a small byte-level GPT on the source of the running Python's standard library.

    python examples/stdlib_gpt.py                      # a minute or two on two cores
    python examples/stdlib_gpt.py --devices 2          # the same global batch on two processes
    instep launch --devices 2 examples/stdlib_gpt.py
    torchrun --nproc-per-node 2 examples/stdlib_gpt.py
    python examples/stdlib_gpt.py --devices 2 --strategy fsdp    # or hsdp, tp, cp, pp, deepspeed_stage_2 ...
    python examples/stdlib_gpt.py --resume             # go on after Ctrl-C, SIGTERM or a crash

The text is real, about 11 MB, and on every machine. Whole files go to training or to validation by a hash of their
name. The measure is bits per byte on validation text: 8 knows nothing, an order-0 code of this text needs about 4.3.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from instep import DataModule, Trainer, TrainModule, seed_everything
from instep.callbacks import LearningRateMonitor, ModelCheckpoint
from instep.loggers import CSVLogger, TensorBoardLogger
from instep.strategies import sequence_positions

CONTEXT_BYTES = 64
GLOBAL_BATCH = 16  # windows per optimizer step over all processes
TRAIN_BYTES, VAL_BYTES = 8 << 20, 64 << 10
LEFT_OUT = {"__pycache__", "dist-packages", "idlelib", "site-packages", "test", "tests"}


def read_stdlib() -> tuple[bytes, bytes]:
    """The training and the validation text, alike in every process of one Python installation."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    text: dict[bool, list[bytes]] = {False: [], True: []}
    for name in names:
        if LEFT_OUT.isdisjoint(name.split("/")):
            validation = hashlib.blake2b(name.encode()).digest()[0] < 16  # one file of sixteen
            text[validation].append((root / name).read_bytes())
    return b"".join(text[False])[:TRAIN_BYTES], b"".join(text[True])[:VAL_BYTES]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A text cut into windows: each is its bytes and, one further, the bytes to predict."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT_BYTES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * CONTEXT_BYTES
        window = self.text[start : start + CONTEXT_BYTES + 1].long()
        return window[:-1], window[1:]


class StdlibText(DataModule):
    """The standard library's source as windows of bytes.

    Args:
        workers: processes that load data; 0 loads in the training process.
    """

    def __init__(self, workers: int = 0) -> None:
        super().__init__()
        self.workers = workers

    def setup(self, stage: str) -> None:
        """Read the files."""
        self.train, self.val = map(Windows, read_stdlib())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, GLOBAL_BATCH, shuffle=True, drop_last=True, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, 64, num_workers=self.workers)


class Block(nn.Module):
    """A transformer block: causal attention and a feed-forward net, each behind a norm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_size = width // heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """From and to shape (batch, bytes, width)."""
        # As many heads as this process has of them: one after the other, each with its q, k and v.
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, 3, self.head_size))
        q, k, v = heads.permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class StdlibGPT(TrainModule):
    """A byte-level GPT whose output layer is tied to its embedding, 437,760 parameters by default.

    What only some strategies ask for: `sequence_dim` (cp), `parallelize` (tp), `pipeline_stages` and `pipeline_loss`
    (pp).

    Args:
        width: of the residual stream.
        layers: number of blocks.
        heads: of attention; divides `width`.
        dropout: in attention, after the feed-forward nets and on the embedding.
        lr: the learning rate after warm-up; a cosine brings it down to a tenth.
    """

    def __init__(
        self, width: int = 128, layers: int = 2, heads: int = 4, dropout: float = 0.05, lr: float = 4e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.empty(CONTEXT_BYTES, width))
        self.blocks = nn.Sequential(
            nn.Dropout(dropout), *(Block(width, heads, dropout) for _ in range(layers)), nn.LayerNorm(width)
        )
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight
        self.training_s = 0.0
        nn.init.normal_(self.position, std=0.02)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of each next byte, shape (batch, bytes, 256), of bytes as int64, shape (batch, bytes)."""
        return self.head(self.blocks(self.embed(text)))

    def embed(self, text: Tensor) -> Tensor:
        """From (batch, bytes) to (batch, bytes, width)."""
        return self.embedding(text) + self.position[sequence_positions(text.shape[1], text.device)]

    sequence_dim = 1

    def parallelize(self, mesh: Any) -> dict[str, Any]:
        """Heads and the insides of feed-forward nets are shared out over processes."""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {
            "blocks.*.qkv": ColwiseParallel(),
            "blocks.*.attention_out": RowwiseParallel(),
            "blocks.*.feed_forward.1": ColwiseParallel(),
            "blocks.*.feed_forward.3": RowwiseParallel(),
        }

    def pipeline_stages(self) -> list[Any]:
        """The parts of `forward`, in order."""
        return [(self.embed, self.embedding, self.position), *self.blocks, self.head]

    def pipeline_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, in nats."""
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.pipeline_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = self.pipeline_loss(self(batch[0]), batch[1])
        self.log("val_bits_per_byte", loss / math.log(2), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.95), weight_decay=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        warmup = max(1, steps // 10)

        def factor(step: int) -> float:
            done = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
            return min((step + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * done)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        self._started = time.perf_counter()

    def on_train_end(self) -> None:
        self.training_s = time.perf_counter() - self._started


def main() -> None:
    """Train, then report the size, the tokens, the time and the bits per byte."""
    args = parse_arguments()
    seed_everything(args.seed)
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=args.strategy,
        precision=args.precision,
        max_steps=args.max_steps,
        global_batch_size=GLOBAL_BATCH,
        gradient_clip_val=1.0,
        val_check_interval=min(250, args.max_steps),
        default_root_dir=args.root,
        log_every_n_steps=10,
        logger=[TensorBoardLogger(), CSVLogger(flush_logs_every_n_steps=20)],
        callbacks=[ModelCheckpoint(monitor="val_bits_per_byte", save_last=True), LearningRateMonitor()],
    )
    model, data = StdlibGPT(), StdlibText(args.workers)
    parameters = sum(p.numel() for p in model.parameters())
    trainer.fit(model, datamodule=data, ckpt_path="auto" if args.resume else None)
    steps, tokens = trainer.global_step, trainer.global_step * GLOBAL_BATCH * CONTEXT_BYTES
    [result] = trainer.validate(model, datamodule=data, verbose=False)
    trainer.print(f"model: {parameters:,} parameters")
    trainer.print(f"trained {steps} steps, {tokens:,} tokens, on {trainer.world_size} process(es)")
    trainer.print(f"training took {model.training_s:.1f} s")
    trainer.print(f"validation bits per byte {float(result['val_bits_per_byte']):.4f}")
    trainer.print(f"dashboard: tensorboard --logdir {trainer.log_dir}")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT on Python's standard library.")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, ... (default: what this machine has)")
    parser.add_argument("--devices", default="auto", help="number of processes (default: auto)")
    parser.add_argument("--strategy", default="auto", help="ddp, fsdp, hsdp, tp, cp, pp, deepspeed_stage_2, ...")
    parser.add_argument("--precision", default="32-true", help="32-true, bf16-mixed, 16-mixed, ... (default: 32-true)")
    parser.add_argument("--max-steps", type=int, default=1000, metavar="N", help="optimizer steps (default: 1000)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint under --root, if any")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="data loading processes (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument(
        "--root", type=Path, default=Path("runs/stdlib_gpt"), help="where runs go (default: runs/stdlib_gpt)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
