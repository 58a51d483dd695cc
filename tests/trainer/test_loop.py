"""Where the loop starts, validates and stops, and what it leaves behind."""

from __future__ import annotations

import gc
import json
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from instep import Callback, Trainer
from instep.callbacks import ModelCheckpoint
from instep.errors import Preempted, SettingError, UsageError
from instep.state import AcceleratorState, GradientState, active_run
from instep.trainer.context import Position
from tests.trainer.toys import LoggingToy, Stream, Toy, assert_same, loader, quiet, samples, weights


def stream(length: int = 12, batch_size: int = 3) -> DataLoader[Any]:
    return DataLoader(Stream(length), batch_size)


class Validations(Callback):
    """(epoch, batches done) at every validation."""

    def __init__(self) -> None:
        self.at: list[tuple[int, int]] = []

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.at.append((trainer.current_epoch, trainer.position.batch))


def validations(train: Any = None, **settings: Any) -> list[tuple[int, int]]:
    callback = Validations()
    quiet(**{"max_epochs": 1, **settings}, callbacks=callback).fit(
        Toy(), loader(20, 2) if train is None else train, loader(3)
    )
    return callback.at


# ---- where it ends


@pytest.mark.parametrize(
    ("settings", "steps", "epochs"),
    [
        ({"max_steps": 6}, 6, 2),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, 4, 2),
        ({"max_epochs": 0}, 0, 0),
        ({"max_epochs": 2, "limit_train_batches": 0}, 0, 0),
    ],
)
def test_training_ends_at_the_expected_step_and_epoch(settings: dict[str, Any], steps: int, epochs: int):
    for data in [loader()] if settings.get("limit_train_batches") == 0.5 else [loader(), stream()]:
        trainer = quiet(**settings)
        trainer.fit(Toy(), data)
        assert (trainer.global_step, trainer.current_epoch) == (steps, epochs)
        assert trainer.position.epoch == max(0, epochs - 1), "the place in the training stays in the last epoch"


class Epochs(Callback):
    """`current_epoch` in the hooks of a fit, of the Trainer and of the module."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {}
        for hook in ("fit_start", "train_start", "train_epoch_start", "validation_end", "train_end", "fit_end"):
            setattr(self, f"on_{hook}", partial(self.note, f"on_{hook}"))

    def note(self, hook: str, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            assert module.current_epoch == trainer.current_epoch
            self.seen.setdefault(hook, []).append(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.note("on_train_epoch_end", trainer, module)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.note("teardown", trainer, module)


class RunsLast(Epochs):
    runs_last = True


def epochs_seen(begin: int, epochs: list[int], end: int) -> dict[str, list[int]]:
    return {
        **{hook: [begin] for hook in ("on_fit_start", "on_train_start")},
        **{f"on_{hook}": epochs for hook in ("train_epoch_start", "validation_end", "train_epoch_end")},
        **{hook: [end] for hook in ("on_train_end", "on_fit_end", "teardown")},
    }


@pytest.mark.parametrize("kind", [Epochs, RunsLast])
def test_current_epoch_counts_an_epoch_once_its_end_hooks_have_run(kind: type[Epochs], tmp_path: Path):
    first, second = kind(), kind()
    trainer = quiet(max_epochs=2, callbacks=first)
    trainer.fit(Toy(), loader(), loader(3))
    assert first.seen == epochs_seen(0, [0, 1], 2)
    assert trainer.model is not None
    assert trainer.model.current_epoch == 2
    path = trainer.save_checkpoint(tmp_path / "two")
    first.seen.clear()
    trainer.max_epochs = 3
    trainer.fit(Toy(), loader(), loader(3))
    assert first.seen == epochs_seen(2, [2], 3)
    resumed = quiet(max_epochs=3, callbacks=second)
    resumed.fit(Toy(), loader(), loader(3), ckpt_path=path)
    assert second.seen == epochs_seen(2, [2], 3)


def test_current_epoch_where_an_epoch_is_cut_short():
    epochs = Epochs()
    trainer = quiet(max_steps=6, callbacks=epochs, limit_val_batches=0)
    trainer.fit(Toy(), loader())
    expected = epochs_seen(0, [0, 1], 2)
    del expected["on_validation_end"]
    assert epochs.seen == expected
    epochs.seen.clear()
    trainer.max_steps = 10
    trainer.fit(Toy(), loader())
    expected |= epochs_seen(1, [1, 2], 3)
    del expected["on_validation_end"]
    assert epochs.seen == expected, "the run goes on in the epoch that it had begun"
    broken = quiet(max_epochs=2, callbacks=Raises(ValueError("no"), batch=2))
    with pytest.raises(ValueError, match="no"):
        broken.fit(Toy(), loader())
    assert broken.current_epoch == 0


class Raises(Callback):
    def __init__(self, error: Exception, batch: int) -> None:
        self.error, self.batch = error, batch

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            raise self.error


def test_what_is_written_and_drawn_has_the_epoch_itself_and_not_the_count(tmp_path: Path):
    drawn: list[int] = []

    class Notes(RandomSampler):
        def set_epoch(self, epoch: int) -> None:
            drawn.append(epoch)

    data = samples(6)
    saver = ModelCheckpoint(filename="{epoch}", save_top_k=-1, every_n_epochs=2, save_last=True)
    trainer = quiet(max_epochs=3, max_steps=10, enable_checkpointing=True, callbacks=saver, default_root_dir=tmp_path)
    trainer.fit(Toy(), loader(), DataLoader(data, 3, sampler=Notes(data)))
    trainer.validate(verbose=False, dataloaders=DataLoader(data, 3, sampler=Notes(data)), model=Toy())
    assert (trainer.current_epoch, trainer.global_step) == (3, 10)
    assert drawn[-1] == 2
    assert sorted(set(drawn)) == [0, 1, 2]
    checkpoints = {path.name: path for path in map(Path, saver.best_k_models)}
    assert list(checkpoints) == ["epoch=1-1", "epoch=2-1"]
    for name, epoch in (("epoch=1-1", 1), ("epoch=2-1", 2)):
        kept = json.loads((checkpoints[name] / "trainer.json").read_text())
        assert kept["epoch"] == kept["position"]["epoch"] == epoch
        assert kept["position"].keys() == {field.name for field in fields(Position)}
    assert trainer.log_dir is not None
    assert json.loads((Path(trainer.log_dir) / "status.json").read_text())["epoch"] == 2


def test_a_fraction_of_unsized_data_is_an_error():
    with pytest.raises(SettingError, match="limit_train_batches"):
        quiet(max_epochs=1, limit_train_batches=0.5).fit(Toy(), stream())


def stop_at(step: int) -> Callback:
    class Stops(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == step:
                trainer.should_stop = True

    return Stops()


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 5),  # asked for at step 2, noted at the boundary 3, agreed on at the boundary 5
        ({"min_steps": 6}, 6),
        ({"min_epochs": 2}, 20),
        ({"min_epochs": 1}, 10),
    ],
)
def test_should_stop_stops_at_the_next_agreement_but_not_before_the_minimum(settings: dict[str, Any], steps: int):
    trainer = quiet(max_epochs=5, trigger_every=2, callbacks=stop_at(2), **settings)
    trainer.fit(Toy(), loader(20, 2))
    assert trainer.global_step == steps
    assert trainer.should_stop


def test_a_stop_is_the_same_for_a_trigger_with_a_reason():
    module = Toy()
    module.on_train_epoch_end = lambda: module.trainer.set_trigger("stop", "enough")
    trainer = quiet(max_epochs=5)
    trainer.fit(module, loader())
    assert trainer.global_step == 4
    assert trainer.stop_reason == "enough"


def test_max_time_ends_the_run_and_needs_no_other_limit():
    trainer = quiet(max_time=timedelta(microseconds=1), trigger_every=1)
    trainer.fit(Toy(), loader())
    assert 0 < trainer.global_step <= 3


def test_minus_one_skips_the_rest_of_the_epoch():
    module = Toy()
    module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 2 else None
    trainer = quiet(max_epochs=2)
    trainer.fit(module, loader())
    assert trainer.global_step == 4
    assert len(module.seen) == 4


def test_minus_one_in_a_window_leaves_its_gradients_out():
    module, other = Toy(), Toy()
    other.load_state_dict(module.state_dict())
    module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 3 else None
    quiet(max_epochs=2, accumulate_grad_batches=2).fit(module, loader())
    quiet(max_epochs=2, accumulate_grad_batches=2, limit_train_batches=2).fit(other, loader())
    assert_same(weights(module), weights(other))


def test_a_second_fit_goes_on_where_the_first_one_stopped():
    module, whole = Toy(), Toy()
    whole.load_state_dict(module.state_dict())
    trainer = quiet(max_epochs=2, trigger_every=1, callbacks=stop_at(1))
    trainer.fit(module, loader())
    first = trainer.global_step
    assert 0 < first < 4
    trainer.fit(module, loader())
    assert trainer.global_step == 8
    quiet(max_epochs=2).fit(whole, loader())
    assert_same(weights(module), weights(whole))


# ---- validation


def test_no_validation_runs_before_its_time_has_come():
    assert validations(val_check_interval=timedelta(days=1)) == []


def test_when_validation_runs_on_unsized_data():
    assert validations(stream(20, 2)) == [(0, 10)]
    assert validations(stream(20, 2), val_check_interval=4) == [(0, 4), (0, 8)]
    with pytest.raises(SettingError, match="has no length"):
        validations(stream(), val_check_interval=0.5)


class Claiming(Stream):
    def __init__(self, length: int, claimed: int) -> None:
        super().__init__(length)
        self.claimed = claimed

    def __len__(self) -> int:
        return self.claimed


@pytest.mark.parametrize(
    ("length", "claimed", "settings", "expected"),
    [
        (7, 10, {"val_check_interval": 0.5}, [(0, 5), (0, 7), (1, 5), (1, 7)]),
        (5, 10, {"val_check_interval": 0.5}, [(0, 5), (1, 5)]),
        (3, 10, {"val_check_interval": 8}, [(0, 3), (1, 3)]),
        (7, 10, {"val_check_interval": 0.5, "accumulate_grad_batches": 3}, [(0, 6), (0, 7), (1, 6), (1, 7)]),
        (7, 10, {"val_check_interval": 0.5, "check_val_every_n_epoch": 2}, [(1, 5), (1, 7)]),
        (7, 9, {"val_check_interval": 5}, [(0, 5), (1, 5)]),
        (10, 4, {"val_check_interval": 0.5}, [(epoch, batch) for epoch in (0, 1) for batch in (2, 4, 6, 8, 10)]),
        (3, 10, {"val_check_interval": 4, "check_val_every_n_epoch": None}, [(1, 1)]),
        (7, 10, {"val_check_interval": 0.5, "max_steps": 6}, [(0, 5)]),
    ],
)
def test_data_that_ends_before_a_planned_validation_validates_at_its_end(
    length: int, claimed: int, settings: dict[str, Any], expected: list[tuple[int, int]]
):
    data = DataLoader(Claiming(length, claimed), 1)
    assert validations(data, **{"max_epochs": 2, **settings}) == expected


def test_validation_by_time():
    at = validations(val_check_interval=timedelta(microseconds=1), trigger_every=1)
    assert at[0] == (0, 2)
    assert len(at) >= 4


def test_what_all_ranks_ask_for_alike_comes_at_that_very_step(tmp_path: Any) -> None:
    class Asks(Validations):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            at = trainer.position
            if at.batch == at.window_batch and trainer.global_step in (1, 3):
                for name in ("stop", "save", "validate")[trainer.global_step // 3 :]:
                    trainer.set_trigger(name, "all know", agreed=True)

    for settings in ({}, {"accumulate_grad_batches": 2}, {"min_steps": 5}, {"val_check_interval": timedelta(hours=1)}):
        asks, saver = Asks(), ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=0)
        how = {"min_steps": 3, "trigger_every": 1_000, "enable_checkpointing": True, **settings}
        trainer = quiet(max_epochs=1, callbacks=[asks, saver], **how)
        trainer.fit(Toy(), loader(48, 2), loader(3))
        batches = settings.get("accumulate_grad_batches", 1)
        assert trainer.global_step == how["min_steps"], settings
        assert trainer.stop_reason == "all know"
        assert [place for place in asks.at if place[1] <= 3 * batches] == [(0, batches), (0, 3 * batches)]
        assert {1, 3} <= {saved.step for saved in saver.saved}


def test_no_validation_that_is_due_by_time_delays_a_preemption(tmp_path: Any):
    class Asks(Validations):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer.set_trigger("validate")
                trainer.set_trigger("preempted", "SIGTERM")

    callback = Asks()
    settings = {"enable_checkpointing": True, "default_root_dir": tmp_path, "trigger_every": 1}
    trainer = quiet(max_epochs=1, callbacks=[callback, ModelCheckpoint()], **settings)
    with pytest.raises(Preempted):
        trainer.fit(Toy(), loader(20, 2), loader(3))
    assert trainer.global_step == 3
    assert callback.at == []


def test_an_interval_longer_than_the_epoch_is_an_error():
    with pytest.raises(SettingError, match=r"less than or equal to .* 10 an epoch.*check_val_every_n_epoch=None"):
        validations(val_check_interval=11)


def test_validation_runs_in_eval_mode_without_gradients_and_puts_every_mode_back():
    class Modes(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.BatchNorm1d(4)
            self.modes: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.modes.append(("train", self.training, self.frozen.training, torch.is_grad_enabled()))
            return super().training_step(batch, batch_idx)

        def on_train_epoch_start(self) -> None:
            self.frozen.eval()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.modes.append(("val", self.training, self.frozen.training, torch.is_grad_enabled()))

    module = Modes()
    quiet(max_epochs=1, val_check_interval=2, limit_train_batches=3, num_sanity_val_steps=0).fit(
        module, loader(), loader(3)
    )
    train, val = ("train", True, False, True), ("val", False, False, False)
    assert module.modes == [train, train, val, train]


def test_a_validation_loader_without_a_validation_step_says_so():
    class NoValidation(Toy):
        validation_step = None  # pyright: ignore[reportAssignmentType]

    from instep import TrainModule

    NoValidation.validation_step = TrainModule.validation_step
    with pytest.warns(UserWarning, match="has no validation_step"):
        quiet(max_epochs=1).fit(NoValidation(), loader(), loader())


# ---- the sanity check


def test_the_sanity_check_leaves_random_numbers_and_metrics_alone():
    class Noisy(LoggingToy):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.noise = torch.rand(())
            super().validation_step(batch, batch_idx)

        def on_train_start(self) -> None:
            self.metrics_at_start = dict(self.trainer.callback_metrics)
            self.draw = torch.rand(())

    results = []
    for steps in (0, 2, -1):
        torch.manual_seed(1)
        module = Noisy()
        quiet(max_epochs=1, num_sanity_val_steps=steps).fit(module, loader(shuffle=True), loader(9))
        assert module.metrics_at_start == {}
        results.append((module.draw, weights(module)))
    for draw, parameters in results[1:]:
        assert torch.equal(draw, results[0][0])
        assert_same(parameters, results[0][1])


@pytest.mark.parametrize(("steps", "expected"), [(0, 0), (2, 4), (1, 2), (-1, 7), (100, 7)])
def test_the_sanity_check_runs_so_many_batches_of_each_loader(steps: int, expected: int):
    seen = []
    module = Toy()
    module.validation_step = lambda batch, batch_idx, dataloader_idx=0: seen.append(module.trainer.sanity_checking)
    quiet(max_steps=1, num_sanity_val_steps=steps).fit(module, loader(), [loader(9), loader(12)])
    assert seen == [True] * expected


# ---- special runs


def test_fast_dev_run_runs_one_batch_of_everything_and_writes_nothing(tmp_path: Any):
    callback = Validations()
    trainer = Trainer(accelerator="cpu", fast_dev_run=True, callbacks=callback, default_root_dir=tmp_path)
    module = LoggingToy()
    trainer.fit(module, loader(), loader())
    assert trainer.global_step == 1
    assert callback.at == [(0, 1)]
    assert not list(tmp_path.iterdir())


def test_fast_dev_run_has_a_logger_that_does_nothing():
    module = Toy()
    module.on_train_start = lambda: module.logger.experiment.add_scalar("x", 1.0)
    trainer = quiet(fast_dev_run=True, logger=True)
    trainer.fit(module, loader())
    assert trainer.loggers == []
    assert quiet(fast_dev_run=True, logger=False).logger is None


def test_fast_dev_run_takes_a_number():
    trainer = quiet(fast_dev_run=3, enable_checkpointing=None)
    trainer.fit(LoggingToy(), loader(), loader())
    assert trainer.global_step == trainer.fast_dev_run == 3
    assert trainer.logged_metrics  # of each step


def test_barebones_runs_nothing_but_the_loop(tmp_path: Any):
    trainer = Trainer(accelerator="cpu", barebones=True, max_epochs=1, default_root_dir=tmp_path)
    module = LoggingToy()
    trainer.fit(module, loader(), loader())
    assert trainer.global_step == 4
    assert trainer.callback_metrics == {}
    assert trainer.callbacks == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limits", [{"limit_train_batches": 0}, {"limit_train_batches": 0.0, "limit_val_batches": 0}])
def test_overfit_batches_stands_in_place_of_limits_of_zero(limits: dict[str, Any]):
    seen = Validations()
    with pytest.warns(UserWarning, match="has no effect"):
        trainer = quiet(max_epochs=2, overfit_batches=2, callbacks=seen, num_sanity_val_steps=0, **limits)
    trainer.fit(Toy(), loader(), loader(3))
    assert (trainer.global_step, seen.at) == (4, [(0, 2), (1, 2)])
    with pytest.raises(SettingError, match=r"overfit_batches=0.1 of 4 batches"):
        quiet(max_epochs=2, overfit_batches=0.1).fit(Toy(), loader())


@pytest.mark.parametrize("settings", [{"val_check_interval": 5}, {"val_check_interval": 0.5, "limit_val_batches": 1}])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_an_interval_that_does_not_fit_the_data_is_refused_before_the_first_step(settings: dict[str, Any], every: int):
    data = stream() if settings["val_check_interval"] == 0.5 else loader()
    trainer = quiet(max_epochs=4, check_val_every_n_epoch=every, **settings)
    with pytest.raises(SettingError, match="val_check_interval"):
        trainer.fit(Toy(), data, loader(3))
    assert trainer.global_step == 0
    trainer.limit_val_batches = 0  # nothing validates
    trainer.fit(Toy(), data, loader(3))
    assert trainer.global_step == 16


def test_overfit_batches_repeats_the_same_batches_in_order():
    module = Toy()
    quiet(max_epochs=3, overfit_batches=2).fit(module, loader(shuffle=True), loader())
    expected = [batch[0][:, 0].tolist() for batch in loader()][:2]
    assert module.seen == expected * 3


def test_unsized_data_is_trained_batch_by_batch():
    module = Toy()
    quiet(max_epochs=2).fit(module, stream())
    assert module.seen == [batch[0][:, 0].tolist() for batch in loader()] * 2


def test_estimated_stepping_batches_is_known_in_configure_optimizers():
    seen: list[Any] = []

    class Model(Toy):
        def configure_optimizers(self) -> Any:
            seen.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    quiet(max_epochs=3, accumulate_grad_batches=3).fit(Model(), loader())
    quiet(max_epochs=3, max_steps=5).fit(Model(), loader())
    quiet(max_steps=5).fit(Model(), stream())
    quiet(max_epochs=1).fit(Model(), stream())
    assert seen == [6, 5, 5, float("inf")]


# ---- what is missing or wrong


def test_a_trainer_cannot_run_inside_its_own_run():
    trainer = quiet(max_epochs=1)
    module = Toy()
    module.on_train_start = lambda: trainer.fit(module, loader())
    with pytest.raises(UsageError, match="running already"):
        trainer.fit(module, loader())


@pytest.mark.parametrize("fn", ["fit", "validate", "test", "predict"])
def test_an_error_in_a_step_puts_the_module_and_state_back(fn: str):
    events: list[str] = []

    class Fails(Toy):
        def fail(self, *_: Any) -> Any:
            raise ValueError("from the step")

        training_step = validation_step = test_step = predict_step = fail

        def teardown(self, stage: str) -> None:
            events.append(f"teardown {stage}")

    class Watches(Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            events.append(f"exception {exception}")

    trainer = quiet(max_epochs=1, callbacks=Watches(), deterministic=True, detect_anomaly=True, benchmark=True)
    module = Fails()
    assert not torch.backends.cudnn.benchmark
    with pytest.raises(ValueError, match="from the step"):
        getattr(trainer, fn)(module, loader())
    assert events == ["exception from the step", f"teardown {fn}"]
    assert (trainer.state.status, trainer.state.fn, trainer.state.stage) == ("interrupted", fn, None)
    assert trainer.interrupted
    assert active_run() is None
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_anomaly_enabled()
    assert not torch.backends.cudnn.benchmark
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_flags_of_torch_hold_inside_and_are_restored():
    seen: list[Any] = []
    module = Toy()
    module.on_train_start = lambda: seen.append(
        (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.is_anomaly_enabled(),
        )
    )
    quiet(max_epochs=1, deterministic="warn", detect_anomaly=True).fit(module, loader())
    assert seen == [(True, True, True)]
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_anomaly_enabled()
    with torch.no_grad():
        quiet(max_epochs=1).fit(Toy(), loader())
        assert not torch.is_grad_enabled()


# ---- the active run


def test_the_states_follow_the_run():
    seen: list[Any] = []

    class Watches(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            gradient = GradientState()
            seen.append((gradient.sync_gradients, gradient.end_of_dataloader, gradient.num_steps))
            assert AcceleratorState().mixed_precision == "bf16"
            assert gradient.in_dataloader
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            if not self.trainer.sanity_checking:
                seen.append(("val", GradientState().end_of_dataloader))

    trainer = quiet(max_epochs=1, accumulate_grad_batches=2, precision="bf16-mixed", limit_train_batches=3)
    trainer.fit(Watches(), loader(), loader(6))
    assert seen == [(False, False, 2), (True, False, 2), (True, True, 2), ("val", False), ("val", True)]
    assert not GradientState().initialized
    assert GradientState().num_steps == 1
    assert not GradientState().in_dataloader
    assert not AcceleratorState().initialized


def test_manual_optimization_knows_the_last_batch_too():
    seen: list[bool] = []

    class Manual(Toy):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(GradientState().end_of_dataloader)
            self.optimizers().step()

    quiet(max_epochs=1).fit(Manual(), loader())
    assert seen == [False, False, False, True]


def test_a_trainer_inside_anothers_run_has_its_own_state():
    seen: list[Any] = []

    class Outer(Toy):
        def on_train_epoch_end(self) -> None:
            inner = quiet(max_epochs=1, precision="bf16-mixed", accumulate_grad_batches=4)
            other = Toy()
            other.on_train_start = lambda: seen.append((AcceleratorState().mixed_precision, GradientState().num_steps))
            inner.fit(other, loader())
            seen.append((AcceleratorState().mixed_precision, GradientState().num_steps))

    quiet(max_epochs=1, accumulate_grad_batches=2).fit(Outer(), loader())
    assert seen == [("bf16", 4), ("no", 2)]


def test_what_a_trainer_says_of_itself():
    trainer = quiet(max_epochs=2, min_epochs=1)
    assert (trainer.max_epochs, trainer.min_epochs, trainer.max_steps) == (2, 1, -1)
    assert (trainer.world_size, trainer.global_rank, trainer.is_global_zero) == (1, 0, True)
    assert trainer.state.fn is None
    seen: list[Any] = []
    module = Toy()
    module.on_train_start = lambda: seen.append(
        (trainer.state.fn, trainer.training, trainer.num_training_batches, trainer.num_val_batches, trainer.model)
    )
    trainer.fit(module, loader(), [loader(6), loader(9)])
    assert seen == [("fit", True, 4, [2, 3], module)]
    assert trainer.state.finished
    with pytest.raises(AttributeError, match="no attribute 'max_epoch'"):
        _ = trainer.max_epoch


def test_garbage_is_collected_at_chosen_steps_only() -> None:
    class Boom(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            steps.append(self.global_step)
            [[each] for each in range(3000)]  # more than Python's threshold
            if self.global_step == 9:
                raise ValueError("boom")
            return super().training_step(batch, batch_idx)

    steps: list[int] = []
    seen: list[tuple[int, int]] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and not gc.isenabled():
            seen.append((len(steps), info["generation"]))

    gc.callbacks.append(note)
    try:
        with pytest.raises(ValueError, match="boom"):
            quiet(max_epochs=4, gc_every_n_steps=4).fit(Boom(), loader(12, 4))  # three steps are an epoch
    finally:
        gc.callbacks.remove(note)
    assert seen == [(4, 1), (8, 1)]
    assert gc.isenabled()


@pytest.mark.filterwarnings("ignore:.*returned None")
def test_without_an_optimizer_the_hooks_after_a_batch_have_its_outputs() -> None:
    class Plain(Toy):
        def configure_optimizers(self) -> None:
            return None

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs)

    seen: list[Any] = []
    quiet(max_epochs=1).fit(Plain(), loader())
    assert [set(outputs) for outputs in seen] == [{"loss"}] * 4
