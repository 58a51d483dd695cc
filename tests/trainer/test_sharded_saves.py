"""Runs whose ranks write and read their own parts, and runs whose ranks share their data."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instep import Trainer, TrainModule
from instep.callbacks import Callback, ModelCheckpoint
from instep.checkpoint import CheckpointStore, Reader, load_weights
from instep.checkpoint.lazy import LazyTensor
from instep.state import PartialState
from instep.strategies import Strategy
from tests.helpers.sharding import Parts, SameData
from tests.helpers.spawn import RanksFailed, run_ranks

pytestmark = pytest.mark.dist

STEPS = 6


class Net(TrainModule):
    """Logs, has a buffer, a tied weight, and something in its state that is no tensor."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.last = nn.Linear(6, 4)
        self.last.weight = nn.Parameter(torch.randn(4, 6))
        self.again = self.last
        self.dropout = nn.Dropout(dropout)
        self.masks: list[Tensor] = []

    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 3}

    def forward(self, x: Tensor) -> Tensor:
        kept = self.dropout(torch.ones(6))
        self.masks.append(kept)
        return self.last(torch.tanh(self.first(x)) * kept)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.steps += 1
        self.log("samples", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum")
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_samples", float(len(batch[0])), reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def data(batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=batch_size, shuffle=True)


def net(dropout: float = 0.0) -> Net:
    torch.manual_seed(5)
    return Net(dropout)


def fit(
    strategy: Any,
    folder: Path,
    path: Any = None,
    steps: int = STEPS,
    model: Net | None = None,
    background: bool = False,
    **options: Any,
) -> tuple[Net, Trainer]:
    model = model or net()
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_top_k=-1, background=background)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        callbacks=[saver],
        **options,
    )
    trainer.fit(model, data(2 if PartialState().num_processes == 2 else 4), ckpt_path=path)
    return model, trainer


def state_of(model: nn.Module, trainer: Trainer) -> dict[str, Tensor]:
    state = {f"model.{name}": it for name, it in model.state_dict().items() if isinstance(it, Tensor)}
    for index, entry in trainer.optimizers[0].state_dict()["state"].items():
        state |= {f"optimizer.{index}.{name}": it for name, it in entry.items()}
    return {name: it.clone() for name, it in state.items()}


def unequal(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 0.0) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.allclose(a[name], b[name], rtol=0, atol=tolerance, equal_nan=True)]


def at(folder: Path, step: int) -> Path:
    return next(info.path for info in CheckpointStore(folder).scan() if info.step == step)


def two_ranks(root: str) -> dict[str, Tensor]:
    warnings.simplefilter("error")
    top = Path(root)
    rank = PartialState(cpu=True).process_index
    whole = state_of(*fit(Parts(), top / "parts"))
    saved = at(top / "parts", 2)
    names = sorted(it for it in Reader(saved).manifest.files if it[:3] in ("mod", "opt"))
    assert names == sorted(
        f"{base}-0000{i}-of-00002.{ending}"
        for i in (0, 1)
        for base, ending in (
            ("model", "safetensors"), ("model_extra", "json"), ("optimizer", "json"), ("optimizer", "safetensors"),
        )
    )  # fmt: skip
    assert unequal(state_of(*fit(Parts(), top / "again", saved)), whole) == []
    assert unequal(state_of(*fit(Parts(flat=True), top / "flat", saved)), whole) == []
    assert unequal(state_of(*fit(Parts(), top / "of flat", at(top / "flat", 4))), whole) == []
    assert unequal(state_of(*fit("ddp", top / "ddp", saved)), whole, 1e-6) == []
    assert unequal(state_of(*fit(Parts(), top / "of ddp", at(top / "ddp", 4))), whole, 1e-6) == []
    one = {name: it for name, it in Reader(at(top / "parts", 4)).manifest.files.items() if name.startswith("model")}
    fit(Parts(), top / "beside", background=True)
    two = {name: it for name, it in Reader(at(top / "beside", 4)).manifest.files.items() if name.startswith("model")}
    assert one == two
    damaged(top, rank)
    return whole


def damaged(top: Path, rank: int) -> None:
    """A flipped bit in one rank's part: the checkpoint before is taken, on both ranks."""
    newest = at(top / "again", 6) / "optimizer-00001-of-00002.safetensors"
    PartialState().wait_for_everyone()
    if rank == 1:
        content = bytearray(newest.read_bytes())
        content[-1] ^= 1
        newest.write_bytes(content)
    PartialState().wait_for_everyone()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, trainer = fit(Parts(), top / "again", "last", steps=5)
    assert trainer.global_step == 5
    assert any("optimizer-00001-of-00002.safetensors differs" in str(it.message) for it in said) == (rank == 0)


def test_parts_are_taken_up_by_any_strategy_and_world_size(tmp_path: Path) -> None:
    whole, _ = run_ranks(two_ranks, 2, str(tmp_path))
    saved = at(tmp_path / "parts", 2)
    assert unequal(state_of(*fit("auto", tmp_path / "alone", saved)), whole, 1e-6) == []
    assert unequal(state_of(*fit(Parts(), tmp_path / "alone in parts", saved)), whole, 1e-6) == []
    model = Net.load_from_checkpoint(at(tmp_path / "parts", 6))
    assert all(torch.equal(it, whole[f"model.{name}"]) for name, it in load_weights(at(tmp_path / "parts", 6)).items())
    assert all(torch.equal(it, whole[f"model.{name}"]) for name, it in model.state_dict().items() if name[0] != "_")


def ranks_of_one_part(root: str) -> list[Any]:
    top = Path(root)
    model = net(0.5)
    loaders = data(4)
    trainer = Trainer(
        accelerator="cpu", strategy=SameData(counting=1), max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model, loaders, loaders)
    sums = {name: trainer.callback_metrics[name].item() for name in ("samples", "val_samples")}
    # taken up from ranks with data of their own, whose random generators differ
    fit("ddp", top / "ddp", model=net(0.5), steps=2)
    other, _ = fit(SameData(counting=1), top / "same", at(top / "ddp", 2), model=net(0.5), steps=4)
    again, _ = fit(SameData(counting=1), top / "same2", at(top / "same", 4), model=net(0.5), steps=6)
    return [sums, torch.stack(model.masks), torch.stack(other.masks), torch.stack(again.masks)]


def test_ranks_that_share_their_data_count_once_and_draw_alike(tmp_path: Path) -> None:
    one, two = run_ranks(ranks_of_one_part, 2, str(tmp_path))
    assert one[0] == two[0] == {"samples": 16.0, "val_samples": 16.0}
    for mine, theirs in zip(one[1:], two[1:], strict=True):
        assert torch.equal(mine, theirs)
        assert mine.unique().numel() > 1


def test_a_lazy_view_for_hooks(tmp_path: Path) -> None:
    """With a sharded strategy a hook finds what reads a tensor where it would find the tensor."""
    seen: list[Any] = []

    class Looks(Net):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            seen.append(checkpoint["state_dict"]["first.weight"])

    model, _ = fit(Parts(), tmp_path / "a", steps=2)
    fit(Parts(), tmp_path / "b", at(tmp_path / "a", 2), steps=3, model=Looks())
    fit(Strategy(), tmp_path / "c", at(tmp_path / "a", 2), steps=3, model=Looks())
    assert isinstance(seen[0], LazyTensor)
    assert torch.equal(seen[0].read(), model.first.weight)
    assert torch.equal(seen[1], model.first.weight)


class SavesAlone(Callback):
    """A mistake that `if trainer.is_global_zero:` around a save makes."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "mine")


def save_on_one_rank(root: str) -> None:
    PartialState(cpu=True, timeout=timedelta(seconds=15))
    trainer = Trainer(
        accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False, callbacks=[SavesAlone()],
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=root,
    )  # fmt: skip
    trainer.fit(net(), data(2))


@pytest.mark.slow  # it waits for a time-out
def test_a_save_on_one_rank_says_who_did_not_come(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(save_on_one_rank, 2, str(tmp_path))
    assert "trainer.save_checkpoint(), which all ranks call" in failed.value.errors[0]
    assert "rank 1" in failed.value.errors[0]
