"""Policies that decide which checkpoints to keep; they do not access the disk.

A policy gets a list of `Saved` records, oldest first, and returns the keys of those to delete. `a | b` keeps all
checkpoints that policy `a` or policy `b` keeps. The newest checkpoint is never deleted, whatever the policy: if all
older checkpoints turn out to be damaged, a run can resume from it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from instep.errors import SettingError, one_of


@dataclass(frozen=True)
class Saved:
    """Facts about a checkpoint by which a retention policy decides.

    Args:
        key: unique text for the checkpoint, such as its path.
        step: optimizer step of the save.
        score: value of the monitored metric. None: not measured, so that the checkpoint is not ranked. nan: ranked
            last.

    Example:
        >>> Saved("runs/best-1", step=100, score=0.25)
        Saved(key='runs/best-1', step=100, score=0.25)
    """

    key: str
    step: int
    score: float | None = None


class Retention(ABC):
    """Base class of policies that decide which checkpoints to keep.

    To write your own, override `kept` in a frozen dataclass.

    Example:
        >>> saved = [Saved("a", 10, 0.3), Saved("b", 20, 0.1), Saved("c", 30, 0.2), Saved("d", 40, 0.4)]
        >>> KeepBest(1).to_delete(saved)
        ['a', 'c']
        >>> (KeepBest(1) | KeepEvery(30)).to_delete(saved)
        ['a']
    """

    @abstractmethod
    def kept(self, saved: Sequence[Saved]) -> set[str]:
        """Return the keys of the checkpoints that the policy wants to keep.

        Args:
            saved: all checkpoints, oldest first.
        """

    def to_delete(self, saved: Sequence[Saved]) -> list[str]:
        """Return the keys of the checkpoints to delete, oldest first; the newest checkpoint is never among them.

        Args:
            saved: all checkpoints, oldest first.
        """
        kept = self.kept(saved)
        return [one.key for one in saved[:-1] if one.key not in kept]

    def takes(self, new: Saved, saved: Sequence[Saved]) -> bool:
        """Return True if the policy would keep a new checkpoint beside the existing ones; if not, a save is useless."""
        return new.key in self.kept([*saved, new])

    def __or__(self, other: Retention) -> Retention:
        return KeepAny((*_parts(self), *_parts(other)))


@dataclass(frozen=True)
class KeepAll(Retention):
    """Policy that deletes nothing.

    Example:
        >>> KeepAll().to_delete([Saved("a", 10), Saved("b", 20)])
        []
    """

    def kept(self, saved: Sequence[Saved]) -> set[str]:
        return {one.key for one in saved}


@dataclass(frozen=True)
class KeepNewest(Retention):
    """Policy that keeps the newest checkpoints.

    Args:
        count: number of checkpoints to keep.

    Example:
        >>> KeepNewest(2).to_delete([Saved("a", 10), Saved("b", 20), Saved("c", 30)])
        ['a']
    """

    count: int

    def __post_init__(self) -> None:
        _check(self, "count", self.count, 0)

    def kept(self, saved: Sequence[Saved]) -> set[str]:
        return {one.key for one in saved[max(len(saved) - self.count, 0) :]}


@dataclass(frozen=True)
class KeepEvery(Retention):
    """Policy that keeps forever, for every multiple of `steps`, the first checkpoint at or after that step.

    Args:
        steps: number of optimizer steps.

    Example:
        >>> KeepEvery(20).to_delete([Saved("a", 10), Saved("b", 20), Saved("c", 30), Saved("d", 40)])
        ['a', 'c']
    """

    steps: int

    def __post_init__(self) -> None:
        _check(self, "steps", self.steps, 1)

    def kept(self, saved: Sequence[Saved]) -> set[str]:
        first: dict[int, str] = {}
        for one in sorted(saved, key=lambda one: one.step):
            first.setdefault(one.step // self.steps, one.key)
        return {key for multiple, key in first.items() if multiple}


@dataclass(frozen=True)
class KeepBest(Retention):
    """Policy that keeps the checkpoints with the best scores. If scores are equal, the older checkpoint is better.

    A score of nan is worse than any number: a checkpoint with it is kept only if there are not enough others.

    Args:
        count: number of checkpoints to keep.
        mode: "min" if a lower score is better, "max" if a higher one is.

    Example:
        >>> saved = [Saved("a", 10, 0.9), Saved("b", 20, 0.4), Saved("c", 30, 0.6)]
        >>> KeepBest(1, mode="max").to_delete(saved)  # "c" is the newest, which is never deleted
        ['b']
    """

    count: int
    mode: str = "min"

    def __post_init__(self) -> None:
        _check(self, "count", self.count, 0)
        if self.mode not in ("min", "max"):
            raise one_of("mode", self.mode, ("min", "max"))

    def kept(self, saved: Sequence[Saved]) -> set[str]:
        return {one.key for one in best_first(saved, self.mode)[: self.count]}


@dataclass(frozen=True)
class KeepAny(Retention):
    """Policy that keeps every checkpoint that at least one of several policies keeps. `a | b` makes such a policy.

    Args:
        policies: two or more policies.

    Example:
        >>> saved = [Saved("a", 10, 0.1), Saved("b", 20, 0.3), Saved("c", 30, 0.2)]
        >>> (KeepBest(1) | KeepNewest(1)).to_delete(saved)
        ['b']
        >>> KeepBest(1) | KeepNewest(1)
        KeepAny(policies=(KeepBest(count=1, mode='min'), KeepNewest(count=1)))
    """

    policies: tuple[Retention, ...]

    def kept(self, saved: Sequence[Saved]) -> set[str]:
        return {key for policy in self.policies for key in policy.kept(saved)}


def best_first(saved: Sequence[Saved], mode: str) -> list[Saved]:
    """Return the checkpoints with a score, sorted: best first, nan last, and the older first if scores are equal.

    Args:
        saved: all checkpoints, oldest first.
        mode: "min" or "max".
    """
    sign = 1.0 if mode == "min" else -1.0
    scored = [(one.score, one) for one in saved if one.score is not None]
    # The sort is stable, so that of equal scores the older checkpoint stays first.
    return [one for _, one in sorted(scored, key=lambda pair: _order(sign * pair[0]))]


def _order(value: float) -> tuple[bool, float]:
    return (True, 0.0) if math.isnan(value) else (False, value)


def modes(policy: Retention) -> set[str]:
    """Return the modes ("min", "max") of all `KeepBest` policies in a policy; empty if it does not use scores."""
    return {part.mode for part in _parts(policy) if isinstance(part, KeepBest)}


def _parts(policy: Retention) -> tuple[Retention, ...]:
    return policy.policies if isinstance(policy, KeepAny) else (policy,)


def _check(policy: Retention, field: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        name = type(policy).__name__
        raise SettingError(f"{name}({field}={value!r}): an integer of at least {least}", field=field, got=value)
