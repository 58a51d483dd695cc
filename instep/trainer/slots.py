"""The sums of one logged name: what is added up, how, and what it comes to over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from instep.errors import LogError


class Options(NamedTuple):
    """The arguments of one `self.log` call, less name, value and batch size; they must not change for a name."""

    prog_bar: bool = False
    logger: bool | None = None
    on_step: bool | None = None
    on_epoch: bool | None = None
    reduce_fx: str = "mean"
    sync_dist: bool | None = None
    add_dataloader_idx: bool = True
    rank_zero_only: bool = False


_REDUCTIONS: dict[Any, str] = {
    **{name: name for name in ("mean", "sum", "min", "max")},
    torch.mean: "mean",
    torch.sum: "sum",
    torch.min: "min",
    torch.max: "max",
}


def reduction(name: str, reduce_fx: Any) -> str:
    """The name of a `reduce_fx`, which may be given as `"mean"` or as `torch.mean`."""
    try:
        return _REDUCTIONS[reduce_fx]
    except (KeyError, TypeError):
        raise LogError(
            f"self.log({name!r}, reduce_fx={reduce_fx!r}): use 'mean', 'sum', 'min' or 'max'; for anything else "
            "log an object with update() and compute(), such as a torchmetrics Metric."
        ) from None


@dataclass
class Slot:
    """One name in one hook: its arguments, the values not yet added, and their sum in float64."""

    name: str
    options: Options
    on_step: bool
    on_epoch: bool
    op: str
    order: int
    hook: str
    suffix: str = ""
    metric: Any = None
    last: Any = None
    fresh: bool = False
    values: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    total: float | None = None
    weight: float = 0.0

    @property
    def full_name(self) -> str:
        return self.name + self.suffix

    @property
    def step_name(self) -> str:
        return f"{self.name}_step{self.suffix}" if self.on_epoch else self.full_name

    @property
    def epoch_name(self) -> str:
        return f"{self.name}_epoch{self.suffix}" if self.on_step else self.full_name

    def add(self, value: float, weight: float) -> None:
        amount = value * weight if self.op == "mean" else value
        self.total = amount if self.total is None else _COMBINE[self.op](self.total, amount)
        self.weight += weight

    def clear(self) -> None:
        self.values, self.weights, self.total, self.weight = [], [], None, 0.0


def _smaller(a: float, b: float) -> float:
    return a if a <= b or math.isnan(a) else b


def _larger(a: float, b: float) -> float:
    return a if a >= b or math.isnan(a) else b


_COMBINE: dict[str, Callable[[float, float], float]] = {
    "mean": lambda a, b: a + b,
    "sum": lambda a, b: a + b,
    "min": _smaller,
    "max": _larger,
}


def merge(parts: Sequence[tuple[str, float | None, float]]) -> float | None:
    """The value of several ranks' (reduction, total, weight); None where nobody has one."""
    op = parts[0][0]
    total: float | None = None
    for _, amount, _ in parts:
        if amount is not None:
            total = amount if total is None else _COMBINE[op](total, amount)
    return final(op, total, sum(weight for _, _, weight in parts))


def final(op: str, total: float | None, weight: float) -> float | None:
    """The value that a total and a weight come to."""
    if total is None:
        return None
    if op == "mean":
        return total / weight if weight else None
    return total


def merge_states(by_rank: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The states of several ranks' books as one: sums are added up, last values are the first rank's."""
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for state in by_rank:
        for slot in state:
            known = merged.setdefault((slot["hook"], slot["dataloader_idx"], slot["key"]), slot)
            if known is slot or slot["total"] is None:
                continue
            combine = _COMBINE[Options(*slot["options"]).reduce_fx]
            known["total"] = slot["total"] if known["total"] is None else combine(known["total"], slot["total"])
            known["weight"] += slot["weight"]
    return list(merged.values())
