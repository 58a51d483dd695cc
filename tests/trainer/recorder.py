"""Records every hook of a run in order; the same for instep's classes and for Lightning's."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from instep.callbacks.base import HOOKS as CALLBACK_HOOKS
from instep.trainer.hooks import ModuleHooks

Call = tuple[str, str]
"""Whose hook (C: callback, M: module, D: datamodule) and its name."""

_STEPS = ("training_step", "validation_step", "test_step", "predict_step", "configure_optimizers")
OPTIMIZATION = (
    "optimizer_step",
    "optimizer_zero_grad",
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
)
_MODULE_HOOKS = (*(name for name in vars(ModuleHooks) if not name.startswith("_")), *_STEPS, *OPTIMIZATION)
_DATA_HOOKS = ("prepare_data", "setup", "teardown")


def _wrap(owner: str, name: str, function: Any, calls: list[Call]) -> Any:
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "optimizer_step":  # the closure runs inside: noted when the parameters have changed
            result = function(self, *args, **kwargs)
            calls.append((owner, name))
            return result
        calls.append((owner, name))
        return function(self, *args, **kwargs)

    recorded.__signature__ = inspect.signature(function)  # pyright: ignore[reportFunctionMemberAccess]
    recorded.__name__ = name
    return recorded


def _recorded(base: type, owner: str, names: tuple[str, ...], calls: list[Call]) -> type:
    wrapped = {name: _wrap(owner, name, getattr(base, name), calls) for name in names if hasattr(base, name)}
    return type(f"Recorded{base.__name__}", (base,), wrapped)


def recorded_module(base: type, calls: list[Call], interval: str = "step") -> Any:
    """A linear model on `base` (TrainModule or LightningModule) whose hooks are all overridden and recorded."""

    class Model(base):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def _loss(self, batch: Any) -> Any:
            return nn.functional.mse_loss(self.layer(batch[0]).squeeze(-1), batch[1])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self._loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self._loss(batch)

        def test_step(self, batch: Any, batch_idx: int) -> Any:
            return self._loss(batch)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": interval}}

    names = tuple(name for name in _MODULE_HOOKS if not name.endswith("_dataloader"))
    return _recorded(Model, "M", names, calls)()


def recorded_callback(base: type, calls: list[Call]) -> Any:
    return _recorded(base, "C", CALLBACK_HOOKS, calls)()


def recorded_data(base: type, calls: list[Call], loader: Any) -> Any:
    class Data(base):
        def train_dataloader(self) -> Any:
            return loader

        val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    return _recorded(Data, "D", _DATA_HOOKS, calls)()
