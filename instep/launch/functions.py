"""Running a function as N ranks: in a notebook, and in a test or an interactive session.

The ranks are forked, so the function may be defined in a cell; torchrun's elastic agent starts and watches them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from instep.errors import UsageError
from instep.state import find_device_kind, read_environment


def notebook_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int | None = None
) -> list[Any]:
    """Run a function as several ranks from a notebook.

    Make the Trainer inside the function: `Trainer(devices=num_processes)` there sees that it runs in a rank.

    Args:
        function: what each rank runs.
        args: its arguments.
        num_processes: ranks; by default one for each accelerator, or one on a CPU.

    Returns:
        What the function returned, by rank; it must be picklable.

    Raises:
        UsageError: CUDA was used before in this process, which a fork cannot survive, or this is a rank itself.

    Example:
        >>> notebook_launcher(train, args=(0.1,), num_processes=2)  # doctest: +SKIP
    """
    kind = find_device_kind("auto")
    if num_processes is None:
        num_processes = max(1, kind.count()) if kind.name != "cpu" else 1
    return _launch("notebook_launcher", function, args, num_processes)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> list[Any]:
    """Run a function as several ranks on the CPU, to see whether it works with more than one.

    Args:
        function: what each rank runs.
        args: its arguments.
        num_processes: ranks.

    Returns:
        What the function returned, by rank; it must be picklable.

    Raises:
        UsageError: as for `notebook_launcher`.

    Example:
        >>> debug_launcher(train, num_processes=2)  # doctest: +SKIP
    """
    return _launch("debug_launcher", function, args, num_processes)


def _launch(name: str, function: Callable[..., Any], args: Sequence[Any], num_processes: int) -> list[Any]:
    import torch  # late, as the engine's imports: only a launch pays for them
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if read_environment().launcher != "none":
        raise UsageError(f"{name} was called in a rank of a running job; a rank does not start ranks of its own")
    if num_processes < 1:
        raise UsageError(f"{name}: num_processes={num_processes} must be at least 1")
    if torch.cuda.is_initialized():
        raise UsageError(
            f"{name}: CUDA was used in this process already, and a forked rank cannot use it then. Restart the "
            "notebook and move what touches the GPU (a .cuda(), a torch.device tensor, a Trainer) into the function."
        )
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id="instep",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
    )
    results: dict[int, Any] = elastic_launch(config, function)(*args)
    return [results[rank] for rank in sorted(results)]
