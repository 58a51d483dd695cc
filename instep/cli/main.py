"""The `instep` command: finds the sub-command, and loads its file only.

A sub-command of several words lies in a file of that path: `instep checkpoint ls` in `instep/cli/checkpoint/ls.py`. The
file's docstring is its help; `arguments(parser)` adds its arguments; `run(args)` does it and returns the exit code. One
that sets a default for `after` gets the words after `--` there.
What it needs of torch is imported in `run`, so that help costs nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from instep import __version__
from instep.errors import EXIT_FAILED, InstepError

COMMANDS = {
    ("checkpoint", "ls"): "what lies in a folder of checkpoints, a run, or all runs",
    ("checkpoint", "verify"): "hold every byte against its checksum",
    ("checkpoint", "show"): "what is inside a checkpoint",
    ("checkpoint", "diff"): "how two checkpoints differ",
    ("checkpoint", "convert"): "to and from safetensors, Lightning and Accelerate",
    ("replay",): "repeat the steps after a checkpoint, bit for bit",
}
_EXAMPLES = (
    "  instep checkpoint ls .",
    "  instep checkpoint verify instep_runs/version_0",
    "  instep replay instep_runs/version_0 --steps 3",
)
EXIT_CODES = "Exit codes: 0 all is well; 1 problems were found, or an error; 2 wrong arguments."
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: its words; by default those of this process.

    Returns:
        The exit code: 0 all is well, 1 problems were found or it failed, 2 wrong arguments.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((name for name in COMMANDS if tuple(words[: len(name)]) == name), None)
    if command is None:
        return _overview(words)
    module = import_module(".".join(("instep.cli", *command)))
    about, _, examples = (module.__doc__ or "").partition("Examples:\n")
    parser = argparse.ArgumentParser(
        prog=" ".join(("instep", *command)),
        description=about.strip(),
        epilog=f"examples:\n{examples.rstrip()}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.arguments(parser)
    words = words[len(command) :]
    after = words.index("--") if "--" in words and parser.get_default("after") is not None else len(words)
    args = parser.parse_args(words[:after])
    if after < len(words):
        args.after = words[after + 1 :]
    try:
        code: int = module.run(args)
        sys.stdout.flush()  # here, where a closed pipe is understood
    except InstepError as error:
        _complain(str(error))
        return EXIT_FAILED
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        _complain(str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _overview(words: Sequence[str]) -> int:
    """Help for no command or a group of them; an error for what is not known."""
    if words == ["--version"]:
        sys.stdout.write(f"instep {__version__}\n")
        return 0
    group: list[str] = []
    rest = list(words)
    while rest and any(name[: len(group) + 1] == (*group, rest[0]) for name in COMMANDS):
        group.append(rest.pop(0))
    known = {name: text for name, text in COMMANDS.items() if name[: len(group)] == tuple(group)}
    width = max(len(" ".join(name)) for name in known) + 2
    lines = [
        f"usage: {' '.join(['instep', *group])} COMMAND ... [--json] [--help]",
        "",
        *(f"  {' '.join(name):{width}}{text}" for name, text in known.items()),
        "",
        "examples:",
        *(line for line in _EXAMPLES if line.startswith(" ".join(("  instep", *group)))),
        "",
        f"`instep COMMAND --help` has more. {EXIT_CODES}",
    ]
    if not rest or rest[0] in ("-h", "--help"):
        sys.stdout.write("\n".join(lines) + "\n")
        return 0
    sys.stderr.write(f"{lines[0]}\n")
    _complain(f"{' '.join(words)!r} is no command; the commands are {', '.join(' '.join(name) for name in known)}")
    return EXIT_USAGE


def _complain(message: str) -> None:
    sys.stderr.write(f"instep: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
