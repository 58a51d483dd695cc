"""A job that was started again goes on by itself.

Checkpoints say of which job they are, and of which fit of which program: the first, the second. In a rank that its
launcher started again, each fit goes on from the newest of its own that verifies; where there is none it does what it
did at the first start.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.launch.status import NAME, read_status
from instep.state.restarts import read_job
from instep.trainer.plugins import saves

if TYPE_CHECKING:
    from instep.checkpoint.choose import CheckpointInfo
    from instep.trainer.session import Session

_fits = itertools.count(1)


def take_over(run: Session) -> None:
    """Give the fit its name within the job; in a job that was started again, go on from its newest checkpoint.

    Collective. Sets `ckpt_path` and with it what is taken up, which is everything.
    """
    number = next(_fits)
    job = read_job()
    if job is None:
        return
    program = Path(sys.argv[0]).name  # a step of SLURM may run several, one after the other
    run.fit_of_job = f"{job.id}/{program}/{number}"
    if job.restart == 0:
        return
    found = _newest(run, job.id)
    if found is None:
        run.trainer.print(f"The job was started again (restart {job.restart}) before this fit had a checkpoint.")
        return
    run.ckpt_path, run.parts, run.restarted = found.path, None, True
    run.trainer.print(f"The job was started again (restart {job.restart}); this fit goes on from {found.path}.")


def mark(run: Session) -> dict[str, Any]:
    """What a checkpoint's manifest says of this."""
    return {} if run.fit_of_job is None else {"job": run.fit_of_job}


def _newest(run: Session, job: str) -> CheckpointInfo | None:
    from instep.checkpoint import CheckpointStore  # late: only who goes on pays for it

    own = run.trainer.run_folder
    runs = [own.path] if own.path else run.on_rank_zero(lambda: _runs_of(own.base, job), f"looking in {own.base}")
    folders: dict[Path, Path | None] = {}
    for callback in run.callbacks:
        if saves(callback):
            chosen = getattr(callback, "dirpath", None)
            folders |= {chosen: None} if chosen else {path / "checkpoints": path for path in runs}
    newest, of_run = None, None
    for folder, path in folders.items():
        found = CheckpointStore(folder).newest_verified("full", job=run.fit_of_job)
        if found is not None and (newest is None or (found.step, found.attempt) > (newest.step, newest.attempt)):
            newest, of_run = found, path
    own.path = own.path or of_run
    return newest


def _runs_of(base: Path, job: str) -> list[Path]:
    """The run folders that a job wrote, the newest first."""
    if not base.is_dir():
        return []
    folders = (path.parent for path in base.glob(f"version_*/{NAME}"))
    found = [path.absolute() for path in folders if (read_status(path) or {}).get("job") == job]
    return sorted(found, key=lambda path: -int(path.name.removeprefix("version_")))
