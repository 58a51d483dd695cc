"""Runs one call in a forked child with limits and an audit hook, and judges how it ends."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import pathlib
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.errors import InstepError

CPU_S = 10  # what takes longer, or more memory than the guard, is ended, and is no fault: only the machine is kept well
WALL_S = 300.0  # only to end the rest: a busy machine gets nowhere near it
ASLEEP_S = 8.0  # of sleeping without any CPU time: who waits for the machine is not asleep
GUARD_BYTES = 2 * 2**30
MARKER = "planted"
"""Part of every name that an input plants: no import, open or process may have it."""
PLANTED_FILES = ("/etc/passwd", "/dev/zero", "/dev/random", "/dev/full", "/proc/self/mem")
PLANTED_MODULES = ("antigravity", "this", "turtledemo", "idlelib", "cgitb", "pip", "commands")
_FORBIDDEN_CALLS = ("system", "popen", "exec", "eval", "CDLL", "FileHandler", "getattr", "__import__", "apply")
_STARTS = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.forkpty", "pty.spawn", "subprocess.Popen",
    "ctypes.dlopen", "socket.connect", "socket.bind", "urllib.Request",
)  # fmt: skip
_CHANGES = (
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "shutil.rmtree", "shutil.move", "shutil.copyfile", "os.listdir", "os.scandir",
)  # fmt: skip
_CACHES = ("__slotnames__", "__abstractmethods__", "_abc_impl", "__annotations__")  # that Python itself fills
_DEVICES = ("/dev/null", "/dev/urandom", "/dev/shm")
_SYSTEM = ("/proc", "/sys", "/etc", "/usr", "/lib", "/lib64", "/opt")


@dataclass(frozen=True)
class End:
    """How a call ended.

    Args:
        kind: "ok", "error" (one of ours), "exit" (a command's code), "started" (a process, where that is allowed),
            "limit" (of CPU time or memory), or what must not be: "signal", "traceback", "hang", "import", "open",
            "process", "changed".
        text: what it said.
        passed_seal: whether the checkpoint verified; None where nothing is sealed.
    """

    kind: str
    text: str
    passed_seal: bool | None

    @property
    def allowed(self) -> bool:
        return self.kind in ("ok", "error", "exit", "started", "limit")


def warm_up() -> None:
    """Called once all readers are imported: what is there now is not copied into each child."""
    gc.collect()
    gc.freeze()
    faulthandler.enable()


def run(
    call: Callable[[], Any],
    home: Path,
    *,
    sealed: Callable[[], bool] | None = None,
    command: bool = False,
    may_start: bool = False,
) -> End:
    """Run a call in a forked child.

    Args:
        call: what reads the input; with `command` it returns an exit code.
        home: the folder of the input; only in `home/"in"` may files be opened. `home/"outside"` is watched.
        sealed: whether the input's checksums fit; asked after the call.
        command: judge exit code and output too.
        may_start: a command that starts a program that it was given.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    before = _look_at(home / "outside")
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(read_end)
                _in_child(call, home, sealed, write_end, said.fileno(), command, may_start)
                code = 0
            finally:
                os._exit(code)
        os.close(write_end)
        hung = not _wait(pid)
        _, status = os.waitpid(pid, 0)
        report = _read_report(read_end)
        said.seek(0)
        text = said.read(200_000).decode(errors="replace")
    kind, what = _judge(report, os.waitstatus_to_exitcode(status), hung, text, command)
    if kind in ("ok", "error", "exit") and _look_at(home / "outside") != before:
        kind, what = "open", "a file outside of the input was read or changed"
    return End(kind, what, report.get("passed"))


def _judge(report: dict[str, Any], code: int, hung: bool, said: str, command: bool) -> tuple[str, str]:
    tail = said[-4000:]
    if "violation" in report:
        return report["violation"], report["what"]
    if hung:
        return "hang", f"waited for what did not come\n{tail}"
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "limit", f"took more than {CPU_S} s of CPU time\n{tail}"
    if code:
        return "signal", f"ended with {code}\n{tail}"
    if report["end"] == "traceback":
        return ("limit" if report["memory"] else "traceback"), report["text"]
    if report["changed"]:
        return "changed", f"attributes of classes: {report['changed']}"
    if command:
        if "Traceback (most recent call last)" in said:
            return "traceback", tail
        if report["code"] not in (0, 1, 2, 75, 130) or (report["code"] and not said.strip()):
            return "traceback", f"exit code {report['code']!r}, and said: {tail!r}"
        return "exit", tail
    return report["end"], report["text"]


def _wait(pid: int) -> bool:
    """Whether the child ended by itself; one that does not shows its stack and is killed."""
    handle = os.pidfd_open(pid)
    deadline, before, since = time.monotonic() + WALL_S, "", 0.0
    try:
        while (now := time.monotonic()) < deadline:
            if select.select([handle], [], [], 0.02 if not before else 0.5)[0]:
                return True
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used = " ".join((fields[0], *fields[11:13]))
            if used != before or fields[0] != "S":
                before, since = used, now
            elif now - since > ASLEEP_S:
                break
        os.kill(pid, signal.SIGABRT)  # faulthandler writes where it stands
        if not select.select([handle], [], [], 5)[0]:
            os.kill(pid, signal.SIGKILL)
        return False
    finally:
        os.close(handle)


def _read_report(fd: int) -> dict[str, Any]:
    """What the child wrote, until now: a grandchild may hold the pipe open."""
    os.set_blocking(fd, False)
    data = b""
    try:
        while piece := os.read(fd, 65536):
            data += piece
    except BlockingIOError:
        pass
    finally:
        os.close(fd)
    report: dict[str, Any] = {}
    for line in data.splitlines():
        report |= json.loads(line)
    return report


# ---- in the child


def _in_child(
    call: Callable[[], Any],
    home: Path,
    sealed: Callable[[], bool] | None,
    report_to: int,
    said: int,
    command: bool,
    may_start: bool,
) -> None:
    os.setsid()
    warnings.simplefilter("ignore")  # which pytest makes errors
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, place in ((null, 0), (said, 1), (said, 2)):
        os.dup2(fd, place)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115  not pytest's
    sys.stderr = open(2, "w", errors="backslashreplace")  # noqa: SIM115
    faulthandler.enable(file=2)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(home / "in")
    os.environ |= {"HOME": str(home / "in"), "XDG_CONFIG_HOME": str(home / "in/.config"), "COLUMNS": "100"}

    def report(**values: Any) -> None:
        os.write(report_to, json.dumps(values).encode() + b"\n")

    resource.setrlimit(resource.RLIMIT_DATA, (data := _data_bytes() + GUARD_BYTES, data))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, 2**30))
    classes = _attributes()
    sys.addaudithook(_hook(home, report, may_start))
    end: dict[str, Any] = {"end": "ok", "text": "", "code": None, "memory": False}
    try:
        end["code"] = call()
    except SystemExit as error:
        end["code"] = 0 if error.code is None else error.code
        if not command:
            end |= {"end": "traceback", "text": traceback.format_exc()[-6000:]}
    except InstepError as error:
        end |= {"end": "error", "text": f"{type(error).__name__}: {error}"[:2000]}
        if command:
            end |= {"end": "traceback", "text": traceback.format_exc()[-6000:]}
    except BaseException as error:
        end |= {"end": "traceback", "text": traceback.format_exc()[-6000:], "memory": _out_of_memory(error)}
    end["code"] = (
        end["code"] if command and isinstance(end["code"], int) else None if not command else repr(end["code"])
    )
    end["changed"] = [name for name, value in _attributes().items() if classes.get(name) != value]
    sys.stdout.flush()
    sys.stderr.flush()
    report(**{key: _text(value) for key, value in end.items()})
    if sealed is not None:
        try:
            passed = sealed()
        except Exception:
            passed = False
        report(passed=passed)


def _text(value: Any) -> Any:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _hook(home: Path, report: Callable[..., None], may_start: bool) -> Callable[[str, tuple[Any, ...]], None]:
    """What ends the child at the first forbidden event, before it happens."""
    inside = [os.path.realpath(home / "in"), os.path.realpath(tempfile.gettempdir()) + "/instep-"]
    own = {os.path.realpath(it) for it in (sys.prefix, sys.base_prefix, Path(__file__).parents[2])}
    own |= {os.path.realpath(it) for it in sys.path if it}
    reading = (*sorted(own), *_SYSTEM, *_DEVICES)

    def stop(kind: str, *what: Any) -> None:
        report(violation=kind, what=_text(f"{what!r:.500}\n{''.join(traceback.format_stack(limit=14)[:-2])}"))
        os._exit(97)

    def check(event: str, path: Any, writes: bool) -> None:
        if isinstance(path, int) or path is None:
            return
        name = os.fsdecode(path)
        if "\0" in name:
            return  # which the system refuses
        real = os.path.realpath(name)
        if event == "os.listdir" and real == os.path.realpath(tempfile.gettempdir()):
            return  # the agent looks there for folders of agents that were killed
        if real not in PLANTED_FILES[1:] and under(os.path.abspath(name), inside):
            return  # a link in the input too, to a regular file: caches of models are made of them
        if under(real, inside) or (real == str(home) and not writes):  # what stands beside what was given
            return
        if real in PLANTED_FILES or MARKER in name or under(real, [str(home)]):
            stop("open", event, name, real)
        if not under(real, _DEVICES if writes else reading) and os.path.lexists(real):
            stop("open", event, name, real)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            mode, flags = args[1], args[2]
            writes = bool(flags & (os.O_WRONLY | os.O_RDWR)) if mode is None else any(it in mode for it in "wax+")
            check(event, args[0], writes)
        elif event in _STARTS:
            if event == "ctypes.dlopen" and (args[0] is None or MARKER not in str(args[0])):
                return  # of the interpreter's own
            if may_start:
                report(end="started", text=repr(args)[:500], memory=False, changed=[], code=0)
                os._exit(0)
            stop("process", event, *args)
        elif event in _CHANGES:
            if (
                event in ("os.listdir", "os.scandir")
                and not isinstance(args[0], int)
                and not os.path.isdir(args[0] or ".")
            ):
                return  # which fails
            for path in args[: 2 if event in ("os.rename", "os.link", "shutil.move", "shutil.copyfile") else 1]:
                check(event, path, event not in ("os.listdir", "os.scandir"))
        elif event == "pickle.find_class" and (MARKER in f"{args}" or args[1] in _FORBIDDEN_CALLS):
            stop("import", event, *args)

    class Imports:
        """Sees every import, where the event of that name leaves out importlib's own functions."""

        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if MARKER in name or name.split(".")[0] in PLANTED_MODULES:
                stop("import", name)

    sys.meta_path.insert(0, Imports)  # pyright: ignore[reportArgumentType]
    return hook


def under(path: str, folders: Iterable[str]) -> bool:
    """Whether a path is one of the folders or lies in one; a folder that ends in "-" is the beginning of a name."""
    return any(path == it or path.startswith(it if it.endswith("-") else f"{it}/") for it in folders)


def _out_of_memory(error: BaseException | None) -> bool:
    """Whether the guard was hit somewhere below an error, which elsewhere would have taken the memory."""
    while error is not None:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _attributes() -> dict[str, int]:
    """The attributes of classes that pickles may name."""
    from torch.distributed.checkpoint import filesystem, metadata  # late: half a second

    classes = [pathlib.PosixPath, pathlib.PurePath, pathlib.Path, OrderedDict, InstepError]
    classes += [it for room in (filesystem, metadata) for it in vars(room).values() if isinstance(it, type)]
    return {
        f"{cls.__qualname__}.{name}": id(value)
        for cls in classes
        for name, value in vars(cls).items()
        if name not in _CACHES
    }


def _look_at(folder: Path) -> dict[str, tuple[int, ...]]:
    """What changes when a file in a folder is read or written; the time of reading by systems that keep it."""
    found = {}
    for path in sorted(folder.rglob("*")) if folder.exists() else ():
        it = path.lstat()
        found[str(path)] = (it.st_size, it.st_mtime_ns, it.st_atime_ns if path.is_file() else 0)
    return found


def _data_bytes() -> int:
    line = next(it for it in Path("/proc/self/status").read_text().splitlines() if it.startswith("VmData"))
    return int(line.split()[1]) * 1024
