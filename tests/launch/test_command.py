from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from instep.errors import UsageError
from instep.launch.command import this_command
from tests.helpers.spawn import run_command

# The latter would come back as -B.
PLAIN = {"PYTEST_CURRENT_TEST": None, "PYTHONDONTWRITEBYTECODE": None}


def test_under_pytest_the_program_cannot_be_run_again() -> None:
    with pytest.raises(UsageError, match=r"pytest.*notebook_launcher.*debug_launcher.*devices=1"):
        this_command()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A package with a main file that says how it would be run again, after changing folder and arguments."""
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    body = """
        import os, sys
        from instep.launch.command import this_command
        sys.argv[1:] = []
        os.chdir("/")
        print(this_command())
    """
    for name in ("train.py", "__main__.py"):
        (package / name).write_text(textwrap.dedent(body))
    return package


def test_the_command_that_runs_this_program_again(program: Path) -> None:
    def said(*words: str, cwd: Path = program.parent) -> tuple[str, ...]:
        done = run_command([sys.executable, *words], env=PLAIN, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return eval(done.stdout)

    script = str(program / "train.py")
    assert said("train.py", "--lr", "0.1 0", cwd=program) == (script, "--lr", "0.1 0")
    assert said("-W", "error", "pack/train.py", "x") == ("-Werror", script, "x")
    assert said("-m", "pack.train", "a", "b") == ("-m", "pack.train", "a", "b")
    assert said("-m", "pack", "a") == ("-m", "pack", "a")


@pytest.mark.parametrize("how", ["-c", "stdin"])
def test_a_program_without_a_main_file_cannot_be_run_again(how: str) -> None:
    code = "from instep.launch.command import this_command; this_command()"
    words = ["-c", code] if how == "-c" else ["-c", f"import code; code.InteractiveConsole().runcode({code!r})"]
    done = run_command([sys.executable, *words], env=PLAIN)
    assert "UsageError" in done.stderr
    assert "devices=1" in done.stderr
