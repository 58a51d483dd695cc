"""Makes the modules that a user would write, with an optimizer that records what each sample counts."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from instep import TrainModule
from tests.model.optimization import RATE
from tests.model.run import Case


class RecordingSGD(torch.optim.SGD):
    """Records what each sample counts in an update: the gradient of its own weight."""

    record: Any

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        gradient = self.param_groups[0]["params"][0].grad
        weights = tuple((i, round(float(value), 5)) for i, value in enumerate(gradient) if value)
        self.record("O", "step", weights, float(self.param_groups[0]["lr"]))
        super().step()
        return loss


class Module(TrainModule):
    """A weight for each sample. The loss is the mean of the batch's weights, so their gradients are what they count."""

    record: Any

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.weights = torch.nn.Parameter(torch.zeros(max(1, case.train.samples)))
        self.validations = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (given := self.case.log) is not None:
            self.log(
                "seen",
                batch.float().mean(),
                on_step=given.on_step,
                on_epoch=given.on_epoch,
                reduce_fx=given.reduce_fx,
                sync_dist=given.sync_dist,
            )
        return self.weights[batch].mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        values = self.case.values
        self.log("val", values[self.validations % len(values)])
        if (given := self.case.val_log) is not None:
            options = {"on_step": given.on_step, "on_epoch": given.on_epoch, "reduce_fx": given.reduce_fx}
            self.log("val_seen", batch.float().mean(), sync_dist=given.sync_dist, **options)

    def configure_optimizers(self) -> Any:
        optimizer = RecordingSGD(self.parameters(), lr=RATE)
        optimizer.record = self.record
        given = self.case.scheduler
        if given is None:
            return optimizer
        options = {"interval": given.interval, "frequency": given.frequency, "strict": given.strict}
        if given.plateau:
            scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.0, eps=0.0)
            options["monitor"] = "val"
        else:
            scheduler = LambdaLR(optimizer, lambda count: 0.5**count)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **options}}
