"""Settings of the Accelerator as plain dataclasses, which read no environment variables.

The names are those of Hugging Face Accelerate. Every value is checked when the object is made. `options()` returns the
keyword arguments for the part that a handler configures: the strategy, the precision, the process state or torch's
profiler. `profile` runs this profiler and writes a trace file per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch

from instep.errors import SettingError
from instep.profilers.traces import TraceReady, chrome_traces, recorder
from instep.state.device import KINDS
from instep.strategies import resolve_strategy
from instep.types import PathLike, Word
from instep.utils.checks import FLAG, PATH, Check, above_zero, at_least, check_fields, choice, is_int, is_number, wrong
from instep.utils.paths import local_path
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from torch.profiler import profile as Profiler

CommHook = Literal["no", "fp16", "bf16", "power_sgd"] | Enum
CommWrapper = Literal["no", "fp16", "bf16"] | Enum
_ACTIVITIES = ("cpu", "cuda", "xpu", "mtia", "hpu")
_SCHEDULE = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")


def _time(value: timedelta | float) -> timedelta:
    return value if isinstance(value, timedelta) else timedelta(seconds=value)


def _backends() -> set[str]:
    """Collect the names of torch's communication backends, and the backends of the devices that instep supports."""
    ours = {kind.backend for kind in KINDS.values() if kind.backend is not None}
    return ours | set(getattr(torch.distributed.Backend, "backend_list", ()))


_MAPPING = Check(lambda value: isinstance(value, Mapping), "a dict, or None")
_FUNCTION = Check(callable, "a function of the profiler, or None")
_BACKEND = Check(
    lambda value: (
        isinstance(value, str) and {part.rpartition(":")[2] for part in value.lower().split(",")} <= _backends()
    ),
    'a backend of torch, such as "nccl", "gloo" or "cpu:gloo,cuda:nccl", or None',
)
_ABOVE_ONE = Check(lambda value: is_number(value) and value > 1, "a number above 1", float)
_BELOW_ONE = Check(lambda value: is_number(value) and 0 < value < 1, "a number between 0 and 1", float)
_TIMEOUT = Check(
    lambda value: (isinstance(value, timedelta) or is_number(value)) and _time(value) > timedelta(0),
    "a timedelta or a number of seconds above 0",
    _time,
)


def _activities(name: str, value: Any) -> Any:
    """Check that a value is a list of names from `_ACTIVITIES`."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) == 0:
        raise wrong(name, value, 'a list such as ["cpu", "cuda"], or None')
    for each in value:
        choice(*_ACTIVITIES)(name, each)
    return value


def _schedule(name: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check that a value is a dict of arguments for `torch.profiler.schedule`."""
    if not isinstance(value, Mapping):
        raise wrong(name, value, 'a dict such as {"wait": 1, "warmup": 1, "active": 3}, or None')
    for each in value:
        choice(*_SCHEDULE)(name, each)
    if not {"wait", "warmup", "active"} <= set(value):
        raise wrong(name, value, "at least wait, warmup and active")
    if not all(is_int(steps, int(each == "active")) for each, steps in value.items()):
        raise wrong(name, value, "whole numbers of steps, none below 0 and active at least 1")
    return value


class KwargsHandler:
    """Base class of the settings in `Accelerator(kwargs_handlers=[...])`.

    The list has at most one object of each class.

    Example:
        >>> GradScalerKwargs(init_scale=1024.0).to_kwargs()
        {'init_scale': 1024.0}
        >>> isinstance(GradScalerKwargs(), KwargsHandler)
        True
    """

    def __post_init__(self) -> None:
        check_fields(self)

    def options(self) -> dict[str, Any]:
        """Return the fields as keyword arguments for the part that they configure, without fields that are None."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}  # pyright: ignore[reportArgumentType]
        return {name: value for name, value in given.items() if value is not None}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as Accelerate's handlers do."""
        known = fields(self)  # pyright: ignore[reportArgumentType]
        return {each.name: value for each in known if (value := getattr(self, each.name)) != each.default}


@dataclass(frozen=True)
class AutocastKwargs(KwargsHandler):
    """Settings of autocast, for `Accelerator(kwargs_handlers=[...])` or one `accelerator.autocast(handler)`.

    Args:
        enabled: whether autocast is on. False computes in the dtype of the weights inside the context.
        cache_enabled: whether to keep the 16-bit copies of the weights for the length of the context.

    Example:
        >>> AutocastKwargs(cache_enabled=False).options()
        {'enabled': True, 'cache_enabled': False}
    """

    enabled: Annotated[bool, FLAG] = True
    cache_enabled: Annotated[bool, FLAG] = True


class DDPCommunicationHookType(Word):
    """Ways to communicate DDP's gradients, with Accelerate's names. Each member equals its string."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass(frozen=True)
class DistributedDataParallelKwargs(KwargsHandler):
    """Settings for averaging gradients over processes; `options()` are the arguments of the strategy "ddp".

    Args:
        broadcast_buffers: whether all ranks get the buffers of rank 0 before each forward.
        bucket_cap_mb: size of a gradient bucket in MiB; None means torch's default (25, and a smaller first bucket).
        find_unused_parameters: whether to search in each step for parameters that were not used.
        gradient_as_bucket_view: whether gradients are views of the buckets, which saves a copy.
        static_graph: whether every step uses the same parameters in the same way. If True, DDP relies on this.
        comm_hook: compression of gradients for the communication: "fp16", "bf16", "power_sgd", or a
            `DDPCommunicationHookType`.
        comm_wrapper: "fp16" or "bf16": dtype to which gradients are rounded before PowerSGD.
        comm_state_option: arguments of torch's `PowerSGDState`, such as `{"matrix_approximation_rank": 2}`.

    Raises:
        SettingError: a value is wrong, or `comm_hook`, `comm_wrapper` and `comm_state_option` do not fit each other.

    Example:
        >>> from instep.accelerator import Accelerator
        >>> handler = DistributedDataParallelKwargs(bucket_cap_mb=50, comm_hook="bf16")
        >>> handler.to_kwargs()
        {'bucket_cap_mb': 50.0, 'comm_hook': 'bf16'}
        >>> accelerator = Accelerator(kwargs_handlers=[handler])
        >>> accelerator.end_training()
    """

    broadcast_buffers: Annotated[bool, FLAG] = True
    bucket_cap_mb: Annotated[float | None, above_zero("of MiB above 0, or None")] = None
    find_unused_parameters: Annotated[bool, FLAG] = False
    gradient_as_bucket_view: Annotated[bool, FLAG] = False
    static_graph: Annotated[bool, FLAG] = False
    comm_hook: CommHook = "no"
    comm_wrapper: CommWrapper = "no"
    comm_state_option: Annotated[Mapping[str, Any] | None, _MAPPING] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        resolve_strategy("ddp", 1, options=self.options())  # this call raises an error for a wrong hook or combination

    def options(self) -> dict[str, Any]:
        options = super().options()
        for name in ("comm_hook", "comm_wrapper"):
            if isinstance(options[name], Enum):
                options[name] = options[name].value
        if "comm_state_option" in options:
            options["comm_state"] = dict(options.pop("comm_state_option"))
        return options


@dataclass(frozen=True)
class GradScalerKwargs(KwargsHandler):
    """Settings for scaling gradients in float16 autocast; `options()` are the arguments of torch's `GradScaler`.

    Args:
        init_scale: the first factor of the loss.
        growth_factor: number above 1 that multiplies the factor after `growth_interval` steps without an overflow.
        backoff_factor: number between 0 and 1 that multiplies the factor after an overflow.
        growth_interval: number of optimizer steps without an overflow before the factor grows.
        enabled: whether to scale. False trains without scaling.

    Example:
        >>> handler = GradScalerKwargs(init_scale=1024.0, growth_interval=500)
        >>> handler.to_kwargs()
        {'init_scale': 1024.0, 'growth_interval': 500}
    """

    init_scale: Annotated[float, above_zero("above 0")] = 65536.0
    growth_factor: Annotated[float, _ABOVE_ONE] = 2.0
    backoff_factor: Annotated[float, _BELOW_ONE] = 0.5
    growth_interval: Annotated[int, at_least(1)] = 2000
    enabled: Annotated[bool, FLAG] = True


@dataclass(frozen=True)
class InitProcessGroupKwargs(KwargsHandler):
    """Settings of the process group that the Accelerator creates; `options()` are arguments of `PartialState`.

    Args:
        backend: torch's name of the backend, such as "gloo"; None means the usual backend of the device.
        timeout: time limit of every collective, as a timedelta or in seconds; None means torch's default (10 minutes
            for nccl, 30 minutes for other backends).
        pg_options: options object of the backend.
        device_id: device that the group is bound to, for backends that need the device when the group is created.

    Example:
        >>> InitProcessGroupKwargs(timeout=60).options()
        {'timeout': datetime.timedelta(seconds=60)}
    """

    backend: Annotated[str | None, _BACKEND] = None
    timeout: Annotated[timedelta | float | None, _TIMEOUT] = None
    pg_options: Any = None
    device_id: Any = None


@dataclass(frozen=True)
class ProfileKwargs(KwargsHandler):
    """Settings of `accelerator.profile(handler)`.

    Args:
        activities: a list of "cpu", "cuda", "xpu", "mtia" and "hpu"; None records the CPU and the accelerator, if there
            is one.
        schedule_option: arguments of `torch.profiler.schedule` (`wait`, `warmup`, `active`, `repeat`, `skip_first`,
            `skip_first_wait`), which count calls of `step()`; None records everything.
        on_trace_ready: function that is called with the profiler whenever a recording is complete.
        record_shapes: whether to record the shapes of inputs.
        profile_memory: whether to record allocations.
        with_stack: whether to record the source line of every operation.
        with_flops: whether to estimate the floating-point operations of matrix products and convolutions.
        with_modules: whether to record which module called an operation.
        output_trace_dir: folder for a Chrome trace per rank; None writes none.

    Example:
        >>> import torch
        >>> from instep.accelerator import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> with accelerator.profile(ProfileKwargs(activities=["cpu"], record_shapes=True)) as profiler:
        ...     product = torch.ones(8, 8) @ torch.ones(8, 8)
        >>> "aten::mm" in [event.key for event in profiler.key_averages()]
        True
        >>> accelerator.end_training()
    """

    activities: Annotated[tuple[str, ...] | list[str] | None, _activities] = None
    schedule_option: Annotated[Mapping[str, int] | None, _schedule] = None
    on_trace_ready: Annotated[Callable[[Any], Any] | None, _FUNCTION] = None
    record_shapes: Annotated[bool, FLAG] = False
    profile_memory: Annotated[bool, FLAG] = False
    with_stack: Annotated[bool, FLAG] = False
    with_flops: Annotated[bool, FLAG] = False
    with_modules: Annotated[bool, FLAG] = False
    output_trace_dir: PathLike | None = None


@dataclass(frozen=True)
class GradientAccumulationPlugin:
    """Settings for accumulating gradients, for `Accelerator(gradient_accumulation_plugin=...)`.

    Args:
        num_steps: micro-batches per accumulation window.
        adjust_scheduler: whether the schedule counts batches. If True, the scheduler takes one step per batch of the
            window, all of them at the optimizer step. False: one scheduler step per optimizer step.
        sync_with_dataloader: whether an epoch's last window ends with the epoch, full or not. False: the next epoch
            continues this window, and each batch is weighed as in a full window.
        sync_each_batch: whether to reduce gradients at every backward, which needs more communication and, with
            sharding, less memory.

    Example:
        >>> from instep.accelerator import Accelerator
        >>> plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
        >>> accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        >>> accelerator.gradient_accumulation_steps
        4
        >>> accelerator.end_training()
    """

    num_steps: Annotated[int, at_least(1)] = 1
    adjust_scheduler: Annotated[bool, FLAG] = False
    sync_with_dataloader: Annotated[bool, FLAG] = True
    sync_each_batch: Annotated[bool, FLAG] = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass
class ProjectConfiguration:
    """Settings of an Accelerator's folders, and of how many checkpoints it keeps.

    Args:
        project_dir: folder of checkpoints. None: the Accelerator's `project_dir`; if that is None too, each save
            or load must name a folder.
        logging_dir: folder of loggers; None takes `project_dir`.
        automatic_checkpoint_naming: whether `save_state()` without a folder saves into a numbered folder below
            `project_dir`.
        total_limit: how many of the newest checkpoints to keep; None keeps all.
        iteration: number of the next automatically named state. `load_state(".../checkpoint_<number>")` finds a
            state by its number.

    Raises:
        SettingError: a value is wrong.

    Example:
        >>> project = ProjectConfiguration("runs/digits", automatic_checkpoint_naming=True, total_limit=3)
        >>> project.project_dir, project.logging_dir
        ('runs/digits', 'runs/digits')
    """

    project_dir: Annotated[PathLike | None, PATH] = None
    logging_dir: Annotated[PathLike | None, PATH] = None
    automatic_checkpoint_naming: Annotated[bool, FLAG] = False
    total_limit: Annotated[int | None, at_least(1, "or None")] = None
    iteration: Annotated[int, at_least(0)] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.total_limit is not None and not self.automatic_checkpoint_naming:
            warn_user(
                f"ProjectConfiguration(total_limit={self.total_limit}) has no effect without "
                "automatic_checkpoint_naming=True: nothing else is deleted"
            )
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: PathLike | None = None) -> None:
        """Set `project_dir`, and also `logging_dir` if that is not set yet.

        Args:
            project_dir: the folder; None for no folder.

        Raises:
            SettingError: `project_dir` is not a path.
        """
        self.project_dir = None if project_dir is None else PATH("project_dir", project_dir)
        if self.logging_dir is None:
            self.logging_dir = project_dir


_KINDS = (AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs)
_ELSEWHERE = {GradientAccumulationPlugin: "gradient_accumulation_plugin", ProjectConfiguration: "project_config"}


def by_kind(handlers: Iterable[KwargsHandler] | None) -> dict[type[KwargsHandler], Any]:
    """Return a dict from each handler's class to the handler.

    Args:
        handlers: value of `kwargs_handlers`; None for no handlers.

    Raises:
        SettingError: an object is not a handler or belongs to another argument, or there are two of one class.

    Example:
        >>> by_kind([AutocastKwargs()])[AutocastKwargs].enabled
        True
    """
    found: dict[type[KwargsHandler], Any] = {}
    if handlers is not None and not isinstance(handlers, Iterable):
        raise wrong("kwargs_handlers", handlers, "a list of handlers")
    for handler in handlers or ():
        kind = type(handler)
        if kind in _ELSEWHERE:
            message = f"{kind.__name__} is no kwargs handler: pass it as {_ELSEWHERE[kind]}=..."
            raise SettingError(message, field="kwargs_handlers", got=handler)
        if kind not in _KINDS:
            names = ", ".join(known.__name__ for known in _KINDS)
            message = f"kwargs_handlers has {handler!r}, which is no kwargs handler. Use objects of: {names}."
            raise SettingError(message, field="kwargs_handlers", got=handler)
        if kind in found:
            message = f"kwargs_handlers has two {kind.__name__}: {found[kind]!r} and {handler!r}. Keep one."
            raise SettingError(message, field="kwargs_handlers", got=handler)
        found[kind] = handler
    return found


# ---- profiling


@contextmanager
def profile(handler: ProfileKwargs | None = None, process_index: int = 0) -> Iterator[Profiler]:
    """Profile the code in the `with` block with torch's profiler.

    With `output_trace_dir` every rank writes `profile_<rank>.json` into it, for chrome://tracing or Perfetto. With a
    schedule, each later cycle has its own file: `profile_<rank>_2.json`, `profile_<rank>_3.json` and so on. Traces are
    also written after an error. An error of `on_trace_ready` is raised at the end of the block.

    Args:
        handler: options of the profiler; None means `ProfileKwargs()`.
        process_index: the rank, for the name of the file.

    Returns:
        torch's profiler. With a schedule, call its `step()` after every batch.

    Example:
        >>> with profile(ProfileKwargs(activities=["cpu"])) as profiler:
        ...     _ = torch.ones(2) + 1
        >>> "aten::add" in {event.key for event in profiler.key_averages()}
        True
    """
    options = (handler or ProfileKwargs()).options()
    folder, schedule = options.pop("output_trace_dir", None), options.pop("schedule_option", None)
    write = None if folder is None else chrome_traces(local_path(folder), process_index)
    ready = TraceReady(write, options.pop("on_trace_ready", None))
    with recorder(ready, schedule=schedule, **options) as profiler:
        yield profiler
    ready.check()
    if folder is not None and ready.calls == 0:
        warn_user(
            f"nothing was recorded, so there is no trace in {folder}: the schedule {dict(schedule or {})} counts calls "
            "of the profiler's step(), and its first active one was not reached"
        )
