"""Runs a case with instep's Trainer, and records what the model says of it: the same events."""

from __future__ import annotations

import csv
import inspect
import io
import os
import signal
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from instep import Callback, Trainer
from instep.callbacks import LearningRateMonitor
from instep.callbacks.base import HOOKS
from instep.distributed import signals
from instep.errors import InstepError, Preempted
from instep.loggers import CSVLogger, Logger
from instep.trainer.hooks import ModuleHooks
from instep.utils import atomic
from tests.model.run import LOOKS, VIEWS, Case, Settings
from tests.model.trace import Event, comparable, rounded
from tests.model_runs.loaders import SEED, loaders
from tests.model_runs.modules import Module, all_of, with_loaders
from tests.model_runs.saving import ask, callbacks_of, looks_at_disk
from tests.trainer.recorder import OPTIMIZATION

_UNSEEN = {"on_save_checkpoint", "on_load_checkpoint"}
_FEW = ("on_train_batch_end", "on_validation_end", "on_exception")
_STEPS = ("training_step", "validation_step")
_BATCHES = (*_STEPS, "on_train_batch_start", "on_validation_batch_start")
_NO_ARGUMENTS = ("on_before_backward", "backward", "configure_gradient_clipping")


def callback_hooks(watch: str) -> tuple[str, ...]:
    """Return the callback's hooks that are overridden, and so recorded."""
    return _FEW if watch == "few" else tuple(hook for hook in HOOKS if hook not in _UNSEEN)


def module_hooks(watch: str) -> tuple[str, ...]:
    """Return the module's methods that are recorded."""
    own = [name for name in vars(ModuleHooks) if not name.startswith("_") and not name.endswith("_dataloader")]
    all_of_them = [name for name in (*own, *OPTIMIZATION) if name not in _UNSEEN]
    return (*_STEPS, "configure_optimizers", *(all_of_them if watch == "all" else ()))


def is_recorded(event: Event, watch: str) -> bool:
    """Return whether the recorder sees an event of the model."""
    if event.owner in "OLF-" or event.name.endswith("_dataloader"):
        return True
    if event.owner == "S":
        return False
    if event.owner == "V":
        return event.name in callback_hooks(watch)
    if event.owner == "D":
        return watch != "few"
    return event.name in (callback_hooks(watch) if event.owner == "C" else module_hooks(watch))


class Broken(Exception):
    """What breaks a run off."""


def raise_broken(events: list[Event]) -> None:
    raise Broken


@dataclass(frozen=True)
class Ask:
    """Setting of a trigger in a run.

    Attributes:
        trigger: as in `tests.model.triggers`.
        at: the number of the event at which it is set.
        rank: the one that sets it.
    """

    trigger: str
    at: int
    rank: int = 0

    def set(self, trainer: Any) -> None:
        if self.trigger == "preempted":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.trigger == "stop":
            trainer.should_stop = True
        else:
            trainer.set_trigger(self.trigger)


class Events(list[Event]):
    """The events that were recorded; at the number `breaks_at` something breaks the run off."""

    breaks_at: int | None = None
    views = False
    ask_for: Ask | None = None
    trainer: Any = None
    how: Callable[[list[Event]], None] = staticmethod(raise_broken)

    def append(self, event: Event) -> None:
        super().append(event)
        if self.ask_for is not None and len(self) - 1 == self.ask_for.at:
            self.ask_for.set(self.trainer)
        if len(self) - 1 == self.breaks_at:
            self.how(list(self))

    def ask(self, name: str, trainer: Any, module: Any, ckpt_path: str) -> None:
        """Record which checkpoint an evaluation takes, and nothing else of it."""
        before = len(self)
        found = ask(trainer, module, ckpt_path)
        del self[before:]
        self.append(Event("-", name, (ckpt_path, found), 0, 0))


def record(
    case: Case,
    folder: str,
    breaks_at: int | None = None,
    ckpt_path: str | None = None,
    asks: tuple[str, ...] = (),
    rank: int = 0,
    how: Callable[[list[Event]], None] = raise_broken,
    loses_a_rank: bool = False,
    ask: Ask | None = None,
) -> list[Event]:
    """Run the case; its files go to the folder. Of several ranks each must be a process that calls this.

    Args:
        case: the run.
        folder: where its files go.
        breaks_at: the number of the event at which the run is broken off.
        ckpt_path: as `fit` takes it.
        asks: with which `ckpt_path` to call `validate` after the fit, and from another Trainer.
        rank: this process's.
        how: what breaks it off, given the events so far; by default an exception.
        loses_a_rank: another rank is broken off: with which error this one ends is left open.
        ask: what asks the run for something, on the rank that it names.
    """
    events = Events()
    table = None
    events.breaks_at, events.how, events.views = breaks_at, how, bool(case.logs)
    events.ask_for = ask if ask is not None and ask.rank == rank else None
    # A signal that a run has not acted on comes again at its end.
    handler = signal.signal(signal.SIGTERM, lambda *_: None) if ask is not None else None
    with (
        warnings.catch_warnings(),
        redirect_stdout(io.StringIO()),
        patch.object(atomic, "fsync", lambda fd: None),
        patch.object(signals, "_tell", lambda text: None),
    ):
        warnings.simplefilter("ignore")
        torch.manual_seed(SEED)
        try:
            train = val = None
            if case.source != "hooks":
                train, val = loaders(case.train, rank, case.ranks), loaders(case.val, rank, case.ranks)
            module: Any = make_module(case, events, rank)
            rows = Rows(events if rank == 0 else [])
            callbacks = [make_callback(case, events, rank), *rate_monitors(case), *callbacks_of(case, folder)]
            callbacks[0].module = module
            table = CSVLogger()
            trainer = Trainer(**arguments(case, folder), logger=[rows, table], callbacks=callbacks)
            module.recording_trainer = rows.trainer = events.trainer = trainer
            trainer.fit(module, train, val, ckpt_path=ckpt_path)
            events.append(Event("F", "csv", rows_of(table), 0, 0))
            for which in asks:
                events.ask("validate", trainer, module, which)
            for which in asks:
                other = Trainer(**arguments(case, folder), logger=False, callbacks=callbacks_of(case, folder))
                events.ask("validate again", other, module, which)
        except Broken:
            pass
        except (Exception, Preempted) as error:
            if not isinstance(error, InstepError | Preempted) and not loses_a_rank:
                raise
            last = events[-1] if events else Event("-", "", (), 0, 0)
            events.append(Event("F", "csv", () if table is None else rows_of(table), 0, 0))
            events.append(last._replace(owner="-", name="error", args=(type(error).__name__,)))
        finally:
            if handler is not None:
                signal.signal(signal.SIGTERM, handler)
    return events


def rows_of(table: CSVLogger) -> tuple[Any, ...]:
    """Read the rows of a CSV file: the step and the values of the cells that are filled."""
    if table.path is None or not table.path.exists():
        return ()
    with table.path.open(newline="") as file:
        return tuple(
            (int(row.pop("step")), rounded({name: float(cell) for name, cell in row.items() if cell}))
            for row in csv.DictReader(file)
        )


def arguments(case: Case, folder: str) -> dict[str, Any]:
    """Return the Trainer's arguments."""
    parts = (*case.train.loaders, *(() if case.val is None else case.val.loaders))
    defaults = vars(Settings())  # 1 is one batch, and 1.0 is all
    given = {name: value for name, value in vars(case.settings).items() if repr(value) != repr(defaults[name])}
    return {
        **given,
        "accelerator": "cpu",
        "devices": case.ranks,
        **({} if case.ranks == 1 else {"strategy": "ddp"}),
        "trigger_every": 1,
        **({"use_distributed_sampler": False} if any(one.kind == "parted" for one in parts) else {}),
        "enable_checkpointing": case.checkpoints is not None,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }


# ---- module and callback


def make_module(case: Case, events: Events, rank: int = 0) -> Module:
    """Make the module, with as many of its hooks overridden and recorded as the case says."""
    recorded = module_hooks(case.watch)
    logs = {call.hook for call in case.logs} | {"training_step", "validation_step"}
    wrapped = {name: _recorded(Module, "M", name, events if name in recorded else None) for name in (*recorded, *logs)}
    base: type[Module] = Module
    if case.source != "fit":
        base = with_loaders(case, rank)
        names = ("train_dataloader", *(["val_dataloader"] if case.val is not None else []))
        wrapped |= {name: _recorded(base, "M", name, events) for name in names}
    module: Any = type("RecordedModule", (base,), wrapped)(case)
    module.record = lambda *args: events.append(_event(module.recording_trainer, *args))
    return module


def rate_monitors(case: Case) -> list[Callback]:
    """Make the LearningRateMonitor of a case, if it has one."""
    given: Any = case.rate_monitor
    return [] if given is None else [LearningRateMonitor(None if given == "each" else given)]


def make_callback(case: Case, events: Events, rank: int) -> Any:
    """Make the callback. It counts the validations, and asks to stop where the case says so."""

    class Acting(Callback):
        module: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"validations": 0 if self.module is None else self.module.validations}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.module.validations = state_dict["validations"]

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == case.stop_at and case.stop_on in (None, rank):
                trainer.should_stop = True

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            module.validations += not trainer.sanity_checking and module.validated
            module.validated = False

    wrapped = {name: _recorded(Acting, "C", name, events) for name in callback_hooks(case.watch)}
    return type("RecordedCallback", (Acting,), wrapped)()


class Rows(Logger):
    """Records the rows that it gets."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__(name="rows")
        self.events = events
        self.trainer: Any = None

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.events.append(_event(self.trainer, "L", "log", step, rounded(metrics)))


def _event(trainer: Any, owner: str, name: str, *args: Any) -> Event:
    if name == "configure_callbacks":  # where a checkpoint may set another position, none can be read
        return Event(owner, name, args, 0, 0)
    log = trainer._log  # what callback_metrics shows, without tensors, which cost half of the time
    if log is not None and log.buffer:
        log.drain()
    shown = {**trainer.metrics.callback, **({} if log is None else log.callback_values)}
    metrics = rounded({name: float(value) for name, value in shown.items()})
    return Event(owner, name, args, trainer.global_step, trainer.current_epoch, metrics)


def _recorded(base: type, owner: str, name: str, events: Events | None) -> Any:
    """Override a method by one that records its call, does what it does, and logs what the case logs in it.

    Args:
        base: the class that has the method.
        owner: as in `Event`.
        name: of the method.
        events: where it is recorded; None: it only logs.
    """
    function = getattr(base, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = args[0] if owner == "C" else self.recording_trainer
        seen = _plain(name, (*(args[2:] if owner == "C" else args), *kwargs.values()))
        first = name == "optimizer_step"  # the closure, with forward and backward, runs inside
        result = function(self, *args, **kwargs) if first else None
        if owner == "M" and name in _BATCHES:
            self.batch, self.batch_idx = all_of(args[0]), args[1]
        if events is not None:
            events.append(_event(trainer, owner, name, *seen))
            looks = owner == "C" and name in LOOKS and trainer.is_global_zero
            for look in looks_at_disk(trainer) if looks else ():
                events.append(_event(trainer, "D", "disk", *look))
            if owner == "C" and name in VIEWS and events.views:
                events.append(_event(trainer, "V", name, *views(trainer)))
        if owner == "M":
            self.log_from(name)
        return result if first else function(self, *args, **kwargs)

    method.__signature__ = inspect.signature(function)  # pyright: ignore[reportFunctionMemberAccess]
    method.__name__ = name
    return method


def views(trainer: Trainer) -> tuple[Any, ...]:
    """Return what `logged_metrics` and `progress_bar_metrics` show."""
    bar = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
    return rounded({name: float(value) for name, value in trainer.logged_metrics.items()}), rounded(bar)


def _samples(batch: Any) -> Any:
    """Return a batch as the model has it."""
    if isinstance(batch, torch.Tensor):
        return tuple(batch.tolist())
    parts = batch.values() if isinstance(batch, dict) else batch
    return tuple(None if part is None else _samples(part) for part in parts)


def _plain(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a hook's arguments as the model has them: no outputs, losses, optimizers and devices."""
    if name in _NO_ARGUMENTS:
        return ()
    if name == "lr_scheduler_step":
        return (None if args[1] is None else comparable(float(args[1])),)
    if name.endswith("_batch_end"):
        args = (*([_shown(args[0])] if "train" in name else []), *args[1:])
    kept: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor | dict | list):
            kept.append(_samples(arg))
        elif isinstance(arg, BaseException):
            kept.append(type(arg).__name__)
        elif isinstance(arg, int | str):
            kept.append(arg)
    return tuple(kept)


def _shown(outputs: Any) -> str:
    """Return what a hook gets as outputs."""
    if not isinstance(outputs, dict):
        return str(outputs)
    return ", ".join(name if name == "loss" else f"{name}={value}" for name, value in outputs.items())
