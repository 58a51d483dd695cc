"""Measure how fast a data loader gives batches with several numbers of workers, and choose the best setting.

WHAT is a function that returns a DataLoader, or a DataModule whose training loader is measured (package.module:Name, or
train.py:Name). Each setting is measured for --seconds, after its first batch. Of the settings within 5 % of the
fastest, the one with the fewest workers is chosen; with --step-ms, the one with the fewest workers that is faster than
the training steps. On CUDA the setting has pin_memory=true.

--write saves the chosen setting as a YAML file of DataLoader arguments, such as num_workers. For a DataModule, the file
has only the arguments that the DataModule itself accepts, and is used by `instep fit --config run.yaml --config FILE`.

Examples:
  instep tune-loader train.py:Digits
  instep tune-loader train:make_loader --workers 0 2 4 8 --step-ms 40
  instep tune-loader train.py:Digits --write loader.yaml
"""

from __future__ import annotations

import argparse
import inspect
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.cli import output
from instep.errors import SettingError

if TYPE_CHECKING:
    from instep.data.tune import LoaderTrial


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    add = parser.add_argument
    add("what", metavar="WHAT", help="import path of a function that gives a DataLoader, or of a DataModule")
    add("--args", metavar="JSON", default="{}", help="its arguments")
    add("--workers", nargs="+", type=int, metavar="N", help="numbers to try (default: 0, 1, 2, 4 ... processors)")
    add("--prefetch", nargs="+", type=int, metavar="N", default=[2, 4], help="batches per worker (default: 2 4)")
    add("--seconds", type=float, metavar="S", default=3.0, help="for each setting (default: 3)")
    add("--step-ms", type=float, metavar="MS", default=0.0, help="milliseconds of a training step, where known")
    add("--write", type=Path, metavar="FILE", help="YAML file to make")
    add("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Measure every setting, print the table, and write the choice."""
    from instep.cli.memory.simulate import users_code  # imported late, since it loads torch
    from instep.cli.memory.subject import import_path, json_arguments, training_loader
    from instep.data.tune import tune_loader

    make = import_path(args.what)
    given = json_arguments("args", args.args)
    with users_code(f"making {args.what}", "Give its arguments by --args."):
        made = make(**given)
        loader = training_loader(made)
    data_module = None if made is loader else make
    if args.write is not None:
        check_write(args.write, data_module)  # checked before measuring, which takes a minute
    if not args.json:
        output.say(f"{args.what}: batches a second, measured for {args.seconds:g} s each")
    best, found = tune_loader(loader, args.workers, args.prefetch, seconds=args.seconds, step_s=args.step_ms / 1000)
    if args.json:
        output.say_json({"best": best.setting, "trials": [asdict(each) for each in found]})
    else:
        columns = ("workers", "prefetch", "pinned", "first batch, s", "batches/s", "")
        output.table(columns, [_row(trial, trial is best) for trial in found], right=columns[:5])
        output.say("  ".join(f"{name}={value}" for name, value in best.setting.items()))
    if args.write is not None:
        write_setting(args.write, best.setting, data_module)
        if not args.json:
            output.say(f"written: {args.write}")
    return 0


def _row(trial: LoaderTrial, chosen: bool) -> tuple[Any, ...]:
    return (
        trial.num_workers,
        "" if trial.prefetch_factor is None else trial.prefetch_factor,
        "yes" if trial.pin_memory else "no",
        f"{trial.first_batch_s:.2f}",
        f"{trial.batches_per_s:.1f}",
        "<" * chosen,
    )


def check_write(path: Path, data_module: Any) -> None:
    """Check before measuring that a setting can be written; `path` and `data_module` as in `write_setting`.

    Raises:
        SettingError: the file exists already, or the class takes no argument of a `DataLoader`.
    """
    from instep.data.tune import SETTINGS  # imported late, since it loads torch

    if path.exists():
        raise _is_there(path)
    if data_module is not None and not any(_takes(data_module, name) for name in SETTINGS):
        names = ", ".join(SETTINGS)
        text = f"{data_module.__name__} takes none of {names}: give its constructor the arguments, to pass them on"
        raise SettingError(text, field="write", got=path)


def write_setting(path: Path, setting: dict[str, Any], data_module: Any) -> None:
    """Make a YAML file of a setting.

    Args:
        path: path of the new file, which must not exist.
        setting: arguments of a `DataLoader`.
        data_module: DataModule class, whose own arguments are written; None: all arguments are written.

    Raises:
        SettingError: the file exists already.
    """
    import yaml  # imported late, since only `--write` needs it

    from instep.utils.atomic import create_exclusive

    written: dict[str, Any] = setting
    if data_module is not None:
        mine = {name: value for name, value in setting.items() if _takes(data_module, name)}
        written = {"data": {"init_args": mine}}
    if not create_exclusive(path, yaml.safe_dump(written, sort_keys=False).encode()):
        raise _is_there(path)


def _takes(data_module: Any, name: str) -> bool:
    return name in inspect.signature(data_module).parameters


def _is_there(path: Path) -> SettingError:
    return SettingError(f"{path} is there already: name another file", field="write", got=path)
