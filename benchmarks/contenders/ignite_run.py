"""Ignite's `create_supervised_trainer`, as documented.

Its `RunningAverage` of the loss stands for `self.log`. `everything` adds its ProgressBar, its TensorBoard handler every
50 steps and its Checkpoint at the epoch's end; it has no CSV handler.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn
from workload import make_net, make_optimizer

from contenders import Save


def train(case: str, loader: Any, root: Path, log_every_n_steps: int = 50) -> Save:
    """One epoch."""
    ignite: Any = import_module("ignite.engine")
    handlers: Any = import_module("ignite.handlers")
    metrics: Any = import_module("ignite.metrics")
    net = make_net()
    optimizer = make_optimizer(net)
    engine = ignite.create_supervised_trainer(net, optimizer, nn.functional.mse_loss)
    saver = handlers.Checkpoint(
        {"model": net, "optimizer": optimizer, "trainer": engine}, handlers.DiskSaver(str(root / "saved"))
    )
    tensorboard = None
    if case != "bare":
        metrics.RunningAverage(output_transform=lambda loss: loss).attach(engine, "loss")
    if case == "everything":
        handlers.ProgressBar().attach(engine, ["loss"])
        tensorboard = handlers.TensorboardLogger(log_dir=str(root / "tensorboard"))
        tensorboard.attach_output_handler(
            engine,
            event_name=ignite.Events.ITERATION_COMPLETED(every=log_every_n_steps),
            tag="train",
            metric_names=["loss"],
        )
        engine.add_event_handler(ignite.Events.EPOCH_COMPLETED, saver)
    engine.run(loader, max_epochs=1)
    if tensorboard is not None:
        tensorboard.close()

    def save(folder: Path) -> None:
        handlers.DiskSaver(str(folder), create_dir=True)(saver._setup_checkpoint(), "checkpoint.pt")

    return save
