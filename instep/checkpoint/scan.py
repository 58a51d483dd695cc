"""Scan of a folder of checkpoints, and the choice of one by a keyword such as "last". There is no index file."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from instep.checkpoint import names
from instep.checkpoint.files import LocalFiles, patiently
from instep.checkpoint.lineage import Line
from instep.checkpoint.manifest import Manifest, read_manifest
from instep.checkpoint.remote import files_of
from instep.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, SettingError
from instep.types import Location
from instep.utils.paths import to_path


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint whose manifest could be read.

    Args:
        path: folder of the checkpoint.
        step: global step of the save.
        attempt: number of the save among those of that step.
        manifest: content of its manifest.
    """

    path: Path
    step: int
    attempt: int
    manifest: Manifest

    @property
    def kind(self) -> str:
        """`"full"` if a run can continue from it, `"weights"` for the model only."""
        return str(self.manifest.info.get("kind", "full"))


_SIGN = {"min": 1.0, "max": -1.0}


def best_first(
    found: Sequence[CheckpointInfo], monitor: str | None = None, mode: str | None = None
) -> list[CheckpointInfo]:
    """Sort by the monitored score, best first and the older first among equals, as ModelCheckpoint does.

    A checkpoint without a score, or with nan, is left out: it is never the best.

    Args:
        found: result of a scan, newest first.
        monitor: the metric; None if all checkpoints were scored by the same one.
        mode: "min" or "max", to choose if the checkpoints were scored by both.

    Raises:
        CheckpointError: the scores are of different metrics or modes, and neither argument chooses one.

    Example:
        >>> best_first([])
        []
    """
    scored: dict[tuple[str, str], list[CheckpointInfo]] = {}
    for info in reversed(found):
        about = info.manifest.info
        score, name, way = about.get("score"), about.get("monitor"), about.get("mode", "min")
        if score is None or name is None or (monitor is not None and name != monitor) or math.isnan(float(score)):
            continue
        if way not in ("min", "max"):
            raise CheckpointError(f"{info.path}: mode={way!r} is neither 'min' nor 'max'", path=info.path)
        scored.setdefault((str(name), way), []).append(info)
    meant = [rule for rule in scored if len(scored) == 1 or mode in (None, rule[1])]
    if len(meant) > 1:
        raise CheckpointError(
            f"these checkpoints were scored by different rules: {', '.join(f'{n} ({m})' for n, m in sorted(meant))}. "
            "Say which one is meant with monitor=... and mode=..., or give the path."
        )
    # Sorting is stable, so the oldest stays first among equals.
    return [
        info
        for rule in meant
        for info in sorted(scored[rule], key=lambda one: float(one.manifest.info["score"]) * _SIGN[rule[1]])
    ]


def check_keyword(keyword: str) -> str:
    """Return the keyword; raise a SettingError if it is unknown."""
    if keyword not in ("last", "best", "auto"):
        raise SettingError(
            f"{keyword!r} names no checkpoint. Use a path, 'last', 'best' or 'auto'.", field="ckpt_path", got=keyword
        )
    return keyword


@dataclass(frozen=True)
class Broken:
    """A folder that was a checkpoint, or a part of one, and cannot be used.

    Args:
        path: the folder.
        problem: what is wrong with it.
    """

    path: Path
    problem: str

    @property
    def damage(self) -> str:
        """Message for the user who asked for the checkpoint."""
        return f"{self.path} is damaged: {self.problem}. `instep checkpoint verify {self.path}` says what of it is."


def folder_names(root: Path) -> list[str]:
    """List the folders in a folder, also hidden ones; empty if it does not exist."""
    try:
        return patiently(lambda: files_of(root).folders(root))
    except OSError as error:
        raise CheckpointError(f"could not list {root}: {error.strerror or error}", path=root) from error


def list_checkpoints(*roots: Path) -> list[CheckpointInfo | Broken]:
    """List the checkpoints of some folders and the remains of broken ones, last saved first.

    A broken checkpoint is sorted by its name, before all with a lower (step, attempt). If its name has no step, it
    comes first, since it may be the newest.
    """
    found = [pair for root in roots for pair in _ordered(root)]
    return [what for _, what in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _ordered(root: Path) -> list[tuple[tuple[int, float, int, str], CheckpointInfo | Broken]]:
    """List the checkpoints of a folder, each with its sort key."""
    whole: list[CheckpointInfo] = []
    broken: list[tuple[float, int, Broken]] = []
    for name in folder_names(root):
        path = root / name
        if name.startswith("."):
            continue
        manifest, problem, manifest_is_there = None, "", True
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            problem, manifest_is_there = str(error), not isinstance(error, CheckpointNotFoundError)
        if manifest is not None:
            whole.append(CheckpointInfo(path, manifest.step, manifest.attempt, manifest))
        elif manifest_is_there or files_of(path).looks_damaged(path):
            step, attempt = names.step_of(name) or (math.inf, 0)
            broken.append((step, attempt, Broken(path, problem)))
    found: list[tuple[tuple[int, float, int, str], CheckpointInfo | Broken]] = [
        ((*info.manifest.order, info.path.name), info) for info in whole
    ]
    for step, attempt, what in broken:
        before = [info.manifest.serial for info in whole if (info.step, info.attempt) < (step, attempt)]
        found.append(((max(before, default=0), step, attempt, what.path.name), what))
    return found


@dataclass(frozen=True)
class Facts:
    """Facts about other checkpoints in a folder that a save needs.

    Args:
        name: name of the folder.
        step: global step from the manifest, or from the name if the manifest was not read.
        attempt: number of the save among those of that step.
        run_id: run that saved it; None if the manifest was not read.
        serial: serial number of the save; 0 if the manifest was not read.
    """

    name: str
    step: int
    attempt: int
    run_id: str | None
    serial: int = 0


_Stamp = tuple[int, int, int]  # a manifest's time of change, size and inode
_index: dict[str, dict[str, tuple[_Stamp, Facts]]] = {}  # facts about the folders that were listed last
_INDEXED = 16


def facts(root: Path, by_name: bool = False) -> list[Facts]:
    """List the checkpoints of a folder, last saved first. This process reads each manifest once.

    Facts that were read are valid as long as the manifest is the same file. They are not used for loading:
    `list_checkpoints` and the reader read every manifest again.

    Args:
        root: the folder.
        by_name: whether to take the step from a folder's name, if possible, without reading its manifest.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    local = isinstance(files_of(root), LocalFiles)
    before = _index.get(str(root), {})
    now: dict[str, tuple[_Stamp, Facts]] = {}
    found: list[Facts] = []
    for name in folder_names(root):
        if name.startswith("."):
            continue
        known = before.get(name)
        if by_name and (said := names.step_of(name)) is not None:
            found.append(Facts(name, *said, None))
            if known is not None:
                now[name] = known
            continue
        stamp = _stamp(f"{root}/{name}/{names.MANIFEST}") if local else None
        if known is None or known[0] != stamp:
            manifest, _ = read_or_say(root / name)
            if manifest is None:
                continue
            known = (stamp or (0, 0, 0), Facts(name, manifest.step, manifest.attempt, manifest.run_id, manifest.serial))
        found.append(known[1])
        if stamp is not None:
            now[name] = known
    _index.pop(str(root), None)
    _index[str(root)] = now
    while len(_index) > _INDEXED:
        _index.pop(next(iter(_index)), None)
    return sorted(found, key=lambda one: (one.serial, one.step, one.attempt, one.name), reverse=True)


def _stamp(manifest: str) -> _Stamp | None:
    """Return a stamp of a file, which differs for a later file of the same name; None if it is missing."""
    try:
        seen = os.stat(manifest)
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_size, seen.st_ino


def read_or_say(folder: Path) -> tuple[Manifest | None, str]:
    """Read the manifest of a folder, or return what is wrong with it."""
    try:
        return read_manifest(folder), ""
    except CheckpointError as error:
        return None, str(error)


def is_checkpoint(path: Location) -> bool:
    """Return True if a path is a folder with a readable manifest.

    The other files are not read: `CheckpointStore.verify` reads them.

    Args:
        path: a path or URL.

    Example:
        >>> is_checkpoint("no/such/folder")
        False
    """
    return read_or_say(to_path(path))[0] is not None


def find_checkpoint(path: Location) -> Path:
    """Find the checkpoint that a path means: the folder itself, or the latest attempt of a name without a number.

    Args:
        path: a path such as "runs/best-2", or "runs/best" for the highest "runs/best-<attempt>". If these have several
            steps and were ranked by a metric, the best one of the run that saved last is returned. A ".ckpt" at the end
            is allowed, as in Lightning: "runs/last.ckpt" is the newest checkpoint in "runs" if none has that name.

    Returns:
        A folder with a readable manifest.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint; the text says what is there.
        CorruptCheckpointError: the only attempts are damaged; `path` is the latest of them.
        CheckpointError: the attempts were ranked by different metrics.

    Example:
        >>> import tempfile
        >>> from instep.checkpoint import CheckpointStore
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = CheckpointStore(folder).save(1200, lambda writer: writer.json("note.json", "hello"))
        ...     find_checkpoint(f"{folder}/step-00001200").name
        'step-00001200-1'
    """
    path = to_path(path).absolute()
    manifest, problem = read_or_say(path)
    if manifest is not None:
        return path
    beside = list_checkpoints(path.parent)
    attempts: list[CheckpointInfo | Broken] = []
    for name in dict.fromkeys((path.name, path.name.removesuffix(".ckpt"))):
        attempts = attempts or [what for what in beside if name in (what.path.name, _base(what.path))]
    if not attempts and path.name == "last.ckpt":
        attempts = beside[:1]
    whole = [what for what in attempts if isinstance(what, CheckpointInfo)]
    if whole:
        return _meant(whole).path
    if (path / names.MANIFEST).exists():
        raise CorruptCheckpointError(problem, path=path)
    if path.exists():
        folders = [folder for folder in (path, path / "checkpoints") if folder.is_dir()]
        inside = [what.path for folder in folders for what in list_checkpoints(folder)[:1]]
        hint = f". The newest in it is {inside[0]}" if inside else ""
        raise CheckpointNotFoundError(problem + hint, path=path)
    for what in attempts:
        if isinstance(what, Broken):
            raise CorruptCheckpointError(what.damage, path=what.path)
    there = ", ".join(what.path.name for what in beside[:5]) or "no checkpoints"
    raise CheckpointNotFoundError(
        f"there is no checkpoint {path}: it does not exist. Its folder holds {there}.", path=path
    )


def _meant(attempts: Sequence[CheckpointInfo]) -> CheckpointInfo:
    """Return the checkpoint that a name without its attempt means.

    A fixed name, such as "best", may be shared by all checkpoints that one ModelCheckpoint saves.
    """
    newest = max(attempts, key=lambda info: info.manifest.order)
    line = Line.of(newest.manifest)
    own = [info for info in attempts if line.has(info.manifest.run_id, info.step)]
    ranked = [info for info in own if info.manifest.info.get("ranked") and info.manifest.info.get("score") is not None]
    if not ranked or _base(newest.path) == "last" or len({info.step for info in own}) == 1:
        return newest
    return best_first(sorted(ranked, key=lambda info: info.manifest.order, reverse=True))[0]


def _base(path: Path) -> str | None:
    parts = names.split_name(path.name)
    return None if parts is None else parts[0]
