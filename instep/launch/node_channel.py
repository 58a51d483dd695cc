"""Messages between the agents of a job in a round: that the round is over and why, and how each node has ended.

A round is the time from one start of all ranks to their end.

A thread with its own connection reads the agents' store a few times a second, since a read blocks if no answer comes.
If the store does not answer for `patience_s`, this node counts as cut off. Each node increments a number in the store,
its beat. The first node watches the beats of all other nodes, and the other nodes watch the beat of the first. Times
are measured by the clock of the node that watches.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from instep.errors import InstepError
from instep.launch.signed import SignedStore

T = TypeVar("T")
_POLL_S = 0.1
_ANSWER_S = 3.0


@dataclass(frozen=True)
class Alarm:
    """Reason why a round is over; the first alarm in the store counts for all nodes.

    Args:
        kind: "failed": a rank failed; "lost": a node does not answer; "grow": another node waits to join the job.
        node: number of the node that raised the alarm.
        nodes: number of nodes in the round.
        text: details, for a message.
    """

    kind: Literal["failed", "lost", "grow"]
    node: int
    nodes: int
    text: str = ""


@dataclass(frozen=True)
class Round:
    """Number and job of a round, and the failures before it; the same for all agents.

    Args:
        number: number of the round, from 0.
        job: name of the job, the same in all rounds, and different from all other jobs.
        failures: number of earlier rounds that failed.
    """

    number: int
    job: str
    failures: int


def open_round(store: SignedStore, meeting: SignedStore, node: int, job: str) -> Round:
    """Agree on the number of a new round; the agents of all nodes in the round must call this.

    Args:
        store: the agents' store, which is the same in all rounds.
        meeting: a store for this round only.
        node: number of this node in the round.
        job: name for the job if it has none yet.
    """
    if node == 0:
        name = store.set_once("job", job)
        now = Round(store.find("rounds", 0), name, store.find("failures", 0))
        store.put("rounds", now.number + 1)  # only the first node of a round writes this number
        meeting.put("round", asdict(now))
        return now
    return Round(**meeting.wait_for("round"))


class NodeChannel:
    """Channel for messages between this agent and the other agents in one round; `close` ends it.

    Args:
        store: a connection to the agents' store that no other code uses.
        round_: the round.
        node: number of this node.
        nodes: number of nodes in the round.
        patience_s: seconds without an answer after which a node counts as lost.
        count_waiting: function that returns how many nodes wait to join the job; None if no node may join.

    Attributes:
        alarm: reason why the round is over; None while it runs.
        waiting: whether nodes wait to join the job.
    """

    def __init__(
        self,
        store: SignedStore,
        round_: Round,
        node: int,
        nodes: int,
        patience_s: float,
        count_waiting: Callable[[], int] | None = None,
    ) -> None:
        self.alarm: Alarm | None = None
        self.waiting = False
        self.node, self.nodes = node, nodes
        self._job = store
        self._store = store.below(f"round-{round_.number}")
        self._failures = round_.failures
        self._beat = 0
        self._patience_s = patience_s
        self._count_waiting = count_waiting
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._heard = time.monotonic()
        self._broken = ""
        self._done = False
        self._all_done = False
        self._beats: dict[int, tuple[int, float]] = {}
        self._ended: set[int] = set()
        self._thread: threading.Thread | None = None
        if nodes > 1 or count_waiting is not None:
            self._thread = threading.Thread(target=self._talk, name="instep-peers", daemon=True)
            self._thread.start()

    @property
    def cut_off(self) -> str:
        """Reason why this node can no longer reach the other nodes; "" if it can."""
        if self._thread is None:
            return ""
        silent_s = time.monotonic() - self._heard
        if silent_s > self._patience_s and not self._broken:
            self._broken = f"this node is cut off: the agents' store did not answer for {silent_s:.0f} s"
        return self._broken

    def raise_alarm(self, kind: Literal["failed", "grow"]) -> None:
        """Announce that the round is over; if another node has announced it before, that node's reason counts."""
        if not self.cut_off:
            self._do(lambda: self._raise(Alarm(kind, self.node, self.nodes)))

    def count_failure(self) -> None:
        """Add this round to the failed rounds. All agents of the round may do so, since they write the same number."""
        self._do(lambda: self._job.put("failures", self._failures + 1))

    def refresh(self) -> None:
        """Read all announcements that were made so far."""
        self._do(self._look)

    def all_done(self) -> bool:
        """Return True if the ranks of all nodes have ended well; call this only after this node's ranks have."""
        if not self._done:
            self._done = True
            self._do(self._post_done)
        return self._thread is None or self._all_done

    def exchange(self, name: str, value: Any, timeout_s: float) -> dict[int, Any]:
        """Exchange a value with the other nodes, and return the values by node; a node that is late is left out."""
        self._do(lambda: self._store.put(f"{name}-{self.node}", value))
        found: dict[int, Any] = {self.node: value}
        deadline = time.monotonic() + timeout_s

        def look() -> None:
            self._look()
            for node in set(range(self.nodes)) - found.keys():
                if (given := self._store.find(f"{name}-{node}")) is not None:
                    found[node] = given

        while True:
            self._do(look)
            if len(found) == self.nodes or self.cut_off or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_S / 2)

    def close(self) -> None:
        """End the channel's thread; may be called twice."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(_ANSWER_S)

    # ---- in the channel's thread, if there is one

    def _do(self, act: Callable[[], T]) -> T | None:
        """Run a function in the channel's thread and return its result; return None if no answer comes."""
        if self._thread is None:
            return act()
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(act())
            except BaseException as error:
                answer.set_exception(error)
                raise

        self._asked.put(run)
        try:
            return answer.result(_ANSWER_S)
        except (NoAnswer, RuntimeError):  # the property `cut_off` reports the reason
            return None

    def _talk(self) -> None:
        try:
            self._store.put(f"host-{self.node}", socket.gethostname())
            while True:
                try:
                    act = self._asked.get(timeout=_POLL_S)
                    if act is None:
                        return
                    act()
                except queue.Empty:
                    self._look()
                self._heard = time.monotonic()
        except InstepError as error:
            self._broken = str(error).rstrip(".")
        except RuntimeError as error:
            self._broken = f"the agents' store has gone with its host ({str(error).splitlines()[0]})"

    def _look(self) -> None:
        store = self._store
        if self.alarm is None and (alarm := store.find("alarm")) is not None:
            self.alarm = Alarm(**alarm)
        if self._done and not self._all_done:
            self._look_for_ends()
        if self._count_waiting is not None and not self.waiting:
            self.waiting = self._count_waiting() > 0
        if self._thread is None:
            return
        self._beat += 1
        store.put(f"beat-{self.node}", self._beat)
        if self.alarm is None and not self._all_done:
            self._watch()

    def _watch(self) -> None:
        now = time.monotonic()
        for node in range(1, self.nodes) if self.node == 0 else (0,):
            beat = self._store.find(f"beat-{node}", 0)
            before, since = self._beats.get(node, (-1, now))
            if beat != before:
                self._beats[node] = (beat, now)
            elif now - since > self._patience_s:
                host = self._store.find(f"host-{node}", "its host")
                self._raise(
                    Alarm("lost", self.node, self.nodes, f"node {node} ({host}) did not answer for {now - since:.0f} s")
                )

    def _raise(self, alarm: Alarm) -> None:
        self.alarm = Alarm(**self._store.set_once("alarm", asdict(alarm)))

    def _post_done(self) -> None:
        self._store.put(f"done-{self.node}", True)
        self._look_for_ends()

    def _look_for_ends(self) -> None:
        left = set(range(self.nodes)) - self._ended
        self._ended |= {node for node in left if self._store.find(f"done-{node}", False)}
        self._all_done = len(self._ended) == self.nodes
