"""Run a module's predict_step over its data as a configuration and the command line say.

The settings are those of `instep fit --help`: that command's config.yaml can be given as it is. What is predicted is
for the module and the callbacks to write (`on_predict_batch_end`).

Exit codes: 0 done; 1 it failed; 2 wrong arguments; 130 interrupted.

Examples:
  instep predict --config instep_runs/version_0/config.yaml --ckpt_path best
  instep predict -c run.yaml --ckpt_path best --trainer.callbacks+=pkg.WriteToDisk --return_predictions false
"""

from __future__ import annotations

from collections.abc import Sequence

from instep.cli.trainer_command import arguments as arguments
from instep.cli.trainer_command import run_trainer


def main(words: Sequence[str]) -> int:
    """Predict."""
    return run_trainer("predict", words)
