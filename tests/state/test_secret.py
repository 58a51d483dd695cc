from __future__ import annotations

import os
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from instep.errors import DistributedError, SettingError
from instep.state import PartialState, messages
from instep.state.environment import ProcessEnvironment
from instep.state.secret import Secret, given_secret, make_secret, secret_of_ranks, write_secret
from tests.helpers.spawn import run_ranks

KEY = "0123456789abcdef"


def _secret(text: str = KEY) -> Secret:
    return Secret.parse(text, "a test")


# --- signed values ----------------------------------------------------------------------------------------------------


def test_what_was_signed_with_this_secret_for_this_place_is_read_and_nothing_else() -> None:
    value = {"a": [1, 2.5, None, "ü"]}
    signed = _secret().sign("round-1/alarm", value).encode()
    assert _secret().verify("round-1/alarm", signed) == value
    others: list[tuple[Secret, str, bytes]] = [
        (_secret(KEY + "0"), "round-1/alarm", signed),
        (_secret(), "round-2/alarm", signed),
        (_secret(), "round-1/alar", signed[:64] + b"m" + signed[64:]),
        (_secret(), "round-1/alarm", signed[:-1]),
        (_secret(), "round-1/alarm", b""),
        (_secret(), "round-1/alarm", pickle.dumps(value)),
        (_secret(), "round-1/alarm", signed + b" " * (16 << 20)),
    ]
    for secret, place, data in others:
        with pytest.raises(DistributedError, match=r"not signed with this job's secret.*openssl rand -hex 32"):
            secret.verify(place, data)


def test_a_secret_is_not_shown() -> None:
    assert KEY not in f"{_secret()!r} {_secret()} {vars(type(_secret()))}"
    with pytest.raises(DistributedError) as caught:
        _secret().verify("x", _secret(KEY + "0").sign("x", 1).encode())
    assert KEY not in str(caught.value)


# --- where it comes from ----------------------------------------------------------------------------------------------


def test_a_secret_is_given_by_a_variable_or_a_private_file(tmp_path: Path) -> None:
    assert given_secret({}) is None
    assert given_secret({"INSTEP_JOB_SECRET": f" {KEY}\n"}).text() == KEY  # type: ignore[union-attr]
    assert given_secret({"INSTEP_JOB_SECRET": "none"}).text() == "none"  # type: ignore[union-attr]
    made = make_secret()
    write_secret(tmp_path / "secret", made)
    environ = {"INSTEP_JOB_SECRET_FILE": str(tmp_path / "secret"), "INSTEP_JOB_SECRET": KEY}
    assert given_secret(environ).text() == made.text()  # type: ignore[union-attr]
    assert len(made.text()) == 64


def test_an_unfit_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"INSTEP_JOB_SECRET holds 5 characters.*at least 16"):
        given_secret({"INSTEP_JOB_SECRET": "short"})
    path = tmp_path / "secret"
    with pytest.raises(SettingError, match="cannot be read"):
        given_secret(file=path)
    write_secret(path, make_secret())
    for mode in (0o644, 0o640, 0o602):
        path.chmod(mode)
        with pytest.raises(SettingError, match=rf"others can read or change it \(mode {mode:04o}.*chmod 600"):
            given_secret(file=path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(SettingError, match="it is a pipe"):
        given_secret(file=tmp_path / "pipe")


def _place(num_nodes: int = 1, rank: int = 0) -> ProcessEnvironment:
    return ProcessEnvironment(
        rank=rank, world_size=4, local_world_size=4 // num_nodes, num_nodes=num_nodes, launcher="torchrun"
    )


def test_ranks_of_one_user_and_machine_share_a_secret_that_the_first_of_them_makes(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "LOCAL_WORLD_SIZE": "4"}
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: secret_of_ranks(_place(), environ).text(), range(32)))
    assert len(set(found)) == 1
    assert len(found[0]) == 64
    folder = tmp_path / "instep"
    assert [file.name for file in folder.iterdir()] == ["job-secret"]
    assert (folder.stat().st_mode & 0o777, (folder / "job-secret").stat().st_mode & 0o777) == (0o700, 0o600)
    folder.chmod(0o755)
    with pytest.raises(SettingError, match=r"not a folder of mode 0700.*INSTEP_JOB_SECRET"):
        secret_of_ranks(_place(), environ)


@pytest.mark.parametrize(
    ("num_nodes", "environ"),
    [
        (2, {"LOCAL_WORLD_SIZE": "2"}),
        (1, {"MASTER_ADDR": "host0"}),  # WORLD_SIZE and RANK by hand, on nobody knows how many machines
        (1, {"MASTER_ADDR": "localhost"}),  # what rank 0's machine may call itself, and the others not
    ],
)
def test_ranks_of_several_machines_go_without_a_secret_after_one_warning(
    num_nodes: int, environ: dict[str, str]
) -> None:
    with pytest.warns(UserWarning, match=r"no secret.*INSTEP_JOB_SECRET"):
        assert secret_of_ranks(_place(num_nodes), environ).text() == "none"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        secret_of_ranks(_place(num_nodes, rank=1), environ)
        given = {**environ, "INSTEP_JOB_SECRET": KEY}
        assert secret_of_ranks(_place(num_nodes), given).text() == KEY
        secret_of_ranks(_place(num_nodes), {**environ, "INSTEP_JOB_SECRET": "none"})


# --- messages ---------------------------------------------------------------------------------------------------------


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def _say(path: str) -> list[str]:
    """What rank 0 says of rank 1's messages, which are signed with another secret from then on."""
    from instep.state import secret

    said: list[str] = []
    state = PartialState()
    group: Any = state.control_group
    objects = [None, True, 3, 2.5, "text", {"a": (1, 2)}, float("inf")]
    assert messages.exchange(objects, group) == [objects] * 2
    assert [messages.exchange(it, group) for it in objects] == [[it] * 2 for it in objects]
    assert messages.hand_out(objects, 1, group, "it") == objects
    if state.process_index == 1:
        secret.use_secret(make_secret())
    mine = Evil(path) if state.process_index == 1 else None
    for act in (
        lambda: messages.exchange(mine, group),
        lambda: messages.hand_out(mine, 1, group, "it"),
        lambda: messages.share_error(None, "it", group),
    ):
        try:
            act()
        except DistributedError as error:
            said.append(str(error))
    return said


@pytest.mark.dist
def test_a_message_that_was_not_signed_with_the_jobs_secret_is_not_unpickled(tmp_path: Path) -> None:
    said = run_ranks(_say, 2, str(tmp_path / "evil"))
    assert not (tmp_path / "evil").exists()
    assert [len(texts) for texts in said] == [3, 2]  # who hands an object out reads nothing
    assert all("a message of rank 1 was not signed with this job's secret" in text for text in said[0]), said


def _join(differ: bool) -> str:
    if differ:
        os.environ["INSTEP_JOB_SECRET"] = KEY + os.environ["RANK"]
    try:
        PartialState()
    except DistributedError as error:
        return str(error)
    return "joined"


@pytest.mark.dist
def test_ranks_with_different_secrets_say_so_when_they_join() -> None:
    assert all("Either the secret differs between the nodes" in text for text in run_ranks(_join, 2, True))
