"""`PartialState`: rank, device and world size of this process. Set at the first construction, all or nothing.

Beside it: how one input is split over processes, and decorators that run a function on some processes only.
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
    """Take the part of `inputs` that belongs to process `index` of `count`.

    The first `len(inputs) % count` processes take one more than the others. The parts joined in rank order are the
    input; padded ones are the input and then copies of its last element, so that the first `len(inputs)` count.

    Args:
        inputs: a list, a tuple, a tensor, a numpy array, a dataset with `select`, or a dict or other mapping
            of these (nested too) whose leaves have one length. It is never changed.
        index: 0 to `count - 1`.
        count: the number of processes.
        pad: repeat the last element so that every part has the same length.

    Returns:
        A value of the same kind.

    Raises:
        TypeError: the input, or a leaf of the dict, is of another type.
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
    """Return the length of every leaf, by its path."""
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
        other: Any = copy.copy(value)  # a tokenizer's BatchEncoding, say, which has methods of its own
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
    """Make a function run only where `here()` is true, with its name kept; a decorator if there is no function yet."""
    if function is None:
        return lambda function: run_where(function, here)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if here() else None

    return call


def check_index(decorator: str, name: str, index: int | None) -> None:
    """Refuse a decorator without a number: it would silently run nowhere."""
    if index is None:
        raise SettingError(f"{decorator} needs to know on which process: give {name}=...", field=name)
    if index < 0:
        raise SettingError(f"{name}={index} must be at least 0", field=name, got=index)


def is_index(environment: ProcessEnvironment, name: str, index: int | None, local: bool) -> bool:
    """Return whether this process has that number; a process alone has every number."""
    if environment.world_size == 1:
        return True
    count = environment.local_world_size if local else environment.world_size
    assert index is not None
    if index >= count:
        where = "this node has" if local else "the job has"
        raise SettingError(f"{name}={index}: {where} {count} processes, from 0 to {count - 1}", field=name, got=index)
    return index == (environment.local_rank if local else environment.rank)


class ProcessMethods:
    """Methods of a process by its rank, which `PartialState` and `Accelerator` have alike."""

    __slots__ = ()

    @property
    def num_processes(self) -> int:
        """The world size."""
        return process.held().environment.world_size

    @property
    def process_index(self) -> int:
        """The rank of this process, from 0."""
        return process.held().environment.rank

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its node, from 0."""
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

    # Waiting for each other.

    def wait_for_everyone(self, name: str | None = None, timeout_s: float | None = None) -> None:
        """Wait until every process is here. A collective; the device is not synchronized.

        Args:
            name: what is waited for. All processes must give the same, or none.
            timeout_s: how long to wait, in seconds, at most the process group's time-out; by default almost that.

        Raises:
            SettingError: the time-out is not above 0, or longer than the process group's.
            DistributedError: somebody waits under another name, or did not come: the text says who, and what the
                others wait for.

        Example:
            >>> PartialState().wait_for_everyone("the download", timeout_s=600)
        """
        held = process.held()
        if held.groups is not None:
            wait_for_all(held.groups, name, timeout_s, held.debug)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block on rank 0, then on all others. A collective.

        Inside such a block another one changes nothing: the order holds already.

        Raises:
            RemoteError: on the others, if the block raised on rank 0; they do not run it.

        Example:
            >>> with PartialState().main_process_first():
            ...     pass  # rank 0 fills a cache that the others read
        """
        with goes_first(process.held(), self.is_main_process, "main_process_first()"):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the block on the first process of every node, then on all others. A collective over all nodes.

        Raises:
            RemoteError: on every other process, if the block raised on the first process of any node.
        """
        with goes_first(process.held(), self.is_local_main_process, "local_main_process_first()"):
            yield

    # Running a function on some processes only. Decided when the function is called, so that a decorated function can
    # stand in a module that is imported before the state is built.

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Make a function run on rank 0 only; elsewhere the call gives None.

        Example:
            >>> @PartialState().on_main_process
            ... def announce():
            ...     return "here"
            >>> announce()
            'here'
        """
        return run_where(function, lambda: PartialState().is_main_process)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Make a function run on the first process of every node only; elsewhere the call gives None."""
        return run_where(function, lambda: PartialState().is_local_main_process)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Make a function run on the last rank only; elsewhere the call gives None."""
        return run_where(function, lambda: PartialState().is_last_process)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Make a function run on one rank only; elsewhere the call gives None. A process alone always runs it.

        Args:
            function: the function; left out when used as `@on_process(process_index=...)`.
            process_index: the rank.

        Raises:
            SettingError: there is no index, or, when the function is called, no such rank.
        """
        check_index("on_process", "process_index", process_index)
        return run_where(function, lambda: is_index(_environment(), "process_index", process_index, local=False))

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Make a function run on one process of every node only; elsewhere the call gives None.

        A process alone always runs it.

        Args:
            function: the function; left out when used as `@on_local_process(local_process_index=...)`.
            local_process_index: the process's number on its node.

        Raises:
            SettingError: there is no index, or, when the function is called, no such process.
        """
        check_index("on_local_process", "local_process_index", local_process_index)
        return run_where(
            function, lambda: is_index(_environment(), "local_process_index", local_process_index, local=True)
        )

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give this process its part of an input. No communication: every process holds the whole input.

        The parts follow each other in rank order, and the first ones are one longer where they cannot be equal. So
        `instep.distributed.gather_object` of each rank's list of results, outside of the block, is the list of all
        results in the input's order, and `gather_ragged` does so for tensors. Where there are fewer inputs than
        processes, the last ones get an empty part.

        Args:
            inputs: a list, a tuple, a tensor, a numpy array, a dataset with `select`, or a dict or other mapping (a
                tokenizer's BatchEncoding) of these, nested too, whose leaves have one length. It is never changed.
            apply_padding: repeat the last element so that all parts are of one length, as `gather` needs them, and as
                models with weights spread over ranks do, whose forwards all ranks run together. Copies come last:
                of what is gathered the first `len(inputs)` count.

        Raises:
            TypeError: the input is of another type.
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
            print(*args, **kwargs)  # noqa: T201 (this is what the method is for)


class PartialState(ProcessMethods):
    """Identity of this process: its rank, its device, and how it meets the others.

    The first construction reads the launcher's environment, chooses the device and, for a job of several processes,
    joins the process group; it is then a collective. Later ones give the same state. An argument that contradicts what
    the state holds is an error; arguments that are left out ask for nothing. If the first construction fails, nothing
    is set.

    Nothing can be assigned: what is read here holds until `destroy_process_group()`.

    Args:
        cpu: True uses the CPU although there is an accelerator. Left out: what `INSTEP_ACCELERATOR` says, else the
            accelerator if there is one.
        debug: whether collectives are checked over the ranks before they run. Left out: what `INSTEP_DEBUG` says.
        xla: True uses an XLA device. Left out: where torch_xla's launcher started the process.
        **init_process_group_kwargs: `backend` (torch's name; by the device when left out; "mpi" under mpirun or srun,
            where torch was built with it), `timeout` of every collective (a timedelta, or seconds; torch's default is
            10 minutes for nccl and 30 for others), `pg_options`, `device_id`.

    Raises:
        SettingError: the environment or an argument is wrong.
        StateError: the state exists and holds something else than is asked for.

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

    # The facts.

    @property
    def initialized(self) -> bool:
        """Whether the state holds; False after `destroy_process_group()`."""
        return process.is_held()

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return process.held().device

    @property
    def distributed_type(self) -> DistributedType:
        """Kind of processes of this run; `DistributedType.NO` for one alone."""
        return process.held().distributed_type

    @property
    def backend(self) -> str | None:
        """The backend of the process group as torch names it; None for one process."""
        return process.held().backend

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return process.held().environment.num_nodes

    @property
    def node_index(self) -> int:
        """The number of this node, from 0."""
        return process.held().environment.node_rank

    @property
    def debug(self) -> bool:
        """Whether collectives are checked over the ranks before they run: the argument, else `INSTEP_DEBUG`."""
        return process.held().debug

    @property
    def owns_process_group(self) -> bool:
        """Whether instep made the process group, and may destroy it."""
        groups = process.held().groups
        return groups is not None and groups.owned

    @property
    def control_group(self) -> dist.ProcessGroup | None:
        """A CPU (gloo) group of all processes for control messages; None for one process."""
        groups = process.held().groups
        return None if groups is None else groups.control

    # The device and the group.

    def set_device(self) -> None:
        """Make this process's device the current one again, should the user's code have changed it."""
        make_current(self.device)

    def destroy_process_group(self, abort: bool = False) -> None:
        """Leave the process group; afterwards the state can be built again.

        A process alone has no group and keeps its state. A group that was there before the state is left as it is.

        Args:
            abort: wait for nobody and drop what is under way, in every group: the way to end after an error, while
                the others may still sit in a collective.
        """
        process.leave_group(abort)

    @staticmethod
    def _reset_state() -> None:
        """Forget everything, the runs too, and leave the group if instep made it. For tests."""
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
