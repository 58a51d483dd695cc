"""Checked mode: every rank says what it is about to do before each collective, and all compare.

`PartialState().debug` switches it on. Two ways are used at once. A digest per rank goes over the control group: it is
the point where all meet, and a rank that is gone, or does not come within the group's time-out, breaks it. The words
behind the digest lie in torch's store, where everyone finds them without the help of the rank that is missing.

Invariants: whatever instep starts on the control group is announced, so that announcements pair with each other only
(but for "who has a next batch", which travels unseen). A rank holds two records, of its latest two collectives: it
cannot announce the next but one before every other rank has left the current one, so what somebody may still read is
never overwritten. What the user's code, DDP or FSDP send by themselves is not seen here.
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
    """Switch checked mode on or off for a new control group. A collective.

    Raises:
        SettingError: on every rank, if it is on for some only.
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
    """Compare what all ranks are about to do, in checked mode; then it is a collective, otherwise it does nothing.

    Args:
        group: the control group; None for a process alone.
        operation: the collective's name and the arguments that must be alike.
        details: the names, shapes and dtypes that must be alike.
        timeout_s: how long to wait for the others; the process group's own time-out when None.
        any_line: whether the ranks may come from different lines, such as the two ends of a `with` block.

    Raises:
        DistributedError: on every rank, when one announces something else, or from another line; on the ranks that
            wait, when one does not come.
    """
    if _active is not None and _active.group is group:
        _active.announce(operation, details, timeout_s, any_line)


class _CallRecords:
    """This process's announcements in one process group."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._records = RankRecords("checked", group, kept=2)
        self._rank, self._world = group.rank(), group.size()
        self._count = 0

    def announce(self, operation: str, details: str, timeout_s: float | None, any_line: bool) -> None:
        path, line = call_site(sys._getframe())
        call = f"{operation} at {path}:{line}"
        self._count += 1
        # The file's name alone: nodes may hold the same program in different folders.
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
            here = {}  # the store is gone
        self._records.keep_store_alive(self._count, range(self._world))
        lines = [f"ranks disagree before a collective{who}. By rank:"]
        lines += [f"  rank {rank}: {here.get(rank, 'not known')}" for rank in range(self._world)]
        lines.append("Every rank must come to the same call, with tensors of the same names, shapes and dtypes.")
        return DistributedError("\n".join(lines))

    def _alone(self, call: str, waited_s: float, error: RuntimeError) -> DistributedError:
        """Make the error for when the others could not be met."""
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
