"""`PyTorchProfiler`: measure operators by torch's profiler, with tables, traces, flame graphs and GPU memory."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerAction, record_function

from instep.errors import SettingError, one_of
from instep.profilers.base import Profiler
from instep.profilers.traces import TraceReady, activity, recorder
from instep.types import PathLike
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from torch.profiler import profile as Recorder

    from instep.callbacks.base import Trainer, TrainModule

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
SORT_KEYS = (
    "cpu_time", "cuda_time", "cpu_time_total", "cuda_time_total", "cpu_memory_usage", "cuda_memory_usage",
    "self_cpu_memory_usage", "self_cuda_memory_usage", "count",
)  # fmt: skip
_DEFAULT = {"wait": 1, "warmup": 1, "active": 3, "repeat": 1}
_LEAST = 5  # number of steps that the default schedule needs
_MEMORY_EVENTS = 100_000


class PyTorchProfiler(Profiler):
    """Records operators with torch's profiler: their times on CPU and GPU, their memory, and where they were called.

    Each kind of step (training, validation, test, predict) is recorded and counted separately. A recording begins with
    a step; if another kind of step interrupts the recording, the results so far are written. By default steps 3 to 5 of
    each kind are recorded once; a loop with fewer than five steps is recorded completely.

    For each rank the folder gets a table of operators. With `export_to_chrome` it gets a trace
    `<stage>-<rank>-<step>.<time>.pt.trace.json`, for TensorBoard's profiler plugin, Perfetto (https://ui.perfetto.dev)
    and chrome://tracing. With `export_to_flame_graph` it gets call stacks in `.stacks`, for https://speedscope.app and
    flamegraph.pl. With `export_memory_snapshot` it gets a CUDA memory snapshot, even if the run ends because memory
    runs out, for https://pytorch.org/memory_viz.

    Args:
        dirpath: as in `Profiler`.
        filename: as in `Profiler`.
        group_by_input_shapes: whether operators are separated by the shapes of their inputs; needs
            `record_shapes=True`.
        emit_nvtx: whether operators are marked for Nsight Systems instead of being recorded.
        export_to_chrome: whether traces are written.
        row_limit: maximum number of rows in the table; -1: no limit.
        sort_by_key: key by which the table is sorted; None: the total time on the GPU, or on the CPU if there is no
            GPU.
        record_module_names: whether operators in a submodule's forward are labeled with the name of the submodule.
        table_kwargs: further arguments of torch's `EventList.table`.
        export_memory_snapshot: whether CUDA allocations are recorded with their call stacks.
        **profiler_kwargs: arguments of `torch.profiler.profile`: `activities` (also by name: `["cpu", "cuda"]`),
            `schedule` (also as a dict: `{"wait": 1, "warmup": 1, "active": 3}`), `on_trace_ready`, `record_shapes`,
            `profile_memory`, `with_stack`, `with_flops`, `with_modules`. Also `export_to_flame_graph`, and `metric` for
            the widths in the flame graph ("self_cpu_time_total" by default).

    Attributes:
        function_events: the events of the last recording.

    Raises:
        SettingError: an argument is wrong.

    Example:
        >>> profiler = PyTorchProfiler(schedule={"wait": 1, "warmup": 1, "active": 2}, record_shapes=True)
        >>> from instep import Trainer
        >>> trainer = Trainer(profiler=profiler)

    Source: Lightning's `PyTorchProfiler`, with its names, over `torch.profiler`.
    """

    _kind = "pytorch"

    def __init__(
        self,
        dirpath: PathLike | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: dict[str, Any] | None = None,
        export_memory_snapshot: bool = False,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        options = {**profiler_kwargs}
        self._group_by_input_shapes = group_by_input_shapes and bool(options.get("record_shapes"))
        self._emit_nvtx, self._export_to_chrome, self._row_limit = emit_nvtx, export_to_chrome, row_limit
        self._record_module_names, self._export_memory = record_module_names, export_memory_snapshot
        self._flame_graph, self._metric = options.pop("export_to_flame_graph", False), options.pop("metric", None)
        self._then = options.pop("on_trace_ready", None)
        given = options.pop("schedule", None)
        self._own_schedule = given is None
        self._schedule = _checked_schedule(_DEFAULT if given is None else given)
        self._sort_by_key = sort_by_key or ("cuda_time_total" if torch.cuda.is_available() else "cpu_time_total")
        self._table_kwargs = table_kwargs or {}
        self._options = options
        self._check()
        self._expected: Callable[[str], float] = lambda _: math.inf
        self._module: nn.Module | None = None
        self._running: Recorder | None = None
        self._step = ""  # the kind of step that is being recorded
        self._ready: TraceReady | None = None
        self.function_events: EventList | None = None
        self._steps: dict[str, int] = {}
        self._done: set[str] = set()
        self._tables: dict[str, str] = {}
        self._labels: dict[str, record_function] = {}
        self._handles: list[Any] = []
        self._stack = ExitStack()
        self._errors: list[Exception] = []

    def _check(self) -> None:
        known = {*inspect.signature(torch.profiler.profile.__init__).parameters} - {"self"}
        for name in self._options:
            if name not in known:
                raise SettingError(f"PyTorchProfiler({name}=...): torch.profiler.profile has no {name}", field=name)
        if self._sort_by_key not in SORT_KEYS:
            message = f"sort_by_key={self._sort_by_key!r}: use one of {', '.join(SORT_KEYS)}"
            raise SettingError(message, field="sort_by_key", got=self._sort_by_key)
        for name in self._options.get("activities") or ():
            activity(name)
        columns = {*inspect.signature(EventList.table).parameters}
        for name in self._table_kwargs:
            if name not in columns - {"self", "sort_by", "row_limit"}:
                raise SettingError(f"table_kwargs has {name!r}, which EventList.table does not take", field=name)

    # ---- hooks of a run

    def attach(self, trainer: Trainer, module: TrainModule) -> None:
        """Get the number of steps from the Trainer, and keep the module, whose submodules get labels."""

        def expected(step: str) -> float:
            if step == "training_step":
                most = trainer.settings.max_steps
                return min(trainer.num_training_batches, math.inf if most == -1 else most)
            stage = {"validation_step": "val", "test_step": "test"}.get(step, "predict")
            return sum(getattr(trainer, f"num_{stage}_batches"))

        self._expected, self._module = expected, module

    def setup(self, stage: str, local_rank: int | None = None, log_dir: PathLike | None = None) -> None:
        """Begin a run."""
        super().setup(stage, local_rank, log_dir)
        self._steps, self._done, self._tables = {}, set(), {}
        if self._emit_nvtx:
            self._stack.enter_context(torch.cuda.profiler.profile())
            self._stack.enter_context(torch.autograd.profiler.emit_nvtx())
        if self._export_memory and not torch.cuda.is_available():
            warn_user("PyTorchProfiler(export_memory_snapshot=True) has no effect: there is no CUDA device")
        elif self._export_memory:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
            self._stack.callback(torch.cuda.memory._record_memory_history, enabled=None)
            self._stack.callback(self._dump_memory)

    def _dump_memory(self) -> None:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / self._prepare_filename("memory", ".pickle")
            torch.cuda.memory._dump_snapshot(str(path))

    def start(self, action_name: str) -> None:
        """Label an action; the first action of a step starts the recording of that kind of step."""
        step = next((step for step in STEPS if action_name.endswith(step)), "")
        if step and step != self._step:
            self._close()
            self._open(step)
        elif self._stage is None and self._module is None and self._running is None:
            self._open("")  # without a Trainer, everything is recorded until `describe` is called
        if (self._running is not None or self._emit_nvtx) and action_name not in self._labels:
            self._labels[action_name] = label = record_function(action_name)
            label.__enter__()

    def stop(self, action_name: str) -> None:
        """End the label of an action; after a step, advance the schedule."""
        label = self._labels.pop(action_name, None)
        if label is not None:
            label.__exit__(None, None, None)
        if self._running is None or not self._step or not action_name.endswith(self._step):
            return
        self._steps[self._step] += 1
        self._running.step()
        if self._own_schedule and self._ready is not None and self._ready.calls:
            self._close()

    def _open(self, step: str) -> None:
        self._step = step
        if self._emit_nvtx or step in self._done:
            return
        before = self._steps.setdefault(step, 0)
        schedule = None
        if step and not (self._own_schedule and self._expected(step) < _LEAST):
            schedule = lambda number: self._schedule(before + number)  # noqa: E731  (the lambda holds `before`)
        # without "acc_events", torch warns at the second cycle of a schedule
        options = {"acc_events": not self._own_schedule, **self._options}
        if self._flame_graph:
            options["with_stack"] = True
            options.setdefault("experimental_config", _ExperimentalConfig(verbose=True))
        self._ready = TraceReady(lambda recorded, number: self._write(step, recorded, number), self._then)
        self._running = recorder(self._ready, schedule=schedule, **options)
        self._running.__enter__()
        if self._record_module_names and self._module is not None:
            self._handles = _label_submodules(self._module)

    def _close(self) -> None:
        """End the current recording, and write its results."""
        running, step = self._running, self._step
        self._running, self._step = None, ""
        if running is None:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for name in list(self._labels):
            self._labels.pop(name).__exit__(None, None, None)
        running.__exit__(None, None, None)
        if self._own_schedule and self._ready is not None and self._ready.calls:
            self._done.add(step)
        if self._ready is not None and self._ready.error is not None:
            self._errors.append(self._ready.error)

    def _write(self, step: str, recorded: Recorder, number: int) -> None:
        """Make the table of a recording, and write the files that the settings ask for."""
        self.function_events = recorded.events()
        averages = recorded.key_averages(group_by_input_shape=self._group_by_input_shapes)
        self._tables[step] = averages.table(sort_by=self._sort_by_key, row_limit=self._row_limit, **self._table_kwargs)
        folder = self._folder
        if folder is None or self._then is not None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if self._export_to_chrome:
            name = self._prepare_filename(step or None, "")
            torch.profiler.tensorboard_trace_handler(str(folder), name)(recorded)
        if self._flame_graph:
            count = "" if number == 1 else f"-{number}"
            path = folder / self._prepare_filename(f"{step}{count}", ".stacks")
            recorded.export_stacks(str(path), self._metric or "self_cpu_time_total")

    def summary(self) -> str:
        """Return a table of operators for each kind of step that was recorded."""
        self._close()
        missing = [step for step, done in self._steps.items() if done and step not in self._tables]
        if missing:
            steps = ", ".join(missing)
            warn_user(f"the profiler recorded nothing of {steps}: the active steps of its schedule did not come")
        texts = [f"{self._title()}{step and f': {step}'}\n{table}" for step, table in self._tables.items()]
        return "\n".join(texts)

    def teardown(self, stage: str | None) -> None:
        """End a run; after this, nothing is recorded or labeled.

        Raises:
            Exception: the first error of writing a recording, or of `on_trace_ready`.
        """
        self._close()
        self._module, self._expected = None, lambda _: math.inf
        self._stack.close()
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def __getstate__(self) -> dict[str, Any]:
        closed = {
            "_running": None,
            "_ready": None,
            "_module": None,
            "_labels": {},
            "_handles": [],
            "_stack": ExitStack(),
        }
        return {**self.__dict__, **closed, "_expected": None}


def _checked_schedule(schedule: Any) -> Callable[[int], ProfilerAction]:
    if isinstance(schedule, Mapping):
        known = inspect.signature(torch.profiler.schedule).parameters
        for name in schedule:
            if name not in known:
                raise one_of("PyTorchProfiler(schedule={...})", name, known)
        try:
            return torch.profiler.schedule(**schedule)
        except (TypeError, AssertionError) as error:
            message = f"schedule={dict(schedule)!r}: {error}"
            raise SettingError(message, field="schedule", got=schedule) from error
    if not callable(schedule):
        message = f"schedule={schedule!r}: a function such as torch.profiler.schedule(...), or a dict of its arguments"
        raise SettingError(message, field="schedule", got=schedule)
    if not isinstance(action := schedule(0), ProfilerAction):
        message = f"schedule(0) gave {action!r}: it must give a torch.profiler.ProfilerAction"
        raise SettingError(message, field="schedule", got=schedule)
    return cast("Callable[[int], ProfilerAction]", schedule)


def _label_submodules(module: nn.Module) -> list[Any]:
    """Label each submodule's forward with its class and name; return the hooks' handles, to remove the labels."""
    handles: list[Any] = []
    for name, submodule in module.named_modules():
        if not name:
            continue
        open_labels: list[record_function] = []

        def enter(
            _: Any, __: Any, text: str = f"{type(submodule).__name__}: {name}", labels: list[Any] = open_labels
        ) -> None:
            label = record_function(text)
            label.__enter__()
            labels.append(label)

        def leave(_: Any, __: Any, ___: Any, labels: list[Any] = open_labels) -> None:
            if labels:
                labels.pop().__exit__(None, None, None)

        handles.append(submodule.register_forward_pre_hook(enter))
        handles.append(submodule.register_forward_hook(leave, always_call=True))
    return handles
