"""Runs a case with PyTorch Lightning's Trainer, and records what the model says of it. Nothing of instep is needed."""

from __future__ import annotations

import io
import logging
import signal
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer  # pyright: ignore[reportMissingImports]
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # pyright: ignore[reportMissingImports]
from lightning.pytorch.loggers import Logger  # pyright: ignore[reportMissingImports]
from lightning.pytorch.utilities import CombinedLoader  # pyright: ignore[reportMissingImports]
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, RandomSampler

from tests.model.data import Combined, Data, samples_of
from tests.model.optimization import RATE, Scheduler, as_seen
from tests.model.run import LOOKS, Case, Settings
from tests.model.trace import Event, comparable, rounded
from tests.model_runs.samples import ClaimingStream, Samples, Stream

LONGEST_S = 30
MOST_EPOCHS = 100
"""A run that takes more seconds, or has more epochs, never ends."""

BOTH = (
    *("setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start"),
    *("on_train_epoch_end", "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_validation_start", "on_validation_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end"),
)
CALLBACKS = (*BOTH, "on_sanity_check_start", "on_sanity_check_end", "on_exception")
METHODS = (
    *BOTH,
    *("configure_callbacks", "prepare_data", "configure_model", "configure_optimizers", "training_step"),
    *("validation_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping", "optimizer_step"),
    *("lr_scheduler_step", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
    *("on_validation_model_zero_grad", "on_validation_model_eval", "on_validation_model_train"),
)


class Endless(Exception):
    """Ends a run that never ends."""


def _end(signal_number: int, frame: Any) -> None:
    raise Endless


@dataclass
class Recorded:
    """What was seen of a run.

    Attributes:
        events: in their order.
        orders: of an epoch's shuffled samples, for each epoch.
        error: what ended the run.
    """

    events: list[Event] = field(default_factory=list)
    orders: list[list[int]] = field(default_factory=list)
    error: BaseException | None = None


def record(case: Case, folder: str) -> Recorded:
    """Run the case with Lightning; its files go to the folder."""
    it = Recorded()
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.manual_seed(7)
        signal.signal(signal.SIGALRM, _end)
        signal.alarm(LONGEST_S)
        try:
            train, val = _loader(case.train, it), None if case.val is None else _loader(case.val, it)
            module: Any = _module(case, it)
            rows = Rows(it)
            savers = _savers(case, folder)
            stopping = [] if case.stopping is None else [EarlyStopping(**vars(case.stopping))]
            trainer = Trainer(
                **_arguments(case, folder),
                logger=rows,
                callbacks=[_callback(case, it, savers), *stopping, *savers],
            )
            module.recording_trainer = rows.trainer = trainer
            trainer.fit(module, train, val)
        except Exception as error:
            it.error = error
            last = it.events[-1] if it.events else Event("-", "", (), 0, 0)
            it.events.append(last._replace(owner="-", name="error", args=()))
        finally:
            signal.alarm(0)
    return it


def _arguments(case: Case, folder: str) -> dict[str, Any]:
    defaults = vars(Settings())
    given = {name: value for name, value in vars(case.settings).items() if repr(value) != repr(defaults[name])}
    given.pop("uneven", None)  # only for several ranks
    return {
        **given,
        "accelerator": "cpu",
        "devices": 1,
        "enable_checkpointing": case.checkpoints is not None,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }


# ---- data


class _Batches:
    """A loader of one's own. A list would be a list of loaders for Lightning."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data.batches(self.data.in_sequence()))

    def __iter__(self) -> Any:
        return iter([torch.tensor(batch) for batch in self.data.batches(self.data.in_sequence())])


class _Recording(RandomSampler):
    """Records the order of each epoch."""

    it: Recorded
    first: int

    def __iter__(self) -> Any:
        order = list(super().__iter__())
        self.it.orders.append([self.first + index for index in order])
        return iter(order)


def _loader(data: Any, it: Recorded) -> Any:
    if isinstance(data, Combined):
        several = [_loader(one, it) for one in data.loaders]
        if data.given == "list":
            return several
        named = dict(zip("abc", several, strict=False))
        return named if data.given == "dict" else CombinedLoader(named, data.mode)
    if data.kind == "list":
        return _Batches(data)
    if data.kind == "iterable":
        stream = Stream(data) if data.claims is None else ClaimingStream(data)
        return DataLoader(stream, data.batch_size, drop_last=data.drop_last)
    samples = Samples(data)
    if not data.shuffle:
        return DataLoader(samples, data.batch_size, drop_last=data.drop_last)
    sampler = _Recording(samples)
    sampler.it, sampler.first = it, data.first
    return DataLoader(samples, data.batch_size, sampler=sampler, drop_last=data.drop_last)


# ---- the module


class _SGD(torch.optim.SGD):
    """Records what each sample counts in an update: the gradient of its own weight."""

    note: Any

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        gradient = self.param_groups[0]["params"][0].grad
        weights = {} if gradient is None else dict(enumerate(gradient.tolist()))
        self.note("O", "step", 0, as_seen(weights), float(self.param_groups[0]["lr"]))
        super().step()
        return loss


class _Module(LightningModule):
    """A weight for each sample. The loss is the mean of the batch's weights, so their gradients are what they count."""

    note: Any

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        most = max(data.first + data.samples for data in case.train.loaders)
        self.weights = torch.nn.Parameter(torch.zeros(max(1, most)))
        self.validations = self.validated = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_from("training_step", batch, batch_idx)
        return self.weights[_samples_of(batch)].mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        values = self.case.values
        self.validated += 1
        if dataloader_idx == 0:
            self.log("val", values[self.validations % len(values)], add_dataloader_idx=False)
        self.log_from("validation_step", batch, batch_idx)

    def log_from(self, hook: str, batch: Any, batch_idx: int) -> None:
        names = ("on_step", "on_epoch", "reduce_fx", "batch_size", "logger", "prog_bar")
        for call in self.case.logs:
            if call.hook == hook and (batch_idx + 1) % call.every == 0:
                options: dict[str, Any] = {name: getattr(call, name) for name in names}
                self.log(call.name, _samples_of(batch).float().mean(), **options)

    def configure_optimizers(self) -> Any:
        optimizer = _SGD(self.parameters(), lr=RATE)
        optimizer.note = self.note
        given = [_scheduler(optimizer, one) for one in self.case.schedulers]
        return ([optimizer], given) if given else optimizer


def _scheduler(optimizer: Any, given: Scheduler) -> dict[str, Any]:
    options: dict[str, Any] = {"interval": given.interval, "frequency": given.frequency, "strict": given.strict}
    if given.plateau:
        scheduler: Any = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.0, eps=0.0)
        return {"scheduler": scheduler, "monitor": given.monitor, **options}
    return {"scheduler": ExponentialLR(optimizer, 0.5), **options}


def _module(case: Case, it: Recorded) -> Any:
    module: Any = type("Module", (_Module,), {name: _recorded(_Module, "M", name, it) for name in METHODS})(case)
    module.note = lambda *event: it.events.append(_event(module.recording_trainer, *event))
    return module


# ---- callbacks and loggers


def _savers(case: Case, folder: str) -> list[Any]:
    savers = []
    for given in (case.checkpoints, case.second):
        if given is None:
            continue
        options = {**vars(given)}
        del options["folder"]
        if given.every_n_train_steps is not None:
            del options["every_n_epochs"]
        savers.append(ModelCheckpoint(f"{folder}/{given.folder}", **options))
    return savers


def _callback(case: Case, it: Recorded, savers: list[Any]) -> Any:
    class Acting(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == case.stop_at:
                trainer.should_stop = True

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            module.validations += not trainer.sanity_checking and bool(module.validated)
            module.validated = 0

    wrapped = {name: _recorded(Acting, "C", name, it, savers) for name in CALLBACKS}
    return type("RecordedCallback", (Acting,), wrapped)()


class Rows(Logger):
    """Records the rows that it gets."""

    def __init__(self, it: Recorded) -> None:
        super().__init__()
        self.it = it
        self.trainer: Any = None

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.it.events.append(_event(self.trainer, "L", "log", step, rounded(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


def _disk(saver: Any) -> tuple[Any, ...]:
    """Return the steps of the checkpoints that are there, of the best one with its score, and of the last one."""
    there = {step_of(str(path)) for path in Path(saver.dirpath or "").glob("*.ckpt")}
    score = None if saver.best_model_score is None else comparable(float(saver.best_model_score))
    return (
        tuple(sorted(step or 0 for step in there)),
        step_of(saver.best_model_path),
        score,
        step_of(saver.last_model_path),
    )


def step_of(path: str) -> int | None:
    """Return the global step in a checkpoint; None where there is none."""
    if not path or not Path(path).exists():
        return None
    return torch.load(path, weights_only=False)["global_step"]


def _event(trainer: Any, owner: str, name: str, *args: Any) -> Event:
    if name == "configure_callbacks":
        return Event(owner, name, args, 0, 0)
    metrics = rounded({name: float(value) for name, value in trainer.callback_metrics.items()})
    return Event(owner, name, args, trainer.global_step, trainer.current_epoch, metrics)


def _recorded(base: type, owner: str, name: str, it: Recorded, savers: list[Any] | None = None) -> Any:
    """Override a method by one that records its call, and then does what it does."""
    function = getattr(base, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = args[0] if owner == "C" else self.recording_trainer
        seen = _plain(name, (*(args[2:] if owner == "C" else args), *kwargs.values()))
        if name == "optimizer_step":  # the closure, with forward and backward, runs inside
            result = function(self, *args, **kwargs)
            it.events.append(_event(trainer, owner, name, *seen))
            return result
        it.events.append(_event(trainer, owner, name, *seen))
        for saver in savers or [] if owner == "C" and name in LOOKS else []:
            it.events.append(_event(trainer, "D", "disk", *_disk(saver)))
        if name == "on_train_epoch_start" and trainer.current_epoch > MOST_EPOCHS:
            raise Endless
        return function(self, *args, **kwargs)

    if name in ("training_step", "validation_step"):  # Lightning asks for their arguments' names
        method.__wrapped__ = function  # pyright: ignore[reportFunctionMemberAccess]
    return method


def _plain(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a hook's arguments as the model has them: no outputs, losses, optimizers, devices and loader numbers."""
    if name in ("on_before_backward", "backward", "configure_gradient_clipping", "on_exception"):
        return ()
    if name == "lr_scheduler_step":
        return (None if args[1] is None else comparable(float(args[1])),)
    if name.endswith("_batch_end"):
        args = (*(["loss"] if "train" in name else []), *args[1:])
    return tuple(_batch(arg) for arg in args if isinstance(arg, torch.Tensor | int | str | list | tuple | dict))


def _batch(value: Any) -> Any:
    """Return a batch, or the batches of several loaders, as the model has it."""
    if isinstance(value, torch.Tensor):
        return tuple(value.tolist())
    if isinstance(value, dict):
        value = list(value.values())
    return tuple(map(_batch, value)) if isinstance(value, list | tuple) else value


def _samples_of(batch: Any) -> torch.Tensor:
    return torch.tensor(samples_of(_batch(batch)), dtype=torch.long)
