"""Checked mode: before each collective, all ranks compare which collective they are about to enter.

`PartialState().debug` switches it on. Each rank announces the collective that it is about to enter, over two channels.
A digest of the announcement is gathered over the control group; the gather fails if a rank is gone or does not come
within the group's time-out. The text of the announcement is in torch's key-value store, where other ranks can read it
even if the rank that wrote it is missing.

Invariants: instep announces every collective on the control group, so that an announcement is only compared with
announcements. The agreement on which ranks have a next batch is not announced: it uses another group, `Groups.step`. A
rank keeps the texts of its latest two announcements in the store. The rank cannot write a third text before every other
rank has left the first collective, so no text is overwritten while it may be read. Collectives of user code, DDP and
FSDP are not checked.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from instep.errors import DistributedError, SettingError
from instep.state.rank_records import RankRecords, call_site, digest_of, named_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def switch_checked_mode(group: ProcessGroup, debug: bool) -> None:
    """Switch checked mode on or off for a new control group. Collective.

    Raises:
        SettingError: on every rank, if checked mode is on for only some ranks.
    """
    global _active
    _active = None
    every = torch.empty(group.size(), dtype=torch.int64)
    dist.all_gather(list(every.split(1)), torch.tensor([int(debug)]), group=group)
    checked = every.nonzero().flatten().tolist()
    if checked and len(checked) < group.size():
        raise SettingError(
            f"checked mode is on for {named_ranks(checked)} of {group.size()} only. Set INSTEP_DEBUG, or debug=, alike "
            f"on every rank.",
            field="debug",
            got=debug,
        )
    if debug:
        _active = _CallRecords(group)


def announce(
    group: ProcessGroup | None,
    operation: str,
    details: str = "",
    timeout_s: float | None = None,
    any_line: bool = False,
) -> None:
    """In checked mode, compare which collective all ranks are about to enter.

    This is itself a collective. In normal mode, do nothing.

    Args:
        group: the control group; None for a single process.
        operation: name of the collective, and the arguments that must be the same on all ranks.
        details: names, shapes and dtypes that must be the same on all ranks.
        timeout_s: seconds to wait for the other ranks; None for the time-out of the process group.
        any_line: whether the ranks may call this from different lines, such as the two ends of a `with` block.

    Raises:
        DistributedError: on every rank, if one rank announces another collective or another line; on the waiting ranks,
            if one rank does not come.
    """
    if _active is not None and _active.group is group:
        _active.announce(operation, details, timeout_s, any_line)


class _CallRecords:
    """Announcements of this process before collectives, in one process group."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._records = RankRecords("checked", group, kept=2)
        self._rank, self._world = group.rank(), group.size()
        self._count = 0

    def announce(self, operation: str, details: str, timeout_s: float | None, any_line: bool) -> None:
        path, line = call_site(sys._getframe())
        call = f"{operation} at {path}:{line}"
        self._count += 1
        # Compare only the file's name, since nodes may have the same program in different folders.
        place = "" if any_line else f"{os.path.basename(path)}:{line}"
        mine = digest_of(f"{operation}\n{place}\n{details}")
        digests = torch.empty(self._world, dtype=torch.int64)
        started = time.monotonic()
        try:
            self._records.write(self._count, ", ".join([call, details]) if details else call)
            work: Any = dist.all_gather(list(digests.split(1)), torch.tensor([mine]), group=self.group, async_op=True)
            work.wait() if timeout_s is None else work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise self._alone(call, time.monotonic() - started, error) from error
        if digests.ne(mine).any():
            raise self._different(digests.tolist())

    def _different(self, digests: list[int]) -> DistributedError:
        common, alike = Counter(digests).most_common(1)[0]
        odd = [rank for rank, digest in enumerate(digests) if digest != common]
        differ = f"differ{'s' if len(odd) == 1 else ''} from the others"
        who = f": {named_ranks(odd)} {differ}" if 2 * alike > self._world else ""
        try:
            here = self._records.read(self._count)
        except RuntimeError:
            here = {}  # no text can be read, since the process that hosts the store has ended
        self._records.keep_store_alive(self._count, range(self._world))
        lines = [f"ranks disagree before a collective{who}. By rank:"]
        lines += [f"  rank {rank}: {here.get(rank, 'not known')}" for rank in range(self._world)]
        lines.append("Every rank must come to the same call, with tensors of the same names, shapes and dtypes.")
        return DistributedError("\n".join(lines))

    def _alone(self, call: str, waited_s: float, error: RuntimeError) -> DistributedError:
        """Return the error for a collective that some ranks did not enter."""
        try:
            here, before = self._records.read(self._count), self._records.read(self._count - 1)
            self._records.write(self._count, f"{here.get(self._rank, call)} (gave up after {waited_s:.1f} s)")
        except RuntimeError:
            return DistributedError(
                f"{call}: not everybody came; waited {waited_s:.1f} s ({error}). Who did is not known: the job's store "
                f"does not answer either. See whether rank 0, or whoever keeps the store, is late or has ended."
            )
        self._records.keep_store_alive(self._count, here)
        missing = [rank for rank in range(self._world) if rank not in here]
        what = f"{named_ranks(missing)} did not come" if missing else "the connection broke"
        lines = [f"{call}: {what}; waited {waited_s:.1f} s ({error}). By rank:"]
        for rank in range(self._world):
            last = before.get(rank, "none so far")
            lines.append(f"  rank {rank}: {here.get(rank, f'not here; its last collective was {last}')}")
        return DistributedError("\n".join(lines))


_active: _CallRecords | None = None
