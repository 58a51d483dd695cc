"""Programs inside a job of Hydra: where they were started, and which overrides make their ranks join that job.

Hydra changes the working directory and makes a folder at each start. So ranks start in the directory where the program
was started, with its own arguments and the folder of this job. Hydra is not imported here, since a program in its job
has already imported it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.errors import EXIT_FAILED, UsageError

NEW_FOLDER = "INSTEP_HYDRA_NEW_FOLDER"  # tells ranks that the next start will have another folder

# matches `lr=0.1`, `+lr=0.1`, `~lr`, `model/net=small`, and not options, which begin with "-"
_OVERRIDE = re.compile(r"[~+]|[^-].*=")


def started_in() -> str | None:
    """Return the working directory in which the program was started; None outside of a job."""
    config = _config()
    return None if config is None else str(config.runtime.cwd)


def join_job(command: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Complete the command of ranks, so that they join this job and do not start their own.

    In a sweep the ranks run all of its jobs, in this sweep's folder.

    Args:
        command: the arguments after the Python executable.

    Returns:
        The arguments, and more variables for the ranks.

    Raises:
        UsageError: jobs of the sweep have run without ranks already.
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
    else:  # the folder was made and described before
        told = [_override("hydra.run.dir", Path(config.runtime.output_dir)), "hydra.output_subdir=null"]
    return _insert(tuple(command), told), {NEW_FOLDER: "1"} if new_folder() is not None else {}


def new_folder() -> Path | None:
    """Return the job's output folder if its name contains the time, so that the next start gets another; else None."""
    config = _config()
    if config is None:
        return None
    # The value before interpolation, since the resolved text does not show what it is made of.
    where = config._get_node("sweep" if _is_sweep(config) else "run")._get_node("dir")._value()
    changes = NEW_FOLDER in os.environ or "${now:" in str(where)
    return Path(config.runtime.output_dir) if changes else None


def end_sweep(error: Exception) -> None:
    """End a rank whose run in a sweep has failed, since it would otherwise start the next job alone.

    Hydra catches errors until all jobs of a sweep are done. Outside of a sweep nothing happens.

    Raises:
        SystemExit: with the exit code of a failure, after the error was reported.
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
    """Insert overrides after the user's, since Hydra's parser accepts only one group, before any option."""
    theirs = [index for index, word in enumerate(command) if index and _OVERRIDE.match(word)]
    at = theirs[-1] + 1 if theirs else len(command)
    return (*command[:at], *told, *command[at:])
