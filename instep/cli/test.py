"""Check the set-up that `instep launch` would use: collectives, signals between ranks, a tiny run, its checkpoint.

The training must have the losses of one process, and resume from its checkpoint bit for bit. Times are those of the
slowest rank. Under srun, torchrun or mpirun the ranks of that job run the checks. Several nodes must share the folder
in which the command starts. With a module or a run's configuration it runs `Trainer.test` instead: see `instep fit`.

Examples:
  instep test --config fsdp --devices 2
  srun instep test
  instep test --config instep_runs/version_0/config.yaml --ckpt_path best
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from instep.cli import launch
from instep.cli.options import add_settings
from instep.cli.trainer_command import is_run, run_trainer

_LONGEST_S = 86400


def main(words: Sequence[str]) -> int | None:
    """Run `Trainer.test` if the words name a module or a run's configuration; else return None, to check the set-up."""
    return run_trainer("test", words) if is_run(words) else None


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.usage = "instep test [OPTIONS]"
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="for each collective (default: 60)")
    parser.add_argument("--json", action="store_true", help="for programs")
    add_settings(parser)
    parser.set_defaults(fail=parser.error, module=True, no_python=False, stands_in=None, dry_run=False, quiet=False)


def run(args: argparse.Namespace) -> int:
    """Start the ranks, or run the checks in a rank that a launcher started; return 1 if a check failed."""
    from instep.launch.engine import is_worker  # imported late, since it loads torch

    if is_worker():
        from instep.cli import setup_check  # imported late, since it loads torch

        return setup_check.run(args.timeout, args.json)
    if not 0 < args.timeout < _LONGEST_S:
        args.fail(f"--timeout {args.timeout:g}: expected seconds above 0 and up to {_LONGEST_S}")
    args.program = ["instep", "test", f"--timeout={args.timeout:g}", *(["--json"] if args.json else [])]
    return launch.run(args)
