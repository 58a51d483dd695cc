"""A module that is passed as `torch.compile(module)`: it runs compiled, and saves as if it were not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from torch import nn

from instep.callbacks import ModelCheckpoint
from instep.errors import UsageError
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import LoggingToy, assert_same, loader, quiet, weights


class Eager:
    """A compiler that counts the graphs it gets, and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


class Net(LoggingToy):
    """Does nothing that breaks a graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    dynamo.reset()
    yield
    dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # torch's own, of its compiler
def test_a_compiled_module_trains_alike_and_is_saved_under_clean_names(tmp_path: Path):
    plain, module, backend = Net(), Net(), Eager()
    module.load_state_dict(plain.state_dict())
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    settings: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0}

    quiet(**settings).fit(plain, loader(), loader(6))
    trainer = quiet(
        **settings, enable_checkpointing=True, default_root_dir=tmp_path, callbacks=[ModelCheckpoint(tmp_path / "c")]
    )
    trainer.fit(compiled, loader(), loader(6))
    assert trainer.model is module
    assert_same(weights(module), weights(plain))
    assert backend.graphs == 2  # training_step and validation_step; in inference mode another one
    for fn, graphs in (("validate", 3), ("test", 4), ("predict", 5)):
        getattr(trainer, fn)(compiled, loader(6))
        assert backend.graphs == graphs, fn

    saver = trainer.checkpoint_callback
    assert saver is not None
    assert_same(weights(Net.load_from_checkpoint(saver.best_model_path)), weights(plain))
    again, resumed = Net(), quiet(max_epochs=3, num_sanity_val_steps=0)
    resumed.fit(torch.compile(again, backend=Eager()), loader(), loader(6), ckpt_path=saver.best_model_path)
    quiet(max_epochs=3).fit(plain.train(), loader(), loader(6), ckpt_path=saver.best_model_path)
    assert resumed.global_step == 12
    assert_same(weights(again), weights(plain))


def test_a_compiled_model_of_another_class_is_refused():
    with pytest.raises(UsageError, match=r"model must be an instep\.TrainModule, got a compiled Linear"):
        quiet().fit(torch.compile(nn.Linear(2, 1)), loader())  # pyright: ignore[reportArgumentType]


def _fit(folder: str, strategy: str) -> int:
    torch.manual_seed(1)
    backend = Eager()
    trainer = quiet(max_epochs=1, devices=2, num_sanity_val_steps=0, strategy=strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(torch.compile(Net(), backend=backend), loader(), loader(6))
    trainer.save_checkpoint(f"{folder}/saved")
    return backend.graphs


@pytest.mark.dist
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_compiled_module_trains_on_two_ranks_as_alone(tmp_path: Path, strategy: str):
    assert min(run_ranks(_fit, 2, str(tmp_path), strategy)) >= 2
    (saved,) = tmp_path.glob("saved-*")
    torch.manual_seed(1)
    alone = Net()
    quiet(max_epochs=1).fit(alone, loader(12, 6))
    torch.testing.assert_close(weights(Net.load_from_checkpoint(saved)), weights(alone))
