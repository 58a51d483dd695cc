"""Settings of the Accelerator as plain dataclasses: what is passed is what holds, the environment is not read.

The names are Hugging Face Accelerate's. Every value is checked when the object is made. `options()` gives the keyword
arguments of the piece that a handler is about, on a lower floor: the strategy, the precision, the process state or
torch's profiler, which `profile` runs with a trace file per rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from instep.errors import SettingError, one_of
from instep.strategies import resolve_strategy
from instep.types import PathLike
from instep.utils.checks import is_int, is_number
from instep.utils.paths import local_path

if TYPE_CHECKING:
    from torch.profiler import profile as Profiler

CommHook = Literal["no", "fp16", "bf16", "power_sgd"]
CommWrapper = Literal["no", "fp16", "bf16"]
_ACTIVITIES = ("cpu", "cuda", "xpu", "mtia", "hpu")
_SCHEDULE = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")


class KwargsHandler:
    """Base of `Accelerator(kwargs_handlers=[...])`: one object of a class at most."""

    def options(self) -> dict[str, Any]:
        """The keyword arguments for the lower floor; fields that are None ask for nothing and are left out."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}  # pyright: ignore[reportArgumentType]
        return {name: value for name, value in given.items() if value is not None}

    def _expect(self, right: bool, field: str, expected: str) -> None:
        _expect(self, right, field, expected)

    def _check_flags(self, *names: str) -> None:
        for name in names:
            self._expect(isinstance(getattr(self, name), bool), name, "True or False")


@dataclass(frozen=True)
class AutocastKwargs(KwargsHandler):
    """How autocast computes; for `Accelerator(kwargs_handlers=...)` and for one `accelerator.autocast(handler)`.

    Args:
        enabled: False computes in the weights' dtype inside.
        cache_enabled: keep the 16-bit copies of the weights for the length of the context.

    Example:
        >>> AutocastKwargs(cache_enabled=False).options()
        {'enabled': True, 'cache_enabled': False}
    """

    enabled: bool = True
    cache_enabled: bool = True

    def __post_init__(self) -> None:
        self._check_flags("enabled", "cache_enabled")


@dataclass(frozen=True)
class DistributedDataParallelKwargs(KwargsHandler):
    """How gradients are averaged over processes; `options()` are the arguments of the strategy "ddp".

    Args:
        broadcast_buffers: take the first rank's buffers at each forward.
        bucket_cap_mb: size of a gradient bucket in MiB; None leaves it to torch (25, and a smaller first one).
        find_unused_parameters: search, in each step, for parameters that took no part.
        gradient_as_bucket_view: gradients live in the buckets, which saves a copy of them.
        static_graph: promise that every step uses the same parameters in the same way.
        comm_hook: compress gradients on their way: "fp16", "bf16", "power_sgd".
        comm_wrapper: "fp16" or "bf16": round what PowerSGD gets to 16 bits first.
        comm_state_option: arguments of torch's `PowerSGDState`, such as `{"matrix_approximation_rank": 2}`.

    Raises:
        SettingError: a value is wrong, or hook, wrapper and state do not go together.
    """

    broadcast_buffers: bool = True
    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: CommHook = "no"
    comm_wrapper: CommWrapper = "no"
    comm_state_option: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._check_flags("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
        cap = self.bucket_cap_mb
        self._expect(cap is None or (is_number(cap) and cap > 0), "bucket_cap_mb", "a number of MiB above 0, or None")
        state = self.comm_state_option
        self._expect(state is None or isinstance(state, Mapping), "comm_state_option", "a dict, or None")
        resolve_strategy("ddp", 1, options=self.options())  # knows its hooks, and refuses what does not go together

    def options(self) -> dict[str, Any]:
        options = super().options()
        if "comm_state_option" in options:
            options["comm_state"] = dict(options.pop("comm_state_option"))
        return options


@dataclass(frozen=True)
class GradScalerKwargs(KwargsHandler):
    """How gradients are scaled in float16 autocast; `options()` are torch's `GradScaler`'s.

    Args:
        init_scale: the first factor of the loss.
        growth_factor: what it is multiplied by after `growth_interval` steps without an overflow; above 1.
        backoff_factor: what it is multiplied by after an overflow; between 0 and 1.
        growth_interval: in optimizer steps.
        enabled: False trains without scaling.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        self._check_flags("enabled")
        self._expect(is_number(self.init_scale) and self.init_scale > 0, "init_scale", "a number above 0")
        self._expect(is_number(self.growth_factor) and self.growth_factor > 1, "growth_factor", "a number above 1")
        backoff = self.backoff_factor
        self._expect(is_number(backoff) and 0 < backoff < 1, "backoff_factor", "a number between 0 and 1")
        self._expect(is_int(self.growth_interval, 1), "growth_interval", "a whole number of steps, at least 1")


@dataclass(frozen=True)
class InitProcessGroupKwargs(KwargsHandler):
    """How the process group is made; `options()` are those of `PartialState`.

    Args:
        backend: torch's name, such as "gloo"; None takes the device's.
        timeout: of every collective, as a timedelta or in seconds; None takes torch's (10 minutes for nccl, 30 for
            others).
        pg_options: the backend's own options object.
        device_id: the device to bind the group to, where the backend wants to know early.

    Example:
        >>> InitProcessGroupKwargs(timeout=60).options()
        {'timeout': datetime.timedelta(seconds=60)}
    """

    backend: str | None = None
    timeout: timedelta | float | None = None
    pg_options: Any = None
    device_id: Any = None

    def __post_init__(self) -> None:
        right = self.backend is None or (isinstance(self.backend, str) and self.backend != "")
        self._expect(right, "backend", 'a name such as "nccl" or "gloo", or None')
        timeout = self.timeout
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        right = seconds is None or (is_number(seconds) and seconds > 0)
        self._expect(right, "timeout", "a timedelta or a number of seconds above 0")
        if seconds is not None:
            object.__setattr__(self, "timeout", timedelta(seconds=seconds))


@dataclass(frozen=True)
class ProfileKwargs(KwargsHandler):
    """Settings of `accelerator.profile(handler)`.

    Args:
        activities: of "cpu", "cuda", "xpu", "mtia", "hpu"; None records the CPU and whatever accelerator is here.
        schedule_option: arguments of `torch.profiler.schedule` (`wait`, `warmup`, `active`, `repeat`, `skip_first`,
            `skip_first_wait`), in calls of `step()`; None records everything.
        on_trace_ready: called with the profiler whenever a recording is complete.
        record_shapes: note the shapes of inputs.
        profile_memory: note allocations.
        with_stack: note the line of source of every operation.
        with_flops: estimate operations of matrix products and convolutions.
        with_modules: note which module called.
        output_trace_dir: write a Chrome trace per rank into this folder; None writes none.
    """

    activities: tuple[str, ...] | list[str] | None = None
    schedule_option: Mapping[str, int] | None = None
    on_trace_ready: Callable[[Any], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: PathLike | None = None

    def __post_init__(self) -> None:
        self._check_flags("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
        if self.activities is not None:
            right = not isinstance(self.activities, str) and len(self.activities) > 0
            self._expect(right, "activities", 'a list such as ["cpu", "cuda"], or None')
            for name in self.activities:
                if name not in _ACTIVITIES:
                    raise one_of("activities", name, _ACTIVITIES)
        ready = self.on_trace_ready
        self._expect(ready is None or callable(ready), "on_trace_ready", "a function of the profiler, or None")
        if self.schedule_option is not None:
            for name in self.schedule_option:
                if name not in _SCHEDULE:
                    raise one_of("schedule_option", name, _SCHEDULE)
            right = {"wait", "warmup", "active"} <= set(self.schedule_option)
            self._expect(right, "schedule_option", "at least wait, warmup and active")
            right = all(is_int(n, int(name == "active")) for name, n in self.schedule_option.items())
            self._expect(right, "schedule_option", "whole numbers of steps, none below 0 and active at least 1")


@dataclass(frozen=True)
class GradientAccumulationPlugin:
    """How gradients are accumulated.

    Args:
        num_steps: micro-batches of one window.
        adjust_scheduler: True: the schedule was written in batches, so that one optimizer step moves it on by as many
            as the window had. False: one scheduler step per optimizer step.
        sync_with_dataloader: a window ends with its loader, full or not.
        sync_each_batch: reduce gradients at every backward: more communication, less memory under sharding.
    """

    num_steps: int = 1
    adjust_scheduler: bool = False
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        _expect(self, is_int(self.num_steps, 1), "num_steps", "a whole number of micro-batches, at least 1")
        for name in ("adjust_scheduler", "sync_with_dataloader", "sync_each_batch"):
            _expect(self, isinstance(getattr(self, name), bool), name, "True or False")


@dataclass(frozen=True)
class ProjectConfiguration:
    """Where an Accelerator writes, and how many checkpoints it keeps.

    Args:
        project_dir: the folder of checkpoints; None writes only where a call names a folder.
        logging_dir: the folder of loggers; None takes `project_dir`.
        automatic_checkpoint_naming: `save_state()` without a folder numbers its own below `project_dir`.
        total_limit: checkpoints to keep, the newest ones; None keeps all.

    Raises:
        SettingError: a value is wrong, or an option has nothing to work on.
    """

    project_dir: PathLike | None = None
    logging_dir: PathLike | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None

    def __post_init__(self) -> None:
        automatic, limit = self.automatic_checkpoint_naming, self.total_limit
        _expect(self, isinstance(automatic, bool), "automatic_checkpoint_naming", "True or False")
        right = not automatic or self.project_dir is not None
        _expect(self, right, "automatic_checkpoint_naming", "a project_dir to write into beside it")
        _expect(self, limit is None or is_int(limit, 1), "total_limit", "a number of at least 1, or None")
        right = limit is None or automatic
        _expect(self, right, "total_limit", "automatic_checkpoint_naming=True beside it: nothing else is deleted")
        if self.logging_dir is None:
            object.__setattr__(self, "logging_dir", self.project_dir)


_KINDS = (AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs)
_ELSEWHERE = {GradientAccumulationPlugin: "gradient_accumulation_plugin", ProjectConfiguration: "project_config"}


def by_kind(handlers: Iterable[KwargsHandler] | None) -> dict[type[KwargsHandler], Any]:
    """Handlers by their class.

    Args:
        handlers: what `kwargs_handlers` got; None for none.

    Raises:
        SettingError: one is not a handler, belongs to another argument, or there are two of one class.

    Example:
        >>> by_kind([AutocastKwargs()])[AutocastKwargs].enabled
        True
    """
    found: dict[type[KwargsHandler], Any] = {}
    for handler in handlers or ():
        kind = type(handler)
        if kind in _ELSEWHERE:
            message = f"{kind.__name__} is no kwargs handler: pass it as {_ELSEWHERE[kind]}=..."
            raise SettingError(message, field="kwargs_handlers", got=handler)
        if kind not in _KINDS:
            names = ", ".join(known.__name__ for known in _KINDS)
            message = f"kwargs_handlers has {handler!r}, which is no kwargs handler. Use objects of: {names}"
            raise SettingError(message, field="kwargs_handlers", got=handler)
        if kind in found:
            message = f"kwargs_handlers has two {kind.__name__}: {found[kind]!r} and {handler!r}. Keep one."
            raise SettingError(message, field="kwargs_handlers", got=handler)
        found[kind] = handler
    return found


def _expect(owner: object, right: bool, field: str, expected: str) -> None:
    if not right:
        got = getattr(owner, field)
        raise SettingError(f"{type(owner).__name__}({field}={got!r}): expected {expected}", field=field, got=got)


# ---- profiling


@contextmanager
def profile(handler: ProfileKwargs | None = None, process_index: int = 0) -> Iterator[Profiler]:
    """Record what runs inside.

    With `output_trace_dir` every rank writes `profile_<rank>.json` there, for chrome://tracing or Perfetto; what later
    cycles of a schedule record goes to `profile_<rank>_<cycle>.json`, from 2. Traces are written after an error too;
    what `on_trace_ready` raises is raised at the end of the block.

    Args:
        handler: what to record; None takes `ProfileKwargs()`.
        process_index: the rank, for the file's name.

    Returns:
        torch's profiler: with a schedule call its `step()` after every batch.

    Example:
        >>> with profile(ProfileKwargs(activities=["cpu"])) as profiler:
        ...     _ = torch.ones(2) + 1
        >>> "aten::add" in {event.key for event in profiler.key_averages()}
        True
    """
    options = (handler or ProfileKwargs()).options()
    folder, schedule = options.pop("output_trace_dir", None), options.pop("schedule_option", None)
    activities, ready = options.pop("activities", None), options.pop("on_trace_ready", None)
    ready = _Ready(None if folder is None else local_path(folder), process_index, ready)
    with torch.profiler.profile(
        activities=None if activities is None else [_activity(name) for name in activities],
        schedule=None if schedule is None else torch.profiler.schedule(**schedule),
        on_trace_ready=ready,
        **options,
    ) as profiler:
        yield profiler
    if ready.error is not None:
        raise ready.error
    if folder is not None and ready.calls == 0:
        warnings.warn(
            f"nothing was recorded, so there is no trace in {folder}: the schedule {dict(schedule or {})} counts calls "
            "of the profiler's step(), and its first active one was not reached",
            stacklevel=3,
        )


class _Ready:
    """Called whenever a recording is complete: writes the trace, then calls the user's function.

    An error waits for the end of the block: one that leaves a callback makes torch's profiler end the process.
    """

    def __init__(self, folder: Path | None, rank: int, then: Callable[[Any], Any] | None) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made is found out before training
        self.folder, self.rank, self.then = folder, rank, then
        self.calls = 0
        self.error: Exception | None = None

    def __call__(self, profiler: Profiler) -> None:
        self.calls += 1
        try:
            if self.folder is not None:
                cycle = "" if self.calls == 1 else f"_{self.calls}"
                profiler.export_chrome_trace(str(self.folder / f"profile_{self.rank}{cycle}.json"))
            if self.then is not None:
                self.then(profiler)
        except Exception as error:  # noqa: BLE001  raised at the end of the block
            self.error = self.error or error


def _activity(name: str) -> Any:
    return getattr(torch.profiler.ProfilerActivity, name.upper())
