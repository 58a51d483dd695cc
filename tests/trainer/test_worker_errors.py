"""An error in the data ends a real program within seconds, whoever loads it and however the program was started.

INSTEP_WORKER_ERRORS_EVERY=1 runs every combination; by default those run that prove most.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.spawn import Finished, free_port, run_command
from tests.launch.ways import REPO, UNLAUNCHED

pytestmark = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(300)]

JOB = str(Path(__file__).with_name("corrupt_job.py"))
MARK = "INSTEP_TEST_MARK"
EVERY = os.environ.get("INSTEP_WORKER_ERRORS_EVERY") == "1"


class Cell(NamedTuple):
    """A program; its fields are the arguments of `corrupt_job`, and `start` and `ranks` say how it is started."""

    start: str
    ranks: int
    loop: str
    where: str
    workers: int
    persistent: bool
    restarts: int
    then: str


CHOSEN = [
    Cell("plain", 1, "trainer", "dataset", 2, False, 0, "raise"),
    Cell("plain", 1, "trainer", "stuck", 2, True, 0, "again"),
    Cell("plain", 1, "accelerator", "init", 2, True, 0, "end"),
    Cell("launch", 2, "trainer", "dataset", 2, True, 1, "raise"),
    Cell("forked", 2, "accelerator", "collate", 2, False, 1, "raise"),
]


def every() -> Iterator[Cell]:
    yield from (Cell("torchrun", 2, loop, "dataset", 2, False, 0, "raise") for loop in ("trainer", "accelerator"))
    for start, ranks, loop in itertools.product(("plain", "launch", "forked"), (1, 2), ("trainer", "accelerator")):
        if (start, ranks, loop) == ("plain", 2, "accelerator"):
            continue  # it starts no ranks itself
        for where, (workers, persistent) in itertools.product(
            ("dataset", "collate", "init", "stuck"), ((0, False), (2, False), (2, True))
        ):
            if workers == 0 and where in ("init", "stuck"):
                continue
            for restarts in (0,) if start == "plain" else (0, 1):
                yield Cell(start, ranks, loop, where, workers, persistent, restarts, "raise")
            if ranks == 1:
                yield from (Cell(start, ranks, loop, where, workers, persistent, 0, then) for then in ("end", "again"))


def run(cell: Cell, root: Path) -> Finished:
    job = [JOB, "--root", str(root), "--loop", cell.loop, "--where", cell.where, "--then", cell.then]
    job += ["--workers", str(cell.workers), *(["--persistent"] if cell.persistent else [])]
    again = ["--max-restarts", str(cell.restarts)]
    if cell.start == "plain":
        argv = [*job, *(["--devices", str(cell.ranks)] if cell.ranks > 1 else [])]
    elif cell.start == "launch":
        argv = ["-m", "instep", "launch", "-q", "--accelerator", "cpu", "--devices", str(cell.ranks), *again, *job]
    elif cell.start == "torchrun":
        ranks = ["--nproc-per-node", str(cell.ranks), "--master-port", str(free_port())]
        argv = ["-m", "torch.distributed.run", *ranks, *job]
    else:
        argv = [*job, "--forked", str(cell.ranks), *again]
    env = {**UNLAUNCHED, "PYTHONPATH": str(REPO), MARK: str(root)}
    return run_command([sys.executable, *argv], env=env, cwd=REPO, timeout_s=120.0)


def processes(root: Path) -> list[str]:
    """What still runs of the program, in whatever session."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                mine = f"{MARK}={root}\0".encode() in (folder / "environ").read_bytes()
                if mine and (folder / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found.append((folder / "cmdline").read_text())
            except OSError:  # it has ended meanwhile
                continue
    return found


def lines(path: Path) -> list[int]:
    """When the program has noted something, in nanoseconds."""
    return [int(line.split()[0]) for line in path.read_text().splitlines()]


@pytest.mark.dist
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
@pytest.mark.parametrize("cell", [*every()] if EVERY else CHOSEN, ids=lambda cell: "-".join(map(str, cell)))
def test_an_error_in_the_data_ends_the_program(cell: Cell, tmp_path: Path) -> None:
    done = run(cell, tmp_path)
    left = processes(tmp_path)
    ended_s = (time.monotonic_ns() - lines(tmp_path / "raised")[-1]) / 1e9
    print(f"over {ended_s:.1f} s after the error")
    deadline = time.monotonic() + 20.0
    while processes(tmp_path):  # a worker of a rank that was ended looks for it once a second
        assert time.monotonic() < deadline, left
        os.sched_yield()
    said = [json.loads(path.read_text()) for path in sorted(tmp_path.rglob("status.json"))]
    parents = int(cell.start == "plain" and cell.ranks > 1)  # it runs up to its first fit, and is the agent then
    assert len(lines(tmp_path / "began")) == cell.ranks * (1 + cell.restarts) + parents
    if cell.then != "raise":
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert ("trained again" in done.stdout) == (cell.then == "again")
        assert [it["status"] for it in said] == ["failed", "done"][: len(said)]
        return
    assert done.returncode == 1, done.stderr
    told = done.stderr[done.stderr.rindex("Traceback") :]
    assert "ValueError: corrupt on purpose in" in told
    assert (" in fail\n" in told) == (cell.start != "torchrun" or cell.workers > 0)
    if cell.loop == "trainer":
        assert [it["status"] for it in said] == ["failed"] * (1 + cell.restarts)
        assert all("corrupt on purpose in" in it["error"] for it in said)
    if sys.version_info >= (3, 11) and cell.where == "dataset":
        assert "The data set raised this for sample 31." in told
