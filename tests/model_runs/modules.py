"""Makes the modules that a user would write, with optimizers that record what each sample counts."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from instep import TrainModule
from tests.model.data import Combined, Data
from tests.model.logs import EPOCHS, NOWHERE, Log
from tests.model.optimization import RATE, Scheduler, as_seen
from tests.model.run import Case
from tests.model_runs.loaders import loaders


def size_of(data: Data | Combined) -> int:
    """Return how many samples the training data has room for."""
    return max(1, *(one.first + one.samples for one in data.loaders))


def all_of(batch: Any) -> torch.Tensor:
    """Return the samples of a batch, of all its parts."""
    if isinstance(batch, torch.Tensor):
        return batch
    parts = batch.values() if isinstance(batch, dict) else batch
    return torch.cat([part for part in parts if part is not None])


class RecordingSGD(torch.optim.SGD):
    """Records what each sample counts in an update: the gradient of its own weight."""

    record: Any
    number: int

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        gradient = self.param_groups[0]["params"][0].grad
        weights = {} if gradient is None else dict(enumerate(gradient.tolist()))
        self.record("O", "step", self.number, as_seen(weights), float(self.param_groups[0]["lr"]))
        super().step()
        return loss


class Module(TrainModule):
    """A weight for each sample and optimizer.

    The loss is the mean of the batch's weights, so their gradients are what the samples count.
    """

    record: Any

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.given = case, case.optimization
        self.automatic_optimization = self.given.manual is None
        shape = size_of(case.train)
        self.weights = torch.nn.ParameterList(torch.zeros(shape) for _ in range(self.given.optimizers))
        self.validations, self.validated = 0, False
        self.batch: Any = None
        self.batch_idx = 0
        self.objects = _metric_objects(case)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.given.manual is not None:
            self.optimize(batch, batch_idx)
        if self.given.skipped(batch_idx):
            return None
        loss = torch.stack([weights[all_of(batch)].mean() for weights in self.weights]).sum()
        return loss if self.given.returns == "loss" else {"loss": loss, "number": batch_idx}

    def optimize(self, batch: Any, batch_idx: int) -> None:
        """Step the optimizers by hand."""
        given = self.given.manual
        assert given is not None
        optimizers = self.optimizers()
        last = self.trainer.is_last_batch
        stepped = False
        for number, optimizer in enumerate(optimizers if isinstance(optimizers, list) else [optimizers]):
            every = given.every[number]
            with self.toggled_optimizer(optimizer) if given.toggles else contextlib.nullcontext():
                part = self.weights if given.both else [self.weights[number]]
                loss = torch.stack([weights[all_of(batch)].mean() for weights in part]).sum()
                self.manual_backward(loss * self.batch_weight / max(1, every))
            if every and ((batch_idx + 1) % every == 0 or last):
                if given.clip is not None:
                    self.clip_gradients(optimizer, gradient_clip_val=given.clip)
                optimizer.step()
                optimizer.zero_grad()
                stepped = stepped or number == 0
        if stepped and given.schedulers == "batch":
            self.step_schedulers()

    def step_schedulers(self) -> None:
        """Step all schedulers by hand."""
        schedulers = self.lr_schedulers() or []
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            scheduler.step()

    def on_train_epoch_end(self) -> None:
        if self.given.manual is not None and self.given.manual.schedulers == "epoch":
            self.step_schedulers()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.given.calls_closure:
            optimizer_closure()
            optimizer.step()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        values = self.case.values
        self.validated = True
        if not dataloader_idx:
            self.log("val", values[self.validations % len(values)], add_dataloader_idx=False)

    def log_from(self, hook: str) -> None:
        """Log what the case logs in a hook."""
        due = [
            call
            for call in self.case.logs
            if call.hook == hook and (hook in (*EPOCHS, *NOWHERE) or (self.batch_idx + 1) % call.every == 0)
        ]
        for kind in sorted({call.metric for call in due if call.metric}):
            self.objects[kind](self.batch.float())
        for call in due:
            self._log(call)

    def _log(self, call: Log) -> None:
        options = {
            name: getattr(call, name)
            for name in ("on_step", "on_epoch", "reduce_fx", "batch_size", "logger", "prog_bar", "sync_dist")
        }
        if call.metric == "both":
            self.log_dict(self.objects["both"], **options)
        elif call.metric is not None:
            self.log(call.name, self.objects[call.metric], **options)
        elif call.hook in (*EPOCHS, *NOWHERE):
            self.log(call.name, float(self.trainer.global_step), **options)
        else:
            value = self.batch.float().mean()
            self.log(call.name, value * float("nan") if call.nan_at == self.batch_idx else value, **options)

    def configure_optimizers(self) -> Any:
        optimizers = [RecordingSGD([weights], lr=RATE) for weights in self.weights]
        for number, optimizer in enumerate(optimizers):
            optimizer.record, optimizer.number = self.record, number
        given = self.case.schedulers
        places = [one.optimizer for one in given]
        if self.given.lists or places != sorted(set(places)):
            return optimizers, [_scheduler(optimizers[one.optimizer], one, self.given.lists) for one in given]
        of_optimizer = {one.optimizer: one for one in given}
        dicts = [
            {"optimizer": optimizer, "lr_scheduler": _scheduler(optimizer, of_optimizer[number], False)}
            if number in of_optimizer
            else {"optimizer": optimizer}
            for number, optimizer in enumerate(optimizers)
        ]
        if not given:
            return optimizers[0] if len(optimizers) == 1 else optimizers
        return dicts[0] if len(dicts) == 1 else dicts


def _metric_objects(case: Case) -> Any:
    """Make the objects of torchmetrics that the case logs: one of each kind."""
    used = sorted({call.metric for call in case.logs if call.metric})
    if not used:
        return torch.nn.ModuleDict()
    from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric

    make: dict[str, Any] = {
        "mean": MeanMetric,
        "sum": SumMetric,
        "max": MaxMetric,
        "both": lambda: MetricCollection({"pair_mean": MeanMetric(), "pair_sum": SumMetric()}),
    }
    return torch.nn.ModuleDict({kind: make[kind]() for kind in used})


def _scheduler(optimizer: Any, given: Scheduler, bare: bool) -> Any:
    """Make a scheduler with its options; without any it may stand bare."""
    if given.plateau:
        scheduler: Any = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.0, eps=0.0)
    else:
        scheduler = ExponentialLR(optimizer, 0.5)
    if bare and given == Scheduler(optimizer=given.optimizer):
        return scheduler
    names = ("interval", "frequency", "strict", *(("monitor",) if given.plateau else ()))
    options = {name: getattr(given, name) for name in (*names, *(("name",) if given.name else ()))}
    return {"scheduler": scheduler, **options}


def with_loaders(case: Case, rank: int = 0) -> type[Module]:
    """Make the class of a module that makes its loaders itself, as of the present epoch."""

    class Loading(Module):
        def train_dataloader(self) -> Any:
            return loaders(case.train.as_of(self.current_epoch), rank, case.ranks)

        def val_dataloader(self) -> Any:
            return None if case.val is None else loaders(case.val.as_of(self.current_epoch), rank, case.ranks)

    if case.val is None:
        del Loading.val_dataloader
    return Loading
