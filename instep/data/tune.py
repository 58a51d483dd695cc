"""`tune_loader`: searches for the number of workers, the prefetching and the pinning with which a loader is fastest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from instep.data.index import rebuild
from instep.errors import SettingError
from instep.utils.checks import at_least, is_number, wrong

SETTINGS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")  # arguments of a `DataLoader`
_SAME = 0.05  # smaller relative differences in speed are noise, so the setting with fewer workers is chosen


@dataclass(frozen=True)
class LoaderTrial:
    """Speed of a loader with one setting.

    Attributes:
        num_workers: number of processes that load; 0 loads in the training process.
        prefetch_factor: batches that each worker loads ahead; None without workers.
        pin_memory: whether batches are put into pinned memory.
        first_batch_s: seconds until the first batch, including the start of the workers.
        batches_per_s: batches per second after the first one.
    """

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    first_batch_s: float
    batches_per_s: float

    @property
    def setting(self) -> dict[str, Any]:
        """This setting as arguments for a `DataLoader`."""
        values = (self.num_workers, self.prefetch_factor, self.pin_memory, self.num_workers > 0)
        return dict(zip(SETTINGS, values, strict=True))


def tune_loader(
    loader: DataLoader[Any],
    workers: Sequence[int] | None = None,
    prefetch: Sequence[int] = (2, 4),
    pin_memory: Sequence[bool] | None = None,
    seconds: float = 3.0,
    step_s: float = 0.0,
    tell: Callable[[LoaderTrial], Any] = lambda trial: None,
) -> tuple[LoaderTrial, list[LoaderTrial]]:
    """Measure a loader with several settings, and choose one.

    Each setting is measured with a new loader over the same data. Its first batch, which includes the start of the
    workers, is timed separately. Then batches are read for `seconds`, and the data is repeated if necessary.

    Args:
        loader: a plain `DataLoader`, which is not changed.
        workers: numbers of workers to try; None: 0 and powers of 2 up to the number of processors for this process.
        prefetch: numbers of batches per worker to try.
        pin_memory: values to try. None: True on CUDA, since a run on CUDA pins the batches of map-style data sets in
            any case (so that copies to the device overlap with the steps, which is not measured here); else False.
        seconds: seconds to measure each setting.
        step_s: seconds that a training step takes. A loader that is faster than the steps is fast enough, and among
            such settings the one with the fewest workers is chosen. 0 searches for the fastest setting.
        tell: function that is called with each result.

    Returns:
        The setting with the fewest workers among those that are fast enough (within 5 % of the fastest, or faster than
        the steps); and all measured settings.

    Raises:
        SettingError: the loader is not a plain `DataLoader` or has no batches, or a setting is wrong.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> data = DataLoader(range(100), batch_size=10)
        >>> best, every = tune_loader(data, workers=[0], seconds=0.01)
        >>> best.num_workers, len(every)
        (0, 1)
    """
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        raise wrong("loader", type(loader).__name__, "a torch.utils.data.DataLoader, which can be made anew")
    if not is_number(seconds) or seconds <= 0:
        raise wrong("seconds", seconds, "a number above 0")
    if not is_number(step_s) or step_s < 0:
        raise wrong("step_s", step_s, "a number of seconds of at least 0")
    if workers is None:
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = [0, *(2**power for power in range(count.bit_length()) if 2**power <= count)]
    workers = [at_least(0)("workers", each) for each in dict.fromkeys(workers)]
    pins = (torch.cuda.is_available(),) if pin_memory is None else pin_memory
    found: list[LoaderTrial] = []
    for count in workers:
        for ahead in [at_least(1)("prefetch", each) for each in prefetch] if count else [None]:
            for pin in pins:
                found.append(_measure(loader, count, ahead, pin, seconds))
                tell(found[-1])
    enough = max(each.batches_per_s for each in found) * (1 - _SAME)
    if step_s > 0:
        enough = min(enough, 1 / step_s)
    good = [each for each in found if each.batches_per_s >= enough]
    return min(good, key=lambda each: (each.num_workers, each.prefetch_factor or 0, each.pin_memory)), found


def _measure(loader: DataLoader[Any], workers: int, ahead: int | None, pin: bool, seconds: float) -> LoaderTrial:
    changes: dict[str, Any] = {
        "num_workers": workers,
        "prefetch_factor": ahead,
        "pin_memory": pin,
        "persistent_workers": workers > 0,
    }
    if isinstance(loader.dataset, IterableDataset):
        changes |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is not None:
        changes |= {"batch_sampler": loader.batch_sampler}
    else:
        changes |= {"batch_size": None, "sampler": loader.sampler}
    tried = rebuild(loader, **changes)
    begun = time.perf_counter()
    batches = _endless(tried)
    if next(batches, None) is None:
        raise SettingError("the loader has no batches to measure", field="loader")
    first = time.perf_counter()
    count, now = 0, first
    while now - first < seconds:
        next(batches)
        count, now = count + 1, time.perf_counter()
    batches.close()
    return LoaderTrial(workers, ahead, pin, first - begun, count / (now - first))


def _endless(loader: DataLoader[Any]) -> Generator[Any, None, None]:
    while True:
        given = False
        for batch in loader:
            given = True
            yield batch
        if not given:
            return
