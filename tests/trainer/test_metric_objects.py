"""Metric objects that several names, loaders and stages log: each value is of its own samples, or an error says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from instep import TrainModule
from instep.callbacks import EarlyStopping, ModelCheckpoint
from instep.errors import LogError
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import Toy, quiet

TRAIN, FIRST, SECOND = [1.0, 2.0, 3.0, 6.0], [10.0, 20.0, 30.0, 40.0, 50.0], [7.0, 8.0, 100.0]


def metrics() -> Any:
    import torchmetrics  # late: takes longer to load than torch, and is not needed to collect tests

    return torchmetrics


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def numbers(values: list[float], batch_size: int = 1) -> Any:
    return DataLoader([torch.tensor([value]) for value in values], batch_size=batch_size)


class Sharing(TrainModule):
    """Counts the numbers of every stage into one object, and logs it as `log_in` asks for each hook."""

    def __init__(self, metric: Any = None, **log_in: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.metric = metrics().MeanMetric() if metric is None else metric
        self.log_in = log_in
        self.by_hand: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        return self.layer(batch.new_zeros(1, 4)).sum()

    def count(self, stage: str, batch: Any) -> Any:
        self.metric.update(batch)
        if stage in self.log_in:
            self.log_in[stage](self)
        return self.loss(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.count("training", batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.count("validation", batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.count("test", batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def end(self, hook: str) -> None:
        if hook in self.log_in:
            self.log_in[hook](self)

    def on_train_epoch_end(self) -> None:
        self.end("train_end")

    def on_validation_epoch_end(self) -> None:
        self.end("validation_end")


def logs(*names: str, **options: Any) -> Any:
    return lambda module: [module.log(name, module.metric, **options) for name in names]


def measured(module: Any, *loaders: Any, fn: str = "validate", **settings: Any) -> dict[str, float]:
    results = getattr(quiet(**settings), fn)(module, list(loaders), verbose=False)
    return {name: round(float(value), 4) for one in results for name, value in one.items()}


# ---- several names


def test_all_names_of_one_object_have_its_value() -> None:
    module = Sharing(validation=logs("a", "b/c", "d"), validation_end=logs("end"))
    assert measured(module, numbers(FIRST)) == dict.fromkeys(("a", "b/c", "d", "end"), mean(FIRST))
    assert measured(module, numbers(SECOND)) == dict.fromkeys(("a", "b/c", "d", "end"), round(mean(SECOND), 4))


def test_an_object_and_what_is_made_of_it_are_both_right() -> None:
    def log(module: Any) -> None:
        module.log("a", module.metric)
        module.log("twice", module.metric * 2)  # a new object in each step, which counts in its part
        module.log("lowest", module.lowest)
        module.log("sum", module.metric + module.lowest)

    module = Sharing(validation=log)
    module.lowest = metrics().MinMetric()
    module.validation_step = lambda batch, batch_idx: (module.lowest.update(batch), module.count("validation", batch))
    assert measured(module, numbers(FIRST)) == {"a": 30.0, "twice": 60.0, "lowest": 10.0, "sum": 40.0}


def test_callbacks_may_watch_any_name_of_an_object(tmp_path: Any) -> None:
    module = Sharing(validation=logs("a", "b", "c"), training=logs("train", "again", on_step=True, on_epoch=True))
    keeps = [ModelCheckpoint(tmp_path / name, monitor=name) for name in ("a", "c", "again_epoch")]
    stops = EarlyStopping("b", patience=1)
    trainer = quiet(
        max_epochs=9,
        default_root_dir=tmp_path,
        callbacks=[*keeps, stops],
        enable_checkpointing=True,
        log_every_n_steps=1,
    )
    trainer.fit(module, numbers(TRAIN), numbers(FIRST))
    assert [float(one.best_model_score) for one in keeps] == [30.0, 30.0, 3.0]
    assert stops.stopped_epoch == 1
    assert stops.best_score == 30.0
    shown = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert {name: shown[name] for name in ("a", "b", "c")} == dict.fromkeys("abc", 30.0)
    assert {shown["train_epoch"], shown["again_epoch"]} == {3.0}


def test_an_object_that_logs_step_values_alone_begins_anew_in_each_epoch() -> None:
    counts: list[int] = []
    module = Sharing(
        metrics().CatMetric(),
        training=lambda module: (counts.append(len(module.metric.value)), module.log("x", module.metric)),
    )
    quiet(max_epochs=3).fit(module, numbers(TRAIN))
    assert counts == [1, 2, 3, 4] * 3


def test_a_group_of_a_collection_is_reset_where_one_of_it_is_logged() -> None:
    binary = metrics().classification
    kinds = [binary.BinaryRecall(), binary.BinaryPrecision(), binary.BinaryF1Score()]

    class Model(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.all = metrics().MetricCollection(kinds)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.all.update(batch[:, 0], batch[:, 1].int())
            self.log("precision", self.all["BinaryPrecision"])

    hits, misses = (DataLoader([torch.tensor([1.0, true])] * 4, batch_size=1) for true in (1.0, 0.0))
    module = Model()
    assert measured(module, hits, misses) == {"precision/dataloader_idx_0": 1.0, "precision/dataloader_idx_1": 0.0}
    assert measured(module, misses) == {"precision": 0.0}
    assert measured(module, hits) == {"precision": 1.0}


# ---- several loaders


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        (lambda: metrics().MeanMetric(), mean),
        (lambda: metrics().SumMetric(), sum),
        (lambda: metrics().MinMetric(), min),
        (lambda: metrics().MeanMetric() * 2, lambda values: 2 * mean(values)),
        (lambda: metrics().wrappers.Running(metrics().MeanMetric(), 2), lambda values: mean(values[-2:])),
    ],
    ids=["mean", "sum", "min", "composition", "running"],
)
@pytest.mark.parametrize("fn", ["validate", "test"])
def test_each_loader_has_the_value_of_its_own_samples(metric: Any, value: Any, fn: str) -> None:
    module = Sharing(metric(), **dict.fromkeys(("validation", "test"), logs("a", "b")))
    found = measured(module, numbers(FIRST), numbers(SECOND), numbers(TRAIN), fn=fn)
    assert found == {
        f"{name}/dataloader_idx_{index}": round(value(given), 4)
        for name in ("a", "b")
        for index, given in enumerate((FIRST, SECOND, TRAIN))
    }


def test_after_the_loaders_an_object_has_the_samples_of_all() -> None:
    def at_end(module: Any) -> None:
        module.by_hand.append(float(module.metric.compute()))
        module.log("all", module.metric)

    def log(module: Any) -> None:
        module.log("each", module.metric)
        module.log("joined", module.metric, add_dataloader_idx=False)

    module = Sharing(validation=log, validation_end=at_end)
    all_values = round(mean(FIRST + SECOND), 4)
    found = measured(module, numbers(FIRST), numbers(SECOND))
    each = {"each/dataloader_idx_0": mean(FIRST), "each/dataloader_idx_1": round(mean(SECOND), 4)}
    assert found == {**each, "joined": all_values, "all": all_values}
    assert module.by_hand == [pytest.approx(all_values)]


def test_states_that_cannot_be_added_up_are_right_for_each_loader() -> None:
    class Model(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.metric = metrics().regression.PearsonCorrCoef()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.metric.update(batch[:, 0], batch[:, 1])
            self.log("r", self.metric)

    up = DataLoader([torch.tensor([float(i), float(i)]) for i in range(6)], batch_size=3)
    down = DataLoader([torch.tensor([float(i), -float(i)]) for i in range(6)], batch_size=3)
    assert measured(Model(), up, down) == {"r/dataloader_idx_0": 1.0, "r/dataloader_idx_1": -1.0}


# ---- several stages


ON_EPOCH = {"on_step": False, "on_epoch": True}


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("interval", [1.0, 2])
@pytest.mark.parametrize(
    "training", [{"training": logs("train", **ON_EPOCH)}, {"train_end": logs("train")}], ids=["step", "epoch_end"]
)
@pytest.mark.parametrize("validation", ["validation", "validation_end"])
def test_training_and_validation_count_apart(sanity: int, interval: Any, training: Any, validation: str) -> None:
    module, seen = Sharing(**training, **{validation: logs("val")}), []
    module.on_validation_end = lambda: seen.append(float(module.trainer.callback_metrics.get("val", -1)))
    trainer = quiet(max_epochs=2, num_sanity_val_steps=sanity, val_check_interval=interval)
    trainer.fit(module, numbers(TRAIN), numbers(FIRST))
    assert float(trainer.callback_metrics["train"]) == mean(TRAIN)
    each = 2 * (1 if interval == 1.0 else len(TRAIN) // interval)
    assert seen[-each:] == [mean(FIRST)] * each


def test_a_composition_counts_apart_in_each_stage() -> None:
    def log(name: str, **options: Any) -> Any:
        return lambda module: module.log(name, module.metric * module.other, **options)

    module = Sharing(training=log("train", **ON_EPOCH), validation=log("val"))
    module.other = metrics().MaxMetric()
    module.forward_pre = module.layer.register_forward_hook(lambda *_: module.other.update(module.metric.mean_value))
    trainer = quiet(max_epochs=2, val_check_interval=2)
    trainer.fit(module, numbers(TRAIN), numbers(FIRST))
    assert float(trainer.callback_metrics["val"]) == 30.0 * 150.0
    assert float(trainer.callback_metrics["train"]) == 3.0 * 12.0


def test_what_training_has_counted_can_be_read_in_validations_hooks() -> None:
    def read(module: Any) -> None:
        module.by_hand.append(float(module.metric.compute()))

    module = Sharing(training=logs("train", **ON_EPOCH), validation_end=read)
    module.validation_step = lambda batch, batch_idx: None
    module.on_validation_start = lambda: read(module)
    quiet(max_epochs=2, num_sanity_val_steps=0).fit(module, numbers(TRAIN), numbers(FIRST))
    assert module.by_hand == [3.0] * 4


def test_an_object_that_is_not_logged_is_the_programs_own() -> None:
    reads: list[int] = []
    module = Sharing(metrics().SumMetric(), train_end=lambda module: reads.append(int(module.metric.compute())))
    quiet(max_epochs=2, num_sanity_val_steps=0).fit(module, numbers(TRAIN), numbers(FIRST))
    assert reads == [int(sum(TRAIN + FIRST)) * times for times in (1, 2)]


def test_what_was_counted_before_the_fit_counts_in_validation() -> None:
    module = Sharing(metrics().SumMetric(), validation=logs("val"))
    module.training_step = lambda batch, batch_idx: module.loss(batch)
    module.metric.update(1000.0)  # such as the real images that generated ones are compared with
    trainer = quiet(max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, numbers(TRAIN), numbers(FIRST))
    assert float(trainer.callback_metrics["val"]) == 1000 + sum(FIRST)


def test_an_epoch_that_was_left_does_not_count_in_the_next_run() -> None:
    module = Sharing(training=logs("x", **ON_EPOCH), test=logs("x"))
    trainer = quiet(max_steps=2)
    trainer.fit(module, numbers(TRAIN))
    assert [one["x"] for one in trainer.test(module, numbers(FIRST), verbose=False)] == [mean(FIRST)]


@pytest.mark.parametrize("when", ["on_validation_end", "on_validation_epoch_end", "validation_step", "raises"])
def test_a_run_saved_within_a_validation_resumes_to_the_same_values(when: str, tmp_path: Any) -> None:
    path = tmp_path / "saved"

    def fit(ckpt_path: Any = None) -> list[float]:
        module = Sharing(training=logs("train", **ON_EPOCH), validation=logs("val"))
        original = getattr(module, "validation_step" if when == "raises" else when)

        def saves(*args: Any) -> None:
            original(*args)
            if ckpt_path is None and trainer.global_step == 2 and not path.exists():
                if when == "raises":
                    raise KeyError("within")
                trainer.save_checkpoint(path)

        setattr(module, "validation_step" if when == "raises" else when, saves)
        values: list[float] = []
        module.on_train_end = lambda: values.extend(float(trainer.callback_metrics[name]) for name in ("train", "val"))
        trainer = quiet(max_epochs=1, val_check_interval=2, num_sanity_val_steps=0)
        try:
            trainer.fit(module, numbers(TRAIN), numbers(FIRST), ckpt_path=ckpt_path)
        except KeyError:
            trainer.save_checkpoint(path)
        return values

    assert fit() == ([] if when == "raises" else [mean(TRAIN), mean(FIRST)])
    assert fit(path) == [mean(TRAIN), mean(FIRST)]


# ---- several ranks


def two_ranks() -> tuple[dict[str, float], dict[str, float], list[float]]:
    module = Sharing(training=logs("train", "t2", **ON_EPOCH), validation=logs("val", "v2"), test=logs("x", "y"))
    module.cat, module.own = metrics().CatMetric(), metrics().MeanMetric()

    def count(outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        module.cat.update(batch)
        module.log("sum", module.metric + module.metric)
        if module.global_rank == 0:
            module.own.update(batch)
            module.log("own", module.own, rank_zero_only=True)

    module.on_test_batch_end = count
    settings: dict[str, Any] = {"devices": 2, "strategy": "ddp"}
    trainer = quiet(max_epochs=2, val_check_interval=1, **settings)
    trainer.fit(module, numbers([*TRAIN, 8.0]), numbers(FIRST))
    shown = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found = measured(module, numbers(FIRST), numbers(SECOND), fn="test", **settings)
    return shown, found, sorted(module.cat.compute().tolist())


@pytest.mark.dist
def test_values_are_of_all_ranks() -> None:
    (_, of_first, _), _ = results = run_ranks(two_ranks, 2)
    own = {name: of_first.pop(name) for name in sorted(of_first) if name.startswith("own")}
    assert own == {"own/dataloader_idx_0": 30.0, "own/dataloader_idx_1": 53.5}
    for shown, found, _ in results:
        assert shown == {"train": 4.0, "t2": 4.0, "val": 30.0, "v2": 30.0}
        first, second = (10 * round(mean(values) / 10, 5) for values in (FIRST, SECOND))
        assert found == {
            **{f"{name}/dataloader_idx_0": first for name in "xy"},
            **{f"{name}/dataloader_idx_1": pytest.approx(second, abs=1e-3) for name in "xy"},
            "sum/dataloader_idx_0": 2 * first,
            "sum/dataloader_idx_1": pytest.approx(2 * second, abs=1e-3),
        }


# ---- errors


class Plain:
    """An object that counts without a `metric_state`."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def update(self, batch: Tensor) -> None:
        self.values += batch.flatten().tolist()

    def compute(self) -> float:
        return mean(self.values)

    def reset(self) -> None:
        self.values = []


def test_an_object_without_a_state_is_for_one_loader_and_one_stage() -> None:
    module = Sharing(Plain(), training=logs("train", **ON_EPOCH), validation=logs("val", "again"))
    assert measured(module, numbers(FIRST)) == {"val": 30.0, "again": 30.0}
    with pytest.raises(LogError, match=r"this Plain counts for another loader too.*one object for each"):
        measured(module, numbers(FIRST), numbers(SECOND))
    module.metric.reset()
    with pytest.raises(LogError, match=r"this Plain counts for another stage too.*one object for each"):
        quiet(max_epochs=1).fit(module, numbers(TRAIN), numbers(FIRST))


def test_two_objects_under_one_name_are_an_error() -> None:
    def log(module: Any) -> None:
        fresh = metrics().MeanMetric()
        fresh.update(1.0)
        module.log("x", fresh)

    with pytest.raises(LogError, match=r"'x'\) got a MeanMetric after the metric object MeanMetric in the same epoch"):
        measured(Sharing(validation=log), numbers(FIRST))
    with pytest.raises(LogError, match="got a float after the metric object"):
        measured(Sharing(validation=lambda module: (logs("x")(module), module.log("x", 1.0))), numbers(FIRST))


def test_an_object_may_change_from_epoch_to_epoch() -> None:
    module = Sharing(validation=logs("x"))
    module.on_validation_epoch_start = lambda: setattr(module, "metric", metrics().MeanMetric())
    assert measured(module, numbers(FIRST)) == {"x": 30.0}
    trainer = quiet(max_epochs=3)
    trainer.fit(module, numbers(TRAIN), numbers(FIRST))
    assert float(trainer.callback_metrics["x"]) == 30.0


def test_an_object_that_was_not_updated_is_warned_of_by_its_name() -> None:
    module = Sharing(validation=logs("x"))
    module.count = lambda stage, batch: module.log("x", module.metric)
    with pytest.warns(UserWarning, match="the MeanMetric that is logged as 'x' was not updated, and computes nan"):
        measured(module, numbers(FIRST))
