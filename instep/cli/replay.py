"""Repeat the optimizer steps after a checkpoint, bit for bit.

For each step it prints the loss, the gradient norm before clipping and the indices of the samples. Use it to look at a
spike or a NaN again, or to see whether a change of the code changes the numbers.

The program that saved the checkpoint runs again, in its folder, with its arguments and with as many processes. Its
first `fit` goes on from the checkpoint, and ends after the last of the steps. The Trainer logs and saves nothing; what
the program itself writes before `fit` is written. What the program prints goes to stderr.

If you did not save the checkpoint yourself, the program that it names is shown, and runs only if you agree.

Examples:
  instep replay instep_runs/version_0/checkpoints/step-00001200-1
  instep replay instep_runs/version_0 --steps 10 --json > steps.json
  instep replay runs/best --command "train_fixed.py --lr 0.1"
  instep replay runs/best -- train_fixed.py --lr 0.1
"""

from __future__ import annotations

import argparse
import json
import os
import re
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
from instep.utils.private_files import is_own
from instep.utils.redact import HIDDEN

_FEW_SAMPLES = 8  # maximum number of samples that the table names; --json has all samples
# Options of Python that load no code. With other values, -W may import a class and -X may load code.
_FLAGS = re.compile(r"-(?:[bBdEIOPqsSuv]+)")
_VALUES = re.compile(
    r"-W(?:default|error|always|module|once|ignore)(?:::[A-Z]\w*)?"
    r"|-X(?:dev|faulthandler|importtime|no_debug_ranges|tracemalloc(?:=\d+)?|utf8(?:=[01])?|int_max_str_digits=\d+)"
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.add_argument("path", metavar="CKPT", help="a checkpoint, or a folder or run, of which the newest is taken")
    parser.add_argument("--steps", type=_count, default=3, help="optimizer steps (default: 3)")
    parser.add_argument("--command", metavar="TEXT", help="another program, with its arguments; or its words after --")
    parser.add_argument("--json", action="store_true", help="for programs; has all samples")
    parser.add_argument("--yes", action="store_true", help="run the program of a checkpoint that you did not save")
    parser.set_defaults(after=[])  # the words after `--`, which mean the same as the text of --command


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return count


def run(args: argparse.Namespace) -> int:
    """Run the program again, and print its steps; raise UsageError if the program fails."""
    from instep.checkpoint import CheckpointStore  # imported late, since it loads torch
    from instep.checkpoint.edge import reading
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
    with reading(path / "trainer.json", "is not the state of a run"):
        state = reader.state("trainer")
        ranks, recorded = state["world_size"], state.get("command")
        if type(ranks) is not int or ranks < 1:
            raise ValueError(f"its world size is {ranks!r}")
    command, folder, starts_ranks = _program(args, recorded, path, ranks)
    with tempfile.TemporaryDirectory(prefix="instep-replay-") as out:
        order = json.dumps({"checkpoint": str(path), "steps": args.steps, "output": out})
        output.warn(f"replay in {folder} with world size {ranks}: {shlex.join(command)}")
        code = _execute(command, folder, order, 1 if starts_ranks else ranks)
        steps = _collect(Path(out), ranks, code)
    if args.json:
        output.say_json({"checkpoint": str(path), "step": reader.manifest.step, "steps": steps})
    else:
        _print(steps)
    if code:
        raise UsageError(f"the program ended with exit code {code} after these steps; what it said stands above")
    if len(steps) < args.steps:
        more = "" if steps else f"; `instep checkpoint ls {path.parent}` lists earlier checkpoints"
        output.warn(f"the run ended after {len(steps)} of {args.steps} steps, by its own limits{more}")
    return 0


def _program(args: argparse.Namespace, recorded: Any, path: Path, ranks: int) -> tuple[list[str], str, bool]:
    """Return the words after `python`, the folder to run in, and whether the program starts its own ranks."""
    given = shlex.split(args.command) if args.command else args.after
    if given and re.fullmatch(r"python[\d.]*(\.exe)?", Path(given[0]).name):
        given = given[1:]
    if recorded is None and not given:
        raise CheckpointError(
            f"{path} does not say which program saved it (a notebook, a test, or python -c). Give it with --command.",
            path=path,
        )
    how, own = _recorded(recorded, path)
    command, folder = given or how["arguments"], how.get("folder") or os.getcwd()
    if given and not own:
        folder = os.getcwd()  # Python searches this folder for the modules of the user's own command
    if not Path(folder).is_dir():
        output.warn(f"{folder}, where the program ran, is gone: it is run in this folder")
        folder = os.getcwd()
    script = _script(command, path, own or bool(given))
    if script and not (Path(folder) / script).exists():
        raise CheckpointError(f"the program {script} of {path} is gone. Give its new place with --command.", path=path)
    if not given:
        if how.get("left_out"):
            raise UsageError(
                f"{path} was saved without what looked like a secret: {', '.join(how['left_out'])}. Give the whole "
                f"command: instep replay {shlex.quote(str(path))} --command {shlex.quote(shlex.join(command))}, with "
                f"the value in place of {HIDDEN}."
            )
        _check_place(command, script, folder, path, own)
        if not own and not args.yes:
            _ask(command, folder, path, ranks)
    return list(command), folder, bool(how.get("starts_ranks", True))


def _recorded(recorded: Any, path: Path) -> tuple[dict[str, Any], bool]:
    """Return the command that a checkpoint has recorded, and whether this user saved the checkpoint."""
    if recorded is None:
        return {}, False
    how = {key: value for key, value in recorded.items() if key != "mark"} if isinstance(recorded, dict) else {}
    words = [how.get("arguments"), how.get("left_out", [])]
    texts = [text for part in words if isinstance(part, list) for text in part]
    sound = all(isinstance(part, list) for part in words) and how.get("arguments")
    if not sound or not all(isinstance(text, str) and "\0" not in text for text in [*texts, how.get("folder") or ""]):
        raise CorruptCheckpointError(f"{path} has no sound command. Give the program with --command.", path=path)
    return how, is_own(how, recorded.get("mark"))


def _script(command: list[str], path: Path, own: bool) -> str:
    """Return the script that Python runs; "" for `-m module`.

    Raises:
        CheckpointError: the command runs neither a script nor a module.
    """
    words = list(command)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            return word
        if word == "-m" and words and (own or words[0].partition(".")[0] not in sys.stdlib_module_names):
            return ""
        value = word[2:] or (words.pop(0) if word in ("-W", "-X") and words else "")
        known = _FLAGS.fullmatch(word) or _VALUES.fullmatch(word[:2] + value)
        if not known and not (own and word[:2] in ("-W", "-X")):
            break
    raise CheckpointError(
        f"{path} is replayed by a script or a module with its arguments, and python {shlex.join(command)} is none. "
        "Give the program with --command.",
        path=path,
    )


def _check_place(command: list[str], script: str, folder: str, path: Path, own: bool) -> None:
    """Raise if a program lies in the checkpoint that names it, or in the run folder of another user's checkpoint."""
    places = [path] if own else [path.parent.parent if path.parent.name == "checkpoints" else path.parent]
    start = Path(folder) / script if script else Path(folder)
    inside = [place for place in places if start.resolve().is_relative_to(place.resolve())]
    if inside:
        raise CheckpointError(
            f"the command of {path}, python {shlex.join(command)}, runs what lies in {inside[0]}: what came with a "
            "checkpoint is not run. Read it, and if you trust it, give it with --command.",
            path=path,
        )


def _ask(command: list[str], folder: str, path: Path, ranks: int) -> None:
    """Ask the user whether to run a program that another user's checkpoint names."""
    what = f"{path} was not saved by you, or not here. It names this program, to be run with your rights:\n"
    what += f"  in {folder!r}, {ranks} processes: python {shlex.join(command)!r}"
    otherwise = "Look at it, then run it with --yes, or give another one with --command."
    output.confirm(what, "Run it?", otherwise, "nothing was run")


def _execute(command: list[str], folder: str, order: str, ranks: int) -> int:
    from instep.trainer.guests import REPLAY  # imported late, since it loads torch

    if ranks == 1:
        environment = {**os.environ, REPLAY: order}
        return subprocess.run([sys.executable, *command], cwd=folder, env=environment, stdout=2, check=False).returncode
    from instep.launch.engine import LaunchSpec, run  # imported late, since it loads torch

    with _as_in(folder):
        return run(LaunchSpec(ranks, tuple(command), env={REPLAY: order}))


@contextmanager
def _as_in(folder: str) -> Iterator[None]:
    """Work in a folder and send stdout to stderr in the `with` block, also in the ranks that are started there."""
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
    return "unknown" if value is None else repr(value)
