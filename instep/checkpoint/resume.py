"""Parts of a checkpoint that a run takes up, and the report of what came of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from instep.errors import SettingError

_SWITCHES = ("optimizer", "schedulers", "position", "callbacks", "loggers")
_MOST_NAMES = 8  # that a report says of a kind


@dataclass(frozen=True)
class Resume:
    """Parts of a checkpoint that are taken up beside the weights; by default all of them, so that the run goes on.

    Args:
        optimizer: the optimizers' states, and the loss scale.
        schedulers: the learning-rate schedules. Without them the rates start as configured; without the optimizer the
            rates are the schedule's.
        position: step and epoch, the place in the data, logged sums, random generators, the seed. Without it the run
            counts from 0, as a new one with a run folder of its own.
        callbacks: the callbacks' states.
        loggers: the loggers' runs, which are appended to; None as `position`.
        strict: whether weights and optimizer states must fit exactly. False loads what fits by name and shape; None
            is the module's `strict_loading` for the weights, and True for the optimizers.
        lr: another learning rate, as it would be given to the optimizer (to OneCycleLR as `max_lr`): for all parameter
            groups, or one for each of them. Schedules go on where they are, as if they had begun with it.

    Raises:
        SettingError: a value is of the wrong kind, or two contradict each other.

    Example:
        >>> trainer.fit(model, loader, ckpt_path="last", resume=Resume(lr=1e-4))  # doctest: +SKIP
        >>> trainer.fit(model, loader, ckpt_path="base.safetensors", resume=Resume.weights())  # doctest: +SKIP
        >>> Resume(optimizer=False).parts
        ('weights', 'schedulers', 'position', 'callbacks', 'loggers')
    """

    optimizer: bool = True
    schedulers: bool = True
    position: bool = True
    callbacks: bool = True
    loggers: bool | None = None
    strict: bool | None = None
    lr: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        for name in (*_SWITCHES, "strict"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name in ("loggers", "strict")):
                raise SettingError(f"Resume({name}={value!r}): True or False", field=name, got=value)
        if self.loggers is None:
            object.__setattr__(self, "loggers", self.position)
        if self.loggers and not self.position:
            raise SettingError(
                "Resume(position=False, loggers=True) would log the first steps a second time below the last ones of "
                "the earlier run. Leave loggers out, or take up the position too.",
                field="loggers",
            )
        if self.lr is not None:
            rates = [self.lr] if isinstance(self.lr, float | int) else list(self.lr)
            if not rates or not all(isinstance(rate, float | int) and 0 <= rate < math.inf for rate in rates):
                raise SettingError(f"Resume(lr={self.lr!r}): a number, or one for each parameter group", field="lr")
            if not isinstance(self.lr, float | int):
                object.__setattr__(self, "lr", tuple(rates))

    @classmethod
    def weights(cls, strict: bool | None = None) -> Resume:
        """Restore the weights alone: a new run begins with them. Files of weights are enough.

        Args:
            strict: as above.
        """
        return cls(optimizer=False, schedulers=False, position=False, callbacks=False, strict=strict)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of what is taken up."""
        return ("weights", *(name for name in _SWITCHES if getattr(self, name)))

    @property
    def weights_only(self) -> bool:
        """Whether nothing but the weights is taken up."""
        return self.parts == ("weights",)

    def record(self) -> dict[str, Any]:
        """JSON values by which a checkpoint says how its run has begun."""
        return asdict(self)


@dataclass
class ResumeReport:
    """Report of what a run restored of a checkpoint.

    Args:
        path: the checkpoint.
        parts: what was asked for and loaded: "weights", "optimizer", "schedulers", "position", "callbacks", "loggers".
        loaded: how many entries of the module's state dict were loaded.
        missing: names in the module that the checkpoint does not have; they are as initialised.
        unexpected: names in the checkpoint that the module does not have.
        other_shape: name -> shape in the checkpoint and in the module, of what was left out for it.
        left_out: what else did not fit, of optimizers, schedulers and callbacks; for people.
    """

    path: Path
    parts: tuple[str, ...]
    loaded: int = 0
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    other_shape: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all parts were loaded, and nothing was left out."""
        left = (*self.missing, *self.unexpected, *self.other_shape, *self.left_out)
        return not left and set(self.parts) == {"weights", *_SWITCHES}

    def __str__(self) -> str:
        not_taken = [name for name in _SWITCHES if name not in self.parts] if self.parts[1:] else []
        lines = [
            f"Took up {', '.join(self.parts)} of {self.path}" + (f"; not {', '.join(not_taken)}" * bool(not_taken))
        ]
        total = self.loaded + len(self.missing) + len(self.other_shape)
        lines.append(f"  weights: {self.loaded} of {total} entries")
        shapes = [f"{name} {there} there, {here} here" for name, (there, here) in self.other_shape.items()]
        for what, names in (
            ("not in the checkpoint", self.missing),
            ("only in the checkpoint", self.unexpected),
            ("of another shape, left as initialised", shapes),
            ("left out", self.left_out),
        ):
            if names:
                lines.append(f"  {what} ({len(names)}): {_few(names)}")
        return "\n".join(lines)


def compare(
    report: ResumeReport, saved: Mapping[str, Any], own: Mapping[str, Sequence[int] | None], prefix: str = ""
) -> dict[str, Any]:
    """Note in a report how two state dicts differ.

    Args:
        report: gets what is missing, unexpected and of another shape.
        saved: the checkpoint's.
        own: the shapes of the module's, under the same names; None for what has none.
        prefix: what names in the report begin with.

    Returns:
        The part of `saved` that fits.
    """
    fits: dict[str, Any] = {}
    for name, shape in own.items():
        there = getattr(saved.get(name), "shape", None)
        if name not in saved:
            report.missing.append(prefix + name)
        elif shape is not None and there is not None and list(shape) != list(there):
            report.other_shape[prefix + name] = (list(there), list(shape))
        else:
            fits[name] = saved[name]
    report.unexpected.extend(prefix + name for name in saved if name not in own)
    report.loaded += len(fits)
    return fits


def _few(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f", and {more} more" if more > 0 else "")
