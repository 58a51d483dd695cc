"""Runs cases with PyTorch Lightning and sorts what differs from the model: python -m tests.model_runs.on_lightning.

It wants a Python that has lightning, torch and hypothesis. instep is not needed. Where the model with all of
`lightning_rules.RULES` sees what Lightning does, the differences are known: a rule counts for a run where the run is
another with this rule alone, or without this rule alone. What the rules do not explain is printed with a script.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.model.data import Combined, Order
from tests.model.optimization import Optimization
from tests.model.run import Case
from tests.model.trace import Event
from tests.model_runs import lightning_rules
from tests.model_runs.draw import cases
from tests.model_runs.lightning_record import Endless, Recorded, record
from tests.model_runs.lightning_rules import RULES
from tests.model_runs.script import script_for_lightning

FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A file system in memory, if there is one."""


def for_lightning(case: Case) -> Case:
    """Return a case of what is compared here.

    Left out are other data than samples, streams and lists, loaders of hooks, manual optimization and
    several optimizers, metric objects, values that are logged outside of the two steps or in the steps of a validation,
    and monitors of rates.
    """
    steps = [call for call in case.logs if call.metric is None and call.hook in ("training_step", "validation_step")]
    calls = [replace(call, nan_at=None) for call in steps if call.hook == "training_step" or not call.on_step]
    schedulers = tuple(replace(one, optimizer=0, name=None) for one in case.schedulers)
    val = None if case.val is None else plain(case.val, shuffles=False)
    together = [data for data in (case.train, val) if isinstance(data, Combined)]
    calls = [call for call in calls if call.batch_size is not None or not together]  # its number of samples is unclear
    case = replace(case, train=plain(case.train), val=val, source="fit", watch="all", logs=tuple(calls))
    settings = replace(case.settings, reload_dataloaders_every_n_epochs=0)
    return replace(case, settings=settings, schedulers=schedulers, rate_monitor=None, optimization=Optimization())


def plain(data: Any, shuffles: bool = True) -> Any:
    """Return a loader, or several, without what is not compared. Several are not shuffled, and know their length."""
    if isinstance(data, Combined):
        parts = tuple(replace(plain(one, shuffles=False), parts="strided") for one in data.loaders)
        return replace(data, loaders=tuple(replace(one, kind="map", claims=None) for one in parts))
    one = data if shuffles else replace(data, shuffle=False)
    kind = one.kind if one.kind in ("map", "iterable") else "list"
    claims = one.claims if kind == "iterable" else None
    return replace(one, kind=kind, claims=claims, sizes=(), workers=0, fewer=0)


def kinds_of(case: Case) -> tuple[set[str], str | None]:
    """Run a case with Lightning; return which rules of Lightning are seen, and a difference that no rule explains."""
    folder = tempfile.mkdtemp(dir=FAST)
    try:
        seen = record(case, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seen.events = lightning_rules.without_metrics_after_an_error(seen.events)
    order = order_of(case, seen)
    every = frozenset(RULES)
    ours, refused = lightning_rules.run(case, frozenset(), order)
    theirs, ended = lightning_rules.run(case, every, order)
    if isinstance(seen.error, Endless):
        return {"empty epoch"}, None if ended is not None and ended.kind == "Endless" else "Lightning never ends"
    if refused is not None and refused.early:
        return (set() if ends_early(seen.events) else {f"instep refuses: {refused}"}), None
    if ends_early(seen.events) and ends_early(ours):
        return set(), None
    if ends_early(seen.events):
        text = " ".join(str(seen.error).split())
        known = next((name for name, part in lightning_rules.REFUSED.items() if part in text), None)
        return {f"Lightning refuses: {known}"}, None if known else f"Lightning refuses: {text}"
    found = first_difference(theirs, seen.events)
    if found is not None:
        return set(), found
    kinds = {"order of shuffled data"} if any(len(order) > 1 for order in seen.orders) else set()
    for rule in RULES:
        alone = lightning_rules.run(case, frozenset((rule,)), order)[0]
        without = lightning_rules.run(case, every - {rule}, order)[0]
        if alone != ours or without != theirs:
            kinds.add(rule)
    return kinds, None


def order_of(case: Case, seen: Recorded) -> Order | None:
    """Return the order that Lightning has taken shuffled data in."""
    if not seen.orders:
        return None
    train: Any = case.train  # not combined
    return lambda epoch: seen.orders[epoch] if epoch < len(seen.orders) else train.in_sequence()


def ends_early(events: list[Event]) -> bool:
    """Return whether an error ends the run before its first training step."""
    return events[-1].name == "error" and not any(event.name == "training_step" for event in events)


def first_difference(theirs: list[Event], seen: list[Event]) -> str | None:
    """Return the first event that the rules do not explain."""
    for number, (rule, event) in enumerate(zip(theirs, seen, strict=False)):
        if rule != event:
            before = "".join(f"  {one}\n" for one in theirs[max(0, number - 3) : number])
            return f"event {number} differs, after\n{before}by the rules: {rule}\nLightning:    {event}"
    if len(theirs) != len(seen):
        number = min(len(theirs), len(seen))
        who = "the rules go on" if len(theirs) > number else "Lightning goes on"
        return f"{who}: {(theirs if len(theirs) > number else seen)[number]}"
    return None


def main() -> int:
    """Run as many cases as were asked for, and print how many runs differ by each kind."""
    parser = argparse.ArgumentParser(prog="python -m tests.model_runs.on_lightning", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--show", type=int, default=3, help="how many differences that are not known to print")
    given_ = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    unknown: list[tuple[Case, str]] = []
    alike = runs = 0
    began_s = time.monotonic()

    @seed(given_.seed)
    @settings(
        max_examples=given_.count,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )
    @given(cases())
    def compare(case: Case) -> None:
        nonlocal alike, runs
        case = for_lightning(case)
        kinds, found = kinds_of(case)
        runs += 1
        counts.update(kinds)
        alike += not kinds and found is None
        if found is not None:
            unknown.append((case, found))

    compare()
    for case, found in sorted(unknown, key=lambda pair: len(repr(pair[0])))[: given_.show]:
        print(f"{found}\n{script_for_lightning(case)}")
    for kind, number in counts.most_common():
        print(f"{number:5}  {kind}" + (f": {RULES[kind]}" if kind in RULES else ""))
    print(f"seed {given_.seed}: {runs} runs in {time.monotonic() - began_s:.0f} s, {alike} as instep's model, ", end="")
    print(f"{len(unknown)} with a difference that is not known")
    return int(bool(unknown))


if __name__ == "__main__":
    sys.exit(main())
