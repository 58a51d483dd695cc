"""The agents' store with a MAC (message authentication code) on every value, since its port is open to everybody.

A value that is not signed with the job's secret, or is signed for another key, raises an error and is never unpickled.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from instep.state.secret import MAC_BYTES, Secret, not_ours


class SignedStore:
    """Signed JSON values by key, in a store of torch.

    Args:
        store: store of torch.
        secret: secret of the job.
        name: name of this store, which is part of each signature, so that a value of another store is refused.

    Raises:
        DistributedError: (when a value is read) the value was not signed with this job's secret.
    """

    def __init__(self, store: Store, secret: Secret, name: str) -> None:
        self._store, self._secret, self._name = store, secret, name

    def below(self, prefix: str) -> SignedStore:
        """Return the part of this store whose keys begin with a prefix."""
        return SignedStore(PrefixStore(prefix, self._store), self._secret, f"{self._name}/{prefix}")

    def put(self, key: str, value: Any) -> None:
        """Write a signed value."""
        self._store.set(key, self._sign(key, value))

    def find(self, key: str, default: Any = None) -> Any:
        """Read a value; return `default` if there is no value."""
        return self.wait_for(key) if self._store.check([key]) else default

    def wait_for(self, key: str) -> Any:
        """Wait until there is a value for the key, and return it."""
        return self._secret.verify(f"{self._name}/{key}", self._store.get(key))

    def set_once(self, key: str, value: Any) -> Any:
        """Write a value if the key has none yet, and return the value that is stored."""
        return self._secret.verify(f"{self._name}/{key}", self._store.compare_set(key, "", self._sign(key, value)))

    def _sign(self, key: str, value: Any) -> str:
        return self._secret.sign(f"{self._name}/{key}", value)

    # ---- methods of torch's stores: torch's agents call them to agree on the numbers of the ranks

    def set(self, key: str, value: str | bytes) -> None:
        self.put(key, value if isinstance(value, str) else value.decode())

    def get(self, key: str) -> bytes:
        return str(self.wait_for(key)).encode()

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]


class NotOurs(RendezvousStateError):
    """Error about a rendezvous whose state was not signed with this job's secret."""


class SignedBackend(RendezvousBackend):
    """torch's backend of the "c10d" rendezvous, with a MAC in front of its state, since the state is a pickle.

    Args:
        store: the agents' store.
        run_id: id of the job.
        secret: the job's secret.
    """

    _NOTHING = b"-"  # the key's first value, since a store's `get` waits until there is a value

    def __init__(self, store: Store, run_id: str, secret: Secret) -> None:
        self._store, self._secret = store, secret
        self._key = f"torch.rendezvous.{run_id}"
        self._call("compare_set", self._key, "", self._NOTHING.decode())

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._opened(self._call("get", self._key))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        if token and not isinstance(token, bytes):
            found = self.get_state()
            return None if found is None else (*found, False)
        signed = b64encode(self._secret.mac(self._key, state) + state)
        expected = token or self._NOTHING
        there: bytes = self._call("compare_set", self._key, expected.decode(), signed.decode())
        found = self._opened(there)
        return None if found is None else (*found, there == signed)

    def _opened(self, signed: bytes) -> tuple[bytes, Token] | None:
        if signed == self._NOTHING:
            return None
        try:
            data = b64decode(signed)
        except ValueError:
            data = b""
        mac, state = data[:MAC_BYTES], data[MAC_BYTES:]
        if not self._secret.fits(mac, self._key, state):
            raise NotOurs(str(not_ours(f"the agents' state {self._key!r}")))
        return state, signed

    def _call(self, operation: str, *args: Any) -> Any:
        try:
            return getattr(self._store, operation)(*args)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError(f"the agents' store does not answer: {error}") from error
