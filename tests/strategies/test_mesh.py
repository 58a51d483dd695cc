"""Several kinds of parallelism behind one Trainer: who reads what, what is logged, predicted, saved and refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instep import Trainer, TrainModule
from instep.callbacks import ModelCheckpoint
from instep.errors import HookError, SettingError
from instep.strategies import MeshStrategy, resolve_strategy
from tests.helpers.spawn import run_ranks
from tests.strategies import PIPES
from tests.strategies.tiny_gpt import LENGTH, VOCABULARY, WIDTH, Block, TinyGPT, train

# ---- settings


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        ({"tp": 0}, "tp", "tp=0: expected a number of processes, from 1, or -1"),
        ({"cp": True}, "cp", "cp=True: expected a number"),
        ({"tp": -1}, "tp", "dp_shard and tp are all -1: only one can take what is left"),
        ({"cp": 2, "cp_attention": "flash"}, "cp_attention", "Use one of: all_to_all, ring"),
        ({"loss_parallel": True}, "loss_parallel", "loss_parallel belongs to tp: leave it out, or set tp too"),
        ({"tp": 2, "cp_attention": "ring"}, "cp_attention", "cp_attention belongs to cp"),
        ({"tp": 2, "pp_microbatches": 4}, "pp_microbatches", "pp_microbatches belongs to pp"),
    ],
)
def test_wrong_sizes_and_options_are_refused(settings: dict[str, Any], field: str, message: str):
    with pytest.raises(SettingError, match=message) as error:
        MeshStrategy(**settings)
    assert error.value.field == field


def test_sizes_take_what_is_left_and_must_multiply_to_the_processes():
    for world, settings, expected in (
        (8, {"tp": 2}, {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 2}),
        (8, {"dp_shard": 2, "cp": -1, "tp": 2}, {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2}),
        (2, {"tp": np.int64(2), "dp_shard": 1}, {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2}),
    ):
        strategy = MeshStrategy(**settings)
        strategy.check_world_size(world)
        assert strategy.sizes == expected
        assert {type(size) for size in strategy.sizes.values()} == {int}
    with pytest.raises(
        SettingError, match=r"MeshStrategy\(dp_shard=-1, tp=2\) is for a multiple of 2 processes, and"
    ) as error:
        MeshStrategy(tp=2).check_world_size(3)
    assert "Start 2 (devices=2 on one node), or choose sizes that divide 3." in str(error.value)
    with pytest.raises(SettingError, match=r"MeshStrategy\(dp_shard=2, tp=2\) is for 4 processes, and this run has 8"):
        MeshStrategy(dp_shard=2, tp=2).check_world_size(8)
    for name in ("tp", "cp", "pp"):
        strategy = resolve_strategy(name, 2)
        assert isinstance(strategy, MeshStrategy)
        assert strategy.sizes[name] == 2


@pytest.mark.parametrize("field", ["tp", "pp"])
def test_gradients_that_ranks_have_others_of_are_not_scaled(field: str):
    strategy = MeshStrategy(**{field: 2})
    strategy.check_world_size(2)
    scaled: Any = SimpleNamespace(name="16-mixed", scaler=object())
    with pytest.raises(SettingError, match=f"ranks of {field} hold different ones.*Use precision='bf16-mixed'"):
        strategy.connect(torch.device("cpu"), scaled)


# ---- two processes


class Plain(TinyGPT):
    """Does not say where its sequences are."""

    sequence_dim = None  # type: ignore[assignment]


class Dropping(TinyGPT):
    """Drops some of what all tensor-parallel ranks have; counts samples; keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.dropout = nn.Dropout(0.2)
        self.seen: list[int] = []

    def embed(self, tokens: Tensor) -> Tensor:
        return self.dropout(super().embed(tokens))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += batch[0][:, 0].tolist()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("samples", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


class Late(TinyGPT):
    """Makes its layers when it is told to, with the values that torch gives them."""

    def __init__(self) -> None:
        TrainModule.__init__(self)
        self.save_hyperparameters({"lr": 1e-3})

    def configure_model(self) -> None:
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList([Block()]), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight


def made_late(strategy: Any) -> list[float]:
    torch.manual_seed(3)
    return train(strategy, module=Late(), steps=2).losses


def samples(count: int = 12, batch_size: int = 4) -> DataLoader[Any]:
    text = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    text[:, 0] = torch.arange(count)  # which sample it is
    return DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=batch_size)


def trainer_of(strategy: Any, **settings: Any) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(**{"accelerator": "cpu", "strategy": strategy, "enable_checkpointing": False, **quiet, **settings})


def whole(module: nn.Module) -> dict[str, Tensor]:
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in module.named_parameters()}


def predictions(strategy: Any) -> Tensor:
    torch.manual_seed(3)
    outputs: Any = trainer_of(strategy).predict(TinyGPT(layers=1), samples())
    return torch.cat(outputs)


def resumed(strategy: Any, folder: Path) -> tuple[list[float], list[float]]:
    """The losses after step 2, unbroken and from a checkpoint."""

    def run(into: Path, **settings: Any) -> list[float]:
        torch.manual_seed(1)
        saves = ModelCheckpoint(into, every_n_train_steps=2, save_top_k=-1)
        settings |= {"callbacks": [saves], "enable_checkpointing": True, "module": TinyGPT(layers=1)}
        return train(strategy(), steps=4, **settings).losses

    unbroken = run(folder / "first")
    (saved,) = (folder / "first").glob("step-00000002-*")
    again = run(folder / "second", ckpt_path=saved)
    return unbroken[-len(again) :], again


def two_ranks(folder: Path) -> dict[str, Any]:
    warnings.simplefilter("error")
    found: dict[str, Any] = {}
    for name in ("tp", "cp"):
        torch.manual_seed(0)
        module = Dropping()
        trainer = trainer_of(name, max_epochs=1)
        trainer.fit(module, samples())
        found[name] = {
            "seen": module.seen,
            "samples": float(trainer.callback_metrics["samples"]),
            "data": (trainer.strategy.data_rank, trainer.strategy.data_world_size),
            "weights": whole(module),
            "local": {n: p.detach() for n, p in module.named_parameters() if not hasattr(p, "placements")},
            "predictions": predictions(name),
            "resumed": resumed(lambda name=name: resolve_strategy(name, 2), folder / name),
        }
    found["meta"] = made_late(MeshStrategy(tp=2, meta_init=True))
    with pytest.raises(HookError, match="cp=2 cuts sequences, and Plain does not say where they are"):
        train("cp", module=Plain(layers=1))
    odd = TinyGPT(layers=1)
    odd.blocks[0].num_heads = 3  # type: ignore[assignment]
    with pytest.raises(SettingError, match="cp: 2 ranks cannot share out num_heads=3 of"):
        train("cp", module=odd)
    with pytest.raises(SettingError, match="cp_attention='ring' has no kernels on device cpu"):
        train(MeshStrategy(cp=2, cp_attention="ring"))
    return found


@pytest.mark.dist
def test_two_processes_that_share_their_data(tmp_path: Path):
    first, second = run_ranks(two_ranks, 2, tmp_path)
    assert first["meta"] == second["meta"] == pytest.approx(made_late("auto"), abs=1e-5)
    expected = predictions("auto")
    for name in ("tp", "cp"):
        for rank in (first[name], second[name]):
            assert rank["data"] == (0, 1)
            assert rank["seen"] == list(range(12))
            torch.testing.assert_close(rank["predictions"], expected)
            unbroken, again = rank["resumed"]
            assert len(again) == 2
            assert again == unbroken  # bit for bit
        assert first[name]["samples"] == 12.0 * (2 if name == "cp" else 1)  # each part of a sequence counts
        for key in ("weights", "local"):  # the same masks, so that what is not cut stays alike
            assert first[name][key].keys() == second[name][key].keys()
            for parameter, value in first[name][key].items():
                assert torch.equal(value, second[name][key][parameter]), parameter


# ---- four processes


def train_two_layers(**settings: Any) -> list[float]:
    torch.manual_seed(1)
    return train(**settings, module=TinyGPT(layers=2), steps=3, limit_val_batches=0).losses


def four_ranks(names: tuple[str, ...]) -> dict[str, tuple[list[float], int]]:
    found: dict[str, tuple[list[float], int]] = {}
    for name in names:
        settings = FOUR[name]()
        losses = train_two_layers(**settings)
        strategy = settings["strategy"]
        written = [getattr(it, "local", it) for it in (strategy.local_shards(strategy.model_state()) or {}).values()]
        found[name] = losses, sum({it.data_ptr(): it.numel() for it in written}.values())  # tied ones once
    return found


FOUR: dict[str, Any] = {
    "cp 2, tp 2": lambda: {"strategy": MeshStrategy(cp=2, tp=2), "batch_size": 8},
    "cp 2, dp_shard 2": lambda: {"strategy": MeshStrategy(cp=2, dp_shard=2)},
    "dp_replicate 2, tp 2": lambda: {"strategy": MeshStrategy(dp_replicate=2, dp_shard=1, tp=2)},
    "pp 2, tp 2, offload": lambda: {"strategy": MeshStrategy(pp=2, tp=2, cpu_offload=True), "batch_size": 16},
    "pp 2, cp 2": lambda: {"strategy": MeshStrategy(pp=2, cp=2), "batch_size": 8},
    "dp_shard 2, tp 2, offload": lambda: {"strategy": MeshStrategy(tp=2, cpu_offload=True)},
}
FOUR = {name: settings for name, settings in FOUR.items() if PIPES or "pp" not in name}


@pytest.mark.extras
@pytest.mark.dist
@pytest.mark.slow
def test_products_of_dimensions_train_as_one_process_does():
    alone = train_two_layers()
    elements = sum(p.numel() for p in TinyGPT(layers=2).parameters())
    ranks = run_ranks(four_ranks, 4, tuple(FOUR))
    for name in FOUR:
        for rank in ranks:
            assert rank[name][0] == pytest.approx(alone, abs=1e-5), name
        assert sum(rank[name][1] for rank in ranks) == elements, name  # none is saved twice
