"""Save in the background: the state is copied immediately, then a thread writes, commits and verifies it.

At most one save runs at a time. The next save waits for it, since it needs the same buffers. So a run that saves faster
than the disk can write is slowed down to the speed of the disk, and never needs memory for more than one copy.

The memory for the copies is kept for the next save, because the first use of a memory page costs several times as much
as copying. Each file has its own block of memory with the layout of the file, so that the thread writes large pieces
and spends little time in Python, where it would delay the training.
"""

from __future__ import annotations

import atexit
import copy
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PosixPath
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from instep.checkpoint.hashing import Data
from instep.checkpoint.lineage import Line
from instep.checkpoint.store import CheckpointStore
from instep.checkpoint.tensors import Shard, framing
from instep.checkpoint.writer import BaseWriter, Writer, checked_name
from instep.distributed.rank_zero import RankGroup
from instep.errors import CheckpointError, CorruptCheckpointError
from instep.utils.warn import warn_user

_ABORT_S = 5.0  # seconds to wait until the thread notices that its process group was destroyed


class PendingSave:
    """A save that is running or has ended, as returned by `RunSaver.save` and `BackgroundSaver.start`.

    Attributes:
        path: folder of the checkpoint; None until it is complete. If the save runs in the background or replaces older
            checkpoints, the checkpoint has also been verified.
        error: error that ended the save. If `path` is set too, the save itself succeeded, but an older checkpoint could
            not be deleted.
        background: whether the save runs in the background.
        weights_only: whether the checkpoint has only weights, so that no run can resume from it. The code that starts
            the save sets `weights_only`, `keeper` and `dropped`.
        keeper: callback, such as a ModelCheckpoint, that requested the save and manages the checkpoint; None if no
            callback manages it.
        dropped: older checkpoints that are deleted when this one has been verified.

    Example:
        >>> import tempfile
        >>> from instep.checkpoint import CheckpointStore
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saver = BackgroundSaver()
        ...     recorder = saver.record(lambda writer: writer.state("trainer", {"epoch": 3}))
        ...     pending = saver.start(CheckpointStore(folder), 1200, recorder)
        ...     print(pending.wait(timeout_s=60), pending.path.name)
        ...     saver.close()
        True step-00001200-1
    """

    background = weights_only = False
    keeper: Any = None
    dropped: Sequence[str] = ()

    def __init__(self) -> None:
        self.path: Path | None = None
        self.error: BaseException | None = None
        self._done = threading.Event()
        self._seen = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the save to end on this rank; return True if it has ended."""
        return self._done.wait(timeout_s)

    def _carry_out(self, store: CheckpointStore, replaced: Sequence[tuple[Any, Any]], *save: Any, **about: Any) -> None:
        """Save and verify the checkpoint, then delete older ones; set `path` or `error`. Collective: all ranks call it.

        Args:
            store: store that the checkpoint is saved in.
            replaced: pairs of a store and an older checkpoint in it, which is deleted. If there are any, the new
                checkpoint is always verified first.
            save, about: arguments of `store.save`.
        """
        try:
            path = store.save(*save, **about)
            if self.background:
                _drop_cached(path)
            wrong = "; ".join(store.verify_together(path) if self.background or replaced else [])
            if wrong:
                text = f"read back: {wrong}" if self.background else f"verify ({wrong}); nothing older is deleted"
                raise CorruptCheckpointError(f"{path} does not {text}", path=path)
            self.path = path
            for holder, old in replaced:
                holder.delete(old)
        except BaseException as error:  # noqa: BLE001  raised by `outcome`
            self.error = error
        finally:
            self._done.set()

    def outcome(self, ranks: RankGroup) -> Path:
        """Wait for the save; return its folder, or raise its error on all ranks. Collective: all ranks call it.

        Args:
            ranks: process group for collectives on the calling thread.

        Returns:
            The folder of the checkpoint.

        Raises:
            BaseException: the error of the save on this rank; a RemoteError if only another rank had an error.
        """
        self.wait()
        self._seen = True
        ranks.fail_together(self.error, "saving in the background")
        assert self.path is not None
        return self.path


class BackgroundSaver:
    """Save checkpoints in the background, one at a time. All methods are called on the training thread.

    Example:
        >>> import tempfile
        >>> from instep.checkpoint import CheckpointStore
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saver, state = BackgroundSaver(), {"epoch": 3}
        ...     recorder = saver.record(lambda writer: writer.state("trainer", state))
        ...     pending = saver.start(CheckpointStore(folder), 1200, recorder)
        ...     state["epoch"] = 4  # what is saved was taken before
        ...     saver.close()  # waits
        ...     CheckpointStore(folder).read(pending.path).state("trainer")
        {'epoch': 3}
    """

    def __init__(self) -> None:
        self._buffers = HostBuffers()
        self._ranks: RankGroup | None = None
        self._jobs: SimpleQueue[Callable[[], None] | None]
        self._pending: PendingSave | None = None

    @property
    def buffer_bytes(self) -> int:
        """Number of bytes of host memory that are kept for copies: about as much as this rank writes in a save."""
        return self._buffers.bytes

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no save runs: return True, or False after the timeout. An error of the save is not raised."""
        return self._pending is None or self._pending.wait(timeout_s)

    def record(self, write: Callable[[BaseWriter], None]) -> Recorder:
        """Wait for the previous save, then copy what `write` would write now. Not collective."""
        self.wait()
        self._buffers.wait()  # copies for an earlier recorder that was never saved may still run
        recorder = Recorder(self._buffers, *RankGroup().rank_and_size())
        write(recorder)
        return recorder

    def start(
        self,
        store: CheckpointStore,
        step: int,
        recorder: Recorder,
        *,
        info: Mapping[str, Any] | None = None,
        name: str | None = None,
        run_id: str = "",
        line: Line | None = None,
        to_delete: Iterable[str | Path] = (),
    ) -> PendingSave:
        """Start to write what `record` has copied, on the background thread. Collective: all ranks call it.

        Args:
            store: store that the checkpoint is saved in.
            step: global step; see `CheckpointStore.save`, also for `info`, `name`, `run_id` and `line`.
            recorder: result of the last call of `record`.
            to_delete: older checkpoints of the store, which are deleted when the new one has been verified.
        """
        if self._ranks is None:
            self._ranks = RankGroup.apart()
            # The thread is kept for the next saves, because starting a thread makes training wait. It is a daemon
            # thread, so that `close` can limit how long the exit of the program waits for it.
            self._jobs = SimpleQueue()  # a new queue, since an abandoned thread may still read the old one
            threading.Thread(target=_work, args=(self._jobs,), name="instep-save", daemon=True).start()
            atexit.register(self.close)  # at exit, wait for a running save even if the user never calls `close`
        aside = copy.copy(store)
        aside.ranks = self._ranks
        pending = self._pending = PendingSave()
        pending.background = True
        save = partial(pending._carry_out, aside, [(aside, old) for old in to_delete], step, recorder.replay)
        self._jobs.put(partial(save, info=info, name=name, run_id=run_id, line=line))
        return pending

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for a running save, then release the memory and the process group. May be called twice.

        Args:
            timeout_s: seconds after which a running save is abandoned. With several ranks an abandoned save fails; with
                a single process its thread continues. If the save does not become complete, the next run removes its
                files. None: no limit.
        """
        atexit.unregister(self.close)
        pending, self._pending = self._pending, None
        ranks, self._ranks = self._ranks, None
        done = pending is None or pending.wait(timeout_s)
        if ranks is not None:
            self._jobs.put(None)
            ranks.close(abort=not done)
        # The buffers are released only if no thread reads them any more.
        if pending is None or done or pending.wait(_ABORT_S):
            self._buffers.close()
        if pending is not None and not pending._seen:
            if not done:
                warn_user(f"the checkpoint under way was abandoned after {timeout_s} s")
            elif pending.error is not None:
                warn_user(f"a background save failed: {pending.error}")


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # otherwise `job` would keep released buffers in memory while the thread waits


def _drop_cached(folder: Path) -> None:
    """Remove a folder's files from the page cache, so that verifying them reads from the disk and not from memory."""
    if isinstance(folder, PosixPath) and hasattr(os, "posix_fadvise"):
        # os.walk skips a folder that it cannot list; verifying that folder raises an error later
        for here, _, names in os.walk(folder):
            for name in names:
                with suppress(OSError), open(Path(here, name), "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class HostBuffers:
    """Host memory for copies of tensors: a block for each file, which is kept for the next save."""

    def __init__(self) -> None:
        self._blocks: dict[str, _Block] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._copying: list[Any] = []  # CUDA events of copies that may still run

    @property
    def bytes(self) -> int:
        """Number of bytes of host memory that are kept."""
        return sum(block.size for block in self._blocks.values())

    def copy(self, file: str, tensors: Sequence[Tensor]) -> memoryview:
        """Copy tensors, without gaps between them, into the memory block of a file; overwrite the block's old content.

        CUDA tensors are copied to pinned memory on a separate stream, without waiting: call `wait` before you read the
        result. Later work on the device waits for the copies, so the tensors may be changed after this call.

        Args:
            file: name of the file, which identifies the block.
            tensors: tensors of any shape, strides, dtype and device, sorted by element size, largest first.

        Returns:
            A view of the copied bytes.
        """
        size = sum(tensor.nbytes for tensor in tensors)
        pinned = any(tensor.is_cuda and tensor.nbytes for tensor in tensors)
        block = self._blocks.get(file)
        if block is None or block.size < size or (pinned and not block.pinned):
            if block is not None:
                self.wait()  # copies of a failed save may still be writing into the block
                self._blocks.pop(file).close()
            block = self._blocks[file] = _Block(size, pinned)
        targets: list[Tensor] = []
        end = 0
        for tensor in tensors:
            begin, end = end, end + tensor.nbytes
            targets.append(block.content[begin:end].view(tensor.dtype).view(tensor.shape))
        for device in {tensor.device for tensor in tensors}:
            pairs = [(to, tensor) for to, tensor in zip(targets, tensors, strict=True) if tensor.device == device]
            self._copy([to for to, _ in pairs], [tensor for _, tensor in pairs], device)
        return memoryview(block.memory)[:size]

    def wait(self) -> None:
        """Wait until all copies are complete. Callable from any thread."""
        for event in self._copying:
            event.synchronize()
        self._copying.clear()

    def close(self) -> None:
        """Release the memory. May be called twice."""
        with suppress(RuntimeError):  # a device error is ignored, since no copy runs any more after it
            self.wait()
        self._copying.clear()
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
    """Writer that copies the content of files instead of writing it; `replay` writes the files later.

    States are encoded immediately, since they may change; tensors are copied into the buffers.

    Args:
        buffers: memory for the copies. It is in use until `replay` has returned; another Recorder may use it only
            after that.
        rank: rank of this process.
        world_size: number of ranks that save.

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
        """Write the copied files with `writer`. Callable from any thread."""
        self._buffers.wait()
        for name, content in self._content.items():
            writer.put(name, *content)


class _Block:
    """Host memory that forked processes do not inherit.

    If they did, the first write to each page after a fork would copy the page.
    """

    def __init__(self, size: int, pinned: bool) -> None:
        self.size = size
        self.pinned = pinned
        self.memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_DONTFORK"):
            self.memory.madvise(mmap.MADV_DONTFORK)
        self.content = torch.frombuffer(self.memory, dtype=torch.uint8)
        # If the system refuses to pin the memory, copies to it are still correct, but make the host wait.
        self._cuda: Any = torch.cuda.cudart() if pinned else None
        if pinned and int(self._cuda.cudaHostRegister(self.content.data_ptr(), len(self.memory), 0)) != 0:
            self._cuda = None
            with suppress(RuntimeError):  # this call raises CUDA's stored error, and clears it for later calls
                torch.zeros(1, device="cuda")

    def close(self) -> None:
        if self._cuda is not None:
            self._cuda.cudaHostUnregister(self.content.data_ptr())
        del self.content  # the memory is freed when no tensor or view uses it
