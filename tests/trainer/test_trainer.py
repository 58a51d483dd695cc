"""Attributes and actions of a Trainer that callbacks, loggers and modules use."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import AcceleratorState, Callback, Trainer
from instep.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, ProgressBar, Timer
from instep.data import CombinedLoader
from instep.errors import SettingError, UsageError
from instep.loggers import CSVLogger, TensorBoardLogger
from instep.strategies import DDPStrategy
from instep.trainer import RunningStage, TrainerFn, TrainerStatus
from tests.trainer.toys import BareToy, LoggingToy, Toy, assert_same, loader, quiet, weights


def told(trainer: Trainer) -> dict[str, Any]:
    """What a Trainer says of its data, of where it stands, and how it ended."""
    state = trainer.state
    return {
        "train": (trainer.train_dataloader, trainer.num_training_batches),
        "val": (trainer.val_dataloaders, trainer.num_val_batches, trainer.num_sanity_val_batches),
        "test": (trainer.test_dataloaders, trainer.num_test_batches),
        "predict": (trainer.predict_dataloaders, trainer.num_predict_batches),
        "state": (state.status, state.fn, state.stage, state.finished, state.stopped),
        "last": trainer.is_last_batch,
    }


NOTHING = {
    "train": (None, float("inf")),
    "val": (None, [], []),
    "test": (None, []),
    "predict": (None, []),
    "state": ("initializing", None, None, False, False),
    "last": False,
}


class Asks(Toy):
    """What the Trainer says of itself at some hooks; the training loader is the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = loader()
        self.asked = 0
        self.told: dict[str, dict[str, Any]] = {}
        self.last: list[bool] = []

    def train_dataloader(self) -> Any:
        self.asked += 1
        return self.own

    def configure_optimizers(self) -> Any:
        self.steps = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()

    def on_validation_start(self) -> None:
        if self.trainer.sanity_checking:
            self.told["sanity"] = told(self.trainer)

    def on_train_start(self) -> None:
        self.told["train"] = told(self.trainer)
        assert self.optimizers() is self.optimizers()
        assert self.trainer.strategy.root_device == self.device

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.last.append(self.trainer.is_last_batch)

    def on_test_epoch_end(self) -> None:
        self.told["test"] = told(self.trainer)


def test_what_a_trainer_says_before_during_and_after_a_run():
    trainer, module = quiet(max_epochs=2, accumulate_grad_batches=3), Asks()
    assert told(trainer) == NOTHING
    vals = {"a": loader(9), "b": loader(15)}
    trainer.fit(module, val_dataloaders=vals)
    data = {"train": (module.own, 4), "val": (vals, [3, 5], [2, 2])}
    assert module.told["sanity"] == {**NOTHING, **data, "state": ("running", "fit", "sanity_check", False, False)}
    assert module.told["train"] == {**NOTHING, **data, "state": ("running", "fit", "train", False, False)}
    assert module.last == [False, False, False, True] * 2
    assert told(trainer) == {**NOTHING, **data, "state": ("finished", "fit", None, True, True), "last": True}
    assert (module.asked, module.steps, trainer.estimated_stepping_batches) == (1, 4, 4)
    assert trainer.enable_validation
    assert module.optimizers().optimizer is trainer.optimizers[0]

    tests, more = [loader(6), loader(3)], loader(3)
    trainer.test(module, tests, verbose=False)
    tested = {**NOTHING, **data, "test": (tests, [2, 1]), "last": True}
    assert module.told["test"] == {**tested, "state": ("running", "test", "test", False, False)}
    assert told(trainer) == {**tested, "state": ("finished", "test", None, True, True)}
    trainer.validate(module, more, verbose=False)
    trainer.predict(module, tests)
    assert (trainer.val_dataloaders, trainer.num_val_batches, trainer.num_sanity_val_batches) == (more, [1], [2, 2])
    assert (trainer.predict_dataloaders, trainer.num_predict_batches) == (tests, [2, 1])
    trainer.fit(module, CombinedLoader([module.own], "min_size"))
    assert trainer.train_dataloader == [module.own]
    assert (trainer.val_dataloaders, trainer.num_val_batches) == (None, [])


def test_a_trainer_has_the_words_of_lightning(tmp_path: Path):
    plugins = [EarlyStopping("a"), EarlyStopping("b"), ModelCheckpoint(), ModelCheckpoint(filename="x"), ProgressBar()]
    trainer = quiet(callbacks=plugins, devices=2, enable_progress_bar=True, enable_checkpointing=True)
    assert trainer.early_stopping_callbacks == plugins[:2]
    assert trainer.early_stopping_callback is plugins[0]
    assert trainer.checkpoint_callbacks == plugins[2:4]
    assert trainer.checkpoint_callback is plugins[2]
    assert trainer.progress_bar_callback is plugins[4]
    bare = quiet()
    assert (bare.early_stopping_callbacks, bare.checkpoint_callbacks) == ([], [])
    assert (bare.checkpoint_callback, bare.progress_bar_callback, bare.ckpt_path) == (None, None, None)
    assert (trainer.device_ids, bare.device_ids) == ([0, 1], [0])
    assert quiet(default_root_dir=tmp_path).default_root_dir == str(tmp_path)
    assert (bare.evaluating, bare.interrupted, bare.received_sigterm) == (False, False, False)
    module = Toy()
    bare.validate(module, loader(3), verbose=False)
    with pytest.warns(FutureWarning, match="trainer.model") as warned:
        assert bare.lightning_module is module
    assert len(warned) == 1
    assert warned[0].filename == __file__
    with pytest.raises(AttributeError, match="global_step can be read, not set"):
        bare.global_step = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_states_are_words_and_members():
    stage = RunningStage("sanity_check")
    assert (stage, f"{stage}", str(stage), stage.value) == ("sanity_check",) * 4
    assert [one.evaluating for one in RunningStage] == [False, True, True, True, False]
    assert [one.dataloader_prefix for one in RunningStage] == ["train", "val", "val", "test", "predict"]
    assert [one.stopped for one in TrainerStatus] == [False, False, True, True]
    assert list(TrainerFn) == ["fit", "validate", "test", "predict"]


class Sized(CSVLogger):
    def __len__(self) -> int:
        return 0


def test_loggers_may_be_set_between_runs(tmp_path: Path):
    trainer, logger = quiet(max_epochs=1, default_root_dir=tmp_path, logger=True), CSVLogger()
    trainer.logger = logger
    module = LoggingToy()
    module.on_train_start = lambda: setattr(trainer, "logger", None)
    with pytest.raises(UsageError, match="set them before it"):
        trainer.fit(module, loader())
    module.on_train_start = lambda: None
    trainer.fit(module, loader())
    assert trainer.loggers == [logger]
    assert logger.log_dir == trainer.log_dir
    trainer.logger = False
    assert trainer.logger is None
    trainer.logger = Sized()
    assert type(trainer.logger) is Sized, "a logger without a record is a logger"
    trainer.loggers = ["csv", "jsonl"]
    assert [type(logger).__name__ for logger in trainer.loggers] == ["CSVLogger", "JSONLinesLogger"]
    with pytest.raises(SettingError, match=r"'cvs' is not known.*'csv'"):
        trainer.loggers = ["cvs"]
    with pytest.raises(SettingError, match="Logger"):
        trainer.loggers = [3]  # pyright: ignore[reportAttributeAccessIssue]


def test_arguments_may_be_set_between_runs():
    trainer, module = quiet(max_epochs=1, min_epochs=1), Toy()
    trainer.fit(module, loader())
    trainer.max_epochs, trainer.limit_train_batches = 3, 2
    assert (trainer.settings.max_epochs, trainer.max_epochs, trainer.limit_train_batches) == (3, 3, 2)
    trainer.fit(module, loader())
    assert (trainer.global_step, trainer.current_epoch) == (8, 3)
    trainer.min_epochs = trainer.max_epochs = None
    assert (trainer.min_epochs, trainer.max_epochs) == (None, 1000)
    for name, value, text in (
        ("max_epochs", "4", "max_epochs='4'"),
        ("min_steps", 5, "min_steps=5 is more than max_steps=3"),
        ("precision", "bf16-mixed", r"trainer\.precision = .*Make a new Trainer"),
    ):
        trainer.max_steps = 3
        with pytest.raises(SettingError, match=text):
            setattr(trainer, name, value)
    assert (trainer.max_epochs, trainer.min_steps, trainer.precision) == (1000, None, "32-true")
    module.on_train_start = lambda: setattr(trainer, "gradient_clip_val", 4.0)
    trainer.max_steps = 20
    with pytest.raises(UsageError, match="the running fit has read it"):
        trainer.fit(module, loader())


def test_ckpt_path_tells_what_was_loaded_and_may_be_set(tmp_path: Path):
    saver = ModelCheckpoint(dirpath=tmp_path / "best", save_last=True)
    trainer, module = quiet(max_epochs=1, callbacks=saver, enable_checkpointing=True, default_root_dir=tmp_path), Toy()
    trainer.fit(module, loader(), ckpt_path="auto")
    assert trainer.ckpt_path is None, "there was none to load"
    other = quiet(max_epochs=1)
    other.fit(Toy(), loader())
    mine = other.save_checkpoint(tmp_path / "mine")
    with pytest.warns(UserWarning, match="called without a model"):
        trainer.test(dataloaders=loader(3), verbose=False)
    assert trainer.ckpt_path == saver.best_model_path
    trainer.ckpt_path = mine
    trainer.test(dataloaders=loader(3), verbose=False)
    assert trainer.ckpt_path == mine
    assert_same(weights(module), weights(other.model))
    with pytest.warns(UserWarning, match=r"goes before trainer\.ckpt_path = .*mine-1"):
        trainer.test(ckpt_path="best", dataloaders=loader(3), verbose=False)
    assert trainer.ckpt_path == saver.best_model_path
    trainer.ckpt_path = mine
    trainer.ckpt_path = None
    trainer.test(module, dataloaders=loader(3), verbose=False)
    assert trainer.ckpt_path is None


def test_a_trainer_that_has_run_can_be_pickled_and_copied(tmp_path: Path):
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        strategy=DDPStrategy(),
        default_root_dir=tmp_path,
        logger=[TensorBoardLogger(), CSVLogger()],
        callbacks=[EarlyStopping("val_loss"), LearningRateMonitor(), Timer(), ModelCheckpoint(monitor="val_loss")],
    )
    torch.manual_seed(0)
    module = LoggingToy()
    first = copy.deepcopy(module.state_dict())
    trainer.fit(module, loader(), loader(3))
    for callback, copied in zip(trainer.callbacks, copy.deepcopy(trainer.callbacks), strict=True):
        assert type(copied) is type(callback)
        assert copied.state_dict().keys() == callback.state_dict().keys()
    data = pickle.dumps(trainer)
    assert len(data) < 30_000, "nothing of the run is in it"
    assert trainer.train_dataloader is not None
    for again in (pickle.loads(data), copy.deepcopy(trainer)):
        assert (again.current_epoch, again.global_step, again.num_training_batches) == (1, 4, 4)
        assert again.train_dataloader is None
        assert again.callback_metrics.keys() == trainer.callback_metrics.keys()
        again.max_epochs = 2
        again.fit(again.model, loader(), loader(3))
        assert again.global_step == 8
    whole = LoggingToy()
    whole.load_state_dict(first)
    quiet(max_epochs=2).fit(whole, loader(), loader(3))
    assert_same(weights(again.model), weights(whole))


class Withdraws(Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.withdraw)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == 2

    def withdraw(self, trainer: Any, module: Any) -> None:
        trainer.should_stop = False


def test_an_agreed_stop_cannot_be_taken_back_by_one_rank():
    trainer = quiet(max_epochs=3, trigger_every=1, callbacks=[Withdraws("on_train_start")])
    trainer.fit(Toy(), loader())
    assert trainer.should_stop, "False had no meaning before the stop was asked for"
    trainer.should_stop = False
    assert not trainer.should_stop
    with pytest.raises(UsageError, match="one cannot take that back"):
        quiet(max_epochs=3, trigger_every=1, callbacks=[Withdraws("on_train_end")]).fit(Toy(), loader())


def test_the_state_shows_the_running_strategy() -> None:
    seen: list[object] = []

    class Looking(Toy):
        def on_train_start(self) -> None:
            seen.append(AcceleratorState().plugin)

    trainer = quiet(max_epochs=1)
    trainer.fit(Looking(), loader())
    assert seen == [trainer.strategy]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_module_that_has_run_can_be_scripted():
    class Scripted(BareToy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    module = Scripted()
    quiet(max_epochs=1).fit(module, loader())
    x = torch.ones(2, 4)
    assert torch.equal(torch.jit.script(module)(x), module(x))
    assert module.freeze().unfreeze() is module
    assert module.training
