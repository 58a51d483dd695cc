"""Scripts of the Accelerator that instep and the model must agree on: some chosen ones, and drawn ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings

from tests.model.accelerator import WAYS, Loop, Start
from tests.model.data import Data
from tests.model_runs import accelerator_compare
from tests.model_runs.accelerator_compare import difference, script
from tests.model_runs.accelerator_draw import allowed, loops
from tests.model_runs.accelerator_record import record

VAL = Data(3, 2, first=100)
TRAIN = Data(7, 2, shuffle=True)
CHOSEN = {
    "as by default": Loop(train=TRAIN, val=VAL),
    "a cycle that is over": Loop(train=Data(5), scheduler="cycle", cycle_steps=5),
    "a schedule in batches": Loop(
        train=Data(7), accumulate=3, scheduler="halves", adjust_scheduler=True, num_items=True, zero_first=True
    ),
    "windows by hand": Loop(train=Data(7), accumulate=3, by_hand=True, scheduler="halves", steps_by_epoch=True),
    "an evaluation that is left within a window": Loop(
        train=Data(7), val=VAL, accumulate=3, val_every=2, val_breaks=True
    ),
    "a window that is begun again, and skipped in part": Loop(
        (Start(5), Start(way="islice")), Data(8), accumulate=4, save_every=1, save_at_steps=False
    ),
    "an evaluation of data that the script skips in": Loop(
        (Start(3), Start(way="continue", before=("evaluate", "evaluate_rest"))),
        TRAIN,
        save_every=1,
        restore_position=False,
    ),
    "batches that the data keeps": Loop(
        (Start(3), Start(1, way="continue"), Start()), Data(7, 2, kind="list"), save_every=1, restore_position=False
    ),
    "a skip past the end of a stream": Loop(
        (Start(4), Start(5), Start(way="skip_first_batches", unaware=True)),
        Data(3, kind="iterable"),
        epochs=3,
        save_every=1,
        restore_position=False,
    ),
    "two models, read ahead in an epoch of two batches": Loop(
        (Start(3), Start()), Data(4, 2), epochs=4, second="own", ahead=True, save_every=1, restore_position=True
    ),
    "windows of two models that go on in the next epoch": Loop(
        train=Data(5), epochs=3, accumulate=3, sync_with_dataloader=False, second="own"
    ),
    "states under one name, read ahead of": Loop(
        (Start(4), Start(2, load=1), Start()),
        Data(9),
        scheduler="plateau",
        ahead=True,
        save_every=1,
        explicit=True,
        restore_position=True,
    ),
    "a look at more than was left of an epoch": Loop(
        (
            Start(5, way="count"),
            Start(4, load=1),
            Start(way="skip_first_batches", before=("evaluate_rest",), unaware=True),
        ),
        Data(11, 2),
        epochs=4,
        save_every=3,
        explicit=True,
        restore_position=False,
        sets_epoch=True,
    ),
    "a state gone back to": Loop(
        (Start(5), Start(2, load=1, before=("save",)), Start()), Data(9), epochs=1, save_every=1, total_limit=3
    ),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_chosen_script_is_as_the_model_says(name: str) -> None:
    found = difference(CHOSEN[name])
    assert found is None, found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_a_script_that_is_killed_twice_goes_on_however_it_skips(way: str, kind: str) -> None:
    train = Data(9, 2, kind=kind, shuffle=kind == "map")
    starts = (Start(3), Start(4, way=way, before=("peek", "evaluate")), Start(way=way))
    found = difference(Loop(starts, train, VAL, epochs=3, accumulate=2, save_every=1, save_epochs=True))
    assert found is None, found


@settings(
    max_examples=40,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
)
@given(loops())
def test_a_drawn_script_is_as_the_model_says(case: Loop) -> None:
    assume(allowed(case))
    found = difference(case)
    assert found is None, found


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["map", "iterable", "list"])
def test_scripts_of_two_ranks_are_as_the_model_says(kind: str) -> None:
    starts = (Start(2, ranks=2), Start(2, way="continue", ranks=2), Start(ranks=1 if kind == "map" else 2))
    train = Data(9, 2, kind=kind, shuffle=kind == "map")
    val = replace(VAL, samples=5)
    found = difference(Loop(starts, train, val, accumulate=2, num_items=kind != "map", save_every=1))
    assert found is None, found


@pytest.mark.dist
def test_a_rank_without_samples_counts_nothing_in_a_window_over_two_epochs() -> None:
    data = Data(5, 2, shuffle=True)
    found = difference(Loop((Start(ranks=2),), data, epochs=3, accumulate=2, sync_with_dataloader=False))
    assert found is None, found


@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "scheduler"), [(2, "halves"), (3, "plateau"), (3, None)])
def test_ranks_that_ended_by_themselves_save_and_go_on_alike(ranks: int, scheduler: str | None) -> None:
    starts = (Start(ranks=ranks), Start(load=0, ranks=ranks))
    data = Data(ranks * 2 + 1, 2, shuffle=True)
    found = difference(Loop(starts, data, epochs=3, scheduler=scheduler, save_epochs=True, even_batches=False))
    assert found is None, found


@pytest.mark.dist
@pytest.mark.parametrize("way", ["nothing", "skip_first_batches", "continue"])
@pytest.mark.parametrize("ranks", [(1, 2), (3, 2)])
def test_scripts_on_another_number_of_ranks_skip_and_evaluate_what_was_done(way: str, ranks: tuple[int, int]) -> None:
    before, after = ranks
    starts = (Start(3 if before == 1 else 2, ranks=before), Start(1, way=way, before=("evaluate",), ranks=after))
    found = difference(Loop((*starts, Start(way=way, ranks=before)), Data(19, shuffle=True), save_every=1))
    assert found is None, found


def test_a_script_that_shows_a_difference_is_short_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for case in CHOSEN.values():
        text = script(case)
        compile(text, "script", "exec")
        assert len(text.splitlines()) <= 40
    exec(script(CHOSEN["a state gone back to"]), {})
    assert capsys.readouterr().out.count("load ") == 2


@pytest.mark.parametrize("change", [{"accumulate": 3}, {"epochs": 3}, {"save_every": None}, {"by_hand": False}])
def test_a_script_that_differs_is_found(change: dict[str, int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    meant = Loop((Start(3), Start()), Data(7, 2), accumulate=2, by_hand=True, save_every=1)
    other = replace(meant, **change)  # type: ignore[arg-type]
    monkeypatch.setattr(accelerator_compare, "record", lambda case, folder: record(other, folder))
    assert difference(meant) is not None
