"""Weights of a folder that each rank reads its own part of, once a strategy has placed the module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from instep import Accelerator
from instep.big_models import init_empty_weights, load_checkpoint_in_model
from instep.callbacks import ModelCheckpoint
from instep.checkpoint.lazy import LazyTensor
from instep.errors import CheckpointError, SettingError
from instep.strategies import FSDPStrategy, MeshStrategy
from tests.helpers.spawn import run_ranks
from tests.strategies import PIPES
from tests.strategies.test_fsdp import Late
from tests.strategies.tiny_gpt import VOCABULARY, train

TWO: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "fsdp": FSDPStrategy,
    "fsdp, meta": lambda: FSDPStrategy(meta_init=True),
    "fsdp, offload": lambda: FSDPStrategy(cpu_offload=True),
    "tp": lambda: MeshStrategy(tp=2),
    **({"pp": lambda: MeshStrategy(pp=2)} if PIPES else {}),
}
FOUR: dict[str, Any] = {
    "tp 2, dp_shard 2": lambda: MeshStrategy(tp=2, dp_shard=2),
    "dp_replicate 2, dp_shard 2": lambda: FSDPStrategy(dp_replicate=2),
}


class Loaded(Late):
    """Built without values, of which a file has them."""

    def __init__(self, file: Path, empty: bool = True) -> None:
        super().__init__()
        self.file, self.empty = file, empty

    def configure_model(self) -> None:
        if not self.empty:
            super().configure_model()
            load_checkpoint_in_model(self, self.file)
            return
        with init_empty_weights():
            super().configure_model()
            load_checkpoint_in_model(self, self.file)


@contextmanager
def elements_read(sizes: list[int]) -> Iterator[None]:
    """Count the elements that are read of tensors in files."""
    read = LazyTensor.read

    def spy(self: LazyTensor, box: Any = None) -> Tensor:
        got = read(self, box)
        sizes.append(got.numel())
        return got

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LazyTensor, "read", spy)
        yield


def make_file(folder: Path) -> tuple[Path, int]:
    """Write the weights of a `Late`, the tied one once, as on the hub; return how many elements there are too."""
    torch.manual_seed(5)
    module = Late()
    module.configure_model()
    state = {name: value.clone() for name, value in module.state_dict().items() if name != "head.weight"}
    save_file(state, folder / "model.safetensors")
    return folder / "model.safetensors", sum(value.numel() for value in state.values())


def losses_and_reads(strategies: dict[str, Any], file: Path) -> dict[str, tuple[list[float], int]]:
    found = {}
    for name, strategy in strategies.items():
        sizes: list[int] = []
        with elements_read(sizes):
            trained = train(strategy(), steps=3, module=Loaded(file), limit_val_batches=0)
        found[name] = (trained.losses, sum(sizes))
    return found


def resume(file: Path, folder: Path) -> tuple[list[float], list[float], int]:
    """The losses after step 2, unbroken and from a checkpoint; and what the resume has read of the file."""

    def run(into: Path, **settings: Any) -> list[float]:
        saves = ModelCheckpoint(into, every_n_train_steps=2, save_top_k=-1)
        settings |= {"callbacks": [saves], "enable_checkpointing": True, "module": Loaded(file)}
        return train("fsdp", steps=3, limit_val_batches=0, **settings).losses

    unbroken = run(folder / "first")
    own: list[int] = []
    read = LazyTensor.read

    def spy(self: LazyTensor, box: Any = None) -> Tensor:
        own.extend([1] * (self.parts[0].path == file))
        return read(self, box)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LazyTensor, "read", spy)
        again = run(folder / "second", ckpt_path=next((folder / "first").glob("step-00000002-*")))
    return unbroken[-len(again) :], again, len(own)


def accelerate(file: Path) -> tuple[int, list[float], list[float]]:
    """An empty model and its optimizer, prepared: what was read, and a parameter's values before and after a step."""
    with init_empty_weights():
        model = nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Linear(64, 2))
        load_checkpoint_in_model(model, file)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sizes: list[int] = []
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    with elements_read(sizes):
        prepared, optimizer = accelerator.prepare(model, optimizer)
    bias: Any = model[1].bias
    before = bias.full_tensor().tolist()
    accelerator.backward(prepared(torch.arange(4)).sum())
    optimizer.step()
    return sum(sizes), before, bias.full_tensor().tolist()


def two_ranks(file: Path, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": losses_and_reads(TWO, file), "resumed": resume(file, folder)}
    found["accelerated"] = accelerate(folder / "pair.safetensors")
    with pytest.raises(CheckpointError, match=r"other.safetensors does not fit Loaded: norm.bias has shape \(3,\)"):
        train("fsdp", module=Loaded(folder / "other.safetensors"))
    return found


@pytest.mark.dist
def test_each_of_two_ranks_reads_only_its_shards_of_a_file(tmp_path: Path) -> None:
    file, elements = make_file(tmp_path)
    state = {"0.weight": torch.randn(VOCABULARY, 64), "1.weight": torch.randn(2, 64), "1.bias": torch.tensor([1.0, 2])}
    save_file(state, tmp_path / "pair.safetensors")
    save_file({"norm.bias": torch.zeros(3)}, tmp_path / "other.safetensors")
    alone = train("auto", steps=3, module=Loaded(file, empty=False), limit_val_batches=0)
    single = losses_and_reads({"one": lambda: "auto"}, file)["one"]
    assert single == (alone.losses, elements)  # bit for bit
    for rank in run_ranks(two_ranks, 2, file, tmp_path):
        for name, (losses, read) in rank["losses"].items():
            assert losses == pytest.approx(alone.losses, abs=1e-5), name
            most = {"ddp": 1.0, "tp": 0.7, "pp": 0.6}.get(name, 0.51)  # norms and positions are not cut by tp
            assert read <= most * elements, name
        unbroken, again, own = rank["resumed"]
        assert again == unbroken  # bit for bit
        assert own == 0
        read, before, after = rank["accelerated"]
        assert read <= 0.51 * sum(value.numel() for value in state.values())
        assert before == [1.0, 2.0]
        assert after == [-3.0, -2.0]


def four_ranks(file: Path) -> dict[str, Any]:
    return losses_and_reads(FOUR, file)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.campaign
def test_each_of_four_ranks_reads_only_its_shards_of_a_file(tmp_path: Path) -> None:
    file, elements = make_file(tmp_path)
    alone = train("auto", steps=3, module=Loaded(file, empty=False), limit_val_batches=0)
    for rank in run_ranks(four_ranks, 4, file):
        for name, (losses, read) in rank.items():
            assert losses == pytest.approx(alone.losses, abs=1e-5), name
            assert read <= (0.35 if "tp" in name else 0.51) * elements, name


def test_weights_that_nothing_gives_values_are_named_before_training(tmp_path: Path) -> None:
    class Scaled(Late):
        def configure_model(self) -> None:
            with init_empty_weights():
                super().configure_model()
                self.scale = nn.Parameter(torch.ones(3))

    with pytest.raises(SettingError, match=r"weights of Scaled .* without values: scale\. Give them .*checkpoint"):
        train("auto", module=Scaled())
