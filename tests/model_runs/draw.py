"""Draws runs. What instep is known to do differently is left out here, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import nan
from typing import Any

from hypothesis import strategies as st

from tests.model.checkpoints import Checkpoints
from tests.model.data import Combined, Data
from tests.model.logs import BATCHES_OF_TRAINING, BATCHES_OF_VALIDATION, EPOCHS, NOWHERE, Log
from tests.model.optimization import Manual, Optimization, Scheduler
from tests.model.run import Case, Settings
from tests.model.stopping import Stopping
from tests.model.triggers import TRIGGERS
from tests.model_runs.draw_data import FRACTIONS, all_parted, data, fitting, hooks, limits, logs_that_fit, sometimes
from tests.model_runs.processes import Process

METHODS = ("backward", "optimizer_zero_grad", "configure_gradient_clipping", "optimizer_step")
"""Methods of the module that are no hooks: an error of what they log comes at the end of the step, so none is drawn."""


KNOWN: dict[str, Callable[[Case], bool]] = {}
"""Defects that are open: their numbers in the list of defects, and which runs show them."""


def rarely(value: Any, otherwise: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw a value in three of four runs."""
    return sometimes(value, sometimes(value, otherwise))


@st.composite
def settings(draw: st.DrawFn, train: Data | Combined, val: Data | Combined | None, ranks: int = 1) -> Settings:
    max_epochs = draw(st.one_of(st.integers(1, 4), st.integers(0, 4), st.none()))
    max_steps = draw(st.integers(0, 12)) if max_epochs is None else draw(sometimes(-1, st.integers(0, 12)))
    most_epochs = 4 if max_epochs is None else max_epochs + draw(st.sampled_from((0, 0, 0, 1)))
    most_steps = 12 if max_steps == -1 else max_steps + draw(st.sampled_from((0, 0, 0, 1)))
    check_every = draw(sometimes(1, st.one_of(st.integers(1, 3), st.none())))
    train_limit = draw(sometimes(1.0, limits(train, ranks)))
    uneven = "join" if ranks > 1 and draw(st.booleans()) else "stop"
    known = [number for number in (train.length(ranks, uneven), train_limit) if isinstance(number, int)]
    longest = max(1, min(known, default=6)) if check_every is not None else 6
    number = st.integers(1, longest + draw(st.sampled_from((0, 0, 0, 1))))
    fraction = st.sampled_from(FRACTIONS if check_every is not None and known else (1.0,))
    interval = number if check_every is None and draw(st.integers(0, 9)) else st.one_of(number, fraction)
    return Settings(
        max_epochs=max_epochs,
        max_steps=max_steps,
        min_epochs=draw(sometimes(None, st.integers(0, most_epochs))),
        min_steps=draw(sometimes(None, st.integers(0, most_steps))),
        limit_train_batches=train_limit,
        limit_val_batches=draw(sometimes(1.0, limits(val, ranks))),
        overfit_batches=draw(sometimes(0.0, sometimes(0.0, sometimes(0.0, limits(train, ranks))))),
        val_check_interval=draw(interval),
        check_val_every_n_epoch=check_every,
        num_sanity_val_steps=draw(sometimes(0, st.integers(-1, 3))),
        accumulate_grad_batches=draw(sometimes(1, st.integers(2, 4))),
        gradient_clip_val=draw(rarely(None, st.sampled_from((0.1, 0.3, 0.6)))),
        gradient_clip_algorithm=draw(sometimes("norm", st.just("value"))),
        log_every_n_steps=draw(st.sampled_from((50, 0, 1, 2, 3))),
        uneven=uneven,
    )


@st.composite
def schedulers(draw: st.DrawFn, optimization: Optimization) -> Scheduler:
    plateau = optimization.manual is None and draw(st.booleans())  # by hand a module chooses the metric itself
    return Scheduler(
        interval=draw(st.sampled_from(("epoch", "step"))),
        frequency=draw(st.integers(1, 3)),
        plateau=plateau,
        strict=draw(st.booleans()),
        monitor=draw(st.sampled_from(("val", "val", "seen"))) if plateau else "val",
        optimizer=draw(st.integers(0, optimization.optimizers - 1)),
        name=draw(rarely(None, st.sampled_from(("rate", "other")))),
    )


@st.composite
def optimizations(draw: st.DrawFn, ranks: int) -> Optimization:
    optimizers = draw(st.sampled_from((1, 1, 2)))
    if draw(st.booleans()):
        return Optimization(
            optimizers,
            returns=draw(st.sampled_from(("loss", "dict"))),
            skips=draw(st.sampled_from((0, 0, 3, 2, 1))) if ranks == 1 else 0,
            calls_closure=draw(st.booleans()),
            lists=draw(st.booleans()),
        )
    often = st.sampled_from((1, 1, 2, 3, 0))
    manual = Manual(
        every=(draw(often), draw(often)),
        toggles=draw(st.booleans()),
        both=draw(st.booleans()),
        clip=draw(sometimes(None, st.sampled_from((0.1, 0.3)))),
        schedulers=draw(st.sampled_from((None, "batch", "epoch"))),
    )
    return Optimization(optimizers, manual, returns=draw(st.sampled_from(("loss", "dict"))), lists=draw(st.booleans()))


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """Draw a call of `self.log`: most are in the steps, and most can be made where they stand."""
    hook = draw(
        st.one_of(
            st.sampled_from(("training_step", "validation_step")),
            st.sampled_from(("training_step", "validation_step")),
            st.sampled_from((*BATCHES_OF_TRAINING, *BATCHES_OF_VALIDATION, *EPOCHS)),
            st.sampled_from((*BATCHES_OF_TRAINING, *BATCHES_OF_VALIDATION, *EPOCHS, *NOWHERE)),
        )
    )
    step = hook in ("training_step", "validation_step")
    validation = "validation" in hook
    on_step, on_epoch = st.sampled_from((None, True, False)), st.sampled_from((None, True, False))
    if hook in EPOCHS:
        on_step, on_epoch = rarely(None, on_step), rarely(None, on_epoch)
    if hook in METHODS:
        on_step = st.sampled_from((None, True))
    metric = draw(rarely(None, st.sampled_from(("mean", "sum", "max", "both")))) if step else None
    names = ("val_seen", "val_b", "val_c") if validation else ("seen", "b", "c")
    return Log(
        hook,
        draw(st.sampled_from(names)),
        draw(sometimes(None, on_step)),
        draw(sometimes(None, on_epoch)),
        reduce_fx=draw(st.sampled_from(("mean", "mean", "sum", "min", "max"))),
        metric=metric,
        every=draw(st.sampled_from((1, 1, 1, 2, 3))),
        nan_at=draw(rarely(None, st.integers(0, 3))) if hook not in EPOCHS else None,
        batch_size=draw(rarely(None, st.integers(1, 5))),
        logger=draw(rarely(None, st.booleans())),
        prog_bar=draw(rarely(False, st.just(True))),
        sync_dist=draw(rarely(None, st.booleans())),
    )


def together(calls: list[Log]) -> tuple[Log, ...]:
    """Leave out calls that log a name again: two hooks with one name are two values that hide each other."""
    names = dict[str, Log]()
    for call in calls:
        names.setdefault(f"pair {call.hook}" if call.metric == "both" else call.name, call)
    return tuple(names.values())


@st.composite
def checkpoints(draw: st.DrawFn, calls: tuple[Log, ...], ranks: int) -> Checkpoints:
    monitor = draw(st.one_of(st.none(), st.just("val"), st.just("val"), st.sampled_from(names_of(calls, ranks))))
    steps = draw(sometimes(None, st.integers(1, 4)))
    last = draw(st.sampled_from((None, None, None, True, True, True, False, False, "link")))
    plain = draw(st.booleans())
    return Checkpoints(
        monitor=monitor,
        mode=draw(st.sampled_from(("min", "max"))),
        save_top_k=draw(st.sampled_from((1, 1, -1, 0) if monitor is None else (1, 2, 3, -1, 0))),
        save_last=last,
        every_n_train_steps=steps,
        every_n_epochs=1 if steps is not None else draw(sometimes(1, st.integers(1, 3))),
        save_on_train_epoch_end=draw(sometimes(None, st.booleans())),
        filename=None if plain else draw(st.sampled_from((None, *FILENAMES))),
        auto_insert_metric_name=plain or draw(st.booleans()),
        save_weights_only=not plain and draw(st.booleans()),
    )


FILENAMES = ("best", "{epoch}-{val:.2f}", "{step}-{val}", "{epoch}", "at {step:03d}")


def names_of(calls: tuple[Log, ...], ranks: int) -> list[str]:
    """List names under which values of training show; "val" where there is none.

    On several ranks step values differ, and the model of a rank does not know those of the others.
    """
    names = {"val"}
    for call in calls if ranks == 1 else ():
        if (
            call.hook in BATCHES_OF_TRAINING
            and call.metric != "both"
            and not (call.on_step is False and not call.on_epoch)
        ):
            names |= (
                {call.name, f"{call.name}_step", f"{call.name}_epoch"}
                if call.on_epoch and call.on_step is not False
                else {call.name}
            )
    return sorted(names)


@st.composite
def stoppings(draw: st.DrawFn, calls: tuple[Log, ...], ranks: int) -> Stopping:
    thresholds = st.one_of(st.none(), st.none(), st.sampled_from((1.0, 2.0, 2.5, 4.0)))
    monitor = draw(st.one_of(st.just("val"), st.just("val"), st.sampled_from((*names_of(calls, ranks), "absent"))))
    return Stopping(
        monitor=monitor,
        mode=draw(st.sampled_from(("min", "max"))),
        patience=draw(st.integers(0, 3)),
        min_delta=draw(sometimes(0.0, st.sampled_from((0.5, 1.0)))),
        strict=monitor == "val" and draw(st.booleans()),
        check_finite=draw(st.booleans()),
        stopping_threshold=draw(thresholds),
        divergence_threshold=draw(thresholds),
        check_on_train_epoch_end=draw(sometimes(None, st.booleans())),
    )


@st.composite
def cases(draw: st.DrawFn, worlds: tuple[int, ...] = (1,)) -> Case:
    """Draw a run.

    Args:
        worlds: the numbers of ranks that may be drawn.
    """
    ranks = draw(st.sampled_from(worlds))
    train = draw(data(ranks=ranks))
    val = draw(st.one_of(data(first=100, ranks=ranks), data(first=100, ranks=ranks), st.none()))
    optimization = draw(sometimes(Optimization(), optimizations(ranks)))
    asked = fitting(draw(settings(train, val, ranks)), train)
    if asked.max_epochs is None and optimization.never_steps:  # without an end
        asked = replace(asked, max_epochs=2)
    if optimization.manual is not None and draw(st.integers(0, 9)):  # else it is refused
        asked = replace(asked, accumulate_grad_batches=1, gradient_clip_val=None)
    given = st.lists(schedulers(optimization), min_size=1, max_size=3).map(tuple)
    calls = draw(sometimes((), st.lists(logs(), min_size=1, max_size=4).map(together)))
    calls = logs_that_fit(calls, val)
    saver = draw(st.one_of(st.none(), checkpoints(calls, ranks), checkpoints(calls, ranks)))
    second = None if saver is None else draw(st.one_of(st.none(), st.none(), checkpoints(calls, ranks)))
    if second is not None:
        second = replace(second, folder=draw(st.sampled_from(("checkpoints", "second"))))
    case = Case(
        settings=asked,
        ranks=ranks,
        train=train,
        val=val,
        schedulers=draw(sometimes((), given)),
        stop_at=draw(st.one_of(st.none(), st.none(), st.integers(1, 10))),
        stop_on=draw(sometimes(None, st.integers(0, ranks - 1))) if ranks > 1 else None,
        values=draw(st.lists(st.sampled_from((1.0, 2.0, 3.0, 4.0, nan)), min_size=1, max_size=4).map(tuple)),
        logs=calls,
        rate_monitor=draw(rarely(None, st.sampled_from(("step", "epoch", "each")))),
        optimization=optimization,
        checkpoints=saver,
        second=second,
        stopping=draw(st.one_of(st.none(), st.none(), stoppings(calls, ranks))),
        watch=draw(st.sampled_from(("all", "callback", "few"))),
    )
    case = all_parted(case)
    return draw(hooks(case)) if draw(st.booleans()) else case


def allowed(case: Case) -> bool:
    """Return whether no defect that is known concerns a run."""
    return not any(shows(case) for shows in KNOWN.values())


def places() -> st.SearchStrategy[float | None]:
    """Draw where a run is broken off, as a part of its training."""
    return st.integers(0, 20).map(lambda number: number / 20)


def processes(worlds: tuple[int | None, ...] = (None,)) -> st.SearchStrategy[tuple[Process, ...]]:
    """Draw what happens one after another in one folder; nothing in half of the runs.

    Args:
        worlds: the numbers of ranks that a process may have which is not the first; None: as many as the one before.
    """
    ranks, kills, rank = st.sampled_from(worlds), st.booleans(), st.integers(0, 2)
    asks = st.sampled_from(((), (), ("best", "last")))
    starts = st.one_of(st.just("auto"), st.sampled_from((None, "last", "best")), st.integers(0, 3))
    trigger = sometimes(None, st.sampled_from(TRIGGERS))
    any_process = st.builds(
        Process, starts, st.one_of(st.none(), places()), kills, rank, ranks, st.integers(-2, 2), trigger, places(), asks
    )
    first = st.builds(
        Process,
        st.sampled_from(("auto", "auto", None)),
        st.one_of(st.none(), places()),
        kills,
        rank,
        trigger=trigger,
        asks_place=places(),
        asks=asks,
    )
    broken = st.builds(
        lambda place, kills, rank, ranks: (Process("auto", place, kills, rank), Process(ranks=ranks)),
        *(places(), kills, rank, ranks),
    )
    asked = st.builds(
        lambda name, place, rank, ranks: (
            Process(rank=rank, trigger=name, asks_place=place),
            Process(ranks=ranks),
        ),
        *(st.sampled_from(TRIGGERS), places(), rank, ranks),
    )
    more = st.lists(any_process, min_size=0, max_size=2).map(tuple)
    return st.one_of(
        st.just(()), st.just(()), broken, asked, st.tuples(first, more).map(lambda both: (both[0], *both[1]))
    )
