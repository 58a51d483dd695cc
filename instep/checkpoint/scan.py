"""List the checkpoints in a folder by reading their manifests, and find one by its path; there is no index file."""

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
        attempt: number of this save among the saves of the same step.
        manifest: content of the checkpoint's manifest.
    """

    path: Path
    step: int
    attempt: int
    manifest: Manifest

    @property
    def kind(self) -> str:
        """Kind of the checkpoint.

        "full": a run can resume from it. "weights": it has only the model's weights. "exception": it was saved after an
        error, perhaps within a step, so a run resumes from it only if its path is given. "accelerator":
        `Accelerator.save_state` saved it, and only `load_state` loads all of it.
        """
        return str(self.manifest.info.get("kind", "full"))


_SIGN = {"min": 1.0, "max": -1.0}


def best_first(
    found: Sequence[CheckpointInfo], monitor: str | None = None, mode: str | None = None
) -> list[CheckpointInfo]:
    """Sort checkpoints by score, best first, as ModelCheckpoint does; if scores are equal, the older one is better.

    A checkpoint without a score, or with a score of nan, is left out.

    Args:
        found: result of a scan, newest first.
        monitor: name of the metric. None: all checkpoints have scores of the same metric.
        mode: "min" or "max"; needed only if the checkpoints have scores of both modes.

    Raises:
        CheckpointError: the scores are of different metrics or modes, and no argument chooses one of them.

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
    # The sort is stable, so that of equal scores the older checkpoint stays first.
    return [
        info
        for rule in meant
        for info in sorted(scored[rule], key=lambda one: float(one.manifest.info["score"]) * _SIGN[rule[1]])
    ]


def check_keyword(keyword: str) -> str:
    """Return the keyword for `ckpt_path`, such as "last"; raise a SettingError if it is unknown."""
    if keyword not in ("last", "best", "auto"):
        raise SettingError(
            f"{keyword!r} names no checkpoint. Use a path, 'last', 'best' or 'auto'.", field="ckpt_path", got=keyword
        )
    return keyword


@dataclass(frozen=True)
class Broken:
    """Folder of a checkpoint that cannot be used, since it is damaged or incomplete.

    Args:
        path: path of the folder.
        problem: description of the damage.
    """

    path: Path
    problem: str

    @property
    def damage(self) -> str:
        """Error message for a user who has requested this checkpoint."""
        return f"{self.path} is damaged: {self.problem}. `instep checkpoint verify {self.path}` says what of it is."


def folder_names(root: Path) -> list[str]:
    """Return the names of the folders in `root`, including hidden ones; empty if `root` does not exist."""
    try:
        return patiently(lambda: files_of(root).folders(root))
    except OSError as error:
        raise CheckpointError(f"could not list {root}: {error.strerror or error}", path=root) from error


def list_checkpoints(*roots: Path) -> list[CheckpointInfo | Broken]:
    """Return the checkpoints in some folders, intact and broken, the last saved first.

    A broken checkpoint is placed by the step and attempt in its name: before all checkpoints with a lower step, or with
    the same step and a lower attempt. If its name has no step, it comes first, since it may be the newest.
    """
    found = [pair for root in roots for pair in _ordered(root)]
    return [what for _, what in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _ordered(root: Path) -> list[tuple[tuple[int, float, int, str], CheckpointInfo | Broken]]:
    """Return the checkpoints of a folder, each with its sort key."""
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
    """What a save must know about another checkpoint in its folder.

    Args:
        name: name of the checkpoint's folder.
        step: global step from the manifest, or from the name if the manifest was not read.
        attempt: number of the save among the saves of the same step.
        run_id: id of the run that saved the checkpoint; None if the manifest was not read.
        serial: serial number of the save; 0 if the manifest was not read.
    """

    name: str
    step: int
    attempt: int
    run_id: str | None
    serial: int = 0


_Stamp = tuple[int, int, int]  # modification time, size and inode of a manifest
_index: dict[str, dict[str, tuple[_Stamp, Facts]]] = {}  # cache for the folders that were listed last
_INDEXED = 16


def facts(root: Path, by_name: bool = False) -> list[Facts]:
    """Return what a save must know about each checkpoint in its folder, the last saved first.

    The facts are cached, and a manifest is read again only if its file has changed. Loading does not use this cache:
    `list_checkpoints` and `Reader` read every manifest again.

    Args:
        root: folder of the checkpoints.
        by_name: whether to take step and attempt from the folder's name, if possible, without reading the manifest.

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
    """Return modification time, size and inode of a manifest, by which a change is noticed; None if missing."""
    try:
        seen = os.stat(manifest)
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_size, seen.st_ino


def read_or_say(folder: Path) -> tuple[Manifest | None, str]:
    """Return the manifest of a folder and ""; or None and a text that says what is wrong with the manifest."""
    try:
        return read_manifest(folder), ""
    except CheckpointError as error:
        return None, str(error)


def is_checkpoint(path: Location) -> bool:
    """Return True if a path is a folder with a valid manifest.

    The other files are not checked; `CheckpointStore.verify` does that.

    Args:
        path: path or URL of a folder.

    Example:
        >>> is_checkpoint("no/such/folder")
        False
    """
    return read_or_say(to_path(path))[0] is not None


def find_checkpoint(path: Location) -> Path:
    """Find a checkpoint by the path of its folder, with or without "-<attempt>" at the end.

    Args:
        path: path such as "runs/best-2"; or "runs/best" for the folder "runs/best-<attempt>" with the highest number.
            If there are such folders of different steps, ranked by a metric, the best one of the run that saved last is
            returned. A ".ckpt" at the end is ignored, for Lightning's users: "runs/last.ckpt" is the newest checkpoint
            in "runs" if no checkpoint has that name.

    Returns:
        A folder with a valid manifest.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint; the message says what is there.
        CorruptCheckpointError: all folders with that name are damaged; the error's `path` is the latest folder.
        CheckpointError: the folders with that name have scores of different metrics.

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
    """Choose one of the checkpoints whose names differ only in the attempt number.

    With a fixed `filename` such as "best", all checkpoints of a ModelCheckpoint have such names.
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
