"""Run a module over its validation data as a configuration and the command line say.

The settings are those of `instep fit --help`: that command's config.yaml can be given as it is. Arguments of the module
that nobody gave are those that the checkpoint of --ckpt_path was saved with. With that config.yaml the checkpoints best
and last are those of its run.

Exit codes: 0 done; 1 it failed; 2 wrong arguments; 130 interrupted.

Examples:
  instep validate --config instep_runs/version_0/config.yaml --ckpt_path best
  instep validate --module pkg:Model --data pkg:Data --ckpt_path runs/step-00001200-1 --trainer.limit_val_batches 10
"""

from __future__ import annotations

from collections.abc import Sequence

from instep.cli.trainer_command import arguments as arguments
from instep.cli.trainer_command import run_trainer


def main(words: Sequence[str]) -> int:
    """Validate."""
    return run_trainer("validate", words)
