"""Run a function as N ranks, in a notebook, a test or an interactive session.

The ranks are forked, so the function may be defined in a cell. The same agent as in `instep launch` starts
and watches the ranks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from instep.errors import EXIT_PREEMPTED, DistributedError, Preempted, RemoteError, UsageError, one_of
from instep.launch.forked import Forked
from instep.launch.prepare import environment
from instep.launch.spec import LaunchSpec
from instep.state import find_device_kind, read_environment
from instep.state.process import is_held
from instep.utils.checks import at_least, is_int, wrong
from instep.utils.porting import instead_of

# Settings of LaunchSpec that callers of a launcher may give; settings that apply only to programs are missing.
_SETTINGS = (
    *("max_restarts", "shutdown_s", "hang_timeout_s", "env", "log_dir", "tee"),
    *("num_nodes", "node_rank", "master_addr", "master_port", "run_id", "local_addr", "secret_file"),
)


def notebook_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int | None = None, **settings: Any
) -> list[Any]:
    """Run a function as several ranks from a notebook.

    Make the Trainer or Accelerator inside the function, so that it knows its rank. With a single process and no
    `settings`, the function runs in the notebook's own process. If the kernel is interrupted, the ranks get the
    interrupt, save and end. A rank uses one CPU thread, since a fork does not inherit its parent's threads.

    Args:
        function: function that each rank runs.
        args: arguments of the function.
        num_processes: number of ranks on this machine; None: one for each accelerator, or one if there is none.
        **settings: any of LaunchSpec's max_restarts, shutdown_s, hang_timeout_s, env, log_dir, tee, and, for a
            notebook on each of several machines, num_nodes, node_rank, master_addr, master_port, run_id, local_addr,
            secret_file.

    Returns:
        Results of the function, by local rank; they must be picklable.

    Raises:
        UsageError: this process has used the GPU or a Trainer before, so it cannot be forked; the error's text names
            the cell that did so. Or this process is itself a rank.
        SettingError: a setting is wrong or unknown.
        RemoteError: a rank failed; the error has the rank's traceback.
        Preempted: the ranks were interrupted; they have saved and can be resumed.

    Example:
        >>> def train(lr):
        ...     ...  # a Trainer or an Accelerator, and its run
        >>> notebook_launcher(train, args=(0.1,), num_processes=2)  # doctest: +SKIP
    """
    _check_first("notebook_launcher", settings, function, args, num_processes)
    device, here = _devices()
    count = here if num_processes is None else num_processes
    if count == 1 and not settings:
        return [function(*args)]
    return _launch("notebook_launcher", function, args, count, device, settings)


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2, **settings: Any
) -> list[Any]:
    """Run a function as several ranks on the CPU, to test whether it works with several ranks.

    Args:
        function: function that each rank runs.
        args: arguments of the function.
        num_processes: number of ranks.
        **settings: as for `notebook_launcher`.

    Returns:
        Results of the function, by rank; they must be picklable.

    Raises:
        UsageError, SettingError, RemoteError, Preempted: as for `notebook_launcher`, but a GPU in use is not an error.

    Example:
        >>> from instep import PartialState
        >>> def train():
        ...     print(PartialState().process_index)
        >>> debug_launcher(train, num_processes=2)  # doctest: +SKIP
    """
    _check_first("debug_launcher", settings, function, args, num_processes)
    env = {"INSTEP_ACCELERATOR": "cpu", **settings.pop("env", {})}
    return _launch("debug_launcher", function, args, num_processes, "cpu", {**settings, "env": env})


def _devices() -> tuple[str, int]:
    """Return the kind of this machine's devices, and how many ranks the launcher starts by default."""
    with environment({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):  # torch's default check makes CUDA unusable in a fork
        kind = find_device_kind("auto")
        return kind.name, 1 if kind.name == "cpu" else kind.count()


def _check_first(name: str, settings: dict[str, Any], function: Any, args: Any, count: Any) -> None:
    if not callable(function):
        raise wrong("function", function, f"a function, that {name} calls as each rank: without () behind its name")
    called = getattr(function, "__name__", "function")
    if not isinstance(args, list | tuple):
        text = f"a tuple of the function's arguments, as in {name}({called}, ({args!r},))"
        if is_int(args):
            text += f"; the number of processes is the third: {name}({called}, (), {args})"
        raise wrong("args", args, text)
    if count is not None:
        at_least(1)("num_processes", count)
    if read_environment().launcher != "none":
        raise UsageError(f"{name} was called in a rank of a running job; a rank does not start ranks of its own")
    for given in settings:
        if (instead := instead_of("notebook_launcher", given)) is not None:
            raise UsageError(f"{name} does not take {given!r}; instead: {instead}")
        if given not in _SETTINGS:
            raise one_of(f"{name}'s argument", given, ("function", "args", "num_processes", *_SETTINGS))


def _launch(
    name: str, function: Callable[..., Any], args: Sequence[Any], count: int, device: str, settings: dict[str, Any]
) -> list[Any]:
    if count < 1:
        raise UsageError(f"{name}: num_processes={count} must be at least 1")
    _check_unused(name, device)
    spec = LaunchSpec(count, (getattr(function, "__name__", type(function).__name__),), **settings)
    from instep.launch.agent import run_agent  # imported late, so that only a launch loads it

    forked = Forked(function, args)
    code = run_agent(spec, forked)
    if code == 0:
        return forked.results()
    if code == EXIT_PREEMPTED:
        raise Preempted(f"{name}: the ranks were asked to stop; they have saved and can be resumed")
    if forked.interrupted:
        raise KeyboardInterrupt
    if forked.failure is None:
        raise DistributedError(f"{name}: the job ended with exit code {code}; what it said stands above")
    rank, how, report = forked.failure
    text = f"{name}: rank {rank} failed with {how}"
    if report is None:
        raise DistributedError(f"{text}; what it said stands above")
    raise RemoteError(text, rank=rank, traceback=report.traceback.rstrip())


def _check_unused(name: str, device: str) -> None:
    """Raise if a GPU or process group is in use, since a fork would inherit it but could not use it."""
    torch: Any = sys.modules["torch"]  # no import is needed, since `instep.state` has imported torch
    module = getattr(torch, device, None)
    if device != "cpu" and module is not None and module.is_initialized():
        problem, pattern = f"{device} was used", rf"{device}|\.to\(|Trainer\(|Accelerator\(|PartialState\("
    elif is_held():
        problem = "a Trainer, an Accelerator or PartialState ran"
        pattern = r"Accelerator\(|PartialState\(|\.(fit|validate|test|predict)\("
    else:
        return
    raise UsageError(
        f"{name}: {problem} in this process already, and a forked rank cannot use it then.{_cells(pattern)} Restart "
        f"the notebook and do that inside the function that is launched."
    )


def _cells(pattern: str) -> str:
    """Return a sentence that names the notebook's cells that match a pattern; "" if there is no such cell."""
    cells: list[str] = getattr(sys.modules["__main__"], "In", [])
    found = [
        (number, line)
        for number, cell in enumerate(cells[:-1])
        for line in cell.splitlines()
        if re.search(pattern, line)
    ]
    # If some lines are not indented, only these are named: they ran with their cell, unlike the body of a function.
    outer = [(number, line) for number, line in found if not line[:1].isspace()]
    named = [f"cell [{number}]: {line.strip()}" for number, line in (outer or found)[:3]]
    return f" It was probably {'; or '.join(named)}." if named else ""
