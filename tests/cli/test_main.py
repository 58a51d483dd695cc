"""The `instep` command itself: help, wrong words, exit codes, and what it does not import."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from instep.cli import main as cli
from instep.cli.main import COMMANDS, main
from instep.errors import SettingError
from tests.helpers.spawn import HANG_S, run_command

LINES, COLUMNS = 40, 120  # of a screen


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["checkpoint"], ["checkpoint", "--help"]])
def test_the_overview_of_commands_fits_a_screen(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= LINES
    assert max(map(len, shown.splitlines())) <= COLUMNS
    listed = [line.split() for line in shown.split("examples:")[0].splitlines() if line.startswith("  ")]
    if "checkpoint" in words:
        assert [tuple(line[:2]) for line in listed] == [name for name in COMMANDS if name[0] == "checkpoint"]
    else:
        inner = {line[0]: line[1].strip("[]").split("|") for line in listed}
        assert inner.keys() == {name[0] for name in COMMANDS}
        assert all(name[1] in inner[name[0]] for name in COMMANDS if len(name) == 2)
    assert "\n  instep checkpoint verify " in shown.split("examples:")[1]
    assert "2    wrong arguments" in shown or "2 wrong arguments" in shown


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_help_has_examples_and_exit_codes_and_fits_a_screen(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert f"instep {' '.join(command)} " in shown.split("examples:")[1].replace("\n", " \n")
    assert shown.count("Exit codes: 0 ") == 1
    assert len(shown.splitlines()) <= LINES
    assert max(map(len, shown.splitlines())) <= COLUMNS


@pytest.mark.parametrize("words", [["chekpoint"], ["checkpoint", "lss"], ["checkpoint", "ls", "--nothing"], ["replay"]])
def test_wrong_commands_end_with_2_and_the_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert "usage: instep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("lanch", "'lanch' is no command; did you mean launch?"),
        ("checkpoint verfy", "'checkpoint verfy' is no command; did you mean verify?"),
        ("tpu-config", "'tpu-config' is no command: Google's gcloud runs a command on all hosts of a pod"),
        ("to-fsdp2", "it is not needed: strategy 'fsdp' is FSDP2"),
        ("config frobnicate", "; the commands are default, update, show, validate, templates"),
    ],
)
def test_the_nearest_command_is_named(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(OSError("disk"), 1), (SettingError("x"), 2), (KeyboardInterrupt(), 130)])
def test_errors_without_traceback(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(import_module("instep.cli.checkpoint.ls"), "run", fail)
    assert main(["checkpoint", "ls"]) == code


@pytest.mark.parametrize("word", ["\0", "a\0b", "--config=\0", "\ud800"])
@pytest.mark.parametrize("command", [[], ["checkpoint", "ls"], ["config", "update"], ["fit", "--config"], ["launch"]])
def test_words_that_the_system_does_not_take(command: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, word]) == 2
    assert "which no path or value may" in capsys.readouterr().err


def test_a_path_that_is_no_text_is_shown(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff"
    done = subprocess.run(
        [sys.executable, "-m", "instep", "checkpoint", "ls", folder], capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"udcff" in done.stderr
    assert b"Traceback" not in done.stderr


def test_our_own_faults_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("instep.cli.checkpoint.ls"), "run", lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["checkpoint", "ls"])


def test_help_loads_nothing_heavy() -> None:
    """What it takes in time is measured by benchmarks/import_time.py."""
    words = [["--help"], ["--version"], *([*command, "--help"] for command in COMMANDS)]
    code = (
        f"import sys\nfrom instep.cli.main import main\nfor words in {words!r}:\n"
        "    try:\n        main(words)\n    except SystemExit:\n        pass\n"
        "    heavy = {'torch', 'rich', 'numpy', 'xxhash', 'fsspec', 'yaml', 'pydantic', 'jsonargparse', 'ray',\n"
        "        'libcst', 'argcomplete', 'wandb', 'transformers'} & set(sys.modules)\n"
        "    if heavy:\n        sys.exit(f'{words} loads {heavy}')\n"
    )
    assert run_command([sys.executable, "-c", code]).stderr.strip() == ""


def test_as_a_module_and_into_a_closed_pipe(tmp_path: Path) -> None:
    assert run_command([sys.executable, "-m", "instep", "--version"]).stdout.startswith("instep ")
    failed = run_command([sys.executable, "-m", "instep", "checkpoint", "ls", str(tmp_path)])
    assert failed.returncode == 1
    assert failed.stderr.splitlines() == [f"instep: there is no checkpoint in {tmp_path}, nor up to 6 folders below it"]
    pipe = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.close(); from instep.cli.output import say\n"
         "import instep.cli.checkpoint.ls as ls\nls.run = lambda _: [say('x' * 99) for _ in range(9999)] and 0\n"
         "from instep.cli.main import main; sys.exit(main(['checkpoint', 'ls']))"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert pipe.stdout is not None
    assert pipe.stderr is not None
    pipe.stdout.close()
    assert (pipe.wait(HANG_S), pipe.stderr.read()) == (1, b"")
    pipe.stderr.close()


def test_the_commands_are_there() -> None:
    for command in COMMANDS:
        module = cli.load(command)
        assert callable(module.arguments)
        assert callable(getattr(module, "run", None) or module.main)
    assert cli.EXIT_USAGE == 2
