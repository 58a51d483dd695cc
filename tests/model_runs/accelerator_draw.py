"""Draws scripts of the Accelerator. What instep is known to do differently is left out here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from tests.model.accelerator import WAYS, Loop, Start
from tests.model.data import Data
from tests.model_runs.draw_data import plain_loaders, sometimes


def trains_after_its_pass(case: Loop) -> bool:
    """Return whether a script trains only after its passes have ended, and sees the restored place before it trains.

    It reads ahead in epochs of one batch. instep does not know then which loader is trained on: so its states do not
    keep the place in it, each look costs an epoch, and a wrong skip is not warned of.
    """
    if not case.ahead or len(case.train.batches(case.train.in_sequence())) != 1:
        return False
    return any(
        set(start.before) - {"save"} or (start.unaware and start.way == "skip_first_batches")
        for start in case.starts[1:]
    )


KNOWN: dict[str, Callable[[Loop], bool]] = {
    "an only batch that is read ahead": trains_after_its_pass,
}
"""Defects that are open: their names, and which scripts show them."""

LOOKS = ("peek", "evaluate", "evaluate_rest", "save")


@st.composite
def starts(draw: st.DrawFn, restore_position: bool | str, ranks: tuple[int, ...]) -> tuple[Start, ...]:
    ways = WAYS
    if restore_position is True:  # the script must not skip by itself
        ways = ("nothing", "range", "skip_first_batches")
    kills = draw(st.lists(st.integers(1, 9), min_size=0, max_size=3))
    all_starts: list[Start] = []
    for batches in [*kills, None]:
        way = draw(st.sampled_from(ways))
        all_starts.append(
            Start(
                batches,
                load=draw(sometimes(None, sometimes(None, st.integers(0, 4)))),
                way=way,
                before=tuple(draw(sometimes([], st.lists(st.sampled_from(LOOKS), max_size=3)))),
                unaware=way not in ("range", "count") and draw(st.booleans()),
                ranks=draw(st.sampled_from(ranks)),
            )
        )
    return tuple(all_starts)


@st.composite
def loops(draw: st.DrawFn, worlds: tuple[int, ...] = (1,)) -> Loop:
    """Draw a script.

    Args:
        worlds: the numbers of ranks that may be drawn.
    """
    ranks = draw(st.sampled_from(worlds))
    # Ranks that end by themselves save and evaluate together with no other.
    even = ranks == 1 or draw(sometimes(True, st.just(False)))
    accumulate = draw(sometimes(1, st.integers(2, 4))) if even else 1
    by_hand = ranks == 1 and draw(st.sampled_from((False, False, False, True)))  # a batch that comes again counts there
    scheduler = draw(st.sampled_from((None, "halves", "cycle", "steps", "plateau")))
    steps_by_epoch = scheduler is not None and draw(st.sampled_from((False, False, True)))
    # torch refuses more steps than a cycle has.
    with_optimizer = scheduler in (None, "cycle") or draw(sometimes(True, st.booleans()))
    # The number of ranks may change for data whose place is known in samples, and scripts that skip no batch by number.
    changes = even and ranks > 1 and draw(st.sampled_from((False, False, True)))
    split = even and ranks > 1 and not changes and draw(st.sampled_from((False, False, True)))
    train, val = draw(rank_loaders(ranks, split)), draw(sometimes(None, rank_loaders(ranks, split, first=100)))
    if changes or not even:
        train = replace(train, kind="map", claims=None)
    # A window that goes on in the next epoch is lost where a state is saved within it.
    syncs = by_hand or changes or draw(sometimes(True, st.just(False)))
    # A script that reads ahead uses another batch than the loader's: there are no windows then, and one rank.
    ahead = ranks == 1 and accumulate == 1 and syncs and not by_hand and draw(sometimes(False, st.just(True)))
    restore_position = True if ahead else draw(st.sampled_from(("auto", "auto", "auto", True, changes)))
    save_at_steps = changes or not syncs or draw(sometimes(True, st.just(by_hand)))
    save_every = draw(st.integers(1, 4)) if changes else draw(st.one_of(st.integers(1, 4), st.none()))
    sets_epoch = not changes and draw(sometimes(False, st.booleans()))
    dispatch = None if split else draw(st.sampled_from((False, True)))
    begun = draw(starts(restore_position, (1, ranks) if changes else (ranks,)))
    if not even:  # a rank that is killed would leave the others waiting, and the counter is rank 0's: others have fewer
        ways = {"count": "range"}
        begun = tuple(replace(one, batches=None, way=ways.get(one.way, one.way)) for one in begun)
    return Loop(
        starts=begun,
        train=train,
        val=val if even else None,
        epochs=draw(st.integers(1, 4)),
        accumulate=accumulate,
        by_hand=by_hand,
        num_items=not by_hand and even and draw(st.sampled_from((False, False, True))),
        zero_first=not by_hand and draw(st.booleans()),
        scheduler=scheduler,
        cycle_steps=draw(st.integers(4, 9)),
        steps_by_epoch=steps_by_epoch,
        step_scheduler_with_optimizer=with_optimizer,
        adjust_scheduler=not by_hand and not steps_by_epoch and draw(sometimes(False, st.booleans())),
        sync_with_dataloader=syncs,
        sync_each_batch=draw(sometimes(False, st.just(True))),
        second=None if by_hand or not even else draw(sometimes(None, st.sampled_from(("same", "own")))),
        ahead=ahead,
        val_every=draw(sometimes(None, st.integers(1, 4))),
        val_breaks=draw(st.booleans()),
        save_every=save_every if even else None,
        save_at_steps=save_at_steps,
        save_epochs=syncs and draw(st.booleans()),
        explicit=draw(sometimes(False, st.just(True))),
        total_limit=draw(sometimes(None, st.integers(1, 3))),
        restore_position=restore_position,
        sets_epoch=sets_epoch,
        split_batches=split,
        dispatch_batches=draw(st.sampled_from((None, dispatch))),
        even_batches=even,
    )


def rank_loaders(ranks: int, split: bool, first: int = 0) -> st.SearchStrategy[Data]:
    """Draw a loader whose batches divide over the ranks where each is split."""
    if not split:
        return plain_loaders(first, ranks)
    drawn = plain_loaders(first).filter(lambda data: data.kind != "list")
    return drawn.map(lambda data: replace(data, batch_size=ranks * data.batch_size))


def passes_over_too_few(case: Loop) -> bool:
    """Return whether a script may pass over fewer batches than are done, where the guide leaves open how it goes on.

    Its count of the whole run has the batches of windows that were begun again twice.
    """
    counts_twice = case.accumulate > 1 and not case.save_at_steps and case.save_every is not None
    return counts_twice and any(start.way == "count" for start in case.starts)


def allowed(case: Loop) -> bool:
    """Return whether no defect that is known concerns a script, and all that it does has a meaning."""
    return not passes_over_too_few(case) and not any(shows(case) for shows in KNOWN.values())
