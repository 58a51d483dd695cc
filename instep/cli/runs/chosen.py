"""Find the runs that are named on the command line, and split lists of metrics and hyperparameters."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from instep.errors import UsageError
from instep.runs.entries import Entry, at_path


def add_run(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the argument that names one run or several."""
    text = "a run: its folder, or its name where it lies below this folder"
    parser.add_argument("runs" if several else "path", metavar="RUN", nargs="+" if several else None, help=text)


def names(text: str) -> list[str]:
    """Split a text of names at its commas.

    Example:
        >>> names("loss, val_loss")
        ['loss', 'val_loss']
    """
    return [name.strip() for name in text.split(",") if name.strip()]


def find(paths: Sequence[str], limit: int | None = None) -> list[Entry]:
    """Find the runs at some paths or with some names, the newest first; print on stderr if `limit` leaves some out.

    Raises:
        UsageError: no run is found.
    """
    found = {entry.run.folder: entry for path in paths for entry in at_path(path)}
    entries = sorted(found.values(), key=lambda entry: (entry.run.updated, entry.run.name), reverse=True)
    if not entries:
        raise UsageError(
            f"there is no run in {', '.join(paths)}, nor up to 6 folders below: no folder with a status.json, "
            "hparams.yaml, metrics.csv, metrics.jsonl, or event file of TensorBoard or W&B"
        )
    if limit is not None and len(entries) > limit:
        sys.stderr.write(f"instep: the newest {limit} of {len(entries):,} runs; --limit {len(entries)} takes all\n")
    return entries[:limit]
