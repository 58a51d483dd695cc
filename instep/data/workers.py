"""Loader workers that let the main process decide when they end.

A terminal sends Ctrl-C, torchrun's agent SIGTERM, and SLURM the signal ahead of the time limit, to all processes of the
group or of the tree. The main process finishes its step and saves; the workers must still serve it until then, and not
print tracebacks.

torch ends a worker within 5 s of the main process's death, unless that died while the worker was starting (the worker
then takes the process that adopted it for its parent) or the worker waits for room to pass on a batch: it then stays
for ever. So a thread looks after it here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_LOOK_EVERY_S = 1.0


class CalmWorker:
    """A `worker_init_fn`: in the worker SIGINT and the first SIGTERM do nothing; a second SIGTERM ends it.

    Nor do SIGUSR1 and SIGUSR2 do anything, unless the program has a handler of its own.

    The main process ends a worker that does not answer with SIGTERM too: torch once, and Python once more at exit.

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
        if self.then is not None:
            self.then(worker_id)


def _end_with_main() -> None:
    while not _is_orphan():
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)


def _is_orphan() -> bool:
    main, own = multiprocessing.parent_process(), multiprocessing.current_process()
    method = getattr(own, "_start_method", None) or multiprocessing.get_start_method()
    return main is not None and method != "forkserver" and main.pid != os.getppid()  # that server ends with main


def _once(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def calm_workers(loader: Any) -> Iterator[None]:
    """Within the block, an iterator of the loader starts calm workers; the loader is unchanged afterwards.

    Args:
        loader: a `DataLoader`, of any subclass; anything else is left alone.
    """
    before = getattr(loader, "worker_init_fn", None)
    if not getattr(loader, "num_workers", 0) or isinstance(before, CalmWorker):
        yield
        return
    loader.worker_init_fn = CalmWorker(before)
    try:
        yield
    finally:
        loader.worker_init_fn = before
