"""Send the records that wait in a run folder because trackers did not accept them: the command `instep runs sync`."""

from __future__ import annotations

import os
import re
import site
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from instep.errors import InstepError, SettingError, UsageError
from instep.loggers import logger_class, logger_names
from instep.loggers.appended import check_no_link
from instep.loggers.backlog import Record, is_own, read_note
from instep.loggers.base import Logger
from instep.loggers.sender import in_short
from instep.loggers.trust import (
    arguments_in,
    files_of,
    is_signed,
    leads_out,
    status_in,
    version_in,
    why_links,
    why_not,
    why_outside,
)
from instep.utils.atomic import replace
from instep.utils.private_files import Seal
from instep.utils.untrusted_files import open_regular

_STEM = re.compile(r"[A-Za-z_][A-Za-z0-9_]*?(?:-(?P<number>[0-9]{1,4}))?(?:-rank-(?P<rank>[0-9]{1,6}))?")
_TRIES = 3
_PAUSE_S = 2.0
_FEW = 20  # limit for the number of files that are listed in the question to the user
_NETWORK = ("http", "https", "aim")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:").match
_PLAIN = re.compile(r"[^?#%:]*").fullmatch  # a path without the special characters of URLs
# Beginnings of the environment variables that a program needs to run and to reach the network.
_KEPT = (
    *("PATH", "PYTHON", "LD_LIBRARY_PATH", "LANG", "LC_", "TZ", "TMP", "TEMP", "VIRTUAL_ENV", "SYSTEMROOT"),
    *("SSL_CERT", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"),
)


class Sent(NamedTuple):
    """The result of sending a logger's backlog: how many records waited, how many still wait, and why."""

    logger: str
    waited: int
    left: int
    reason: str


def sync(run: Path, timeout_s: float = 600.0, ask: Callable[[str], None] | None = None) -> Iterator[Sent]:
    """Send the records that wait in a run folder to the trackers of its loggers, in the order of logging.

    The note, a JSON file beside the records, names the logger and its arguments. The logger must be a registered class,
    and its arguments plain values. If the note or a record was not written by this user, the records are sent only if
    the user agrees. In that case no file from outside of the run folder is sent, nothing is written outside of it, and
    a host that the note names gets none of the user's credentials.

    Args:
        run: the run folder.
        timeout_s: longest time for each logger, in seconds.
        ask: function that is called before sending records that another user may have written. It gets a text that says
            what would be sent where, and raises an error to refuse. None: refuse by a UsageError.

    Yields:
        The result for each logger.

    Raises:
        SettingError: the logger is not known, a file belongs to another user, or a path leads out of the run folder.
        InstepError: the run has not ended, or the logger cannot be opened.
    """
    run = run.absolute()
    folder = run / "loggers"
    check_no_link(folder)
    for file in sorted(folder.glob("*.jsonl")):
        if file.name.endswith(".refused.jsonl") and file.with_name(file.name.replace(".refused", "")).exists():
            continue  # these refused records are sent together with the records in the other file
        note = file.with_name(file.name.removesuffix(".jsonl").removesuffix(".refused") + ".json")
        yield _send(run, note, timeout_s, ask or _refuse)


def _refuse(text: str) -> None:
    raise UsageError(text)


def _send(run: Path, path: Path, timeout_s: float, ask: Callable[[str], None]) -> Sent:
    backlog, refused = path.with_suffix(".jsonl"), path.with_suffix(".refused.jsonl")
    for file in (path, backlog, refused):
        _check_file(file)
    note = read_note(path)
    kind = _class_of(str(note.get("logger")), path)
    _check_free(backlog, kind.__name__)
    known = ("name", "save_dir", *kind._SYNC)
    note["arguments"] = arguments = {name: it for name, it in arguments_in(note, path).items() if name in known}
    seal = Seal(str(note.get("id"))) if is_signed(note) else None
    waiting = [line for file in (backlog, refused) for line in _lines(file)]
    own = seal is not None and all(is_own(line, seal) for line in waiting)
    folder, bare = Path(str(note.get("folder", "."))), False
    if not own:
        arguments.pop("save_dir", None)
        folder = folder if not why_outside(run / folder, run) else Path()
        bare = _settle_places(kind, arguments, run)
        to = f"into {run / folder}" if kind._LOCAL else "to where your own settings of the tracker say"
        to = "without your passwords and keys" if bare else to
        to += "" if note.get("version") is None else f", run {version_in(note)!r:.80}"
        ask(_question(run, path, kind, arguments, waiting, to))
        if why := why_links(run):
            raise SettingError(f"{why}: what came with a run folder may not lead out of it")
    elif not folder.is_absolute() and folder.parts and not (run / folder).resolve().is_relative_to(run.resolve()):
        raise SettingError(f"{run / folder} leads out of the run folder by a link")
    if refused.exists():  # send the refused records again, before the others
        replace(backlog, b"".join([*_lines(refused), *_lines(backlog)]))
        refused.unlink()
    match = _STEM.fullmatch(path.stem)
    number, rank = (int(match[key] or 0) for key in ("number", "rank")) if match is not None else (0, 0)
    with _apart(_home(note, kind, arguments) if own else None, bare) as left_running:
        logger = kind(**arguments)
        logger.delivery.take_up(version_in(note), max(0, number - 1), rank, status_in(note), run / folder, not own)
        sent, thread = _deliver(logger, run, len(waiting), timeout_s)
        if thread.is_alive():
            left_running.append(thread)
    return sent


def _check_file(file: Path) -> None:
    if not os.path.lexists(file):
        return
    check_no_link(file)
    state = os.lstat(file)
    if hasattr(os, "getuid") and state.st_uid != os.getuid():
        raise SettingError(f"{file} belongs to another user: it says where records are sent with your credentials")
    if not stat.S_ISREG(state.st_mode) or state.st_nlink > 1:
        raise SettingError(f"{file} is no regular file, or has another name too, and sending from it would change that")


def _lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of waiting records in a file; the first character "[" of a sent record's line is overwritten."""
    with suppress(FileNotFoundError), BufferedReader(open_regular(file)) as lines:
        yield from (line.rstrip(b"\n") + b"\n" for line in lines if line.startswith(b"["))


def _settle_places(kind: type[Logger], arguments: dict[str, Any], run: Path) -> bool:
    """Check or replace the paths, URLs and hosts among the arguments in a note that another user may have written.

    A path or host in the user's environment variables replaces that of the note.

    Returns:
        True if the note names a host that the user's own settings do not name.

    Raises:
        SettingError: a path is outside of the run folder.
    """
    places = {**kind._PATHS, **kind._HOSTS}
    for name in arguments.keys() & places.keys():
        if arguments[name] is None or places[name] is None or places[name] in os.environ:
            del arguments[name]
    for name in arguments.keys() & kind._PATHS.keys():
        before, after = _local(str(arguments[name]))
        if after is None:
            if urlsplit(str(arguments[name])).scheme not in _NETWORK:
                raise SettingError(
                    f"{kind.__name__}({name}={arguments[name]!r:.200}), as a note says that you did not write: only "
                    f"folders and {', '.join(_NETWORK)} addresses are taken from another user's note"
                )
            continue
        path = run / after
        if why_outside(path, run, exists=False) or not _PLAIN(after):
            way = f"set {places[name]}, or " if places[name] else ""
            raise SettingError(
                f"{kind.__name__}({name}={arguments[name]!r:.200}), as a note says that you did not write, leads out "
                f"of {run}, and nothing is written there. To send what waits, {way}move the run to where it was made."
            )
        arguments[name] = f"{before}{path}"
    hosts = {name for name in arguments.keys() & kind._PATHS.keys() if _local(str(arguments[name]))[1] is None}
    hosts |= arguments.keys() & kind._HOSTS.keys()
    known = kind.__module__.startswith("instep.")
    for name in arguments.keys() - kind._PATHS.keys():
        parts = str(arguments[name]).replace("\\", "/").split("/")
        if ".." in parts or (not known and leads_out(str(arguments[name]))):
            raise SettingError(
                f"{kind.__name__}({name}={arguments[name]!r:.200}), as a note says that you did not write, leads out "
                f"of {run}"
            )
    if not known:  # in a logger of another package, any argument may be a host
        hosts |= arguments.keys() - {"name", *kind._PATHS}
    return bool(hosts)


def _local(place: str) -> tuple[str, str | None]:
    """Split a path or file URL into its prefix ("sqlite:///" or "") and the path; the path is None for other URLs."""
    for before, kept in (("sqlite:///", "sqlite:///"), ("file://", ""), ("file:", "")):
        if place.startswith(before):
            return kept, place.removeprefix(before)
    return "", None if _SCHEME(place) else place


def _home(note: dict[str, Any], kind: type[Logger], arguments: dict[str, Any]) -> Path:
    """Return the working directory of the run, to which relative paths in the note refer."""
    home = Path(str(note.get("cwd")))
    if home.is_dir():
        return home
    for name in arguments.keys() & kind._PATHS.keys():
        if (path := _local(str(arguments[name]))[1]) is not None and not os.path.isabs(path):
            raise InstepError(f"{kind.__name__}({name}={arguments[name]!r}) is in {home}, which is gone: make it again")
    return Path.cwd()


def _question(
    run: Path, note: Path, kind: type[Logger], arguments: dict[str, Any], waiting: list[bytes], to: str
) -> str:
    """Return the text that describes to the user what would be sent where."""
    lines = [f"{note} was not written by you, or not here. It has {len(waiting):,} records that would be sent by"]
    lines.append(f"  {kind.__name__}({', '.join(f'{name}={value!r:.200}' for name, value in arguments.items())}) {to}")
    files: list[str] = []
    for line in waiting:
        with suppress(ValueError):
            record = Record.of_line(line)
            why = why_not(record, run)
            files += [f"  {path!s:.300}: {'not sent, ' + why if why else 'sent'}" for path in files_of(record)]
    more = [f"  and {len(files) - _FEW:,} more"] if len(files) > _FEW else []
    return "\n".join([*lines, *(["with the files"] if files else []), *files[:_FEW], *more])


@contextmanager
def _apart(home: Path | None, bare: bool) -> Iterator[list[threading.Thread]]:
    """Change the working directory for a `with` block, and with `bare` the environment variables too.

    Args:
        home: the working directory. None: an empty folder, in which no package finds settings.
        bare: whether to hide the user's environment variables and home folder, so that no package finds a password.

    Yields:
        A list for threads that still run after the block. If there are any, the variables stay hidden.
    """
    before, variables, threads = os.getcwd(), dict(os.environ), list[threading.Thread]()
    with tempfile.TemporaryDirectory(prefix="instep-sync-") as empty:
        try:
            if bare:
                kept = {name: value for name, value in variables.items() if name.upper().startswith(_KEPT)}
                base = {"PYTHONUSERBASE": site.getuserbase(), "HOME": empty, "USERPROFILE": empty, "NETRC": os.devnull}
                no_cloud = {"AWS_EC2_METADATA_DISABLED": "true", "NO_GCE_CHECK": "true"}
                _set_variables({**kept, **base, **no_cloud})
            os.chdir(empty if home is None else home)
            yield threads
        finally:
            os.chdir(before)
            if not threads:  # no thread still runs that could find the user's passwords
                _set_variables(variables)


def _set_variables(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _class_of(text: str, note: Path) -> type[Logger]:
    for name in logger_names():
        with suppress(ImportError):
            kind = logger_class(name)
            if f"{kind.__module__}:{kind.__qualname__}" == text:
                return kind
    raise SettingError(
        f"{note} is of the logger {text!r}, which is not registered here: give --import with the module that calls "
        "register_logger, or install a package that offers it as an entry point of instep.loggers"
    )


def _check_free(backlog: Path, name: str) -> None:
    """Raise an error if another process, whose run has not ended, has locked the backlog file."""
    with suppress(ImportError, FileNotFoundError):
        import fcntl  # imported late: Windows does not have it

        with open_regular(backlog) as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InstepError(f"{backlog}: the run goes on, and its {name} sends this itself") from None


def _deliver(logger: Logger, run: Path, waited: int, timeout_s: float) -> tuple[Sent, threading.Thread]:
    end_s = time.monotonic() + timeout_s
    logger.delivery.start(run)
    sender = logger.delivery.sender
    assert sender is not None
    for attempt in range(_TRIES):
        all_sent = sender.flush(max(0.1, end_s - time.monotonic()), early=True) and sender.is_begun
        if all_sent or time.monotonic() > end_s:
            break
        time.sleep(_PAUSE_S * (attempt + 1))
    left, error = len(sender.backlog) if sender.is_begun else waited, sender.error
    logger.finalize(logger.delivery.status)
    reason = in_short(error) if error is not None else ""
    sent = Sent(type(logger).__name__, waited, left + sender.backlog.refused, reason)
    return sent, sender.thread
