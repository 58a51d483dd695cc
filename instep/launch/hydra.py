"""Find out where a program in a job of Hydra was started, and make overrides with which its ranks join the same job.

Hydra changes the working directory and makes a folder at each start. So ranks start in the directory in which the
program was started, with the program's arguments and the folder of this job. This module does not import Hydra, since a
program in a job of Hydra has imported it already.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.errors import EXIT_FAILED, UsageError

NEW_FOLDER = "INSTEP_HYDRA_NEW_FOLDER"  # variable that tells ranks that the next start will have another folder

# matches overrides (`lr=0.1`, `+lr=0.1`, `~lr`, `model/net=small`), but not options, which begin with "-"
_OVERRIDE = re.compile(r"[~+]|[^-].*=")


def started_in() -> str | None:
    """Return the working directory in which the program was started; None if it does not run in a job of Hydra."""
    config = _config()
    return None if config is None else str(config.runtime.cwd)


def join_job(command: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Complete the command of ranks, so that they join this job of Hydra and do not start a job of their own.

    In a sweep, the ranks run all jobs of the sweep, in this sweep's folder.

    Args:
        command: the arguments after the Python executable.

    Returns:
        The arguments, and further environment variables for the ranks.

    Raises:
        UsageError: earlier jobs of the sweep have already run without ranks.
    """
    config = _config()
    if config is None:
        return tuple(command), {}
    if _is_sweep(config):
        if config.job.num:
            raise UsageError(
                f"job {config.job.num} of this sweep asks for several devices, and the ones before it ran in one "
                "process: the ranks would run them again. Give all jobs the same number of devices, or start the "
                "sweep with instep launch --devices N ... --multirun."
            )
        told = [_override("hydra.sweep.dir", Path(config.runtime.cwd, config.sweep.dir))]
    else:  # Hydra's subfolder of settings is left out, since this process has written it already
        told = [_override("hydra.run.dir", Path(config.runtime.output_dir)), "hydra.output_subdir=null"]
    return _insert(tuple(command), told), {NEW_FOLDER: "1"} if new_folder() is not None else {}


def new_folder() -> Path | None:
    """Return the job's output folder if its name contains the time, so that each start has a new folder; else None."""
    config = _config()
    if config is None:
        return None
    # Read the setting before interpolation, since the resolved text does not show whether it contains the time.
    where = config._get_node("sweep" if _is_sweep(config) else "run")._get_node("dir")._value()
    changes = NEW_FOLDER in os.environ or "${now:" in str(where)
    return Path(config.runtime.output_dir) if changes else None


def end_sweep(error: Exception) -> None:
    """End a rank whose run in a sweep has failed, since this rank would otherwise start the next job alone.

    Hydra keeps errors until all jobs of a sweep are done. Outside of a sweep, this function does nothing.

    Raises:
        SystemExit: always in a sweep, with the exit code of a failure, after the error was reported.
    """
    config = _config()
    if config is not None and _is_sweep(config):
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(EXIT_FAILED) from error


def _config() -> Any:
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    return module.HydraConfig.get()


def _is_sweep(config: Any) -> bool:
    return str(config.get("mode")).endswith("MULTIRUN")


def _override(name: str, value: Path) -> str:
    return name + "='" + str(value.absolute()).replace("'", r"\'") + "'"


def _insert(command: tuple[str, ...], told: list[str]) -> tuple[str, ...]:
    """Insert overrides right after the user's overrides, since Hydra's parser accepts no option between overrides."""
    theirs = [index for index, word in enumerate(command) if index and _OVERRIDE.match(word)]
    at = theirs[-1] + 1 if theirs else len(command)
    return (*command[:at], *told, *command[at:])
