"""The order of hooks, as the docstring of `Trainer.fit` says it and as Lightning has it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instep import Callback, DataModule, Trainer, TrainModule
from tests.trainer.recorder import Call, recorded_callback, recorded_data, recorded_module
from tests.trainer.toys import loader, quiet


class Pseudocode:
    """Runs the loop that a docstring shows: indented blocks of hook names, with `for`, `if` and named blocks.

    Args:
        text: the docstring.
        lengths: how often each `for` runs, by what stands after `in`.
        conditions: what stands after `if`, as a function of the loops' present positions.
    """

    def __init__(self, text: str, lengths: dict[str, int], conditions: dict[str, Any]) -> None:
        block = inspect.cleandoc(text).partition("::\n\n")[2].partition("\n\nArgs:")[0]
        self.lines = [line.partition("#")[0].rstrip() for line in block.splitlines()]
        self.lines = [line for line in self.lines if line]
        self.lengths, self.conditions = lengths, conditions
        self.at: dict[str, int] = {}
        self.blocks = {
            line.strip()[:-1]: i for i, line in enumerate(self.lines) if line.endswith(":") and " " not in line.strip()
        }

    def names(self) -> list[str]:
        top = min(self.blocks.values(), default=len(self.lines))  # named blocks stand at the end
        return list(self._run(0, top))

    def _indent(self, i: int) -> int:
        return len(self.lines[i]) - len(self.lines[i].lstrip())

    def _body(self, i: int, end: int) -> int:
        stop = i + 1
        while stop < end and self._indent(stop) > self._indent(i):
            stop += 1
        return stop

    def _run(self, i: int, end: int) -> Iterator[str]:
        while i < end:
            line, stop = self.lines[i].strip(), self._body(i, end)
            if line.startswith("for "):
                what = line[:-1].partition(" in ")[2]
                for number in range(self.lengths[what]):
                    self.at[what] = number
                    yield from self._run(i + 1, stop)
            elif line.startswith("if "):
                if self.conditions[line[3:-1]](self.at):
                    yield from self._run(i + 1, stop)
            else:
                assert stop == i + 1, f"what is {line!r}?"
                for name in line.split(", "):
                    if name in self.blocks:
                        start = self.blocks[name]
                        yield from self._run(start + 1, self._body(start, len(self.lines)))
                    else:
                        yield name
            i = stop


def names_in_order(calls: list[Call]) -> list[str]:
    """The names; one where several owners have the same hook."""
    names: list[str] = []
    owners: set[str] = set()
    for owner, name in calls:
        if names and names[-1] == name and owner not in owners:
            owners.add(owner)
        else:
            names.append(name)
            owners = {owner}
    return names


def run_instep(method: str, interval: str = "step", **settings: Any) -> list[Call]:
    calls: list[Call] = []
    module = recorded_module(TrainModule, calls, interval)
    data = recorded_data(DataModule, calls, loader(6, 3))
    trainer = quiet(callbacks=[recorded_callback(Callback, calls)], **settings)
    getattr(trainer, method)(module, datamodule=data)
    return calls


# ---- the docstring


def shown(accumulate: int, interval: str, sanity: bool) -> list[str]:
    """What the docstring shows for two epochs of two batches, each with one validation."""
    train, epochs = "train_dataloader", "epochs"
    return Pseudocode(
        Trainer.fit.__doc__ or "",
        {epochs: 2, train: 2, "val_dataloaders": 2},
        {
            "there is a sanity check": lambda at: sanity,
            "training has begun": lambda at: epochs in at,
            "first micro-batch of the window": lambda at: at[train] % accumulate == 0,
            "last micro-batch of the window": lambda at: (at[train] + 1) % accumulate == 0,
            "validation is due": lambda at: at[train] == 1,
            'a scheduler has interval="step"': lambda at: interval == "step",
            'a scheduler has interval="epoch"': lambda at: interval == "epoch",
        },
    ).names()


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_docstring_of_fit_is_what_runs(accumulate: int, interval: str):
    calls = run_instep("fit", interval, max_epochs=2, accumulate_grad_batches=accumulate, gradient_clip_val=1.0)
    assert names_in_order(calls) == shown(accumulate, interval, sanity=True)


def test_the_docstring_holds_without_a_sanity_check():
    calls = run_instep("fit", max_epochs=2, gradient_clip_val=1.0, num_sanity_val_steps=0)
    assert names_in_order(calls) == shown(1, "step", sanity=False)


def test_the_guide_shows_the_docstrings_loop():
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "loop.md").read_text()
    loop = textwrap.dedent("\n".join(Pseudocode(Trainer.fit.__doc__ or "", {}, {}).lines))
    assert loop in page.replace("\n\n", "\n")


def test_a_callback_comes_before_the_module_and_a_datamodule_before_both():
    calls = run_instep("fit", max_epochs=1)
    owners: dict[str, list[str]] = {}
    for owner, name in calls:
        if owner not in owners.setdefault(name, []):
            owners[name].append(owner)
    assert owners["prepare_data"] == ["D", "M"]
    assert owners["setup"] == owners["teardown"] == ["D", "C", "M"]
    both = [order for order in owners.values() if {"C", "M"} <= set(order)]
    assert len(both) >= 20
    assert all(order.index("C") < order.index("M") for order in both)


def test_monitoring_callbacks_come_after_the_module_at_an_epochs_end():
    order: list[str] = []

    class Watches(Callback):
        runs_last = True

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            order.append("monitoring")

    class Plain(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            order.append("plain")

    calls: list[Call] = []
    module = recorded_module(TrainModule, calls)
    module.on_train_epoch_end = lambda: order.append("module")
    quiet(max_epochs=1, callbacks=[Watches(), Plain()]).fit(module, loader(6, 3))
    assert order == ["plain", "module", "monitoring"]


@pytest.mark.parametrize(("method", "stage"), [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_evaluation_hooks_run_in_order(method: str, stage: str):
    owners = {"prepare_data": "DM", "setup": "DCM", "teardown": "DCM"}
    owners |= {f"on_{stage}{when}": "CM" for when in ("_start", "_epoch_start", "_epoch_end", "_end")}
    owners |= {f"on_{stage}_batch_{when}": "CM" for when in ("start", "end")}
    moved = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
    batch = [*moved, f"on_{stage}_batch_start", f"{stage}_step", f"on_{stage}_batch_end"]
    names = ["configure_callbacks", "prepare_data", "setup", "configure_model", f"on_{stage}_model_eval"]
    names += [
        f"on_{stage}_start",
        f"on_{stage}_epoch_start",
        *batch,
        *batch,
        f"on_{stage}_epoch_end",
        f"on_{stage}_end",
    ]
    names += [f"on_{stage}_model_train"] if stage != "predict" else []
    assert run_instep(method) == [(owner, name) for name in (*names, "teardown") for owner in owners.get(name, "M")]


# ---- Lightning


def run_lightning(method: str, tmp_path: Any, interval: str = "step", **settings: Any) -> list[Call]:
    lightning = pytest.importorskip("lightning.pytorch")
    calls: list[Call] = []
    module = recorded_module(lightning.LightningModule, calls, interval)
    data = recorded_data(lightning.LightningDataModule, calls, loader(6, 3))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[recorded_callback(lightning.Callback, calls)],
        **settings,
    )
    getattr(trainer, method)(module, datamodule=data)
    return calls


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_evaluation_hooks_run_in_lightnings_order(method: str, tmp_path: Any):
    theirs = run_lightning(method, tmp_path)
    ours = run_instep(method)
    assert ours == theirs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_fit_hooks_run_in_lightnings_order(accumulate: int, tmp_path: Any):
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "gradient_clip_val": 1.0}
    assert run_instep("fit", **settings) == run_lightning("fit", tmp_path, **settings)


@pytest.mark.filterwarnings("ignore")
def test_epoch_schedulers_step_after_validation(tmp_path: Any):
    """Allowed difference: Lightning steps them between an epoch's last batch and its validation.

    In instep they step when the epoch is over, so that everything of one epoch is measured and saved at one rate.
    """
    ours, theirs = (
        [call for call in calls if call[1] in ("lr_scheduler_step", "on_train_batch_end", "on_validation_end")]
        for calls in (
            run_instep("fit", "epoch", max_epochs=1, num_sanity_val_steps=0),
            run_lightning("fit", tmp_path, "epoch", max_epochs=1, num_sanity_val_steps=0),
        )
    )
    step = ("M", "lr_scheduler_step")
    assert ours[-1] == step
    assert theirs.index(step) < theirs.index(("M", "on_validation_end"))
    ours.remove(step)
    theirs.remove(step)
    assert ours == theirs
