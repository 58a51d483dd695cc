"""What a checkpoint holds beside tensors, and how it finds its owner again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import Trainer, TrainModule
from instep.callbacks import ModelCheckpoint, Timer
from instep.checkpoint import CheckpointStore
from instep.errors import UnsavableStateError
from instep.loggers import Logger
from tests.trainer.toys import BareToy, FailingToy, Toy, loader, quiet


def fit(root: Path, *, module: TrainModule | None = None, ckpt_path: Any = None, **settings: Any) -> Trainer:
    given = {"max_epochs": 1, "enable_checkpointing": True, "default_root_dir": root, **settings}
    trainer = quiet(**given)
    trainer.fit(module or Toy(), loader(), ckpt_path=ckpt_path)
    return trainer


def test_an_optimizer_that_cannot_be_saved_is_found_before_the_first_step(tmp_path: Path):
    class Stubborn(Toy):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([{"params": self.parameters(), "owner": object()}], lr=0.1)

    module = Stubborn()
    with pytest.raises(UnsavableStateError, match=r"not started.*optimizers.*owner"):
        fit(tmp_path, module=module)
    assert module.seen == []


# ---- states and their owners


class One(Logger):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.got = state_dict["label"]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "label": self.name}


class Other(One):
    pass


def test_loggers_find_their_state_by_class_and_number(tmp_path: Path):
    fit(tmp_path, logger=[One(name="a"), One(name="b"), Other(name="c")])
    loggers = [Logger(), Other(), One(), One()]
    fit(tmp_path, logger=loggers, max_epochs=2, ckpt_path="last")
    assert [logger.got for logger in loggers if isinstance(logger, One)] == ["c", "a", "b"]


def test_the_state_of_a_callback_that_is_gone_is_left_out_with_a_warning(tmp_path: Path):
    fit(tmp_path, callbacks=[Timer()])
    with pytest.warns(UserWarning, match=r"callbacks that this run does not have.*Timer"):
        fit(tmp_path, max_epochs=2, ckpt_path="last")


# ---- hyperparameters


class FromConfig(BareToy):
    def __init__(self, config: Any, factor: float = 1.0) -> None:
        super().__init__()
        self.rate = config.rate if isinstance(config, argparse.Namespace) else config["rate"]
        self.factor = factor
        self.save_hyperparameters(config)


class FromAll(BareToy):
    def __init__(self, config: Any, **others: Any) -> None:
        super().__init__()
        self.rate, self.others = config.rate, others
        self.save_hyperparameters(config)


@pytest.mark.parametrize("config", [{"rate": 0.5}, argparse.Namespace(rate=0.5)])
def test_hyperparameters_that_came_as_one_argument_are_given_back_as_one(config: Any, tmp_path: Path):
    trainer = fit(tmp_path, module=FromConfig(config))
    path = trainer.save_checkpoint(tmp_path / "mine")
    loaded = FromConfig.load_from_checkpoint(path, factor=2.0)
    assert (loaded.rate, loaded.factor, dict(loaded.hparams)) == (0.5, 2.0, {"rate": 0.5})


def test_load_from_checkpoint_passes_a_namespace_beside_keyword_arguments(tmp_path: Path):
    trainer = fit(tmp_path, module=FromAll(argparse.Namespace(rate=0.5)))
    loaded = FromAll.load_from_checkpoint(trainer.save_checkpoint(tmp_path / "mine"))
    assert (loaded.rate, loaded.others) == (0.5, {})


# ---- folders of checkpoints


def test_what_cannot_be_swept_stays_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    left = tmp_path / "kept" / ".deleting-step-00000004-1"
    left.mkdir(parents=True)

    def refuse(self: Any, path: Path) -> None:
        raise PermissionError(13, "not yours")

    monkeypatch.setattr("instep.checkpoint.files.LocalFiles.remove_tree", refuse)
    with pytest.warns(UserWarning, match=r"stays there.*not yours"):
        fit(tmp_path, callbacks=[ModelCheckpoint(tmp_path / "kept")])
    assert [info.step for info in CheckpointStore(tmp_path / "kept").scan()] == [4]


class Fails(FailingToy):
    fails_at = 6


def test_what_an_exception_left_is_saved_beside_the_others_and_not_resumed_by_auto(tmp_path: Path):
    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "kept", save_on_exception=True)

    with pytest.raises(ValueError, match="no more"):
        fit(tmp_path, module=Fails(), callbacks=[saver()], max_epochs=2)
    found = CheckpointStore(tmp_path / "kept").scan()
    assert [(info.step, info.kind) for info in found] == [(6, "exception"), (4, "full")]
    module = Toy()
    fit(tmp_path, module=module, callbacks=[saver()], max_epochs=2, ckpt_path="auto")
    assert len(module.seen) == 4, "from step 4 on"
    module = Toy()
    fit(tmp_path, module=module, callbacks=[saver()], max_epochs=2, ckpt_path=found[0].path)
    assert len(module.seen) == 2, "from step 6 on, by its path"


class AveragedRates:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Keeps(Toy):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        by_hand = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        kept = {
            "StepLR": by_hand,
            "Adam": torch.optim.Adam(self.parameters()),
            "GradScaler": torch.amp.GradScaler("cpu"),
            "AveragedRates": AveragedRates(),
            "callback": Timer(),
        }
        self.layer.kept = {"deeper": kept[self.kind]} if self.kind in kept else None
        if self.kind == "returned":
            self.optimizer, self.schedulers = optimizer, [by_hand]
            return [optimizer], [by_hand]
        return optimizer

    def _saves_by_itself(self, checkpoint: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("kind", ["StepLR", "Adam", "GradScaler", "AveragedRates"])
def test_a_state_that_hangs_on_the_module_and_is_in_no_checkpoint_is_warned_of(kind: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"no checkpoint holds the {kind} in Keeps.layer.kept"):
        fit(tmp_path, module=Keeps(kind))


@pytest.mark.parametrize("kind", ["returned", "callback", "nothing"])
def test_what_is_saved_is_not_warned_of(kind: str, tmp_path: Path) -> None:
    fit(tmp_path, module=Keeps(kind))


def test_a_module_that_saves_by_itself_is_not_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keeps, "on_save_checkpoint", Keeps._saves_by_itself)
    fit(tmp_path, module=Keeps("StepLR"))
