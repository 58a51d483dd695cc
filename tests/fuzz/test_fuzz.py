"""A few inputs for each reader, those that once ended badly, and whether the watch sees what it is to see."""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path, PosixPath
from random import Random
from typing import Any

import pytest

from instep.errors import SettingError
from tests.fuzz import child, mutate, readers
from tests.fuzz.__main__ import fuzz, whole_input
from tests.fuzz.readers import READERS

KEPT = Path(__file__).parents[1] / "data/fuzz"
EVERY = int(os.environ.get("INSTEP_FUZZ_COUNT", "4"))

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


@pytest.fixture(scope="module", autouse=True)
def warmed() -> None:
    readers.warm()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name in ("in", "outside"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside/planted").write_text("secret")
    os.utime(tmp_path / "outside/planted", (0, 10**9))
    return tmp_path


@pytest.mark.parametrize("name", READERS)
def test_a_few_inputs_end_well(name: str, tmp_path: Path) -> None:
    tally = fuzz(name, "short", range(EVERY), tmp_path)
    said = [(it / "end.txt").read_text()[:3000] for it in sorted(tmp_path.iterdir())]
    assert not tally.failed, "\n\n".join(said)
    assert tally.inputs == EVERY


@pytest.mark.parametrize("name", sorted(READERS.keys() - {"command-line"}))
def test_the_whole_input_is_read(name: str) -> None:
    reader = READERS[name]
    with whole_input(name) as home:
        ways = range(3)
        ends = [
            child.run(lambda way=way: reader.call(home / "in", Random(way)), home, command=reader.command)
            for way in ways
        ]
    assert {"ok", "exit"} & {end.kind for end in ends}, ends
    assert all(end.allowed for end in ends), ends


@pytest.mark.parametrize("path", sorted(KEPT.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_inputs_that_once_ended_badly_end_well(path: Path, home: Path) -> None:
    reader = READERS[path.parent.name]
    mutate.copy(path, home / "in")
    for way in range(6):  # in which it may be read
        end = child.run(lambda way=way: reader.call(home / "in", Random(way)), home, command=reader.command)
        assert end.allowed, f"{end.kind}: {end.text}"


def test_the_same_seed_makes_the_same_input(tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        folder = tmp_path / name
        (folder / "outside").mkdir(parents=True)
        (folder / "in").mkdir()
        (folder / "in/config.yaml").write_text(readers.LAUNCH_YAML)
        (folder / "in/some.json").write_text('{"a": [1, {"b": "c"}]}')
        for number in range(30):
            mutate.damage(folder / "in", Random(f"5/{number}"))
        made.append({it.name: it.lstat().st_size for it in (folder / "in").rglob("*")})
    assert made[0] == made[1]


@pytest.mark.parametrize("resealed", [False, True])
def test_only_a_resealed_checkpoint_passes_its_checksums(resealed: bool, tmp_path: Path) -> None:
    READERS["fit"].write(tmp_path)
    for folder in readers.checkpoints(tmp_path):
        (folder / "trainer.json").write_bytes((folder / "trainer.json").read_bytes() + b" ")
        if resealed:
            mutate.reseal(folder)
    assert readers.seal_holds(tmp_path) == resealed


def _sets_an_attribute() -> None:
    PosixPath.planted = 1  # type: ignore[attr-defined]


def _starts() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


FORBIDDEN: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a bug": ("traceback", lambda home: {}["missing"]),
    "an exit": ("traceback", lambda home: sys.exit(0)),
    "a crash": ("signal", lambda home: ctypes.string_at(0)),
    "a wait": ("hang", lambda home: time.sleep(1000)),
    "an import": ("import", lambda home: importlib.import_module("planted_module")),
    "an import that is there": ("import", lambda home: importlib.import_module("antigravity")),
    "a file outside": ("open", lambda home: (home / "outside/planted").read_text()),
    "a file outside, in C": ("open", lambda home: ctypes.CDLL(None).fgetc(_fopen(home / "outside/planted"))),
    "a device": ("open", lambda home: os.open("/dev/zero", os.O_RDONLY)),
    "a new file": ("open", lambda home: (home / "new").write_text("x")),
    "a removal": ("open", lambda home: shutil.rmtree(home / "outside")),
    "a process": ("process", lambda home: _starts()),
    "a shell": ("process", lambda home: os.system("true")),
    "a class": ("changed", lambda home: _sets_an_attribute()),
}


def _fopen(path: Path) -> Any:
    library = ctypes.CDLL(None)
    library.fopen.restype = ctypes.c_void_p
    return ctypes.c_void_p(library.fopen(os.fsencode(path), b"r"))


@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_watch_sees_each_forbidden_act(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "ASLEEP_S", 0.5)
    kind, call = FORBIDDEN[name]
    end = child.run(lambda: call(home), home)
    assert (end.kind, end.allowed) == (kind, False), end.text


def test_the_watch_lets_work_in_the_input_folder_pass(home: Path) -> None:
    def raises() -> None:
        (home / "in/new").write_text("x")
        (home / "in/new").read_text()
        raise SettingError("wrong")

    assert child.run(lambda: 5, home).kind == "ok"
    assert child.run(raises, home).kind == "error"
    assert child.run(lambda: sys.exit(2), home, command=True).kind == "traceback"  # it said nothing
    assert child.run(lambda: print("wrong") or 2, home, command=True).kind == "exit"
