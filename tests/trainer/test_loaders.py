"""Which loaders a run uses, and what happens to a batch on its way to the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from instep import DataModule
from instep.callbacks import EarlyStopping
from instep.data import CombinedLoader
from instep.data.index import IndexLoader
from instep.errors import DataError, HookError, SettingError, UsageError
from instep.strategies import Precision
from instep.trainer.loaders import Loaders
from tests.trainer.toys import LoggingToy, Stream, Toy, loader, quiet, samples


class Shapes(Toy):
    """Keeps the batches' structure and sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def size(part: Any) -> Any:
            if isinstance(part, dict):
                return {key: size(value) for key, value in part.items()}
            if isinstance(part, (list, tuple)) and not isinstance(part[0], torch.Tensor):
                return [size(value) for value in part]
            return None if part is None else len(part[0])

        self.batches.append(size(batch))
        return self.layer.weight.sum()


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        (lambda a, b: {"a": a, "b": b}, [{"a": 3, "b": 2}, {"a": 3, "b": 2}, {"a": 3, "b": 2}, {"a": 3, "b": 2}]),
        (lambda a, b: [a, b], [[3, 2]] * 4),
        (lambda a, b: CombinedLoader([a, b], "min_size"), [[3, 2]] * 2),
        (lambda a, b: CombinedLoader({"a": a, "b": b}, "max_size_cycle"), [{"a": 3, "b": 2}] * 4),
        (lambda a, b: CombinedLoader([a, b, a], "min_size"), [[3, 2, 3]] * 2),
    ],
)
def test_several_training_loaders(wrap: Any, expected: list[Any]):
    module = Shapes()
    quiet(max_epochs=1).fit(module, wrap(loader(12, 3), loader(4, 2)))
    assert module.batches == expected


def test_max_size_gives_none_for_an_exhausted_loader():
    seen: list[Any] = []
    module = Toy()

    def step(batch: Any, batch_idx: int) -> Any:
        seen.append([part is None for part in batch])
        return module.layer.weight.sum()

    module.training_step = step
    quiet(max_epochs=1).fit(module, CombinedLoader([loader(9, 3), loader(4, 2)], "max_size"))
    assert seen == [[False, False], [False, False], [False, True]]


def test_a_limit_and_accumulation_count_combined_batches():
    module = Shapes()
    trainer = quiet(max_epochs=1, limit_train_batches=3, accumulate_grad_batches=2)
    trainer.fit(module, {"a": loader(12, 3), "b": loader(4, 2)})
    assert (len(module.batches), trainer.global_step) == (3, 2)


def test_a_list_of_ready_batches_is_a_loader():
    module = Toy()
    trainer = quiet(max_epochs=2)
    trainer.fit(module, list(loader()), list(loader(6)))
    assert trainer.global_step == 8
    assert module.seen[:4] == [batch[0][:, 0].tolist() for batch in loader()]


@pytest.mark.parametrize(
    "batches",
    [
        [torch.randn(3, 4) for _ in range(4)],
        [(torch.randn(3, 4), torch.randn(3)) for _ in range(4)],
        [{"x": torch.randn(3, 4)} for _ in range(4)],
    ],
)
def test_ready_batches_of_any_form(batches: list[Any]):
    module = Toy()
    seen: list[Any] = []

    def step(batch: Any, batch_idx: int) -> Any:
        seen.append(batch)
        return module.layer.weight.sum()

    module.training_step = step
    trainer = quiet(max_epochs=1)
    trainer.fit(module, batches)
    assert trainer.global_step == 4
    assert all(a is b for a, b in zip(seen, batches, strict=True))


@pytest.mark.parametrize(
    ("batches", "expected"),
    [([1, 2], [1, 2]), (range(2), [0, 1]), ({"a": [0, 1], "b": [2, 3]}, [{"a": 0, "b": 2}, {"a": 1, "b": 3}])],
)
def test_batches_without_tensors(batches: Any, expected: list[Any]):
    module, seen = Toy(), list[Any]()

    def step(batch: Any, batch_idx: int) -> Any:
        seen.append(batch)
        return module.layer.weight.sum()

    module.training_step = step
    quiet(max_epochs=1).fit(module, batches)
    assert seen == expected


# ---- evaluation


class Evaluates(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int]] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.calls.append((dataloader_idx, batch_idx))

    test_step = predict_step = validation_step


@pytest.mark.parametrize("fn", ["validate", "test", "predict"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda a, b: [a, b],
        lambda a, b: {"a": a, "b": b},
        lambda a, b: CombinedLoader([a, b], "sequential"),
    ],
)
def test_several_evaluation_loaders_run_in_turn(fn: str, wrap: Any):
    module = Evaluates()
    getattr(quiet(), fn)(module, wrap(loader(6, 3), loader(9, 3)))
    assert module.calls == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("loaders", [[[0, 1], [2, 3]], {"a": [0, 1], "b": [2, 3]}])
def test_plain_lists_are_evaluation_loaders(loaders: Any):
    module = Toy()
    module.predict_step = lambda batch, batch_idx, dataloader_idx=0: (batch, batch_idx, dataloader_idx)
    assert quiet().predict(module, loaders) == [[(0, 0, 0), (1, 1, 0)], [(2, 0, 1), (3, 1, 1)]]


def test_limits_of_evaluation():
    module = Evaluates()
    quiet(limit_val_batches=1).validate(module, [loader(), loader()], verbose=False)
    assert module.calls == [(0, 0), (1, 0)]
    quiet(limit_test_batches=0.5).test(module, loader(), verbose=False)
    assert module.calls[2:] == [(0, 0), (0, 1)]
    assert quiet(limit_predict_batches=0).predict(module, loader()) == []
    module.on_validation_start = module.val_dataloader = lambda: pytest.fail("a limit of 0 asks and runs nothing")
    stages: list[str] = []
    module.setup = lambda *, stage: stages.append(stage)
    module.teardown = lambda fn: stages.append(fn)  # by position, where the name is another
    assert quiet(limit_val_batches=0).validate(module, verbose=False) == []
    quiet(limit_val_batches=0, max_steps=1).fit(module, loader())
    assert stages == ["validate", "validate", "fit", "fit"]


def test_unsized_evaluation_data():
    module = Evaluates()
    quiet().validate(module, DataLoader(Stream(8), 3), verbose=False)
    assert module.calls == [(0, 0), (0, 1), (0, 2)]


def test_evaluation_needs_data():
    for fn in ("validate", "test", "predict"):
        with pytest.raises(UsageError, match=f"{fn} needs data: pass loaders"):
            getattr(quiet(), fn)(Toy())


# ---- where loaders come from


class Data(DataModule):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")
        assert self.trainer is not None

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        self.calls.append("train")
        return loader(6, 3)

    def val_dataloader(self) -> Any:
        self.calls.append("val")
        return loader(3, 3)

    def __len__(self) -> int:
        raise AttributeError("data that `setup` makes")  # so nothing may ask for the truth value


def test_a_data_modules_hooks_are_called_in_order():
    data = Data()
    trainer = quiet(max_epochs=2)
    trainer.fit(Toy(), datamodule=data)
    assert trainer.global_step == 4
    assert trainer.datamodule is data
    assert data.calls[:2] == ["prepare_data", "setup fit"]
    assert sorted(data.calls[2:4]) == ["train", "val"]
    assert data.calls[4:] == ["teardown fit"]
    trainer.fit(Toy(), data)  # in the loaders' place
    trainer.validate(datamodule=data, verbose=False)
    assert data.calls[-4:] == ["prepare_data", "setup validate", "val", "teardown validate"]


def test_a_datamodule_is_told_of_an_exception():
    class Told(Data):
        def on_exception(self, exception: BaseException) -> None:
            self.calls.append(str(exception))

    module, data = Toy(), Told()

    def fails(*_: Any) -> Any:
        raise ValueError("no")

    module.training_step = fails
    with pytest.raises(ValueError, match="no"):
        quiet(max_epochs=1).fit(module, datamodule=data)
    assert data.calls[-2:] == ["no", "teardown fit"]


def test_a_datamodule_of_data_sets():
    data = DataModule.from_datasets(samples(12), samples(4), predict_dataset=samples(5), batch_size=3)
    trainer = quiet(max_epochs=1)
    trainer.fit(Toy(), datamodule=data)
    assert trainer.global_step == 4
    predictions = trainer.predict(datamodule=data)
    assert predictions is not None
    assert [len(batch) for batch in predictions] == [3, 2]


def test_the_modules_own_loaders():
    class Own(Toy):
        def train_dataloader(self) -> Any:
            return loader(6, 3)

        def val_dataloader(self) -> Any:
            return loader(3, 3)

        test_dataloader = predict_dataloader = val_dataloader

    trainer = quiet(max_epochs=1)
    trainer.fit(Own())
    assert trainer.global_step == 2
    assert trainer.test(verbose=False) == [{}]
    assert len(trainer.predict() or []) == 1


def test_reloading_every_n_epochs():
    epochs: dict[str, list[int]] = {"train": [], "val": []}

    class Own(Toy):
        def train_dataloader(self) -> Any:
            epochs["train"].append(self.current_epoch)
            return loader(3 * (len(epochs["train"])), 3)

        def val_dataloader(self) -> Any:
            epochs["val"].append(self.current_epoch)
            return loader(3, 3)

    trainer = quiet(max_epochs=5, reload_dataloaders_every_n_epochs=2)
    trainer.fit(Own())
    assert epochs == {"train": [0, 2, 4], "val": [0, 2, 4]}
    assert trainer.global_step == 1 + 1 + 2 + 2 + 3


@pytest.mark.parametrize(
    ("sanity", "check_every", "reload_every", "expected"),
    [
        (0, 1, 1, [0, 1, 2, 3, 4, 5]),
        (1, 1, 1, [1, 2, 3, 4, 5]),
        (1, 1, 2, [2, 4]),
        (0, 3, 4, [2, 8]),
        (1, 3, 4, [2, 8]),
        (0, 2, 1, [1, 3, 5]),
        (1, 3, 2, [2, 5]),
        (0, 5, 2, [4, 9]),
    ],
)
def test_validation_is_reloaded_by_the_epochs_that_validate(
    sanity: int, check_every: int, reload_every: int, expected: list[int]
):
    before: list[int] = []
    asked: list[int] = []

    class Own(LoggingToy):
        def val_dataloader(self) -> Any:
            (before if self.trainer.sanity_checking else asked).append(self.current_epoch)
            return loader(3, 3)

    settings = {"check_val_every_n_epoch": check_every, "reload_dataloaders_every_n_epochs": reload_every}
    trainer = quiet(
        max_epochs=expected[-1] + 1,
        num_sanity_val_steps=sanity,
        callbacks=EarlyStopping("val_loss", patience=99),
        **settings,
    )
    trainer.fit(Own(), loader(3, 3))
    assert (before, asked) == ([0] * sanity, expected)


def test_validation_that_was_asked_for_early_is_reloaded_too():
    asked: list[int] = []

    class Own(LoggingToy):
        def val_dataloader(self) -> Any:
            asked.append(self.current_epoch)
            return loader(3, 3)

        def on_train_start(self) -> None:
            assert self.trainer.num_val_batches == [1]

    trainer = quiet(max_epochs=3, num_sanity_val_steps=0, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Own(), loader(3, 3))
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("every", [0, 1])
def test_a_val_dataloader_that_returns_none_is_no_validation(every: int):
    class Own(LoggingToy):
        def val_dataloader(self) -> Any:
            return None

        def on_validation_start(self) -> None:
            raise AssertionError

    trainer = quiet(max_epochs=1, reload_dataloaders_every_n_epochs=every)
    trainer.fit(Own(), loader(3, 3))
    assert (trainer.global_step, trainer.enable_validation) == (1, False)


def test_what_is_reloaded_is_prepared_like_the_first_and_the_old_is_closed(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    closed: list[Any] = []
    monkeypatch.setattr(IndexLoader, "close", lambda self: closed.append(self))

    class Notes(Toy):
        def on_train_epoch_start(self) -> None:
            source = self.trainer._run.source
            assert source.history == 2
            seen.append(source)

        def on_validation_epoch_start(self) -> None:
            seen.extend(self.trainer._run.loaders.evaluation("val"))

    trainer = quiet(max_epochs=2, reload_dataloaders_every_n_epochs=1, accumulate_grad_batches=2)
    trainer.fit(Notes(), loader(), loader(3))
    assert len(set(map(id, seen))) == 3  # validation's loader was given, and stays
    assert {id(source) for source in closed} == set(map(id, seen))


# ---- on the way to the step


def test_transfer_hooks_run_in_order_and_may_change_the_batch():
    class Transfers(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.order: list[Any] = []

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.order.append(("before", dataloader_idx))
            return [batch[0] + 1, batch[1]]

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            self.order.append(("move", str(device), dataloader_idx))
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.order.append(("after", dataloader_idx))
            return [batch[0] * 10, batch[1]]

    module = Transfers()
    quiet(max_epochs=1, limit_train_batches=1, num_sanity_val_steps=0, limit_val_batches=1).fit(
        module, loader(), [loader(), loader()]
    )
    one = [("before", 0), ("move", "cpu", 0), ("after", 0)]
    assert module.order == [*one, *one, ("before", 1), ("move", "cpu", 1), ("after", 1)]
    expected = (next(iter(loader()))[0][:, 0] + 1) * 10
    assert module.seen == [expected.tolist()]


@pytest.mark.parametrize("name", ["bf16-true", "64-true", "16-true"])
def test_a_batch_is_cast_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch):
    moved: list[torch.dtype] = []

    def move(batch: Any, device: Any, non_blocking: bool) -> Any:
        moved.append(batch.dtype)  # a cast before this would leave pinned memory
        return batch.to(device)

    monkeypatch.setattr("instep.trainer.loaders.send_to_device", move)
    precision = Precision(name, torch.device("cpu"))
    run: Any = SimpleNamespace(
        _module=Toy(), _datamodule=None, _device=torch.device("meta"), _strategy=SimpleNamespace(precision=precision)
    )
    batches: Any = [torch.ones(2), torch.ones(2)]
    given = list(Loaders.on_device(run, batches))
    assert [(each.device.type, each.dtype) for each in given] == [("meta", precision.dtype)] * 2
    assert moved == [torch.float32] * 2


def test_a_datamodules_transfer_hooks_take_the_modules_place():
    class Moves(Data):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.calls.append("after")
            return batch

    module, data = Toy(), Moves()
    module.on_before_batch_transfer = lambda batch, dataloader_idx: pytest.fail("the datamodule has the hooks")
    quiet(max_epochs=1, limit_val_batches=0).fit(module, datamodule=data)
    assert data.calls.count("after") == 2


# ---- the global batch


@pytest.mark.parametrize(
    ("size", "batches", "steps", "windows"),
    [(3, [3] * 4, 4, 1), (12, [3] * 4, 1, 4), (6, [3] * 4, 2, 2), (2, [2] * 6, 6, 1), (4, [2] * 6, 3, 2)],
)
def test_a_global_batch_size_gives_batch_and_accumulation(size: int, batches: list[int], steps: int, windows: int):
    module = Toy()
    trainer = quiet(max_epochs=1, global_batch_size=size)
    trainer.fit(module, loader(12, 3))
    assert [len(batch) for batch in module.seen] == batches
    assert trainer.global_step == steps


class SavesInSetup(Toy):
    def setup(self, stage: str) -> None:
        self.trainer.save_checkpoint("x")


@pytest.mark.parametrize(
    ("error", "text", "run"),
    [
        (UsageError, r"must be an instep\.TrainModule", lambda trainer: trainer.fit(nn.Linear(1, 1), loader())),
        (UsageError, "pass a model", lambda trainer: trainer.validate(dataloaders=loader())),
        (UsageError, "nothing to save yet", lambda trainer: trainer.save_checkpoint("x")),
        (UsageError, "save from on_fit_start on", lambda trainer: trainer.fit(SavesInSetup(), loader())),
        (HookError, "fit needs training data: pass loaders", lambda trainer: trainer.fit(Toy())),
        (UsageError, r"the class Toy.*write Toy\(\)", lambda trainer: trainer.fit(Toy, loader())),
        (
            UsageError,
            r"datamodule is the class.*DataModule\(",
            lambda trainer: trainer.fit(Toy(), datamodule=DataModule),
        ),
        (UsageError, "the data is the class", lambda trainer: trainer.validate(Toy(), DataModule)),
        (UsageError, "datamodule must be an instep", lambda trainer: trainer.fit(Toy(), datamodule=loader())),
        (DataError, "gives no batch", lambda trainer: trainer.fit(Toy(), loader(2, 3, drop_last=True))),
        (DataError, "must be iterable", lambda trainer: trainer.fit(Toy(), 3)),
        (UsageError, "the data is the class DataLoader", lambda trainer: trainer.fit(Toy(), DataLoader)),
        (DataError, "must be iterable", lambda trainer: trainer.fit(Toy(), samples())),
        (DataError, "must be iterable", lambda trainer: trainer.fit(Toy(), loader(), [loader(), None])),
        (UsageError, "both loaders and a datamodule", lambda trainer: trainer.fit(Toy(), loader(), datamodule=Data())),
        (UsageError, "both loaders and a datamodule", lambda trainer: trainer.fit(Toy(), None, loader(), Data())),
        (UsageError, "both loaders and a datamodule", lambda trainer: trainer.fit(Toy(), Data(), loader())),
        (UsageError, "two datamodules", lambda trainer: trainer.fit(Toy(), Data(), datamodule=Data())),
        (
            SettingError,
            "is for evaluation",
            lambda trainer: trainer.fit(Toy(), CombinedLoader([loader(), loader()], "sequential")),
        ),
        (
            SettingError,
            "needs one training DataLoader",
            lambda trainer: quiet(max_epochs=1, global_batch_size=6).fit(Toy(), [loader(), loader()]),
        ),
    ],
)
def test_what_a_run_is_not_given_or_cannot_use(error: Any, text: str, run: Any) -> None:
    with pytest.raises(error, match=text):
        run(quiet(max_epochs=1))
