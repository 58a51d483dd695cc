"""Contract test of a logger: `check_logger`."""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from instep.callbacks import Callback
from instep.loggers import Logger
from instep.loggers.base import takes
from instep.testing.runs import SAVED_EVERY, ContractError, FailAt, Net, expect_failure, made, run_folder, small_trainer
from instep.utils.seed import seed_process

Rows = Iterable[tuple[int, Mapping[str, float]]]
_NAMES = ("train_loss_step", "val_loss", "late")
_LATE = 10_000  # step of a value that is logged after `finalize`


def check_logger(make: Callable[[], Logger], *, read: Callable[[Logger], Rows] | None = None) -> None:
    """Check that a logger keeps the rules of loggers, by small runs on the CPU.

    The rules: each kind of value that the logger has a hook for (text, image, table and so on) arrives, and none of the
    hooks raises. `finalize` may be called twice, and logging a value after it opens the logger again. The logger's
    state consists of JSON values. None of its hooks raises after a step has failed. If `read` is given, one more rule
    is checked: each step is logged once, with its value, even in a run that failed in the middle and was resumed from
    an earlier checkpoint.

    Args:
        make: the class, or a function without arguments that makes a new logger at each call.
        read: function that returns what the tracker or file of a closed logger has: pairs of a step and numbers by
            name, in any order; `logger.log_dir` is the folder it wrote to. None: what arrived is not read back.

    Raises:
        ContractError: a rule is broken; the message has the rule and what was seen.

    Example:
        >>> import csv
        >>> from pathlib import Path
        >>> from instep.loggers import CSVLogger
        >>> def read(logger):
        ...     with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
        ...         for row in csv.DictReader(file):
        ...             yield int(row.pop("step")), {name: float(cell) for name, cell in row.items() if cell}
        >>> check_logger(CSVLogger, read=read)
    """
    with run_folder("check_logger") as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logger = made(make, Logger, "check_logger")
        name = type(logger).__name__
        expected = Kept()
        _train(folder / "whole", [logger, expected], [EveryKind(logger)])
        _check_arrived(name, folder / "whole", caught)
        _check_state(logger, name)
        logger.finalize()
        logger.log_metrics({"late": 1.0}, step=_LATE)
        logger.finalize()
        _check_arrived(name, folder / "whole", caught)
        if read is not None:
            _compare(name, "a run", read(logger), [*expected.rows, (_LATE, {"late": 1.0})])

        def fail() -> None:
            _train(folder / "resumed", [make()], [FailAt(3 * SAVED_EVERY + 3)])

        expect_failure(fail, name)
        resumed = make()
        _train(folder / "resumed", [resumed], [], ckpt_path="auto")
        _check_arrived(name, folder / "resumed", caught)
        if read is not None:
            _compare(name, "a run that failed and was resumed", read(resumed), expected.rows)


class Kept(Logger):
    """Logger that keeps the logged numbers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))


class EveryKind(Callback):
    """Callback that logs one value of each kind that a logger supports, at the start of training."""

    def __init__(self, logger: Logger) -> None:
        self.logger = logger

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Log one value of each kind, and hyperparameters."""
        logger, file = self.logger, Path(trainer.default_root_dir, "note.txt")
        file.write_text("a file")
        calls: dict[str, Callable[[], None]] = {
            "text": lambda: logger.log_text("a text", "some words"),
            "image": lambda: logger.log_image("an image", torch.zeros(3, 4, 4)),
            "audio": lambda: logger.log_audio("a sound", torch.zeros(100), sample_rate=8000),
            "video": lambda: logger.log_video("a video", torch.zeros(2, 3, 4, 4)),
            "histogram": lambda: logger.log_histogram("a histogram", torch.arange(10.0)),
            "table": lambda: logger.log_table("a table", columns=["a", "b"], data=[[1, "x"], [2, "y"]]),
            "artifact": lambda: logger.log_artifact(file),
        }
        for kind, call in calls.items():
            if takes(type(logger), kind):
                call()
        logger.log_hyperparams({"nested": {"lr": 0.1, "none": None}, "list": [1, 2]})


def _train(root: Path, loggers: list[Logger], callbacks: list[Callback], ckpt_path: Any = None) -> None:
    seed_process(1)
    small_trainer(root, callbacks, logger=loggers).fit(Net(), ckpt_path=ckpt_path)


def _check_arrived(name: str, folder: Path, caught: list[warnings.WarningMessage]) -> None:
    """Raise if the logger has warned, or if a record still waits on the disk, as after an error in a hook."""
    waiting = [file for file in folder.glob("**/loggers/*.jsonl") if file.name.startswith(name)]
    said = list(dict.fromkeys(str(each.message) for each in caught if str(each.message).startswith(name)))
    if waiting or said:
        listed = "\n  ".join(said) or ", ".join(file.name for file in waiting)
        raise ContractError(f"{name}: not all that was logged has arrived:\n  {listed}")


def _check_state(logger: Logger, name: str) -> None:
    state = logger.state_dict()
    try:
        same = json.loads(json.dumps(state)) == state
    except TypeError as error:
        raise ContractError(f"{name}.state_dict() has what JSON does not: {error}") from error
    if not same:
        raise ContractError(f"{name}.state_dict() is another one once it was JSON: {state}. Use text keys and lists.")


def _compare(name: str, what: str, rows: Rows, expected: Rows) -> None:
    """Compare a logger's rows with the logged values: each step of each metric once, equal to seven digits."""
    found, given = _by_name(rows), _by_name(expected)
    for metric in _NAMES:
        steps, wanted = sorted(found[metric]), sorted(given[metric])
        if [step for step, _ in steps] != [step for step, _ in wanted]:
            raise ContractError(
                f"{name}: of {what} it has {metric!r} at the steps {[step for step, _ in steps]}; expected each once: "
                f"{[step for step, _ in wanted]}. What stands behind the step of `state_dict` is to be taken back when "
                "the logger starts again, or not written a second time."
            )
        for (step, value), (_, right) in zip(steps, wanted, strict=True):
            if not abs(value - right) <= 1e-6 * max(1.0, abs(right)):  # the condition is also true if `value` is NaN
                raise ContractError(f"{name}: of {what} it has {metric}={value} at step {step}; expected {right}")


def _by_name(rows: Rows) -> dict[str, list[tuple[int, float]]]:
    values = defaultdict[str, list[tuple[int, float]]](list)
    for step, metrics in rows:
        for metric, value in metrics.items():
            values[metric].append((step, value))
    return values
