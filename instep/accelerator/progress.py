"""tqdm's progress bar for handwritten loops, on one process of every node."""

from __future__ import annotations

from typing import Any

from instep.accelerator.logging import known_place
from instep.errors import SettingError
from instep.utils.imports import require


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A `tqdm.auto` bar that only the first process of every node shows.

    Args:
        args: tqdm's own, as are `kwargs`: the iterable first.
        main_process_only: False shows a bar on every process.

    Raises:
        MissingPackageError: tqdm is not installed.
        SettingError: the first argument is `main_process_only`, as other libraries had it.

    Example:
        >>> sum(tqdm(range(3), disable=True))
        3
    """
    if args and isinstance(args[0], bool):
        raise SettingError(
            "tqdm(True, ...) is not taken: main_process_only is given by name", field="main_process_only"
        )
    bar = require("tqdm.auto", extra=None, purpose="instep.accelerator.tqdm").tqdm
    if main_process_only and known_place()[0].local_rank != 0:
        kwargs["disable"] = True
    return bar(*args, **kwargs)
