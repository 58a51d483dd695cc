"""Real file systems for tests: a small one that fills up, and one that turns read-only. For the superuser of Linux."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tmpfs(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A new file system of so many bytes on a new folder; where mounting is not allowed the test is skipped."""
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def set_read_only(folder: Path, read_only: bool = True) -> None:
    """Mount a `tmpfs` folder again, read-only or not."""
    _mount("-o", "remount," + ("ro" if read_only else "rw"), str(folder))


def _mount(*args: str) -> None:
    try:
        done = subprocess.run(["mount", *args], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"mount is not allowed: {done.stderr.strip()}")
