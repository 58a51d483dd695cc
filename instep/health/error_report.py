"""`report_failures`: reports of uncaught exceptions of a rank, which the agent prints at the end of its stderr.

Each rank writes its exception into a file of its own; the elastic agent and torchrun set the path as
`TORCHELASTIC_ERROR_FILE`. The agent looks for the first exception that was not caused by the failure of another rank,
and prints this exception last, so that the messages of other ranks do not hide it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from instep.errors import RemoteError
from instep.utils.untrusted_files import clean

AGENT_PID = "INSTEP_AGENT_PID"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_RUN_FOLDER = "run-folder"  # file beside the error file, which contains the path of the run folder
# matches the messages of gloo and NCCL about a rank that is gone, and of instep when it waits for such a rank
_BROKEN = re.compile(
    r"[Cc]onnection (closed|reset|refused)|Broken pipe|[Ss]ocket closed|remote process exited|"
    r"will not come any more.*has ended (with exit code|its program after an error)"
)
_trainer: Callable[[], Any] | None = None


@dataclass(frozen=True)
class FailureReport:
    """Report of an exception that ended a rank.

    Args:
        message: type and message of the exception.
        traceback: traceback of the exception as text.
        remote: whether the exception only says that another rank failed, or that the connection to it broke.
        time_ns: time of the report in nanoseconds, on the machine's monotonic clock; 0 if unknown.
        step: number of optimizer steps that were done; None if the rank was not training.
    """

    message: str
    traceback: str
    remote: bool = False
    time_ns: int = 0
    step: int | None = None


def tell_trainer(trainer: Callable[[], Any]) -> None:
    """Register a weak reference to the Trainer, whose step a report contains."""
    global _trainer
    _trainer = trainer


def under_plain_torchrun() -> bool:
    """Return True if torchrun's own agent started this rank; that agent kills its ranks 30 s after a signal."""
    return "TORCHELASTIC_RUN_ID" in os.environ and AGENT_PID not in os.environ


def report_failures() -> None:
    """From now on, report uncaught exceptions of this rank to the agent, or print them with the number of the rank.

    If instep's agent started the rank, the agent prints the traceback and the rank does not. Otherwise the rank prints
    the traceback below a line with rank, host and step; under torchrun, torchrun's report contains it too. A rank that
    only lost the connection to another rank prints one line. SystemExit and KeyboardInterrupt are not reported. A
    second call of this function does nothing.
    """
    if not isinstance(sys.excepthook, _ReportingHook):
        sys.excepthook = _ReportingHook(os.environ.get(_ERROR_FILE))


class _ReportingHook:
    """Excepthook that writes the report, and then calls the excepthook that was set before."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._pid = os.getpid()
        self._previous = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == self._pid and not issubclass(kind, KeyboardInterrupt):
            reported = bool(self._path) and write_report(str(self._path), error)
            if self._previous is sys.__excepthook__:
                if reported and _agent_lives():
                    return
                if not _agent_lives():
                    lost = isinstance(error, RuntimeError) and is_remote(error)
                    sys.stderr.write(f"instep: {_who()} {'ended: ' if lost else 'failed:'}")
                    sys.stderr.write(clean(f"{kind.__name__}: {str(error).partition(chr(10))[0]}\n") if lost else "\n")
                    if lost:
                        return
        if self._previous is sys.__excepthook__ and not issubclass(kind, KeyboardInterrupt):
            sys.stderr.write(clean("".join(traceback.format_exception(kind, error, trace))))
            return
        self._previous(kind, error, trace)


def _who() -> str:
    from instep.state import read_environment  # imported late: needed only in a rank that fails

    step = getattr(_trainer and _trainer(), "global_step", None)
    return f"rank {read_environment().rank} (host {socket.gethostname()}{'' if step is None else f', step {step}'})"


def is_remote(error: BaseException | str) -> bool:
    """Return True if an error or a message only says that another rank failed, or that the connection to it broke."""
    return isinstance(error, RemoteError) or _BROKEN.search(str(error)) is not None


def write_report(path: str | os.PathLike[str], error: BaseException) -> bool:
    """Write an exception into this rank's error file; if the file cannot be written, print why and return False."""
    # the first two keys are those of torchrun's report; the other keys are instep's
    extra = {
        "py_callstack": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        "timestamp": str(int(time.time())),
        "time_ns": time.monotonic_ns(),
        "remote": is_remote(error),
        "step": getattr(_trainer and _trainer(), "global_step", None),
    }
    try:
        message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    except OSError as problem:
        sys.stderr.write(clean(f"instep: could not write {os.fspath(path)} ({problem}); the traceback follows here\n"))
        return False
    return True


def tell_run_folder(folder: Path) -> None:
    """Tell instep's agent where the run folder is: it writes `status.json` there if the main process cannot."""
    path = os.environ.get(_ERROR_FILE)
    if path and _agent_lives():
        Path(path).with_name(_RUN_FOLDER).write_text(str(folder.absolute()))


def read_run_folder(error_file: str | os.PathLike[str]) -> Path | None:
    """Return the run folder that the rank with this error file has told the agent; None if it has told none."""
    try:
        return Path(Path(error_file).with_name(_RUN_FOLDER).read_text())
    except OSError:
        return None


def start_command() -> list[str]:
    """Return the command that started this process; for a rank of a launcher, the command that started the launcher.

    Example:
        >>> bool(start_command())
        True
    """
    words = list(sys.orig_argv)
    if _agent_lives() or under_plain_torchrun():
        with suppress(OSError):  # the system is not Linux
            words = (
                Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1] or words
            )
    script = os.path.basename(words[1]) if len(words) > 1 else ""
    if script in ("instep", "torchrun"):  # leave out the Python interpreter that the script's first line names
        words[:2] = [script]
    return words


def _agent_lives() -> bool:
    return os.environ.get(AGENT_PID) == str(os.getppid())


def read_report(path: str | os.PathLike[str]) -> FailureReport | None:
    """Read the report in a rank's error file; return None if there is no report, or if it is not complete."""
    try:
        message = json.loads(Path(path).read_text(encoding="utf-8"))["message"]
        if isinstance(message, str):
            return FailureReport(message, message)
        extra = message.get("extraInfo", {})
        return FailureReport(
            message=message["message"],
            traceback=extra.get("py_callstack", message["message"]),
            remote=bool(extra.get("remote", False)),
            time_ns=int(extra.get("time_ns", 0)),
            step=extra.get("step"),
        )
    # The rank was killed while it wrote the report; the agent still knows its exit code.
    except (OSError, ValueError, KeyError, TypeError):
        return None
