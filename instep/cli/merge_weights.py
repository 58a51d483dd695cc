"""Write the weights of any checkpoint as plain safetensors, also if several ranks wrote it in parts.

SRC is a checkpoint of instep, a folder that FSDP (torch.distributed.checkpoint) or DeepSpeed wrote (also through
Accelerate or Lightning), a folder or index of safetensors files, or a file of torch.save. OUT is a file if it ends with
.safetensors, else a folder; with --max-shard-size the folder has several files and an index. No code in SRC runs, and
nothing is overwritten. From checkpoints and safetensors, one tensor at a time is loaded into memory.

Examples:
  instep merge-weights runs/best model.safetensors
  instep merge-weights runs/best folder --max-shard-size 5GB    split like large models on the Hugging Face hub
  instep merge-weights state/pytorch_model_fsdp_0 model.safetensors
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from instep.cli import output
from instep.errors import SettingError
from instep.utils.checks import parse_size
from instep.utils.paths import local_path

_INDICES = ("model.safetensors.index.json", "model.safetensors")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.add_argument("src", metavar="SRC", help="a checkpoint")
    parser.add_argument("out", metavar="OUT", help="a .safetensors file or a folder; it must not exist")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help="bytes of each file in a folder, such as 5GB (default: one file)"
    )
    parser.add_argument(
        "--weights", choices=("live", "averaged"), help="of a run with WeightAveraging; default: the plain weights"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Merge the weights, and print which files were written."""
    from instep.checkpoint import merge, merge_in_parts  # imported late, since it loads torch

    out = local_path(args.out)
    is_file = out.suffix == ".safetensors"
    if not is_file and re.match(r"\.[A-Za-z]", out.suffix) and not args.out.endswith("/") and not out.is_dir():
        raise SettingError(
            f"{out} looks like a file of another kind: give a name that ends with .safetensors, or a folder, with a / "
            "at its end where its name has a dot",
            field="out",
            got=args.out,
        )
    if is_file and args.max_shard_size is not None:
        raise SettingError(
            f"--max-shard-size makes several files, and {out} is one: give a folder as OUT", field="max_shard_size"
        )
    source = _source(args.src)
    if is_file:
        merge(source, out, args.weights)
    else:
        max_bytes = parse_size("max_shard_size", args.max_shard_size or "1000000TB")
        merge_in_parts(source, out, max_bytes, args.weights)
    files = [out] if is_file else sorted(out.iterdir())
    result = {
        "source": str(source),
        "written": str(out),
        "files": [path.name for path in files],
        "bytes": sum(path.stat().st_size for path in files),
    }
    if args.json:
        output.say_json(result)
    else:
        output.say(f"{source} -> {out} ({output.count(len(files), 'file')}, {output.size(result['bytes'])})")
    return 0


def _source(src: str) -> str | Path:
    from instep.checkpoint.foreign import find_foreign_folder  # imported late, since it loads torch
    from instep.checkpoint.manifest import MANIFEST
    from instep.cli.checkpoint.targets import find_one
    from instep.utils.paths import to_path

    path = to_path(src)
    if path.is_file() or (path.is_dir() and find_foreign_folder(path)):
        return path
    if not (path / MANIFEST).exists():
        plain = next((path / name for name in _INDICES if (path / name).is_file()), None)
        if plain is not None:
            return plain
    return find_one(src)
