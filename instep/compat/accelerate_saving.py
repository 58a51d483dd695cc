"""`save_state` for programs of Accelerate, of which some call it on all ranks and others on the main process alone."""

from __future__ import annotations

import copy
import shutil
import time
from contextlib import suppress
from pathlib import Path

from instep.accelerator.saving import States
from instep.distributed.after_error import Alone
from instep.errors import DistributedError, UsageError
from instep.state import PartialState
from instep.state.rank_records import RankRecords

_LIMIT_S = 1800.0  # torch's default time-out of a collective
_POLL_S = 0.01


class Attendance:
    """Record of which ranks take part in a call of `save_state`.

    Each rank counts its batches and collectives, of which all ranks have the same number. While the main process is in
    `save_state`, a rank with a higher count than the main process went on without calling `save_state`.
    """

    def __init__(self) -> None:
        process = PartialState()
        group = process.control_group
        self._records = None if group is None else RankRecords("saves", group)
        self._rank, self._world_size = process.process_index, process.num_processes
        self._place = self._saves = 0

    def advance(self) -> None:
        """Count a batch or a collective just before it starts."""
        self._place, self._saves = self._place + 1, 0
        if self._records is not None and self._rank:
            with suppress(RuntimeError):  # the main process, which hosts the store, has ended, so it will save nothing
                self._records.write(self._place, f"{self._place} 0")

    def all_come(self) -> bool:
        """Return True if all ranks call `save_state` at this point; all ranks that call it get the same result.

        Raises:
            DistributedError: within 30 minutes, a rank neither calls `save_state` nor goes on without it.
        """
        records, deadline = self._records, time.monotonic() + _LIMIT_S
        if records is None:
            return True
        self._saves += 1
        if self._rank:
            records.write(self._place, f"{self._place} {self._saves}")
        while time.monotonic() < deadline:
            found = {rank: tuple(map(int, text.split())) for rank, text in records.read(self._place, True).items()}
            # from rank 0: whether all ranks take part (1 or 0), and the number of the save for which this is true
            first = found.pop(0, (0, 0))
            if self._rank and first[1] >= self._saves:
                return bool(first[0])
            here = (self._place, self._saves)
            if not self._rank and len([there for there in found.values() if there >= here]) == self._world_size - 1:
                together = all(place == self._place for place, _ in found.values())
                records.write(self._place, f"{together:d} {self._saves}")
                return together
            time.sleep(_POLL_S)
        raise DistributedError(f"save_state waited {_LIMIT_S:.0f} s for the other ranks to come to it or to go on")


def save_alone(states: States, path: Path) -> Path:
    """Save a state on the main process without waiting for other ranks, as in a run of one process.

    The random states of the other ranks are not saved; a resumed run draws new random numbers on them.

    Raises:
        UsageError: the main process does not hold the whole state.
    """
    prepared = states.prepared
    strategies = [prepared.main_strategy, *map(prepared.strategy_of, prepared.models.values())]
    whole = all(strategy.holds_all([known.optimizer for known in prepared.optimizers]) for strategy in strategies)
    if not whole or any(loader.source.rank_state for loader in prepared.dataloaders):
        raise UsageError(
            "accelerator.save_state() was called on the main process alone, which does not hold the whole state: the "
            "strategy shards it, or each rank has its own place in a stream. Call it on all ranks."
        )
    alone = copy.copy(states)
    alone.prepared = copy.copy(prepared)
    alone.prepared.world_size = 1
    store = copy.copy(states.store(path.parent))
    store.ranks = Alone()
    step, write, info = alone._collect(False, {})
    return store.save(step, write, info=info, name=path.name, line=states.line)


def take_name(saved: Path, named: Path) -> Path:
    """Rename the folder of a saved state to `named`, and return the state's path.

    A saved state at `named` is replaced. If `named` is a folder with other files, the state's folder is not renamed.
    """
    old = saved.with_name(f".deleting-{saved.name}")
    if (named / "manifest.json").exists():
        named.rename(old)
    elif named.is_dir() and any(named.iterdir()):
        return saved
    saved.rename(named)
    shutil.rmtree(old, ignore_errors=True)
    return named
