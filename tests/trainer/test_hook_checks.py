"""Hooks that are misspelt, that are turned off by None, and that take any arguments."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from instep import Callback, DataModule, TrainModule
from instep.errors import HookError, UsageError
from tests.trainer.toys import Toy, loader, quiet


class Foreign:
    """A base of somebody else's."""

    def on_train_epoch_ending(self) -> None:
        pass


def misspelt() -> tuple[Toy, Callback]:
    class Model(Foreign, Toy):
        def on_train_epoch_ends(self) -> None:
            pass

        def on_val_epoch_end(self) -> None:
            pass

        def on_epoch_end(self) -> None:
            pass

        def on_sanity_check_start(self) -> None:
            pass

        def on_button_pressed(self) -> None:
            pass

        def on_train_batch_ended(self) -> None:
            self.calls = [0]

        def on_train_epoch_end(self) -> None:
            [self.on_train_batch_ended() for _ in range(1)]

    class Watcher(Callback):
        def on_train_batch_stop(self, *_: Any) -> None:
            pass

        def on_before_batch_transfer(self, *_: Any) -> None:
            pass

    return Model(), Watcher()


def test_a_misspelt_hook_is_warned_of_once_with_the_right_name():
    module, watcher = misspelt()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            quiet(max_epochs=1, callbacks=watcher, limit_train_batches=1).fit(module, loader())
    said = [str(it.message) for it in caught if "is not called by anything" in str(it.message)]
    assert said == [
        "Model.on_epoch_end is not called by anything: it is of Lightning 1.x. Use on_train_epoch_end",
        "Model.on_sanity_check_start is not called by anything: only callbacks have this hook",
        "Model.on_train_epoch_ends is not called by anything: did you mean on_train_epoch_end?",
        "Model.on_val_epoch_end is not called by anything: did you mean on_validation_epoch_end?",
        "Watcher.on_before_batch_transfer is not called by anything: only modules have this hook",
        "Watcher.on_train_batch_stop is not called by anything: did you mean on_train_batch_start?",
    ]


@pytest.mark.parametrize("name", ["on_step", "on_click", "on_new_best"])
def test_a_users_own_method_name_is_not_warned_of(name: str):
    module = Toy()
    module.__dict__[name] = lambda: None
    quiet(max_epochs=1, limit_train_batches=1).fit(module, loader())


# ---- names that are almost a step's or a loader's


class Misspelt(Toy):
    """Its steps have names of their own."""

    validation_step = None  # pyright: ignore[reportAssignmentType]
    training_step = None  # pyright: ignore[reportAssignmentType]

    def training_steps(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def val_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


class MisspeltTraining(DataModule):
    def train_dataloaders(self) -> Any:
        return loader()


class MisspeltValidation(DataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def validation_dataloader(self) -> Any:
        return loader()

    def get_predict_dataloader(self) -> Any:
        return loader()


def test_an_error_of_a_missing_step_or_loader_names_the_method_that_is_almost_it():
    with pytest.raises(HookError, match=r"Misspelt has no training_step.*It has training_steps: is that it\?"):
        quiet().fit(Misspelt(), loader())
    with pytest.raises(HookError, match=r"Misspelt has no validation_step.*It has val_step: is that it\?"):
        quiet().validate(Misspelt(), loader())
    with pytest.raises(HookError, match=r"MisspeltTraining has no train_dataloader\. It has train_dataloaders"):
        quiet().fit(Toy(), datamodule=MisspeltTraining())
    with pytest.raises(UsageError, match=r"has no val_dataloader\. It has validation_dataloader: is that"):
        quiet().validate(Toy(), datamodule=MisspeltValidation())


def test_a_fit_that_could_do_without_warns_of_it():
    class Model(Misspelt):
        training_step = Toy.training_step

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet(max_steps=1).fit(Model(), datamodule=MisspeltValidation())
        quiet(max_steps=1).fit(Model(), loader(), loader())
    said = [str(it.message) for it in caught]
    assert said == [
        "MisspeltValidation.validation_dataloader is not called by anything: did you mean val_dataloader?",
        "there is a validation loader, but Model has no validation_step: none is run. It has val_step: is that it?",
    ]


# ---- None in a hook's place


def test_none_in_the_place_of_a_hook_turns_it_off():
    class Model(Toy):
        def train_dataloader(self) -> Any:
            return loader()

        val_dataloader = train_dataloader

        def on_train_start(self) -> None:
            raise AssertionError

    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return loader()

        val_dataloader = train_dataloader

    for data in (None, Data()):
        module: Any = Model()
        owner = module if data is None else data
        owner.val_dataloader = None
        module.on_train_start = module.on_validation_model_zero_grad = module.configure_callbacks = None
        trainer = quiet(max_steps=1)
        trainer.fit(module, datamodule=data)
        assert trainer.global_step == 1
        with pytest.raises(UsageError, match="validate needs data"):
            trainer.validate(module, datamodule=data)
    module = Model()
    module.on_train_start = module.validation_step = None
    with pytest.warns(UserWarning, match="has no validation_step"):
        quiet(max_steps=1).fit(module)
    module.predict_step = None
    with pytest.raises(HookError, match="TrainModule has no predict_step and no forward"):
        quiet().predict(TrainModule(), loader())
    with pytest.raises(HookError, match="Model has no predict_step"):
        quiet().predict(module, loader())


# ---- steps that take whatever they are given


def test_a_step_of_any_arguments_gets_a_dataloader_idx_only_with_several_loaders():
    seen: list[tuple[str, int]] = []

    class Model(Toy):
        def validation_step(self, *args: Any) -> None:
            seen.append(("validate", len(args)))

        def test_step(self, batch: Any, *rest: Any) -> None:
            seen.append(("test", 1 + len(rest)))

        def on_test_batch_start(self, batch: Any, batch_idx: int, mine: int = 7) -> None:
            seen.append(("ready", mine))

        def predict_step(self, batch: Any, batch_idx: int, mine: int = 7) -> None:
            seen.append(("predict", mine))

        def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            seen.append(("before", dataloader_idx))

        def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(("after", batch_idx))

    trainer, module = quiet(limit_val_batches=1, limit_test_batches=1, limit_predict_batches=1), Model()
    for loaders in (loader(), [loader(), loader()]):
        trainer.validate(module, loaders, verbose=False)
        trainer.test(module, loaders, verbose=False)
        trainer.predict(module, loaders)
    one = [("validate", 2), ("ready", 7), ("test", 2), ("before", 0), ("predict", 7), ("after", 0)]
    predicted = [(what, idx) for idx in (0, 1) for what in ("before", "predict", "after")]
    predicted[-1] = ("after", 0)  # it takes no index of a loader
    tested = [("ready", 0), ("test", 3), ("ready", 1), ("test", 3)]
    assert seen == [*one, *[("validate", 3)] * 2, *tested, *predicted]


@pytest.mark.parametrize(
    ("name", "advice"),
    [("optimizer_idx", "manual optimization"), ("hiddens", "manual optimization")],
)
def test_an_argument_of_a_step_that_nothing_passes_is_named(name: str, advice: str):
    module = Toy()
    exec(f"def step(batch, batch_idx, {name}): pass", found := {})
    module.training_step = found["step"]
    with pytest.raises(HookError, match=f"step has an argument {name}, which nothing passes: .*{advice}"):
        quiet(max_steps=1).fit(module, loader())
