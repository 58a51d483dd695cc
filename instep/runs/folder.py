"""Find run folders, without reading any points of their metrics."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from instep.errors import InstepError, UsageError
from instep.health.heartbeat_file import PACES_FILE
from instep.health.run_status import FAILURES, PROGRESS
from instep.loggers.hparams import NAME as HPARAMS
from instep.loggers.rows import WandbFile
from instep.runs.label import FILE as LABEL
from instep.runs.label import Label, label_of, read_label
from instep.runs.metrics import Metrics, MetricsReader, log_files
from instep.runs.status import STATUS, RunStatus, look, own
from instep.utils import plain_yaml
from instep.utils.untrusted_files import clean, open_regular

DEPTH = 6  # levels of folders to search: runs/<experiment>/instep_runs/version_0 has four; two are added for safety
_IS_LOG = re.compile(r"metrics\.(jsonl|csv)|events\.out\.tfevents\..*|run-.*\.wandb").fullmatch
_WATCHED = (STATUS, HPARAMS, LABEL, PROGRESS, FAILURES, PACES_FILE, "checkpoints")
_LOGS = ("*.log", "*/*.log", "*/attempt_*/*/std*.log", "*/*/attempt_*/*/std*.log", "wandb/*/files/output.log")
_TAIL_BYTES = 2**18

Stamp = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Run:
    """A run folder, as `find_runs` found it.

    Args:
        name: path of the run folder, relative to the searched folder; `label` has the name that a user gave.
        folder: absolute path of the run folder.
        status: whether the run goes on, or how it ended and why.
        updated: time of the last change of the run's files, in seconds since 1970.
        stamp: times and sizes of the run's files; a run with the same stamp is not read again.

    Example:
        >>> import tempfile
        >>> from instep.loggers import JSONLinesLogger
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     logger = JSONLinesLogger(folder)
        ...     logger.log_metrics({"loss": 0.5}, step=1)
        ...     logger.finalize()
        ...     run = find_runs(folder)[0]
        ...     run.status.state, run.metrics().curves["loss"].last
        ('unknown', 0.5)
    """

    name: str
    folder: Path
    status: RunStatus
    updated: float
    stamp: Stamp = field(repr=False, default=())

    @cached_property
    def label(self) -> Label:
        """Label of the run. If the label has no name, the argument of `Trainer(name=...)` is used as its name."""
        label = read_label(self.folder)
        return label if label.name else replace(label, name=label_of(self.status.said).name)

    @cached_property
    def hparams(self) -> dict[str, Any]:
        """Hyperparameters that the logger saved; empty if none can be read."""
        return self._hparams[0]

    @cached_property
    def problems(self) -> list[str]:
        """Files of the run that cannot be read, a line with the reason for each; for loggers' files see `Metrics`."""
        return self._hparams[1]

    @cached_property
    def _hparams(self) -> tuple[dict[str, Any], list[str]]:
        path = self.folder / HPARAMS
        if os.path.lexists(path):
            if not own(path, self.folder):
                return {}, [f"{HPARAMS} is a link"]
            try:
                values = plain_yaml.load(plain_yaml.read_text(path), path)
                return (values, []) if isinstance(values, dict) else ({}, [])
            except InstepError as error:
                return {}, [clean(str(error))]
        for path in log_files(self.folder, ("run-*.wandb", "wandb/*/run-*.wandb")):
            file = WandbFile(path)
            for _ in file.read():
                break  # reading one row is enough, since the configuration is the first record of the file
            if file.config:
                file.config.pop("_wandb", None)
                return file.config, []
        return {}, []

    def metrics(self, names: Sequence[str] | None = None, max_points: int = 1000) -> Metrics:
        """Read the run's curves. For a run that grows, `MetricsReader(run.folder)` reads only new values."""
        return MetricsReader(self.folder, names, max_points).read()

    def checkpoints(self, verify: bool = False) -> list[dict[str, Any]]:
        """Describe the run's checkpoints, newest first: name, step, kind, epoch, score, bytes, created, state, note.

        Args:
            verify: whether to read every byte; the state of an undamaged checkpoint is then "verified". Otherwise only
                sizes are compared, and the state is "complete".
        """
        from instep.checkpoint.described import checkpoints  # imported late, since it loads torch

        root = self.folder / "checkpoints"
        if root.is_symlink() or not root.is_dir():
            return []
        try:
            return checkpoints(root, verify)
        except InstepError as error:
            return [{"name": root.name, "step": None, "bytes": 0, "state": "broken", "note": clean(str(error))}]

    def reports(self) -> list[Path]:
        """List the run's reports of hangs, the newest first."""
        return sorted((path for path in self.folder.glob("hang-*/*.txt") if own(path, self.folder)), reverse=True)

    def logs(self) -> list[Path]:
        """List the run's files of printed output, the last written one first, empty files at the end.

        These are the launcher's files if `log_dir` is the run folder, W&B's output file, and `*.log`.
        """
        found = {path for pattern in _LOGS for path in self.folder.glob(pattern)}
        return sorted((path for path in found if own(path, self.folder)), key=_written, reverse=True)


def _written(path: Path) -> tuple[bool, float, str]:
    try:
        said = path.stat()
    except OSError:  # the folder was deleted in the meantime
        return False, 0.0, str(path)
    return said.st_size > 0, said.st_mtime, str(path)


def find_runs(folder: str | os.PathLike[str], before: Iterable[Run] = ()) -> list[Run]:
    """Find the run folders at a folder and up to six levels of folders below it, the newest first.

    A run is a folder with a `status.json`, `hparams.yaml` or the file of a logger: CSV (also Lightning's), JSON lines,
    TensorBoard, W&B offline. No metric is read, and links are not followed.

    Args:
        folder: folder to search.
        before: runs that an earlier search found. A run whose files are the same is not read again.

    Returns:
        The runs, the newest first.

    Raises:
        UsageError: the folder does not exist.

    Example:
        >>> import tempfile
        >>> from instep.loggers import CSVLogger
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     logger = CSVLogger(folder)
        ...     logger.log_metrics({"loss": 0.5}, step=1)
        ...     logger.finalize()
        ...     [run.name for run in find_runs(folder)]
        ['version_0']
    """
    root = Path(os.path.abspath(folder))
    if not root.is_dir():
        raise UsageError(f"{folder} is no folder: give a run folder, or one that has runs in it")
    known = {run.folder: run for run in before}
    runs = [look_at(path, root, stamp, known.get(path)) for path, stamp in below(root, DEPTH)]
    return sorted(runs, key=lambda run: (run.updated, run.name), reverse=True)


def tail(path: Path, lines: int = 50) -> str:
    """Read the last lines of a text file, cleaned for a terminal; if the file cannot be read, return the reason."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = (file.read(_TAIL_BYTES) or b"").decode("utf-8", "replace")
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    # Only the part after the last carriage return is kept, since a progress bar overwrites its own line.
    shown = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]
    return clean("\n".join(shown[-lines - 1 if shown[-1] == "" else -lines :]))


def below(folder: Path, depth: int) -> Iterator[tuple[Path, Stamp]]:
    """Yield each run folder at a folder and up to `depth` levels below it, with its stamp."""
    folders: list[str] = []
    seen: dict[str, os.stat_result] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                is_folder = entry.is_dir(follow_symlinks=False)
                if entry.name in _WATCHED or (not is_folder and _IS_LOG(entry.name)):
                    seen[entry.name] = entry.stat(follow_symlinks=False)
                if is_folder and not entry.name.startswith("."):
                    folders.append(entry.name)
    except OSError:  # the folder was deleted, or this user may not read it
        return
    if STATUS in seen or HPARAMS in seen or any(map(_IS_LOG, seen)):
        yield folder, tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in seen.items()))
    if STATUS not in seen and depth:  # folders inside a run belong to that run
        for name in folders:
            yield from below(folder / name, depth - 1)


def look_at(folder: Path, root: Path, stamp: Stamp, before: Run | None = None) -> Run:
    """Make the record of a run below `root`; for an ended run, reuse the record `before` if its stamp is the same."""
    live = before is not None and before.status.state in ("running", "starting")
    if before is not None and before.stamp == stamp and not live:
        return before
    return Run(path_below(folder, root), folder, look(folder), updated(stamp), stamp)


def path_below(folder: Path, root: Path) -> str:
    """Return the path of a run folder relative to the searched folder, cleaned for a terminal."""
    return clean(folder.name if folder == root else str(folder.relative_to(root)), "")


def updated(stamp: Stamp) -> float:
    """Return the time, in seconds since 1970, when a file of the run other than its label was last changed."""
    return max((time_ns for name, time_ns, _ in stamp if name != LABEL), default=0) / 1e9
