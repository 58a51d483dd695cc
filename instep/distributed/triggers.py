"""Triggers: requests, such as "stop", that any process may set and that all processes then see at the same step.

A trigger is a name with a reason: "stop", "save", "preempted", or a user's own name. Setting a trigger is local,
without communication. The processes agree on triggers while they train, without waiting for each other:

- At some steps, called boundaries, every rank notes its own triggers and starts one asynchronous MAX all-reduce, on
  CPU, of two numbers: whether it has a trigger, and how many steps away the next boundary should be.
- At the next boundary every rank reads the result of the all-reduce, which has usually finished long before. If any
  rank had a trigger, the ranks exchange the names and reasons that they noted at the previous boundary, and all return
  the same triggers at the same step.

Invariants: all ranks have the same boundaries, since the distance between them is itself agreed; every collective here
happens at a step that all ranks reach; a single process keeps the same schedule. After an error, no rank waits for an
agreement.

At the end of an epoch and of the loop, `sync` reads the started agreement, and makes a last agreement on the triggers
of all ranks. So no message is left in the process group. Triggers with users' own names that were agreed on, but that
no `check` has requested, stay in `unclaimed`, for a later `check` or for a message to the user. Triggers that are set
after the last `sync` stay local (`pending`), and are lost with the object.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from instep.errors import DistributedError, SettingError
from instep.state import PartialState
from instep.state.collective_checks import announce
from instep.state.messages import exchange, meet
from instep.state.process import step_group

BOUNDARY_S = 0.05
MAX_EVERY = 10_000
LOOP_TRIGGERS = ("stop", "save", "preempted", "validate")


@dataclass(frozen=True)
class Trigger:
    """A trigger that all processes agreed on.

    Args:
        name: name of the trigger.
        reason: reason for people to read.
        rank: rank that set the trigger; the lowest one if several ranks did.
    """

    name: str
    reason: str
    rank: int


class Triggers:
    """Triggers of one fit, or of one Accelerator, and the ranks' agreement on them.

    Args:
        every: optimizer steps between two boundaries. By default it is as many steps as take about 50 ms, and all ranks
            agree on it. The number starts at 1 and at most doubles from boundary to boundary, since the first steps may
            return early from the device and seem too fast.
        reserved: names of the loop's own triggers. `check` reports them, but only `tick` and `sync` reset them.

    Raises:
        SettingError: `every` is below 1.

    Example:
        >>> triggers = Triggers(every=1)
        >>> triggers.set("stop", "enough")
        >>> triggers.tick(1)
        ()
        >>> triggers.tick(2)
        (Trigger(name='stop', reason='enough', rank=0),)
    """

    def __init__(self, every: int | None = None, reserved: Collection[str] = LOOP_TRIGGERS) -> None:
        if every is not None and every < 1:
            raise SettingError(f"trigger_every={every} must be at least 1 step", field="trigger_every", got=every)
        self._group, self._step = PartialState().control_group, step_group()
        self._maximum = dist.AllreduceOptions()
        self._maximum.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._reserved = frozenset(reserved)
        self._fixed = every
        self._every = every or 1
        self._set: dict[str, str] = {}
        self._agreed: dict[str, Trigger] = {}
        # Names of users' triggers that were agreed on in `tick` or `sync`, but that no `check` has requested yet.
        self._unclaimed: set[str] = set()
        # Steps in this range have no boundary. A lower step is one after a rollback, or the first of another counter.
        self._since = self._next = 0
        self._outstanding: _Outstanding | None = None
        self._last: tuple[int, float] | None = None
        self._abandoned = False

    # ---- local methods, without communication

    def set(self, name: str, reason: str = "") -> None:
        """Set a trigger on this process. Safe in a signal handler and in any thread.

        Args:
            name: any name. Setting the same name again, before the agreement on it, changes nothing.
            reason: reason for people to read.
        """
        self._set.setdefault(name, reason)

    @property
    def pending(self) -> bool:
        """Whether this process has set a trigger that is not yet agreed on."""
        return bool(self._set)

    @property
    def every(self) -> int:
        """Optimizer steps between two agreements; each agreement may change this number."""
        return self._every

    @property
    def agreed(self) -> Mapping[str, Trigger]:
        """Triggers that were agreed on so far, by name; the last one, if a name was agreed on several times."""
        return MappingProxyType(self._agreed)

    @property
    def unclaimed(self) -> tuple[Trigger, ...]:
        """Users' own triggers that were agreed on in `tick` or `sync`, but that no `check` has requested yet."""
        return tuple(self._agreed[name] for name in sorted(self._unclaimed))

    def seen(self, name: str) -> bool:
        """Return True if a trigger was agreed on so far."""
        return name in self._agreed

    # ---- collective methods, which every process calls at the same step

    def tick(self, step: int) -> tuple[Trigger, ...]:
        """Return the triggers that the ranks agree on at this step. Called once after every optimizer step.

        Args:
            step: number of optimizer steps so far, the same on all ranks.

        Returns:
            The triggers agreed on at this step, the same on all ranks; nearly always an empty tuple.

        Raises:
            DistributedError: another process has ended.
        """
        if self._since <= step < self._next:
            return ()
        return self._at_boundary(step)

    def sync(self) -> tuple[Trigger, ...]:
        """Agree at once on the triggers of all processes, as at an epoch's end, before a save and at the end of fit.

        This first waits for the agreement that is in progress.

        Returns:
            The triggers, the same on all ranks.

        Raises:
            DistributedError: another process has ended.
        """
        if self._abandoned:
            return ()
        self._drain()
        snapshot = dict(self._set)
        return self._consume(self._exchange(snapshot)) if self._any("triggers: sync", snapshot) else ()

    @contextmanager
    def inner(self) -> Iterator[None]:
        """Enter an inner loop such as validation: `tick` then counts its steps, with a separate interval.

        At the start and the end of the inner loop, an agreement in progress is finished. Triggers are agreed on in both
        loops.
        """
        self._drain()
        every, self._every, self._next = self._every, self._fixed or 1, 0
        yield
        self._drain()
        self._every, self._next = every, 0

    def check(self, name: str | None = None) -> bool:
        """Return True, on all processes, if any process has set a trigger. Blocking.

        The trigger is then reset on all processes. A trigger of the Trainer's own loop is not reset, since the loop has
        not acted on it yet.

        Args:
            name: name of the trigger; None for any trigger that is not the loop's own.

        Raises:
            DistributedError: another process has ended.
        """
        if self._abandoned:
            return False
        # Triggers from earlier agreements are known to all ranks, so they need no message.
        claimed = self._unclaimed if name is None else self._unclaimed & {name}
        if claimed:
            self._unclaimed = self._unclaimed - claimed
            return True
        snapshot = dict(self._set)
        asked = {
            key: why for key, why in snapshot.items() if (key not in self._reserved if name is None else key == name)
        }
        if not self._any(f"check_trigger({name!r})", asked):
            return False
        if name not in self._reserved:
            self._unclaimed.difference_update(trigger.name for trigger in self._consume(self._exchange(asked)))
        return True

    def abandon(self) -> None:
        """Drop the agreement in progress without waiting, after an error. Afterwards there are no agreements."""
        self._abandoned = True
        self._outstanding = None
        self._since, self._next = 0, _NEVER

    def _drain(self) -> None:
        """Wait for the agreement in progress, but leave triggers to the next agreement."""
        if self._outstanding is not None:
            self._every = self._read(self._outstanding)[1]
            self._outstanding = None
        # forget the time, so that the time of a following validation or save does not count as a step's time
        self._last = None

    def _at_boundary(self, step: int) -> tuple[Trigger, ...]:
        now = time.perf_counter()
        triggers: tuple[Trigger, ...] = ()
        outstanding = self._outstanding
        if outstanding is not None:
            pending, self._every = self._read(outstanding)
            if pending:
                # Leave out triggers that a `check` has reset since the agreement began.
                noted = {name: reason for name, reason in outstanding.snapshot.items() if name in self._set}
                triggers = self._consume(self._exchange(noted))
        self._outstanding = self._start(dict(self._set), self._proposal(step, now))
        self._last = (step, time.perf_counter())
        self._since, self._next = step, step + self._every
        return triggers

    def _proposal(self, step: int, now: float) -> int:
        if self._fixed is not None:
            return self._fixed
        if self._last is None:
            return self._every
        last_step, last_time = self._last
        step_s = (now - last_time) / max(1, step - last_step)
        wanted = math.ceil(BOUNDARY_S / step_s) if step_s > BOUNDARY_S / MAX_EVERY else MAX_EVERY
        return max(1, min(wanted, 2 * self._every, MAX_EVERY))

    def _any(self, operation: str, snapshot: dict[str, str]) -> bool:
        """Return True if any rank has set a trigger. Collective."""
        if self._group is None:
            return bool(snapshot)
        announce(self._group, operation)
        return bool(meet(self._group, operation, (), [bool(snapshot)]).any())

    def _start(self, snapshot: dict[str, str], proposal: int) -> _Outstanding:
        message = torch.tensor([bool(snapshot), proposal], dtype=torch.int64)
        work = None
        if self._step is not None:
            announce(self._group, "triggers: tick")
            try:
                # Call the group's method directly, since torch's function around it would double the time that
                # the call adds to a step.
                work = self._step.allreduce([message], self._maximum)
            except RuntimeError as error:
                raise _gone(error) from error
        return _Outstanding(snapshot, message, work)

    def _read(self, outstanding: _Outstanding) -> tuple[int, int]:
        if outstanding.work is not None:
            try:
                outstanding.work.wait()
            except RuntimeError as error:
                raise _gone(error) from error
        pending, every = outstanding.message.tolist()
        return pending, every

    def _exchange(self, snapshot: dict[str, str]) -> list[dict[str, str]]:
        try:
            return exchange(snapshot, self._group, "triggers: names")
        except DistributedError:
            raise  # in checked mode this error has more details
        except RuntimeError as error:
            raise _gone(error) from error

    def _consume(self, by_rank: list[dict[str, str]]) -> tuple[Trigger, ...]:
        found: dict[str, Trigger] = {}
        for rank, snapshot in enumerate(by_rank):
            for name, reason in snapshot.items():
                found.setdefault(name, Trigger(name, reason, rank))
        for name in found:
            self._set.pop(name, None)
        self._agreed.update(found)
        self._unclaimed.update(found.keys() - self._reserved)
        return tuple(found.values())


@dataclass(frozen=True)
class _Outstanding:
    """An all-reduce in progress, and the triggers that this rank had set when it started."""

    snapshot: dict[str, str]
    message: torch.Tensor
    work: Any


_NEVER = 2**63


def _gone(error: RuntimeError) -> DistributedError:
    return DistributedError(
        f"another process is gone, or did not come within the time-out: triggers could not be agreed on ({error}). Its "
        f"own output says why it ended."
    )
