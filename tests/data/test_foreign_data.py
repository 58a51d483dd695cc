"""Data that other packages read: every sample once, also when a run goes on in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from instep import Trainer, TrainModule

COUNT = 40
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        values = torch.as_tensor(batch["x"] if isinstance(batch, dict) else batch)
        self.seen += values.tolist()
        return (self.weight * values).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


def train(loader: Any, folder: Path, max_steps: int = -1, ckpt_path: Any = None) -> tuple[list[int], Trainer]:
    module = Net()
    off: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", max_epochs=2, max_steps=max_steps, default_root_dir=folder, **off)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return module.seen, trainer


def array(folder: Path, workers: int) -> Any:
    np.save(folder / "array.npy", np.arange(COUNT))
    return DataLoader(np.load(folder / "array.npy", mmap_mode="r"), 4, shuffle=True, num_workers=workers)


def nodes(folder: Path, workers: int) -> Any:
    import torchdata.nodes as tn

    data: Any = range(COUNT)
    drawn = tn.MapStyleWrapper(data, DistributedSampler(data, num_replicas=1, rank=0))  # which knows of epochs
    batches = tn.Batcher(drawn, 4)
    return tn.Loader(tn.ParallelMapper(batches, torch.tensor, num_workers=workers) if workers else batches)


def arrow(folder: Path, workers: int) -> Any:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"x": list(range(COUNT))}).save_to_disk(folder / "arrow")
    data = datasets.load_from_disk(folder / "arrow").with_format("torch")
    assert data.cache_files  # mapped, not read
    return DataLoader(data, 4, shuffle=True, num_workers=workers)


def arrow_stream(folder: Path, workers: int) -> Any:
    return DataLoader(arrow(folder, 0).dataset.to_iterable_dataset(num_shards=4), 4, num_workers=workers)


def litdata(folder: Path, workers: int) -> Any:
    lit = pytest.importorskip("litdata")
    if not (folder / "chunks").exists():
        from litdata.streaming.writer import BinaryWriter  # pyright: ignore[reportMissingImports]

        writer = BinaryWriter(str(folder / "chunks"), chunk_size=8)
        for number in range(COUNT):
            writer[number] = number
        writer.done()
        writer.merge()
    return lit.StreamingDataLoader(
        lit.StreamingDataset(str(folder / "chunks"), shuffle=True), batch_size=4, num_workers=workers
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "make",
    [array, nodes, *(pytest.param(each, marks=pytest.mark.datasets) for each in (arrow, arrow_stream, litdata))],
)
def test_a_run_that_goes_on_sees_each_sample_once(make: Callable[..., Any], workers: int, tmp_path: Path) -> None:
    whole, _ = train(make(tmp_path, workers), tmp_path)
    assert [sorted(whole[:COUNT]), sorted(whole[COUNT:])] == [list(range(COUNT))] * 2
    for stop in (3, 10, 13):  # within an epoch, at its end, within the next
        begun, trainer = train(make(tmp_path, workers), tmp_path, max_steps=stop)
        trainer.save_checkpoint(tmp_path / f"at-{stop}")
        rest, _ = train(make(tmp_path, workers), tmp_path, ckpt_path=tmp_path / f"at-{stop}")
        assert begun + rest == whole
