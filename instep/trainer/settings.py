"""The Trainer's arguments: every value and every combination is checked here, before anything is built."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_args

import torch

from instep.callbacks.base import Callback
from instep.data.base import UNEVEN
from instep.data.config import LIMIT, STREAMS
from instep.errors import SettingError
from instep.loggers.base import Logger
from instep.profilers.base import Profiler, ProfilerName
from instep.state.device import KINDS, find_device_kind
from instep.strategies import Strategy
from instep.strategies.precision import check_device, check_tf32, precision_name
from instep.strategies.registry import check_name
from instep.utils.checks import (
    DEVICES,
    FLAG,
    SECONDS,
    Check,
    at_least,
    check_object,
    checks_of,
    choice,
    constructor_call,
    is_int,
    is_number,
    parse_duration,
    wrong,
)
from instep.utils.env import VARIABLES, from_env, variable_of
from instep.utils.paths import local_path
from instep.utils.warn import warn_user

DEFAULT_MAX_EPOCHS = 1000


def _limit(field: str, value: Any) -> int | float:
    """Check a limit of batches: a number (int) or a fraction (float).

    A whole number above 1 that is given as a float is refused, since it probably means a number of batches.
    """
    if isinstance(value, float) and value.is_integer() and value > 1:
        raise wrong(field, value, f"{LIMIT.expected}; for {int(value)} batches write {int(value)}")
    return LIMIT(field, value)


def _val_check_interval(field: str, value: Any) -> int | float | timedelta:
    """Check an interval of validations: a fraction of the epoch (float), a number of batches (int), or a time."""
    if is_int(value, 1):
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


_CLIP = Check(
    lambda value: is_number(value) and value >= 0,
    "a number above 0, or None or 0 for no clipping",
    lambda value: float(value) or None,
    float,
    {"type": "number", "minimum": 0},
)
_DETERMINISTIC = Check(lambda value: value == "warn" or isinstance(value, bool), "True, False or 'warn'")


def _folder(field: str, value: Any) -> Path:
    """Check that a value is the path of a folder on this machine, and not a URL."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise wrong(field, value, "the path of a folder")
    if "://" in str(value):
        raise wrong(field, value, "the path of a folder; checkpoints may go to a URL, by ModelCheckpoint(dirpath=...)")
    return local_path(value)


def _plugins(kind: type) -> Callable[[str, Any], tuple[Any, ...]]:
    """Make a check that accepts one object of a class, or a list of such objects, and returns a tuple."""

    def check(field: str, value: Any) -> tuple[Any, ...]:
        items = tuple(value) if isinstance(value, list | tuple | set) else (value,)
        return tuple(check_object(field, item, kind, "a list of objects, each ") for item in items)

    return check


check_callbacks = _plugins(Callback)


def _strategy(name: str, value: Any) -> str | Strategy:
    if isinstance(value, Strategy):
        return value
    if isinstance(value, type):
        raise wrong(name, value, f"an object, not the class: write {constructor_call(value)}")
    if isinstance(value, str):
        return check_name(value, name)
    return value


_ONE_FILE = ("CSVLogger", "JSONLinesLogger")  # loggers that use the same file name in every folder


def _logger(name: str, value: Any) -> bool | tuple[Any, ...]:
    if isinstance(value, bool):
        return value or ()
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple | set):
        from instep.loggers import logger_class  # imported late: not every run names its loggers

        value = [logger_class(one)() if isinstance(one, str) else one for one in value]
        kinds = [type(one) for one in value if type(one).__name__ in _ONE_FILE and getattr(one, "save_dir", 0) is None]
        if len(kinds) > len(set(kinds)):
            twice = next(kind.__name__ for kind in kinds if kinds.count(kind) > 1)
            text = f"logger: two {twice} would write the same file; give one of them a save_dir and a name"
            raise SettingError(text, field=name, got=value)
    elif not isinstance(value, Logger | type):
        raise wrong(name, value, "True, False, a name such as 'csv' or 'mlflow', an instep Logger, or a list of these")
    return _plugins(Logger)(name, value)


def _profiler(name: str, value: Any) -> str | Profiler:
    if isinstance(value, Profiler):
        return value
    names = get_args(ProfilerName)
    if not isinstance(value, str):
        return check_object(name, value, Profiler, f"a name ({', '.join(names)}) or ")
    return choice(*names)(name, value.lower())


def _compile(name: str, value: Any) -> Any:
    from instep.compile import resolve_compile  # imported late: few runs are compiled

    return resolve_compile(name, value)


def _fast_dev_run(name: str, value: Any) -> bool | int:
    return value if isinstance(value, bool) else at_least(0, "a number of batches")(name, value)


def _sizes(value: Any) -> dict[int, int]:
    """Return a dict, sorted by step, from a step to the batch size that is used from this step on.

    Keys and values may be texts, as in a JSON file, and become numbers.
    """
    return dict(sorted((int(step), int(size)) for step, size in value.items()))


def _holds(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return is_int(value, 1)
    known = all((is_int(step, 0) or (isinstance(step, str) and step.isdigit())) for step in value)
    return known and all(is_int(size, 1) for size in value.values()) and 0 in _sizes(value)


_NAME = Check(
    lambda value: isinstance(value, str) and value.strip() != "" and len(value) <= 200 and value.isprintable(),
    "a text of one line, of at most 200 characters, that is not blank",
    schema={"type": "string", "maxLength": 200},
)
_global_batch_size = Check(
    _holds,
    "an integer of at least 1, or such sizes by the optimizer step from which they hold, 0 among them, as "
    "{0: 64, 1000: 256}",
    lambda value: _sizes(value) if isinstance(value, Mapping) else int(value),
)


@dataclass(frozen=True)
class Settings:
    """Arguments of the Trainer in their resolved form, each with its check. `Trainer` describes them."""

    accelerator: Annotated[str, choice("auto", "gpu", *KINDS)] = "auto"
    strategy: Annotated[str | Strategy, _strategy] = "auto"
    devices: Annotated[int | str | tuple[int, ...], DEVICES] = "auto"
    num_nodes: Annotated[int, at_least(1)] = 1
    precision: Annotated[str, precision_name] = "32-true"
    logger: Annotated[bool | tuple[Logger, ...], _logger] = True
    profiler: Annotated[str | Profiler | None, _profiler] = None
    callbacks: Annotated[tuple[Callback, ...], check_callbacks] = ()
    fast_dev_run: Annotated[bool | int, _fast_dev_run] = False
    max_epochs: Annotated[int, at_least(-1, "-1 for no limit")] = DEFAULT_MAX_EPOCHS
    min_epochs: Annotated[int | None, at_least(0)] = None
    max_steps: Annotated[int, at_least(-1, "-1 for no limit")] = -1
    min_steps: Annotated[int | None, at_least(0)] = None
    max_time: Annotated[timedelta | None, parse_duration] = None
    limit_train_batches: Annotated[int | float, _limit] = 1.0
    limit_val_batches: Annotated[int | float, _limit] = 1.0
    limit_test_batches: Annotated[int | float, _limit] = 1.0
    limit_predict_batches: Annotated[int | float, _limit] = 1.0
    overfit_batches: Annotated[int | float, _limit] = 0.0
    val_check_interval: Annotated[int | float | timedelta, _val_check_interval] = 1.0
    check_val_every_n_epoch: Annotated[int | None, at_least(1, "or None")] = 1
    num_sanity_val_steps: Annotated[int, at_least(-1, "-1 for all")] = 2
    log_every_n_steps: Annotated[int, at_least(0, "0 for never")] = 50
    enable_checkpointing: Annotated[bool, FLAG] = True
    enable_progress_bar: Annotated[bool, FLAG] = True
    enable_model_summary: Annotated[bool, FLAG] = True
    accumulate_grad_batches: Annotated[int, at_least(1)] = 1
    gradient_clip_val: Annotated[float | None, _CLIP] = None
    gradient_clip_algorithm: Annotated[str, choice("norm", "value")] = "norm"
    deterministic: Annotated[bool | str, _DETERMINISTIC] = False
    benchmark: Annotated[bool | None, FLAG] = None
    tf32: Annotated[bool | None, FLAG] = None
    compile: Annotated[Any, _compile] = None
    cuda_graphs: Annotated[bool, FLAG] = False
    gc_every_n_steps: Annotated[int | None, at_least(1, "or None")] = None
    inference_mode: Annotated[bool, FLAG] = True
    use_distributed_sampler: Annotated[bool, FLAG] = True
    uneven: Annotated[str, choice(*UNEVEN)] = "stop"
    streams: Annotated[str, choice(*STREAMS)] = "auto"
    sync_batchnorm: Annotated[bool, FLAG] = False
    detect_anomaly: Annotated[bool, FLAG] = False
    barebones: Annotated[bool, FLAG] = False
    reload_dataloaders_every_n_epochs: Annotated[int, at_least(0, "0 for never")] = 0
    default_root_dir: Annotated[Path, _folder] = field(default_factory=Path.cwd)
    global_batch_size: Annotated[int | dict[int, int] | None, _global_batch_size] = None
    trigger_every: Annotated[int | None, at_least(1)] = None
    seed_samples: Annotated[bool, FLAG] = False
    nonfinite: Annotated[str | None, choice("stop", "skip", "continue")] = None
    grace_period_s: Annotated[float, SECONDS] = 30.0
    hang_timeout_s: Annotated[float | None, SECONDS] = None
    name: Annotated[str | None, _NAME] = None

    def limit_name(self, stage: str) -> str:
        """Return the name of the setting that limits the batches of a stage: "train", "val", "test" or "predict"."""
        return "overfit_batches" if self.overfit_batches and stage in ("train", "val") else f"limit_{stage}_batches"

    def limit(self, stage: str) -> int | float:
        """Return the limit of a stage's batches: `overfit_batches` if it is set and concerns the stage."""
        return getattr(self, self.limit_name(stage))


_CHECKS = checks_of(Settings)


def resolve(**given: Any) -> Settings:
    """Check the Trainer's arguments and bring them into their resolved form.

    Args:
        given: any fields of `Settings`. None means the value of the setting's environment variable (such as
            `INSTEP_PRECISION`, see `instep.utils.env`), or else the default. `check_val_every_n_epoch` is the only
            argument for which None is a value of its own.

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
        if name in _CHECKS and name not in values and (value := from_env(name, _CHECKS[name])) is not None:
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


_FIXED = frozenset(
    {
        "accelerator", "barebones", "callbacks", "default_root_dir", "devices", "enable_checkpointing",
        "enable_model_summary", "enable_progress_bar", "fast_dev_run", "logger", "max_time", "num_nodes", "precision",
        "strategy", "sync_batchnorm",
    }
)  # fmt: skip
ATTRIBUTES = frozenset(field.name for field in fields(Settings)) - {"strategy", "logger", "callbacks", "profiler"}
"""Arguments of the Trainer for which `trainer.<name> = ...` calls `change`, which refuses those in `_FIXED`."""


def no_attribute(name: str) -> AttributeError:
    """Return the error for an attribute that the Trainer does not have, with a hint if Lightning's Trainer has it."""
    from instep.utils.porting import ATTRIBUTES  # imported late: only an error reads these tables

    hint = None if name.startswith("_") else ATTRIBUTES["Trainer"].get(name)
    return AttributeError(f"Trainer has no attribute {name!r}{f': {hint}' if hint else ''}")


def change(settings: Settings, name: str, value: Any) -> Settings:
    """Return a copy of the settings with another value of one argument, for later runs.

    Raises:
        SettingError: a wrong value, or an argument that the Trainer has used in its constructor.
    """
    if name in _FIXED and value == getattr(settings, name):
        return settings
    if name in _FIXED:
        raise SettingError(
            f"trainer.{name} = {value!r}: it was settled when the Trainer was made. Make a new Trainer with {name}=...",
            field=name,
            got=value,
        )
    if value is None:
        new = None if name == "check_val_every_n_epoch" else getattr(Settings, name)
    else:
        new = check_value(name, value)
    changed = replace(settings, **{name: new})
    _check_loop(changed, {name: value})
    return changed


def _drop_accumulation(values: dict[str, Any]) -> None:
    asked_for = values.pop("accumulate_grad_batches", None)
    if asked_for is not None:
        warn_user(
            f"{variable_of('accumulate_grad_batches')}={asked_for} has no effect: global_batch_size="
            f"{values['global_batch_size']} derives the accumulation by itself"
        )


def check_value(name: str, value: Any) -> Any:
    """Check one argument, independently of this machine and of other arguments, and return its resolved form.

    Raises:
        SettingError: a wrong value.
    """
    return _CHECKS[name](name, value)


def reject_unknown(given: Mapping[str, Any]) -> None:
    """Raise SettingError for argument names that the Trainer does not have, with the replacement or the nearest name.

    Raises:
        SettingError: there is an unknown name.
    """
    unknown = [name for name in given if name not in _CHECKS]
    if not unknown:
        return
    from instep.utils.porting import instead_of  # imported late: only an error reads these tables

    problems = {}
    for name in unknown:
        if (instead := instead_of("Trainer", name)) is not None:
            problems[name] = f"not an argument of instep's Trainer; {instead}"
        else:
            near = get_close_matches(name, _CHECKS, n=1)
            problems[name] = f"unknown{f' (did you mean {near[0]}?)' if near else ''}"
    listed = ". ".join(f"{name}: {problem}" for name, problem in problems.items())
    raise SettingError(f"Trainer got arguments that it does not take. {listed}.", field=unknown[0])


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
            warn_user(
                f"overfit_batches={s.overfit_batches!r} sets the limits of training and validation: "
                f"{' and '.join(both)} has no effect"
            )
    if s.global_batch_size is not None and s.accumulate_grad_batches != 1:
        raise SettingError(
            f"global_batch_size={s.global_batch_size} derives the accumulation by itself, but "
            f"accumulate_grad_batches={s.accumulate_grad_batches} was given too. Use one of them.",
            field="accumulate_grad_batches",
            got=s.accumulate_grad_batches,
        )
    if s.cuda_graphs and s.compile is not None and s.compile.scope == "step":
        raise SettingError(
            "cuda_graphs=True and compile='step' both take the whole step. Let torch record what it compiles, by "
            "compile={'scope': 'step', 'mode': 'reduce-overhead'}, or use compile='module' with cuda_graphs=True.",
            field="cuda_graphs",
            got=True,
        )
    if "gradient_clip_algorithm" in given and s.gradient_clip_val is None:
        warn_user("gradient_clip_algorithm has no effect without gradient_clip_val")


def _bare(s: Settings, given: Mapping[str, Any]) -> Settings:
    flags = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "fast_dev_run", "detect_anomaly")
    off: dict[str, Any] = {"logger": (), "callbacks": (), "profiler": None} | dict.fromkeys(flags, False)
    off |= {"log_every_n_steps": 0, "num_sanity_val_steps": 0}
    contradicting = [f"{name}={given[name]!r}" for name in off if name in given and given[name] != off[name]]
    if contradicting:
        raise SettingError(
            f"barebones=True turns these off, but they were asked for: {', '.join(contradicting)}. Leave them out, or "
            "barebones.",
            field="barebones",
        )
    return replace(s, **off)


def _trial(s: Settings) -> Settings:
    n = int(s.fast_dev_run)
    limits: Any = {f"limit_{stage}_batches": n for stage in ("train", "val", "test", "predict")}
    return replace(
        s,
        **limits,
        max_steps=n,
        max_epochs=1,
        min_steps=None,
        min_epochs=None,
        overfit_batches=0.0,
        val_check_interval=1.0,
        check_val_every_n_epoch=1,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=() if s.logger else False,
        enable_checkpointing=False,
    )
