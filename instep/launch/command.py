"""How to run this program again."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

from instep.errors import UsageError


def this_command() -> tuple[str, ...]:
    """The arguments after the Python executable that run this program again.

    Interpreter options such as `-W` and `-X` are kept; `python -m module` keeps its module; the script's own path is
    made absolute. The program's arguments are those it was started with, also where it has changed `sys.argv` since.

    Returns:
        For example `("/home/me/train.py", "--lr", "0.1")` or `("-m", "package.train")`.

    Raises:
        UsageError: there is no program to run again: a notebook, an interactive session, `python -c`, a test, or a
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

    # What multiprocessing hands to the processes it spawns: -W, -X, -O and the like.
    flags = tuple(subprocess._args_from_interpreter_flags())  # pyright: ignore[reportAttributeAccessIssue]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        module = spec.name.removesuffix(".__main__")
        return (*flags, "-m", module, *_arguments_after(module))
    if spec is not None:  # a folder or a zip file with a __main__.py
        return (*flags, os.path.abspath(sys.argv[0]), *_arguments_after(os.path.basename(sys.argv[0])))
    return (*flags, os.path.abspath(file), *_arguments_after(os.path.basename(file)))


def _arguments_after(program: str) -> tuple[str, ...]:
    """The arguments that followed the program's name, from the command line as the interpreter got it."""
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
