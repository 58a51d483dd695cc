from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from instep import errors
from instep.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InstepError,
    Preempted,
    RemoteError,
    SettingError,
    UnsavableStateError,
    one_of,
)
from tests.helpers.spawn import HANG_S


def test_the_tree_in_the_docstring_is_the_tree():
    """Each line of the tree: indentation is the base, the name in brackets the standard base beside it."""
    line = re.compile(r"^( *(?:[│├└─ ]+ )?)(\w+)(?: \((\w+)\))?(?: {2,}.*)?$")
    text = (errors.__doc__ or "").split("    Preempted")[0].splitlines()[2:]
    stack: list[tuple[int, type]] = []
    seen = set()
    for row in filter(str.strip, text):
        match = line.match(row)
        assert match, row
        depth, cls = len(match[1]), getattr(errors, match[2])
        while stack and stack[-1][0] >= depth:
            stack.pop()
        if stack:
            assert cls.__bases__[0] is stack[-1][1], row
        if match[3]:
            assert match[3] in [base.__name__ for base in cls.__mro__], row
        stack.append((depth, cls))
        seen.add(cls)
    defined = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == "instep.errors"}
    assert seen == defined - {Preempted}


def test_errors_belong_to_pythons_families():
    assert issubclass(SettingError, ValueError)
    assert issubclass(CheckpointNotFoundError, FileNotFoundError)
    assert issubclass(UnsavableStateError, TypeError)
    assert not issubclass(Preempted, Exception)
    assert not issubclass(Preempted, InstepError)


def test_objects_are_on_the_exception():
    assert (SettingError("x", field="devices", got=0).field, SettingError("x", field="devices", got=0).got) == (
        "devices",
        0,
    )
    assert CheckpointError("x", path="a/b").path == Path("a/b")
    assert CheckpointError("x").path is None
    remote = RemoteError("stepping", rank=3, traceback="ZeroDivisionError")
    assert remote.rank == 3
    assert "rank 3:\nZeroDivisionError" in str(remote)


def test_one_of_suggests_the_nearest():
    error = one_of("strategy", "dpp", ["auto", "ddp"])
    assert str(error) == "strategy='dpp' is not known. Use one of: auto, ddp. Did you mean 'ddp'?"
    assert error.got == "dpp"
    assert "Did you mean 'ddp'?" in str(one_of("strategy", "dpp", ["pp", "dp", "ddp"]))
    assert "Did you mean 'xla'?" in str(one_of("accelerator", "TPU", ["xpu", "cpu", "xla"]))
    assert "Did you mean" not in str(one_of("strategy", "zebra", ["auto", "ddp"]))


def test_preempted_ends_the_process_with_75():
    code = (
        "from instep.errors import Preempted\n"
        "try:\n    raise Preempted('saved; run again')\n"
        "except Exception:\n    raise SystemExit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=HANG_S, check=False)
    assert done.returncode == errors.EXIT_PREEMPTED == 75
    with pytest.raises(Preempted, match="run again"):
        raise Preempted("saved; run again", Path("here"))
