"""Completion by TAB: what a real bash (zsh and fish where they are) gets offered, without loading torch."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from instep.cli.main import main
from tests.helpers.spawn import run_command

ASKED = {
    "instep chec": "checkpoint",
    "instep checkpoint con": "convert",
    "instep checkpoint convert --j": "--json",
    "instep checkpoint convert a b --to acc": "accelerate",
    "instep config sh": "show",
    "instep launch --precision bf16-t": "bf16-true",
    "instep launch --max": "--max-restarts",
    "instep migrate scr": "script.py",
    "instep completion z": "zsh",
    "instep merge-weights --js": "--json",
    "instep fit --ckpt": "--ckpt_path",
}
BASH = """
eval "$(instep completion bash)"
{asked}
"""
ASK = """COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; COMPREPLY=(); _python_argcomplete instep
echo "${{COMPREPLY[*]}}"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A folder with a file to complete, and a torch that must not be loaded."""
    (tmp_path / "script.py").write_text("")
    (tmp_path / "traps").mkdir()
    (tmp_path / "traps" / "torch.py").write_text("raise SystemExit('torch was loaded')")
    command = tmp_path / "bin" / "instep"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nimport sys\nfrom instep.cli.main import main\nsys.exit(main())\n")
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "PYTHONPATH": f"{tmp_path / 'traps'}{os.pathsep}{Path.cwd()}"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_and_options(tmp_path: Path, environment: dict[str, str]) -> None:
    script = BASH.format(asked="".join(ASK.format(line=line) for line in [*ASKED, "instep "]))
    done = run_command(["bash", "-c", script], cwd=tmp_path, env=environment)
    *found, all_of_them = [line.strip() for line in done.stdout.splitlines()]
    assert found == list(ASKED.values()), done.stderr
    assert {"checkpoint", "migrate", "completion"} <= set(all_of_them.split())


def test_the_options_of_a_trainer(tmp_path: Path, environment: dict[str, str]) -> None:
    """Of `instep fit`, and of a program with a TrainerCLI; they are known to torch only."""
    program = tmp_path / "bin" / "train.py"
    program.write_text(f"#!{sys.executable}\nfrom instep.cli import TrainerCLI\nTrainerCLI()\n")
    program.chmod(0o755)
    line = "fit --trainer.max_ep"
    shell = {**environment, "PYTHONPATH": str(Path.cwd()), "COMP_TYPE": "9", "_ARGCOMPLETE": "1"}
    for name in ("instep", "train.py"):
        point = {"COMP_LINE": f"{name} {line}", "COMP_POINT": str(len(name) + 1 + len(line))}
        done = run_command(["bash", "-c", f"{name} 8>&1 >&2"], env={**shell, **point})
        assert done.stdout.strip() == "--trainer.max_epochs", done.stderr


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes_commands_and_options(tmp_path: Path, environment: dict[str, str]) -> None:
    for line, wanted in ASKED.items():
        script = f"instep completion fish | source; complete -C '{line}'"
        done = run_command(["fish", "-c", script], cwd=tmp_path, env=environment)
        assert done.stdout.split("\t")[0].strip() == wanted, done.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_accepts_its_script(tmp_path: Path, environment: dict[str, str]) -> None:
    script = 'autoload -U compinit && compinit -D -u; eval "$(instep completion zsh)"; echo ${_comps[instep]}'
    done = run_command(["zsh", "-f", "-c", script], cwd=tmp_path, env=environment)
    assert done.stdout.strip() == "_python_argcomplete", done.stderr


def test_the_default_is_the_shell_that_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert main(["completion"]) == 0
    assert capsys.readouterr().out.startswith("function __fish_instep_complete")
    monkeypatch.setenv("SHELL", "/bin/dash")
    assert main(["completion"]) == 1
    assert "none of bash, zsh, fish" in capsys.readouterr().err
