"""The job's secret: a key with which ranks and agents of one job sign their messages; other users do not know it.

Neither gloo nor a TCPStore authenticates, so anybody who can reach a port of a job can send any data to it. Every value
that instep itself reads from a port has a MAC (HMAC-SHA256). The MAC is computed with the secret from the value and the
place to which it belongs, such as a key in a store. A value that does not verify is not unpickled or used.

| who starts the ranks                       | the secret                                                       |
|--------------------------------------------|------------------------------------------------------------------|
| our agent, on one node                     | a random one for each job, in a file of the agent's folder       |
| our agents, on several nodes               | INSTEP_JOB_SECRET or INSTEP_JOB_SECRET_FILE; else node 0 makes   |
|                                            | one and prints it, and other nodes have none, with a warning     |
| torchrun, srun, mpirun ... on one node     | one of these variables; else a secret for each user and machine, |
|                                            | in a folder that only this user can enter                        |
| torchrun, srun, mpirun ... on several ones | one of these variables; else none, with a warning                |
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import DistributedError, SettingError
from instep.utils.private_files import make_key, read_private
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.state.environment import ProcessEnvironment

JOB_SECRET = "INSTEP_JOB_SECRET"
JOB_SECRET_FILE = "INSTEP_JOB_SECRET_FILE"
TRUSTED_NETWORK = "none"  # value of INSTEP_JOB_SECRET that means that no secret is needed
HOW_TO_GIVE = (
    f"make one by `openssl rand -hex 32` and set {JOB_SECRET} to it on every node, or {JOB_SECRET_FILE} to a file of "
    f"mode 0600 that holds it ({JOB_SECRET}={TRUSTED_NETWORK} says that nobody else reaches the job's network)"
)
NO_SECRET = f"this job has no secret: whoever reaches its ports can run code in it. To close them, {HOW_TO_GIVE}."
MAC_BYTES = 32
_LEAST_CHARACTERS = 16
_MOST_BYTES = 16 << 20  # largest size in bytes of a value in a store
_HEX = 2 * MAC_BYTES


class Secret:
    """A secret key for MACs. It appears in no message and no log.

    Args:
        key: the key; empty for a trusted network, where a MAC is only a checksum.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def text(self) -> str:
        """Return the secret as a text that `parse` can read."""
        return self._key.decode() or TRUSTED_NETWORK

    @staticmethod
    def parse(text: str, where: str) -> Secret:
        """Read the secret from the text of a variable or a file.

        Raises:
            SettingError: the text is too short for a secret.
        """
        text = text.strip()
        if text == TRUSTED_NETWORK:
            return Secret(b"")
        if len(text) < _LEAST_CHARACTERS:
            raise SettingError(
                f"{where} holds {len(text)} characters: a job's secret has at least {_LEAST_CHARACTERS}, better 64 "
                "random ones, as `openssl rand -hex 32` prints them.",
                field=JOB_SECRET,
            )
        return Secret(text.encode())

    def mac(self, place: str, data: bytes) -> bytes:
        """Compute the MAC of bytes together with the place that they belong to, such as a key in a store."""
        named = place.encode()
        return hmac.digest(self._key, len(named).to_bytes(8, "little") + named + data, hashlib.sha256)

    def fits(self, mac: bytes, place: str, data: bytes) -> bool:
        """Return True if a MAC is right: then a holder of the secret has written the bytes for this place."""
        return hmac.compare_digest(mac, self.mac(place, data))

    def sign(self, place: str, value: Any) -> str:
        """Encode a value as JSON with its MAC in front, for a store."""
        text = json.dumps(value)
        return self.mac(place, text.encode()).hex() + text

    def verify(self, place: str, signed: bytes) -> Any:
        """Check the MAC of a text that `sign` returned, and return its value.

        Raises:
            DistributedError: the value was signed with another secret, for another place, or not at all.
        """
        mac, text = signed[:_HEX], signed[_HEX:_MOST_BYTES]
        if len(signed) > _MOST_BYTES or not hmac.compare_digest(mac, self.mac(place, text).hex().encode()):
            raise not_ours(f"the value of {place!r} in the job's store")
        return json.loads(text)


def not_ours(what: str) -> DistributedError:
    """Return the error for a message that was not signed with this job's secret."""
    return DistributedError(
        f"{what} was not signed with this job's secret, and is not read. Either the secret differs between the nodes: "
        f"{HOW_TO_GIVE}; or a stranger has written to a port of the job: run it where others cannot reach its ports."
    )


def given_secret(environ: Mapping[str, str] | None = None, file: str | os.PathLike[str] | None = None) -> Secret | None:
    """Read the secret that the user has set; None if there is none.

    Args:
        environ: the environment variables; `os.environ` by default.
        file: file of the secret, which takes precedence over the variables.

    Raises:
        SettingError: the secret is too short, or other users can read the file.
    """
    environ = os.environ if environ is None else environ
    path = file or environ.get(JOB_SECRET_FILE)
    if path:
        return _read_secret(Path(path).expanduser())
    text = environ.get(JOB_SECRET)
    return Secret.parse(text, f"the variable {JOB_SECRET}") if text else None


def make_secret() -> Secret:
    """Make a new random secret."""
    return Secret(secrets.token_hex(32).encode())


def write_secret(path: Path, secret: Secret) -> None:
    """Write a secret into a new file that only this user can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret.text())


def secret_of_ranks(environment: ProcessEnvironment, environ: Mapping[str, str] | None = None) -> Secret:
    """Return the secret of a job of several ranks, by the table at the top of this file.

    Args:
        environment: rank and number of nodes of this process.
        environ: the environment variables; `os.environ` by default.

    Raises:
        SettingError: the secret that the user has set is too short, or other users can read its file; or the folder
            for this user's secret is open to other users.
    """
    environ = os.environ if environ is None else environ
    given = given_secret(environ)
    if given is not None:
        return given
    if _is_one_node(environment, environ):
        return _secret_of_user(environ)
    if environment.rank == 0:
        warn_user(NO_SECRET)
    return Secret(b"")


def _is_one_node(environment: ProcessEnvironment, environ: Mapping[str, str]) -> bool:
    """Return True if all ranks are certainly on one machine. The result is the same on all ranks."""
    # torchrun always sets LOCAL_WORLD_SIZE. If it is missing, the user has set RANK and WORLD_SIZE by hand, and may
    # have started ranks on several machines.
    by_hand = environment.launcher == "torchrun" and "LOCAL_WORLD_SIZE" not in environ
    return environment.num_nodes == 1 and not by_hand


def _secret_of_user(environ: Mapping[str, str]) -> Secret:
    """Read the secret that all processes of this user share on this machine.

    The first process that needs the secret creates it.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    inside = os.path.isdir(runtime) and os.access(runtime, os.W_OK)
    folder = Path(runtime, "instep") if inside else Path(tempfile.gettempdir(), f"instep-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    state = os.lstat(folder)
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise SettingError(
            f"{folder} is to hold a secret of this user's, but is not a folder of mode 0700 that this user owns: "
            f"remove it, or give the job a secret: {HOW_TO_GIVE}",
            field=JOB_SECRET,
        )
    path = folder / "job-secret"
    make_key(path)
    return _read_secret(path)


def _read_secret(path: Path) -> Secret:
    try:
        data = read_private(path)
    except OSError as error:
        raise SettingError(
            f"the job's secret cannot be read: {error}. Give the path of a file of mode 0600 (chmod 600 {path}), or "
            f"the secret in {JOB_SECRET}",
            field=JOB_SECRET_FILE,
            got=str(path),
        ) from error
    return Secret.parse(data.decode(errors="replace"), f"the file {path}")


_of_this_job = Secret(b"")


def use_secret(secret: Secret) -> None:
    """Set the secret with which this process signs messages from now on."""
    global _of_this_job
    _of_this_job = secret


def job_secret() -> Secret:
    """Return the secret with which this process signs messages."""
    return _of_this_job
