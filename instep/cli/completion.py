"""Print the script that lets a shell complete `instep` with TAB: commands, options, their values, and files.

In bash, put into ~/.bashrc       eval "$(instep completion bash)"
In zsh, put into ~/.zshrc         autoload -U compinit && compinit; eval "$(instep completion zsh)"
In fish, run once                 instep completion fish > ~/.config/fish/completions/instep.fish

The script asks `instep` itself, so the completions always fit the installed version.

Examples:
  instep completion bash                    print it
  eval "$(instep completion bash)"          use it in this shell
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from instep.cli import output
from instep.errors import UsageError

_SHELLS = ("bash", "zsh", "fish")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.add_argument("shell", choices=_SHELLS, nargs="?", help="default: the one that SHELL names")


def run(args: argparse.Namespace) -> int:
    """Print the shell's completion script."""
    import argcomplete  # imported late, since nothing else needs it

    shell = args.shell or Path(os.environ.get("SHELL", "")).name
    if shell not in _SHELLS:
        raise UsageError(f"SHELL={os.environ.get('SHELL')!r} is none of {', '.join(_SHELLS)}: name one of them")
    output.say(argcomplete.shellcode(["instep"], shell=shell).strip())
    return 0


def complete_subcommand(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Complete sub-commands of a program that uses jsonargparse, whose own completion does not cover them.

    Args:
        parsers: parser of each sub-command, by the sub-command's name.
    """
    words, _ = words_before()
    if words and words[0] in parsers:
        os.environ["_ARGCOMPLETE"] = str(int(os.environ["_ARGCOMPLETE"]) + 1)
        parsers[words[0]].parse_args([])


def words_before() -> tuple[list[str], str]:
    """Return the words on the command line before the word that is being completed, and that word."""
    from argcomplete.lexers import split_line  # imported late, since only a shell asks for it

    _, word, _, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    return words[int(os.environ["_ARGCOMPLETE"]) :], word
