"""Runs on several ranks, killed ones, and ones that go on with other ranks: some chosen, and five hundred drawn."""

from __future__ import annotations

import json
import sys
from math import nan
from pathlib import Path

import pytest

from tests.helpers.spawn import run_command
from tests.model.checkpoints import Checkpoints
from tests.model.data import Combined, Data
from tests.model.logs import Log
from tests.model.optimization import Optimization
from tests.model.run import Case, Settings
from tests.model.stopping import Stopping
from tests.model_runs.coverage import admits
from tests.model_runs.processes import Process, difference_over_processes, differences

VAL = Data(5, 2, first=100)
EVERY_STEP = Checkpoints(every_n_train_steps=1)
LISTS = Data(4, 3, kind="list")
AGAIN = Data(2, kind="again")

CHOSEN = {
    "a tail that is dealt out": (Case(Settings(max_epochs=2), Data(7, 2, shuffle=True), VAL, ranks=3), ()),
    "lists of different sizes": (Case(Settings(max_epochs=1), LISTS, ranks=3), ()),
    "windows of lists": (Case(Settings(max_epochs=1, accumulate_grad_batches=2), LISTS, ranks=2), ()),
    "parts of data of different sizes": (
        Case(Settings(max_epochs=2, accumulate_grad_batches=2), Data(7, 3, kind="parted", parts="chunks"), ranks=2),
        (),
    ),
    "parts of different sizes, limited to less than a window": (
        Case(
            Settings(max_epochs=2, limit_train_batches=1, accumulate_grad_batches=2), Data(11, kind="parted"), ranks=2
        ),
        (),
    ),
    "a verdict of early stopping, and a validation that was asked for": (
        Case(
            Settings(max_epochs=2, limit_train_batches=1, val_check_interval=1, num_sanity_val_steps=0),
            Data(6, 2),
            Data(4, first=100),
            values=(nan, 1.0, 2.0),
            stopping=Stopping(mode="max"),
            checkpoints=Checkpoints(),
            ranks=2,
        ),
        (Process(trigger="validate", asks_place=0.1), Process()),
    ),
    "an epoch in which more ranks have fewer batches than a validation waits for": (
        Case(Settings(max_epochs=2, val_check_interval=2), Data(11, 4), VAL, checkpoints=EVERY_STEP),
        (Process(place=0.6), Process(ranks=2)),
    ),
    "a limit, and data that goes on where the epoch before has left it": (
        Case(
            Settings(max_epochs=4, limit_train_batches=1),
            Data(8, 2, kind="again"),
            VAL,
            checkpoints=Checkpoints(monitor="val"),
        ),
        (Process(place=0.9), Process()),
    ),
    "a metric object of training and validation, and a rank without validation data": (
        Case(
            Settings(max_steps=9, val_check_interval=4, check_val_every_n_epoch=None),
            Data(3, kind="parted", parts="same"),
            Data(1, kind="iterable", first=100),
            logs=(Log(name="c", metric="sum", every=2), Log("validation_step", "val_b", metric="sum")),
            ranks=2,
        ),
        (),
    ),
    "one rank without data": (
        Case(Settings(max_epochs=2, uneven="join"), Data(5, 2, kind="iterable", parts="last"), VAL, ranks=2),
        (),
    ),
    "a stop that one rank asks for": (Case(Settings(max_epochs=3), Data(9), VAL, ranks=2, stop_at=2, stop_on=1), ()),
    "a mean over ranks after a resume": (
        Case(
            Settings(max_epochs=2, log_every_n_steps=1),
            Data(8, 2),
            ranks=2,
            logs=(Log(sync_dist=True),),
            checkpoints=EVERY_STEP,
        ),
        (Process(place=0.5), Process()),
    ),
    "a mean over ranks that goes on with more of them": (
        Case(
            Settings(max_epochs=2, log_every_n_steps=1),
            Data(8, 2),
            VAL,
            logs=(Log(sync_dist=True, prog_bar=True), Log(name="b", prog_bar=True)),
            checkpoints=EVERY_STEP,
        ),
        (Process(place=0.5), Process(place=0.5, ranks=2), Process(ranks=3)),
    ),
    "killed, and gone on with three ranks": (
        Case(Settings(max_epochs=2), Data(11, 2, shuffle=True), VAL, ranks=2, checkpoints=EVERY_STEP),
        (Process(place=0.3, kills=True, rank=1), Process(ranks=3)),
    ),
    "a step value that shows on the new ranks too": (
        Case(Settings(max_epochs=2), Data(3), logs=(Log(),), checkpoints=EVERY_STEP),
        (Process(place=0.5), Process(ranks=2)),
    ),
    "preempted by a signal to one rank, and gone on with three": (
        Case(Settings(max_epochs=2), Data(11, 2, shuffle=True), VAL, ranks=2, checkpoints=Checkpoints(monitor="val")),
        (Process(trigger="preempted", asks_place=0.3, rank=1), Process(ranks=3)),
    ),
    "a save that one rank asks for, and then killed": (
        Case(Settings(max_epochs=2), Data(11, 2), VAL, ranks=2, checkpoints=Checkpoints()),
        (Process(trigger="save", asks_place=0.2, rank=1, place=0.5, kills=True), Process()),
    ),
    "a rank's own step values after a resume": (
        Case(
            Settings(max_epochs=1, log_every_n_steps=1),
            Data(4),
            Data(4, first=100),
            ranks=2,
            logs=(Log("validation_step", "val_seen", True, prog_bar=True),),
            checkpoints=Checkpoints(),
        ),
        (Process(), Process()),
    ),
    "a fraction of parts of different sizes": (
        Case(
            Settings(max_epochs=1, val_check_interval=0.5, uneven="join"),
            Data(5, kind="parted"),
            Data(1, kind="parted", first=100, parts="same"),
            ranks=2,
        ),
        (),
    ),
    "a validation that was left, gone on with by ranks that have less than a batch of the epoch": (
        Case(
            Settings(max_steps=1, val_check_interval=1), Data(2), Data(2, first=100), checkpoints=Checkpoints(), ranks=1
        ),
        (Process(trigger="preempted", asks_place=0.1), Process(ranks=2), Process(more=1)),
    ),
    "a rank's own values of an epoch on fewer ranks": (
        Case(
            Settings(max_epochs=1, val_check_interval=1),
            Data(7, kind="list"),
            VAL,
            ranks=3,
            logs=(Log(on_epoch=True, sync_dist=False),),
            checkpoints=Checkpoints(),
        ),
        (Process(trigger="stop", asks_place=0.1), Process(ranks=2)),
    ),
    "a cut epoch that a run which goes on finds closed": (
        Case(Settings(max_steps=1, num_sanity_val_steps=0), AGAIN, Data(1, first=100), checkpoints=Checkpoints()),
        (Process(trigger="preempted", asks_place=0.5), Process()),
    ),
    "the best of one saver beside what another one was asked to save": (
        Case(
            Settings(max_steps=8),
            Data(11, 2),
            Data(4, first=100),
            values=(3.0, 1.0, 3.0, 2.0),
            checkpoints=Checkpoints(monitor="val", mode="max", save_top_k=0, every_n_epochs=2),
            second=Checkpoints(monitor="val", save_top_k=2, save_last=True, every_n_train_steps=4),
        ),
        (Process(ckpt_path=None, trigger="save", asks_place=0.25), Process(ckpt_path="best")),
    ),
    "iterable data at the end of its epoch": (
        Case(
            Settings(max_epochs=2, uneven="join"),
            Data(4, 2, kind="iterable"),
            VAL,
            ranks=2,
            checkpoints=Checkpoints(monitor="val", save_on_train_epoch_end=False),
        ),
        (Process(place=0.9), Process(ranks=1)),
    ),
    "a limit of an iterable that is divided, behind its first pass": (
        Case(
            Settings(min_epochs=0, max_steps=5, limit_train_batches=4, val_check_interval=0.25),
            Data(11, 2, kind="iterable", parts="chunks"),
            Data(4, kind="iterable", parts="chunks", first=100),
            ranks=2,
        ),
        (Process(place=0.0), Process()),
    ),
    "a limit of an iterable that drops its last batch, divided": (
        Case(
            Settings(max_epochs=4, max_steps=12, limit_train_batches=5, val_check_interval=5, num_sanity_val_steps=0),
            Data(10, 2, drop_last=True, kind="iterable", parts="chunks"),
            VAL,
            ranks=2,
        ),
        (),
    ),
    "an iterable without batches, combined": (
        Case(
            Settings(max_steps=6, val_check_interval=1, num_sanity_val_steps=0),
            Data(6, 2),
            Combined((Data(2, 4, drop_last=True, kind="iterable", first=100),)),
        ),
        (),
    ),
    "a claim that has no batch for every rank": (
        Case(
            Settings(max_epochs=0, min_epochs=0, val_check_interval=1, num_sanity_val_steps=0, uneven="join"),
            Data(7, 3, drop_last=True, kind="iterable", claims=4, parts="same"),
            VAL,
            ranks=3,
        ),
        (),
    ),
    "a cut epoch of which nothing is left for more ranks that drop the last batch": (
        Case(
            Settings(max_epochs=3, limit_train_batches=0.75, val_check_interval=5, check_val_every_n_epoch=None),
            Data(10, 2, drop_last=True),
            Data(10, first=100),
            values=(2.0, 4.0, nan),
            checkpoints=Checkpoints(save_top_k=0, every_n_epochs=2),
            second=Checkpoints(monitor="val", save_top_k=3, every_n_train_steps=4),
        ),
        (Process(place=0.5), Process(ranks=2)),
    ),
    "a name that comes again after the run was broken off": (
        Case(
            Settings(max_steps=6, val_check_interval=1, num_sanity_val_steps=0),
            Data(7, kind="batches"),
            Data(1, kind="batches", first=100),
            ranks=3,
            values=(1.0, 4.0),
            checkpoints=Checkpoints(
                monitor=None,
                save_top_k=1,
                every_n_epochs=1,
                filename="{epoch}-{val:.2f}",
                auto_insert_metric_name=False,
            ),
        ),
        (Process("auto", 0.2), Process()),
    ),
    "a validation that is asked for over more batches than those of the fit": (
        Case(
            Settings(max_steps=2, num_sanity_val_steps=0),
            Data(2),
            Data(1, first=100),
            logs=(Log(hook="validation_step", name="val_b", on_epoch=False, every=3),),
            checkpoints=Checkpoints(monitor="val"),
        ),
        (Process(None, asks=("best", "last")),),
    ),
    "ranks that never have data, where the run goes on within an epoch": (
        Case(
            Settings(max_epochs=1, num_sanity_val_steps=0, uneven="join"),
            Data(7, kind="iterable", parts="last"),
            VAL,
            ranks=3,
            checkpoints=EVERY_STEP,
        ),
        (Process(place=0.5), Process()),
    ),
    "a validation that logs where nothing can be logged, behind a fit without one": (
        Case(
            Settings(max_epochs=0, limit_val_batches=2),
            Data(3),
            logs=(Log(hook="on_validation_end", name="val_b", on_step=False, every=3),),
            checkpoints=Checkpoints(save_last=True),
        ),
        (Process(None, asks=("best", "last")),),
    ),
    "other ranks within an epoch of a stream that all read": (
        Case(
            Settings(max_steps=5, limit_train_batches=4),
            Data(13, 2, kind="iterable", parts="same"),
            VAL,
            checkpoints=EVERY_STEP,
        ),
        (Process(place=0.6), Process(ranks=2), Process(ranks=3, more=3)),
    ),
    "a finished run within an epoch of a stream, on other ranks": (
        Case(
            Settings(max_steps=1),
            Data(9, 4, drop_last=True, kind="iterable"),
            VAL,
            checkpoints=Checkpoints(every_n_train_steps=4),
        ),
        (Process(), Process(ranks=2)),
    ),
    "other ranks that may not skip a batch": (
        Case(
            Settings(max_epochs=1, accumulate_grad_batches=4),
            Data(9, 2),
            optimization=Optimization(skips=2),
            checkpoints=EVERY_STEP,
        ),
        (Process(place=0.3), Process(ranks=3)),
    ),
    "a validation that was asked for, in which another rank is killed": (
        Case(
            Settings(max_epochs=2, val_check_interval=5, check_val_every_n_epoch=None),
            Data(6, 3),
            VAL,
            ranks=2,
            checkpoints=EVERY_STEP,
            watch="few",
        ),
        (Process(place=0.95, kills=True, rank=1, trigger="validate", asks_place=0.85), Process(more=2)),
    ),
    "other ranks at the end of an epoch with a skipped batch": (
        Case(
            Settings(max_steps=9, limit_val_batches=1, val_check_interval=1, accumulate_grad_batches=2),
            Data(6, 2),
            VAL,
            optimization=Optimization(skips=3),
            checkpoints=Checkpoints(monitor="val", save_top_k=-1),
            watch="few",
        ),
        (Process(place=0.35), Process(ranks=3)),
    ),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_chosen_run_on_ranks_is_as_the_model_says(name: str) -> None:
    found = differences(*CHOSEN[name])
    assert found is None, found


@pytest.mark.parametrize("place", [0.2, 0.5, 0.8])
def test_a_validation_that_is_due_within_a_window_is_not_lost_by_a_resume(place: float) -> None:
    settings = Settings(max_epochs=4, val_check_interval=3, check_val_every_n_epoch=None, accumulate_grad_batches=2)
    case = Case(settings, Data(4, 2), VAL, checkpoints=EVERY_STEP)
    found = difference_over_processes(case, (Process(place=place), Process()))
    assert found is None, found


def test_pairs_without_a_meaning_are_not_asked_for() -> None:
    assert not admits(("ranks", "1"), ("settings.uneven", "join"))
    assert not admits(("train.kind", "list"), ("train.shuffle", "True"))
    assert not admits(("val", "absent"), ("val.kind", "map"))
    assert admits(("ranks", "2"), ("settings.uneven", "join"))


@pytest.mark.campaign
def test_two_hundred_drawn_runs_are_as_the_model_says(tmp_path: Path) -> None:
    file = tmp_path / "drawn.json"
    words = ["-m", "tests.model_runs", "--seed", "33", "--count", "200", "--json", str(file)]
    done = run_command([sys.executable, *words], timeout_s=3000.0)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    drawn = json.loads(file.read_text())["drawn"]
    assert all(
        drawn[kind] > 0 for kind in ("of 2 ranks", "of 3 ranks", "killed", "gone on with other ranks", "refused early")
    )
