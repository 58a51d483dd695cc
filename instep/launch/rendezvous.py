"""Where agents and their ranks meet: a fixed set of nodes, and a new store in every round.

torch's rendezvous for a fixed set of nodes keeps one store for all rounds, so ranks that were started again read the
addresses of dead ones and hang. Its elastic one numbers the nodes by their addresses, not as the user did.
"""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

if TYPE_CHECKING:
    from instep.launch.engine import LaunchSpec

_NODES_MEET_S = 900.0


class FixedNodes(RendezvousHandler):
    """A rendezvous of a fixed set of nodes, with a new store for the ranks in every round.

    Node 0 hosts the stores. With one node nothing but this process is asked. With several, the agents meet in a store
    at `master_addr:master_port`, where node 0 publishes the port of each round's store; a node that begins a new round
    is noticed by the others, who follow.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._run_id = spec.run_id or uuid.uuid4().hex
        self._round = -1
        self._meeting: Store | None = None
        self._ranks_store: TCPStore | None = None

    def get_backend(self) -> str:
        return "instep-fixed"

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        spec = self._spec
        self._round += 1
        host = spec.node_rank == 0
        if host:
            self._ranks_store = _serve(spec.master_addr, 0)
        if spec.num_nodes == 1:
            assert self._ranks_store is not None
            store, port = self._ranks_store, self._ranks_store.port
        else:
            meeting = self._join_meeting()
            meeting.add(self._arrived(self._round), 1)
            store = PrefixStore(f"round-{self._round}", meeting)
            if self._ranks_store is not None:
                store.set("port", str(self._ranks_store.port))
            port = int(store.get("port"))
        where = RendezvousStoreInfo(master_addr=spec.master_addr, master_port=port)
        # The agents' own keys must not meet the ranks' in one store.
        return RendezvousInfo(PrefixStore("agents", store), spec.node_rank, spec.num_nodes, where)

    def num_nodes_waiting(self) -> int:
        if self._meeting is None:
            return 0
        try:
            return self._meeting.add(self._arrived(self._round + 1), 0)
        except RuntimeError:  # node 0 is gone: its ranks are too, and ours will find out by themselves
            return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to mark: the set of nodes is fixed."""

    def shutdown(self) -> bool:
        self._meeting = self._ranks_store = None
        return True

    def _join_meeting(self) -> Store:
        if self._meeting is None:
            spec = self._spec
            assert spec.master_port is not None
            if spec.node_rank == 0:
                tcp = _serve(spec.master_addr, spec.master_port)
            else:
                tcp = TCPStore(spec.master_addr, spec.master_port, timeout=timedelta(seconds=_NODES_MEET_S))
            self._meeting = PrefixStore(self._run_id, tcp) if spec.run_id else tcp
        return self._meeting

    @staticmethod
    def _arrived(round_: int) -> str:
        return f"arrived-{round_}"


def _serve(address: str, port: int) -> TCPStore:
    return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_NODES_MEET_S))
