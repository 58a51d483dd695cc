"""Draws data: loaders of all kinds, alone and together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.model.data import Combined, Data
from tests.model.logs import Log
from tests.model.run import Case, Settings

FRACTIONS = (0.1, 0.25, 0.34, 0.5, 0.75, 1.0)
BY_DATALOADER = ("map", "iterable", "batches")


def sometimes(value: Any, otherwise: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw a value in half of the runs, so that not all settings are drawn at once."""
    return st.one_of(st.just(value), otherwise)


def limits(data: Data | Combined | None, ranks: int = 1) -> st.SearchStrategy[int | float]:
    """Draw a limit of batches. Most of them fit the data; what is refused is drawn too."""
    length = None if data is None else data.length(ranks, "join")
    numbers = st.one_of(st.integers(1, 5), st.integers(1, 5), st.integers(0, 5))
    if length is None:
        return numbers if data is None else sometimes(1.0, numbers)
    fitting = [fraction for fraction in FRACTIONS if int(length * fraction)]
    return st.one_of(numbers, st.sampled_from(fitting or FRACTIONS), st.sampled_from(fitting or FRACTIONS))


@st.composite
def loaders(
    draw: st.DrawFn, first: int = 0, ranks: int = 1, together: bool = False, kinds: tuple[str, ...] = ()
) -> Data:
    """Draw a loader.

    Args:
        first: the number of its first sample.
        ranks: how many there are. Data that counts in itself and generators are drawn for one, where it is said what
            each rank has read.
        together: it is one of several. A list in a collection of loaders is a collection of loaders, and data that goes
            on is not drawn there.
        kinds: those to choose from; none for all.
    """
    own = () if together else ("list", "list", "again", "generator") if ranks == 1 else ("list", "list", "parted")
    kind = draw(st.sampled_from(kinds or ("map", "map", "iterable", "iterable", "batches", *own)))
    least = int(kind in ("list", "parted"))  # [] is no loader
    samples = draw(st.one_of(st.integers(1, 11), st.integers(1, 11), st.integers(least, 11)))
    size = draw(st.integers(1, 4))
    sizes: tuple[int, ...] = ()
    if kind not in ("map", "iterable") and ranks == 1:
        sizes = draw(sometimes((), st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)))
    drop_last = kind in ("map", "parted", "iterable") and draw(st.booleans())
    claims = None
    if kind == "iterable":
        claims = draw(st.one_of(st.none(), st.just(samples), st.integers(1, 14)))
    elif kind == "again":
        claims = draw(st.sampled_from((None, samples)))
    shuffle = kind == "map" and samples > 0 and draw(st.booleans())
    parts = "strided"
    if ranks > 1 and kind == "iterable":
        parts = draw(st.sampled_from(("strided", "strided", "same", "chunks", "first", "last")))
        claims = claims if parts == "same" else None  # whose it is of is known in the first pass only
    elif ranks > 1 and kind in ("list", "parted"):  # [] is no loader, so each rank has a sample
        samples = max(samples, ranks + 1)
        parts = draw(
            st.sampled_from(("same", "strided") if samples == 4 and ranks == 3 else ("same", "strided", "chunks"))
        )
    # A process for each worker takes time, so few runs have one.
    workers = int(kind in BY_DATALOADER and ranks == 1 and draw(st.integers(0, 79)) == 79)
    return Data(samples, size, drop_last, shuffle, kind, claims, first, parts, sizes, workers)


def plain_loaders(first: int = 0, ranks: int = 1) -> st.SearchStrategy[Data]:
    """Draw a loader of the kinds that the Accelerator's scripts have."""
    drawn = loaders(first, ranks, kinds=("map", "iterable", "list"))
    return drawn.map(lambda data: replace(data, sizes=(), workers=0, shuffle=data.shuffle and not first))


@st.composite
def data(draw: st.DrawFn, first: int = 0, ranks: int = 1) -> Data | Combined:
    """Draw the data of a stage: a loader, or several. Those of the training, and those together, are for one rank."""
    several = draw(st.integers(0, 3)) == 3 and (ranks == 1 or first > 0)
    if not several:
        return draw(loaders(first, ranks))
    count = draw(st.integers(1, 3))
    given = draw(st.sampled_from(("list", "dict", "combined") if ranks == 1 else ("list", "dict")))
    modes = ("min_size", "max_size", "max_size_cycle", "min_size", "max_size", "max_size_cycle", "sequential")
    mode = draw(st.sampled_from(modes)) if given == "combined" else "max_size_cycle"
    parts = tuple(draw(loaders(first + 12 * number, ranks, together=True)) for number in range(count))
    return Combined(parts, mode, given)


@st.composite
def hooks(draw: st.DrawFn, case: Case) -> Case:
    """Draw who gives the loaders, and how often they are asked for again."""
    source = draw(st.sampled_from(("fit", "fit", "fit", "hooks", "hooks", "both")))
    every = draw(st.sampled_from((0, 1, 2, 3) if source == "hooks" else (0, 0, 0, 0, 0, 1)))
    parts = (*case.train.loaders, *(() if case.val is None else case.val.loaders))
    if source != "hooks" and any(one.kind == "generator" and not one.samples for one in parts):
        every = 0  # whether a generator was empty or used up is not to be told later
    own = case.ranks > 1 and any(one.kind in ("list", "parted") for one in parts)  # of each rank: [] is no loader
    fewer = draw(st.integers(0, 2)) if source == "hooks" and not own else 0
    settings = replace(case.settings, reload_dataloaders_every_n_epochs=every)
    train, val = with_fewer(case.train, fewer), None if case.val is None else with_fewer(case.val, fewer)
    return replace(case, settings=settings, source=source, train=train, val=val)


def all_parted(case: Case) -> Case:
    """Where data of a stage is parted, instep divides no other either: each rank reads all of it."""
    parts = (*case.train.loaders, *(() if case.val is None else case.val.loaders))
    if not any(one.kind == "parted" for one in parts):
        return case
    train, val = whole_on_each_rank(case.train), None if case.val is None else whole_on_each_rank(case.val)
    return replace(case, train=train, val=val)


def whole_on_each_rank(data: Data | Combined) -> Any:
    if isinstance(data, Combined):
        return replace(data, loaders=tuple(whole_on_each_rank(one) for one in data.loaders))
    if data.kind not in ("map", "batches") and not (data.kind == "iterable" and data.parts == "same"):
        return data
    return replace(data, kind="parted", parts="same", shuffle=False, claims=None)


def with_fewer(data: Data | Combined, fewer: int) -> Data | Combined:
    if isinstance(data, Data):
        return replace(data, fewer=fewer)
    return replace(data, loaders=tuple(replace(one, fewer=fewer) for one in data.loaders))


def fitting(settings: Settings, train: Data | Combined) -> Settings:
    """Take the limits off data with a length that goes on where it was left: its second epoch would be too short."""
    if isinstance(train, Data) and train.kind == "again" and train.claims is not None:
        return replace(settings, limit_train_batches=1.0, overfit_batches=0.0)
    return settings


def can_go_on(case: Case) -> bool:
    """Return whether the data of a run can be resumed. A generator cannot: a new process reads it from its start."""
    parts = (*case.train.loaders, *(() if case.val is None else case.val.loaders))
    return not any(one.kind == "generator" for one in parts)


def logs_that_fit(calls: tuple[Log, ...], val: Data | Combined | None) -> tuple[Log, ...]:
    """Leave out objects of torchmetrics where a validation has several loaders: each needs an object of its own."""
    several = val is not None and len(val.loaders) > 1
    return tuple(call for call in calls if not several or call.metric is None or "validation" not in call.hook)


def can_move(case: Case) -> bool:
    """Return whether other ranks may go on with a run: where the model says how its data is dealt to them.

    That is samples, streams and lists, of which `fit` got the loaders. [] is no loader, so a list is one on any rank.
    """
    stages = (case.train, *(() if case.val is None else (case.val,)))
    plain = all(isinstance(stage, Data) and stage.kind in ("map", "iterable", "list") for stage in stages)
    plain = plain and all(
        one.claims is None for stage in stages for one in stage.loaders
    )  # of whom is unknown at first
    worlds = [(rank, ranks) for ranks in (1, 2, 3) for rank in range(ranks)]
    lists = [one for stage in stages for one in stage.loaders if one.kind == "list"]
    plain = plain and all(one.part(rank, ranks) for one in lists for rank, ranks in worlds)
    return plain and case.source != "hooks" and case.train.loaders[0].workers == 0
