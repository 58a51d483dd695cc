from __future__ import annotations

import base64
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from instep.errors import DistributedError
from instep.launch.node_channel import NodeChannel, open_round
from instep.launch.signed import NotOurs, SignedBackend, SignedStore
from instep.state.secret import Secret, make_secret


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def _store(secret: Secret) -> tuple[Any, SignedStore]:
    below = HashStore()
    below.set_timeout(timedelta(seconds=1))
    return below, SignedStore(below, secret, "job")


def test_agents_read_what_agents_wrote_under_this_key() -> None:
    secret = make_secret()
    below, store = _store(secret)
    store.put("a", {"x": [1]})
    assert store.find("a") == store.wait_for("a") == {"x": [1]}
    assert (store.find("b"), store.find("b", 3)) == (None, 3)
    assert [store.set_once("c", value) for value in (1, 2)] == [1, 1]
    part = store.below("round-1")
    part.put("a", "there")
    assert SignedStore(PrefixStore("round-1", below), secret, "job/round-1").find("a") == "there"
    store.multi_set(["m", "n"], ["[1]", b"[2]"])  # as torch's agent calls it
    assert store.multi_get(["m", "n"]) == [b"[1]", b"[2]"]
    below.set("b", below.get("a"))  # moved
    below.set("round-1/c", below.get("c"))
    for read in (lambda: store.find("b"), lambda: part.find("c"), lambda: part.set_once("c", 1)):
        with pytest.raises(DistributedError, match="not signed with this job's secret"):
            read()


def test_what_a_stranger_writes_ends_a_round_with_an_error_that_says_so() -> None:
    below, store = _store(make_secret())
    round_ = open_round(store, store.below("0"), 0, "job")
    peers = NodeChannel(store, round_, 0, 1, 15.0)
    below.set("round-0/alarm", b'{"kind": "failed", "node": 0, "nodes": 1, "text": ""}')
    with pytest.raises(DistributedError, match="'job/round-0/alarm' in the job's store was not signed"):
        peers.refresh()
    below.set("rounds", b"7")
    with pytest.raises(DistributedError, match="'job/rounds' in the job's store"):
        open_round(store, store.below("1"), 0, "job")


def test_the_rendezvous_state_of_a_stranger_is_not_given_to_torch(tmp_path: Path) -> None:
    below, _ = _store(secret := make_secret())
    first, second = (SignedBackend(below, "j", secret) for _ in range(2))
    assert first.get_state() is None
    state, token, written = first.set_state(b"one") or pytest.fail("no state")
    assert (state, written) == (b"one", True)
    assert second.get_state() == (b"one", token)
    assert second.set_state(b"other") == (b"one", token, False)
    assert second.set_state(b"other", object()) == (b"one", token, False)
    state, _, written = second.set_state(b"two", token) or pytest.fail("no state")
    assert (state, written, first.get_state()[0]) == (b"two", True, b"two")  # type: ignore[index]
    for data in (pickle.dumps(Evil(tmp_path / "evil")), b"x" * 40, b""):
        below.set("torch.rendezvous.j", base64.b64encode(data))
        for act in (first.get_state, lambda: first.set_state(b"three", b"two")):
            with pytest.raises(NotOurs, match="not signed with this job's secret"):
                act()
    below.set("torch.rendezvous.j", b"\xff not base64")
    with pytest.raises(NotOurs):
        first.get_state()
