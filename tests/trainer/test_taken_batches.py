"""Steps that take their batches themselves: `training_step(self, dataloader_iter)`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from instep import Tuner
from instep.errors import DataError, HookError, SettingError
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import LoggingToy, Stream, Toy, assert_same, loader, quiet, samples, weights


class Takes(LoggingToy):
    """Takes `each` batches in every training step, and one in the others."""

    def __init__(self, each: int = 1) -> None:
        super().__init__()
        self.each = each
        self.calls: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls.append(("start", batch, batch_idx))

    def training_step(self, dataloader_iter: Any) -> Any:
        batches = [next(dataloader_iter) for _ in range(self.each)]
        self.calls.append(("step", [idx for _, idx, _ in batches], dataloader_iter.done))
        together = [torch.cat(parts) for parts in zip(*(batch for batch, _, _ in batches), strict=True)]
        return LoggingToy.training_step(self, together, 0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(("end", len(batch[0]), batch_idx))

    def validation_step(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, dataloader_idx = next(dataloader_iter)
        self.calls.append(("validate", batch_idx, dataloader_idx))
        self.log("val_loss", self.loss(batch))

    def predict_step(self, dataloader_iter: Any) -> Any:
        return self.layer(next(dataloader_iter)[0][0]).squeeze(-1)


def test_one_batch_a_step_is_the_plain_loop_bit_for_bit():
    plain, takes = LoggingToy(), Takes()
    takes.layer.load_state_dict(plain.layer.state_dict())
    for module in (plain, takes):
        trainer = quiet(max_epochs=2, val_check_interval=2, num_sanity_val_steps=1)
        trainer.fit(module, loader(10), [loader(5), loader(3)])
        module.found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        module.predicted = trainer.predict(module, loader(5))
    assert_same(weights(plain), weights(takes))
    assert takes.found == plain.found
    for one, other in zip(takes.predicted, plain.predicted, strict=True):
        assert torch.equal(one, other)
    checks = [("validate", 0, 0), ("validate", 1, 0), ("validate", 0, 1)]
    batches = [[("start", None, i), ("step", [i], i == 3), ("end", n, i)] for i, n in enumerate((3, 3, 3, 1))]
    epoch = [call for i, calls in enumerate(batches) for call in (*calls, *(checks if i % 2 else ()))]
    assert takes.calls == [("validate", 0, 0), ("validate", 0, 1), *epoch, *epoch]


def test_a_step_of_several_batches_counts_them_and_an_incomplete_one_trains_nothing(tmp_path: Path):
    module, other = Takes(2), Toy()
    other.layer.load_state_dict(module.layer.state_dict())
    trainer = quiet(max_epochs=2)
    trainer.fit(module, loader(15))  # 5 batches
    optimizer = other.configure_optimizers()
    for _ in range(2):
        for batch in list(loader(15, 6))[:2]:
            optimizer.zero_grad()
            other.loss(batch).backward()
            optimizer.step()
    assert trainer.global_step == 4
    assert trainer.position.batch == 5
    for name, value in weights(module).items():
        torch.testing.assert_close(value, weights(other)[name])

    def run(steps: int, ckpt_path: Any = None, data: Any = None) -> Any:
        torch.manual_seed(3)
        module = Takes(2)
        trainer = quiet(max_steps=steps)
        trainer.fit(module, loader(24, shuffle=True) if data is None else data, ckpt_path=ckpt_path)
        return trainer, module

    half = run(3)[0].save_checkpoint(tmp_path / "half")
    resumed, whole = run(7, half)[1], run(7)[1]
    assert_same(weights(resumed), weights(whole))
    assert next(call for call in resumed.calls if call[0] == "step") == ("step", [6, 7], True)
    assert run(9, data=DataLoader(Stream(14), 2))[0].position.epoch == 2  # 7 batches: 3 steps an epoch


def test_a_step_may_take_a_batch_ahead_but_must_take_one():
    class Ahead(Toy):
        held: Any = None

        def training_step(self, dataloader_iter: Any) -> Any:
            batch = self.held or next(dataloader_iter)
            self.held = None if dataloader_iter.done else next(dataloader_iter)
            return super().training_step(batch[0], batch[1])

    module = Ahead()
    quiet(max_epochs=1).fit(module, loader())
    assert len(module.seen) == 3  # the last one was taken by the third step, after which none is left
    module.training_step = lambda dataloader_iter: module.layer.weight.sum()
    with pytest.raises(HookError, match="took no batch"):
        quiet(max_epochs=1).fit(module, loader())


def test_a_step_that_takes_batches_refuses_accumulation_and_other_arguments():
    with pytest.raises(SettingError, match="accumulate_grad_batches=2: training_step"):
        quiet(max_epochs=1, accumulate_grad_batches=2).fit(Takes(), loader())
    module = Toy()
    module.training_step = lambda dataloader_iter, batch_idx: None
    with pytest.raises(HookError, match="dataloader_iter stands alone"):
        quiet(max_epochs=1).fit(module, loader())


def fit_on_ranks() -> dict[str, Any]:
    torch.manual_seed(2)
    module = Takes()
    trainer = quiet(strategy="ddp", devices=2, max_epochs=2)
    trainer.fit(module, DataLoader(samples(13), 2), DataLoader(samples(7), 2))
    return {**weights(module), "val_loss": trainer.callback_metrics["val_loss"]}


@pytest.mark.dist
def test_steps_that_take_batches_train_on_two_ranks_as_on_one():
    ranks = run_ranks(fit_on_ranks, 2)
    torch.manual_seed(2)
    alone = Toy()
    trainer = quiet(max_epochs=2)
    trainer.fit(alone, DataLoader(samples(13), 4))
    for found in ranks:
        for name, value in weights(alone).items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["val_loss"].float(), alone.loss(samples(7).tensors).detach())


def test_a_learning_rate_is_found_for_steps_that_take_batches_and_nothing_is_left_of_it():
    def run(module: Any) -> list[float]:
        before = {name: value.clone() for name, value in weights(module).items()}
        found = Tuner(quiet(max_epochs=1)).lr_find(module, loader(11), num_training=9, update_attr=False)
        assert_same(weights(module), before)
        assert found is not None
        return found.results["loss"]

    plain, one, two = LoggingToy(), Takes(), Takes(2)
    for module in (one, two):
        module.load_state_dict(plain.state_dict())
    assert run(one) == run(plain)
    assert all(map(math.isfinite, run(two)))  # an epoch of 11 samples has 4 batches
    with pytest.raises(DataError, match="more batches than an epoch has"):
        run(Takes(5))


@pytest.mark.filterwarnings("ignore:compile=", "ignore:global_step 2", "ignore:The .grad attribute")
def test_guests_of_the_step_work_together():
    """Own batches, the guard against nan, one compiled step and garbage collection: each has its effect."""

    class Sick(Takes):
        def training_step(self, dataloader_iter: Any) -> Any:
            loss = super().training_step(dataloader_iter)
            return loss * math.nan if self.trainer.global_step == 1 else loss

    plain, together = Takes(2), Sick(2)
    together.layer.load_state_dict(plain.layer.state_dict())
    step = {"scope": "step", "backend": "eager"}
    quiet(max_steps=1).fit(plain, loader(12))
    trainer = quiet(max_steps=2, nonfinite="skip", compile=step, gc_every_n_steps=1)
    trainer.fit(together, loader(12))
    assert_same(weights(together), weights(plain))  # the second step was left out
    assert (trainer.global_step, trainer.position.nonfinite_steps) == (2, 1)
    assert [call[1] for call in together.calls if call[0] == "step"] == [[0, 1], [2, 3]]
