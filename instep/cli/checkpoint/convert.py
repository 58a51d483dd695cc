"""Convert a checkpoint to and from instep, safetensors, Lightning and Accelerate.

The format of SRC is detected. The format of DST follows from its ending (.safetensors, .ckpt), or from --to. In
instep's format, the folder DST-<attempt> is written: a checkpoint of weights, for load_from_checkpoint. What cannot be
converted is listed. Pickles are read only if no code has to run for that, and nothing is ever overwritten.

Examples:
  instep checkpoint convert runs/best weights.safetensors       for anyone with safetensors
  instep checkpoint convert runs/best model.ckpt                a Lightning checkpoint, with optimizers
  instep checkpoint convert runs/best folder --to accelerate
  instep checkpoint convert runs/best live.safetensors --weights live    the trained weights, not their average
  instep checkpoint convert foreign.ckpt runs/imported        from Lightning, Accelerate or safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from instep.cli import output
from instep.errors import UsageError
from instep.utils.paths import to_path

_FORMATS = ("instep", "safetensors", "lightning", "accelerate")
_ENDINGS = {".safetensors": "safetensors", ".ckpt": "lightning"}
_TORCH_FILES = (".ckpt", ".pt", ".pth", ".bin")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.add_argument("src", metavar="SRC", help="an instep checkpoint, a file, or an Accelerate folder")
    parser.add_argument("dst", metavar="DST", help="what is written; neither it nor DST-<attempt> may exist")
    parser.add_argument("--to", choices=_FORMATS, help="the format of DST; default: by its ending")
    parser.add_argument(
        "--weights", choices=("live", "averaged"), help="of a run with WeightAveraging; default: the plain weights"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Convert the checkpoint, and print what was left out."""
    from instep.checkpoint.edge import reading  # imported late, since it loads torch
    from instep.cli.checkpoint import contents, foreign

    kind, source = _source(args.src)
    target = args.to or _ENDINGS.get(Path(args.dst).suffix) or ("instep" if kind != "instep" else None)
    if target is None:
        raise UsageError(
            f"{args.dst}: into what? End it with {' or '.join(_ENDINGS)}, or add --to {{{','.join(_FORMATS)}}}"
        )
    if args.weights is not None and kind != "instep":
        raise UsageError(f"--weights chooses between two sets of weights, and {args.src} has one: leave it out")
    readers: dict[str, Any] = {
        "instep": contents.read_instep,
        "safetensors": contents.read_safetensors,
        "lightning": foreign.read_lightning,
        "accelerate": foreign.read_accelerate,
    }
    writers: dict[str, Any] = {
        "instep": contents.write_instep,
        "safetensors": contents.write_safetensors,
        "lightning": foreign.write_lightning,
        "accelerate": foreign.write_accelerate,
    }
    with reading(source, f"cannot be read as one of {kind}"):
        what = readers[kind](source) if args.weights is None else contents.read_instep(source, args.weights)
    written = writers[target](what, to_path(args.dst).absolute())
    result = {
        "source": str(source),
        "from": kind,
        "written": str(written),
        "to": target,
        "tensors": len(what.weights),
        "left_out": what.left_out,
    }
    if args.json:
        output.say_json(result)
        return 0
    output.say(f"{kind} -> {target}: {written} ({output.count(len(what.weights), 'tensor')})")
    if what.left_out:
        output.say(f"left out: {', '.join(what.left_out)}")
    return 0


def _source(src: str) -> tuple[str, Path]:
    from instep.checkpoint.manifest import MANIFEST  # imported late, since it loads torch
    from instep.cli.checkpoint.foreign import is_accelerate
    from instep.cli.checkpoint.targets import find_one

    path = to_path(src).absolute()
    if path.is_file():
        if path.suffix == ".safetensors":
            return "safetensors", path
        if path.suffix in _TORCH_FILES:
            return "lightning", path
        raise UsageError(f"{src}: what is it? Known endings are .safetensors, {', '.join(_TORCH_FILES)}")
    if path.is_dir() and is_accelerate(path) and not (path / MANIFEST).exists():
        return "accelerate", path
    return "instep", find_one(src)
