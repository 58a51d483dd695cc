"""Seconds that importing a trainer costs over `import torch`.

    python benchmarks/import_time.py           # about a minute

Each statement runs in a fresh interpreter that times it from inside. Rounds are paired: each runs `import torch` and
every other statement once, and a statement's cost is its time minus that of `import torch` in the same round; the
median over 7 rounds is reported. `in one process` is the time of the statement in an interpreter that has imported
torch already, which shuts out the noise of two separate imports of torch. One round before warms the disk's cache and
writes bytecode, which an installed package has from the start: PYTHONDONTWRITEBYTECODE, under which a source tree is
compiled at each import, is taken out. It also asserts that `import instep` alone does not load torch.

Each round also runs `--help` of those that have a command line, timed from outside with the start of Python.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Any

import contenders
import harness

TORCH = "import torch"
STATEMENTS = {
    "instep": "from instep import Trainer, TrainModule",
    "lightning": "from lightning.pytorch import Trainer, LightningModule",
    "accelerate": "from accelerate import Accelerator",
    "ignite": "from ignite.engine import Engine, Events",
}
HELP = {"instep": "instep", "torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}
LIMIT_S = 0.1
HELP_LIMIT_S = 0.3
TIMED = """
import sys, time
{first}
start = time.perf_counter()
{statement}
print(time.perf_counter() - start)
"""


def seconds(statement: str, first: str = "") -> float:
    """Time a statement in a fresh interpreter, after another one."""
    return float(_python(TIMED.format(first=first, statement=statement)))


def help_seconds(module: str) -> float:
    """Time `python -m module --help`."""
    start = time.perf_counter()
    _run("-m", module, "--help")
    return time.perf_counter() - start


def _python(code: str) -> str:
    return _run("-c", code)


def _run(*words: str) -> str:
    command = [sys.executable, "-W", "ignore", *words]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=environment).stdout


def main() -> int:
    """Run all rounds, print the table, write the JSON; status 1 if instep costs more than its limits."""
    args = parse_arguments()
    loaded = _python("import sys, instep; print([name for name in ('torch', 'numpy') if name in sys.modules])")
    assert loaded.strip() == "[]", f"`import instep` loads {loaded}"
    print("`import instep` alone loads neither torch nor numpy")
    names = contenders.installed(args.contenders)
    torch_s: list[float] = []
    over_s: dict[str, list[float]] = {name: [] for name in names}
    added_s: dict[str, list[float]] = {name: [] for name in names}
    helps = [name for name in HELP if name in names or name == "torchrun"]
    help_s: dict[str, list[float]] = {name: [] for name in helps}
    progress = harness.Progress(args.rounds + 1)
    for round_ in range(args.rounds + 1):
        base = seconds(TORCH)
        own = {name: seconds(STATEMENTS[name]) for name in names}
        added = {name: seconds(STATEMENTS[name], first=TORCH) for name in names}
        shown = {name: help_seconds(HELP[name]) for name in helps}
        progress.step(f"torch {base:.2f} s, " + ", ".join(f"{name} {own[name] - base:+.3f} s" for name in names))
        if round_:
            torch_s.append(base)
            for name in names:
                over_s[name].append(own[name] - base)
                added_s[name].append(added[name])
            for name in helps:
                help_s[name].append(shown[name])
    results: dict[str, Any] = {
        name: {
            "statement": STATEMENTS[name],
            "over_torch_s": harness.spread(over_s[name], 4),
            "in_one_process_s": harness.spread(added_s[name], 4),
        }
        for name in names
    }
    rows = [
        (
            f"`{STATEMENTS[name]}`",
            f"{r['over_torch_s']['median']:+.3f}",
            f"{r['over_torch_s']['min']:+.3f} .. {r['over_torch_s']['max']:+.3f}",
            f"{r['in_one_process_s']['median']:.3f}",
        )
        for name, r in results.items()
    ]
    print(f"`import torch`: {harness.spread(torch_s)['median']:.2f} s")
    harness.print_table(("statement", "s over import torch", "min .. max", "in one process s"), rows)
    helped = {name: harness.spread(help_s[name], 4) for name in helps}
    rows = [(name, f"{r['median']:.3f}", f"{r['min']:.3f} .. {r['max']:.3f}") for name, r in helped.items()]
    harness.print_table(("--help of", "s", "min .. max"), rows)
    setting = {"rounds": args.rounds, "limit_s": LIMIT_S, "import_torch_s": harness.spread(torch_s, 4)}
    more = {"import_instep_loads_torch": False, "results": results, "help_limit_s": HELP_LIMIT_S, "help_s": helped}
    harness.write_results(args.out, "import_time", {**setting, **more})
    over = [r for name, r in results.items() if name == "instep" and r["over_torch_s"]["median"] > LIMIT_S]
    return 1 if over or ("instep" in helped and helped["instep"]["median"] > HELP_LIMIT_S) else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Seconds that importing a trainer costs over import torch.")
    parser.add_argument("--rounds", type=int, default=7, help="(default: 7)")
    parser.add_argument("--contenders", nargs="+", choices=STATEMENTS, default=list(STATEMENTS))
    harness.add_out(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
