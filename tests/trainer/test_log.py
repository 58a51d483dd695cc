"""What becomes of `self.log` in real runs."""

from __future__ import annotations

import copy
import math
import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from instep import Callback, Logger
from instep.callbacks import EarlyStopping, ModelCheckpoint
from instep.errors import LogError, UsageError
from instep.trainer.log import MetricLog, Options, ScalarTransfer
from tests.trainer.toys import LoggingToy, Stream, Toy, loader, quiet, samples


class ListLogger(Logger):
    """Keeps what it is given: (step, metrics)."""

    def __init__(self) -> None:
        super().__init__(name="list")
        self.rows: list[tuple[int, dict[str, float]]] = []

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(step, metrics[name]) for step, metrics in self.rows if name in metrics]


def run(tmp_path: Any, module: Any, train: Any = None, val: Any = None, **settings: Any) -> tuple[Any, ListLogger]:
    logger = ListLogger()
    trainer = quiet(**{"max_epochs": 1, "log_every_n_steps": 1, **settings}, logger=logger, default_root_dir=tmp_path)
    trainer.fit(module, loader() if train is None else train, val)
    return trainer, logger


def logging_in(hook: str, *names: str, **options: Any) -> Any:
    """A module that logs in one hook: the number of the call."""
    module = Toy()
    calls: list[int] = []
    original = getattr(module, hook)

    def logs(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        for name in names or ("x",):
            module.log(name, float(calls[-1]), **options)
        return original(*args, **kwargs)

    setattr(module, hook, logs)
    return module


# ---- on the way to the host


def test_step_values_that_are_on_their_way_where_a_validation_ends_are_logged(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScalarTransfer, "ready", False)  # as on a GPU that is busy
    module = logging_in("validation_step", on_step=True)
    _, logger = run(tmp_path, module, val=loader(), num_sanity_val_steps=0)
    assert [value for _, value in logger.of("x_step")] == [0.0, 1.0, 2.0, 3.0]


def test_values_that_are_late_are_those_that_come_at_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # one process asks no other
    monkeypatch.setattr("instep.trainer.log.gather_object", None)

    def logged(ready: Any) -> Any:
        monkeypatch.setattr(ScalarTransfer, "ready", ready)
        torch.manual_seed(3)
        trainer, logger = run(tmp_path, LoggingToy(), val=loader(6, 3), max_epochs=3, val_check_interval=2)
        return (
            sorted((step, *row.items()) for step, row in logger.rows),
            trainer.callback_metrics,
            trainer.logged_metrics,
        )

    draw = random.Random(0)
    at_once = logged(True)
    assert logged(False) == logged(property(lambda _: draw.random() < 0.5)) == at_once
    assert len(at_once[0]) > 15


def saved_log(samples: int) -> list[dict[str, Any]]:
    """What a checkpoint has of a log with one value."""
    log = MetricLog("train")
    log.enter("training_step")
    log.buffer.append(("x", 3.0, Options(on_step=False, on_epoch=True, reduce_fx="sum"), samples))
    log.drain()
    log.bring_to_host(1)
    return log.state_dict({})


def test_a_checkpoint_holds_values_that_were_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScalarTransfer, "ready", False)
    assert [saved["total"] for saved in saved_log(2)] == [3.0]


def test_a_sum_without_samples_is_in_the_checkpoint_of_a_resumed_run_too() -> None:
    log = MetricLog("train")
    log.load_state_dict(saved_log(0), {})
    assert [saved["total"] for saved in log.state_dict({})] == [3.0]


# ---- names and defaults


@pytest.mark.parametrize("hook", ["training_step", "on_train_batch_start", "on_train_batch_end", "on_before_backward"])
def test_batch_hooks_of_training_log_by_step(hook: str, tmp_path: Any):
    _, logger = run(tmp_path, logging_in(hook))
    assert logger.of("x") == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_train_epoch_end"])
def test_epoch_hooks_of_training_log_by_epoch(hook: str, tmp_path: Any):
    trainer, logger = run(tmp_path, logging_in(hook))
    assert logger.of("x") == [(4, 0.0)]
    assert trainer.callback_metrics["x"] == 0.0


def test_callbacks_watch_an_evaluation_as_a_whole_not_its_steps(tmp_path: Any):
    trainer, _ = run(tmp_path, logging_in("validation_step", on_step=True, on_epoch=True), val=loader())
    assert set(trainer.callback_metrics) == {"x", "x_epoch"}
    assert set(trainer.logged_metrics) == {"x_step", "x_epoch"}


@pytest.mark.parametrize(
    "hook",
    [
        "validation_step",
        "on_validation_batch_start",
        "on_validation_batch_end",
        "on_validation_epoch_start",
        "on_validation_epoch_end",
        "on_validation_start",
    ],
)
def test_hooks_of_validation_log_by_epoch(hook: str, tmp_path: Any):
    trainer, logger = run(tmp_path, logging_in(hook), val=loader(6, 3), num_sanity_val_steps=0)
    expected = 0.5 if "batch" in hook or hook == "validation_step" else 0.0
    assert logger.of("x") == [(4, expected)]
    assert trainer.callback_metrics["x"] == expected


def test_both_levels_get_names_of_their_own(tmp_path: Any):
    trainer, logger = run(tmp_path, logging_in("training_step", on_step=True, on_epoch=True))
    assert logger.of("x_step") == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]
    assert logger.of("x_epoch") == [(4, 1.5)]
    assert logger.of("x") == []
    metrics = trainer.callback_metrics
    assert (metrics["x"], metrics["x_epoch"], metrics["x_step"]) == (1.5, 1.5, 3.0)


def test_step_values_stay_after_a_fit_that_logged_none_of_them(tmp_path: Any):
    seen: list[float] = []

    class Model(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", float(batch_idx))
            return super().training_step(batch, batch_idx)

        def on_validation_end(self) -> None:
            seen.append(float(self.trainer.callback_metrics["x"]))

    trainer, logger = run(tmp_path, Model(), val=loader(6, 3), num_sanity_val_steps=0, log_every_n_steps=50)
    assert logger.of("x") == []
    assert trainer.logged_metrics == {}
    assert seen == [3.0]
    assert trainer.callback_metrics == {"x": 3.0}


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_epoch_end"])
def test_of_a_name_logged_by_step_and_by_epoch_the_later_value_counts(hook: str, tmp_path: Any):
    seen: dict[str, list[tuple[float, float]]] = {"step": [], "end": []}

    class Watching(Callback):
        runs_last = True

        def look(self, trainer: Any, when: str) -> None:
            seen[when].append((float(trainer.callback_metrics["x"]), float(trainer.progress_bar_metrics["x"])))

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.look(trainer, "step")

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.look(trainer, "end")

    class Both(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", float(batch_idx), prog_bar=True)
            return super().training_step(batch, batch_idx)

    module = Both()
    setattr(module, hook, lambda: module.log("x", 100.0 + module.current_epoch, prog_bar=True))

    def watchers() -> list[Any]:
        return [Watching(), EarlyStopping("x", patience=9), ModelCheckpoint(tmp_path / "ck", monitor="x", mode="max")]

    callbacks = _, stopping, saver = watchers()
    settings: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True, "num_sanity_val_steps": 0}
    trainer, _ = run(tmp_path, module, loader(), loader(3), callbacks=callbacks, **settings)
    assert seen["step"] == [(float(i), float(i)) for i in range(4)] * 2
    assert seen["end"] == [(100.0, 100.0), (101.0, 101.0)]
    assert (float(stopping.best_score), saver.best_model_score) == (100.0, 101.0)
    assert (float(trainer.callback_metrics["x"]), trainer.progress_bar_metrics["x"]) == (101.0, 101.0)

    again = quiet(**settings, callbacks=watchers())
    again.fit(Both(), loader(), loader(3), ckpt_path=saver.best_model_path)
    assert again.callback_metrics["x"] == 101.0, "nothing is left to train; the epoch's value is still the later"


def test_what_the_bar_showed_last_stays_after_fit(tmp_path: Any):
    trainer, _ = run(tmp_path, logging_in("training_step", prog_bar=True), log_every_n_steps=50)
    assert trainer.progress_bar_metrics == {"x": 3.0}


def test_callback_metrics_show_what_the_same_step_has_logged(tmp_path: Any):
    class Looks(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", float(batch_idx))
            seen.append(float(self.trainer.callback_metrics["x"]))
            return super().training_step(batch, batch_idx)

    seen: list[float] = []
    run(tmp_path, Looks())
    assert seen == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("method", ["backward", "optimizer_step", "configure_gradient_clipping"])
def test_what_is_logged_after_the_forward_belongs_to_its_own_batch(method: str, tmp_path: Any):
    def log(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.log("x", float(self.trainer.progress.batch_idx), on_epoch=True)
        return getattr(Toy, method)(self, *args, **kwargs)

    trainer, logger = run(tmp_path, type("Logs", (Toy,), {method: log})(), train=loader(7, 2), log_every_n_steps=1)
    assert logger.of("x_step") == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]
    assert float(trainer.callback_metrics["x"]) == (2 * (0 + 1 + 2) + 3) / 7


def test_a_value_logged_by_epoch_only_has_one_row_an_epoch(tmp_path: Any):
    _, logger = run(tmp_path, logging_in("training_step", on_step=False, on_epoch=True), max_epochs=2)
    assert logger.of("x") == [(4, 1.5), (8, 5.5)]


def test_step_values_in_validation_count_their_own_steps(tmp_path: Any):
    module = logging_in("validation_step", on_step=True)
    _, logger = run(tmp_path, module, val=loader(6, 3), num_sanity_val_steps=0, max_epochs=2)
    assert logger.of("x_step") == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]
    assert logger.of("x_epoch") == [(4, 0.5), (8, 2.5)]


def test_step_values_are_handed_over_every_n_steps(tmp_path: Any):
    _, logger = run(tmp_path, logging_in("training_step"), train=loader(21, 3), log_every_n_steps=3)
    assert logger.of("x") == [(3, 2.0), (6, 5.0)]
    assert all(metrics["epoch"] == 0.0 for _, metrics in logger.rows)


def test_never_handing_over_step_values(tmp_path: Any):
    _, logger = run(tmp_path, logging_in("training_step", on_step=True, on_epoch=True), log_every_n_steps=0)
    assert logger.of("x_epoch") == [(4, 1.5)]
    assert logger.of("x_step") == []


def test_prog_bar_and_logger_say_where_values_go(tmp_path: Any):
    class Model(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("shown", 1.0, prog_bar=True, logger=False, on_epoch=True)
            self.log("hidden", 2.0, on_epoch=True)
            if batch_idx == 2:
                assert self.trainer.progress_bar_metrics == {"shown_step": 1.0}
            return super().training_step(batch, batch_idx)

    trainer, logger = run(tmp_path, Model())
    assert {name for _, metrics in logger.rows for name in metrics} == {"hidden_step", "hidden_epoch", "epoch"}
    assert set(trainer.progress_bar_metrics) == {"shown_step", "shown_epoch"}
    assert {"shown", "hidden"} <= set(trainer.callback_metrics)
    assert set(trainer.logged_metrics) == {"hidden_step", "hidden_epoch"}


# ---- values


def test_epoch_means_are_weighted_by_samples_and_exact_in_float64(tmp_path: Any):
    class Model(Toy):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("mean", batch[1].mean())
            self.log("one each", batch[1].mean(), batch_size=1)
            first = batch[1][: 0 if batch_idx else 4]  # the mean over no sample is nan
            self.log("masked", first.mean(), batch_size=len(first))
            for name in ("sum", "min", "max"):
                self.log(name, batch[1].sum(), reduce_fx=name)
            for name, given in {"torch": torch.max, "python": max, "SUM": "SUM", "avg": "avg"}.items():
                self.log(name, batch[1].sum() if name != "avg" else batch[1].mean(), reduce_fx=given)

    trainer, _ = run(tmp_path, Model(), val=loader(11, 4))
    y = [batch[1] for batch in loader(11, 4)]
    means, sums = [float(part.mean()) for part in y], [float(part.sum()) for part in y]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["mean"] == (means[0] * 4 + means[1] * 4 + means[2] * 3) / 11
    assert metrics["one each"] == (means[0] + means[1] + means[2]) / 3
    assert metrics["masked"] == means[0]
    assert metrics["sum"] == sums[0] + sums[1] + sums[2]
    assert (metrics["min"], metrics["max"], metrics["torch"]) == (min(sums), max(sums), max(sums))
    assert (metrics["python"], metrics["SUM"], metrics["avg"]) == (max(sums), metrics["sum"], metrics["mean"])


def test_a_metric_called_step_is_the_axis(tmp_path: Any):
    class Model(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log_dict({"x": 1.0, "step": 100.0 + batch_idx, "epoch": 7.0})
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.log("end", 2.0)

    trainer, logger = run(tmp_path, Model())
    assert logger.rows == [
        *((step, {"x": 1.0, "epoch": 7.0}) for step in range(100, 104)),
        (4, {"end": 2.0, "epoch": 0.0}),
    ]


def test_callbacks_log_as_the_module_does(tmp_path: Any):
    class Logs(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("batch", float(batch_idx), on_epoch=True, reduce_fx=max)

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.log_dict({"a": 1.0, "b": 2.0}, prog_bar=True)

    callback = Logs()
    trainer, _ = run(tmp_path, Toy(), loader(), loader(3), callbacks=[callback])
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics == {"batch": 3.0, "batch_step": 3.0, "batch_epoch": 3.0, "a": 1.0, "b": 2.0}
    assert trainer.progress_bar_metrics == {"a": 1.0, "b": 2.0}
    copy.deepcopy(callback)
    with pytest.raises(UsageError, match="outside of a run"):
        callback.log("x", 1.0)


def test_many_small_values_do_not_drown(tmp_path: Any):
    class Model(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", torch.tensor(1e8 if batch_idx == 0 else 1.0), on_step=False, on_epoch=True, reduce_fx="sum")
            return super().training_step(batch, batch_idx)

    trainer, _ = run(tmp_path, Model(), train=loader(101, 1))
    assert trainer.callback_metrics["x"] == 1e8 + 100


def test_nan_stays_visible_in_min_and_max(tmp_path: Any):
    class Model(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for name in ("min", "max", "mean"):
                self.log(name, math.nan if batch_idx == 1 else 1.0, on_step=False, on_epoch=True, reduce_fx=name)
            return super().training_step(batch, batch_idx)

    trainer, _ = run(tmp_path, Model())
    assert all(math.isnan(trainer.callback_metrics[name]) for name in ("min", "max", "mean"))


def test_a_value_is_copied_when_it_is_logged(tmp_path: Any):
    class Model(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            value = torch.tensor([1.0])
            self.log("x", value, on_epoch=True)
            value.add_(100.0)
            view = torch.tensor([[2.0]]).view(1)
            self.log("view", view, on_epoch=True)
            view.mul_(0.0)
            return super().training_step(batch, batch_idx)

    trainer, logger = run(tmp_path, Model())
    assert logger.of("x_step") == [(step, 1.0) for step in (1, 2, 3, 4)]
    assert trainer.callback_metrics["x"] == 1.0
    assert trainer.callback_metrics["view"] == 2.0


def test_what_is_logged_keeps_no_graph(tmp_path: Any):
    class Model(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("x", loss)
            assert not self.trainer.callback_metrics.get("x", torch.zeros(())).requires_grad
            return loss

    run(tmp_path, Model())


def test_every_kind_of_number_can_be_logged(tmp_path: Any):
    class Model(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("int", 3)
            self.log("bool", True)
            self.log("int tensor", torch.tensor(4))
            self.log("bool tensor", torch.tensor([True]))
            self.log("half", torch.tensor(0.5, dtype=torch.bfloat16))
            self.log_dict({"a": 1.0, "b": torch.tensor(2.0)}, prog_bar=True)
            return super().training_step(batch, batch_idx)

    trainer, _ = run(tmp_path, Model())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics == {"int": 3, "bool": 1, "int tensor": 4, "bool tensor": 1, "half": 0.5, "a": 1, "b": 2}
    assert set(trainer.progress_bar_metrics) == {"a", "b"}


def test_accumulated_batches_are_all_in_the_epochs_mean(tmp_path: Any):
    trainer, logger = run(tmp_path, logging_in("training_step", on_step=True, on_epoch=True), accumulate_grad_batches=3)
    assert trainer.callback_metrics["x"] == 1.5
    assert logger.of("x_step") == [(1, 2.0), (2, 3.0)]


def test_steps_by_hand_are_logged_once_each(tmp_path: Any):
    class Model(Toy):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            self.log("x", float(batch_idx))
            if batch_idx % 2:
                self.optimizers().step()

    _, logger = run(tmp_path, Model())
    assert [step for step, _ in logger.of("x")] == [1, 2]


def test_values_of_one_epoch_do_not_leak_into_the_next(tmp_path: Any):
    class Model(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.current_epoch != 1:
                self.log("x", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
            return super().training_step(batch, batch_idx)

    _, logger = run(tmp_path, Model(), max_epochs=3)
    assert logger.of("x") == [(4, 4.0), (12, 4.0)]


# ---- several loaders


def test_several_loaders_get_their_index_in_the_name(tmp_path: Any):
    class Model(Toy):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("x", float(dataloader_idx))
            self.log("both", float(dataloader_idx), on_step=True)
            self.log("all", float(dataloader_idx), add_dataloader_idx=False)
            self.log(f"of_{dataloader_idx}", 1.0, add_dataloader_idx=False)

        def on_validation_epoch_end(self) -> None:
            self.log("end", 7.0)

    trainer = quiet(logger=(logger := ListLogger()), default_root_dir=tmp_path)
    first, second = trainer.validate(Model(), [loader(2, 2), loader(6, 3)], verbose=False)
    assert first == {"x/dataloader_idx_0": 0, "both_epoch/dataloader_idx_0": 0, "all": 0.75, "end": 7, "of_0": 1}
    assert second == {"x/dataloader_idx_1": 1, "both_epoch/dataloader_idx_1": 1, "all": 0.75, "end": 7, "of_1": 1}
    assert trainer.callback_metrics["both/dataloader_idx_1"] == 1.0
    assert logger.of("all") == [(0, 0.75)]


# ---- metric objects


class Counting(nn.Module):
    """A metric in torchmetrics' manner."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.count = 0.0, 0

    def forward(self, value: float) -> float:
        self.total, self.count = self.total + value, self.count + 1
        self._forward_cache = value
        return value

    def compute(self) -> float:
        return self.total / self.count

    def reset(self) -> None:
        self.total, self.count, self._forward_cache = 0.0, 0, None


def test_a_metric_object_is_computed_and_reset_at_the_epochs_end(tmp_path: Any):
    class Model(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.counting = Counting()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.counting(float(batch_idx + self.current_epoch))
            self.log("x", self.counting, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    _, logger = run(tmp_path, Model(), max_epochs=2)
    assert logger.of("x_step")[:4] == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]
    assert logger.of("x_epoch") == [(4, 1.5), (8, 2.5)]


def test_a_metric_of_torchmetrics_is_computed_at_the_epochs_end(tmp_path: Any):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Model(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.error = torchmetrics.MeanSquaredError()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.error.update(self.layer(batch[0]).squeeze(-1), batch[1])
            self.log("mse", self.error)

    module = Model()
    trainer, logger = run(tmp_path, module, val=loader(11, 4), max_epochs=2)
    x, y = samples(11).tensors
    with torch.no_grad():
        expected = nn.functional.mse_loss(module.layer(x).squeeze(-1), y)
    assert float(trainer.callback_metrics["mse"]) == pytest.approx(float(expected), rel=1e-6)
    assert len(logger.of("mse")) == 2


def test_metric_collections_and_what_is_no_number(tmp_path: Any):
    torchmetrics = pytest.importorskip("torchmetrics")
    from torchmetrics import classification  # late: as torchmetrics

    class Model(Toy):
        def __init__(self) -> None:
            super().__init__()
            kinds = [classification.BinaryRecall(), classification.BinaryPrecision(), classification.BinaryAccuracy()]
            self.collection = torchmetrics.MetricCollection(kinds, prefix="val/")
            self.bad = ""

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if self.bad == "collection":
                self.log("all", self.collection)
            elif self.bad == "attribute":
                self.log("x", self.collection["BinaryRecall"], metric_attribute="other")
            self.collection.update(batch[0][:, 1] > 0, batch[1] > 0)
            self.log_dict(self.collection)
            assert not self.collection._state_is_copy, "no state is copied for logging"

    module = Model()
    trainer, _ = run(tmp_path, module, val=loader(11, 4), max_epochs=1)
    x, y = samples(11).tensors
    said, true = x[:, 1] > 0, y > 0
    expected = {"BinaryRecall": said[true], "BinaryPrecision": true[said], "BinaryAccuracy": said == true}
    for name, hits in expected.items():
        assert float(trainer.callback_metrics[f"val/{name}"]) == pytest.approx(float(hits.float().mean()))
    for module.bad, message in (("collection", "use self.log_dict"), ("attribute", "Could not find the `Model` attr")):
        with pytest.raises(LogError, match=message):
            run(tmp_path, module, val=loader(11, 4), max_epochs=2)


def test_a_metric_that_was_not_logged_in_an_epoch_is_not_computed(tmp_path: Any):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Model(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.current_epoch != 1:
                self.mean.update(self.current_epoch)
                self.log("mean", self.mean, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    _, logger = run(tmp_path, Model(), max_epochs=3)
    assert logger.of("mean") == [(4, 0.0), (12, 2.0)]


# ---- errors


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": 1.0}, "use self.log_dict"),
        (torch.zeros(2), r"shape \(2,\)"),
        (torch.zeros(0), r"shape \(0,\)"),
        ("text", "got str 'text'"),
        (None, "got NoneType"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_values_that_cannot_be_logged_are_named(value: Any, message: str, late: bool, tmp_path: Any):
    module = Toy()

    def logs(batch: Any, batch_idx: int) -> Any:
        module.log("x", 1.0 if late and batch_idx == 0 else value)
        return module.loss(batch)

    module.training_step = logs
    with pytest.raises(LogError, match=message):
        run(tmp_path, module)


def test_logging_a_name_twice_with_other_arguments_is_an_error(tmp_path: Any):
    module = Toy()

    def logs(batch: Any, batch_idx: int) -> Any:
        module.log("x", 1.0)
        module.log("x", 1.0, prog_bar=True)
        return module.loss(batch)

    module.training_step = logs
    with pytest.raises(LogError, match=r"twice in training_step.*prog_bar=False then True"):
        run(tmp_path, module)


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        (("x", {"on_step": True, "on_epoch": True}), ("x_step", {"on_step": True}), "x_step"),
        (("x_epoch", {"on_step": False, "on_epoch": True}), ("x", {"on_step": True, "on_epoch": True}), "x_epoch"),
        (("x_step", {"on_step": True}), ("x", {"on_epoch": True}), "x_step"),
    ],
)
def test_two_names_that_are_one_with_their_endings_are_refused(tmp_path: Any, first: Any, second: Any, name: str):
    module = Toy()

    def logs(batch: Any, batch_idx: int) -> Any:
        for value, (key, options) in enumerate((first, second)):
            module.log(key, float(value), **options)
        return module.loss(batch)

    module.training_step = logs
    with pytest.raises(LogError, match=f"both log '{name}'"):
        run(tmp_path, module)


@pytest.mark.parametrize(
    ("hook", "arguments", "error", "text"),
    [
        *(
            (hook, {}, LogError, f"in {hook}, where nothing")
            for hook in ("on_train_end", "on_validation_end", "on_fit_end")
        ),
        *((hook, {}, UsageError, "where nothing can be") for hook in ("setup", "on_fit_start", "configure_optimizers")),
        ("predict_step", {}, UsageError, "predict"),
        ("on_train_epoch_end", {"on_step": True}, LogError, "there is no step here"),
        ("training_step", {"on_step": False, "on_epoch": False}, LogError, "is not useful"),
        ("training_step", {"on_step": False}, LogError, r"in training_step logs nothing.*Add on_epoch=True"),
        ("on_train_batch_end", {"on_step": False}, LogError, "in on_train_batch_end logs nothing"),
        ("validation_step", {"on_epoch": False}, LogError, r"in validation_step logs nothing.*Add on_step=True"),
        ("on_validation_epoch_end", {"on_epoch": False}, LogError, "logs nothing: leave on_epoch out"),
        ("training_step", {"reduce_fx": "median", "on_epoch": True}, LogError, "use 'mean', 'sum', 'min' or 'max'"),
    ],
)
def test_where_and_how_nothing_can_be_logged(hook: str, arguments: Any, error: Any, text: str, tmp_path: Any) -> None:
    module = logging_in(hook, **arguments)
    with pytest.raises(error, match=text):
        quiet().predict(module, loader()) if hook == "predict_step" else run(tmp_path, module, val=loader(3))


def test_outside_a_run_a_warning():
    with pytest.warns(UserWarning, match="outside a Trainer's run"):
        Toy().log("x", 1.0)


class Backbone(Toy):
    """Logs in its forward, and what it knows of the run."""

    def forward(self, x: Any) -> Any:
        self.log("inner", float(self.global_step + 10 * self.current_epoch))
        return self.layer(x)


@pytest.mark.parametrize("hold", [nn.ModuleList, lambda parts: parts[0]], ids=["in a list", "as an attribute"])
def test_a_module_within_the_running_one_logs_and_knows_the_position(hold: Any, tmp_path: Any):
    class Model(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.part = hold([Backbone()])

        def loss(self, batch: Any) -> Any:
            part = self.part if isinstance(self.part, Backbone) else self.part[0]
            return super().loss(batch) + part(batch[0]).sum() * 0

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return self.loss(batch)

    module = Model()
    trainer, logger = run(tmp_path, module, val=loader(3), max_epochs=2, num_sanity_val_steps=0)
    by_step = [(step, value) for step, value in logger.of("inner") if step % 4]
    assert by_step == [(1, 0.0), (2, 1.0), (3, 2.0), (5, 14.0), (6, 15.0), (7, 16.0)]
    assert trainer.callback_metrics["inner"] == 18.0, "validation's"
    with pytest.raises(UsageError, match="where nothing can be logged"):
        trainer.predict(module, loader())


# ---- compiled steps


def test_logging_from_a_compiled_step_breaks_no_graph_and_is_compiled_once(tmp_path: Any):
    import torch._dynamo as dynamo

    class Model(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("x", loss, on_step=True, on_epoch=True)
            self.log_dict({"y": loss * 2, "one": 1.0})
            return loss

    plain, module = Model(), Model()
    module.load_state_dict(plain.state_dict())
    dynamo.reset()
    dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its compiler
        module.compile(backend="eager", fullgraph=True)
        _, compiled = run(tmp_path, module, max_epochs=2)
    breaks = dict(dynamo.utils.counters["graph_break"])
    graphs = dynamo.utils.counters["stats"]["unique_graphs"]
    dynamo.reset()
    _, expected = run(tmp_path, plain, max_epochs=2)
    assert compiled.rows == expected.rows
    assert not breaks
    assert graphs == 1


# ---- samples that cannot be counted


class Graph:
    """A batch that no one can look into."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples


@pytest.mark.parametrize(
    ("collate", "doubt"),
    [
        (Graph, "a Graph has no tensor that begins with the sample, so that batches weigh alike"),
        (lambda rows: [str(row) for row in rows], "a list has no tensor that begins"),
        (lambda rows: [{"x": row} for row in rows], "a list of 3 dicts may have one for each sample, and is taken for"),
        (lambda rows: {"boxes": tuple(torch.ones(i + 1, 4) for i in range(len(rows)))}, "a tuple of 3 Tensors may"),
        (list, "a list of 3 tuples may have one for each sample, and is taken for 4 by its first tensor"),
        (None, None),
        (lambda rows: {"x": torch.ones(len(rows), 2), "also": [torch.ones(len(rows)), ["a"] * len(rows)]}, None),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_stream_whose_samples_are_not_known_is_warned_of_where_they_weigh(
    collate: Any, doubt: str | None, accumulate: int
):
    class Model(Toy):
        sized: dict[str, int] = {}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("mean", 1.0, on_epoch=True, **self.sized)
            return self.layer.weight.sum()

    def texts() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            data = DataLoader(Stream(6), 3, collate_fn=collate)
            quiet(max_epochs=2, accumulate_grad_batches=accumulate).fit(Model(), data)
        return [str(one.message) for one in caught if "not know" in str(one.message)]

    named = ["gradients of a window"] * (accumulate > 1) + ["self.log('mean') in training_step"]
    expected = [(name, doubt) for name in named] if doubt else []
    assert all(name in text and why in text for text, (name, why) in zip(texts(), expected, strict=True))
    Model.sized = {"batch_size": 3}
    assert not any("self.log" in text for text in texts())


# ---- what is held


@pytest.mark.parametrize("every", [0, 10**6])
def test_values_are_held_for_some_batches_whatever_log_every_n_steps_says(every: int, monkeypatch: Any) -> None:
    held: list[int] = []
    arrive = MetricLog.hand_over

    def hand_over(self: MetricLog, *args: Any, **kwargs: Any) -> Any:
        held.append(max((len(one.values) for one in self._all()), default=0))
        return arrive(self, *args, **kwargs)

    monkeypatch.setattr(MetricLog, "hand_over", hand_over)
    module = LoggingToy(lr=1e-6)
    trainer = quiet(max_epochs=1, log_every_n_steps=every, num_sanity_val_steps=0)
    trainer.fit(module, loader(1200, 1), loader(1100, 1))
    assert max(held) == 500
    assert sum(size == 500 for size in held) == 4
    assert trainer.callback_metrics["val_loss"] == pytest.approx(
        float(module.loss(samples(1100).tensors).detach()), rel=1e-4
    )
