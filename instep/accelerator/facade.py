"""What an Accelerator passes on: the process's state, and the collectives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from instep import distributed
from instep.distributed.nested import map_leaves
from instep.state import AcceleratorState, GradientState, PartialState
from instep.state.device import DistributedType


class ProcessFacade:
    """The part of an Accelerator that needs no model: all of it is `PartialState` and `instep.distributed`."""

    def __init__(self, process: PartialState) -> None:
        self._process = process
        # Who this process is stays known after end_training(), when the state holds nothing any more.
        self._device, self._distributed_type = process.device, process.distributed_type
        self._rank, self._local_rank, self._world_size = (
            process.process_index,
            process.local_process_index,
            process.num_processes,
        )

    @property
    def state(self) -> AcceleratorState:
        """The process state, and how the active run computes."""
        return AcceleratorState()

    @property
    def gradient_state(self) -> GradientState:
        """Where the active run stands in its window and its loader."""
        return GradientState()

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._device

    @property
    def distributed_type(self) -> DistributedType:
        """What the processes are together."""
        return self._distributed_type

    @property
    def num_processes(self) -> int:
        """The world size."""
        return self._world_size

    @property
    def process_index(self) -> int:
        """The rank of this process, from 0."""
        return self._rank

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its node, from 0."""
        return self._local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self._local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self._rank == self._world_size - 1

    def wait_for_everyone(self, name: str | None = None, timeout_s: float | None = None) -> None:
        """`PartialState.wait_for_everyone`."""
        self._process.wait_for_everyone(name, timeout_s)

    def main_process_first(self) -> AbstractContextManager[None]:
        """`PartialState.main_process_first`."""
        return self._process.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """`PartialState.local_main_process_first`."""
        return self._process.local_main_process_first()

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """`PartialState.on_main_process`."""
        return self._process.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """`PartialState.on_local_main_process`."""
        return self._process.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Any:
        """`PartialState.on_last_process`."""
        return self._process.on_last_process(function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """`PartialState.on_process`."""
        return self._process.on_process(function, process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """`PartialState.on_local_process`."""
        return self._process.on_local_process(function, local_process_index)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """`PartialState.split_between_processes`."""
        return self._process.split_between_processes(inputs, apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of every node."""
        if self._local_rank == 0:
            print(*args, **kwargs)  # noqa: T201 (this is what the method is for)

    def gather(self, data: Any) -> Any:
        """`instep.distributed.gather`."""
        return distributed.gather(data)

    def reduce(self, data: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """`instep.distributed.reduce`, times `scale`.

        Args:
            data: nested tensors.
            reduction: "sum", "mean", "min", "max" or "none".
            scale: a factor for the result.
        """
        result = distributed.reduce(data, reduction)
        return result if scale == 1.0 else map_leaves(lambda leaf: leaf * scale, result)

    def pad_across_processes(self, data: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """`instep.distributed.pad_across_processes`."""
        return distributed.pad_across_processes(data, dim, pad_index, pad_first)
