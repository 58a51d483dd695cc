"""What the benchmarks share: children on a pseudo-terminal, turns, the machine's description, results and tables.

Each measurement runs in a fresh process, whose standard output and error are a pseudo-terminal, so that a progress bar
draws as it does for a person. With several CPUs it is pinned to one of them, with all its threads, and this process,
which drains the terminal, to the others: what a framework does in background threads counts too.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

RESULTS = Path(__file__).with_name("results")
PACKAGES = (
    "torch",
    "instep",
    "lightning",
    "accelerate",
    "pytorch-ignite",
    "numpy",
    "rich",
    "tqdm",
    "tensorboard",
    "wandb",
    "mlflow",
    "safetensors",
    "transformers",
)
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
ROWS, COLUMNS = 40, 120  # of the pseudo-terminal


class Child:
    """A process that runs `python script --child REQUEST` on a pseudo-terminal of its own.

    Args:
        script: the benchmark's file.
        request: JSON values for its measuring function.
        timeout_s: after that it is killed.
    """

    def __init__(self, script: str, request: dict[str, Any], timeout_s: float = 600.0) -> None:
        import fcntl  # late: these three are missing on Windows, where import_time.py works all the same
        import pty
        import termios

        self._what = f"{Path(script).name} {request}"
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        folder = self._folder.name
        asked = Path(folder, "request.json")
        asked.write_text(json.dumps({**request, "root": folder, "cpu": pin_parent()}))
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, script, "--child", str(asked)],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            cwd=folder,
        )
        os.close(theirs)
        self._written, self._tail = 0, b""
        self._reader = threading.Thread(target=self._drain, args=(ours,), daemon=True)
        self._reader.start()
        self._deadline = threading.Timer(timeout_s, self._process.kill)
        self._deadline.start()

    def _drain(self, terminal: int) -> None:
        while True:
            try:
                chunk = os.read(terminal, 65536)
            except OSError:  # Linux reports the other end's closing as EIO
                chunk = b""
            if not chunk:
                os.close(terminal)
                return
            self._written += len(chunk)
            self._tail = (self._tail + chunk)[-6000:]

    def until_stopped(self) -> None:
        """Wait until it has stopped itself (see `take_turns`)."""
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self._fail()

    def go_on(self) -> None:
        """Let it run again, until it stops itself the next time."""
        self._process.send_signal(signal.SIGCONT)

    def result(self) -> dict[str, Any]:
        """Wait for its end.

        Returns:
            The measuring function's result, and `terminal_bytes`: how much it wrote to the terminal.

        Raises:
            RuntimeError: it failed or took too long; the text ends with what it printed last.
        """
        status = self._process.wait()
        self._deadline.cancel()
        self._reader.join()
        path = Path(self._folder.name, "answer.json")
        if status or not path.exists():
            self._fail()
        answer = json.loads(path.read_text())
        self._folder.cleanup()
        return {**answer, "terminal_bytes": self._written}

    def _fail(self) -> NoReturn:
        self._deadline.cancel()
        self._reader.join()
        self._folder.cleanup()
        last = self._tail.decode(errors="replace")
        raise RuntimeError(f"{self._what} ended with status {self._process.returncode}; it printed last:\n{last}")

    def kill(self) -> None:
        """End it, whatever it does."""
        self._deadline.cancel()
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()


def run_child(script: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run one child to its end and return its result."""
    return Child(script, request).result()


def take_turns(
    script: str,
    base: dict[str, Any],
    own: dict[str, Any],
    turns: int,
    before: Callable[[int], object] = lambda turn: None,
) -> list[dict[str, Any]]:
    """Run two children in turns on one CPU: base, own, base, own, ..., base.

    Both stop themselves (SIGSTOP: all threads) at the start and at the end of each turn, and note the times while they
    run. So whatever slows the machine down for longer than a turn slows both down alike, and neither is measured while
    the other runs, imports or shuts down.

    Args:
        script: the benchmark's file.
        base: the request of the first, which gets one turn more.
        own: that of the second.
        turns: of the second.
        before: called before each turn of the second, with its number.

    Returns:
        The results of both.
    """
    children = [Child(script, base), Child(script, own)]
    try:
        for child in children:
            child.until_stopped()
        for turn in range(2 * turns + 1):
            if turn % 2:
                before(turn // 2)
            children[turn % 2].go_on()
            children[turn % 2].until_stopped()
        results = []
        for child in children:
            child.go_on()
            results.append(child.result())
        return results
    finally:
        for child in children:
            child.kill()


def answer(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """In the child: pin it, measure, write the result."""
    _die_with_parent()
    asked = Path(sys.argv[2])
    request = json.loads(asked.read_text())
    if request["cpu"] is not None:
        os.sched_setaffinity(0, {request["cpu"]})
    result = measure(request)
    asked.with_name("answer.json").write_text(json.dumps(result))


def _die_with_parent() -> None:
    """A child that is stopped would otherwise stay for ever when the benchmark is killed. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def pin_parent() -> int | None:
    """Keep this process off one CPU and return that CPU; None where there is only one or pinning is not supported."""
    if not hasattr(os, "sched_setaffinity") or (os.cpu_count() or 1) < 2:
        return None
    if _pinned:
        return _pinned[0]
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        return None
    os.sched_setaffinity(0, set(usable[:-1]))
    _pinned.append(usable[-1])
    return usable[-1]


_pinned: list[int] = []


def machine() -> dict[str, Any]:
    """Processor, system and versions; nothing that names the machine or the day."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "pinned_to_one_cpu": pin_parent() is not None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or "unknown"


def resident_bytes() -> int:
    """Resident memory of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import psutil  # late: only where there is no /proc

        return psutil.Process().memory_info().rss


def spread(values: Sequence[float], digits: int = 2) -> dict[str, Any]:
    """Median, extremes and the values themselves."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "values": [round(value, digits) for value in values],
    }


def write_results(folder: Path, name: str, results: dict[str, Any]) -> None:
    """Write `<folder>/<name>.json` and say where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **results}, indent=1) + "\n")
    print(f"\nwritten: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def add_out(parser: argparse.ArgumentParser) -> None:
    """The option that says where the JSON goes."""
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="for the JSON (default: results/)")


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a Markdown table, aligned."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")


class Progress:
    """A line on standard error per measurement, with the time that is left."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._started = time.monotonic()

    def step(self, what: str) -> None:
        """One more is done."""
        self._done += 1
        left_s = (time.monotonic() - self._started) / self._done * (self._total - self._done)
        print(f"[{self._done}/{self._total}, {left_s:.0f} s left] {what}", file=sys.stderr, flush=True)
