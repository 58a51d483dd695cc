"""Several ranks: every sample once, one decision for all, and an error on one ends all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from instep import Trainer, TrainModule
from instep.callbacks import Callback, EarlyStopping, ModelCheckpoint
from tests.helpers.spawn import RanksFailed, run_ranks
from tests.trainer.resuming import Plain
from tests.trainer.toys import Mean

pytestmark = pytest.mark.dist

LENGTHS = (1, 2, 5, 8, 11)


def quiet(**settings: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**defaults, **settings})


def loader(samples: int, batch_size: int = 2, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(Plain(samples), batch_size=batch_size, shuffle=shuffle)


GATHERED: list[int] = []  # calls of what metric objects synchronize by


def gather(*args: Any, **kwargs: Any) -> Any:
    from torchmetrics.utilities.distributed import gather_all_tensors  # late: as below

    GATHERED.append(1)
    return gather_all_tensors(*args, **kwargs)


def _rows_metric() -> Any:
    """A metric whose state is a list of matrices, as predictions are kept."""
    from torchmetrics import Metric

    class Rows(Metric):
        full_state_update = False

        def __init__(self) -> None:
            super().__init__(dist_sync_fn=gather)
            self.add_state("rows", default=[], dist_reduce_fx="cat")

        def update(self, x: torch.Tensor) -> None:
            self.rows.append(x)

        def compute(self) -> torch.Tensor:
            return torch.cat(list(self.rows) if isinstance(self.rows, list) else [self.rows]).sum()

    return Rows()


class Counting(TrainModule):
    """Counts samples in every stage; each evaluation step has a collective of its own."""

    def __init__(self, torchmetrics: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.dropout = nn.Dropout(0.5)
        self.trained: list[int] = []
        self.mean_index: Any = Mean()
        if torchmetrics:
            from torchmetrics import MeanMetric  # late: ranks wait for it longer than for torch

            self.mean_index = MeanMetric()
            self.rows = _rows_metric()  # of a rank without a sample, which has no rows, too
            self.mean_trained = MeanMetric(dist_sync_fn=gather)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert GATHERED == [], "nothing is synchronized until a value is read"

    def on_validation_start(self) -> None:
        GATHERED.clear()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, index = batch
        if self.trainer._run.source.share.mine:
            self.trained += index.tolist()
        self.log("count", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum")
        if hasattr(self, "mean_trained"):
            self.mean_trained.update(index)
            self.log("trained mean", self.mean_trained, on_step=False, on_epoch=True)
        return nn.functional.mse_loss(self.layer(x), y)

    def on_train_epoch_start(self) -> None:
        GATHERED.clear()

    def _evaluate(self, batch: Any) -> None:
        x, y, index = batch
        if torch.distributed.is_initialized():
            everyone = self.all_gather(torch.tensor(len(x)))
            torch.distributed.all_reduce(everyone.contiguous())
        error = (self.layer(x) - y).square().mean()
        self.log_dict({"error": error, "index": index.double().mean()})
        self.log("count", float(len(x)), reduce_fx="sum")
        self.log("largest", index.max(), reduce_fx="max")
        self.mean_index.update(index)
        self.log("metric object", self.mean_index)
        if hasattr(self, "rows"):
            self.rows.update(x)
            self.log("rows", self.rows, metric_attribute="rows")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[2]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def count_everything(torchmetrics: bool = False) -> list[dict[str, Any]]:
    """What every stage makes of data sets of several lengths."""
    results = []
    for length in LENGTHS:
        torch.manual_seed(5)
        module = Counting(torchmetrics)
        trainer = quiet(max_epochs=2)
        tested = trainer.test(module, loader(length), verbose=False)[0]
        validated = trainer.validate(module, loader(length), verbose=False)[0]
        predicted = trainer.predict(module, loader(length))
        assert predicted is not None
        fitted = quiet(max_epochs=2)
        fitted.fit(module, loader(length, shuffle=True), loader(length))
        results.append(
            {
                "test": tested,
                "validate": validated,
                "predict": [int(i) for batch in predicted for i in batch],
                "trained": module.trained,
                "count": float(fitted.callback_metrics["count"]),
                "after fit": {k: float(v) for k, v in fitted.callback_metrics.items() if k != "count"},
            }
        )
    return results


def test_every_sample_counts_once() -> None:
    alone = count_everything()
    for world_size in (2, 3):
        ranks = run_ranks(count_everything, world_size, world_size == 2)
        for number, length in enumerate(LENGTHS):
            expected = alone[number]
            for results in ranks:
                got = results[number]
                for stage in ("test", "validate"):
                    assert got[stage]["count"] == expected[stage]["count"] == length
                    assert got[stage]["largest"] == length - 1
                    assert got[stage]["error"] == pytest.approx(expected[stage]["error"], rel=1e-6)
                    assert got[stage]["metric object"] == pytest.approx((length - 1) / 2, rel=1e-6)
                    assert got[stage]["index"] == pytest.approx((length - 1) / 2, rel=1e-12)
                    if world_size == 2:
                        rows = float(Plain(length).x.sum())
                        assert got[stage]["rows"] == pytest.approx(rows, rel=1e-5, abs=1e-5)
                        assert got["after fit"]["trained mean"] == pytest.approx((length - 1) / 2, rel=1e-6)
                assert got["count"] == length
                assert got[stage] == ranks[0][number][stage], "the result is the same on every rank"
            assert all(results[number]["predict"] == list(range(length)) for results in ranks), "in order, on each"
            trained = sorted(i for results in ranks for i in results[number]["trained"])
            assert trained == sorted([*range(length)] * 2), "two epochs"


class InGroups(Counting):
    """Logs a value of each rank over all ranks, and over a group of this rank alone; rank 0 logs one more."""

    def on_fit_start(self) -> None:
        alone = [torch.distributed.new_group([rank]) for rank in range(2)]
        self.groups = {"all": torch.distributed.group.WORLD, "own": alone[self.global_rank]}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for name, group in self.groups.items():
            value = float(10 * self.global_rank + batch_idx)
            self.log(name, value, on_step=True, on_epoch=True, sync_dist=True, sync_dist_group=group)
        if self.global_rank == 0:
            self.log("first", float(batch_idx), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def log_in_groups() -> dict[str, float]:
    trainer = quiet(max_epochs=1, log_every_n_steps=1)
    trainer.fit(InGroups(), loader(8))
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name != "count"}


def test_values_are_combined_over_the_ranks_of_a_group_or_those_that_log_them() -> None:
    both = {"all": 5.5, "all_step": 6.0, "all_epoch": 5.5, "first": 0.5}
    for rank, logged in enumerate(run_ranks(log_in_groups, 2)):
        own = {"own": 10 * rank + 0.5, "own_step": 10 * rank + 1.0, "own_epoch": 10 * rank + 0.5}
        assert logged == both | own


# ---- one decision


class StopOn(Callback):
    """Sets `should_stop` on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == 3:
            trainer.should_stop = True


class OwnMetric(Counting):
    """One rank's loss never falls: what EarlyStopping watches differs per rank."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        improving = -float(self.global_step) if self.global_rank == 0 else 1.0
        self.log("mine", improving, sync_dist=False)


class OwnTrigger(Callback):
    """A trigger that one rank sets, and all check at the same step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            trainer.set_trigger("mine")
        if trainer.check_trigger("mine"):
            self.seen.append(trainer.global_step)


def decide() -> dict[str, Any]:
    warnings.simplefilter("error")
    result: dict[str, Any] = {}
    for rank in range(2):
        for every in (1, None):
            trainer = quiet(max_epochs=2000, callbacks=[StopOn(rank)], trigger_every=every)
            trainer.fit(Counting(), loader(8))
            result[f"should_stop on {rank}, every {every}"] = trainer.global_step
    trainer = quiet(max_epochs=100, callbacks=[EarlyStopping("mine", patience=1)])
    trainer.fit(OwnMetric(), loader(8), loader(4))
    result["early stopping"] = trainer.global_step
    own = OwnTrigger()
    quiet(max_epochs=2, callbacks=[own]).fit(Counting(), loader(8))
    result["trigger"] = own.seen
    return result


def test_what_one_rank_decides_all_do_at_the_same_step() -> None:
    first, second = run_ranks(decide, 2)
    assert first == second
    for rank in range(2):
        assert first[f"should_stop on {rank}, every 1"] == 4
        assert 4 <= first[f"should_stop on {rank}, every None"] < 4000
    assert first["early stopping"] == 4  # 2 steps an epoch; for rank 1 alone the second validation is no better
    assert first["trigger"] == [2]


# ---- random numbers


class Masks(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.masks: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.masks.append(self.dropout(torch.ones(16)).tolist())
        return super().training_step(batch, batch_idx)


def draw() -> dict[str, Any]:
    torch.manual_seed(11 + torch.distributed.is_initialized())
    module = Masks()
    start = module.layer.weight.tolist()
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader(8))
    return {"start": start, "masks": module.masks, "end": module.layer.weight.tolist(), "seed": trainer.seed}


def draw_unseeded(rank_seeds: tuple[int, int]) -> list[list[float]]:
    """Ranks that a user has not seeded: the first one's weights hold."""
    torch.manual_seed(rank_seeds[int(os.environ["RANK"])])
    module = Counting()
    quiet(max_epochs=1, limit_train_batches=1).fit(module, loader(8))
    trained = module.layer.weight.flatten().tolist()
    module = Counting()
    before = module.layer.weight.flatten().tolist()
    quiet().test(module, loader(8), verbose=False)
    return [trained, before, module.layer.weight.flatten().tolist()]


def draw_all() -> tuple[dict[str, Any], list[list[float]]]:
    return draw(), draw_unseeded((1, 2))


def test_ranks_draw_different_masks_from_equal_weights() -> None:
    (first, unseeded_first), (second, unseeded_second) = run_ranks(draw_all, 2)
    assert first["seed"] == second["seed"]
    assert first["start"] == second["start"]
    assert first["end"] == second["end"]
    assert all(a != b for a, b in zip(first["masks"], second["masks"], strict=True))
    assert unseeded_first[0] == unseeded_second[0], "after training"
    assert unseeded_first[1] != unseeded_second[1]
    assert unseeded_first[2] == unseeded_second[2] == unseeded_first[1], "one model is tested, not two"


# ---- manual optimization: a GAN


class Gan(TrainModule):
    """Two optimizers, three backwards in a step, halves of the model each."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.gradients: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _, _ = batch
        g_opt, d_opt = self.optimizers()
        weight = self.batch_weight
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        loss = nn.functional.binary_cross_entropy_with_logits

        self.toggle_optimizer(d_opt)
        d_opt.zero_grad()
        self.manual_backward(loss(self.critic(real), ones) * weight)
        self.manual_backward(loss(self.critic(self.generator(real.flip(1)).detach()), zeros) * weight)
        self._note(self.critic)
        d_opt.step()
        self.untoggle_optimizer(d_opt)

        self.toggle_optimizer(g_opt)
        g_opt.zero_grad()
        self.manual_backward(loss(self.critic(self.generator(real.flip(1))), ones) * weight)
        self._note(self.generator)
        g_opt.step()
        self.untoggle_optimizer(g_opt)

    def _note(self, half: nn.Module) -> None:
        self.gradients.append([v for p in half.parameters() for v in p.grad.flatten().tolist()])  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(half.parameters(), lr=0.1) for half in (self.generator, self.critic)]


class ScaledOnce(Gan):
    """The same with one backward over both losses, and every second batch without a step of the generator."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _, _ = batch
        g_opt, d_opt = self.optimizers()
        score = self.critic(self.generator(real)).mean() * self.batch_weight
        d_opt.zero_grad()
        g_opt.zero_grad()
        self.manual_backward(score)
        self._note(self.critic)
        self._note(self.generator)
        d_opt.step()
        if batch_idx % 2 == 0:
            g_opt.step()


def train_gans(batch_size: int) -> list[tuple[list[list[float]], list[float], int]]:
    results = []
    for kind in (Gan, ScaledOnce):
        torch.manual_seed(2)
        module = kind()
        trainer = quiet(max_epochs=2)
        trainer.fit(module, loader(22, batch_size, shuffle=True))
        weights = [v for p in module.parameters() for v in p.flatten().tolist()]
        results.append((module.gradients, weights, trainer.global_step))
    return results


def test_a_gan_on_two_ranks_is_the_gan_of_one_process() -> None:
    alone = train_gans(8)
    first, second = run_ranks(train_gans, 2, 4)
    assert first == second
    for got, expected in zip(first, alone, strict=True):
        assert got[2] == expected[2]
        for a, b in zip(got[0], expected[0], strict=True):
            assert a == pytest.approx(b, abs=1e-6)
        assert got[1] == pytest.approx(expected[1], abs=1e-5)


# ---- an error on one rank


class Failing(Callback):
    def __init__(self, hook: str, rank: int = 1) -> None:
        def fail(trainer: Any, *args: Any) -> None:
            if trainer.global_rank == rank and trainer.global_step == 2:
                raise ValueError(f"boom in {hook}")

        setattr(self, hook, fail)


class FailingState(Callback):
    """Collects its state on one rank only."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            raise ValueError("boom in the save")


class LateUnsavable(Callback):
    """Its state can be saved at first; later not, on one rank."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 2:
            checkpoint["bad"] = object()


class FailingStep(Counting):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and self.global_step == 2:
            raise ValueError("boom in the step")
        self.log("loss", 1.0)
        return super().training_step(batch, batch_idx)


class ApartFromTheModule(Counting):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return torch.zeros((), requires_grad=True) if self.global_rank == 1 and self.global_step == 2 else loss


def fail(root: Path, make: Callable[[], tuple[TrainModule, dict[str, Any]]]) -> None:
    warnings.simplefilter("ignore")
    module, settings = make()
    trainer = quiet(max_epochs=3, default_root_dir=root, log_every_n_steps=1, **settings)
    trainer.fit(module, loader(8), loader(4))


def in_step() -> tuple[TrainModule, dict[str, Any]]:
    return FailingStep(), {"callbacks": [ModelCheckpoint(save_on_exception=False)], "enable_checkpointing": True}


def in_graph() -> tuple[TrainModule, dict[str, Any]]:
    return ApartFromTheModule(), {}


def in_callback() -> tuple[TrainModule, dict[str, Any]]:
    return Counting(), {"callbacks": [Failing("on_train_batch_end")]}


def in_validation() -> tuple[TrainModule, dict[str, Any]]:
    return Counting(), {"callbacks": [Failing("on_validation_batch_end", rank=0)]}


def in_save() -> tuple[TrainModule, dict[str, Any]]:
    saver = ModelCheckpoint(every_n_train_steps=1)
    return Counting(), {"callbacks": [FailingState(), saver], "enable_checkpointing": True}


def unsavable() -> tuple[TrainModule, dict[str, Any]]:
    saver = ModelCheckpoint(every_n_train_steps=1)
    return Counting(), {"callbacks": [LateUnsavable(), saver], "enable_checkpointing": True}


FAILURES: dict[str, tuple[Callable[..., Any], int, str]] = {
    "step": (in_step, 1, "boom in the step"),
    "graph": (in_graph, 1, "a loss that depends on no parameter. With several processes the others would wait"),
    "callback": (in_callback, 1, "boom in on_train_batch_end"),
    "validation": (in_validation, 0, "boom in on_validation_batch_end"),
    "save": (in_save, 1, "boom in the save"),
    "unsavable": (unsavable, 0, "bad"),
}


@pytest.mark.parametrize(
    "where",
    [pytest.param(name, marks=[] if name in ("step", "graph", "save") else pytest.mark.slow) for name in FAILURES],
)
def test_an_error_on_one_rank_ends_all(where: str, tmp_path: Path) -> None:
    make, rank, text = FAILURES[where]
    with pytest.raises(RanksFailed) as failed:
        run_ranks(fail, 2, tmp_path, make)
    errors = failed.value.errors
    assert text in errors[rank]
    assert set(errors) == {0, 1}
    assert "did not end" not in errors[1 - rank], str(failed.value)
    saved = [path.name for path in tmp_path.rglob("step-*") if (path / "manifest.json").exists()]
    assert not [name for name in saved if int(name.split("-")[1]) > 2]
    if where in ("save", "unsavable"):
        assert saved == ["step-00000001-1"], "the failed save left nothing, the one before is there"
