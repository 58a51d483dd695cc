"""Copying a state to the host at once, for a thread to write while the training goes on.

The memory that the copies go to is kept from save to save: pages that are touched for the first time cost several times
what the copying does. Each file has a block of its own, laid out as the file will be, so that the thread writes large
pieces and spends little time in Python, which would hold up the training.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from instep.checkpoint.hashing import Data
from instep.checkpoint.tensors import Shard, framing
from instep.checkpoint.writer import BaseWriter, Writer, checked_name
from instep.errors import CheckpointError


class HostBuffers:
    """Host memory for copies of tensors, one block per file, made as needed and then kept."""

    def __init__(self) -> None:
        self._blocks: dict[str, _Block] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._copying: list[Any] = []  # events

    @property
    def bytes(self) -> int:
        """How much memory is kept."""
        return sum(block.size for block in self._blocks.values())

    def copy(self, file: str, tensors: Sequence[Tensor]) -> memoryview:
        """Copy tensors one right after the other into the block of a file, whose former content is lost.

        What lies on a CUDA device goes to pinned memory on a stream of its own, without waiting: call `wait` before
        the result is read. The device's later work waits for the copying, so it may change the tensors.

        Args:
            file: names the block.
            tensors: of any shape, strides, dtype and device; wide elements before narrow ones.

        Returns:
            The block's bytes.
        """
        size = sum(tensor.nbytes for tensor in tensors)
        pinned = any(tensor.is_cuda for tensor in tensors)
        block = self._blocks.get(file)
        if block is None or block.size < size or (pinned and not block.pinned):
            if block is not None:
                self._blocks.pop(file).close()
            block = self._blocks[file] = _Block(size, pinned)
        targets: list[Tensor] = []
        end = 0
        for tensor in tensors:
            begin, end = end, end + tensor.nbytes
            targets.append(block.content[begin:end].view(tensor.dtype).view(tensor.shape))
        for device in {tensor.device for tensor in tensors}:
            pairs = [(to, it) for to, it in zip(targets, tensors, strict=True) if it.device == device]
            self._copy([to for to, _ in pairs], [it for _, it in pairs], device)
        return memoryview(block.memory)[:size]

    def wait(self) -> None:
        """Wait until the copies are there. From any thread."""
        for event in self._copying:
            event.synchronize()
        self._copying.clear()

    def close(self) -> None:
        """Give the memory back. Twice is once."""
        self.wait()
        while self._blocks:
            self._blocks.popitem()[1].close()

    def _copy(self, targets: list[Tensor], tensors: list[Tensor], device: torch.device) -> None:
        with torch.no_grad():
            if device.type != "cuda":
                torch._foreach_copy_(targets, tensors)
                return
            now = torch.cuda.current_stream(device)
            side = self._streams.setdefault(device, torch.cuda.Stream(device))
            side.wait_stream(now)
            with torch.cuda.stream(side):
                torch._foreach_copy_(targets, tensors, non_blocking=True)
                self._copying.append(side.record_event())
            now.wait_stream(side)


class Recorder(BaseWriter):
    """Takes what a Writer would write, as it is now, to be written later by `replay`.

    States are encoded at once, since they may change; tensors are copied into the buffers.

    Args:
        buffers: in use until `replay` has returned, so that the next Recorder may only then be filled.
        rank: this process.
        world_size: the number of ranks that save.

    Example:
        >>> recorder = Recorder(HostBuffers(), 0, 1)
        >>> weight = torch.zeros(2)
        >>> recorder.tensors("model.safetensors", {"weight": weight})
        >>> weight += 1  # recorder.replay still writes zeros
    """

    def __init__(self, buffers: HostBuffers, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._buffers = buffers
        self._content: dict[str, tuple[Data, ...]] = {}

    def put(self, name: str, *content: Data) -> None:
        if name in self._content:
            raise CheckpointError(f"{name} was written twice in one save. Give each rank's file a name of its own.")
        self._content[checked_name(name)] = content

    def tensors(
        self, name: str, tensors: Mapping[str, Tensor | Shard], metadata: Mapping[str, str] | None = None
    ) -> None:
        head, stored = framing(tensors, metadata)
        self.put(name, head, self._buffers.copy(name, list(stored.values())))

    def replay(self, writer: Writer) -> None:
        """Write what was taken. From any thread."""
        self._buffers.wait()
        for name, content in self._content.items():
            writer.put(name, *content)


class _Block:
    """Private memory that forked processes do not get: with them, every write to it would first copy the page."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.size = size
        self.pinned = pinned
        self.memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_DONTFORK"):
            self.memory.madvise(mmap.MADV_DONTFORK)
        self.content = torch.frombuffer(self.memory, dtype=torch.uint8)
        # Where it cannot be pinned (a limit on locked memory), copies wait for the device: slower, and as right.
        self._cuda: Any = torch.cuda.cudart() if pinned else None
        if pinned and self._cuda.cudaHostRegister(self.content.data_ptr(), size, 0) != 0:
            self._cuda = None

    def close(self) -> None:
        if self._cuda is not None:
            self._cuda.cudaHostUnregister(self.content.data_ptr())
        del self.content  # the memory goes with the last tensor or view of it
