"""Compare two checkpoints.

Prints how the manifests differ, which files and values only one checkpoint has, and the largest absolute difference of
each tensor that is not equal bit for bit. Values that only show when, where and by which run a checkpoint was saved do
not count as different: the run's name, folder, command, log and clock. Of a checkpoint's path only the name is
compared.

Examples:
  instep checkpoint diff runs/a/step-00000100-1 runs/b/step-00000100-1
  instep checkpoint diff step-00000100-1 step-00000200-1 --weights        the model alone
  instep checkpoint diff runs/a runs/b --json && echo same
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from instep.cli import output

if TYPE_CHECKING:
    from torch import Tensor

    from instep.checkpoint import Reader

_MANY = 20  # maximum number of printed lines of one kind, unless --all is given
_FACTS = ("step", "attempt", "run_id", "world_size", "created", "versions", "info")
_ARGUMENTS = re.compile(r"\([^()]{20,}\)")  # matches long arguments, as in the name of a callback's saved state
_WHO_SAVED_IT = ("run_id", "run_folder", "command", "instep_version", "loggers")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.add_argument("a", metavar="A", help="a checkpoint, or a folder or run that has one")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument("--weights", action="store_true", help="compare model*.safetensors only")
    parser.add_argument("--all", action="store_true", help=f"print every difference, not {_MANY} of a kind")
    parser.add_argument("--json", action="store_true", help="for programs; has every difference")


def run(args: argparse.Namespace) -> int:
    """Print the differences; return 1 if there are any, else 0."""
    from instep.checkpoint import CheckpointStore  # imported late, since it loads torch
    from instep.checkpoint.edge import reading
    from instep.cli.checkpoint.targets import find_one

    paths = [find_one(args.a), find_one(args.b)]
    a, b = (CheckpointStore(path.parent).read(path) for path in paths)
    with reading(paths[0], f"cannot be compared with {paths[1]}"):
        result = _compare(a, b, args.weights)
    if args.json:
        output.say_json(result)
    else:
        _print(result, args.all)
    return int(not result["same"])


def _compare(a: Reader, b: Reader, weights: bool) -> dict[str, Any]:
    from instep.checkpoint.reader import whole_name  # imported late, since it loads torch

    names_a, names_b = (
        {
            name
            for name in map(whole_name, reader.manifest.files)
            if not weights or re.match(r"model.*safetensors", name)
        }
        for reader in (a, b)
    )
    facts = {name: (getattr(a.manifest, name), getattr(b.manifest, name)) for name in _FACTS}
    values: list[dict[str, Any]] = []
    ignored: list[dict[str, Any]] = []
    tensors: list[dict[str, Any]] = []
    equal = 0
    for name in sorted(names_a & names_b, key=lambda name: (name.startswith("rank-"), name)):
        if name.endswith(".safetensors"):
            found = list(_tensors(name, a, b))
            equal += sum(entry["difference"] is None for entry in found)
            tensors += [entry for entry in found if entry["difference"] is not None]
        elif name.endswith(".json"):
            for at, one, other in _leaves(_json(name, a), _json(name, b), ()):
                entry = {"file": name, "at": ".".join(at), "a": one, "b": other}
                (ignored if name == "trainer.json" and _ignored(at, one, other) else values).append(entry)
        elif _records(name, a) != _records(name, b):
            values.append({"file": name, "at": "", "a": "other content", "b": "other content"})
    result: dict[str, Any] = {
        "a": str(a.path),
        "b": str(b.path),
        "facts": {name: {"a": one, "b": other} for name, (one, other) in facts.items() if one != other},
        "only_a": sorted(names_a - names_b),
        "only_b": sorted(names_b - names_a),
        "values": values,
        "ignored": ignored,
        "tensors": tensors,
        "equal_tensors": equal,
    }
    return {"same": not (result["only_a"] or result["only_b"] or tensors or values), **result}


def _records(name: str, reader: Reader) -> list[Any]:
    return [reader.manifest.files[file] for file in reader.files_of(name)]


def _json(name: str, reader: Reader) -> Any:
    from instep.checkpoint.lazy import join_trees  # imported late, since it loads torch

    return join_trees(map(reader.json, reader.files_of(name)))


def _tensors(name: str, a: Reader, b: Reader) -> Iterator[dict[str, Any]]:
    left, right = a.joined(name), b.joined(name)
    for key in sorted(left.keys() | right.keys()):
        entry: dict[str, Any] = {"file": name, "name": key}
        if key not in left or key not in right:
            yield {**entry, "difference": f"only in {'a' if key in left else 'b'}"}
        else:
            yield {**entry, **_difference(left[key].read(), right[key].read())}


def _difference(a: Tensor, b: Tensor) -> dict[str, Any]:
    import torch  # imported late, since it is slow to import

    if a.shape != b.shape or a.dtype != b.dtype:
        kinds = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (a, b)]
        return {"difference": f"{kinds[0]} and {kinds[1]}"}
    bits_a, bits_b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    if torch.equal(bits_a, bits_b):
        return {"difference": None}
    wide = torch.complex128 if a.is_complex() else torch.float64
    try:
        x, y = a.to(wide), b.to(wide)
    except RuntimeError:  # torch cannot compute with this dtype
        return {"difference": "other bits"}
    other = (x != y) & ~(x.isnan() & y.isnan())
    largest = float(torch.where(other, (x - y).abs(), 0).max())
    count = int(other.sum())
    return {"difference": f"max abs {largest:.6g}, {count} of {a.numel()} elements", "max_abs": largest, "count": count}


def _ignored(at: tuple[str, ...], a: Any, b: Any) -> bool:
    """Return True if a difference in trainer.json only shows which run saved the checkpoint, where and how fast."""
    return at[0] in _WHO_SAVED_IT or (at[0] == "callbacks" and ("time_elapsed" in at or _same_name(a, b)))


def _same_name(a: Any, b: Any) -> bool:
    """Return True if two values are paths of checkpoints with the same name, except for the attempt number."""
    if not all(isinstance(path, str) and "/" in path for path in (a, b)):
        return False
    name, other = (re.sub(r"-\d+$", "", path.rpartition("/")[2]) for path in (a, b))
    return name == other


def _leaves(a: Any, b: Any, at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from _leaves(a.get(key, "(nothing)"), b.get(key, "(nothing)"), (*at, key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _leaves(one, other, (*at, str(index)))
    elif a != b or type(a) is not type(b):
        yield at or ("",), a, b


def _print(result: dict[str, Any], everything: bool) -> None:
    output.say(f"a  {result['a']}\nb  {result['b']}")
    for name, fact in result["facts"].items():
        output.say(f"  {name}: {_short(fact['a'])} | {_short(fact['b'])}")
    for side in ("a", "b"):
        for name in result[f"only_{side}"]:
            output.say(f"only in {side}: {name}")
    values, ignored = (
        [
            f"{value['file']} {_ARGUMENTS.sub('(...)', value['at'])}: {_short(value['a'])} | {_short(value['b'])}"
            for value in result[kind]
        ]
        for kind in ("values", "ignored")
    )
    tensors = [f"{tensor['file']} {tensor['name']}: {tensor['difference']}" for tensor in result["tensors"]]
    for what, lines in (("value", values), ("tensor", tensors)):
        if lines:
            output.say(f"\n{output.count(len(lines), what)} differ{'s' if len(lines) == 1 else ''}")
        for line in lines if everything else lines[:_MANY]:
            output.say(f"  {line}")
        if len(lines) > _MANY and not everything:
            output.say(f"  ... and {len(lines) - _MANY} more (--all prints them)")
    if ignored and everything:
        output.say("\nof the run's name, folders, command, log and clock, which do not count")
        for line in ignored:
            output.say(f"  {line}")
    equal: int = result["equal_tensors"]
    same = f"{output.count(equal, 'tensor')} {'is' if equal == 1 else 'are'} equal bit for bit"
    output.say(f"\n{same}, {len(tensors)} {'is' if len(tensors) == 1 else 'are'} not")
    output.say("the checkpoints are the same" if result["same"] else "the checkpoints differ")


def _short(value: Any) -> str:
    text = str(output.plain(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
