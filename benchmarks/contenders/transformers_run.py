"""transformers' Trainer, with the workload's loader in place of its own.

It always keeps a running sum of the loss; `log` has it written to its log every 50 steps, and `everything` also to
TensorBoard, with its bar and a save at the epoch's end. It has no CSV logger.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from workload import LEARNING_RATE, loss_of, make_net

from contenders import Save


class Named:
    """Batches as dicts, which it wants."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.batch_size = loader, 8

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for x, y in self.loader:
            yield {"x": x, "y": y}


def train(case: str, loader: Any, root: Path, log_every_n_steps: int = 50) -> Save:
    """One epoch."""
    transformers: Any = import_module("transformers")
    warnings.filterwarnings("ignore")
    everything = case == "everything"

    class Regression(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return Named(loader)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return loss_of(model, (inputs["x"], inputs["y"]))

    settings = transformers.TrainingArguments(
        output_dir=str(root),
        num_train_epochs=1,
        use_cpu=True,
        optim="sgd",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_strategy="no" if case == "bare" else "steps",
        logging_steps=log_every_n_steps,
        report_to="tensorboard" if everything else "none",
        save_strategy="epoch" if everything else "no",
        disable_tqdm=not everything,
    )
    trainer = Regression(model=make_net(), args=settings)
    trainer.train()
    return lambda folder: trainer.save_model(str(folder))
