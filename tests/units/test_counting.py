"""Runs that end, validate and save by tokens or samples: the same steps as a count by hand, on any ranks, resumed."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from instep.callbacks import Callback, EarlyStopping, ModelCheckpoint
from instep.data import PackedStream, StreamDataset
from instep.errors import DataError, SettingError
from instep.schedules import linear
from instep.strategies import MeshStrategy
from instep.testing import check_callback
from instep.units import Samples, Tokens, by_tokens
from tests.callbacks.fakes import RecordingLogger
from tests.helpers.spawn import RanksFailed, run_ranks
from tests.strategies.tiny_gpt import GLOBAL_BATCH, LENGTH, train
from tests.units.runs import SIZE, Model, Seen, Uneven, batches, length, trainer_for

COUNTS: dict[str, Any] = {
    "mask": lambda **limits: Tokens("attention_mask", **limits),
    "labels": lambda **limits: Tokens("labels", **limits),
    "function": lambda **limits: Tokens(lambda batch: int(batch["attention_mask"].sum()), **limits),
    "tensor": lambda **limits: Tokens(lambda batch: batch["attention_mask"].sum(), **limits),
    "key": lambda **limits: Tokens("x", **limits),
    "each": lambda **limits: Tokens(SIZE, **limits),
    "samples": lambda **limits: Samples(**{key.replace("tokens", "samples"): value for key, value in limits.items()}),
}


def units(kind: str, samples: list[int]) -> int:
    """Count by hand."""
    one = {"samples": 1, "key": SIZE, "each": SIZE}.get(kind)
    return sum(length(index) if one is None else one for index in samples)


def hold(kind: str, seen: Seen, samples: dict[int, list[int]], limits: dict[str, int], epoch_ended: bool) -> None:
    """Compare the totals, the validations and the end with those of a count by hand."""
    steps = list(samples)
    totals = list(itertools.accumulate((units(kind, samples[step]) for step in steps), initial=0))
    assert seen.totals == dict(zip(steps, totals[1:], strict=True))
    assert totals[-2] < limits["max_tokens"] <= totals[-1]
    every = limits.get("val_check_tokens", 10**9)
    due = [step for step, a, b in zip(steps, totals, totals[1:], strict=False) if b // every > a // every]
    at_end = () if epoch_ended else steps[-1:]  # a run that is stopped within an epoch validates, once
    assert seen.validated == sorted({*due, *at_end})


def counted(kind: str, data: Any, limits: dict[str, int], **settings: Any) -> None:
    counter = COUNTS[kind](**limits)
    seen = Seen(counter)
    trainer = trainer_for(seen, counter, check_val_every_n_epoch=10**6, **settings)
    trainer.fit(Model(), data, batches(3, shuffle=False))
    hold(kind, seen, seen.of_all_ranks(), limits, trainer.position.epoch_ended)


def settings_of_ranks() -> list[tuple[str, Any, dict[str, Any]]]:
    return [
        *((kind, batches(), {"strategy": "ddp"}) for kind in COUNTS),
        ("mask", batches(), {"strategy": "fsdp"}),
        ("labels", batches(), {"strategy": "ddp", "accumulate_grad_batches": 3}),
        ("samples", batches(), {"strategy": "fsdp", "accumulate_grad_batches": 2}),
        ("mask", batches(), {"strategy": "ddp", "global_batch_size": {0: 6, 3: 12}}),
        ("mask", DataLoader(Uneven(), batch_size=2), {"uneven": "join", "streams": "as_is"}),
        ("samples", DataLoader(Uneven(), batch_size=2), {"uneven": "join", "streams": "as_is"}),
        ("mask", batches(1, batch_size=1), {"strategy": "ddp"}),  # all ranks but one have nothing
    ]


def on_ranks() -> None:
    for number, (kind, data, settings) in enumerate(settings_of_ranks()):
        most = {"samples": 60, "key": 700, "each": 700}.get(kind, 300)
        if number == len(settings_of_ranks()) - 1:
            most = 5
        counted(kind, data, {"max_tokens": most, "val_check_tokens": most // 4}, **settings)


def test_one_process_counts_and_acts_as_by_hand() -> None:
    for kind in COUNTS:
        for settings in ({}, {"accumulate_grad_batches": 4}, {"max_epochs": 50}):
            counted(kind, batches(), {"max_tokens": 250, "val_check_tokens": 70}, **settings)


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.campaign)])
def test_ranks_count_each_sample_once_and_act_at_one_step(world: int) -> None:
    run_ranks(on_ranks, world, env={"INSTEP_DEBUG": str(world - 2)})  # of three, each collective is checked


# ---- ranks that read the same data


def on_mesh(mesh: dict[str, Any]) -> tuple[int, int]:
    tokens, samples = Tokens(lambda batch: batch[0].numel(), max_tokens=3 * GLOBAL_BATCH * LENGTH), Samples()
    losses = train(MeshStrategy(**mesh), steps=9, callbacks=[tokens, samples], batch_size=2).losses
    assert len(losses) == 3
    return tokens.total, samples.total


@pytest.mark.dist
@pytest.mark.extras
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"cp": 2}, {"pp": 2}], ids=str)
def test_ranks_that_share_their_data_count_it_once(mesh: dict[str, int]) -> None:
    assert run_ranks(on_mesh, 2, mesh) == [(3 * GLOBAL_BATCH * LENGTH, 3 * GLOBAL_BATCH)] * 2


# ---- saved and resumed


def saves(path: Path) -> list[int]:
    return sorted({int(folder.name.split("-")[1]) for folder in path.glob("step-*")})


def goes_on(folder: str, first: bool) -> list[int]:
    """Train to 120 tokens, or on from there; return the samples of all ranks in this part."""
    path, most = Path(folder) / "checkpoints", 120 if first else 400
    tokens = Tokens("attention_mask", max_tokens=most, val_check_tokens=50, save_every_tokens=60)
    seen, kept = Seen(tokens), ModelCheckpoint(path, save_top_k=-1, every_n_epochs=0)
    trainer = trainer_for(seen, tokens, kept, enable_checkpointing=True, default_root_dir=folder)
    before = saves(path)
    trainer.fit(Model(), batches(), batches(3), ckpt_path=None if first else "last")
    samples = seen.of_all_ranks()
    had = 0 if first else seen.totals[min(samples)] - units("mask", samples[min(samples)])
    assert first or 120 <= had < 160
    totals = list(itertools.accumulate((units("mask", each) for each in samples.values()), initial=had))
    due = [step for step, a, b in zip(samples, totals, totals[1:], strict=False) if b // 60 > a // 60]
    assert [step for step in saves(path) if step not in before] == sorted({*due, max(samples)})
    assert had < 60 or set(before) < set(saves(path))
    return [index for step in samples for index in samples[step]]


@pytest.mark.dist
@pytest.mark.parametrize(("first", "then"), [(3, 2), (1, 3), (2, 1)])
def test_a_run_goes_on_with_its_total_on_another_number_of_ranks(first: int, then: int, tmp_path: Path) -> None:
    (begun, *_) = run_ranks(goes_on, first, str(tmp_path), True)
    (rest, *_) = run_ranks(goes_on, then, str(tmp_path), False)
    seen = [*begun, *rest]
    for epoch in range(len(seen) // 23):
        assert sorted(seen[23 * epoch : 23 * epoch + 23]) == list(range(23))
    assert sum(map(length, seen)) >= 400


class Kill(Callback):
    """Kills rank 1 after its step 7."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)


def until_400(folder: str, *others: Callback) -> tuple[dict[int, int], dict[int, float], list[int], list[int]]:
    tokens = Tokens("attention_mask", max_tokens=400, val_check_tokens=90, save_every_tokens=40)
    path, seen, model = Path(folder) / "checkpoints", Seen(tokens), Model()
    model.schedule = lambda optimizer, trainer: by_tokens(linear(optimizer, 500, warmup_steps=50), trainer)
    saver = ModelCheckpoint(path, save_top_k=-1, every_n_epochs=0)
    how = {"enable_checkpointing": True, "default_root_dir": folder, "strategy": "fsdp", "uneven": "join"}
    trainer = trainer_for(seen, tokens, saver, *others, **how)
    trainer.fit(model, batches(), batches(3), ckpt_path="auto")
    return seen.totals, seen.rates, seen.validated, saves(path)


@pytest.mark.dist
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    (totals, rates, validated, saved), _ = run_ranks(until_400, 2, str(tmp_path / "whole"))
    with pytest.raises(RanksFailed):
        run_ranks(until_400, 2, str(tmp_path / "killed"), Kill(), others_s=5.0)
    kept = max(saves(tmp_path / "killed" / "checkpoints"))
    assert 0 < kept <= 7
    after = {step: total for step, total in totals.items() if step > kept}
    for rank in run_ranks(until_400, 2, str(tmp_path / "killed")):
        assert rank[0] == after
        assert rank[1] == {step: rates[step] for step in after}
        assert rank[2] == [step for step in validated if step > kept]
        assert rank[3] == saved


def test_a_validation_that_was_due_when_a_run_was_killed_comes_first(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    class Kill(Model):
        def on_validation_start(self) -> None:
            if kills and self.trainer.global_step:
                raise Killed

    def fit(**how: Any) -> Seen:
        tokens = Tokens("attention_mask", max_tokens=90, val_check_tokens=50)
        seen, saver = Seen(tokens), ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
        trainer_for(seen, tokens, saver, enable_checkpointing=True, default_root_dir=tmp_path).fit(
            Kill(), batches(shuffle=False), batches(3), **how
        )
        return seen

    kills = True
    with pytest.raises(Killed):
        fit()
    stopped = max(saves(tmp_path))
    kills = False
    after = fit(ckpt_path="last")
    assert after.validated[0] == stopped
    assert min(after.totals) == stopped + 1
    assert [*after.totals.values()][-1] >= 90


def test_a_second_fit_goes_on_and_another_trainer_begins(tmp_path: Path) -> None:
    samples = Samples(max_samples=10)
    trainer = trainer_for(samples, max_steps=3)
    trainer.fit(Model(), batches())
    assert samples.total == 6
    trainer.max_steps = 100
    trainer.fit(Model(), batches())
    assert (samples.total, trainer.global_step) == (10, 5)
    assert trainer.stop_reason == "max_samples=10 reached"
    trainer.fit(Model(), batches())
    assert (samples.total, trainer.global_step) == (10, 5)
    trainer_for(samples).fit(Model(), batches())
    assert samples.total == 10


# ---- beside other limits


def test_the_first_limit_ends_a_run() -> None:
    for settings, steps in (({"max_steps": 2}, 2), ({"min_steps": 9}, 9), ({"fast_dev_run": True}, 1), ({}, 5)):
        trainer = trainer_for(Samples(max_samples=10), **settings)
        trainer.fit(Model(), batches())
        assert trainer.global_step == steps, settings
    stopping = EarlyStopping("val_loss", stopping_threshold=1e9)  # at the first validation
    trainer = trainer_for(Samples(max_samples=20, val_check_samples=6), stopping)
    trainer.fit(Model(), batches(), batches(3))
    assert trainer.global_step in (3, 4, 5)  # a metric is asked about over ranks, some steps later
    assert "EarlyStopping" in trainer.stop_reason


def test_validations_come_beside_those_of_the_trainer_and_rank_checkpoints(tmp_path: Path) -> None:
    samples = Samples(max_samples=30, val_check_samples=8, save_every_samples=8)
    best, seen = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1), Seen(samples)
    trainer = trainer_for(seen, samples, best, enable_checkpointing=True, val_check_interval=5)
    trainer.fit(Model(), batches(24), batches(3))
    assert seen.validated == [4, 5, 8, 10, 12, 15]
    assert saves(tmp_path) == seen.validated  # one each, with a rank, though a save was asked for too
    assert len(best.best_k_models) == 6
    plain, monitored = Samples(max_samples=30, val_check_samples=8), ModelCheckpoint(tmp_path / "b", monitor="val_loss")
    trainer_for(plain, monitored, enable_checkpointing=True).fit(Model(), batches(), batches(3))
    assert monitored.best_model_score is not None  # though the Trainer validates at epochs' ends


# ---- data


def packed_totals(path: str) -> tuple[int, int]:
    stream = StreamDataset(path, decode=lambda record: record["tokens"])
    packed = PackedStream(stream, [length(index) for index in range(40)], size=16, block=20)

    class Packed(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch["input_ids"][:, :SIZE].float()).square().mean()

    tokens, places = Tokens("sequence_ids"), Tokens("input_ids")
    for counter in (tokens, places):
        trainer_for(counter, max_epochs=2).fit(Packed(), DataLoader(packed, batch_size=3, shuffle=True))
    assert places.total == 2 * 16 * len(packed)
    return tokens.total, len(packed)


@pytest.mark.dist
def test_padding_of_packed_streams_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"tokens": [1] * length(index)}) for index in range(40)))
    alone = packed_totals(str(path))
    assert alone[0] == 2 * sum(map(length, range(40)))
    assert run_ranks(packed_totals, 3, str(path)) == [alone] * 3


def test_steps_that_take_their_batches_themselves() -> None:
    class Takes(Model):
        def training_step(self, dataloader_iter: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            two = [next(dataloader_iter)[0], next(dataloader_iter)[0]]
            return sum(self.layer(batch["x"]).square().mean() for batch in two)

    for counter in (Samples(max_samples=16), Tokens(5, max_tokens=16 * 5)):
        trainer = trainer_for(counter)
        trainer.fit(Takes(), batches(24))
        assert (trainer.global_step, counter.total) == (4, 16 * (counter.per_sample() or 0))
    with pytest.raises(SettingError, match="takes its batches itself"):
        trainer_for(Tokens("x")).fit(Takes(), batches(24))


def test_manual_optimization_counts_each_batch() -> None:
    class Manual(Model):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))
            if batch_idx % 2:
                self.optimizers().step()

    samples = Samples(max_samples=10)
    trainer = trainer_for(samples)
    trainer.fit(Manual(), batches())
    assert (samples.total, trainer.position.batch, trainer.global_step) == (10, 5, 2)


def test_the_total_goes_to_the_loggers_when_they_are_due() -> None:
    logger = RecordingLogger()
    trainer_for(Samples(), logger=logger, log_every_n_steps=3, max_steps=7).fit(Model(), batches())
    assert logger.of("samples") == {3: 6, 6: 12}


def test_the_callbacks_keep_the_rules_of_callbacks() -> None:
    for make in (Samples, lambda: Tokens(lambda batch: batch[0].numel(), max_tokens=10_000)):
        check_callback(make)


# ---- mistakes


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    for field, make in {
        "max_tokens": lambda: Tokens("x", max_tokens=0.5),
        "val_check_tokens": lambda: Tokens("x", val_check_tokens=0),
        "save_every_samples": lambda: Samples(save_every_samples=float("inf")),
        "count": lambda: Tokens(0),
        "ignore": lambda: Tokens(4, ignore=1),
        "log": lambda: Samples(log=1),  # pyright: ignore[reportArgumentType]
    }.items():
        with pytest.raises(SettingError, match=field):
            make()
    assert Tokens("x", max_tokens=2e9).maximum == 2_000_000_000
    with pytest.raises(SettingError, match="no ModelCheckpoint"):
        trainer_for(Samples(save_every_samples=3)).fit(Model(), batches())
    with pytest.raises(DataError, match="no tensor of that name; it is index, x, attention_mask, labels"):
        trainer_for(Tokens("ids")).fit(Model(), batches())
    with pytest.warns(UserWarning, match="nothing to validate"):
        trainer_for(Samples(max_samples=2, val_check_samples=3)).fit(Model(), batches())
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    trainer_for(saver, max_steps=2, enable_checkpointing=True).fit(Model(), batches())
    samples = Samples()
    trainer_for(samples, max_steps=1).fit(Model(), batches())
    again = trainer_for(saver, samples, max_steps=4, enable_checkpointing=True)
    with pytest.warns(UserWarning, match="has no count of Samples"):
        again.fit(Model(), batches(), ckpt_path=saver.last_model_path)
    assert samples.total == 4


class WordStream(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        yield from ("a", "bc", "def")


def test_a_batch_without_tensors_needs_a_function() -> None:
    data = DataLoader(["a", "bc", "def"], batch_size=2, collate_fn=list)  # pyright: ignore[reportArgumentType]

    class Words(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(torch.ones(SIZE)).square().mean()

    tokens = Tokens(lambda words: sum(map(len, words)))
    trainer_for(tokens, max_epochs=1).fit(Words(), data)
    assert tokens.total == 6
    stream = DataLoader(WordStream(), batch_size=2, collate_fn=list)
    with pytest.raises(DataError, match="how many samples"):
        trainer_for(Samples(), max_epochs=1).fit(Words(), stream)
