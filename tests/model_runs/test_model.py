"""Runs that instep and the model of a run must agree on: some chosen ones, and a hundred drawn ones."""

from __future__ import annotations

import ast
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings

import tests.model
from tests.model.checkpoints import Checkpoints
from tests.model.data import Combined, Data
from tests.model.logs import Log
from tests.model.optimization import Manual, Optimization, Scheduler
from tests.model.run import Case, Settings
from tests.model.stopping import Stopping
from tests.model.triggers import TRIGGERS
from tests.model_runs import compare
from tests.model_runs.compare import difference
from tests.model_runs.draw import allowed, cases, processes
from tests.model_runs.lightning_rules import RULES
from tests.model_runs.processes import Process, difference_after_a_break, difference_over_processes, differences
from tests.model_runs.record import record
from tests.model_runs.script import script

VAL = Data(3, 2, first=100)
CHOSEN = {
    "as by default": Case(Settings(max_epochs=2), Data(5, 2), VAL),
    "a short last window": Case(Settings(max_epochs=2, accumulate_grad_batches=2), Data(5, 1)),
    "validations wait for windows": Case(
        Settings(max_epochs=2, accumulate_grad_batches=2, val_check_interval=3), Data(7, 1), VAL
    ),
    "validations across epochs": Case(
        Settings(max_epochs=3, val_check_interval=4, check_val_every_n_epoch=None), Data(3, 1), VAL
    ),
    "max_steps within an epoch": Case(Settings(max_steps=4), Data(3, 1), VAL, (Scheduler("epoch"),)),
    "a stop that waits": Case(Settings(max_epochs=3, min_steps=5), Data(4, 1), VAL, stop_at=1),
    "a stop within an epoch": Case(Settings(max_epochs=3), Data(9, 1), VAL, (Scheduler("step", 2),), stop_at=4),
    "data without a length": Case(Settings(max_epochs=2), Data(5, 2, kind="iterable"), VAL),
    "data that claims too little": Case(Settings(max_epochs=2), Data(5, 1, kind="iterable", claims=2), VAL),
    "a fraction of an unknown length": Case(Settings(limit_train_batches=0.5), Data(4, kind="iterable")),
    "no batch at all": Case(Settings(max_epochs=1), Data(0, kind="iterable")),
    "plateau": Case(Settings(max_epochs=5), Data(2), VAL, (Scheduler("epoch", plateau=True),), values=(2.0, 3.0, 1.0)),
    "saves by steps": Case(
        Settings(max_steps=7), Data(5, 1), checkpoints=Checkpoints(every_n_train_steps=2, save_top_k=-1)
    ),
    "the two best": Case(
        Settings(max_epochs=5),
        Data(2),
        VAL,
        checkpoints=Checkpoints(monitor="val", save_top_k=2),
        values=(2.0, 3.0, 1.0, 2.0),
    ),
    "the best and the newest": Case(
        Settings(max_epochs=4), Data(2), VAL, checkpoints=Checkpoints(monitor="val", save_last=True), values=(1.0, 2.0)
    ),
    "a save by steps waits for the validation of its step": Case(
        Settings(max_epochs=1, val_check_interval=2, num_sanity_val_steps=0),
        Data(8, 1),
        VAL,
        checkpoints=Checkpoints(monitor="val", every_n_train_steps=2, filename="{step}-{val:.1f}"),
        values=(5.0, 1.0, 4.0, 3.0),
    ),
    "a name with a metric waits for it too": Case(
        Settings(max_epochs=2, num_sanity_val_steps=0),
        Data(4, 1),
        VAL,
        checkpoints=Checkpoints(every_n_train_steps=4, save_top_k=-1, filename="{epoch}-{val:.2f}"),
        values=(2.0, 1.0),
    ),
    "nan takes no place among the best": Case(
        Settings(max_epochs=4, num_sanity_val_steps=0),
        Data(2),
        VAL,
        checkpoints=Checkpoints(monitor="val", save_top_k=2),
        values=(2.0, nan),
    ),
    "a verdict that falls before the minimum": Case(
        Settings(max_epochs=8, min_epochs=5),
        Data(2),
        VAL,
        stopping=Stopping(patience=2),
        values=(1.0, 2.0, 2.0, 0.5, 0.4),
    ),
    "a verdict that stands at the minimum": Case(
        Settings(max_epochs=8, min_steps=7, val_check_interval=1), Data(4), VAL, stopping=Stopping(patience=1)
    ),
    "two savers in one folder": Case(
        Settings(max_epochs=3),
        Data(4, 1),
        VAL,
        checkpoints=Checkpoints(monitor="val", filename="best"),
        second=Checkpoints(every_n_train_steps=2, save_last=True),
        values=(2.0, 3.0, 1.0),
    ),
    "no checkpoint at all": Case(Settings(max_steps=3), Data(2), checkpoints=Checkpoints(save_top_k=0)),
    "two optimizers by hand": Case(
        Settings(max_epochs=2, log_every_n_steps=1),
        Data(5, 2),
        VAL,
        (Scheduler(), Scheduler(optimizer=1)),
        logs=(Log(on_epoch=True),),
        optimization=Optimization(2, Manual((1, 2), toggles=True, both=True, clip=0.3, schedulers="batch")),
        checkpoints=Checkpoints(every_n_train_steps=2),
    ),
    "no optimizer steps": Case(
        Settings(max_epochs=2, log_every_n_steps=1), Data(3), logs=(Log(),), optimization=Optimization(1, Manual((0,)))
    ),
    "three schedulers": Case(
        Settings(max_epochs=3, gradient_clip_val=0.3),
        Data(4, 2),
        VAL,
        (Scheduler("step", 2, name="rate"), Scheduler("epoch"), Scheduler("epoch", plateau=True, monitor="seen")),
        logs=(Log(on_epoch=True),),
        rate_monitor="each",
        optimization=Optimization(2, returns="dict", calls_closure=True),
    ),
    "batches that are skipped": Case(
        Settings(max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.1, gradient_clip_algorithm="value"),
        Data(6),
        schedulers=(Scheduler("step"),),
        optimization=Optimization(skips=2),
    ),
    "every window is skipped but one": Case(
        Settings(max_epochs=1), Data(3), schedulers=(Scheduler("step"),), optimization=Optimization(skips=2)
    ),
    "nothing but skipped batches": Case(Settings(max_epochs=2), Data(2), optimization=Optimization(skips=1)),
    "objects under several names": Case(
        Settings(max_epochs=2, log_every_n_steps=2),
        Data(5, 2),
        VAL,
        logs=(
            Log(name="a", metric="mean", on_epoch=True),
            Log(name="b", metric="mean", on_step=False, on_epoch=True, logger=False),
            Log("validation_step", "c", metric="mean", on_step=True, prog_bar=True),
            Log("validation_step", metric="both"),
        ),
    ),
    "logs of all kinds of hooks": Case(
        Settings(max_epochs=2, log_every_n_steps=1, accumulate_grad_batches=2),
        Data(5, 1),
        VAL,
        logs=(
            Log("optimizer_step", "a", on_epoch=True, every=2, prog_bar=True),
            Log("on_train_epoch_end", "b", batch_size=3),
            Log("on_validation_batch_end", "c", reduce_fx="max", nan_at=0),
            Log("on_train_batch_end", "d", on_epoch=True, every=3, reduce_fx="sum"),
        ),
    ),
    "a log where nothing can be logged": Case(Settings(max_epochs=1), Data(2), logs=(Log("on_train_end"),)),
    "a smaller last batch in a window": Case(
        Settings(max_epochs=1, accumulate_grad_batches=2), Data(5, kind="list", sizes=(3, 1, 1))
    ),
    "counts in itself": Case(
        Settings(max_epochs=3),
        Data(5, 2, kind="again", claims=5),
        Data(5, 2, kind="again", claims=5, first=100),
        checkpoints=Checkpoints(every_n_train_steps=2),
    ),
    "cut short, counts in itself": Case(Settings(max_epochs=4, limit_train_batches=2), Data(4, kind="again")),
    "a generator is used up": Case(Settings(max_epochs=2), Data(3, kind="generator"), VAL),
    "a generator of a validation": Case(Settings(max_epochs=2), Data(3), Data(3, kind="generator", first=100)),
    "batches of a sampler": Case(
        Settings(max_epochs=2, accumulate_grad_batches=2), Data(6, kind="batches", sizes=(3, 1))
    ),
    "loaders that begin again": Case(
        Settings(max_epochs=2, accumulate_grad_batches=2), Combined((Data(5, 2, shuffle=True), Data(2, first=12)))
    ),
    "loaders of which one ends": Case(
        Settings(max_epochs=2, accumulate_grad_batches=2),
        Combined((Data(5, 2), Data(2, first=12, kind="iterable")), "max_size"),
    ),
    "as the shortest of the loaders": Case(
        Settings(max_epochs=2), Combined((Data(5, 2), Data(2, first=12)), "min_size")
    ),
    "several validation loaders": Case(
        Settings(max_epochs=2, limit_val_batches=0.5),
        Data(3),
        Combined((Data(4, first=100), Data(6, 2, first=112)), given="list"),
        logs=(Log("validation_step", "seen", True, True),),
    ),
    "another loader every second epoch": Case(
        Settings(max_epochs=5, reload_dataloaders_every_n_epochs=2),
        Data(6, fewer=1),
        Data(6, first=100, fewer=1),
        source="hooks",
    ),
    "given validation data that does not fit, with reloading": Case(
        Settings(
            1,
            limit_val_batches=0.1,
            reload_dataloaders_every_n_epochs=1,
            check_val_every_n_epoch=2,
            num_sanity_val_steps=0,
        ),
        Data(3),
        VAL,
    ),
    "a decision to stop that a later verdict does not undo": Case(
        Settings(min_steps=2, max_steps=9),
        Data(1),
        VAL,
        stopping=Stopping(patience=2, stopping_threshold=2.0),
        values=(1.0, 4.0),
    ),
    "schedulers in another order than their optimizers": Case(
        Settings(max_epochs=1),
        Data(2),
        schedulers=(Scheduler("step", optimizer=1), Scheduler("step")),
        rate_monitor="step",
        optimization=Optimization(2),
    ),
    "a late step value beside the value of its epoch": Case(
        Settings(max_epochs=2, log_every_n_steps=5), Data(4), logs=(Log(on_epoch=True, every=2),)
    ),
    "together no batch": Case(Settings(max_epochs=1), Data(2), Combined((Data(0, first=100),))),
    "shuffled": Case(Settings(max_epochs=3, limit_train_batches=2), Data(7, 2, shuffle=True), VAL),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_chosen_run_is_as_the_model_says(name: str) -> None:
    assert difference(replace(CHOSEN[name], watch="all")) is None


@pytest.mark.parametrize("place", [0.0, 0.35, 0.7, 1.0])
@pytest.mark.parametrize(
    "checkpoints",
    [Checkpoints(), Checkpoints(every_n_train_steps=2), Checkpoints(monitor="val", save_on_train_epoch_end=False)],
    ids=["epochs", "steps", "validations"],
)
def test_the_parts_of_a_run_that_is_broken_off_are_the_whole(checkpoints: Checkpoints, place: float) -> None:
    settings = Settings(max_epochs=3, log_every_n_steps=1, accumulate_grad_batches=2)
    case = Case(settings, Data(7, 2, shuffle=True), VAL, (Scheduler("step"),), values=(1.0, 3.0, 2.0))
    case = Case(**{**vars(case), "logs": (Log(on_epoch=True),), "checkpoints": checkpoints})
    found = difference_after_a_break(case, place)
    assert found is None, found


SAVING = Case(
    Settings(max_epochs=3),
    Data(3, 1),
    VAL,
    values=(2.0, 1.0, 3.0),
    checkpoints=Checkpoints(monitor="val", save_top_k=2),
)
IN_TURN = {
    "the best in three processes": (Process(None, asks=("best", "last")), Process("best", asks=("best", "last"))),
    "gone back by a path": (Process(None), Process(0, more=1, asks=("best", "last")), Process("last", more=2)),
    "the same script twice": (Process(None), Process(None, asks=("best", "last"))),
    "a finished run goes on": (Process("auto"), Process("auto", more=2, asks=("best",)), Process("auto", more=2)),
}


@pytest.mark.parametrize("name", IN_TURN)
@pytest.mark.parametrize("what", [{}, {"save_weights_only": True}, {"save_last": True, "mode": "max"}], ids=str)
def test_one_process_after_another_in_one_folder(name: str, what: dict[str, Any]) -> None:
    assert SAVING.checkpoints is not None
    found = difference_over_processes(replace(SAVING, checkpoints=replace(SAVING.checkpoints, **what)), IN_TURN[name])
    assert found is None, found


WEIGHTS = Checkpoints(save_weights_only=True)
OF_STEPS = Checkpoints(monitor="seen", every_n_train_steps=2, save_top_k=-1)
CHOSEN_IN_TURN = {
    "a validation asked for before the first step saves the run's end too": (
        Case(Settings(max_epochs=0), Data(4), VAL, checkpoints=Checkpoints(monitor="val", save_last=True)),
        (Process(trigger="validate"), Process()),
    ),
    "what was ranked by weights alone is ranked again": (
        Case(
            Settings(max_epochs=1, val_check_interval=1),
            Data(1),
            VAL,
            checkpoints=WEIGHTS,
            second=replace(WEIGHTS, monitor="val", every_n_train_steps=1),
        ),
        (Process(trigger="save"), Process()),
    ),
    "a newer state of another saver takes no place among the best": (
        Case(
            Settings(max_epochs=1),
            Data(5),
            logs=(Log(),),
            checkpoints=OF_STEPS,
            second=replace(OF_STEPS, every_n_train_steps=3, save_top_k=1, mode="max"),
        ),
        (Process(),),
    ),
    "a save by steps that waits for the first validation leaves the newest state": (
        Case(Settings(max_epochs=2), Data(5), VAL, checkpoints=Checkpoints(monitor="val", every_n_train_steps=2)),
        (Process(place=0.3, kills=True), Process()),
    ),
    "a combination of streams that has ended knows no length": (
        Case(
            Settings(max_epochs=1, val_check_interval=3),
            Combined((Data(1, kind="iterable"),), "max_size"),
            VAL,
            checkpoints=Checkpoints(every_n_train_steps=1),
        ),
        (Process(), Process()),
    ),
    "what a finished run shows on its progress bar": (
        Case(
            Settings(max_epochs=1, log_every_n_steps=0),
            Data(2),
            logs=(Log(metric="mean", prog_bar=True),),
            checkpoints=Checkpoints(),
        ),
        (Process(), Process()),
    ),
    "a cut epoch without a validation is saved once": (
        Case(
            Settings(max_steps=2, check_val_every_n_epoch=2, val_check_interval=1),
            Data(4),
            VAL,
            checkpoints=Checkpoints(every_n_train_steps=2, save_last=True),
        ),
        (Process(trigger="preempted", asks_place=0.9), Process()),
    ),
    "an epoch that was cut short is counted once, though no step is ever made": (
        Case(
            Settings(max_epochs=2, val_check_interval=1),
            Data(6, 2),
            VAL,
            optimization=Optimization(manual=Manual(every=(0,))),
            checkpoints=Checkpoints(every_n_train_steps=3),
        ),
        (Process(trigger="stop", asks_place=0.25), Process()),
    ),
    "a validation behind an epoch's end asks for the loaders of that epoch": (
        Case(
            Settings(
                max_epochs=3, val_check_interval=0.1, accumulate_grad_batches=2, reload_dataloaders_every_n_epochs=2
            ),
            Data(7, 4, fewer=2),
            Data(7, 4, first=100, fewer=2),
            checkpoints=Checkpoints(monitor="val", save_top_k=2, save_last=True, every_n_epochs=2),
            values=(nan, 1.0, 4.0, 1.0),
            source="hooks",
        ),
        (
            Process(None, kills=True),
            Process("last", place=0.5, kills=True, trigger="validate", asks_place=0.45),
            Process("best", more=1),
        ),
    ),
}


@pytest.mark.parametrize("name", CHOSEN_IN_TURN)
def test_chosen_processes_in_turn_are_as_the_model_says(name: str) -> None:
    found = difference_over_processes(*CHOSEN_IN_TURN[name])
    assert found is None, found


@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("trigger", TRIGGERS)
def test_the_parts_of_a_run_that_is_asked_for_something_are_the_whole(trigger: str, place: float) -> None:
    case = Case(
        Settings(max_epochs=2, log_every_n_steps=1, val_check_interval=2),
        Data(5, shuffle=True),
        Data(4, first=100),
        (Scheduler("step"),),
        logs=(Log(on_epoch=True), Log("validation_step", "val_seen", True, True)),
        rate_monitor="each",
        checkpoints=Checkpoints(monitor="val"),
    )
    found = difference_over_processes(case, (Process(trigger=trigger, asks_place=place), Process()))
    assert found is None, found


def test_a_validation_that_waited_for_its_window_and_was_left_for_a_signal_runs_again() -> None:
    settings = Settings(max_epochs=2, val_check_interval=2, check_val_every_n_epoch=None, accumulate_grad_batches=3)
    case = Case(settings, Data(3), Data(4, first=100), checkpoints=Checkpoints())
    for place in (0.1, 0.2, 0.3, 0.4):
        found = difference_over_processes(case, (Process(trigger="preempted", asks_place=place), Process()))
        assert found is None, found


@pytest.mark.parametrize("place", [0.6, 0.9, 1.0])
@pytest.mark.parametrize("settings", [Settings(max_steps=2), Settings(max_steps=2, val_check_interval=1)], ids=str)
def test_a_run_that_is_broken_off_behind_its_last_step_ends_its_epoch(settings: Settings, place: float) -> None:
    case = Case(
        settings, Data(3, 1), VAL, checkpoints=Checkpoints(every_n_train_steps=1), stopping=Stopping(patience=9)
    )
    found = difference_after_a_break(case, place)
    assert found is None, found


@settings(
    max_examples=100,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
)
@given(cases(), processes())
def test_a_drawn_run_is_as_the_model_says(case: Case, in_turn: tuple[Process, ...]) -> None:
    assume(allowed(case))
    found = differences(case, in_turn)
    assert found is None, found


def test_the_model_is_plain_python() -> None:
    allowed_modules = {"__future__", "collections", "copy", "dataclasses", "math", "typing", "tests"}
    for path in Path(tests.model.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert (name or "").split(".")[0] in allowed_modules, f"{path.name} imports {name}"
                assert not (name or "").startswith("tests.") or (name or "").startswith("tests.model."), name


def test_a_script_that_shows_a_difference_is_short() -> None:
    for case in CHOSEN.values():
        text = script(case)
        compile(text, "script", "exec")
        assert len(text.splitlines()) <= 40


@pytest.mark.parametrize(
    "change",
    [{"accumulate_grad_batches": 3}, {"val_check_interval": 1}, {"max_epochs": 3}, {"num_sanity_val_steps": 0}],
)
def test_a_program_that_differs_is_found(change: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    meant = Case(Settings(max_epochs=2, accumulate_grad_batches=2), Data(5, 2), VAL)
    other = Case(Settings(**{**vars(meant.settings), **change}), meant.train, meant.val)
    monkeypatch.setattr(compare, "record_ranks", lambda case, folder: [record(other, folder)])
    assert difference(meant) is not None


def test_the_guide_has_a_row_for_each_rule_of_lightning() -> None:
    page = (Path(tests.model.__file__).parents[2] / "docs/porting/lightning.md").read_text()
    table = page.partition("## 500 random runs on both")[2]
    assert [rule for rule in RULES if f"\n| {rule} | " not in table] == []
