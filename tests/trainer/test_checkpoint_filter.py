"""Checkpoints that hold what is trained alone, and tell whether the rest is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from instep import TrainModule
from instep.callbacks import ModelCheckpoint
from instep.checkpoint import load_weights
from instep.checkpoint.tensors import Shard, content_sum
from instep.errors import CheckpointError, Preempted, SettingError
from tests.helpers.spawn import run_ranks
from tests.trainer.resuming import StopAt
from tests.trainer.toys import assert_same, loader, quiet, weights


class Adapted(TrainModule):
    """A frozen base with a buffer and an unused tied name, and an adapter."""

    checkpoint_filter: Any = "trainable"

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).requires_grad_(False)
        torch.manual_seed(1)
        self.adapter = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.head(self.base(x) + self.adapter(x)).squeeze(-1), y)

    validation_step = test_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def fit(root: Path, *others: Any, module: TrainModule | None = None, **settings: Any) -> tuple[Any, Any, Path]:
    module = Adapted() if module is None else module
    saver = ModelCheckpoint(save_last=True)
    trainer = quiet(
        **{"max_epochs": 3, "default_root_dir": root, "trigger_every": 1, "enable_checkpointing": True, **settings},
        callbacks=[saver, *others],
    )
    try:
        trainer.fit(module, loader(24, 4), ckpt_path="auto")
    except Preempted:
        assert others
    return module, trainer, Path(saver.last_model_path)


HELD = {"adapter.weight", "head.weight", "head.bias"} | {
    f"base.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
}


def test_only_what_is_trained_is_held_and_a_run_goes_on_from_it(tmp_path: Path) -> None:
    whole, _, path = fit(tmp_path / "whole")
    assert set(load_weights(path)) == HELD
    for stop in (3, 8):
        fit(tmp_path / "stopped", StopAt(stop))
    again, trainer, _ = fit(tmp_path / "stopped")
    assert_same(dict(again.state_dict()), dict(whole.state_dict()))
    loaded = Adapted.load_from_checkpoint(path)
    assert_same(dict(loaded.state_dict()), dict(whole.state_dict()))
    loss = trainer.test(Adapted(), loader(), ckpt_path=path, verbose=False)
    assert loss == [{}]
    by_name = Adapted()
    by_name.checkpoint_filter = lambda name: name.startswith("head")
    assert set(load_weights(fit(tmp_path / "names", module=by_name)[2])) == {"head.weight", "head.bias"}
    by_name.checkpoint_filter = ["head"]
    with pytest.raises(SettingError, match=r"checkpoint_filter=\['head'\]: expected None"):
        fit(tmp_path / "wrong", module=by_name)


def test_another_base_is_found(tmp_path: Path) -> None:
    path = fit(tmp_path, StopAt(3))[2]
    with pytest.raises(CheckpointError, match=r"4 of them are not those of that run: base\.0\.weight, .*same base"):
        fit(tmp_path, module=Adapted(seed=2))
    with pytest.raises(CheckpointError, match="not those of that run"):
        Adapted.load_from_checkpoint(path, seed=2)
    with pytest.warns(UserWarning, match="not those of that run"):
        loaded = Adapted.load_from_checkpoint(path, seed=2, strict=False)
    assert torch.equal(loaded.adapter.weight, Adapted.load_from_checkpoint(path).adapter.weight)
    assert Adapted(seed=2).bfloat16().load_from_checkpoint(path)

    class Larger(Adapted):
        def __init__(self, seed: int = 1) -> None:
            super().__init__(seed)
            self.more = nn.Linear(1, 1)

    with pytest.raises(CheckpointError, match=r"do not fit Larger: missing: more\.weight"):
        Larger.load_from_checkpoint(path)


def test_what_is_unfrozen_is_held_from_then_on(tmp_path: Path) -> None:
    class Thawed(Adapted):
        def on_train_epoch_start(self) -> None:
            self.base[0].requires_grad_(self.current_epoch == 1)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    whole, _, path = fit(tmp_path / "whole", module=Thawed())
    held = {"base.0.weight", "base.0.bias"}
    assert set(load_weights(path)) == HELD | held  # frozen again, and changed
    fit(tmp_path / "stopped", StopAt(7), module=Thawed())
    fit(tmp_path / "stopped", StopAt(14), module=Thawed())
    again, _, path = fit(tmp_path / "stopped", module=Thawed())
    assert set(load_weights(path)) == HELD | held
    assert_same(weights(again), weights(whole))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_the_sum_of_parts_is_that_of_the_whole(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(6, 5, 4).to(dtype) if dtype is not torch.int64 else torch.randint(-(2**60), 2**60, (6, 5, 4))
    expected = content_sum(whole)
    monkeypatch.setattr("instep.checkpoint.tensors._SUMMED_ELEMENTS", 50)
    assert content_sum(whole) == expected
    boxes = [whole[:2], whole[2:, :3], whole[2:, 3:]]
    places = [(0, 0, 0), (2, 0, 0), (2, 3, 0)]
    parts = [Shard(box, (6, 5, 4), place) for box, place in zip(boxes, places, strict=True)]
    assert sum(map(content_sum, parts)) % 2**64 == expected
    flat = whole.flatten()
    runs = [Shard(flat[a:b], (6, 5, 4), (a,), flat=True) for a, b in ((0, 7), (7, 7), (7, 120))]
    assert sum(map(content_sum, runs)) % 2**64 == expected
    other = whole.clone().flatten()
    other[3], other[17] = whole.flatten()[17], whole.flatten()[3]
    assert content_sum(other.view_as(whole)) != expected or torch.equal(other.view_as(whole), whole)


def filter_on_ranks(root: Path) -> list[set[str]]:
    names = []
    for strategy, stop in (("ddp", 2), ("fsdp", 4), ("ddp", 100)):
        module, _, path = fit(root, StopAt(stop), strategy=strategy, devices="auto")
        names.append(set(load_weights(path)))
    with pytest.raises(CheckpointError, match="not those of that run"):
        fit(root, module=Adapted(seed=2), strategy="fsdp", devices="auto", max_epochs=4)
    return names


@pytest.mark.dist
def test_digests_do_not_depend_on_the_strategy(tmp_path: Path) -> None:
    assert run_ranks(filter_on_ranks, 2, tmp_path)[0] == [HELD] * 3


def test_what_is_left_out_although_it_is_trained_is_not_resumed_from(tmp_path: Path) -> None:
    module = Adapted()
    module.checkpoint_filter = lambda name: not name.startswith("head")
    fit(tmp_path, StopAt(3), module=module)
    with pytest.raises(CheckpointError, match=r"2 of them are not those of that run: head\.weight, head\.bias"):
        fit(tmp_path)
