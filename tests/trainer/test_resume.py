"""A run that was stopped and taken up again ends bit for bit like one that was not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from instep import Trainer, TrainModule
from instep.callbacks import Callback, ModelCheckpoint
from instep.errors import Preempted
from tests.helpers.spawn import run_ranks
from tests.trainer.resuming import (
    Augmented,
    Case,
    Net,
    Plain,
    StepLosses,
    StopAt,
    assert_same,
    check,
    make_trainer,
    run_once,
    run_with_stops,
    seed,
    train_loader,
)
from tests.trainer.test_ranks import Gan
from tests.trainer.toys import KeepingToy, Toy, loader, quiet

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata with a new torch
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # dynamo with torchmetrics
]

# 6 batches an epoch. A stop that is asked for at step s happens at s + 1, or at the epoch's end if s was its last step.
STOPS = ([2], [5], [6], [1, 3], [7, 9, 12])
WINDOWS_OF_3 = ([1], [2], [1, 3, 5])
AT_THE_END_AND_TWICE = ([5], [1, 6])  # an epoch's last step; in an epoch, then where the next one begins

CASES = {
    "plain": (Case(), STOPS),
    "windows": (Case(accumulate=3), WINDOWS_OF_3),
    "windows-per-epoch-schedule": (Case(accumulate=4, schedule="epoch", log_every=2), ([2], [1, 3])),
    "schedule-per-epoch": (Case(schedule="epoch"), AT_THE_END_AND_TWICE),
    "validation-in-the-epoch": (Case(validate=0.5, monitor=True), ([2], [1, 5, 8])),
    "validation-across-epochs": (Case(validate=4, across_epochs=True), ([3], [1, 7, 12])),
    "bf16": (Case(precision="bf16-mixed"), ([2], [6])),
    "seeded-samples": (Case(seed_samples=True), ([2], [6])),
    "saved-by-steps": (Case(every_n_train_steps=2), ([5], [1, 7])),
    "saved-by-steps-windows": (Case(every_n_train_steps=2, accumulate=3), ([1, 3],)),
    "global-batch": (Case(global_batch_size=8), ([1, 3],)),
    "global-batch-grows": (Case(global_batch_size={0: 4, 3: 8, 7: 16}), ([3], [1, 5, 8])),
    "windows-by-epoch": (Case(accumulate={0: 3, 1: 1, 2: 2}), ([4], [2, 6, 9])),
    "stateful-stream-windows-grow": (Case(data="stateful", global_batch_size={0: 4, 3: 8}), ([3], [4])),
    "stateful-stream": (Case(data="stateful"), AT_THE_END_AND_TWICE),
    "stateful-stream-windows": (Case(data="stateful", accumulate=3), ([1, 3],)),
    "torchdata": (Case(data="torchdata"), AT_THE_END_AND_TWICE),
    "combined": (Case(data="combined"), AT_THE_END_AND_TWICE),
    "combined-windows": (Case(data="combined", accumulate=3), ([1, 3],)),
    "every-step-logged": (Case(log_every=1), ([2], [6])),
    "plateau": (Case(scheduler="plateau", schedule="epoch", epochs=4), ([2], [6], [7, 13])),
    "plateau-per-step": (Case(scheduler="step-plateau"), ([2], [6])),
    "warm-up-and-cosine": (Case(scheduler="sequential"), ([1], [3], [4], [6])),
    "named": (Case(scheduler="named", epochs=2), ([2, 6],)),
    "lambda": (Case(scheduler="lambda"), ([2], [6])),
    "one-cycle": (Case(scheduler="one-cycle", optimizer="sgd"), ([2], [6, 14])),
    "restarts": (Case(scheduler="restarts", schedule="epoch", optimizer="foreach"), ([2], [6])),
    "fused": (Case(optimizer="fused"), ([2], [6])),
    "scaler": (Case(scaler=True), ([3], [1, 8])),
    "scaler-windows": (Case(scaler=True, accumulate=3), WINDOWS_OF_3),
    "callbacks": (Case(callbacks=True, epochs=5, log_every=2), ([6], [1, 3, 13])),
    "callbacks-saved-by-steps": (Case(callbacks=True, every_n_train_steps=2, schedule="epoch"), ([2], [5])),
    "torchmetrics": (Case(torchmetrics=True), ([2], [6])),
    "compiled": (Case(compiled="module", torchmetrics=True), ([2],)),
    "compiled-part": (Case(compiled="part"), ([2],)),
}
FURTHER = (  # whose parts other cases have
    *("windows-per-epoch-schedule", "saved-by-steps-windows", "global-batch", "stateful-stream-windows", "restarts"),
    *("scaler", "combined-windows", "callbacks-saved-by-steps", "every-step-logged", "plateau-per-step"),
    "compiled-part",
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")  # torch 2.9's own
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.campaign) if n in FURTHER else n for n in CASES])
def test_the_whole_state_is_the_same(name: str, tmp_path: Path) -> None:
    case, stops = CASES[name]
    check(case, tmp_path, stops)


WORKER_CASES = {
    "map": Case(workers=2, epochs=2),
    "seeded-samples": Case(workers=2, epochs=2, seed_samples=True),
    "torchdata": Case(data="torchdata", workers=2, epochs=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKER_CASES)
def test_a_run_with_loader_workers_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    check(WORKER_CASES[name], tmp_path, [[2, 6]])


@pytest.mark.slow
def test_workers_do_not_change_the_samples_order(tmp_path: Path) -> None:
    alone = run_once(Case(data="plain", epochs=1), tmp_path / "0")
    helped = run_with_stops(Case(data="plain", epochs=1, workers=2), tmp_path / "2", [2])
    assert helped.seen == alone.seen
    assert all(torch.equal(a, b) for a, b in zip(alone.module.parameters(), helped.module.parameters(), strict=True))


@pytest.mark.slow
def test_seeded_samples_do_not_depend_on_workers(tmp_path: Path) -> None:
    """Augmentation is a function of seed, epoch and sample: a resumed run may have other numbers of workers."""
    case = Case(seed_samples=True, epochs=2)
    check_parts(case, tmp_path, [(replace(case, workers=2), 2), (case, 8), (replace(case, workers=1), None)])


def test_compiled_and_plain_modules_take_up_each_other(tmp_path: Path) -> None:
    case = Case(epochs=2)
    check_parts(
        case, tmp_path, [(replace(case, compiled="part"), 2), (case, 8), (replace(case, compiled="part"), None)]
    )


def check_parts(case: Case, root: Path, parts: list[tuple[Case, int | None]]) -> None:
    """One run under several settings gives what `case` gives without a stop."""
    expected = run_once(case, root / "whole")
    rows: list[dict[str, float]] = []
    seen: list[list[int]] = []
    last = None
    for number, (part, stop) in enumerate(parts):
        got = run_once(part, root / "parts", number, rows, *([] if stop is None else [StopAt(stop)]))
        assert got.stopped == (stop is not None)
        seen += got.seen
        last = got
    assert last is not None
    plain = {name.replace("_orig_mod.", ""): value for name, value in last.module.state_dict().items()}
    for name, value in expected.module.state_dict().items():
        assert torch.equal(plain[name], value), name
    assert seen == expected.seen
    assert rows == expected.rows


# ---- the same Trainer again


def test_one_trainer_fits_again_after_a_resume(tmp_path: Path) -> None:
    """Stopped, gone on from memory, stopped, resumed from the disk with a new module: as if nothing had happened."""
    case = Case(epochs=3)
    expected = run_once(case, tmp_path / "whole")
    seed(100)
    stop, module = StopAt(2), Net()
    trainer = make_trainer(case, tmp_path / "parts", [], stop)
    with pytest.raises(Preempted):
        trainer.fit(module, train_loader(case), ckpt_path="auto")
    assert trainer.resume_report is None
    stop.step = 7
    with pytest.raises(Preempted):
        trainer.fit(module, train_loader(case), ckpt_path="auto")
    assert trainer.resume_report is not None
    stop.step = 12
    other = Net()
    with pytest.raises(Preempted):
        trainer.fit(other, train_loader(case), ckpt_path="last")
    trainer.fit(other, train_loader(case), DataLoader(Plain(7), batch_size=3), ckpt_path="last")
    assert module.seen + other.seen == expected.seen
    for name, value in expected.module.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    third = Net()
    trainer.fit(third, train_loader(case))
    assert third.seen == [], "it counts on, and all is done"
    assert trainer.resume_report is None


@pytest.mark.filterwarnings("ignore:.* cannot say where it stands")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stream_without_a_state_is_read_again(workers: int, tmp_path: Path) -> None:
    check(Case(data="stream", workers=workers, epochs=2), tmp_path, [[2], [6 if workers == 0 else 11]])


def test_a_stream_without_a_state_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="2 batches are read again and thrown away"):
        run_with_stops(Case(data="stream", epochs=1), tmp_path, [1])


# ---- two ranks


def check_on_ranks(root: Path, cases: list[tuple[Case, list[list[int]]]]) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    for number, (case, stops) in enumerate(cases):
        check(case, root / str(number), stops)


# 3 batches an epoch: 4 + 4, 4 + 4 and 3 + 3 samples.
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        [(Case(), [[2], [1, 4]]), (Case(accumulate=2, schedule="epoch"), [[2], [1, 3]])],
        pytest.param(
            [
                (Case(workers=2, epochs=2), [[1]]),
                (Case(validate=0.5, monitor=True, every_n_train_steps=None), [[1], [3]]),
            ],
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            [(Case(data="combined"), [[1], [4]]), (Case(data="torchdata"), [[1]]), (Case(data="stateful"), [[1], [3]])],
            marks=pytest.mark.campaign,
        ),
    ],
    ids=["map", "workers-and-fractions", "own-states"],
)
def test_a_run_of_two_ranks_resumes_bit_for_bit(cases: Any, tmp_path: Path) -> None:
    run_ranks(check_on_ranks, 2, tmp_path, cases)


# ---- at another world size


class Exact(Net):
    """No randomness in the step, so that the world size makes no difference."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, index = batch
        weight = self.trainer._run.source.share.mine
        self.seen.append(index.tolist() if weight else [])
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.average.update(index)
        self.log("average", self.average, on_step=False, on_epoch=True)
        return loss


def train_part(root: Path, stop: int | None) -> tuple[list[list[int]], list[float], dict[str, Tensor], list[float]]:
    """One part of the run, 8 samples a step and later 16: indices by micro-batch, losses by step, weights."""
    seed(3)
    module, losses, first = Exact(), StepLosses(), _First()
    callbacks: list[Callback] = [losses, first, ModelCheckpoint()]
    if stop is not None:
        callbacks.append(_Stop(stop))
    trainer = Trainer(
        accelerator="cpu",
        global_batch_size={0: 8, 4: 16},
        max_epochs=2,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        trigger_every=1,
    )
    try:
        trainer.fit(module, DataLoader(Plain(45), batch_size=4, shuffle=True), ckpt_path="auto")
    except Preempted:
        assert stop is not None
    means = [float(trainer.callback_metrics.get(name, -1.0)) for name in ("loss", "average")]
    means = [first.loss, *means, first.average]
    return module.seen, losses.values, {k: v.clone() for k, v in module.state_dict().items()}, means


class _First(Callback):
    """What the log and the metric object had at the end of the first epoch, which was interrupted."""

    loss = average = -1.0

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            self.loss, self.average = (float(trainer.callback_metrics[name]) for name in ("loss", "average"))


class _Stop(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.set_trigger("preempted", "the test")


@pytest.mark.dist
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_resumes_at_another_world_size(before: int, after: int, tmp_path: Path) -> None:
    whole_seen, whole_losses, whole_weights, whole_means = train_part(tmp_path / "whole", None)
    first = run_ranks(train_part, before, tmp_path / "parts", 2)
    second = run_ranks(train_part, after, tmp_path / "parts", None)

    def epoch(parts: list[Any], micro_batches: slice) -> list[int]:
        return [index for part in parts for batch in part[0][micro_batches] for index in batch]

    per_step = {1: 2, 2: 1}  # micro-batches
    assert len(first[0][1]) == 3
    seen = epoch(first, slice(None)) + epoch(second, slice(0, 3 * per_step[after]))
    assert sorted(seen) == list(range(45)), "every sample of the interrupted epoch once"
    assert first[0][1] + second[0][1] == pytest.approx(whole_losses, abs=1e-5)
    assert second[0][3] == pytest.approx(whole_means, rel=1e-6)
    assert whole_means[2:] == [22.0, 22.0], "each sample once, in the interrupted epoch too"
    for name, value in whole_weights.items():
        torch.testing.assert_close(second[0][2][name], value, atol=1e-5, rtol=0)
    assert whole_seen


def indices_of_epoch(root: Path, stop: int | None) -> list[int]:
    """The samples that this rank saw in its part of one epoch."""
    seed(4)
    module = Exact()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[ModelCheckpoint(), *([] if stop is None else [_Stop(stop)])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        trigger_every=1,
    )
    with nullcontext() if stop is None else pytest.raises(Preempted):
        trainer.fit(module, DataLoader(Plain(47), batch_size=4, shuffle=True), ckpt_path="auto")
    return [index for batch in module.seen for index in batch]


@pytest.mark.dist
@pytest.mark.slow
def test_every_sample_once_at_any_world_size(tmp_path: Path) -> None:
    seen: list[int] = []
    for world, stop in ((2, 1), (3, 3), (1, None)):  # more of other worlds: tests/model_runs/test_ranks.py
        for of_rank in run_ranks(indices_of_epoch, world, tmp_path, stop):
            seen += of_rank
    assert sorted(seen) == list(range(47))


# ---- other loops


def resumed(root: Path, make: Callable[[], TrainModule], stop: int | None, number: int, **settings: Any) -> Any:
    """Train with new objects and other seeds; the trainer and the module."""
    seed(50 + number)
    module = make()
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        trigger_every=1,
        callbacks=[] if stop is None else [_Stop(stop)],
        **settings,
    )
    with nullcontext() if stop is None else pytest.raises(Preempted):
        trainer.fit(
            module, DataLoader(Augmented(22), batch_size=4, shuffle=True), DataLoader(Plain(4)), ckpt_path="auto"
        )
    return trainer, module


@pytest.mark.filterwarnings("ignore:there is a validation loader")
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (Gan, {"max_epochs": 2}),
        pytest.param(Net, {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}, marks=pytest.mark.campaign),
        (Net, {"max_epochs": 3, "limit_train_batches": 4}),
        pytest.param(Net, {"max_epochs": 3, "overfit_batches": 4}, marks=pytest.mark.campaign),
        (Net, {"max_steps": 10, "val_check_interval": {"hours": 1}}),
    ],
    ids=["manual", "reloaded", "limited", "overfit", "max-steps"],
)
def test_manual_reloaded_and_limited_runs_resume_bit_for_bit(
    make: Callable[[], TrainModule], settings: dict[str, Any], tmp_path: Path
) -> None:
    whole, expected = resumed(tmp_path / "whole", make, None, 0, **settings)
    for stop in (1, 3, 4):
        root = tmp_path / str(stop)
        resumed(root, make, stop, 0, **settings)
        trainer, module = resumed(root, make, None, 1, **settings)
        assert trainer.global_step == whole.global_step
        for name, value in expected.state_dict().items():
            assert torch.equal(module.state_dict()[name], value), (stop, name)


def test_a_shorter_run_goes_on_when_max_steps_is_raised(tmp_path: Path) -> None:
    whole, expected = resumed(tmp_path / "whole", Net, None, 0, max_steps=14)
    resumed(tmp_path / "parts", Net, None, 0, max_steps=8)
    trainer, module = resumed(tmp_path / "parts", Net, None, 1, max_steps=14)
    assert torch.equal(module.net[0].weight, expected.net[0].weight)
    assert trainer.callback_metrics["loss_epoch"] == whole.callback_metrics["loss_epoch"]


def test_a_run_whose_checkpoint_is_behind_a_lowered_max_steps_trains_nothing(tmp_path: Path) -> None:
    for limit, ckpt_path in (({"max_epochs": 1}, None), ({"max_steps": 1}, tmp_path / "step-00000002-1")):
        saver, module = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1), Toy()
        trainer = quiet(**limit, callbacks=[saver], enable_checkpointing=True)
        trainer.fit(module, loader(), ckpt_path=ckpt_path)
    assert (trainer.global_step, module.seen) == (2, [])


class SaveEachBatch(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "mine")


def test_a_save_within_a_window_is_warned_of(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        max_steps=1,
        accumulate_grad_batches=2,
        callbacks=[SaveEachBatch()],
    )
    with pytest.warns(UserWarning, match=r"in the middle of an accumulation window \(batch 1"):
        trainer.fit(Net(), DataLoader(Plain(8), batch_size=4))


class SavesAndDies(Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.save)

    def save(self, trainer: Trainer, *args: Any) -> None:
        torch.rand(3)
        trainer.save_to(None, None, weights_only=False)
        raise RuntimeError("gone")


@pytest.mark.parametrize("stop", [2, 6])
def test_what_is_saved_before_the_first_step_of_a_resumed_run(stop: int, tmp_path: Path) -> None:
    expected = run_with_stops(Case(epochs=2), tmp_path / "expected", [stop])
    root, rows = tmp_path / "saved", []
    seen = run_once(Case(epochs=2), root, 0, rows, StopAt(stop)).seen
    for hook in ("on_train_start", "on_train_epoch_start"):
        if stop == 2 or hook == "on_train_start":  # at an epoch's end the next one's start draws anew
            with pytest.raises(RuntimeError, match="gone"):
                run_once(Case(epochs=2), root, 7, rows, SavesAndDies(hook))
    last = run_once(Case(epochs=2), root, 1, rows)
    assert_same(replace(last, seen=seen + last.seen), expected, "saved before the first step")


def test_a_resumed_program_may_log_with_other_arguments(tmp_path):
    class Logs(Toy):
        prog_bar, reduce_fx = False, "mean"

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            arguments = {"on_step": True, "on_epoch": True, "prog_bar": self.prog_bar, "reduce_fx": self.reduce_fx}
            self.log("loss", loss.detach() * 0 + batch_idx, **arguments)
            return loss

    def train(module, **settings):
        trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", enable_progress_bar=False, **settings)
        trainer.fit(module, loader(), ckpt_path="auto")
        return trainer

    train(Logs(), max_epochs=1, max_steps=2)  # in the middle of the epoch
    again = Logs()
    again.prog_bar = True
    trainer = train(again, max_epochs=1)
    batches = len(loader())
    assert trainer.callback_metrics["loss_epoch"] == (batches - 1) / 2  # those before the stop count too
    assert "loss_step" in trainer.progress_bar_metrics


class Draws(Toy):
    """Draws a random number at the start of each epoch, and in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.drawn.append(float(torch.rand(1)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.drawn.append(float(torch.rand(1)))
        return super().training_step(batch, batch_idx)


class AsksToSave(Callback):
    def on_fit_start(self, trainer: Any, module: Any) -> None:
        trainer.set_trigger("save")


def test_a_run_that_was_saved_before_its_first_step_begins_its_epoch(tmp_path: Path) -> None:
    def trained(*callbacks: Callback, ckpt_path: Path | None = None) -> list[float]:
        module, saver = Draws(), ModelCheckpoint(tmp_path, save_top_k=-1)
        trainer = quiet(max_epochs=2, enable_checkpointing=True, callbacks=[*callbacks, saver])
        trainer.fit(module, loader(), ckpt_path=ckpt_path)
        return module.drawn

    assert trained(AsksToSave()) == trained(ckpt_path=tmp_path / "step-00000000-1")


class Speed(str, Enum):
    FAST = "fast"


SAME: dict[str, Any] = {
    "two names of a class": ("torch.optim.Adam", "torch.optim.adam.Adam"),
    "its name and itself": ("torch.optim.Adam", torch.optim.Adam),
    "a configured object": (
        {"class_path": "torch.nn.ReLU", "init_args": {}},
        {"class_path": "torch.nn.modules.activation.ReLU"},
    ),
    "partials": (partial(torch.optim.SGD, lr=1), partial(torch.optim.SGD, lr=1.0)),
    "order of a dict": ({"a": {1: 2}, "b": 3}, {"b": 3, "a": {1: 2}}),
    "order of a set": ({0, 8, 16}, {16, 8, 0}),
    "int and float": ([1, (2, 3)], [1.0, (2, 3.0)]),
    "enum": (Speed.FAST, "fast"),
    "tensor": (torch.ones(2000), torch.ones(2000)),
    "nan": (float("nan"), float("nan")),
}
OTHER: dict[str, Any] = {
    "class": (torch.optim.Adam, torch.optim.SGD),
    "text": ("torch.optim.Adam", "torch.optim.nothing.Adam"),
    "partial": (partial(torch.optim.SGD, lr=1), partial(torch.optim.SGD, lr=2)),
    "no partial": (torch.optim.SGD, partial(torch.optim.SGD)),
    "key": ({1: 2}, {"1": 2}),
    "a tensor's middle": (torch.ones(2000), torch.ones(2000).index_fill(0, torch.tensor([1000]), 2)),
    "arguments": ({"class_path": "torch.nn.ReLU"}, {"class_path": "torch.nn.ReLU", "init_args": {"inplace": True}}),
}


@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_only_other_hyperparameters_are_warned_of(name: str, tmp_path: Path) -> None:
    before, now = SAME.get(name) or OTHER[name]
    trainer = quiet(max_steps=1)
    trainer.fit(KeepingToy(before), loader())
    path = trainer.save_checkpoint(tmp_path / "saved")
    other = nullcontext() if name in SAME else pytest.warns(UserWarning, match="other hyperparameters than .*value=")
    with other:
        quiet(max_steps=2).fit(KeepingToy(now), loader(), ckpt_path=path)
