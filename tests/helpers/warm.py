"""A Python that has loaded torch and instep already, for tests that start many programs: each starts 2 s of CPU sooner.

`warm_python()` is the path of an executable that takes a script, `-m module` or `-c code`, as `python` does. It asks a
server for a fork, and is then that program to whoever started it: it has the same output, passes signals on, ends with
the same status, and takes the program with it when it is killed. In the program `sys.executable` is this executable
too, so that the ranks which it starts are as quick. Whatever else Python is asked for is done by the real one.

At its end threads are joined, `atexit` runs and output is flushed; then the process ends at once, where Python would
take all modules apart first.

Not for tests of how a program starts, of its process group, of what it imports, of what Python does after `atexit`, or
of variables that torch reads when it is loaded, such as OMP_NUM_THREADS.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
from types import ModuleType
from typing import Any

_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")
_KNOWN_VARIABLES = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")  # others change how Python starts


def warm_python() -> str:
    """The executable. Its server is started on first use and ends with the process that started it."""
    global _executable
    if not hasattr(os, "pidfd_open"):  # Linux alone has it
        return sys.executable
    if _executable is None:
        _executable = _start_server()
    return _executable


def use_warm_python(executable: str) -> None:
    """Take the executable of another process, whose server serves this one too."""
    global _executable
    _executable = executable


_executable: str | None = None


def _start_server() -> str:
    import atexit  # here and below: the client starts faster without
    import shutil
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp(prefix="warm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address, executable = f"{folder}/socket", f"{folder}/python"
    with open(executable, "w") as file:
        file.write(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} {address} "$@"\n')
    os.chmod(executable, 0o700)
    listener = socket.socket(socket.AF_UNIX)  # whoever asks before the server has loaded all waits for it here
    listener.bind(address)
    listener.listen(64)
    with listener:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.warm", "serve", str(listener.fileno()), executable],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # as programs have: whether stdout can seek is found out when Python starts
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            pass_fds=[listener.fileno()],
        )
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdout.close()
    atexit.register(server.wait)
    atexit.register(server.stdin.close)  # the one before this one
    return executable


# ---- the client


def ask(address: str, words: list[str]) -> None:
    """Be the program that the server forks, until it ends."""
    options = 0
    while words[options : options + 1] and words[options] in ("-u", "-B"):
        options += 1
    program = words[options:]
    unknown = [name for name in os.environ if name.startswith("PYTHON") and name not in _KNOWN_VARIABLES]
    forks = program[:1] == ["-c"] and "multiprocessing" in program[1]  # with descriptors by number
    if not program or unknown or forks or (program[0].startswith("-") and program[0] not in ("-c", "-m")):
        os.execv(sys.executable, [sys.executable, *words])
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    request = json.dumps({"words": program, "env": dict(os.environ), "cwd": os.getcwd()}).encode()
    socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(request)
    pid = int.from_bytes(_receive(server, 4), "big")
    for name in _PASSED_ON:
        signal.signal(getattr(signal, name), lambda number, _: _pass_on(pid, number))
    status = int.from_bytes(_receive(server, 4), "big")
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _pass_on(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # its status is on its way


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


# ---- the server

_Programs = dict[int, tuple[int, socket.socket]]  # pid and client, by the descriptors of the process and of the client


def serve(listening: int) -> dict[str, Any]:
    """Fork a process for each request on a socket; returns it in the process that is to be the program."""
    import gc
    import importlib

    from tests.helpers.spawn import PRELOADED

    digits = "sklearn.datasets"  # of the program that all ways to launch start
    for name in (*PRELOADED, "instep.cli.main", "instep.launch.engine", digits):
        if name != "pytest":  # under which a program would not start ranks of its own
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that a program's collections do not copy these pages
    listener = socket.socket(fileno=listening)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    programs: _Programs = {}
    while True:
        ready = [key for key, _ in selector.select()]
        for key in sorted(ready, key=lambda key: key.fileobj is listener):  # new ones last: they take free descriptors
            if key.fileobj == 0:  # the tests have ended
                for pid, _ in programs.values():
                    _kill(pid)
                os._exit(0)
            if key.fileobj is listener:
                request = _accept(listener, programs, selector)
                if request is not None:
                    return request
            elif key.fd in programs:  # else its other end was ready too
                pid, client = programs[key.fd]
                if key.fileobj is client:  # it was killed
                    selector.unregister(client)
                    _kill(pid)
                else:
                    _report(key.fd, programs, selector)


def _accept(listener: socket.socket, programs: _Programs, selector: selectors.BaseSelector) -> dict[str, Any] | None:
    """Fork a process for a client; returns the request in it, and None in the server."""
    client, _ = listener.accept()
    descriptors: list[int] = []
    try:
        size, descriptors, _, _ = socket.recv_fds(client, 4, 3)
        request = json.loads(_receive(client, int.from_bytes(size, "big"))) if size else None
    except (EOFError, ConnectionError):
        request = None
    pid = None if request is None else os.fork()
    if pid == 0:
        selector.close()
        listener.close()
        client.close()
        for end, (_, other) in programs.items():
            if end == other.fileno():
                other.close()
            else:
                os.close(end)
        return {**request, "descriptors": descriptors}
    for descriptor in descriptors:
        os.close(descriptor)
    if pid is None:  # killed before it had asked
        client.close()
        return None
    process = os.pidfd_open(pid)
    programs[process] = programs[client.fileno()] = (pid, client)
    selector.register(process, selectors.EVENT_READ)
    selector.register(client, selectors.EVENT_READ)
    _send(client, pid)
    return None


def _report(process: int, programs: _Programs, selector: selectors.BaseSelector) -> None:
    """Tell a client how its program has ended."""
    pid, client = programs.pop(process)
    _, status = os.waitpid(pid, 0)
    selector.unregister(process)
    os.close(process)
    if client.fileno() in selector.get_map():
        selector.unregister(client)
    del programs[client.fileno()]
    _send(client, status)
    client.close()


def _send(client: socket.socket, number: int) -> None:
    try:
        client.sendall(number.to_bytes(4, "big"))
    except (BrokenPipeError, ConnectionResetError):
        pass  # it was killed


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # it may not have its group yet
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def become(request: dict[str, Any]) -> ModuleType:
    """Make this process what a Python is that has just been started, and return its `__main__`."""
    import numpy as np

    os.setsid()
    for number, descriptor in enumerate(request["descriptors"]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    np.random.seed()  # Python's own generator is seeded by the fork
    words = request["words"]
    module = words[0] == "-m"
    code = words[0] == "-c"
    sys.orig_argv = [sys.executable, *words]
    sys.argv = words[1:] if module else ["-c", *words[2:]] if code else words
    folder = request["cwd"] if module else "" if code else os.path.dirname(os.path.realpath(words[0]))
    paths = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [folder, *paths, *_own_path]
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    return main


def run(words: list[str], main: ModuleType) -> None:
    """Run a script, `-m module` or `-c code` as `__main__`."""
    if words[0] == "-m":
        import runpy

        runpy._run_module_as_main(words[1])
    elif words[0] == "-c":
        main.__dict__.update(__builtins__=__builtins__)
        exec(words[1], main.__dict__)
    else:
        main.__dict__.update(__file__=words[0], __builtins__=__builtins__)
        with open(words[0], "rb") as script:
            code = compile(script.read(), words[0], "exec")
        exec(code, main.__dict__)


def _end_at_once() -> None:
    """End without taking all modules apart, which costs 0.25 s of CPU. Threads and `atexit` have ended by then."""
    if _status is not None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                return  # Python says so, with a status of its own
        os._exit(_status)


_status: int | None = None  # of the program that this process has become; None: as Python ends

if __name__ == "__main__":
    if sys.argv[1] == "serve":
        import atexit

        atexit.register(_end_at_once)  # the first one runs last
        sys.executable = sys.argv[3]  # some modules keep it
        _own_path = [path for path in sys.path if path not in ("", os.getcwd())]
        asked = serve(int(sys.argv[2]))
        try:
            run(asked["words"], become(asked))
            _status = 0
        except SystemExit as error:
            _status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            raise
        except Exception:
            _status = 1
            raise
    else:
        ask(sys.argv[1], sys.argv[2:])
