"""The Trainer's arguments: every value and every combination is checked here, before anything is built."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch

from instep.callbacks.base import Callback
from instep.data.base import UNEVEN
from instep.errors import SettingError, one_of
from instep.loggers.base import Logger
from instep.state.device import KINDS, find_device_kind
from instep.strategies import Strategy
from instep.strategies.precision import check_device, check_tf32, precision_name
from instep.strategies.registry import check_name
from instep.utils.duration import parse_duration
from instep.utils.env import VARIABLES, asked, variable_of
from instep.utils.paths import local_path

DEFAULT_MAX_EPOCHS = 1000

NOT_TAKEN_OVER: dict[str, str] = {
    "plugins": "use precision=... and strategy=...; torchrun's environment is read by itself",
    "profiler": "torch.profiler around fit, or in a callback's hooks",
    "enable_autolog_hparams": "save_hyperparameters(logger=False) keeps them out of the loggers",
    "model_registry": "upload the checkpoint folder, or export plain safetensors from it",
    "suggest_integrations": "instep suggests nothing; leave it out",
    "gpus": "use accelerator='gpu', devices=...",
    "tpu_cores": "use accelerator='xla', devices=...",
    "num_processes": "use devices=...",
    "resume_from_checkpoint": "use trainer.fit(..., ckpt_path=...)",
    "checkpoint_callback": "use enable_checkpointing=... or callbacks=[ModelCheckpoint(...)]",
    "replace_sampler_ddp": "use use_distributed_sampler=...",
    "auto_lr_find": "try learning rates in a loop of short fits",
    "auto_scale_batch_size": "use global_batch_size=... with a loader batch_size that fits in memory",
    "gradient_accumulation_steps": "use accumulate_grad_batches=...",
    "max_grad_norm": "use gradient_clip_val=...",
    "mixed_precision": "use precision='bf16-mixed' or '16-mixed'",
}

"""Arguments of other trainers that instep does not have, and what to do instead."""

ACCELERATORS = ("auto", "gpu", *KINDS)


def wrong(field: str, got: Any, expected: str) -> SettingError:
    """The error for a value of the wrong type or out of range."""
    return SettingError(f"{field}={got!r}: expected {expected}.", field=field, got=got)


def is_int(value: Any) -> bool:
    """An integer, numpy's too, but not a bool: `max_steps=True` is a slip, not one step."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """A real number that is not a bool and not NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and value == value


def flag(field: str, value: Any) -> bool:
    """Check for True or False; nothing else counts as one."""
    if not isinstance(value, bool):
        raise wrong(field, value, "True or False")
    return value


def at_least(least: int, meaning: str = "") -> Callable[[str, Any], int]:
    """Make a check for an integer of at least `least`; `meaning` explains the special value in the error."""

    def check(field: str, value: Any) -> int:
        if not is_int(value) or value < least:
            raise wrong(field, value, f"an integer of at least {least}{meaning and f' ({meaning})'}")
        return int(value)

    return check


def limit(field: str, value: Any) -> int | float:
    """Check a limit of batches: an int counts them, a float is a fraction, so 1 is one batch and 1.0 is all."""
    if is_int(value) and value >= 0:
        return int(value)
    if isinstance(value, float) and 0.0 <= value <= 1.0:
        return value
    hint = f"; for {int(value)} batches write {int(value)}" if isinstance(value, float) and value.is_integer() else ""
    raise wrong(field, value, f"a number of batches (int, 0 or more) or a fraction (float, 0.0 to 1.0){hint}")


def val_check_interval(field: str, value: Any) -> int | float | timedelta:
    """Check an interval: a fraction of the epoch (float), a number of training batches (int), or a wall time."""
    if is_int(value) and value >= 1:
        return int(value)
    if isinstance(value, float) and 0.0 < value <= 1.0:
        return value
    if isinstance(value, str | timedelta | Mapping):
        return parse_duration(field, value)
    raise wrong(
        field,
        value,
        "training batches (int, at least 1), a fraction of the epoch (float, above 0.0 to 1.0) or a time "
        "('DD:HH:MM:SS', timedelta or dict). limit_val_batches=0 turns validation off",
    )


def clip_value(field: str, value: Any) -> float:
    """Check for a positive number."""
    if not is_number(value) or value <= 0:
        raise wrong(field, value, "a number above 0, or None for no clipping")
    return float(value)


def seconds(field: str, value: Any) -> float:
    """Check for a positive number of seconds; infinity for no limit."""
    if not is_number(value) or value <= 0:
        raise wrong(field, value, "a number of seconds above 0, or float('inf') for no limit")
    return float(value)


def choice(*allowed: str) -> Callable[[str, Any], str]:
    """Make a check for one of a few names."""

    def check(field: str, value: Any) -> str:
        if value not in allowed:
            raise one_of(field, value, allowed)
        return value

    return check


def accelerator(field: str, value: Any) -> str:
    """Check for a known accelerator."""
    if value not in ACCELERATORS:
        raise one_of(field, value, ACCELERATORS)
    return value


def devices(field: str, value: Any) -> int | str | tuple[int, ...]:
    """Check devices: a count (an int, -1 for all, "auto"), or indices (a list, or a str with commas)."""
    given = value
    if isinstance(value, str):
        value = value.strip()
        if value == "auto":
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(re.fullmatch(r"-?\d+", part) for part in parts if part):
            raise wrong(field, given, "'auto', a number, -1 for all, or a list of device indices")
        numbers = [int(part) for part in parts if part]
        value = numbers if "," in value or not numbers else numbers[0]
    if is_int(value) and (value >= 1 or value == -1):
        return int(value)
    if is_int(value) and value == 0:
        raise wrong(field, given, "at least one device; to train without a GPU use accelerator='cpu'")
    if isinstance(value, list | tuple) and value and all(is_int(index) and index >= 0 for index in value):
        if len(set(value)) != len(value):
            raise wrong(field, given, "device indices that differ")
        return tuple(int(index) for index in value)
    raise wrong(field, given, "'auto', a number, -1 for all, or a list of device indices")


def deterministic(field: str, value: Any) -> bool | str:
    """Check for True, False or "warn"."""
    if value == "warn" or isinstance(value, bool):
        return value
    raise wrong(field, value, "True, False or 'warn'")


def folder(field: str, value: Any) -> Path:
    """Check for a folder on a file system of this machine."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise wrong(field, value, "the path of a folder")
    if "://" in str(value):
        raise wrong(field, value, "the path of a folder; checkpoints may go to a URL, by ModelCheckpoint(dirpath=...)")
    return local_path(value)


def plugins(kind: type) -> Callable[[str, Any], tuple[Any, ...]]:
    """Make a check for one object of a class, or a list of them; the check returns a tuple."""

    def check(field: str, value: Any) -> tuple[Any, ...]:
        items = tuple(value) if isinstance(value, list | tuple | set) else (value,)
        for item in items:
            if isinstance(item, type):
                raise wrong(field, item, f"an object, not the class: write {item.__name__}()")
            if not isinstance(item, kind):
                raise wrong(field, item, f"an instep {kind.__name__} or a list of them, got a {type(item).__name__}")
        return items

    return check


@dataclass(frozen=True)
class Settings:
    """The Trainer's arguments in their resolved form; `resolve` makes it.

    Args:
        accelerator: auto, cpu, gpu, cuda, mps, xpu, hpu, npu or xla.
        strategy: a name or an `instep.Strategy`.
        devices: a count, -1 for all, indices, or "auto".
        num_nodes: machines.
        precision: 32-true, bf16-mixed, 16-mixed, 64-true, bf16-true, 16-true or fp8.
        logger: True for the default logger, else a tuple of loggers, which may be empty.
        callbacks: a tuple.
        fast_dev_run: batches of a trial run; 0 for a normal one.
        max_epochs: -1 for no limit.
        min_epochs: no early stop before so many epochs.
        max_steps: in optimizer steps; -1 for no limit.
        min_steps: no early stop before so many optimizer steps.
        max_time: training stops after it.
        limit_train_batches: an int counts batches, a float is a fraction: 1 is one batch, 1.0 is all.
        limit_val_batches: the same for each validation loader; 0 turns validation off.
        limit_test_batches: the same for each test loader.
        limit_predict_batches: the same for each predict loader.
        overfit_batches: train and validate on so much of the data, in a fixed order; 0.0 is off.
        val_check_interval: validate every fraction of an epoch (float), every so many training batches (int), or
            every so much time.
        check_val_every_n_epoch: validate in every n-th epoch; None counts `val_check_interval` across epochs.
        num_sanity_val_steps: validation batches before training; -1 for all.
        log_every_n_steps: how often step metrics reach the loggers, in optimizer steps; 0 for never.
        enable_checkpointing: whether there is a ModelCheckpoint by default.
        enable_progress_bar: whether there is a progress bar.
        enable_model_summary: whether the layers are listed before training.
        accumulate_grad_batches: micro-batches per optimizer step.
        gradient_clip_val: None clips nothing.
        gradient_clip_algorithm: `norm` or `value`.
        deterministic: True, False or "warn", for torch.use_deterministic_algorithms.
        benchmark: torch.backends.cudnn.benchmark; None leaves it.
        tf32: whether float32 products are computed in TF32; None leaves it as the program set it.
        inference_mode: whether evaluation runs in torch.inference_mode rather than no_grad.
        use_distributed_sampler: whether loaders are sharded over processes.
        uneven: what happens where ranks have different numbers of batches: stop, join or error.
        sync_batchnorm: whether BatchNorm layers see the batch of all processes.
        detect_anomaly: torch.autograd.set_detect_anomaly.
        barebones: nothing but the loop: no logging, checkpoints, bar, summary or sanity check.
        reload_dataloaders_every_n_epochs: 0 for never.
        default_root_dir: the folder under which run folders are made.
        global_batch_size: samples per optimizer step over all processes; the batch size per process and the
            accumulation follow from it.
        trigger_every: steps between agreements on triggers; None lets the run choose.
        seed_samples: whether random augmentation is seeded by (seed, epoch, sample index).
        nonfinite: what is done about a loss or gradient that is nan or inf: stop, skip, continue, or None for nothing.
        grace_period_s: seconds from a signal to the end of the process, saved or not.
        hang_timeout_s: seconds without a step that are a hang; None: nobody watches.
    """

    accelerator: str = "auto"
    strategy: str | Strategy = "auto"
    devices: int | str | tuple[int, ...] = "auto"
    num_nodes: int = 1
    precision: str = "32-true"
    logger: bool | tuple[Logger, ...] = True
    callbacks: tuple[Callback, ...] = ()
    fast_dev_run: int = 0
    max_epochs: int = DEFAULT_MAX_EPOCHS
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: timedelta | None = None
    limit_train_batches: int | float = 1.0
    limit_val_batches: int | float = 1.0
    limit_test_batches: int | float = 1.0
    limit_predict_batches: int | float = 1.0
    overfit_batches: int | float = 0.0
    val_check_interval: int | float | timedelta = 1.0
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int = 2
    log_every_n_steps: int = 50
    enable_checkpointing: bool = True
    enable_progress_bar: bool = True
    enable_model_summary: bool = True
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    deterministic: bool | str = False
    benchmark: bool | None = None
    tf32: bool | None = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    uneven: str = "stop"
    sync_batchnorm: bool = False
    detect_anomaly: bool = False
    barebones: bool = False
    reload_dataloaders_every_n_epochs: int = 0
    default_root_dir: Path = field(default_factory=Path.cwd)
    global_batch_size: int | None = None
    trigger_every: int | None = None
    seed_samples: bool = False
    nonfinite: str | None = None
    grace_period_s: float = 30.0
    hang_timeout_s: float | None = None


def resolve(**given: Any) -> Settings:
    """Check the Trainer's arguments and bring them into their resolved form.

    Args:
        given: any of the fields of `Settings`. None means what the setting's variable says (`INSTEP_PRECISION`, see
            `instep.utils.env`), else the default; except for `check_val_every_n_epoch`.

    Raises:
        SettingError: an unknown name, a wrong value, or two values that contradict each other.

    Example:
        >>> settings = resolve(max_steps=100, precision="bf16", accelerator="cpu")
        >>> settings.precision, settings.max_epochs
        ('bf16-mixed', -1)
    """
    reject_unknown(given)
    values = {name: check_value(name, value) for name, value in given.items() if value is not None}
    for name in VARIABLES:
        if name in _CHECKS and name not in values and (value := asked(name, _CHECKS[name])) is not None:
            values[name] = value
    if "global_batch_size" in values and given.get("accumulate_grad_batches") is None:
        _drop_accumulation(values)
    if "check_val_every_n_epoch" in given:
        values["check_val_every_n_epoch"] = given["check_val_every_n_epoch"]
    if "max_epochs" not in values and (values.get("max_steps", -1) != -1 or "max_time" in values):
        values["max_epochs"] = -1
    settings = Settings(**values)
    _check_device(settings)
    _check_loop(settings, values)
    if settings.barebones:
        settings = _bare(settings, values)
    if settings.fast_dev_run:
        settings = _trial(settings)
    return settings


def _drop_accumulation(values: dict[str, Any]) -> None:
    asked_for = values.pop("accumulate_grad_batches", None)
    if asked_for is not None:
        warnings.warn(
            f"{variable_of('accumulate_grad_batches')}={asked_for} has no effect: global_batch_size="
            f"{values['global_batch_size']} derives the accumulation by itself",
            stacklevel=5,
        )


def check_value(name: str, value: Any) -> Any:
    """One argument in its resolved form, whatever this machine and the other arguments are.

    Raises:
        SettingError: a wrong value.
    """
    return _CHECKS[name](name, value)


def reject_unknown(given: Mapping[str, Any]) -> None:
    """Raise for argument names that the Trainer does not have, with the replacement or the nearest name.

    Raises:
        SettingError: there is one.
    """
    problems = {}
    for name in given:
        if name in NOT_TAKEN_OVER:
            problems[name] = f"not an argument of instep's Trainer; {NOT_TAKEN_OVER[name]}"
        elif name not in _CHECKS:
            near = get_close_matches(name, _CHECKS, n=1)
            problems[name] = f"unknown{f' (did you mean {near[0]}?)' if near else ''}"
    if problems:
        listed = ". ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise SettingError(f"Trainer got arguments that it does not take. {listed}.", field=next(iter(problems)))


def _check_device(s: Settings) -> None:
    if find_device_kind(s.accelerator).name != "cpu":
        return
    check_device(s.precision, torch.device("cpu"))
    check_tf32(s.tf32, torch.device("cpu"))
    if s.devices == -1 or isinstance(s.devices, tuple):
        raise SettingError(
            f"devices={s.devices!r}: CPU processes have no indices. Give their number, as devices=2.",
            field="devices",
            got=s.devices,
        )


def _check_loop(s: Settings, given: Mapping[str, Any]) -> None:
    for least, most, unit in ((s.min_epochs, s.max_epochs, "epochs"), (s.min_steps, s.max_steps, "steps")):
        if least is not None and most != -1 and least > most:
            raise SettingError(f"min_{unit}={least} is more than max_{unit}={most}", field=f"min_{unit}", got=least)
    if s.check_val_every_n_epoch is None and isinstance(s.val_check_interval, float):
        raise SettingError(
            "check_val_every_n_epoch=None counts val_check_interval across epochs, so that must be a number of "
            f"training batches (int) or a time; got {s.val_check_interval!r}.",
            field="val_check_interval",
            got=s.val_check_interval,
        )
    if s.overfit_batches:
        both = [name for name in ("limit_train_batches", "limit_val_batches") if name in given]
        if both:
            raise SettingError(
                f"overfit_batches={s.overfit_batches!r} sets the limits of training and validation, but "
                f"{' and '.join(both)} was given too. Use one of them.",
                field=both[0],
            )
    if s.global_batch_size is not None and s.accumulate_grad_batches != 1:
        raise SettingError(
            f"global_batch_size={s.global_batch_size} derives the accumulation by itself, but "
            f"accumulate_grad_batches={s.accumulate_grad_batches} was given too. Use one of them.",
            field="accumulate_grad_batches",
            got=s.accumulate_grad_batches,
        )
    if "gradient_clip_algorithm" in given and s.gradient_clip_val is None:
        warnings.warn("gradient_clip_algorithm has no effect without gradient_clip_val", stacklevel=4)


def _bare(s: Settings, given: Mapping[str, Any]) -> Settings:
    off: dict[str, Any] = {
        "logger": (),
        "callbacks": (),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 0,
        "num_sanity_val_steps": 0,
        "fast_dev_run": 0,
        "detect_anomaly": False,
    }
    contradicting = [f"{name}={given[name]!r}" for name in off if name in given and given[name] != off[name]]
    if contradicting:
        raise SettingError(
            f"barebones=True turns these off, but they were asked for: {', '.join(contradicting)}. Leave them out, or "
            "barebones.",
            field="barebones",
        )
    return replace(s, **off)


def _trial(s: Settings) -> Settings:
    n = s.fast_dev_run
    return replace(
        s,
        max_steps=n,
        max_epochs=1,
        min_steps=None,
        min_epochs=None,
        limit_train_batches=n,
        limit_val_batches=n,
        limit_test_batches=n,
        limit_predict_batches=n,
        overfit_batches=0.0,
        val_check_interval=1.0,
        check_val_every_n_epoch=1,
        num_sanity_val_steps=0,
        logger=(),
        enable_checkpointing=False,
    )


def _strategy(name: str, value: Any) -> str | Strategy:
    if isinstance(value, Strategy):
        return value
    if isinstance(value, type):
        raise wrong(name, value, f"an object, not the class: write {value.__name__}()")
    if isinstance(value, str):
        check_name(value, name)
    return value


def _logger(name: str, value: Any) -> bool | tuple[Any, ...]:
    if isinstance(value, bool):
        return value or ()
    return plugins(Logger)(name, value)


def _fast_dev_run(name: str, value: Any) -> int:
    return int(value) if isinstance(value, bool) else at_least(0, "a number of batches")(name, value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "accelerator": accelerator,
    "strategy": _strategy,
    "devices": devices,
    "num_nodes": at_least(1),
    "precision": precision_name,
    "logger": _logger,
    "callbacks": plugins(Callback),
    "fast_dev_run": _fast_dev_run,
    "max_epochs": at_least(-1, "-1 for no limit"),
    "min_epochs": at_least(0),
    "max_steps": at_least(-1, "-1 for no limit"),
    "min_steps": at_least(0),
    "max_time": parse_duration,
    "limit_train_batches": limit,
    "limit_val_batches": limit,
    "limit_test_batches": limit,
    "limit_predict_batches": limit,
    "overfit_batches": limit,
    "val_check_interval": val_check_interval,
    "check_val_every_n_epoch": at_least(1, "or None"),
    "num_sanity_val_steps": at_least(-1, "-1 for all"),
    "log_every_n_steps": at_least(0, "0 for never"),
    "enable_checkpointing": flag,
    "enable_progress_bar": flag,
    "enable_model_summary": flag,
    "accumulate_grad_batches": at_least(1),
    "gradient_clip_val": clip_value,
    "gradient_clip_algorithm": choice("norm", "value"),
    "deterministic": deterministic,
    "benchmark": flag,
    "tf32": flag,
    "inference_mode": flag,
    "use_distributed_sampler": flag,
    "uneven": choice(*UNEVEN),
    "sync_batchnorm": flag,
    "detect_anomaly": flag,
    "barebones": flag,
    "reload_dataloaders_every_n_epochs": at_least(0, "0 for never"),
    "default_root_dir": folder,
    "global_batch_size": at_least(1),
    "trigger_every": at_least(1),
    "seed_samples": flag,
    "nonfinite": choice("stop", "skip", "continue"),
    "grace_period_s": seconds,
    "hang_timeout_s": seconds,
}
