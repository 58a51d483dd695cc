"""`PartialState`: rank, device and world size of this process.

The first construction of a `PartialState` sets these values: all of them, or none if it fails.

This file also has `split_between_processes`, and decorators that run a function only on some processes.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from instep.errors import DataError, SettingError
from instep.state import process
from instep.state.barriers import goes_first, wait_for_all
from instep.state.device import DistributedType, make_current
from instep.state.environment import ProcessEnvironment
from instep.state.runs import clear_runs


def share_of(inputs: Any, index: int, count: int, pad: bool = False) -> Any:
    """Return the part of `inputs` that belongs to process `index` of `count`.

    The first `len(inputs) % count` processes get one element more than the others. Joined in rank order, the parts are
    the input. With padding, all parts have the same length, and the joined parts end with copies of the last element.

    Args:
        inputs: a list, a tuple, a tensor, a numpy array, a dataset with `select`, or a dict or other mapping of these
            (nested too) whose leaves all have the same length. It is never changed.
        index: number of the process, from 0 to `count - 1`.
        count: number of processes.
        pad: whether to repeat the last element, so that every part has the same length.

    Returns:
        A value of the same kind.

    Raises:
        TypeError: the input, or a leaf of the dict, has a type that is not listed above.
        DataError: the leaves of a dict differ in length, or a tensor has no first dimension.

    Example:
        >>> [share_of([1, 2, 3, 4, 5], index, 2) for index in range(2)]
        [[1, 2, 3], [4, 5]]
    """
    lengths = _lengths(inputs, "inputs")
    if len(set(lengths.values())) > 1:
        text = ", ".join(f"{where} has {length}" for where, length in lengths.items())
        raise DataError(f"the values of a dict that is split over processes must have one length, but {text}")
    length = next(iter(lengths.values()), 0)
    share, extra = divmod(length, count)
    if pad:
        size = share + (extra > 0)
        start, stop = (min(place * size, length) for place in (index, index + 1))
        return _take(inputs, start, stop, size - (stop - start))
    start = index * share + min(index, extra)
    return _take(inputs, start, start + share + (index < extra), 0)


def _lengths(value: Any, where: str) -> dict[str, int]:
    """Return the length of every leaf of nested inputs, by its path."""
    if isinstance(value, Mapping):
        found: dict[str, int] = {}
        for key, item in value.items():
            found.update(_lengths(item, f"{where}[{key!r}]"))
        return found
    if type(value) in (list, tuple) or _is_dataset(value):
        return {where: len(value)}
    if isinstance(value, torch.Tensor) or _is_array(value):
        if value.ndim == 0:
            raise DataError(f"{where} is a single number of shape (): there is no first dimension to split")
        return {where: value.shape[0]}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which cannot be split over processes. Give a list, a tuple, a tensor, a "
        f"numpy array, a dataset with select(), or a dict of these."
    )


def _take(value: Any, start: int, stop: int, missing: int) -> Any:
    if isinstance(value, Mapping):
        parts = {key: _take(item, start, stop, missing) for key, item in value.items()}
        if isinstance(value, dict):
            return parts
        other: Any = copy.copy(value)  # a mapping with its own methods, such as a tokenizer's BatchEncoding
        other.update(parts)
        return other
    if _is_dataset(value):
        return value.select([*range(start, stop), *[len(value) - 1] * missing])
    part = value[start:stop]
    if not missing:
        return part
    last = value[-1:]
    if isinstance(value, torch.Tensor):
        return torch.cat([part, *[last] * missing])
    if _is_array(value):
        return sys.modules["numpy"].concatenate([part, *[last] * missing])
    return part + last * missing


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_dataset(value: Any) -> bool:
    return (
        callable(getattr(value, "select", None)) and hasattr(value, "__len__") and not isinstance(value, torch.Tensor)
    )


def run_where(function: Callable[..., Any] | None, here: Callable[[], bool]) -> Any:
    """Wrap a function, so that a call runs it only if `here()` is true. If the function is None, return a decorator."""
    if function is None:
        return lambda function: run_where(function, here)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if here() else None

    return call


def check_index(decorator: str, name: str, index: int | None) -> None:
    """Raise SettingError if a decorator got no process number, or a negative one: the function would never run."""
    if index is None:
        raise SettingError(f"{decorator} needs to know on which process: give {name}=...", field=name)
    if index < 0:
        raise SettingError(f"{name}={index} must be at least 0", field=name, got=index)


def is_index(environment: ProcessEnvironment, name: str, index: int | None, local: bool) -> bool:
    """Return True if this process has the number `index`, or if it is the only process of the job."""
    if environment.world_size == 1:
        return True
    count = environment.local_world_size if local else environment.world_size
    assert index is not None
    if index >= count:
        where = "this node has" if local else "the job has"
        raise SettingError(f"{name}={index}: {where} {count} processes, from 0 to {count - 1}", field=name, got=index)
    return index == (environment.local_rank if local else environment.rank)


class ProcessMethods:
    """Methods and properties that depend on this process's rank, shared by `PartialState` and `Accelerator`."""

    __slots__ = ()

    @property
    def num_processes(self) -> int:
        """Number of processes, the world size."""
        return process.held().environment.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process, from 0."""
        return process.held().environment.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process among the processes on its node, from 0."""
        return process.held().environment.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.process_index == self.num_processes - 1

    # ---- waiting for other processes

    def wait_for_everyone(self, name: str | None = None, timeout_s: float | None = None) -> None:
        """Wait until every process calls this. Collective; the device is not synchronized.

        Args:
            name: name of the wait. All processes must pass the same name, or none.
            timeout_s: how long to wait, in seconds; at most the time-out of the process group. None: a few seconds less
                than that time-out.

        Raises:
            SettingError: the time-out is not above 0, or longer than the process group's.
            DistributedError: a process waits with another name, or did not come. The text says which, and what the
                others wait for.

        Example:
            >>> PartialState().wait_for_everyone("the download", timeout_s=600)
        """
        held = process.held()
        if held.groups is not None:
            wait_for_all(held.groups, name, timeout_s, held.debug)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the `with` block on rank 0, then on all other ranks. Collective.

        A second such block inside it has no effect, since the order is already set.

        Raises:
            RemoteError: on the other ranks, if the block raised an error on rank 0; they do not run the block.

        Example:
            >>> with PartialState().main_process_first():
            ...     pass  # rank 0 fills a cache that the others read
        """
        with goes_first(process.held(), self.is_main_process, "main_process_first()"):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the `with` block on the first process of every node, then on all other processes.

        Collective over all nodes.

        Raises:
            RemoteError: on every other process, if the block raised an error on the first process of any node.
        """
        with goes_first(process.held(), self.is_local_main_process, "local_main_process_first()"):
            yield

    # ---- decorators that run a function only on some processes. They check the rank at each call, so that a module
    # with a decorated function can be imported before the state is built

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Make a function run only on rank 0. On other ranks the call returns None.

        Example:
            >>> @PartialState().on_main_process
            ... def announce():
            ...     return "here"
            >>> announce()
            'here'
        """
        return run_where(function, lambda: PartialState().is_main_process)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Make a function run only on the first process of every node. On other processes the call returns None."""
        return run_where(function, lambda: PartialState().is_local_main_process)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Make a function run only on the last rank. On other ranks the call returns None."""
        return run_where(function, lambda: PartialState().is_last_process)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Make a function run only on one rank. On other ranks the call returns None.

        A single process always runs the function.

        Args:
            function: the function. Leave it out in the form `@on_process(process_index=...)`.
            process_index: the rank.

        Raises:
            SettingError: no index is given; or, when the function is called, there is no such rank.
        """
        check_index("on_process", "process_index", process_index)
        return run_where(function, lambda: is_index(_environment(), "process_index", process_index, local=False))

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Make a function run only on one process of every node. On other processes the call returns None.

        A single process always runs the function.

        Args:
            function: the function. Leave it out in the form `@on_local_process(local_process_index=...)`.
            local_process_index: the process's number on its node.

        Raises:
            SettingError: no index is given; or, when the function is called, there is no such process.
        """
        check_index("on_local_process", "local_process_index", local_process_index)
        return run_where(
            function, lambda: is_index(_environment(), "local_process_index", local_process_index, local=True)
        )

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this process's part of an input. There is no communication: every process holds the whole input.

        The parts are in rank order. So outside of the block, `instep.distributed.gather_object` joins the ranks' lists
        of results in the order of the input, and `gather_ragged` does this for tensors. If the lengths cannot be equal,
        the first parts have one element more. If there are fewer inputs than processes, the last processes get an empty
        part.

        Args:
            inputs: a list, a tuple, a tensor, a numpy array, a dataset with `select`, or a mapping of these (a dict, or
                a tokenizer's BatchEncoding), also a nested one. All values of a mapping must have the same length. The
                input is never changed.
            apply_padding: whether to repeat the last element, so that all parts have the same length. `gather` needs
                equal lengths. So do models whose weights are sharded over ranks, since all ranks run their forward
                together. The copies come at the end, so only the first `len(inputs)` gathered elements count.

        Raises:
            TypeError: the input has a type that is not listed above.
            DataError: the leaves of a dict differ in length, or a tensor has no first dimension.

        Example:
            >>> with PartialState().split_between_processes(["a", "b", "c"]) as part:
            ...     part
            ['a', 'b', 'c']
        """
        yield share_of(inputs, self.process_index, self.num_processes, apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of every node."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201 (printing is the purpose of this method)


class PartialState(ProcessMethods):
    """Identity of this process: its rank, its device, and its process group.

    The first construction reads the launcher's environment and chooses the device. In a job of several processes it
    also joins the process group, so it is a collective. Later constructions return the same state. An argument that
    contradicts the state is an error; an argument that is left out is not compared. If the first construction fails,
    nothing is set.

    No attribute can be assigned: its values stay until `destroy_process_group()`.

    Args:
        cpu: True uses the CPU even if there is an accelerator. None: as the environment variable `INSTEP_ACCELERATOR`
            says, else the accelerator if there is one.
        debug: whether ranks compare each collective before they run it (checked mode). None: as the environment
            variable `INSTEP_DEBUG` says.
        xla: True uses an XLA device. None: only if torch_xla's launcher started the process.
        **init_process_group_kwargs: `backend` (torch's name; by default that of the device; "mpi" under mpirun or srun
            if torch was built with it), `timeout` of every collective (a timedelta, or seconds; torch's default is 10
            minutes for nccl and 30 for others), `pg_options`, `device_id`.

    Raises:
        SettingError: the environment or an argument is wrong.
        StateError: the state exists already with other values.

    Example:
        >>> state = PartialState(cpu=True)
        >>> state.is_main_process, state.num_processes
        (True, 1)

    Source:
        Names and meaning are those of Hugging Face Accelerate's PartialState.
    """

    __slots__ = ()

    def __init__(
        self,
        cpu: bool | None = None,
        debug: bool | None = None,
        xla: bool | None = None,
        **init_process_group_kwargs: Any,
    ) -> None:
        process.ensure(cpu, debug, xla, init_process_group_kwargs)

    # ---- facts about this process

    @property
    def initialized(self) -> bool:
        """Whether the state is set; False after `destroy_process_group()`."""
        return process.is_held()

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return process.held().device

    @property
    def distributed_type(self) -> DistributedType:
        """Kind of processes of this run; `DistributedType.NO` for a single process."""
        return process.held().distributed_type

    @property
    def backend(self) -> str | None:
        """Backend of the process group, by torch's name; None for a single process."""
        return process.held().backend

    @property
    def num_nodes(self) -> int:
        """Number of nodes in the job."""
        return process.held().environment.num_nodes

    @property
    def node_index(self) -> int:
        """Number of this node, from 0."""
        return process.held().environment.node_rank

    @property
    def debug(self) -> bool:
        """Whether ranks compare each collective before they run it; set by the argument `debug` or `INSTEP_DEBUG`."""
        return process.held().debug

    @property
    def owns_process_group(self) -> bool:
        """Whether instep created the process group, and may destroy it."""
        groups = process.held().groups
        return groups is not None and groups.owned

    @property
    def control_group(self) -> dist.ProcessGroup | None:
        """CPU (gloo) process group of all processes for control messages; None for a single process."""
        groups = process.held().groups
        return None if groups is None else groups.control

    # ---- the device and the process group

    def set_device(self) -> None:
        """Make this process's device the current device again, in case the user's code has changed it."""
        make_current(self.device)

    def destroy_process_group(self, abort: bool = False) -> None:
        """Leave and destroy the process group. Afterwards a new PartialState can be built.

        A single process has no group and keeps its state. A group that existed before the state is not destroyed.

        Args:
            abort: whether to abort pending operations in every group without waiting. Use this after an error, since
                other ranks may still be in a collective.
        """
        process.leave_group(abort)

    @staticmethod
    def _reset_state() -> None:
        """Reset the process state and the active runs, and leave the process group if instep created it. For tests."""
        process.reset()
        clear_runs()

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__}.{name} cannot be assigned: {self._writer}. It can only be read (tried to assign "
            f"{value!r})."
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted")

    @property
    def _writer(self) -> str:
        return "the process state is set once, when it is built from the launcher's environment"

    def __repr__(self) -> str:
        if not self.initialized:
            return f"{type(self).__name__}(not initialized)"
        return (
            f"{type(self).__name__}(process_index={self.process_index}, num_processes={self.num_processes}, "
            f"local_process_index={self.local_process_index}, node_index={self.node_index}, "
            f"distributed_type={self.distributed_type}, backend={self.backend}, device={str(self.device)!r})"
        )


def _environment() -> ProcessEnvironment:
    PartialState()
    return process.held().environment
