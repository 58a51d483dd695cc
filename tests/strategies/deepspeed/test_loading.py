"""Builds of DeepSpeed's operators that were killed are found before anything waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from instep.errors import DistributedError
from instep.strategies.deepspeed.loading import check_builds
from tests.helpers.spawn import HANG_S


def lock(folder: Path, age_s: float) -> Path:
    folder.mkdir(parents=True)
    path = folder / "lock"
    path.touch()
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))
    return path


@pytest.mark.parametrize("place", ["cpu_adam", "py311_cpu/cpu_adam"])
def test_a_lock_that_nobody_holds_is_named(place: str, tmp_path: Path) -> None:
    path = lock(tmp_path / place, age_s=120)
    with pytest.raises(DistributedError, match=f"'cpu_adam' was killed 2 minutes ago.*rm {path}") as caught:
        check_builds(tmp_path)
    assert "CPUAdamBuilder().load()" in str(caught.value)


def test_a_build_that_has_just_begun_or_is_at_work_is_left_alone(tmp_path: Path) -> None:
    check_builds(tmp_path / "missing")
    lock(tmp_path / "young", age_s=1)
    folder = lock(tmp_path / "cpu_adam", age_s=120).parent
    compiler = subprocess.Popen([sys.executable, "-c", "input()"], cwd=folder, stdin=subprocess.PIPE)
    try:
        check_builds(tmp_path)
    finally:
        compiler.communicate(timeout=HANG_S)
    with pytest.raises(DistributedError, match="cpu_adam"):
        check_builds(tmp_path)
