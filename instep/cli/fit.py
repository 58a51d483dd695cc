"""Train a module with data as a configuration and the command line say.

Settings come from, the first wins: the command line, --config files (the last one first), variables such as
INSTEP_FIT__TRAINER__MAX_EPOCHS, defaults. What held is saved as config.yaml in the run folder. Callbacks, loggers,
strategies, optimizers and schedulers are named by their class. `instep fit --module PKG:CLASS --help` lists everything
for that module, and --trainer.callbacks.help CLASS the arguments of one class.

Exit codes: 0 done; 1 it failed; 2 wrong arguments; 75 preempted, and saved; 76 it hung; 130 interrupted.

Examples:
  instep fit --config run.yaml --trainer.max_epochs 3
  instep fit --module examples/digits.py:Digits --data examples/digits.py:DigitsData --trainer.devices 2
  instep fit -c run.yaml --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor val_loss
  instep fit -c run.yaml --optimizer AdamW --optimizer.lr 1e-3 --print_config > whole.yaml
  instep fit -c instep_runs/version_0/config.yaml --ckpt_path auto
"""

from __future__ import annotations

from collections.abc import Sequence

from instep.cli.trainer_command import arguments as arguments
from instep.cli.trainer_command import run_trainer


def main(words: Sequence[str]) -> int:
    """Train."""
    return run_trainer("fit", words)
