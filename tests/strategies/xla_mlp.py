"""A net of two layers with tied weights, small enough to be compiled in a second, and one function that trains it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import Accelerator, Trainer, TrainModule
from instep.callbacks import Callback
from instep.state import PartialState

WIDTH, BATCH, STEPS = 8, 4, 20


class TiedMLP(TrainModule):
    """Two layers with the weights of one. Trains with AdamW behind a warm-up.

    Args:
        dropout: its probability between the layers.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(torch.tanh(self.up(x))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(batches: int = 2 * STEPS, shuffle: bool = True, batch_size: int = BATCH) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(batches * batch_size, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, x.roll(1, 1).sin()), batch_size, shuffle=shuffle)


class Losses(Callback):
    """The loss of every micro-batch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(float(outputs["loss"]))


class Trained(NamedTuple):
    """What `train` returns."""

    losses: list[float]
    metrics: dict[str, float]
    trainer: Trainer
    module: TiedMLP


def train(
    strategy: Any = "auto",
    accelerator: str = "xla",
    *,
    steps: int = STEPS,
    dropout: float = 0.0,
    batch_size: int = BATCH,
    seed: int = 1,
    ckpt_path: Any = None,
    callbacks: list[Callback] | None = None,
    **settings: Any,
) -> Trained:
    """Train on windows of two micro-batches with gradients clipped at 1.0, and validate at the end."""
    PartialState._reset_state()
    torch.manual_seed(seed)
    module = TiedMLP(dropout)
    losses = Losses()
    trainer = Trainer(
        **{
            "accelerator": accelerator,
            "strategy": strategy,
            "max_steps": steps,
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 1.0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [losses, *(callbacks or [])],
            **settings,
        }
    )
    data = loader(batch_size=batch_size), loader(3, shuffle=False, batch_size=batch_size)
    trainer.fit(module, *data, ckpt_path=ckpt_path)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Trained(losses.values, metrics, trainer, module)


def handwritten(**settings: Any) -> list[float]:
    """The losses of the micro-batches of a handwritten loop over windows of two.

    Args:
        settings: of its Accelerator.
    """
    torch.manual_seed(1)
    accelerator = Accelerator(gradient_accumulation_steps=2, **settings)
    model = accelerator.prepare(TiedMLP())
    optimizer, data = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.02), loader(8, shuffle=False))
    losses = []
    for x, y in data:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    accelerator.end_training()
    return [float(loss) for loss in losses]
