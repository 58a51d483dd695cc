"""Counts which classes of values random runs had for each setting, and which pairs of them met in a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import combinations
from typing import Any

from tests.model.run import Case
from tests.model_runs.processes import Process, goes_through_processes

LISTED = 30
"""Pairs that were not drawn, in the summary."""

BY_HAND = ("list", "generator", "again", "batches")
DIVIDED = ("iterable", "list", "parted")
NEEDS = {
    "checkpoints.every_n_epochs": ("checkpoints.every_n_train_steps", ("None",)),
    "second.every_n_epochs": ("second.every_n_train_steps", ("None",)),
    "stop_on": ("stop_at", ("a number",)),
    "settings.gradient_clip_val": ("optimization.manual", ("None",)),
    "settings.accumulate_grad_batches": ("optimization.manual", ("None",)),
    "schedulers.plateau": ("optimization.manual", ("None",)),
    "optimization.skips": ("optimization.manual", ("None",)),
    "optimization.calls_closure": ("optimization.manual", ("None",)),
    "settings.limit_val_batches": ("val", ("there",)),
}
"""What a setting other than by default goes with: with another class of that one it has no meaning, or is refused."""
for stage in ("train", "val"):
    NEEDS |= {
        f"{stage}.shuffle": (f"{stage}.kind", ("map",)),
        f"{stage}.claims": (f"{stage}.kind", ("iterable", "again")),
        f"{stage}.drop_last": (f"{stage}.kind", ("map", "parted", "iterable")),
        f"{stage}.sizes": (f"{stage}.kind", BY_HAND),
        f"{stage}.parts": (f"{stage}.kind", DIVIDED),
        f"{stage}.fewer": ("source", ("hooks",)),
    }

SEVERAL = ("settings.uneven", "train.parts", "val.parts", "stop_on")
"""Settings that several ranks give a meaning to."""

PARTS = ("train", "val", "checkpoints", "second", "stopping", "settings", "optimization")


def class_of(value: Any) -> str:
    """Return the class of a value: numbers are as one thinks of them, none, one, several, a part, all."""
    if value is None or isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return str(value) if -1 <= value <= 1 else "several"
    if isinstance(value, float):
        return f"{value}" if value in (0.0, 1.0) else "a fraction"
    if isinstance(value, tuple):
        return "none" if not value else "one" if len(value) == 1 else "several"
    return type(value).__name__


def classes(case: Case, in_turn: tuple[Process, ...]) -> dict[str, str]:
    """Return the class of each setting of a run; of what it does not have nothing but that it is absent."""
    found = {"resume": resume_of(case, in_turn), "trigger": trigger_of(case, in_turn)}
    for field in fields(case):
        value = getattr(case, field.name)
        if field.name in PARTS:
            found[field.name] = "absent" if value is None else "there"
            if is_dataclass(value):
                for part in fields(value):
                    found[f"{field.name}.{part.name}"] = class_of(getattr(value, part.name))
        elif field.name in ("logs", "schedulers"):
            found[field.name] = class_of(value)
            for one in value:
                for part in fields(one):
                    found[f"{field.name}.{part.name}"] = class_of(getattr(one, part.name))
        elif field.name in ("stop_at", "stop_on"):
            found[field.name] = "None" if value is None else "a number"
        else:
            found[field.name] = str(value) if field.name == "ranks" else class_of(value)
    for name in ("train.samples", "val.samples", "train.first", "val.first", "settings", "train", "optimization"):
        found.pop(name, None)
    return found


def resume_of(case: Case, in_turn: tuple[Process, ...]) -> str:
    """Return how a run was broken off, and by how many ranks it was gone on with."""
    if not goes_through_processes(case, in_turn):
        return "none"
    broken = [one for one in in_turn if one.place is not None]
    how = "ended" if not broken else "killed" if broken[0].kills else "exception"
    moved = any(one.ranks not in (None, case.ranks) for one in in_turn)
    return f"{how}, {'other ranks' if moved else 'as many ranks'}"


def trigger_of(case: Case, in_turn: tuple[Process, ...]) -> str:
    """Return what the first process that is asked for something is asked for."""
    asked = [one.trigger for one in in_turn if one.trigger is not None]
    return asked[0] if asked and goes_through_processes(case, in_turn) else "none"


class Coverage:
    """Counts of classes, and of pairs of classes of two settings."""

    def __init__(self) -> None:
        self.single: Counter[tuple[str, str]] = Counter()
        self.pairs: Counter[tuple[tuple[str, str], tuple[str, str]]] = Counter()

    def count(self, case: Case, in_turn: tuple[Process, ...]) -> None:
        found = sorted(classes(case, in_turn).items())
        self.single.update(found)
        self.pairs.update(combinations(found, 2))

    def missing(self) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
        """Yield the pairs that the model admits and no run had."""
        for first, second in combinations(sorted(self.single), 2):
            if (first, second) not in self.pairs and admits(first, second):
                yield first, second

    def state(self) -> dict[str, Any]:
        return {
            "classes": [[*one, number] for one, number in self.single.items()],
            "pairs": [[*one, *other, number] for (one, other), number in self.pairs.items()],
        }

    def add(self, state: dict[str, Any]) -> None:
        """Add the counts of another process."""
        for setting, value, number in state["classes"]:
            self.single[setting, value] += number
        for setting, value, other, its, number in state["pairs"]:
            self.pairs[(setting, value), (other, its)] += number

    def lines(self) -> Iterator[str]:
        """Yield a summary: how often each class was drawn, and which pairs were not."""
        by_setting: dict[str, list[str]] = {}
        for (setting, value), number in sorted(self.single.items()):
            by_setting.setdefault(setting, []).append(f"{value} {number}")
        yield from (f"{setting}: {', '.join(values)}" for setting, values in by_setting.items())
        missing = list(self.missing())
        yield f"{len(self.pairs)} pairs of classes were drawn; {len(missing)} that may be were not"
        for (setting, value), (other, its) in missing[:LISTED]:
            yield f"  {setting} {value} with {other} {its}"


def admits(first: tuple[str, str], second: tuple[str, str]) -> bool:
    """Return whether a run can have both classes."""
    for (setting, value), (other, its) in ((first, second), (second, first)):
        if setting == other or (other == setting.split(".")[0] and its in ("absent", "none")):
            return False
        if setting.startswith("second") and value != "absent" and (other, its) == ("checkpoints", "absent"):
            return False
        default = value in ("None", "False", "0", "1", "1.0", "none", "stop", "strided")
        if not default and setting in NEEDS and NEEDS[setting][0] == other and its not in NEEDS[setting][1]:
            return False
        of_stage = other.startswith(setting.partition(".")[0] + ".")
        if setting.endswith(SEVERAL_LOADERS) and of_stage and not other.endswith(SEVERAL_LOADERS):
            return False  # a loader is alone, or one of several
        if ((setting, value), (other, its)) in NEVER:
            return False
        if setting in SEVERAL and other == "ranks" and its == "1" and not default:
            return False
        if setting in ("resume", "trigger") and value != "none" and (other, its) in RULED_OUT:
            return False
    return True


SEVERAL_LOADERS = (".mode", ".given", ".loaders")
"""Settings of several loaders together."""

NEVER = {
    (("settings.max_epochs", "None"), ("settings.max_steps", "-1")),  # a thousand epochs
    (("resume", "none"), ("trigger", "stop")),
    (("resume", "none"), ("trigger", "save")),
    (("resume", "none"), ("trigger", "validate")),
    (("resume", "none"), ("trigger", "preempted")),
    (("settings.check_val_every_n_epoch", "None"), ("settings.val_check_interval", "1.0")),  # refused
    (("settings.check_val_every_n_epoch", "None"), ("settings.val_check_interval", "a fraction")),
}
"""Pairs that have no meaning, or are too long."""

RULED_OUT = {("checkpoints", "absent")}
"""With this a run is not broken off: nothing is saved."""
