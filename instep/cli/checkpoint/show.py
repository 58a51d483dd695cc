"""Show what is inside a checkpoint; for a folder with several checkpoints, the newest that is not damaged.

Prints its manifest, position in the run, hyperparameters, optimizers, schedulers, callbacks, position in the data, and
tensors. Files are verified when they are read, except those with tensors, of which only the headers are read.

Examples:
  instep checkpoint show instep_runs/version_0
  instep checkpoint show instep_runs/version_0/checkpoints/step-00001200-1 --tensors
  instep checkpoint show runs/best --json | jq .trainer.position
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.cli import output
from instep.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from instep.checkpoint import Reader

_FEW_TENSORS = 12
_SECTIONS = (
    "position", "hyper_parameters", "schedulers", "scaler", "callbacks", "loggers", "datamodule", "data", "metrics",
    "user", "command",
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or a folder or run that has one")
    parser.add_argument("--tensors", action="store_true", help="list all tensors, the optimizer's too")
    parser.add_argument("--json", action="store_true", help="for programs; has all tensors")


def run(args: argparse.Namespace) -> int:
    """Print what is inside the checkpoint."""
    from instep.checkpoint import CheckpointStore  # imported late, since it loads torch
    from instep.checkpoint.edge import reading
    from instep.checkpoint.scan import Broken
    from instep.cli.checkpoint.targets import candidates, pass_over

    found = candidates(args.path)
    content: dict[str, Any] = {}
    for what in found:
        try:
            if isinstance(what, Broken):
                raise CorruptCheckpointError(what.damage, path=what.path)
            with reading(what.path, "holds values that cannot be shown"):
                content = _content(CheckpointStore(what.path.parent).read(what.path))
            break
        except CorruptCheckpointError as error:
            if what is found[-1]:
                raise
            pass_over(str(error))
    if args.json:
        output.say_json(content)
        return 0
    with reading(Path(content["path"]), "holds values that cannot be shown"):
        _print(content, args.tensors)
    return 0


def _content(reader: Reader) -> dict[str, Any]:
    from instep.checkpoint.reader import whole_name  # imported late, since it loads torch
    from instep.cli.checkpoint.contents import read_headers

    manifest = reader.manifest
    names = sorted({whole_name(name) for name in manifest.files if name.endswith(".safetensors")})
    facts = ("step", "attempt", "run_id", "world_size", "created", "format_version")
    return {
        "path": str(reader.path),
        **{name: getattr(manifest, name) for name in facts},
        "versions": dict(manifest.versions),
        "info": dict(manifest.info),
        "files": {name: {"bytes": record.bytes, "xxh3": record.xxh3} for name, record in manifest.files.items()},
        "trainer": reader.state("trainer") if reader.has("trainer.json") else {},
        "optimizers": _optimizers(reader),
        "tensors": {name: read_headers([reader.path / file for file in reader.files_of(name)]) for name in names},
    }


def _optimizers(reader: Reader) -> Any:
    """List the class and options of each optimizer, without its state; None if the checkpoint has no optimizers."""
    from instep.checkpoint import decode  # imported late, since it loads torch
    from instep.checkpoint.lazy import join_trees

    if not reader.has_state("optimizer"):
        return None
    found = []
    for tree in join_trees(decode(reader.json(name), _AnyTensor()) for name in reader.files_of("optimizer.json")):
        groups = [{**group, "params": len(group["params"])} for group in tree["groups"]]
        found.append({"optimizer": tree["optimizer"], "groups": groups})
    return found


class _AnyTensor(dict[str, Any]):
    """Mapping that returns an empty tensor for every name, since the tensors in the file are not read."""

    def __missing__(self, key: str) -> Any:
        import torch  # imported late, since it is slow to import

        return torch.empty(0, device="meta")


def _print(content: dict[str, Any], all_tensors: bool) -> None:
    info = content["info"]
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    output.say(content["path"])
    output.say(f"  step {content['step']}, attempt {content['attempt']}, kind {info.get('kind', 'full')}")
    by = f" by run {content['run_id']}" if content["run_id"] else ""
    output.say(f"  saved {content['created']} ({output.age(content['created'])}){by}")
    output.say(f"  ranks: {content['world_size']}; {versions}")
    output.tree("info", {key: value for key, value in info.items() if key != "kind" and value is not None})
    output.say("\nfiles")
    rows = [(f"  {name}", output.size(file["bytes"]), file["xxh3"]) for name, file in content["files"].items()]
    output.table(("  name", "size", "xxh3"), rows, right=("size",))
    trainer = content["trainer"]
    rest = {key: value for key, value in trainer.items() if key not in _SECTIONS}
    output.tree("trainer", rest)
    for section in _SECTIONS:
        output.tree(section.replace("_", " "), trainer.get(section))
    output.tree("optimizers", content["optimizers"])
    for name, tensors in content["tensors"].items():
        if name.startswith("model") or all_tensors:
            _print_tensors(name, tensors, all_tensors)
        else:
            output.say(f"\n{name}: {_total(tensors)} (--tensors lists them)")


def _print_tensors(name: str, tensors: dict[str, Any], all_of_them: bool) -> None:
    output.say(f"\n{name}: {_total(tensors)}")
    shown = list(tensors.items())
    left = 0 if all_of_them else max(0, len(shown) - _FEW_TENSORS)
    rows = [
        (f"  {key}", "x".join(map(str, tensor["shape"])) or "scalar", tensor["dtype"], output.size(tensor["bytes"]))
        for key, tensor in shown[: len(shown) - left]
    ]
    output.table(("  name", "shape", "dtype", "size"), rows, right=("size",))
    if left:
        output.say(f"  ... and {left} more (--tensors lists them)")


def _total(tensors: dict[str, Any]) -> str:
    stored = [tensor for tensor in tensors.values() if "same_as" not in tensor]
    elements = sum(math.prod(tensor["shape"]) for tensor in stored)
    counts = f"{output.count(len(tensors), 'tensor')}, {output.count(elements, 'element')}"
    return f"{counts}, {output.size(sum(tensor['bytes'] for tensor in stored))}"
