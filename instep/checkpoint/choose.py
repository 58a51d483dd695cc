"""Which checkpoint a keyword means: pure rules over what a scan found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from instep.checkpoint.manifest import Manifest
from instep.errors import CheckpointError, SettingError


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint whose manifest could be read.

    Args:
        path: its folder.
        step: the global step it was saved at.
        attempt: counts the saves of that step; the later one wins.
        manifest: all that its manifest says.
    """

    path: Path
    step: int
    attempt: int
    manifest: Manifest

    @property
    def kind(self) -> str:
        """`"full"` for one that a run can continue from, `"weights"` for the model alone."""
        return str(self.manifest.info.get("kind", "full"))


def best_first(found: Sequence[CheckpointInfo], monitor: str | None = None) -> list[CheckpointInfo]:
    """By the monitored score, the best first and the older first among equals, as ModelCheckpoint ranks them.

    A checkpoint without a score, or with nan, is left out: it is never the best.

    Args:
        found: what a scan found, the newest first.
        monitor: the metric; None where all checkpoints were scored by the same one.

    Raises:
        CheckpointError: the scores are of different metrics and `monitor` does not choose one.

    Example:
        >>> best_first([])
        []
    """
    scored: list[tuple[float, CheckpointInfo]] = []
    rules: set[tuple[str, str]] = set()
    for info in reversed(found):
        about = info.manifest.info
        score, name, mode = about.get("score"), about.get("monitor"), about.get("mode", "min")
        if score is None or name is None or (monitor is not None and name != monitor) or math.isnan(float(score)):
            continue
        if mode not in ("min", "max"):
            raise CheckpointError(f"{info.path}: mode={mode!r} is neither 'min' nor 'max'", path=info.path)
        rules.add((str(name), mode))
        scored.append((float(score) if mode == "min" else -float(score), info))
    if len(rules) > 1:
        raise CheckpointError(
            f"these checkpoints were scored by different rules: {', '.join(f'{n} ({m})' for n, m in sorted(rules))}. "
            "Say which one is meant with monitor=..., or give the path."
        )
    return [info for _, info in sorted(scored, key=lambda pair: pair[0])]  # stable: oldest first among equals


def check_keyword(keyword: str) -> str:
    """The keyword, or SettingError where it is none of those known."""
    if keyword not in ("last", "best", "auto"):
        raise SettingError(
            f"{keyword!r} names no checkpoint. Use a path, 'last', 'best' or 'auto'.", field="ckpt_path", got=keyword
        )
    return keyword
