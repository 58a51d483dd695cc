"""Checkpoints of earlier versions load bit for bit: weights, optimizers, data and random numbers.

`python -m tests.checkpoint.test_old_checkpoints FOLDER` makes such checkpoints with the version at hand.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instep import Accelerator, Trainer, TrainModule
from instep.callbacks import Callback
from instep.checkpoint import Reader, is_checkpoint, load_weights
from tests.helpers.spawn import run_ranks

OLD = Path(__file__).parent.parent / "data" / "old_checkpoints"
SAVED_AT = 2  # steps, of five in an epoch


class Net(TrainModule):
    """Has a buffer, a tied weight and a state that is no tensor."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first = nn.Linear(2, width)
        self.again = self.first
        self.last = nn.Linear(width, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 3}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1
        loss = self.last(torch.tanh(self.first(batch[0]))).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Counter(Callback):
    """Counts batches; saves after the step and then keeps what the next step begins with."""

    def __init__(self, save_to: Path | None) -> None:
        self.save_to = save_to
        self.batches = 0
        self.seen: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == SAVED_AT:
            optimizer = trainer.optimizers[0]
            self.seen = {
                "weights": plain(module.state_dict()),
                "optimizer": [plain(entry) for entry in optimizer.state_dict()["state"].values()],
                "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict()["last_epoch"],
                "batch_idx": batch_idx,
                "samples": batch[0][:, 0].tolist(),
                "callback": self.batches,
                **draws(),
            }

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        if self.save_to is not None and trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.save_to)


class Average:
    """A registered object."""

    def __init__(self) -> None:
        self.values = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "name": "average"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = state["values"]


def plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors as numbers, which JSON keeps exactly; of a sharded one all of it."""
    whole = {name: it.full_tensor() if hasattr(it, "full_tensor") else it for name, it in state.items()}
    return {name: it.tolist() if isinstance(it, Tensor) else it for name, it in whole.items()}


def draws() -> dict[str, Any]:
    return {"torch": torch.rand(3).tolist(), "numpy": float(np.random.rand()), "python": random.random()}


def data() -> DataLoader[Any]:
    x = torch.arange(40.0).reshape(20, 2) / 40
    return DataLoader(TensorDataset(x), batch_size=4 // torch_world_size(), shuffle=True)


def torch_world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def train(strategy: str, root: str, save_to: Path | None, ckpt_path: Path | None) -> dict[str, Any]:
    """Train to the step after the checkpoint; what that step began with."""
    counter = Counter(save_to)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=SAVED_AT + 1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=root,
        callbacks=[counter],
    )
    torch.manual_seed(7)
    net = Net()
    torch.manual_seed(11 if ckpt_path is None else 12)
    trainer.fit(net, data(), ckpt_path=ckpt_path)
    return counter.seen


def train_by_hand(save_to: Path | None, resume: Path | None) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(7)
    bare, average = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), Average()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    accelerator.register_for_checkpointing(average=average)
    torch.manual_seed(11 if resume is None else 12)
    model, stepped, loader, scheduled = accelerator.prepare(bare, optimizer, data(), schedule)
    if resume is not None:
        accelerator.load_state(resume)
    seen: dict[str, Any] = {}
    for (x,) in loader:
        if accelerator.step == SAVED_AT:
            seen = {
                "weights": plain(bare.state_dict()),
                "optimizer": [plain(entry) for entry in optimizer.state_dict()["state"].values()],
                "schedule": schedule.state_dict()["last_epoch"],
                "samples": x[:, 0].tolist(),
                "object": average.values.tolist(),
                **draws(),
            }
            break
        accelerator.backward(model(x).square().mean())
        stepped.step()
        scheduled.step()
        stepped.zero_grad()
        average.values = average.values + x.mean(0)
        if save_to is not None and accelerator.step == SAVED_AT:
            accelerator.save_state(save_to)
    accelerator.end_training()
    return seen


def expected(name: str) -> Any:
    return json.loads((OLD / name / "expected.json").read_text())


def make(folder: Path, root: str) -> None:
    made = {
        "trainer": train("auto", root, folder / "trainer" / "state", None),
        "fsdp": run_ranks(train, 2, "fsdp", root, folder / "fsdp" / "state", None),
        "accelerator": train_by_hand(folder / "accelerator" / "state", None),
    }
    for name, seen in made.items():
        (folder / name / "expected.json").write_text(json.dumps(seen) + "\n")


def test_a_run_of_one_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    assert train("auto", str(tmp_path), None, OLD / "trainer" / "state-1") == expected("trainer")


def test_an_accelerator_goes_on_bit_for_bit() -> None:
    assert train_by_hand(None, OLD / "accelerator" / "state-1") == expected("accelerator")


@pytest.mark.dist
def test_shards_of_two_ranks_go_on_bit_for_bit(tmp_path: Path) -> None:
    assert run_ranks(train, 2, "fsdp", str(tmp_path), None, OLD / "fsdp" / "state-1") == expected("fsdp")


def test_shards_of_two_ranks_are_read_whole_by_one_process(tmp_path: Path) -> None:
    wanted = expected("fsdp")[0]
    tensors = {name: it for name, it in wanted["weights"].items() if "extra" not in name}
    assert plain(load_weights(OLD / "fsdp" / "state-1")) == tensors
    (optimizer,) = Reader(OLD / "fsdp" / "state-1").state("optimizer")
    assert [plain(entry) for entry in optimizer["state"].values()] == wanted["optimizer"]
    seen = train("auto", str(tmp_path), None, OLD / "fsdp" / "state-1")
    assert seen["weights"] == wanted["weights"]
    assert seen["optimizer"] == wanted["optimizer"]
    both = [sample for of_rank in expected("fsdp") for sample in of_rank["samples"]]
    assert sorted(seen["samples"]) == sorted(both)


@pytest.mark.parametrize("name", ["trainer", "fsdp", "accelerator"])
def test_checkpoints_of_older_versions_verify_and_damage_is_found(name: str, tmp_path: Path) -> None:
    shutil.copytree(OLD / name / "state-1", tmp_path / name)
    assert is_checkpoint(tmp_path / name)
    with (tmp_path / name / "rank-00000.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    reader = Reader(tmp_path / name)
    with pytest.raises(Exception, match="differs from what was written"):
        reader.state("rank-00000")


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2])
