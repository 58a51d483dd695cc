"""Worker processes of loaders, made to ignore signals: the main process decides when they end.

A terminal sends SIGINT, torchrun's agent sends SIGTERM, and SLURM sends a signal before the time limit, each to all
processes of the group or tree. The main process then finishes its step and saves. Until then the workers must go on
loading batches, and must not print tracebacks.

A worker that ignores SIGTERM must be ended by other means in each of these cases: after an error in the data or in a
step (its traceback keeps the iterator alive), after a pass that was left early, and at the interpreter's exit. At exit
`multiprocessing` would send a SIGTERM and wait. So the main process ends its workers itself, without SIGTERM.

torch's workers end within 5 s after the main process died, except in two cases. If the main process died while the
worker was starting, the worker takes another process for its parent. If the worker waits for room in its queue, it
never checks its parent. In these cases the worker would run for ever, so a thread in it checks whether the main process
is alive.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any

from torch.utils.data import _utils

from instep.data.seeding import add_note
from instep.errors import DataError, LoaderWorkerError

INIT_RAISED = "The loader's worker_init_fn raised this."

_LOOK_EVERY_S = 1.0
_TO_END_S = 2.0  # seconds for all workers of an iterator to end by themselves, since a worker may be loading a sample
_KILLED_S = 5.0  # seconds for the kernel to end a killed process

_DYING_S = 1.0  # seconds for a worker whose pipe is closed to end
_WHY_DEAD = {
    "SIGKILL": "The system ends processes so when memory runs out: use fewer workers, or a smaller prefetch_factor",
    "SIGBUS": "Shared memory is full: make /dev/shm larger (docker run --shm-size), or use fewer workers",
    "SIGTERM": "Somebody ended it",
}

_running: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Iterators whose workers may still run, and the id of the process that started them. Only this process may end the
workers; a forked process has a copy of the entries."""
_hooked = 0  # id of the process in which the exit handler is registered


class SignalSafeWorkerInit:
    """A `worker_init_fn` that makes the worker ignore SIGINT and the first SIGTERM. A second SIGTERM ends the worker.

    SIGUSR1 and SIGUSR2 are ignored too, unless the program has its own handlers. The main process ends its workers
    without signals; workers that do not answer get SIGKILL: see `end_workers`.

    Args:
        then: the user's own `worker_init_fn`, or None.
    """

    def __init__(self, then: Callable[[int], Any] | None = None) -> None:
        self.then = then

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _once)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_end_with_main, name="instep-end-with-main", daemon=True).start()
        if self.then is None:
            return
        try:
            self.then(worker_id)
        except Exception as error:
            add_note(error, INIT_RAISED)
            raise


def _end_with_main() -> None:
    while not _is_orphan():
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)


def _is_orphan() -> bool:
    main, own = multiprocessing.parent_process(), multiprocessing.current_process()
    method = getattr(own, "_start_method", None) or multiprocessing.get_start_method()
    # With "forkserver" the worker's parent is always the fork server, which itself ends with the main process.
    return main is not None and method != "forkserver" and main.pid != os.getppid()


def _once(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)


def start_workers(loader: Any) -> tuple[Iterator[Any], Any]:
    """Iterate a loader with workers that ignore signals. Afterwards the loader is unchanged.

    Args:
        loader: a `DataLoader` or an object of a subclass; any other object is only iterated.

    Returns:
        The loader's iterator, and the argument for `end_workers`: torch's iterator if workers were started for it, else
        None. The two values differ if a subclass wraps torch's iterator. The second value is None for a persistent
        iterator that the user has made.
    """
    if not getattr(loader, "num_workers", 0) or not hasattr(loader, "_get_iterator"):
        return iter(loader), None
    started: list[Any] = []
    get_iterator, init = loader._get_iterator, loader.worker_init_fn

    def start() -> Any:
        del loader._get_iterator  # workers may get the loader as a pickle, and this function cannot be pickled
        loader.worker_init_fn = SignalSafeWorkerInit(init)
        try:
            started.append(get_iterator())
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if (cause := _unpicklable(loader, error)) is not None:
                raise cause from error
            raise
        finally:
            loader.worker_init_fn = init
        _watch(started[-1])
        return started[-1]

    loader._get_iterator = start
    try:
        return iter(loader), started[-1] if started else None
    finally:
        vars(loader).pop("_get_iterator", None)


def _unpicklable(loader: Any, error: Exception) -> DataError | None:
    """Return the error for a part of a loader that cannot be pickled for workers.

    Return None if all parts can be pickled, or if workers are forked.
    """
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    method = context.get_start_method()
    if method == "fork":
        return None
    for name in ("collate_fn", "dataset", "worker_init_fn", "batch_sampler"):
        part = getattr(loader, name, None)
        part = part.then if isinstance(part, SignalSafeWorkerInit) else part
        if type(part).__module__.startswith("instep."):
            # the part may be a wrapper around the user's object
            part = getattr(part, "__dict__", {}).get("_dataset", part)
        try:
            ForkingPickler.dumps(part)
        except Exception:  # noqa: BLE001  whatever the error is, the workers cannot get this part
            what = getattr(part, "__qualname__", type(part).__qualname__)
            return DataError(
                f"the loader's workers are started by {method}, which pickles what they get, and its {name}, {what}, "
                f"cannot be pickled: {error}. Define its functions and classes at the top of a module, without lambda, "
                'or use num_workers=0 or multiprocessing_context="fork".'
            )
    return None


def end_workers(started: Any) -> None:
    """End the workers of an iterator, and return when they have ended. May be called twice.

    The workers are asked to end, as torch does it. Workers that have not ended after 2 s are killed.

    Args:
        started: the second value that `start_workers` returned; with None nothing is done.
    """
    if started is None or _running.pop(started, 0) != os.getpid():
        return
    # Remove the workers' ids from torch's list. If a listed worker is killed, torch takes this for a failure, and may
    # raise an error anywhere in the program.
    if started._worker_pids_set:
        started._worker_pids_set = False
        _utils.signal_handling._remove_worker_pids(id(started))
    deadline = time.monotonic() + _TO_END_S
    for worker in started._workers:
        worker.join = _Join(worker, deadline)  # replaces torch's wait of 5 s for each worker
    started._shutdown_workers()
    for worker in started._workers:
        worker.terminate()
        BaseProcess.join(worker, _KILLED_S)
        # Remove reference cycles, so that pipes are closed now and not only by the garbage collector.
        vars(worker).pop("join", None)
        vars(worker._popen).pop("terminate", None)


def worker_failure(error: Exception, started: Any) -> LoaderWorkerError | None:
    """Return the error for a pass that ended because a worker died; None if no worker has died.

    Args:
        error: error that ended the pass: torch's own error, or the error of a pipe whose other end is closed.
        started: the second value that `start_workers` returned.
    """
    if started is None or not isinstance(error, OSError | EOFError | RuntimeError) or str(error).startswith("Caught "):
        return None
    for _ in range(1 + len(started._workers)):
        with suppress(RuntimeError):  # torch's SIGCHLD handler may raise an error in this block, once for each worker
            ended = wait([worker.sentinel for worker in started._workers], _DYING_S)
            for worker in started._workers:
                if worker.sentinel in ended:
                    BaseProcess.join(worker, _DYING_S)  # a worker's pipes are closed before its exit code can be read
            break
    dead = {worker.pid: worker.exitcode for worker in started._workers if worker.exitcode}
    if not dead:
        return None
    pid, code = next(iter(dead.items()))
    name = signal.Signals(-code).name if -code in list(signal.Signals) else ""
    how = f"ended by {name or f'signal {-code}'}" if code < 0 else f"exit code {code}"
    why = _WHY_DEAD.get(name, "With num_workers=0 the same data is read in the main process, which shows the cause")
    return LoaderWorkerError(f"DataLoader worker (pid {pid}) exited unexpectedly: {how}. {why}.")


def _watch(started: Any) -> None:
    """Register an iterator's workers to be ended at this process's exit, even if they ignore the request to end."""
    global _hooked
    for worker in started._workers:
        worker._popen.terminate = worker._popen.kill
    _running[started] = os.getpid()
    atexit.unregister(_end_all)
    # exit handlers run in reverse order, so this one runs before torch's handler, which would wait for each worker
    atexit.register(_end_all)
    if _hooked != os.getpid():
        _hooked = os.getpid()
        # a child process of `multiprocessing` calls only objects of `Finalize` at its exit, and no atexit handlers
        Finalize(None, _end_all, exitpriority=100)


def _end_all() -> None:
    for started in list(_running):
        end_workers(started)


class _Join:
    """Replacement for a worker's `join`, which waits until a deadline that all workers of an iterator share."""

    def __init__(self, worker: BaseProcess, deadline: float) -> None:
        self._worker, self._deadline = worker, deadline

    def __call__(self, timeout: float | None = None) -> None:
        BaseProcess.join(self._worker, max(0.0, self._deadline - time.monotonic()))
