"""Policies for which checkpoints to keep: they decide and touch no disk. `a | b` keeps what either keeps.

A policy judges records, the oldest first, and says which are to go. The newest is never among them, whatever the
policy: where all older ones turn out to be damaged, it is what a run goes on from.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from instep.errors import SettingError, one_of


@dataclass(frozen=True)
class Saved:
    """Facts about a checkpoint that a policy decides by.

    Args:
        key: tells it from the others; its path, for instance.
        step: the optimizer step it was saved at.
        score: the monitored metric; None where nobody measured it, which is not ranked at all. nan is ranked last.
    """

    key: str
    step: int
    score: float | None = None


class Retention(ABC):
    """A policy. Write your own by overriding `kept`, in a frozen dataclass.

    Example:
        >>> saved = [Saved("a", 10, 0.3), Saved("b", 20, 0.1), Saved("c", 30, 0.2), Saved("d", 40, 0.4)]
        >>> KeepBest(1).to_delete(saved)
        ['a', 'c']
        >>> (KeepBest(1) | KeepEvery(30)).to_delete(saved)
        ['a']
    """

    @abstractmethod
    def kept(self, saved: Sequence[Saved]) -> set[str]:
        """Return the keys of those that the policy wants.

        Args:
            saved: what there is, the oldest first.
        """

    def to_delete(self, saved: Sequence[Saved]) -> list[str]:
        """Return the keys of those to delete, the oldest first; never the newest.

        Args:
            saved: what there is and verifies, the oldest first.
        """
        kept = self.kept(saved)
        return [one.key for one in saved[:-1] if one.key not in kept]

    def takes(self, new: Saved, saved: Sequence[Saved]) -> bool:
        """Tell whether a new one would be wanted beside those there are, so that it is worth saving."""
        return new.key in self.kept([*saved, new])

    def __or__(self, other: Retention) -> Retention:
        return KeepAny((*_parts(self), *_parts(other)))


@dataclass(frozen=True)
class KeepAll(Retention):
    """Delete nothing."""

    def kept(self, saved: Sequence[Saved]) -> set[str]:
        return {one.key for one in saved}


@dataclass(frozen=True)
class KeepNewest(Retention):
    """Keep the newest ones.

    Args:
        count: how many.
    """

    count: int

    def __post_init__(self) -> None:
        _check(self, "count", self.count, 0)

    def kept(self, saved: Sequence[Saved]) -> set[str]:
        return {one.key for one in saved[max(len(saved) - self.count, 0) :]}


@dataclass(frozen=True)
class KeepEvery(Retention):
    """Keep the first one at or after every multiple of so many steps, for ever.

    Args:
        steps: optimizer steps.
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
    """Keep the best scores; of equal ones the older. nan is worse than anything, and fills an empty place only.

    Args:
        count: how many.
        mode: "min" or "max".
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
    """Keep what any of several policies keeps; made by `|`.

    Args:
        policies: two or more.
    """

    policies: tuple[Retention, ...]

    def kept(self, saved: Sequence[Saved]) -> set[str]:
        return {key for policy in self.policies for key in policy.kept(saved)}


def best_first(saved: Sequence[Saved], mode: str) -> list[Saved]:
    """Sort those with a score: the best first, nan last, and the older first among equals.

    Args:
        saved: the oldest first.
        mode: "min" or "max".
    """
    sign = 1.0 if mode == "min" else -1.0
    scored = [(one.score, one) for one in saved if one.score is not None]
    return [one for _, one in sorted(scored, key=lambda pair: _order(sign * pair[0]))]  # stable


def _order(value: float) -> tuple[bool, float]:
    return (True, 0.0) if math.isnan(value) else (False, value)


def modes(policy: Retention) -> set[str]:
    """Return the modes of `KeepBest` in a policy; none where no score matters."""
    return {part.mode for part in _parts(policy) if isinstance(part, KeepBest)}


def _parts(policy: Retention) -> tuple[Retention, ...]:
    return policy.policies if isinstance(policy, KeepAny) else (policy,)


def _check(policy: Retention, field: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        name = type(policy).__name__
        raise SettingError(f"{name}({field}={value!r}): an integer of at least {least}", field=field, got=value)
