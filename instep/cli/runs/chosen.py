"""Runs, metrics and hyperparameters that words on the command line mean."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.errors import UsageError
from instep.loggers.hparams import flatten
from instep.runs import Curve, Run, find_runs


def add_paths(parser: argparse.ArgumentParser, most: int) -> None:
    """Add the arguments of a command over several runs."""
    parser.add_argument("paths", metavar="DIR", nargs="*", default=["."], help="runs, or folders of runs (default: .)")
    parser.add_argument("-m", "--metrics", type=names, metavar="NAMES", help="the metrics, with commas between them")
    parser.add_argument(
        "-n", "--limit", type=_above_zero, default=most, metavar="N", help=f"the newest N runs (default: {most})"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def names(text: str) -> list[str]:
    """Split names at their commas.

    Example:
        >>> names("loss, val_loss")
        ['loss', 'val_loss']
    """
    return [name.strip() for name in text.split(",") if name.strip()]


def _above_zero(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


def find(paths: Sequence[str], limit: int | None = None) -> list[Run]:
    """Find the runs at some paths, the newest first; the others are counted on stderr.

    Raises:
        UsageError: there is no run.
    """
    found = {run.folder: run for path in paths for run in find_runs(path)}
    runs = sorted(found.values(), key=lambda run: (run.updated, run.name), reverse=True)
    if not runs:
        raise UsageError(
            f"there is no run in {', '.join(paths)}, nor up to 6 folders below: no folder with a status.json, "
            "hparams.yaml, metrics.csv, metrics.jsonl, or event file of TensorBoard or W&B"
        )
    if limit is not None and len(runs) > limit:
        sys.stderr.write(f"instep: the newest {limit} of {len(runs):,} runs; --limit {len(runs)} takes all\n")
    return runs[:limit]


def titles(runs: Sequence[Run]) -> list[str]:
    """Name runs as short as tells them apart: by what their folders do not have in common."""
    parts = [run.folder.parts for run in runs]
    same = 0
    while len(runs) > 1 and all(len(each) > same + 1 and each[same] == parts[0][same] for each in parts):
        same += 1
    return [str(Path(*each[same:])) for each in parts] if len(runs) > 1 else [run.folder.name for run in runs]


def settings(run: Run) -> dict[str, Any]:
    """Return the hyperparameters in one level, such as `model/width`."""
    return flatten(run.hparams)


def number(value: float | None) -> str:
    """Write a metric's value.

    Example:
        >>> number(0.123456789), number(None)
        ('0.123457', '')
    """
    return "" if value is None else f"{value:.6g}"


def finite(value: float) -> float | None:
    """Return a value, and None for nan, which a curve without a finite point has."""
    return None if math.isnan(value) else value


def ends(curve: Curve | None) -> dict[str, Any] | None:
    """Describe a curve for programs, without its points."""
    if curve is None:
        return None
    return {key: getattr(curve, key) for key in ("last", "least", "greatest", "count", "not_finite", "first_bad")}
