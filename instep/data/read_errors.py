"""Clearer errors if reading a batch fails: a dead worker, samples that cannot be stacked, an error in a worker."""

from __future__ import annotations

import re
from traceback import walk_tb
from typing import Any

from instep.data.seeding import add_note
from instep.data.workers import worker_failure
from instep.errors import DataError, ShapeMismatchError

_COLLATE = "torch/utils/data/_utils/collate.py"
_SIZES = re.compile(r"got (\[[\d, ]*\]) at entry \d+ and (\[[\d, ]*\]) at entry")
_OF_LISTS = "each element in list of batch should be of equal size"


def explain(error: Exception, started: Any) -> DataError | None:
    """Return an error that names the cause of `error`.

    If `error` itself names it, move the cause into its first line and return None.

    Args:
        error: error that reading a batch raised.
        started: the second value that `start_workers` returned.
    """
    found = worker_failure(error, started) or _uneven(error)
    if found is None:
        _lead_with_cause(error)
        return None
    for note in getattr(error, "__notes__", ()):
        add_note(found, note)
    return found


def _uneven(error: Exception) -> ShapeMismatchError | None:
    text = str(error)
    files = [frame.f_code.co_filename.replace("\\", "/") for frame, _ in walk_tb(error.__traceback__)]
    if not isinstance(error, RuntimeError) or not (_COLLATE in text or any(name.endswith(_COLLATE) for name in files)):
        return None
    sizes = _SIZES.search(text)
    if sizes is None and _OF_LISTS not in text:
        return None
    which = f"sizes, such as {sizes[1]} and {sizes[2]}" if sizes else "lengths"
    return ShapeMismatchError(
        f"the samples of a batch have different {which}, so the DataLoader cannot stack them. Make them alike in the "
        "dataset, or give the DataLoader a collate_fn that pads them."
    )


def _lead_with_cause(error: Exception) -> None:
    """Put the text of a worker's error in front of torch's text, which begins with "Caught"."""
    text = error.args[0] if len(error.args) == 1 else None
    if not isinstance(text, str) or not text.startswith("Caught "):
        return
    head, _, trace = text.partition("\nOriginal Traceback")
    raised = re.search(rf"^(?:\w+\.)*{re.escape(type(error).__name__)}: (.+)", trace, re.MULTILINE)
    if raised is not None:
        place = head.partition(" in ")[2].rstrip(".")
        error.args = (type(text)(f"{raised[1]} (in {place})\n{text}"),)
