"""Read blocks of weights in a thread while the block before them computes."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from instep.big_models.offload import WeightsMap
from instep.big_models.pages import read_ahead


class Prefetcher:
    """Reader of the next blocks of weights, in a thread that ends when this object is deleted.

    If a block's weights are mapped from files, reading means loading those pages that are not in memory. Any other
    block is staged in the map of weights: read, and copied to its device. At most `depth` such blocks and the current
    one are held. The order is learned: the next block is the one that last followed the same two blocks. So reading
    ahead also works in a backward, which goes through the blocks in reverse order.

    Args:
        weights: map of all weights.
        blocks: names of the weights of each block, in the order of the model.
        devices: device where each block computes.
        depth: number of blocks to read ahead.

    Example:
        >>> weights = WeightsMap({"a": torch.zeros(1), "b": torch.ones(1)})
        >>> prefetcher = Prefetcher(weights, [["a"], ["b"]], ["cpu", "cpu"])
        >>> prefetcher.begin(0)
    """

    def __init__(
        self,
        weights: WeightsMap,
        blocks: Sequence[Sequence[str]],
        devices: Sequence[torch.device | int | str],
        depth: int = 1,
    ) -> None:
        self._work = _Work(weights, [tuple(names) for names in blocks], [torch.device(each) for each in devices])
        self._depth = min(depth, len(blocks) - 1)
        self._next: dict[tuple[int | None, int], int] = {}
        self._last: tuple[int | None, int | None] = None, None
        self._held: dict[int, _Read] = {}
        self._lock = threading.Lock()  # needed because forwards may run in several threads
        self._pid = -1

    def begin(self, block: int) -> None:
        """Wait until the weights of the block that computes now are in memory, and request the next blocks.

        Raises:
            Exception: the error that reading this block raised.
        """
        with self._lock:
            # The thread starts at the first use, and again in a forked process, which inherits no threads.
            if self._pid != os.getpid():
                self._start()
            new = self._advance(block)
            read = self._held[block]
        for each in new:
            if each is read:
                self._work.do(each)
            else:
                self._queue.put(each)
        try:
            read.wait(self._work)
        except BaseException:
            with self._lock:
                if self._held.get(block) is read:
                    del self._held[block]  # the block is forgotten, so that the next forward reads it again
            raise
        with self._lock:
            # A forward in another thread may have released the block in the meantime.
            if self._held.get(block) is read:
                self._work.weights.staged.update(read.tensors)

    def _advance(self, block: int) -> list[_Read]:
        """Release blocks that are no longer needed, and return the blocks to read now, the current one first."""
        before, last = self._last
        if last is not None:
            self._next[before, last] = block
        self._last = last, block
        wanted, before = [block], last
        for _ in range(self._depth):
            wanted.append(self._next.get((before, wanted[-1]), (wanted[-1] + 1) % len(self._work.blocks)))
            before = wanted[-2]
        for old in [held for held in self._held if held not in wanted]:
            self._work.drop(self._held.pop(old))
        new = [_Read(each) for each in dict.fromkeys(wanted) if each not in self._held]
        self._held.update((read.block, read) for read in new)
        return new

    def _start(self) -> None:
        self._pid, self._queue = os.getpid(), SimpleQueue[Any]()
        self._held.clear()
        self._last = None, None
        thread = threading.Thread(target=_run, args=(self._queue, self._work), name="instep-prefetch", daemon=True)
        thread.start()
        weakref.finalize(self, self._queue.put, None).atexit = False


class _Read:
    """One block of weights that is being read, or was read."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.tensors: dict[str, Tensor] = {}
        self.copied: Any = None  # event that a CUDA stream records after the copy of the block's weights

    def wait(self, work: _Work) -> None:
        if not self.done.is_set():
            if work.mapped[self.block]:
                return  # waiting is not needed, since using a page that is not in memory also reads it
            self.done.wait()
        if self.error is not None:
            raise self.error
        if self.copied is not None:
            stream = torch.cuda.current_stream(work.devices[self.block])
            stream.wait_event(self.copied)
            for tensor in self.tensors.values():
                tensor.record_stream(stream)
            self.copied = None


class _Work:
    """Work of the thread: reading a block.

    This object does not refer to the `Prefetcher`, so the `Prefetcher` can be deleted while the thread runs. Its
    deletion stops the thread.
    """

    def __init__(self, weights: WeightsMap, blocks: list[tuple[str, ...]], devices: list[torch.device]) -> None:
        self.weights, self.blocks, self.devices = weights, blocks, devices
        self.mapped = [
            device.type == "cpu" and all(map(weights.is_kept, names))
            for names, device in zip(blocks, devices, strict=True)
        ]
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def do(self, read: _Read) -> None:
        try:
            self._read(read)
        except BaseException as error:  # noqa: BLE001  whatever it is
            read.error = error  # `_Read.wait` raises this error when the block is used
        finally:
            read.done.set()

    def _read(self, read: _Read) -> None:
        names, device = self.blocks[read.block], self.devices[read.block]
        read_ahead(self.weights.at_rest(name) for name in names if self.weights.is_kept(name))
        if self.mapped[read.block]:
            return
        if device.type != "cuda":
            read.tensors = {name: self.weights.at_rest(name).to(device) for name in names}
            return
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.stream(stream):
            read.tensors = {
                name: self.weights.at_rest(name).pin_memory().to(device, non_blocking=True) for name in names
            }  # torch keeps pinned memory alive until the copy is done
            read.copied = stream.record_event()

    def drop(self, read: _Read) -> None:
        for name, tensor in read.tensors.items():
            if self.weights.staged.get(name) is tensor:
                del self.weights.staged[name]


def _run(queue: SimpleQueue[Any], work: _Work) -> None:
    while (read := queue.get()) is not None:
        work.do(read)
        del read


class _Begin:
    """Forward pre-hook of a module that is a block. In a copy or pickle of the model, the hook does nothing."""

    def __init__(self, prefetcher: Prefetcher, block: int) -> None:
        self._prefetcher, self._block = prefetcher, block

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._prefetcher.begin(self._block)

    def __reduce__(self) -> Any:
        return _Nothing, ()


class _Nothing:
    def __call__(self, module: nn.Module, args: Any) -> None:
        """Do nothing."""


def prefetch_blocks(
    model: nn.Module, weights: WeightsMap, devices: Mapping[str, torch.device | int | str], depth: int = 1
) -> Prefetcher | None:
    """Read offloaded weights of a model block by block, `depth` blocks ahead of the forward.

    Args:
        model: the model, whose forward calls its modules.
        weights: the offloaded weights, by full name.
        devices: device where each module with offloaded weights computes, by the module's name.
        depth: number of blocks to read ahead.

    Returns:
        The object that reads the weights; None if there is nothing to read.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, tuple[torch.device | int | str, list[str]]] = {}
    for name, device in devices.items():
        for block, names in _blocks_in(name, modules.get(name)):
            inside = [each for each in names if each in weights]
            if inside:
                found.setdefault(block, (device, []))[1].extend(inside)
    blocks = [name for name in modules if name in found]
    if not blocks:
        return None
    names, where = [found[block][1] for block in blocks], [found[block][0] for block in blocks]
    prefetcher = Prefetcher(weights, names, where, depth)
    for number, block in enumerate(blocks):
        modules[block].register_forward_pre_hook(_Begin(prefetcher, number))
    return prefetcher


def _blocks_in(name: str, module: nn.Module | None) -> Iterable[tuple[str, list[str]]]:
    """List the blocks of a module with the names of their weights: each layer, or the module if it has no lists."""
    # Here `name` is a weight outside of any block, and the module of this weight is taken as its block.
    if module is None:
        yield name.rpartition(".")[0], [name]
        return
    prefix = f"{name}." * bool(name)
    lists = any(isinstance(each, (nn.ModuleList, nn.ModuleDict)) and len(each) > 1 for each in module.modules())
    if not lists:
        yield name, [prefix + each for each in _tensor_names(module, recurse=True)]
        return
    own = [prefix + each for each in _tensor_names(module, recurse=False)]
    if own:
        yield name, own
    for child, inner in module.named_children():
        yield from _blocks_in(prefix + child, inner)


def _tensor_names(module: nn.Module, recurse: bool) -> list[str]:
    named = [
        *module.named_parameters(recurse=recurse, remove_duplicate=False),
        *module.named_buffers(recurse=recurse, remove_duplicate=False),
    ]
    return [name for name, _ in named]


def stop_prefetching(module: nn.Module) -> None:
    """Remove the hook of `prefetch_blocks` from one module."""
    for key, hook in [*module._forward_pre_hooks.items()]:
        if isinstance(hook, _Begin):
            del module._forward_pre_hooks[key]
