"""The `instep` command: find the sub-command, load only its file, and run it.

A sub-command has a file that is named after it (`instep checkpoint ls` is `instep/cli/checkpoint/ls.py`, `instep
estimate-memory` is `instep/cli/estimate_memory.py`), or is a class in a file that several sub-commands share
(`_SHARED`): `instep config show` is `Show` in `instep/cli/config.py`. The docstring of the file or class is the
command's help. It ends with "Examples:"; before that it has "Exit codes:", if the command has exit codes of its own.
`arguments(parser)` adds the command's arguments; `run(args)` runs the command and returns the exit code. If the parser
has a default for `after`, the words after `--` are in `args.after`. If the file or class has a function `main(words)`,
it gets all words first; if it returns None, `arguments` and `run` are used. `run` imports what needs torch, so that
help and completion are fast.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from traceback import format_exception
from typing import Any, NoReturn

from instep import __version__
from instep.cli import output
from instep.errors import EXIT_FAILED, InstepError, SettingError
from instep.utils.untrusted_files import clean

Command = tuple[str, ...]

COMMANDS: dict[Command, str] = {
    ("fit",): "train a module as a configuration says",
    ("validate",): "run a module over its validation data",
    ("test",): "check a set-up; with --module, run a module over its test data",
    ("predict",): "run a module's predict_step over data",
    ("launch",): "run a script as several processes, on one machine or many",
    ("slurm",): "submit a script to SLURM; saved and requeued at the time limit",
    ("config",): "ask, and write the config file that launches use",
    ("config", "default"): "write the config file without questions",
    ("config", "update"): "change settings of it",
    ("config", "show"): "every setting, its value and where that comes from",
    ("config", "validate"): "check config files",
    ("config", "templates"): "config files that come with instep",
    ("env",): "versions, devices, free memory, settings and their sources",
    ("estimate-memory",): "how much memory training takes, by strategy and precision",
    ("tune-loader",): "how many workers a data loader needs, measured",
    ("merge-weights",): "plain safetensors of any sharded checkpoint",
    ("checkpoint", "ls"): "what lies in a folder of checkpoints, a run, or all runs",
    ("checkpoint", "verify"): "hold every byte against its checksum",
    ("checkpoint", "show"): "what is inside a checkpoint",
    ("checkpoint", "diff"): "how two checkpoints differ",
    ("checkpoint", "convert"): "to and from safetensors, Lightning and Accelerate",
    ("runs", "ls"): "runs with their state, how far they came, and why they ended",
    ("runs", "show"): "what a run is or was doing, what ended it, and how it goes on",
    ("runs", "compare"): "hyperparameters that differ, and where the metrics ended",
    ("runs", "name"): "name a run",
    ("runs", "tag"): "add tags to a run, or take them off",
    ("runs", "note"): "write a note about a run",
    ("runs", "archive"): "leave runs out of the list, or list them again",
    ("runs", "rm"): "move runs to the trash",
    ("runs", "empty-trash"): "delete removed runs for good",
    ("runs", "sync"): "send what trackers did not take",
    ("runs", "samples"): "which samples a step had, by rank, file and record",
    ("replay",): "repeat the steps after a checkpoint, bit for bit",
    ("migrate",): "bring Lightning and Accelerate scripts to instep",
    ("dashboard",): "a live local page of run folders, in a browser",
    ("completion",): "let the shell complete commands and options",
}
GROUPS = {
    "checkpoint": "look into checkpoints, check, compare and convert them",
    "runs": "look at local runs, name and remove them",
}
_EXAMPLES = (
    "  instep fit --config run.yaml --trainer.max_epochs 3",
    "  instep launch --devices 2 train.py --lr 0.1",
    "  instep test --devices 2",
    "  instep checkpoint ls .",
    "  instep checkpoint verify instep_runs/version_0",
    "  instep runs ls",
    "  instep runs show instep_runs/version_0",
)
_SHARED = {
    **{name: "config" for name in COMMANDS if name[0] == "config"},
    **dict.fromkeys((("fit",), ("validate",), ("predict",)), "trainer_command"),
    **{("runs", name): "runs.labels" for name in ("name", "tag", "note", "archive")},
    **{("runs", name): "runs.removed" for name in ("rm", "empty-trash")},
}
_WITH_INNER = {name for name in COMMANDS if any(len(other) > 1 and other[:1] == name for other in COMMANDS)}
EXIT_CODES = "Exit codes: 0 all is well; 1 problems were found, or an error; 2 wrong arguments."
_ALL_EXIT_CODES = (
    "exit codes:",
    "  0    all is well",
    "  1    it failed, or found problems; one message says why",
    "  2    wrong arguments",
    "  75   a job was preempted: it is saved, and the same command goes on with it",
    "  76   a job hung: the reports are in its run folder",
    "  130  interrupted by Ctrl-C",
)
EXIT_USAGE = 2
# Largest width of the overview's first column, in characters. After a longer entry, the text is not aligned.
_WIDE = 50
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of `instep`.

    Args:
        argv: words of the command line; by default those of this process.

    Returns:
        The exit code: 0 all is well; 1 problems were found or the command failed; 2 wrong arguments; or a job's exit
        code.
    """
    if "_ARGCOMPLETE" in os.environ:  # true if a shell asks for completions
        _complete()
        return 0
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may contain bytes that are not text
    for word in words:
        if (why := _unusable(word)) is not None:
            output.warn(f"the word {word[:80]!r} holds {why}, which no path or value may")
            return EXIT_USAGE
    command = find(words)
    rest = words[len(command) :] if command else words
    if command is None or (command in _WITH_INNER and rest and not rest[0].startswith("-")):
        return _overview(words)
    try:
        code = _run(command, rest)
        sys.stdout.flush()  # output is flushed here, since the errors of a closed pipe are handled here
    except BrokenPipeError:  # the program that reads the output, such as `| head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (InstepError, OSError) as error:
        output.warn(str(error))
        return EXIT_USAGE if isinstance(error, SettingError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception:
        if argv is None:  # Python will print this error, and its text may have control characters
            sys.excepthook = lambda *error: sys.stderr.write(clean("".join(format_exception(*error))))
        raise
    return code


def _unusable(word: str) -> str | None:
    """Return why a word of the command line cannot be a path or a value; None if it can."""
    if "\0" in word:
        return "a NUL"
    try:
        os.fsencode(word)
    except UnicodeEncodeError:
        return "half of a surrogate pair"
    return None


def find(words: Sequence[str]) -> Command | None:
    """Return the command with which the words begin, the longer one if two match; None if none matches.

    Example:
        >>> find(["checkpoint", "ls", "."])
        ('checkpoint', 'ls')
    """
    known = (name for name in COMMANDS if tuple(words[: len(name)]) == name)
    return max(known, key=len, default=None)


def load(command: Command) -> Any:
    """Import the module or class of a command."""
    if command in _SHARED:
        return getattr(import_module(f"instep.cli.{_SHARED[command]}"), command[-1].title().replace("-", ""))
    return import_module(".".join(("instep.cli", *command)).replace("-", "_"))


class _Parser(argparse.ArgumentParser):
    """Parser that removes a terminal's control characters from its errors, since argparse prints words unchanged."""

    def error(self, message: str) -> NoReturn:
        super().error(clean(message))


def make_parser(command: Command, module: Any) -> argparse.ArgumentParser:
    """Make the parser of a command's arguments, with the help text.

    Args:
        command: words of the command's name.
        module: the command's module or class, from `load`.
    """
    about, _, examples = (inspect.getdoc(module) or "").partition("Examples:\n")
    codes = "" if "Exit codes:" in about else f"\n\n{EXIT_CODES}"
    parser = _Parser(
        prog=" ".join(("instep", *command)),
        description=about.strip(),
        epilog=f"examples:\n{examples.rstrip()}{codes}",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30),
        add_help=False,
    )
    # The help does not list -h, since a reader of the help has found this option already.
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    module.arguments(parser)
    # A usage text of three lines or more is shortened, since the help lists the options below it.
    if parser.usage is None and parser.format_usage().count("\n") > 2:
        short = parser._get_formatter()
        short.add_usage(None, parser._get_positional_actions(), (), prefix="")
        parser.usage = short.format_help().strip().replace(parser.prog, f"{parser.prog} [OPTIONS]", 1)
    return parser


def _run(command: Command, words: list[str]) -> int:
    module = load(command)
    if hasattr(module, "main"):
        code = module.main(words)
        if code is not None:
            return code
    parser = make_parser(command, module)
    after = words.index("--") if "--" in words and parser.get_default("after") is not None else len(words)
    args = parser.parse_args(words[:after])
    if after < len(words):
        args.after = words[after + 1 :]
    return module.run(args)


def _complete() -> None:
    """Print the completions after the words of COMP_LINE for the shell, and end the process."""
    import argcomplete  # imported late, since only a shell that completes pays for it

    from instep.cli.completion import words_before

    words, word = words_before()
    command = find(words)
    done = command or tuple(word for word in words[:1] if word in GROUPS)
    parser = argparse.ArgumentParser("instep")
    if command:
        module = load(command)
        # the word being completed, such as --trainer.max_epochs, may be known only to the command's own parser
        if hasattr(module, "main") and "." in word:
            module.main([*words[len(command) :], word])
        parser = make_parser(command, module)
    inner = {name[len(done)]: text for name, text in COMMANDS.items() if name[: len(done)] == done and name != done}
    if inner and words == list(done):
        names = parser.add_subparsers()
        for name, text in inner.items():
            names.add_parser(name, help=text if (*done, name) in COMMANDS else GROUPS.get(name))
    os.environ["_ARGCOMPLETE"] = str(1 + len(done))  # argcomplete skips the words of the command's name
    made_up = [option for option in parser._option_string_actions if option.endswith((".ARG", "+"))]
    argcomplete.autocomplete(parser, always_complete_options=False, exclude=made_up)


def _overview(words: Sequence[str]) -> int:
    """Print the help of a group of commands or of all commands; for unknown words, print an error."""
    if words == ["--version"]:
        sys.stdout.write(f"instep {__version__}\n")
        return 0
    group = words[:1] if words and (words[0] in GROUPS or tuple(words[:1]) in _WITH_INNER) else []
    rest = words[len(group) :]
    known = {name: text for name, text in COMMANDS.items() if name[: len(group)] == tuple(group)}
    lines = [
        f"usage: {' '.join(['instep', *group])} COMMAND ... [--help]",
        "",
        *_columns(known if group else _top()),
        "",
        "examples:",
        *(line for line in _EXAMPLES if line.startswith(" ".join(("  instep", *group)))),
        "",
        *([EXIT_CODES] if group else _ALL_EXIT_CODES),
        "",
        "`instep COMMAND --help` has more.",
    ]
    if not rest or rest[0] in ("-h", "--help"):
        sys.stdout.write("\n".join(lines) + "\n")
        return 0
    from instep.utils.porting import COMMANDS_OF_OTHERS  # imported late, since only an error reads these tables

    sys.stderr.write(f"{lines[0]}\n")
    names = [" ".join(name[len(group) :]) for name in known if len(name) > len(group)]
    wrong = " ".join(words[: len(group) + 1])
    near = get_close_matches(rest[0], names, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; the commands are {', '.join(names)}"
    hint = f": {COMMANDS_OF_OTHERS[wrong]}" if wrong in COMMANDS_OF_OTHERS else hint
    output.warn(f"{wrong!r} is no command{hint}")
    return EXIT_USAGE


def _top() -> dict[Command, str]:
    """Return the lines of the overview, as words and description; the commands of a group share one line."""
    lines: dict[Command, str] = {}
    for first, *_ in COMMANDS:
        inner = "|".join(name[1] for name in COMMANDS if name[0] == first and len(name) > 1)
        alone = COMMANDS.get((first,))
        words = (first, inner if alone is None else f"[{inner}]") if inner else (first,)
        lines[words] = alone or GROUPS[first]
    return lines


def _columns(texts: dict[Command, str]) -> list[str]:
    width = max(size for name in texts if (size := len(" ".join(name))) <= _WIDE)
    return [f"  {' '.join(name):{width}}  {text}" for name, text in texts.items()]


if __name__ == "__main__":
    sys.exit(main())
