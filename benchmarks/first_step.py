"""Seconds from the command to the first training step of two processes, by launcher and framework.

    python benchmarks/first_step.py             # about 10 minutes
    python benchmarks/first_step.py --quick     # 1 round, and none before

Each way starts `contenders/first_step_run.py` as two processes on the CPU. The clock runs from just before the command
is started to the end of the first optimizer step on the slower process; `command` is until that process's first line,
i.e. what the launcher costs, `imports` until its framework is loaded, `set up` until the step is done; `all` is until
the command has ended, after 3 steps. Rounds are interleaved, each in another order; a way's time over torchrun's with
the loop by hand is taken within the round, and medians are reported. One round before warms the disk's cache and writes
bytecode.

`accelerate launch --cpu --num_processes 2` starts one process; with `--multi_gpu`, and `Accelerator(cpu=True)` in the
program, it starts two.

torch's own processes abort at their end now and then, when all was done ("terminate called without an active
exception"). A start of another package's that fails is repeated, twice at the most, and counted as `failed_starts`; one
of instep's ends the benchmark, but for the loop by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import harness

PROGRAM = str(Path(__file__).parent / "contenders" / "first_step_run.py")
BASE = "torchrun, by hand"
PHASES = ("command", "imports", "set up")


class Way(NamedTuple):
    """How two processes are started: the launcher's words, the framework, and the package that is needed."""

    launcher: tuple[str, ...]
    framework: str
    package: str


def _program(name: str, *words: str) -> tuple[str, ...]:
    """A command beside this Python."""
    return (str(Path(sys.executable).with_name(name)), *words)


TORCHRUN = _program("torchrun", "--nproc-per-node=2", "--master-port={port}")
OURS = _program("instep", "launch", "--devices", "2")
ACCELERATE = _program("accelerate", "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1")
ACCELERATE += ("--mixed_precision=no", "--dynamo_backend=no", "--main_process_port={port}")
WAYS = {
    BASE: Way(TORCHRUN, "handwritten", "torch"),
    "instep launch, by hand": Way(OURS, "handwritten", "instep"),
    "accelerate launch, by hand": Way(ACCELERATE, "handwritten", "accelerate"),
    "torchrun, instep": Way(TORCHRUN, "instep", "instep"),
    "instep launch, instep": Way(OURS, "instep", "instep"),
    "instep's own start": Way((sys.executable,), "instep", "instep"),
    "accelerate launch, Accelerate": Way(ACCELERATE, "accelerate", "accelerate"),
    "torchrun, Lightning": Way(TORCHRUN, "lightning", "lightning"),
    "Lightning's own start": Way((sys.executable,), "lightning", "lightning"),
}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(way: Way) -> dict[str, float]:
    """Start it once; seconds by phase, `first step` and `all`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        command = [*(word.format(port=_free_port()) for word in way.launcher), PROGRAM, way.framework, folder]
        started = time.monotonic()
        with open(Path(folder, "output"), "w+") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, cwd=folder, start_new_session=True
            )
            try:
                code = process.wait(120)
            finally:
                ended = time.monotonic()
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # nothing is left of it
                process.wait()
            output.seek(0)
            said = output.read()
        ranks = [json.loads(path.read_text()) for path in Path(folder).glob("rank-*.json")]
    if code or [rank["world_size"] for rank in ranks] != [2, 2]:
        raise RuntimeError(f"{' '.join(command)} ended with status {code} and {len(ranks)} ranks; it said\n{said}")
    last = max(ranks, key=lambda rank: rank["stepped"])
    return {
        "first step": last["stepped"] - started,
        "command": last["began"] - started,
        "imports": last["imported"] - last["began"],
        "set up": last["stepped"] - last["imported"],
        "all": ended - started,
    }


def measure_again(way: Way) -> tuple[dict[str, float], int]:
    """Measure; with another package's way up to three times. Also how many starts failed."""
    failed = 0
    while True:
        try:
            return measure(way), failed
        except RuntimeError as error:
            failed += 1
            if way.framework == "instep" or failed == 3:  # the loop by hand is torch's own, whoever starts it
                raise
            print(f"repeated, since {error}", file=sys.stderr)


def main() -> None:
    """Run all rounds, print the table, write the JSON."""
    args = parse_arguments()
    rounds = 1 if args.quick else args.rounds
    asked = [BASE, *(name for name in args.ways if name != BASE)]
    ways = {name: WAYS[name] for name in asked if find_spec(WAYS[name].package)}
    for name in set(asked) - ways.keys():
        print(f"{name}: left out, {WAYS[name].package!r} is not installed (pip install 'instep[bench]')")
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    first = 1 if args.quick else 0  # round 0 warms up
    failed_starts = dict.fromkeys(ways, 0)
    progress = harness.Progress((rounds + 1 - first) * len(ways))
    for round_ in range(first, rounds + 1):
        order = list(ways)
        random.Random(round_).shuffle(order)
        for name in order:
            took, failed = measure_again(ways[name])
            failed_starts[name] += failed
            progress.step(f"{name}: {took['first step']:.2f} s")
            if round_:
                seen[name].append(took)
    results = {name: summary(seen[name], seen[BASE]) for name in ways}
    rows = [
        (
            name,
            f"{r['first step']['median']:.2f}",
            f"{r['over_base_s']['median']:+.2f} ({r['over_base_s']['min']:+.2f} .. {r['over_base_s']['max']:+.2f})",
            *(f"{r[phase]['median']:.2f}" for phase in (*PHASES, "all")),
        )
        for name, r in results.items()
    ]
    harness.print_table(("way", "first step s", f"over {BASE} s", *PHASES, "all"), rows)
    name = "launch_quick" if args.quick else "launch"
    counts = {"rounds": rounds, "processes": 2, "failed_starts": failed_starts}
    harness.write_results(args.out, name, {**counts, "base": BASE, "results": results})


def summary(own: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, Any]:
    """Medians and spreads of every phase, and of the difference to the base within a round."""
    over = [mine["first step"] - other["first step"] for mine, other in zip(own, base, strict=True)]
    return {"over_base_s": harness.spread(over)} | {
        phase: harness.spread([took[phase] for took in own]) for phase in own[0]
    }


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Seconds from the command to the first step of two processes.")
    parser.add_argument("--rounds", type=int, default=9, help="(default: 9)")
    parser.add_argument("--quick", action="store_true", help="1 round, and none before")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help="(default: all)")
    harness.add_out(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
