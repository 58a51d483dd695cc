"""Loads hyperparameters of a stranger under an audit hook; test_configured.py runs it as a program of its own.

Prints one JSON line: how many were tried, and which of them opened, imported, loaded or built what they named.
"""

from __future__ import annotations

import json
import logging  # noqa: F401  loaded already, so that only an allow-list keeps its FileHandler from being built
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from instep import TrainModule
from instep.checkpoint import CheckpointStore
from instep.cli import TrainerCLI
from instep.errors import InstepError
from instep.utils.rebuild import build_configured

HERE = "tests.trainer.stranger_hparams"
PLAIN = (str, int, float, bool, type(None))
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
_names = count()


@dataclass
class Options:
    on: Any = None


class Net(TrainModule):
    on: Any


class Untyped(Net):
    def __init__(self, on=None):
        super().__init__()
        self.on = on


class Anything(Net):
    def __init__(self, on: Any = None) -> None:
        super().__init__()
        self.on = on


class AnObject(Net):
    def __init__(self, on: object = None) -> None:
        super().__init__()
        self.on = on


class Called(Net):
    def __init__(self, on: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.on = on


class Listed(Net):
    def __init__(self, on: list[Any] | None = None) -> None:
        super().__init__()
        self.on = on


class Mapped(Net):
    def __init__(self, on: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.on = on


class Structured(Net):
    def __init__(self, on: Options | None = None) -> None:
        super().__init__()
        self.on = on


class Classed(Net):
    def __init__(self, on: type | None = None) -> None:
        super().__init__()
        self.on = on


class TextOrModule(Net):
    def __init__(self, on: str | nn.Module | None = None) -> None:
        super().__init__()
        self.on = on


class Passing(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.on = options


NETS = [Untyped, Anything, AnObject, Called, Listed, Mapped, Structured, Classed, TextOrModule, Passing]


def attacks(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each must not do, as a class and its arguments."""
    yield "dlopen", {"class_path": "ctypes.CDLL", "init_args": {"name": str(root / "evil.so")}}
    kept = {"filename": str(root / "kept.txt"), "mode": "w"}
    yield "open", {"class_path": "logging.FileHandler", "init_args": kept}
    yield "import", {"class_path": "notyetimported.Evil", "init_args": {}}
    yield "from_file", {"class_path": "torch.from_file", "init_args": {"filename": str(root / "new.bin"), "size": 1}}
    yield "graph", {"class_path": "torch.fx.graph_module._CodeOnlyModule", "init_args": {"body": {"x": 1}}}


def shapes(spec: dict[str, Any]) -> Iterator[Any]:
    """The ways to say it in a checkpoint."""
    text = json.dumps(spec)
    tabbed = text.replace('": ', '":\t')
    flow = f"{{class_path: {spec['class_path']}, init_args: {json.dumps(spec['init_args'])}}}"
    yield spec
    for way in (text, tabbed, flow, flow.replace(": ", ":\t"), spec["class_path"], f"[{tabbed}]", f"- {text}"):
        yield way
        for nested in (way, {"on": way}, {"input": way}):
            yield {"class_path": "torch.nn.Sequential", "init_args": nested}
            yield {"class_path": f"{HERE}.Anything", "init_args": nested}
    yield {"class_path": f"{HERE}.Mapped", "init_args": {"on": {"on": {**spec, "init_args": json.dumps({})}}}}
    yield {"class_path": f"{HERE}.Anything", "init_args": {}, "dict_kwargs": tabbed}


def wrapped(value: Any) -> Iterator[Any]:
    yield value
    yield [value]
    yield {"on": value}


class Command(TrainerCLI):
    """Builds everything and evaluates nothing."""

    def validate(self, **arguments: Any) -> None:
        assert arguments["model"] is self.model


def command(net: type[Net], words: list[str]) -> Any:
    return Command(net, trainer_defaults=QUIET, args=words).model


def checkpoint(root: Path, name: str, on: Any) -> Path:
    place = {"epoch": 0, "global_step": 0, "world_size": 1, "hparams_name": None}
    state = {"hyper_parameters": {"_class_path": name, "on": on}, "user": {}, **place}

    def write(writer: Any) -> None:
        writer.tensors("model.safetensors", {})
        writer.state("trainer", state)

    return CheckpointStore(root / "run").save(next(_names), write, info={"kind": "full"})


def only_plain(value: Any) -> bool:
    """Whether it is what a checkpoint may hold, or a module made of that."""
    if isinstance(value, dict):
        return all(map(only_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(only_plain, value))
    if isinstance(value, Options | Net):
        return only_plain(value.on)
    return isinstance(value, PLAIN) or type(value) is nn.Sequential


def main(root: Path, every: bool) -> None:
    seen: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        named = str(arguments[0]) if arguments else ""
        files = [str(root / name) for name in ("kept.txt", "new.bin", "evil.so")]
        started = event in ("ctypes.dlopen", "os.system", "os.exec", "os.posix_spawn")
        if started or (event == "import" and "notyetimported" in named) or (event == "open" and named in files):
            seen.append(f"{event} {named}")

    (root / "kept.txt").write_text("kept")
    Anything.load_from_checkpoint(checkpoint(root, f"{HERE}.Anything", "x"))  # imports what a load needs
    torch.nn.Sequential()
    sys.addaudithook(watch)
    tried, built, broken = 0, 0, []
    for net in NETS:
        name = f"{HERE}.{net.__name__}"
        for kind, spec in attacks(root):
            values = [it for shape in shapes(spec) for it in wrapped(shape)]
            for number, value in enumerate(values):
                ways: list[Callable[[], Any]] = [partial(build_configured, net, {"_class_path": name, "on": value}, {})]
                if every or (kind == "dlopen" and value is values[9]):
                    path = checkpoint(root, name, value)
                    words = ["validate", f"--ckpt_path={path}"]
                    ways.append(partial(net.load_from_checkpoint, path, strict=False))
                    ways.append(partial(command, net, words))
                for way in ways:
                    tried += 1
                    try:
                        module = way()
                    except InstepError:
                        module = None
                    except BaseException as error:  # whatever it is, it is told
                        broken.append(f"{net.__name__} {kind} {number} {value!r}: {type(error).__name__}: {error}")
                        continue
                    built += module is not None
                    if seen or (module is not None and not only_plain(module.on)):
                        broken.append(f"{net.__name__} {kind} {number} {value!r}: {seen} {type(module).__name__}")
                        seen.clear()
    kept = (root / "kept.txt").read_text() == "kept" and len(list(root.iterdir())) == 2
    print(json.dumps({"kept": kept, "tried": tried, "built": built, "broken": len(broken), "first": broken[:8]}))


if __name__ == "__main__":
    from tests.trainer import stranger_hparams  # as the checkpoints name it

    stranger_hparams.main(Path(sys.argv[1]), every="every" in sys.argv)
