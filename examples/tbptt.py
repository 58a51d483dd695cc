"""Truncated backpropagation through time: a GRU reads the standard library's source, byte by byte, and never forgets.

    python examples/tbptt.py                 # a minute on a CPU
    python examples/tbptt.py --smoke         # seconds
    python examples/tbptt.py --resume        # goes on from the newest checkpoint, with the state of every stream

The text is cut into streams that are read side by side. A batch is the next stretch of each; `training_step` splits it
into chunks of time, and backpropagates and steps after each of them (manual optimization). What the GRU remembers goes
on to the next chunk and the next batch without its graph, so gradients reach back one chunk only. The state is no
weight: it goes into checkpoints by `on_save_checkpoint`, for all processes, and comes back on a resume.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instep import Trainer, TrainModule, seed_everything
from instep.callbacks import ModelCheckpoint

STREAMS, CHUNKS, CHUNK = 16, 4, 32  # streams of all processes; chunks of a batch; bytes of a chunk


class ByteGRU(TrainModule):
    """A language model of bytes, trained chunk by chunk."""

    def __init__(self, width: int = 96, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.embedding = nn.Embedding(256, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)
        self.memory: Tensor | None = None  # (1, streams of this process, width)

    def forward(self, text: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Give the logits of the next bytes, and what to remember."""
        hidden, memory = self.gru(self.embedding(text), memory)
        return self.head(hidden), memory

    def on_train_epoch_start(self) -> None:
        self.memory = None  # the streams begin anew

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        rank, world = self.trainer.global_rank, self.trainer.world_size
        text = batch[0][0, rank::world].long()  # each process reads streams of its own
        if self.memory is None:
            self.memory = torch.zeros(1, len(text), self.hparams.width, device=self.device)
        optimizer = self.optimizers()
        losses: list[Tensor] = []
        for begin in range(0, CHUNKS * CHUNK, CHUNK):
            logits, memory = self(text[:, begin : begin + CHUNK], self.memory)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, begin + 1 : begin + CHUNK + 1].flatten())
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 1.0)
            optimizer.step()
            self.memory = memory.detach()
            losses.append(loss.detach())
        self.log("bits_per_byte", torch.stack(losses).mean() / torch.log(torch.tensor(2.0)), prog_bar=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.memory is not None:  # called on all processes; the first one's entry is saved
            checkpoint["memory"] = self.all_gather(self.memory).reshape(-1, *self.memory.shape)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("memory")
        if saved is not None and len(saved) == self.trainer.world_size:
            self.restored = saved[self.trainer.global_rank]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        restored = self.__dict__.pop("restored", None)
        if restored is not None and batch_idx:  # resumed within an epoch
            self.memory = restored.to(self.device)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def streams(batches: int) -> TensorDataset:
    """Cut the standard library's source into streams: item i is stretch i of all of them, one byte longer."""
    length = batches * CHUNKS * CHUNK
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = bytearray(b"".join(path.read_bytes() for path in sources)[: STREAMS * length + 1])
    flat = torch.frombuffer(text, dtype=torch.uint8)
    rows = torch.stack([flat[stream * length : (stream + 1) * length + 1] for stream in range(STREAMS)])
    return TensorDataset(rows.unfold(1, CHUNKS * CHUNK + 1, CHUNKS * CHUNK).transpose(0, 1).contiguous())


def main(argv: list[str] | None = None) -> None:
    """Train, and say what came of it."""
    parser = argparse.ArgumentParser(description="Truncated backpropagation through time.")
    parser.add_argument("--epochs", type=int, default=3, metavar="N")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint under --root")
    parser.add_argument("--smoke", action="store_true", help="ten batches, two epochs: seconds")
    parser.add_argument("--root", type=Path, default=Path("runs/tbptt"), help="where runs go")
    args = parser.parse_args(argv)
    seed_everything(0)
    trainer = Trainer(
        max_epochs=2 if args.smoke else args.epochs,
        default_root_dir=args.root,
        use_distributed_sampler=False,  # all processes read all stretches, and take their streams of them
        callbacks=[ModelCheckpoint(every_n_train_steps=4 if args.smoke else 100, save_last=True)],
    )
    trainer.fit(ByteGRU(), DataLoader(streams(10 if args.smoke else 200)), ckpt_path="auto" if args.resume else None)
    trainer.print(f"{float(trainer.callback_metrics['bits_per_byte']):.6f} bits per byte")


if __name__ == "__main__":
    main()
