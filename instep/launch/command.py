"""Find the command that runs this program again, and check that a program can be started."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from instep.errors import SettingError, UsageError


def this_command() -> tuple[str, ...]:
    """Return the command that runs this program again, without the Python executable at its beginning.

    Interpreter options such as `-W` and `-X` are kept; `python -m module` keeps its module; the script's own path is
    made absolute. The program's arguments are the original ones, even if the program has changed `sys.argv`.

    Returns:
        For example `("/home/me/train.py", "--lr", "0.1")` or `("-m", "package.train")`.

    Raises:
        UsageError: the program cannot be run again: it is a notebook, an interactive session, `python -c`, a test, or a
            child process of multiprocessing.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if multiprocessing.parent_process() is not None:
        raise _cannot_run_again("it is a child process of multiprocessing")
    if "pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        raise _cannot_run_again("it runs under pytest")
    if "get_ipython" in vars(main):
        raise _cannot_run_again("it is a notebook or an IPython session")
    if file is None or not Path(file).exists():
        raise _cannot_run_again("it has no main file (an interactive session, or python -c)")

    # The options of the interpreter, such as -W, -X and -O, which multiprocessing passes to its processes too.
    flags = tuple(subprocess._args_from_interpreter_flags())  # pyright: ignore[reportAttributeAccessIssue]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        module = spec.name.removesuffix(".__main__")
        return (*flags, "-m", module, *_arguments_after(module))
    if spec is not None:  # the program is a folder or a zip file with a __main__.py
        return (*flags, os.path.abspath(sys.argv[0]), *_arguments_after(os.path.basename(sys.argv[0])))
    return (*flags, os.path.abspath(file), *_arguments_after(os.path.basename(file)))


def check_program(program: Sequence[str], *, module: bool = False, python: bool = True) -> None:
    """Check that a program can be started, before its ranks are started.

    Args:
        program: a script, module or command, followed by its arguments.
        module: whether the program is a module, as for `python -m`; the module is found but not imported.
        python: whether this Python runs the program; if not, the program is a command of its own.

    Raises:
        SettingError: the script, module or command does not exist.
    """
    name = program[0]
    if not python:
        kind, there = "command", shutil.which(name) is not None
    elif module:
        kind, there = "module", _has_module(name)
    else:
        kind, there = "script", name.startswith("-") or os.path.exists(name)
    if not there:
        more = "; -m MODULE runs a module" if kind == "script" and not name.endswith(".py") else ""
        raise SettingError(f"there is no {kind} {name} (looked from {os.getcwd()}){more}", field="program", got=name)


def _has_module(name: str) -> bool:
    first, *inner = name.split(".")
    try:
        spec = PathFinder.find_spec(first, [os.getcwd()]) or find_spec(first)
    except ValueError:  # the module is loaded, so it exists, but it has no spec, like `__main__`
        return True
    places: Iterable[str] | None = None
    for part in inner:
        if spec is None or (places := spec.submodule_search_locations) is None:
            break
        spec = PathFinder.find_spec(part, list(places))
    return spec is not None and (not inner or places is not None)


def _arguments_after(program: str) -> tuple[str, ...]:
    """Return the arguments after the program's name on the command line with which the interpreter was started."""
    for index, word in enumerate(sys.orig_argv):
        if index > 0 and os.path.basename(word.rstrip("/")) == program:
            return tuple(sys.orig_argv[index + 1 :])
    return tuple(sys.argv[1:])


def _cannot_run_again(why: str) -> UsageError:
    return UsageError(
        f"several devices were asked for, but this process cannot be started again as ranks: {why}. Use "
        "instep.notebook_launcher in a notebook, instep.debug_launcher in a test, put the code into a script, start "
        "it with torchrun, or set devices=1."
    )
