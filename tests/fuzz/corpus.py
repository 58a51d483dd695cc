"""The whole inputs that are damaged, made by the real writers; none of them is larger than a few kilobytes."""

from __future__ import annotations

import json
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instep import Accelerator, Trainer, TrainModule
from instep.accelerator import ProjectConfiguration
from instep.callbacks import EarlyStopping, ModelCheckpoint
from instep.checkpoint import CheckpointStore, Shard, Writer
from instep.state import PartialState

WEIGHTS = {"layer.weight": torch.arange(6.0).view(2, 3), "layer.bias": torch.ones(2), "same": torch.ones(2)}


class Net(TrainModule):
    """A linear layer, with arguments of several types.

    Args:
        lr: the learning rate.
        note: anything.
        sizes: of nothing.
        inner: more of the same.
    """

    def __init__(
        self, lr: float = 0.1, note: Any = None, sizes: list[int] | None = None, inner: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(3, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"rows": [1, 2], "mean": torch.zeros(2)}


def samples() -> DataLoader[Any]:
    """Four batches in a shuffled order."""
    return DataLoader(TensorDataset(torch.arange(24.0).view(8, 3)), batch_size=2, shuffle=True)


def fit(root: Path, **how: Any) -> None:
    """Train for an epoch more than there is in the folder, in which nothing but checkpoints is written."""
    epochs = 1 if "ckpt_path" not in how else 2
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=root,
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[EarlyStopping("val_loss", patience=9), ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)],
    )
    trainer.fit(Net(note="x", sizes=[1], inner={"a": [1.5]}), samples(), samples(), **how)


def write_run(root: Path) -> None:
    """A run's folder with checkpoints of a Trainer."""
    with _quiet():
        fit(root)
    for path in sorted(root.rglob("*")):
        if path.is_file() and "checkpoints" not in path.parts:
            path.unlink()  # status and notes of the run


def write_sharded(root: Path) -> None:
    """A checkpoint whose weights and optimizer two ranks wrote parts of."""

    def write(writer: Writer) -> None:
        for rank in range(2):
            part = Shard(WEIGHTS["layer.weight"][rank : rank + 1], torch.Size((2, 3)), (rank, 0))
            writer.tensors(f"model-0000{rank}-of-00002.safetensors", {"layer.weight": part})
            state = {"state": {"layer.weight": {"exp_avg": part}}, "groups": [{"params": ["layer.weight"], "lr": 0.1}]}
            state |= {"optimizer": "SGD", "shapes": {"layer.weight": [2, 3]}}
            writer.state(f"optimizer-0000{rank}-of-00002", [state])
        writer.state(
            "trainer", {"epoch": 0, "global_step": 1, "hyper_parameters": {}, "hparams_name": None, "user": {}}
        )

    CheckpointStore(root).save(1, write, info={"kind": "full", "epoch": 0})


def accelerator(root: Path) -> Accelerator:
    """One with a prepared model, optimizer, scheduler and loader, and a registered object."""
    made = Accelerator(cpu=True, project_config=ProjectConfiguration(str(root), automatic_checkpoint_naming=True))
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader, _ = made.prepare(
        model, optimizer, samples(), torch.optim.lr_scheduler.StepLR(optimizer, 1)
    )
    for (x,) in loader:
        made.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return made


def write_state(root: Path) -> None:
    """What `save_state` writes."""
    with _quiet():
        made = accelerator(root)
        made.save_state()
        made.end_training()
    PartialState._reset_state()


def write_torch(folder: Path) -> None:
    """Files of torch.save, of every form that is read."""
    for name, state in (
        ("plain.pt", WEIGHTS),
        ("nested.bin", {"state_dict": WEIGHTS, "epoch": 3}),
        ("model.pth", OrderedDict(model=WEIGHTS)),
    ):
        torch.save(state, folder / name)
    torch.save(WEIGHTS, folder / "old.pt", _use_new_zipfile_serialization=False)


def write_lightning(folder: Path) -> None:
    """A file with the layout of Lightning's."""
    checkpoint = {
        "epoch": 1,
        "global_step": 8,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {name: it for name, it in WEIGHTS.items() if name != "same"},
        "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {"EarlyStopping": {"wait_count": 0}},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(8.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "lr_schedulers": [{"gamma": 0.1}],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.1, "note": "x", "sizes": [1], "inner": {"a": 1}},
        "mine": {"rows": [1, 2]},
    }
    torch.save(checkpoint, folder / "model.ckpt")


def write_safetensors(folder: Path) -> None:
    """A file alone, and several with an index."""
    save_file(WEIGHTS, folder / "alone.safetensors", {"format": "pt"})
    places = {name: f"model-{i}.safetensors" for i, name in enumerate(WEIGHTS)}
    for name, file in places.items():
        save_file({name: WEIGHTS[name]}, folder / file)
    index = {"metadata": {"total_size": 40}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_dcp(folder: Path) -> None:
    """What torch.distributed.checkpoint writes."""
    import torch.distributed.checkpoint as dcp  # late: half a second

    with _quiet():
        dcp.save({"model": dict(WEIGHTS), "optimizer": {"m": torch.ones(2)}, "epoch": 2}, checkpoint_id=folder)


def write_accelerate(folder: Path) -> None:
    """A folder with the layout of Accelerate's `save_state`: safetensors, pickles by number."""
    folder.mkdir(exist_ok=True)
    places = {name: f"model-{i}.safetensors" for i, name in enumerate(WEIGHTS)}
    for name, file in places.items():
        save_file({name: WEIGHTS[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
        torch.save({"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}, folder / name)
    shards = folder / "bins"
    shards.mkdir()
    torch.save(WEIGHTS, shards / "pytorch_model.bin")


def write_deepspeed(root: Path, stage: int) -> None:
    """A folder with the layout of DeepSpeed's `save_checkpoint`, of two ranks."""
    folder = root / "global_step8"
    folder.mkdir(parents=True)
    (root / "latest").write_text(folder.name)
    shapes = [OrderedDict((name, it.shape) for name, it in WEIGHTS.items() if name != "same")]
    flat = torch.cat([WEIGHTS[name].flatten() for name in shapes[0]])
    with _deepspeed_names() as (scaler_class, stage_class):
        for rank in range(2):
            prefix = f"zero_pp_rank_{rank}_mp_rank_00_"
            own = [it.clone() for it in (flat.chunk(2)[rank],)]
            held: Any = {"fp32_flat_groups": own} if stage == 3 else {"single_partition_of_fp32_groups": own}
            optimizer = {
                "zero_stage": stage_class(stage),
                "partition_count": 2 if stage == 3 else [2],
                "loss_scaler": scaler_class(),
                **held,
            }
            torch.save({"optimizer_state_dict": optimizer}, folder / f"{prefix}optim_states.pt")
            model = {
                "module": {"same": WEIGHTS["same"]},
                "param_shapes": shapes,
                "shared_params": {"tied": "layer.bias"},
                "frozen_param_shapes": {"frozen": torch.Size((2,))},
                "frozen_param_fragments": {"frozen": torch.ones(1)},
            }
            if stage == 3 or rank == 0:
                torch.save(model, folder / f"{prefix if stage == 3 else 'mp_rank_00_'}model_states.pt")


@contextmanager
def _deepspeed_names() -> Iterator[tuple[Any, Any]]:
    """Classes that pickle under DeepSpeed's names; the package itself is not loaded, and need not be there."""
    rooms = ("deepspeed.runtime.fp16.loss_scaler", "deepspeed.runtime.zero.config")
    parts = [room.split(".") for room in rooms]
    names = {".".join(part[:end]) for part in parts for end in range(1, len(part) + 1)}
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.modules.update({name: ModuleType(name) for name in names})
    scaler = type("LossScaler", (), {"__module__": rooms[0]})
    stage = IntEnum("ZeroStageEnum", {"one": 1, "two": 2, "three": 3}, module=rooms[1])
    sys.modules[rooms[0]].LossScaler = scaler  # type: ignore[attr-defined]
    sys.modules[rooms[1]].ZeroStageEnum = stage  # type: ignore[attr-defined]
    try:
        yield scaler, stage
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
