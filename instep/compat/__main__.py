"""Run a script with instep under another package's names: python -m instep.compat accelerate script.py --lr 0.1."""

from __future__ import annotations

import os
import runpy
import sys
from importlib import import_module


def main(words: list[str]) -> None:
    """Replace the named package by instep, then run a script, or the module after `-m`, with its arguments."""
    package, *program = words or [""]
    if package not in ("accelerate", "fabric") or program in ([], ["-m"]):
        raise SystemExit("expected: python -m instep.compat accelerate|fabric SCRIPT, or accelerate|fabric -m MODULE")
    import_module(f"instep.compat.{package}").install()
    is_module = program[:1] == ["-m"]
    sys.argv = program[1:] if is_module else program
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
