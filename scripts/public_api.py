"""The public interface as text: every public name with its signature, and what its docstrings lack.

    python scripts/public_api.py            # prints the interface; --write keeps it in tests/data/public_api.txt
    python scripts/public_api.py --missing  # names without a docstring, or with one out of order

A change of that file is a change of the interface: it belongs in the changelog (tests/test_public_api.py holds it).
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parents[1] / "tests" / "data" / "public_api.txt"

ROOMS = {  # the public modules, in the reference's order: what each is about
    "instep": "Names that most programs need.",
    "instep.trainer": "The module that you write, the Trainer, and its state.",
    "instep.callbacks": "Plug-ins that the Trainer calls.",
    "instep.loggers": "Loggers, which write metrics and hyperparameters.",
    "instep.profilers": "Profilers, which measure where the time of a run goes.",
    "instep.data": "Data modules, loaders and samplers.",
    "instep.activations": "Activations that are computed again in the backward.",
    "instep.pretrained": "Exports for transformers and peft.",
    "instep.optim": "Parameter groups for optimizers.",
    "instep.losses": "Losses over a large vocabulary.",
    "instep.schedules": "Learning-rate schedules by name.",
    "instep.units": "Tokens and samples as units of a run: limits, validation, saves, schedules.",
    "instep.tuner": "Searches for a learning rate and a batch size.",
    "instep.compile": "Settings of `torch.compile`.",
    "instep.strategies": "Strategies, which spread a module over devices, and precision.",
    "instep.state": "State of the process, of the active run, and of its gradients.",
    "instep.distributed": "Collectives on nested data, and triggers.",
    "instep.accelerator": "The Accelerator, for a training loop of your own, and its settings.",
    "instep.big_models": "Models that are larger than the memory: device maps, offload, quantization.",
    "instep.checkpoint": "Checkpoints: write, read, verify, keep and delete them.",
    "instep.runs": "Run folders: find them and read their metrics.",
    "instep.launch.engine": "Starting ranks from a program.",
    "instep.launchers.ray": "Starting ranks as actors of Ray.",
    "instep.testing": "Checks of callbacks, loggers, strategies, modules and data modules of your own.",
    "instep.errors": "Every exception that instep raises.",
    "instep.types": "Protocols and types that several modules share.",
    "instep.utils": "Small helpers: seeds, hyperparameters, rank 0.",
}
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example", "Source")


def public_names(room: str) -> list[str]:
    """Return the names that a room shows: its `__all__`, else its own public classes and functions."""
    module = import_module(room)
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return [name for name in listed if not name.startswith("__")]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == room
    ]


def members(cls: type, public: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield a class's public methods and properties, with those of its internal bases, in the order of the source.

    Args:
        cls: the class.
        public: ids of the public classes. Such a base has its members in an entry of its own.
    """
    seen: set[str] = set()
    for each in cls.__mro__:
        if each is not cls and (id(each) in public or not each.__module__.startswith("instep.")):
            continue
        for name, value in vars(each).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            if inspect.isfunction(value) or isinstance(value, (property, classmethod, staticmethod)):
                yield name, value


def entries() -> Iterator[tuple[str, Any]]:
    """Yield every public name and member once, under the first room that shows it."""
    rooms = [*list(ROOMS)[1:], "instep"]
    public = {id(getattr(import_module(room), name)) for room in rooms for name in public_names(room)}
    seen: set[int] = set()
    for room in rooms:
        for name in public_names(room):
            value = getattr(import_module(room), name)
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield f"{room}.{name}", value
            if inspect.isclass(value):
                yield from ((f"{room}.{name}.{member}", each) for member, each in members(value, public))


def signature(value: Any) -> str:
    """Return how it is called; what it is, where it is not called."""
    if isinstance(value, property):
        return ": property"
    function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    if not callable(function):
        return f": {type(value).__name__}"
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    shown = (re.sub(r" at 0x[0-9a-f]+", "", str(p.replace(annotation=inspect.Parameter.empty))) for p in parameters)
    return f"({', '.join(shown)})".replace(repr(sys.executable), "sys.executable")


def interface() -> str:
    """Return the whole interface, a line for each name."""
    return "\n".join(f"{name}{signature(value)}" for name, value in entries()) + "\n"


def faults() -> Iterator[str]:
    """Yield what is missing in docstrings: all of one, an argument that it names wrongly, an order of its own."""
    for name, value in entries():
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if (
            not (callable(function) or isinstance(function, property))
            or getattr(function, "__name__", "") == "<lambda>"
        ):
            continue
        text = inspect.getdoc(function)
        if not text:
            yield f"{name}: no docstring"
            continue
        found = [section for section in re.findall(r"^(\w+):$", text, re.MULTILINE) if section in SECTIONS]
        if found != sorted(found, key=SECTIONS.index):
            yield f"{name}: sections in the order {', '.join(found)}"
        if inspect.isfunction(function) or inspect.isclass(function):
            yield from (f"{name}: Args names {wrong!r}, which is no argument" for wrong in strangers(function, text))


def strangers(function: Any, text: str) -> list[str]:
    """Return what a docstring's Args name beside the arguments."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", text, re.MULTILINE)
    if section is None:
        return []
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values()):
        return []  # what they take is named too
    lines = re.findall(r"^    ([\w*][\w*, ]*):", section[1], re.MULTILINE)
    return [each for line in lines for each in line.split(", ") if each.strip("* ") not in parameters]


def main() -> int:
    """Print or keep the interface."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep it in tests/data/public_api.txt")
    parser.add_argument("--missing", action="store_true", help="print what docstrings lack")
    args = parser.parse_args()
    if args.missing:
        found = list(faults())
        print("\n".join(found))
        return int(bool(found))
    if args.write:
        KEPT.write_text(interface())
    else:
        print(interface(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
