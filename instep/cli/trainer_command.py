"""`instep fit`, `validate`, `test` and `predict`: a `TrainerCLI` for any module and data that can be imported."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from instep.errors import EXIT_FAILED, InstepError, SettingError

_CLASSES = ("--module", "--model", "--data")
_HELP = ("-h", "--help")
_RUN_KEYS = re.compile(r"^(model|data|trainer|ckpt_path|seed_everything):", re.MULTILINE)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that every user needs, for the short help; jsonargparse adds the rest."""
    parser.add_argument("-c", "--config", metavar="FILE", help="a YAML file; later files and options count more")
    parser.add_argument("--module", metavar="PKG:CLASS", help="the TrainModule; --model PKG.CLASS is the same")
    parser.add_argument("--model.ARG", metavar="VALUE", help="an argument of it")
    parser.add_argument("--data", metavar="PKG:CLASS", help="the DataModule; --data.ARG is an argument of it")
    parser.add_argument("--trainer.ARG", metavar="VALUE", help="such as --trainer.max_epochs 3 --trainer.devices 2")
    parser.add_argument("--trainer.callbacks+", metavar="CLASS", help="one more; --trainer.callbacks.ARG is its own")
    parser.add_argument("--optimizer", metavar="CLASS", help="in place of configure_optimizers; --optimizer.lr 0.1")
    parser.add_argument("--lr_scheduler", metavar="CLASS", help="its schedule; --lr_scheduler_options.interval step")
    parser.add_argument("--seed_everything", metavar="N", help="the seed (default: 0)")
    parser.add_argument("--ckpt_path", metavar="CKPT", help="a checkpoint, last, best or auto")
    parser.add_argument("--print_config", action="store_true", help="print all that holds, as YAML, and exit")


class _Command:
    arguments = staticmethod(arguments)

    @classmethod
    def main(cls, words: Sequence[str]) -> int:
        """Run the Trainer's method that has the name of this class in lower case."""
        return run_trainer(cls.__name__.lower(), words)


class Fit(_Command):
    """Train a module with data as a configuration and the command line say.

    A setting comes from the first of these sources that has it: the command line (the last option or --config file with
    this setting), variables such as INSTEP_FIT__TRAINER__MAX_EPOCHS, defaults. All settings are saved as config.yaml in
    the run folder. Callbacks, loggers, strategies, optimizers and schedulers are named by their class.
    `instep fit --module PKG:CLASS --help` lists everything for that module, and --trainer.callbacks.help CLASS the
    arguments of one class.

    Exit codes: 0 done; 1 it failed; 2 wrong arguments; 75 preempted, and saved; 76 it hung; 130 interrupted.

    Examples:
      instep fit --config run.yaml --trainer.max_epochs 3
      instep fit --module examples/digits.py:Digits --data examples/digits.py:DigitsData --trainer.devices 2
      instep fit -c run.yaml --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor val_loss
      instep fit -c run.yaml --optimizer AdamW --optimizer.lr 1e-3 --print_config > whole.yaml
      instep fit -c instep_runs/version_0/config.yaml --ckpt_path auto
    """


class Validate(_Command):
    """Run a module over its validation data as a configuration and the command line say.

    The settings are those of `instep fit --help`, and the config.yaml that `instep fit` saved can be given unchanged.
    Arguments of the module that are not given come from the checkpoint of --ckpt_path. With the config.yaml of a run,
    `--ckpt_path best` and `--ckpt_path last` mean the checkpoints of that run.

    Exit codes: 0 done; 1 it failed; 2 wrong arguments; 130 interrupted.

    Examples:
      instep validate --config instep_runs/version_0/config.yaml --ckpt_path best
      instep validate --module pkg:Model --data pkg:Data --ckpt_path runs/step-00001200-1 --trainer.limit_val_batches 10
    """


class Predict(_Command):
    """Run a module's predict_step over its data as a configuration and the command line say.

    The settings are those of `instep fit --help`, and the config.yaml that `instep fit` saved can be given unchanged.
    The command does not save predictions: the module or a callback can write them (`on_predict_batch_end`).

    Exit codes: 0 done; 1 it failed; 2 wrong arguments; 130 interrupted.

    Examples:
      instep predict --config instep_runs/version_0/config.yaml --ckpt_path best
      instep predict -c run.yaml --ckpt_path best --trainer.callbacks+=pkg.WriteToDisk --return_predictions false
    """


def run_trainer(name: str, words: Sequence[str]) -> int:
    """Run one of the commands that call a method of the Trainer.

    Args:
        name: "fit", "validate", "test" or "predict".
        words: words of the command line after the name.

    Returns:
        The exit code.
    """
    if all(word in _HELP for word in words):
        # Imported late, since `main` imports this file.
        from instep.cli.main import EXIT_USAGE, load, make_parser

        parser = make_parser((name,), load((name,)))
        if not words:
            parser.print_help(sys.stderr)
            return EXIT_USAGE
        parser.parse_args(["--help"])
    if os.getcwd() not in sys.path:  # the user's modules are in the current folder, which `python -m` also searches
        sys.path.insert(0, os.getcwd())
    words = dotted(words)
    from instep.cli.trainer_cli import TrainerCLI  # imported late, since it loads torch and jsonargparse
    from instep.launch.engine import is_worker

    try:
        TrainerCLI(args=[name, *words], parser_kwargs={"prog": "instep"})
    except (InstepError, OSError) as error:
        if not is_worker():
            raise
        # this hook gives the error to the launcher, which prints it once, with rank and host
        sys.excepthook(type(error), error, error.__traceback__)
        return EXIT_FAILED
    return 0


def is_run(words: Sequence[str]) -> bool:
    """Return True if the words of `instep test` are for the Trainer: they name a module or a run's configuration."""
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option.split(".")[0] in ("--module", "--model", "--data", "--trainer", "--ckpt_path", "--print_config"):
            return True
        if option in ("-c", "--config"):
            path = Path(value if equals else words[index + 1] if index + 1 < len(words) else "")
            if path.is_file() and _RUN_KEYS.search(path.read_text(errors="replace")):
                return True
    return False


def dotted(words: Sequence[str]) -> list[str]:
    """Replace each class that is given as `package.module:Class` or `folder/file.py:Class` by its dotted path.

    Example:
        >>> dotted(["--module", "examples/digits.py:Digits", "--model.lr=0.1"])
        ['--model', 'examples.digits.Digits', '--model.lr=0.1']
    """
    result: list[str] = []
    for word in words:
        option, equals, value = word.partition("=")
        if result and result[-1] in ("--model", "--data"):
            result.append(_dotted(word))
        elif option in _CLASSES:
            option = "--model" if option == "--module" else option
            result.append(f"{option}={_dotted(value)}" if equals else option)
        else:
            result.append(word)
    return result


def _dotted(text: str) -> str:
    place, colon, name = text.rpartition(":")
    if not colon:
        return text
    if place.endswith(".py"):
        parts = Path(os.path.relpath(place)).with_suffix("").parts
        if not all(part.isidentifier() for part in parts):
            raise SettingError(
                f"{place} cannot be imported from this folder: its path must go down from here, through folders whose "
                "names are Python names. Go to its folder first."
            )
        place = ".".join(parts)
    return f"{place}.{name}"
