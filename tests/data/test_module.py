from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from instep.data import DataModule
from instep.errors import SettingError


class Squares(DataModule):
    def __init__(self, length: int = 10, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        x = torch.arange(float(self.hparams.length)).unsqueeze(1)
        self.data = TensorDataset(x, x**2)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=self.hparams.batch_size)


def test_a_module_of_the_user() -> None:
    data = Squares(batch_size=5)
    assert dict(data.hparams) == {"length": 10, "batch_size": 5}
    data.setup("fit")
    assert len(data.train_dataloader()) == 2
    assert data.val_dataloader() is None
    assert data.trainer is None
    assert data.prepare_data_per_node


def test_the_hooks_of_batches_do_nothing_by_default() -> None:
    data = DataModule()
    batch = {"x": torch.ones(2)}
    assert data.on_before_batch_transfer(batch, 0) is batch
    assert data.on_after_batch_transfer(batch, 0) is batch
    moved = data.transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert moved["x"].is_meta
    assert data.state_dict() == {}
    data.load_state_dict({})
    data.prepare_data()
    data.teardown("fit")
    data.on_exception(ValueError())


def test_the_text_of_a_datamodule_has_the_sizes_of_its_data() -> None:
    data = Squares()
    assert str(data).split("\n")[:2] == ["{Train dataloader: None}", "{Validation dataloader: None}"]
    data.setup("fit")
    assert str(data).startswith("{Train dataloader: size=10}\n")
    several = DataModule.from_datasets({"a": TensorDataset(torch.arange(6)), "b": Endless()}, [Endless(), data.data])
    assert str(several).split("\n")[0] == "{Train dataloader: a. size=6 ; b. size=NA}"
    assert "{Validation dataloader: 1. size=NA ; 2. size=10}" in str(several)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_a_data_module_is_made_from_datasets() -> None:
    first, second = TensorDataset(torch.arange(6)), TensorDataset(torch.arange(4))
    data = DataModule.from_datasets({"a": first, "b": Endless()}, [first, second], test_dataset=first, batch_size=2)
    train = data.train_dataloader()
    assert isinstance(train["a"].sampler, RandomSampler)
    assert train["b"].batch_size == 2
    assert [len(loader) for loader in data.val_dataloader()] == [3, 2]
    assert not isinstance(data.val_dataloader()[0].sampler, RandomSampler)
    assert len(data.test_dataloader()) == 3
    assert data.predict_dataloader() is None
    assert type(data) is DataModule
    assert len(pickle.loads(pickle.dumps(data)).test_dataloader()) == 3
    mine = Squares.from_datasets(first, batch_size=3, length=4)
    assert isinstance(mine, Squares)
    assert (mine.hparams.length, mine.hparams.batch_size) == (4, 3)
    assert len(mine.train_dataloader()) == 2
    with pytest.raises(SettingError, match="no data set"):
        DataModule.from_datasets()
