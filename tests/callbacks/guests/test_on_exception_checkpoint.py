"""A run that an exception ends, and the same command started again."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import Callback, DataModule, Trainer
from instep.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from instep.checkpoint import CheckpointStore
from instep.errors import SettingError
from instep.trainer import run_state
from tests.helpers.spawn import RanksFailed, run_ranks
from tests.trainer.toys import Toy, assert_same, loader, quiet, weights


class Fails(Toy):
    """Fails in the step, the optimizer or a hook, at step 6."""

    where = ""

    def _fail(self, where: str) -> None:
        if where == self.where and self.global_step == 6:
            raise ValueError("no more")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self._fail("step")
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._fail("hook")

    def configure_optimizers(self) -> Any:
        module = self

        class Breaks(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                module._fail("optimizer")
                return super().step(closure)

        return Breaks(self.parameters(), lr=0.01, momentum=0.5)


def fit(folder: Path, where: str = "", regular: bool = True, **options: Any) -> tuple[Trainer, Fails]:
    savers = [OnExceptionCheckpoint(folder / "kept"), *([ModelCheckpoint(folder / "kept")] if regular else [])]
    trainer = quiet(max_epochs=2, callbacks=savers, enable_checkpointing=regular, default_root_dir=folder)
    torch.manual_seed(0)
    module = Fails()
    module.where = where
    trainer.fit(module, loader(), ckpt_path="auto", **options)
    return trainer, module


def kept(folder: Path) -> list[tuple[str, int, str]]:
    return [(info.path.name, info.step, info.kind) for info in CheckpointStore(folder / "kept").scan()]


@pytest.mark.parametrize("where", ["step", "hook", "optimizer"])
def test_the_same_command_goes_on_from_it_bit_for_bit(where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    undisturbed, whole = fit(tmp_path / "undisturbed")
    with pytest.raises(ValueError, match="no more"):
        fit(tmp_path, where)
    kind = "exception" if where == "optimizer" else "full"
    assert kept(tmp_path) == [("on_exception-1", 6, kind), ("step-00000004-1", 4, "full")]
    assert "on_exception-1 of the run that failed. To go on" in capsys.readouterr().out
    trainer, module = fit(tmp_path)
    assert len(module.seen) == (4 if where == "optimizer" else 2), "from the last state that is whole"
    assert_same(weights(module), weights(whole))
    assert trainer.run_id != undisturbed.run_id
    # The run has ended, and a newer checkpoint has verified: what the exception left is gone.
    assert kept(tmp_path) == [("step-00000008-1", 8, "full")]


def test_a_run_without_model_checkpoint_starts_afresh_after_an_exception_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(ValueError, match="no more"):
        fit(tmp_path, "hook", regular=False)
    assert "starting afresh" in capsys.readouterr().out
    trainer, module = fit(tmp_path, regular=False)
    assert "starting afresh" not in capsys.readouterr().out
    assert (len(module.seen), trainer.global_step) == (2, 8)
    assert kept(tmp_path) == [("on_exception-1", 6, "full")], "nothing is newer, so it stays"
    again = quiet(max_epochs=2, callbacks=OnExceptionCheckpoint(tmp_path / "kept"), default_root_dir=tmp_path)
    again.fit(Fails(), loader())
    assert again.global_step == 8, "ckpt_path=None begins anew"
    with pytest.raises(SettingError, match="filename cannot be empty"):
        OnExceptionCheckpoint(tmp_path, "")


@pytest.mark.parametrize("fn", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("error", [ValueError("first"), KeyboardInterrupt(), SystemExit(3)])
def test_each_on_exception_is_called_in_order_and_none_hides_the_first(
    fn: str, error: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    told: list[Any] = []

    class Data(DataModule):
        def on_exception(self, exception: BaseException) -> None:
            told.append(("data", exception))
            raise RuntimeError("of the datamodule's hook")

        def loaders(self) -> Any:
            return loader()

        train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loaders

    class Tells(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            told.append((self.name, exception))
            raise RuntimeError(f"of {self.name}'s hook")

        def teardown(self, trainer: Any, module: Any, stage: str) -> None:
            told.append((f"{self.name}'s teardown", None))

    def fail(*_: Any) -> None:
        raise error

    hook = "on_train_batch_end" if fn == "fit" else f"on_{ {'validate': 'validation'}.get(fn, fn) }_batch_end"
    last = OnExceptionCheckpoint(tmp_path)
    callbacks = [last, Tells("first"), LambdaCallback(**{hook: fail}), Tells("second")]
    trainer = quiet(max_epochs=1, callbacks=callbacks)
    with pytest.raises(type(error)) as raised:
        getattr(trainer, fn)(Toy(), datamodule=Data())
    assert raised.value is error
    assert told[:3] == [("first", error), ("second", error), ("data", error)]
    assert [name for name, _ in told[3:]] == ["first's teardown", "second's teardown"]
    assert trainer.callbacks[-1] is last
    assert (last.saved_path != "") == (fn == "fit")
    printed = capsys.readouterr().err
    assert all(f"of {whose} hook" in printed for whose in ("first's", "second's", "the datamodule's"))


class FailsOnRank1(Fails):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and self.global_step == 6 and self.where == "rank 1":
            raise ValueError("no more")
        return super().training_step(batch, batch_idx)


def on_two_ranks(folder: Path, where: str, strategy: str) -> list[int]:
    warnings.simplefilter("ignore")
    run_state.ARRIVE_S = 0.5  # the others do not come
    module = FailsOnRank1()
    module.where = where
    trainer = quiet(
        max_epochs=2,
        callbacks=[OnExceptionCheckpoint(folder / "kept"), ModelCheckpoint(folder / "kept")],
        enable_checkpointing=True,
        strategy=strategy,
        devices=2,
        default_root_dir=folder,
    )
    trainer.fit(module, loader(24), ckpt_path="auto")
    return [len(module.seen), trainer.global_step]


def on_two_ranks_again(folder: Path) -> list[list[int]]:
    return [on_two_ranks(folder / strategy, "", strategy) for strategy in ("ddp", "fsdp")]


@pytest.mark.dist
def test_an_error_on_one_rank_saves_under_ddp_and_not_under_fsdp(tmp_path: Path):
    """Under ddp the rank that failed saves what it holds; a strategy that divides the state has its regular ones."""
    regular = ("step-00000004-1", 4, "full")
    for strategy, left in (("ddp", [("on_exception-1", 6, "full"), regular]), ("fsdp", [regular])):
        with pytest.raises(RanksFailed, match="no more"):
            run_ranks(on_two_ranks, 2, tmp_path / strategy, "rank 1", strategy)
        assert kept(tmp_path / strategy) == left
    results = run_ranks(on_two_ranks_again, 2, tmp_path)
    assert [[steps for _, steps in ways] for ways in results] == [[8, 8], [8, 8]]
    assert [len(kept(tmp_path / strategy)) for strategy in ("ddp", "fsdp")] == [1, 1]
