"""Connect agents and ranks (rendezvous) for a fixed or elastic set of nodes, with a new store for ranks in every round.

torch's rendezvous for a fixed set of nodes keeps one store for all rounds, so restarted ranks read the addresses of
dead ranks and hang; its elastic rendezvous counts the restarts of each agent separately and may hang too. Here the
ranks of a single node connect through a new file in the agent's private folder, without a port. With several nodes, the
first node hosts a new store for each round. The agents communicate over their own connections (`node_channel`), and
sign what they write (`signed`).
"""

from __future__ import annotations

import os
import socket
import uuid
from abc import abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from instep.errors import DistributedError, InstepError, SettingError
from instep.launch.signed import NotOurs, SignedBackend, SignedStore
from instep.launch.spec import LaunchSpec
from instep.state.launchers import MEETING_FILE, meeting_variable
from instep.state.secret import Secret

_NODES_MEET_S = 900.0
_READ_S = 60.0
_DEFAULT_PORT = 29400
_LOOPBACK = "127.0.0.1"
# torch finds the name of each event by `inspect.stack()`. In a process with many modules that takes tenths of a second
# for each heartbeat, so that on a busy machine a node that wants to join is never quick enough to write the state.
dynamic_rendezvous.get_method_name = lambda depth=2: "event"
_CONF = {"last_call_timeout": "10", "keep_alive_interval": "5", "keep_alive_max_attempt": "3"}


class Nodes(RendezvousHandler):
    """Base class of the rendezvous, with methods for torch's agent and further methods for instep's agent.

    Attributes:
        elastic: whether nodes may leave and join.
        patience_s: seconds of silence after which a node counts as lost.
        renew: whether the agent wants a new round because a node waits to join.
    """

    elastic = False
    patience_s = 15.0
    renew = False

    def __init__(self, spec: LaunchSpec, secret: Secret) -> None:
        self._spec = spec
        self._secret = secret
        self._run_id = spec.run_id or uuid.uuid4().hex
        self._ranks_store: TCPStore | None = None

    @abstractmethod
    def connect(self) -> SignedStore:
        """Open a new connection to the agents' store, for one thread."""

    def count_waiting(self) -> int:
        """Return the number of nodes that wait to join."""
        return 0

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._run_id

    def num_nodes_waiting(self) -> int:
        return int(self.renew)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing, since the agents themselves agree on the end of the job."""

    def shutdown(self) -> bool:
        self._ranks_store = None
        return True

    def close(self) -> None:
        """Release the resources of a round; a second call does nothing."""

    def _info(self, store: Store, name: str, node: int, nodes: int, address: str) -> RendezvousInfo:
        """Open the round `name`; its first node hosts a new store for the ranks, and announces the store's address."""
        if node == 0:
            self._ranks_store = _serve(address, 0)
            store.set("ranks", self._secret.sign(f"{name}/ranks", [address, self._ranks_store.port]))
        address, port = self._secret.verify(f"{name}/ranks", store.get("ranks"))
        self.renew = False
        # The agents' keys have a prefix, so that they cannot collide with the ranks' keys.
        signed: Any = SignedStore(PrefixStore("agents", store), self._secret, f"{name}/agents")
        return RendezvousInfo(signed, node, nodes, RendezvousStoreInfo(address, port))


class OneNode(Nodes):
    """Rendezvous of a single node, which needs no other process and opens no port.

    Args:
        spec: the job of the agent.
        secret: secret of the job.
        folder: folder of the agent, which no other user can enter.
    """

    def __init__(self, spec: LaunchSpec, secret: Secret, folder: Path) -> None:
        super().__init__(spec, secret)
        self._folder = folder
        self._round = -1
        self._store = HashStore()
        self._kept_port: socket.socket | None = None

    @property
    def use_agent_store(self) -> bool:
        # False lets rank 0 host the store if a program makes the process group by `env://`, as without an agent.
        return False

    def get_backend(self) -> str:
        return "instep-one-node"

    def next_rendezvous(self) -> RendezvousInfo:
        self._round += 1
        self.close()
        # The port is bound but does not listen: rank 0 can still listen on it, but no other program gets it as a free
        # port.
        self._kept_port = socket.socket()
        self._kept_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept_port.bind((_LOOPBACK, 0))
        port = self._kept_port.getsockname()[1]
        os.environ[MEETING_FILE] = meeting_variable(_LOOPBACK, port, str(self._folder / f"ranks-{self._round}"))
        store: Any = SignedStore(self._store, self._secret, "agents").below(str(self._round))
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_LOOPBACK, port))

    def connect(self) -> SignedStore:
        return SignedStore(self._store, self._secret, "peers")

    def close(self) -> None:
        if self._kept_port is not None:
            self._kept_port.close()
            self._kept_port = None


class FixedNodes(Nodes):
    """Rendezvous of a fixed set of numbered nodes, in a store that node 0 hosts at `master_addr:master_port`."""

    def __init__(self, spec: LaunchSpec, secret: Secret) -> None:
        super().__init__(spec, secret)
        assert spec.master_port is not None
        self._where = spec.master_addr, spec.master_port
        self._round = -1
        self._name = spec.run_id or "job"  # the job's name must be the same on all nodes
        self._meeting: Store | None = None

    def get_backend(self) -> str:
        return "instep-fixed"

    def next_rendezvous(self) -> RendezvousInfo:
        self._round += 1
        spec = self._spec
        if self._meeting is None:
            self._meeting = (_serve if spec.node_rank == 0 else _join)(*self._where)
        name = f"{self._name}/{self._round}"
        return self._info(PrefixStore(name, self._meeting), name, spec.node_rank, spec.num_nodes, spec.master_addr)

    def connect(self) -> SignedStore:
        name = f"{self._name}/peers"
        return SignedStore(PrefixStore(name, _join(*self._where)), self._secret, name)


class ElasticNodes(Nodes):
    """torch's "c10d" rendezvous: from `min_nodes` to `num_nodes` nodes that join and leave, renumbered in each round.

    The first agent on the machine that `rdzv_endpoint` names hosts the agents' store. The job ends with this agent.
    """

    elastic = True

    def __init__(self, spec: LaunchSpec, secret: Secret) -> None:
        super().__init__(spec, secret)
        assert spec.rdzv_endpoint is not None
        conf = {**_CONF, **spec.rdzv_conf}
        self.patience_s = float(conf["keep_alive_interval"]) * float(conf["keep_alive_max_attempt"])
        self._endpoint = parse_rendezvous_endpoint(spec.rdzv_endpoint, default_port=_DEFAULT_PORT)
        near = _address_towards(*self._endpoint)
        self._address = spec.local_addr or near
        hosts = conf.pop("is_host", "")
        here = hosts.lower() in ("1", "true", "yes") if hosts else _is_local(self._endpoint[0], near)
        read_s = float(conf.pop("read_timeout", _READ_S))
        self._store = _serve_or_join(*self._endpoint, here, read_s)
        backend = SignedBackend(self._store, self._run_id, secret)
        self._least = spec.num_nodes if spec.min_nodes is None else spec.min_nodes
        parameters = RendezvousParameters(
            "c10d", spec.rdzv_endpoint, self._run_id, self._least, spec.num_nodes, local_addr=self._address, **conf
        )
        self._handler = dynamic_rendezvous.create_handler(self._store, backend, parameters)

    def get_backend(self) -> str:
        return "c10d"

    def next_rendezvous(self) -> RendezvousInfo:
        # torch's own store for the ranks is not used, since torch keeps it over several rounds.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        try:
            info = self._handler.next_rendezvous()
        except RendezvousTimeoutError as error:
            raise InstepError(
                f"fewer than {self._least} nodes came to {self._spec.rdzv_endpoint} (run {self._run_id!r}) in time. "
                "Start an agent on each node with the same rdzv_endpoint and run_id; rdzv_conf's join_timeout (in "
                "seconds) waits for longer, and min_nodes says how few will do."
            ) from error
        except NotOurs as error:
            raise DistributedError(str(error)) from error
        except RendezvousError as error:
            raise InstepError(f"the agents could not meet at {self._spec.rdzv_endpoint}: {error}") from error
        return self._info(info.store, self._run_id, info.rank, info.world_size, self._address)

    def connect(self) -> SignedStore:
        name = f"{self._run_id}/peers"
        return SignedStore(PrefixStore(name, _join(*self._endpoint)), self._secret, name)

    def count_waiting(self) -> int:
        try:
            return self._handler.num_nodes_waiting()
        except RendezvousError as error:
            raise InstepError(str(error)) from error


def make_rendezvous(spec: LaunchSpec, secret: Secret, folder: Path) -> Nodes:
    """Make the rendezvous for the job of a spec.

    Args:
        spec: the job of the agent.
        secret: secret of the job.
        folder: folder of the agent, which no other user can enter.
    """
    if spec.num_nodes == 1:
        return OneNode(spec, secret, folder)
    return (ElasticNodes if spec.rdzv_backend == "c10d" else FixedNodes)(spec, secret)


def _serve(address: str, port: int, timeout_s: float = _NODES_MEET_S) -> TCPStore:
    return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _join(address: str, port: int, timeout_s: float = _NODES_MEET_S) -> TCPStore:
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def _serve_or_join(address: str, port: int, here: bool, timeout_s: float) -> TCPStore:
    """Connect to the agents' store, which the first agent on the endpoint's machine hosts."""
    if here:
        try:
            return _serve(address, port, timeout_s)
        except RuntimeError:  # another agent of this machine already hosts the store
            pass
    try:
        return _join(address, port, timeout_s)
    except RuntimeError as error:
        raise InstepError(
            f"nothing answers at rdzv_endpoint={address}:{port}: {error}. One of the nodes must be reachable under it; "
            'rdzv_conf {"is_host": "1"} says on which one the store is to be hosted.'
        ) from error


def _address_towards(host: str, port: int) -> str:
    """Return this machine's address on the network that leads to a host; no message is sent."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SettingError(
            f"rdzv_endpoint={host}:{port} cannot be reached from {socket.gethostname()}: {error}",
            field="rdzv_endpoint",
            got=f"{host}:{port}",
        ) from error


def _is_local(host: str, near: str) -> bool:
    """Return True if a host name means this machine.

    `near` is this machine's address on the route to the host. On the same machine, the host has this address too.
    """
    return near in {entry[4][0] for entry in socket.getaddrinfo(host, None)} or host in ("localhost", "127.0.0.1")
