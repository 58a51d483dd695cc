"""The run folder: `<default_root_dir>/instep_runs/version_<n>/`, with logs, `checkpoints/` and `status.json`.

If a logger has a `save_dir`, the run folder is that logger's folder, `<save_dir>/<name>/<version>/`. A restarted job
finds its own folder, and in it the checkpoint to resume from.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING, Any

from instep import checkpoint  # this package loads each of its names only when the name is used
from instep.distributed.rank_zero import on_rank_zero
from instep.errors import (
    EXIT_FAILED,
    EXIT_PREEMPTED,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InstepError,
    Preempted,
)
from instep.health.error_report import is_remote, start_command, tell_run_folder
from instep.health.run_status import (
    NAME,
    begin_status,
    end_status,
    find_failure,
    in_short,
    is_bookkeeping,
    leave_failure,
    read_status,
    read_step,
    write_status,
)
from instep.loggers import folders
from instep.state.environment import read_job
from instep.trainer.context import RunContext
from instep.trainer.plugins import writes_checkpoints
from instep.trainer.weights import saved_run
from instep.utils.paths import to_path
from instep.utils.process_id import this_process
from instep.utils.redact import hide_arguments
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer
    from instep.checkpoint import CheckpointStore, Reader
    from instep.checkpoint.lineage import Line
    from instep.checkpoint.run_state import SavedRun
    from instep.loggers.base import Logger
    from instep.loggers.delivery import Delivery

EXIT_INTERRUPTED = 130  # exit code that shells report for a process ended by SIGINT

_fits = itertools.count(1)


class RunFolder:
    """Folder that one Trainer writes into. The main process chooses it once, in the first run that writes or resumes.

    Args:
        root: the Trainer's `default_root_dir`.
    """

    def __init__(self, root: Path) -> None:
        self.base = self._plain_base = root / folders.RUNS
        self.path: Path | None = None
        # Attribute `delivery` of the first logger with a `save_dir`. The folders of this logger are the run folders.
        self._decider: Delivery | None = None
        self._visits = False  # whether an evaluation logs into a folder that may belong to another run
        self._made = False  # whether the folder is new
        self._evaluated = False  # whether only evaluations have used the folder, and no fit
        self._status: dict[str, Any] = {}  # content of `status.json`
        self._facts: dict[str, Any] = {}  # the part of `status.json` that is known when the run starts
        self._claimed: Path | None = None  # folder created for a logger that was used before the run
        # folders of the `--config` files; the first one that is a run folder is searched for checkpoints
        self.given: Sequence[Path] = ()

    @property
    def checkpoints(self) -> Path | None:
        """Folder of checkpoints, unless ModelCheckpoint has a `dirpath`. None before the run folder is chosen."""
        return None if self.path is None else self.path / "checkpoints"

    def follow(self, loggers: Sequence[Logger]) -> None:
        """Put run folders into the folder of the first logger with a `save_dir`, and attach all loggers."""
        decider = next((logger for logger in loggers if logger.runs_dir is not None), None)
        self._decider = None if decider is None else decider.delivery
        runs = None if decider is None else decider.runs_dir
        self.base = self._plain_base if runs is None else runs
        kinds = [type(logger).__name__ for logger in loggers]
        for i, logger in enumerate(loggers):
            logger.delivery.attach(self.claim, logger is decider, kinds[:i].count(kinds[i]))

    def leave_visited(self) -> None:
        """Forget a folder that only evaluations have written into, so that a fit can look for a run to resume."""
        if self._evaluated:
            # if nothing is resumed, the new run uses this folder, unless it may belong to another run
            self._claimed = self._claimed if self._visits else self.path
            self.path, self._visits, self._evaluated = None, False, False

    # ---- choosing the folder: all methods are collective, and rank 0 reads the disk

    def find_checkpoint(self, ctx: RunContext, ckpt_path: Any) -> tuple[Path | None, SavedRun | None]:
        """Open the checkpoint that `ckpt_path` means, after all of it was verified.

        Args:
            ctx: the run.
            ckpt_path: a path, "last", "best", "auto" or None.

        Returns:
            The checkpoint's folder or file, and the opened folder (None for a file). Both are None if `ckpt_path` is
            None, or if it is "auto" and there is nothing to resume.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
            CorruptCheckpointError: there are checkpoints, but none of them verifies.
        """
        if ckpt_path is None:
            return None, None
        if ckpt_path == "":
            raise CheckpointNotFoundError(
                "ckpt_path='' is empty. A ModelCheckpoint's best_model_path is, where it has saved nothing that it "
                "could rank: see its monitor. Give a path, or None for no checkpoint."
            )
        if ckpt_path in ("last", "best", "auto"):
            reader = self._resolve(ctx, ckpt_path)
        else:
            given = to_path(ckpt_path).absolute()
            doing = f"finding {given}"
            path = on_rank_zero(lambda: None if given.is_file() else checkpoint.find_checkpoint(given), doing)
            if path is None:
                return given, None
            reader = checkpoint.CheckpointStore(path.parent).open_verified(path)
        return (None, None) if reader is None else (reader.path, saved_run(reader))

    def _resolve(self, ctx: RunContext, ckpt_path: str) -> Reader | None:
        """Open the checkpoint that "last", "best" or "auto" means, in the folders of all callbacks that save.

        "best" is searched only in the folder of the first of these callbacks.
        """
        apart = list(dict.fromkeys(own_folders(ctx, ctx.trainer.checkpoint_callback)))
        if ckpt_path == "best" or not apart:
            return self._resolve_regular(ctx, ckpt_path, False)
        kind = None if ctx.fn != "fit" or (ctx.asked is not None and ctx.asked.weights_only) else "full"
        found = None
        # if these folders have no checkpoint, the result is that of the search below, in the regular folder
        with suppress(CheckpointNotFoundError, CorruptCheckpointError):
            found = checkpoint.CheckpointStore(apart[0]).resolve(
                "last", kind=kind, line=own_line(ctx.trainer), also=apart[1:]
            )
        try:
            regular = self._resolve_regular(ctx, ckpt_path, found is not None)
        except (CheckpointNotFoundError, CorruptCheckpointError):
            if found is None:
                raise
            regular = None
        if regular is None or found is None:
            return regular or found
        both = regular, found
        # The serial numbers of runs in two folders cannot be compared. Prefer the checkpoint whose run was the last,
        # before this one, to hold the lease of its folder.
        held = [checkpoint.CheckpointStore(reader.path.parent).last_run() for reader in both]
        return max(both, key=lambda reader: (reader.manifest.run_id in held, reader.manifest.order))

    def _resolve_regular(self, ctx: RunContext, ckpt_path: str, quiet: bool) -> Reader | None:
        weights = ctx.fn != "fit" or (ctx.asked is not None and ctx.asked.weights_only)
        kind = None if weights else "full"
        line = own_line(ctx.trainer)
        callback = ctx.trainer.checkpoint_callback
        monitor, mode = (None, None) if callback is None or ckpt_path != "best" else (callback.monitor, callback.mode)
        asked = ckpt_path
        if ckpt_path == "best" and callback is not None and monitor is None:
            ckpt_path = "last"  # without a metric the newest is the best, as in callback.best_model_path
        if callback is not None and callback.own_folder is not None:
            store = checkpoint.CheckpointStore(callback.own_folder)
            found = store.resolve(ckpt_path, kind=kind, monitor=monitor, mode=mode, line=line)
            return found or (None if quiet else self._none(ctx, callback.own_folder))
        broken: CorruptCheckpointError | None = None
        only = ckpt_path != "auto"
        keyword = "last" if ckpt_path == "auto" and kind is None else ckpt_path
        own = None if self._evaluated else self.path
        versions = [own] if own else on_rank_zero(lambda: self._candidates(only), f"looking for runs in {self.base}")
        for version in versions:
            store, found = checkpoint.CheckpointStore(version / "checkpoints"), None
            goes_on = self.path is None and ckpt_path == "auto" and ctx.fn == "fit"
            if goes_on and callback is not None and on_rank_zero(store.root.is_dir, f"looking at {store.root}"):
                # raise an error now, and not at the first save, if the same command is already running
                ctx.saver.own(store.root)
            try:
                found = store.resolve(keyword, kind=kind, monitor=monitor, mode=mode, line=line)
            except (CheckpointNotFoundError, CorruptCheckpointError) as error:
                if ckpt_path == "best" and not (callback is None and line) and self._has_other(store, kind):
                    raise
                broken = broken or (error if isinstance(error, CorruptCheckpointError) else None)
            if found is None:
                if goes_on:
                    ctx.saver.release(store.root)
                continue
            if goes_on:
                self.path = version  # the same command goes on writing into the folder of the resumed run
            return found
        if broken is not None:
            raise broken
        folder = own or (versions[0] if only and len(versions) == 1 else self.base.absolute())
        if ckpt_path == "auto":
            return None if quiet else self._none(ctx, folder)
        fresh = ", or 'auto' to start fresh where there is none" if ctx.fn == "fit" else ""
        off = "fast_dev_run" if ctx.settings.fast_dev_run else "enable_checkpointing=False"
        why = "" if callback is not None else f" {off} saves none."
        raise CheckpointNotFoundError(
            f"ckpt_path={asked!r}: there is no checkpoint in {folder}.{why} Give a path{fresh}.", path=folder
        )

    @staticmethod
    def _has_other(store: CheckpointStore, kind: str | None) -> bool:
        """Return True if a folder has a checkpoint that verifies, although none can be ranked as the best."""
        try:
            return store.resolve("last", kind=kind) is not None
        except (CheckpointNotFoundError, CorruptCheckpointError):
            return False

    @staticmethod
    def _none(ctx: RunContext, folder: Path) -> None:
        if ctx.fn == "fit":
            ctx.trainer._print(f"Nothing to resume from in {folder}: starting afresh.{_hint(folder)}")

    def adopt(self, ctx: RunContext, state: dict[str, Any]) -> None:
        """Continue in the run folder of the resumed checkpoint, if it exists and this run would also have chosen it."""
        text = state.get("run_folder")
        if self.path is None and text is not None:
            folder = Path(text)

            def is_own() -> bool:
                if not folder.is_dir() or folder.name == "..":
                    return False
                if self._decider is None:
                    return folder.parent == self.base.absolute()
                return folder in self._asked_runs()

            self.path = folder if on_rank_zero(is_own, f"looking for {folder}") else None

    def choose(self, ctx: RunContext) -> bool:
        """Choose and make the folder in the first call. Return True on rank 0 if the folder is new.

        If the logger's `version` names the folder of another run, that folder is left alone. This run then gets the
        next number, and a warning.
        """
        if self.path is not None:
            return False
        self._evaluated = ctx.fn != "fit"
        doing = f"making a run folder in {self.base}"
        self.path, self._visits, self._made = on_rank_zero(lambda: self._choose(ctx), doing)
        named = self._named
        if named is not None and self.path != named and not self._visits and ctx.rank == 0:
            warn_user(
                f"{named} is taken: it has the files of another run. This run writes into {self.path}, and "
                "ckpt_path='auto' with the same version finds it there"
            )
        return self._made and ctx.rank == 0

    def _choose(self, ctx: RunContext) -> tuple[Path, bool, bool]:
        """Return the folder, whether an evaluation adds its logs to another run's folder, and whether it is new."""
        version = None if self._decider is None or ctx.fn == "fit" else self._decider.version
        opened, goes_on = self._opened(ctx), None if version is None else folders.folder_name(version)
        if goes_on is not None:
            folder = self.base / goes_on
            goes_on = None if folders.is_free(folder) or not folder.is_dir() or folders.leads_out(folder) else goes_on
        visits = goes_on is not None and opened is None
        if goes_on is None and self._named is not None and self._continues_in(ctx, self._named):
            goes_on = self._asked
        path, is_new = self._make(opened, goes_on, for_fit=ctx.fn == "fit")
        return path, visits, is_new

    def claim(self) -> Path:
        """Return the folder of the next run, for a logger that is used before a run. On the main process only."""
        if self.path is None and self._claimed is None:
            self._claimed, _ = self._make()
        return self.path or self._claimed  # pyright: ignore[reportReturnType]

    def _opened(self, ctx: RunContext) -> str | None:
        """Return the name of the folder that a logger has opened before this run."""
        ours = [logger.delivery for logger in ctx.trainer.loggers]
        ours = [one for one in ours if one is self._decider or one.writer.asked is None]
        ours.sort(key=lambda one: one is not self._decider)
        opened = [self._claimed, *(one.opened_folder for one in ours)]
        names = [folders.name_in(self.base, folder, self._asked) for folder in opened]
        return next((name for name in names if name is not None), None)

    @property
    def _asked(self) -> str | None:
        """Folder name that the first logger with a `save_dir` asks for by its `version`."""
        return None if self._decider is None else self._decider.writer.asked

    @property
    def _named(self) -> Path | None:
        """Path of the folder that the first logger with a `save_dir` asks for by its `version`."""
        return None if self._asked is None else (self.base / self._asked).absolute()

    def _continues_in(self, ctx: RunContext, folder: Path) -> bool:
        """Return True if a folder belongs to the resumed run, and has no checkpoint later than the resumed one."""
        if ctx.resumed_reader is None or folders.leads_out(folder) or not folder.is_dir():
            return False
        store = checkpoint.CheckpointStore(folder / "checkpoints")
        status = read_status(folder) or {}
        if ctx.resumed_reader.path.parent != store.root and status.get("run_id") != ctx.trainer.run_id:
            return False
        return all(info.manifest.order <= ctx.resumed_reader.manifest.order for info in store.scan())

    def _make(self, opened: str | None = None, goes_on: str | None = None, for_fit: bool = False) -> tuple[Path, bool]:
        """Return the folder that `choose_place` chooses, and whether it is new; a new folder is created."""
        named, files = self._named, checkpoint.LocalFiles()
        free = named is None or folders.is_free(named)
        while True:
            number = folders.next_version(self.base)
            place = folders.choose_place(self._asked, opened=opened, goes_on=goes_on, is_free=free, next_number=number)
            path = (self.base / place.name).absolute()
            if opened is not None or not place.is_new:
                return path, place.is_new
            try:
                files.make_root(self.base)
                if path != named:
                    # fsync the folder, since a crash must not lose the folder of a durable checkpoint
                    files.make_folder(path)
                    return path, True
                files.make_root(path)
                # If several jobs start at the same time, only one of them creates the file.
                if not for_fit or files.create_exclusive(path / NAME, b'{"status": "starting"}\n'):
                    return path, True
                free = False
            except FileExistsError:  # another run created this folder in the meantime
                free = False
            except OSError as error:
                where = "Trainer(default_root_dir=...)" if self._decider is None else "the logger's save_dir"
                raise InstepError(
                    f"cannot make the run folder {path}: {error.strerror or error}. Make it writable, or choose "
                    f"another with {where}."
                ) from error

    def forget(self, main: bool) -> None:
        """Forget the folder, so that the next run chooses anew.

        The main process removes the folder if it is new and holds no results.
        """
        folder, self.path, self._claimed, self._evaluated = self.path, None, None, False
        if main and folder is not None and self._made:
            files = [path.name for path in folder.rglob("*") if not path.is_dir()]
            if all(is_bookkeeping(name) or name.startswith(".lease-") for name in files):
                shutil.rmtree(folder)

    def _candidates(self, only: bool) -> list[Path]:
        """List the run folders to search, newest first.

        If a `--config` file lies in a run folder, this folder comes first; with `only`, it is the only one.
        """
        runs = self._asked_runs()
        for folder in self.given:
            is_in_base = folder.parent.name == folders.RUNS or folder.parent == self.base.absolute()
            if is_in_base or (folder / NAME).is_file():
                return [folder, *(() if only else runs)]
        return runs

    def _asked_runs(self) -> list[Path]:
        """List the run folders of the logger's `version`, newest first; without a version, all run folders.

        The folders of a version are the one with this name, and those of runs that asked for this name when it was
        taken.
        """
        named, runs = self._named, self._versions()
        if named is None:
            return runs
        moved = [
            path for path in runs if path != named and (read_status(path) or {}).get("asked_folder") == self._asked
        ]
        return [*moved, named] if folders.is_run(named) else moved

    def _versions(self) -> list[Path]:
        """List the run folders, newest first: by number and, for folders of a logger, then by name."""
        return folders.runs_in(self.base, self._decider is not None)

    def reached(self, run_id: str) -> int:
        """Return the last known step of the run `run_id`, or 0 if this is not its run folder. Not collective."""
        return 0 if self.path is None else read_step(self.path, run_id)

    def runs_of(self, job: str) -> list[Path]:
        """List the run folders that a job wrote, newest first."""
        runs = self._versions()
        if self._named is not None and self._named not in runs and folders.is_run(self._named):
            runs.insert(0, self._named)
        return [path for path in runs if (read_status(path) or {}).get("job") == job]

    # ---- how the run ended

    def write_running(self, ctx: RunContext) -> None:
        """Write the status "running" into `status.json`, in place of an earlier run's status.

        The end of the run replaces this status, also after an error. So a status that stays "running" means that the
        run was killed. Collective.
        """
        if self.path is not None:
            self._facts = _facts_of(ctx)
            folder, content = self.path, self._content(ctx.trainer, "running", None)
            content["checkpoint"] = None if ctx.resumed_reader is None else str(ctx.resumed_reader.path)
            on_rank_zero(lambda: begin_status(folder, content), f"writing {folder / NAME}")
            self._status = content
            if ctx.rank == 0:
                from instep.health.progress_file import ProgressFile  # imported late: only a run needs it

                tell_run_folder(folder)
                ctx.exit_stack.push(ProgressFile(folder, partial(self._progress, ctx)).close)

    def record_saved(self, trainer: Trainer, path: Path) -> None:
        """Record the newest checkpoint in `status.json`, so that a killed run can be resumed from it."""
        if self.path is not None and trainer.is_global_zero and self._status.get("status") == "running":
            self._status.update(global_step=trainer.global_step, epoch=trainer.position.epoch, checkpoint=str(path))
            with suppress(OSError):  # an error here must not fail the save, which has succeeded
                write_status(self.path, self._status)

    @property
    def last_saved(self) -> str:
        """Newest full checkpoint that the fit has saved or was resumed from; "" if there is none."""
        return self._status.get("checkpoint") or ""

    def write_status(self, trainer: Trainer, error: BaseException | None, signal: str = "") -> None:
        """Write into `status.json` how the run ended, since plain torchrun turns every exit code into 1.

        Args:
            trainer: the Trainer of the run.
            error: error that ended the run; None if it finished.
            signal: name of the signal that ended the run, if the trainer's `stop_reason` does not have it.
        """
        if self.path is None:
            return
        status, code = _outcome(error)
        text = None if error is None or status == "preempted" else f"{type(error).__name__}: {error}"
        if not trainer.is_global_zero:
            return
        remote = text is not None and trainer.world_size > 1 and not signal and is_remote(error or text)
        if remote and (cause := find_failure(self.path)):
            text = cause
            if trainer.run_summary is not None:
                # another rank's error caused this one, so the summary names that error
                trainer.run_summary = replace(trainer.run_summary, why=in_short(cause))
        path: Any = error.checkpoint if isinstance(error, Preempted) else None
        if signal:  # a signal handler has little time, so it does not search for the newest checkpoint
            path = self.last_saved
        elif status != "preempted":
            path = (self._saved(trainer) if status == "done" else None) or self._newest(trainer)
        self._status = {
            **self._content(trainer, status, code),
            "checkpoint": str(path) if path else None,
            "signal": signal or (trainer.stop_reason if status == "preempted" else None),
            "error": text,
            "ended": time.time(),
            "why": in_short(text or "") if trainer.run_summary is None else trainer.run_summary.why,
            "summary": None if trainer.run_summary is None else trainer.run_summary.as_dict(),
        }
        end_status(self.path, self._status)

    def leave_failure(self, ctx: RunContext, error: BaseException) -> None:
        """Write into the run folder which error ended this rank, and where it was raised.

        This is done early, since the launcher may soon end the process.
        """
        if self.path is None or ctx.fn != "fit" or _outcome(error)[0] != "failed":
            return
        facts = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **ctx.heartbeat.place(),
            "step": ctx.position.global_step,
            "how": "exception",
            "message": f"{type(error).__name__}: {error}",
            "traceback": "".join(format_exception(error)),
            "remote": is_remote(error),
        }
        leave_failure(self.path, ctx.rank, facts)

    def _progress(self, ctx: RunContext) -> dict[str, Any]:
        """Return the progress of the run. Called in a thread, so only values on the host are read."""
        from instep.health.progress_file import plain_metrics  # imported late: only a run needs it

        trainer, progress = ctx.trainer, ctx.trainer.progress
        return {
            "stage": None if trainer.state.stage is None else str(trainer.state.stage.value),
            "phase": ctx.heartbeat.place()["phase"],
            "global_step": trainer.global_step,
            "epoch": trainer.position.epoch,
            "batch": progress.batch,
            "batches": progress.total,
            "max_steps": ctx.settings.max_steps,
            "max_epochs": ctx.settings.max_epochs,
            "metrics": plain_metrics(trainer.metrics.logged),
        }

    def _saved(self, trainer: Trainer) -> Path | None:
        """Return the newest checkpoint that this run has recorded as saved, if it is still there."""
        said = self._status.get("checkpoint")
        path = to_path(said, like=getattr(trainer.checkpoint_callback, "own_folder", None)) if said else None
        return path if path is not None and path.is_dir() else None

    def _newest(self, trainer: Trainer) -> Path | None:
        """Return the newest full checkpoint of this run or of the runs that it continues.

        `ckpt_path="auto"` would resume from it.
        """
        assert self.checkpoints is not None
        folder = getattr(trainer.checkpoint_callback, "own_folder", None) or self.checkpoints
        with suppress(CheckpointError):  # an error in listing the folder must not replace the error that ended the run
            return next(
                (
                    info.path
                    for info in checkpoint.CheckpointStore(folder).scan()
                    if info.kind == "full" and trainer.line.has(info.manifest.run_id, info.step)
                ),
                None,
            )

    def _content(self, trainer: Trainer, status: str, code: int | None) -> dict[str, Any]:
        job = read_job()
        return {
            **self._facts,
            "name": trainer.settings.name,
            "status": status,
            "exit_code": code,
            "global_step": trainer.global_step,
            "epoch": trainer.position.epoch,
            "run_id": trainer.run_id,
            "job": None if job is None else job.id,
            "asked_folder": self._asked,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "checkpoint": None,
            "signal": None,
            "error": None,
            "ended": None,
            "why": None,
            "summary": None,
        }


def _facts_of(ctx: RunContext) -> dict[str, Any]:
    """Return facts about the run's process, and the command that resumes it."""
    return {
        "process": this_process(),
        "started": time.time(),
        "command": list(hide_arguments(start_command())[0]),
        "cwd": os.getcwd(),
        "resumes": ctx.resumes,
        "world_size": ctx.world_size,
        "strategy": ctx.strategy.name,
        "device": ctx.device.type,
    }


def _hint(folder: Path) -> str:
    """Return why "auto" never finds a run whose folder Hydra has named by the start time; "" for other folders."""
    if "hydra" not in sys.modules:
        return ""
    from instep.launch.hydra import new_folder  # imported late: only a program with Hydra needs it

    new = new_folder()
    if new is None or (folder != new and new not in folder.parents):
        return ""
    return (
        " It is in the folder that Hydra made for this start, and the next start has another one: give hydra.run.dir "
        "(in a sweep hydra.sweep.dir), default_root_dir or the logger's save_dir a fixed one, and 'auto' finds the run."
    )


def _outcome(error: BaseException | None) -> tuple[str, int]:
    """Return the status of an ended run, and the exit code of the process if nobody catches the error."""
    if error is None:
        return "done", 0
    if isinstance(error, Preempted):
        return "preempted", EXIT_PREEMPTED
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", EXIT_INTERRUPTED
    if isinstance(error, SystemExit):
        return "interrupted", error.code if isinstance(error.code, int) else int(error.code is not None)
    return "failed", EXIT_FAILED


def find_of_restarted_job(ctx: RunContext) -> tuple[Path, SavedRun] | None:
    """Name the fit (`saver.job`), if it runs in a job. If the job was restarted, return the fit's newest checkpoint.

    The checkpoint is returned opened. It is resumed completely, whatever `ckpt_path` asks for. Collective.
    """
    ctx.trainer.run_folder.leave_visited()
    number = next(_fits)
    job = read_job()
    if job is None:
        return None
    program = Path(sys.argv[0]).name  # part of the fit's name, since a SLURM step may run several programs in turn
    ctx.saver.job = f"{job.id}/{program}/{number}"
    if job.restart == 0:
        return None
    found = _newest(ctx, job.id)
    if found is None:
        ctx.trainer._print(f"The job was started again (restart {job.restart}) before this fit had a checkpoint.")
        return None
    ctx.trainer._print(f"The job was started again (restart {job.restart}); this fit goes on from {found.path}.")
    return found.path, saved_run(found)


def _newest(ctx: RunContext, job: str) -> Reader | None:
    own = ctx.trainer.run_folder
    runs = [own.path] if own.path else on_rank_zero(lambda: own.runs_of(job), f"looking in {own.base}")
    by_root: dict[Path, Path | None] = {}
    for callback in ctx.callbacks:
        if writes_checkpoints(callback):
            chosen = getattr(callback, "own_folder", None)
            by_root |= {chosen: None} if chosen else {path / "checkpoints": path for path in runs}
    roots = list(by_root)
    newest = checkpoint.CheckpointStore(roots[0]).newest_verified("full", ctx.saver.job, roots[1:]) if roots else None
    own.path = own.path or (None if newest is None else by_root[newest.path.parent])
    return newest


def own_folders(ctx: RunContext, but: Any = None) -> list[Path]:
    """Return the folders that callbacks were told to write checkpoints into, except those of the callback `but`."""
    given = [
        getattr(each, "own_folder", None) for each in ctx.callbacks if writes_checkpoints(each) and each is not but
    ]
    return [folder for folder in given if folder is not None]


def own_line(trainer: Trainer) -> Line | None:
    """Return the chain of runs (this Trainer's and those that it continues) whose checkpoints belong to this Trainer.

    Return None if the Trainer has not trained yet.
    """
    return trainer.line if trainer.global_step > 0 else None
