"""The command that runs this program again. It is stored in the run's checkpoints."""

from __future__ import annotations

import os
from typing import Any

from instep.errors import UsageError
from instep.trainer.settings import Settings
from instep.utils.private_files import mark
from instep.utils.redact import hide_arguments


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


# Working directory at the program's start, to which relative paths among its arguments refer. The program may leave
# this directory later.
_STARTED_IN = _folder()


def own_command(settings: Settings) -> dict[str, Any] | None:
    """Return the command that runs this program again, as checkpoints store it; None in a notebook or a test.

    Secrets among its arguments are left out. The entry "mark" is a signature, which shows that this user wrote the
    command.
    """
    from instep.launch import hydra  # imported late: only a save needs it
    from instep.launch.command import this_command

    try:
        arguments = this_command()
    except UsageError:
        return None
    starts_ranks = settings.devices != "auto" and settings.num_nodes == 1
    shown, left_out = hide_arguments(arguments)
    folder = hydra.started_in() or _STARTED_IN
    how = {"arguments": list(shown), "left_out": list(left_out), "folder": folder, "starts_ranks": starts_ranks}
    return {**how, "mark": mark(how)}
