"""Repeat the optimizer steps after a checkpoint, bit for bit.

Prints the loss, the gradient norm before clipping and the data set's indices of each: to look at a spike or a NaN
again, or to see whether a change of the code changes the numbers.

The program that saved the checkpoint is run again, in its folder and with its arguments, with as many processes; its
first `fit` goes on from the checkpoint, and ends after the last step. Nothing is logged or saved; what the program
itself writes before that is its own. What it prints goes to stderr.

Examples:
  instep replay instep_runs/version_0/checkpoints/step-00001200-1
  instep replay instep_runs/version_0 --steps 10 --json > steps.json
  instep replay runs/best --command "train_fixed.py --lr 0.1"
  instep replay runs/best -- train_fixed.py --lr 0.1
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from instep.cli import output
from instep.errors import CheckpointError, CorruptCheckpointError, UsageError

_FEW_SAMPLES = 8  # that the table names; --json has all


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("path", metavar="CKPT", help="a checkpoint, or a folder or run, of which the newest is taken")
    parser.add_argument("--steps", type=_count, default=3, help="optimizer steps (default: 3)")
    parser.add_argument("--command", metavar="TEXT", help="another program, with its arguments; or its words after --")
    parser.add_argument("--json", action="store_true", help="for programs; has all samples")
    parser.set_defaults(after=[])  # the same as --command, as words after --


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return count


def run(args: argparse.Namespace) -> int:
    """Run the program again and print its steps; 1 where it failed."""
    from instep.checkpoint import CheckpointStore  # late: loads torch
    from instep.cli.checkpoint.targets import find_one

    path = find_one(args.path)
    store = CheckpointStore(path.parent)
    problems = store.verify(path)
    if problems:
        raise CorruptCheckpointError(f"{path} does not verify: {'; '.join(problems)}", path=path)
    reader = store.read(path, verify=False)
    if not reader.has("trainer.json") or reader.manifest.info.get("kind") == "weights":
        raise CheckpointError(
            f"{path} cannot be replayed: it was not saved by a Trainer, or holds weights only", path=path
        )
    state = reader.state("trainer")
    command, folder, starts_ranks = _program(args, state.get("command"), path)
    with tempfile.TemporaryDirectory(prefix="instep-replay-") as out:
        order = json.dumps({"checkpoint": str(path), "steps": args.steps, "output": out})
        sys.stderr.write(f"instep: replay in {folder} with world size {state['world_size']}: {shlex.join(command)}\n")
        code = _execute(command, folder, order, 1 if starts_ranks else state["world_size"])
        steps = _collect(Path(out), state["world_size"], code)
    if args.json:
        output.say_json({"checkpoint": str(path), "step": reader.manifest.step, "steps": steps})
    else:
        _print(steps)
    if code:
        raise UsageError(f"the program ended with exit code {code} after these steps; what it said stands above")
    if len(steps) < args.steps:
        sys.stderr.write(f"instep: the run ended after {len(steps)} of {args.steps} steps, by its own limits\n")
    return 0


def _program(args: argparse.Namespace, recorded: dict[str, Any] | None, path: Path) -> tuple[list[str], str, bool]:
    """The arguments after the Python executable, the folder to run in, and whether the program starts its own ranks."""
    given = shlex.split(args.command) if args.command else args.after
    if given and Path(given[0]).name.startswith("python"):
        given = given[1:]
    if recorded is None and not given:
        raise CheckpointError(
            f"{path} does not say which program saved it (a notebook, a test, or python -c). Give it with --command.",
            path=path,
        )
    recorded = recorded or {}
    command, folder = given or recorded["arguments"], recorded.get("folder") or os.getcwd()
    if not Path(folder).is_dir():
        sys.stderr.write(f"instep: {folder}, where the program ran, is gone: it is run in this folder\n")
        folder = os.getcwd()
    pairs = zip(("", *command), command, strict=False)  # "-X" stands apart from its value
    script = next((word for before, word in pairs if before != "-X" and not word.startswith("-")), "")
    if "-m" not in command and not (Path(folder) / script).exists():
        raise CheckpointError(f"the program {script} of {path} is gone. Give its new place with --command.", path=path)
    return list(command), folder, bool(recorded.get("starts_ranks", True))


def _execute(command: list[str], folder: str, order: str, ranks: int) -> int:
    from instep.trainer.replay import VARIABLE  # late: loads torch

    if ranks == 1:
        arguments = [sys.executable, *command]
        return subprocess.run(
            arguments, cwd=folder, env={**os.environ, VARIABLE: order}, stdout=2, check=False
        ).returncode
    from instep.launch.engine import LaunchSpec, run  # late, as above

    with _as_in(folder):
        return run(LaunchSpec(ranks, tuple(command), env={VARIABLE: order}))


@contextmanager
def _as_in(folder: str) -> Iterator[None]:
    """The ranks inherit this process's folder and output."""
    before, stdout = os.getcwd(), os.dup(1)
    sys.stdout.flush()
    os.chdir(folder)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.chdir(before)


def _collect(folder: Path, ranks: int, code: int) -> list[dict[str, Any]]:
    files = sorted(folder.glob("rank-*.jsonl"))
    if not files:
        how = f"with exit code {code}, before" if code else "without"
        raise UsageError(f"the program ended {how} a fit, so nothing was repeated; what it said stands above")
    if len(files) != ranks:
        raise UsageError(
            f"the checkpoint is of {ranks} processes, and the program ran with {len(files)}: its numbers are others"
        )
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    steps: dict[int, dict[str, Any]] = {}
    for line in sorted(lines, key=lambda line: (line["step"], line["rank"])):
        step = steps.setdefault(line["step"], {"step": line["step"], "epoch": line["epoch"], "ranks": []})
        step["ranks"].append({key: line[key] for key in ("rank", "grad_norms", "batches", "error") if key in line})
    return list(steps.values())


def _print(steps: list[dict[str, Any]]) -> None:
    rows = []
    for step in steps:
        for rank in step["ranks"]:
            last = len(rank["batches"]) - 1
            for number, batch in enumerate(rank["batches"]):
                norms = ", ".join(map(_exact, rank["grad_norms"])) if number == last else ""
                samples = _few(batch["samples"])
                rows.append((step["step"], rank["rank"], batch["batch"], _exact(batch["loss"]), norms, samples))
    headers = ("step", "rank", "batch", "loss", "gradient norm", "samples")
    output.table(headers, rows, right=("step", "rank", "batch"))


def _few(samples: list[Any] | None) -> str:
    if samples is None:
        return "unknown"
    more = f" ... ({len(samples)})" if len(samples) > _FEW_SAMPLES else ""
    return json.dumps(samples[:_FEW_SAMPLES]) + more


def _exact(value: float | None) -> str:
    if value is None:
        return "unknown"
    return repr(value) if math.isfinite(value) else str(value)
