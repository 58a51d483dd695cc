"""With the global batch held, training means the same on any number of processes and under every strategy."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from instep import Trainer, TrainModule
from tests.helpers.spawn import run_ranks
from tests.strategies import PIPES, parity_table
from tests.strategies.parity_table import LIMIT, TABLE, after_saving, by_ranks, difference, load, losses_of
from tests.strategies.tiny_gpt import train as train_gpt
from tests.trainer.resuming import Plain, StepLosses

GLOBAL_BATCH = 12
# Settings, samples, and the loader's batch size, from which the micro-batches follow. 50 samples leave a tail of 2,
# which is less than three ranks; 36 come out even; 55 leave 7.
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "even": ({}, 36, 12),
    "tail": ({}, 50, 12),
    "tail-shared-by-all": ({}, 55, 12),
    "windows": ({}, 50, 3),
    "clipped": ({"gradient_clip_val": 0.05}, 50, 12),
    "clipped-windows": ({"gradient_clip_val": 0.05}, 55, 2),
    "clipped-by-value": ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, 50, 3),
}


class Regression(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, _ = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def train(settings: dict[str, Any], samples: int, batch_size: int) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses by optimizer step, final weights, and the logged mean of the last epoch."""
    torch.manual_seed(1)
    module, losses = Regression(), StepLosses()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        global_batch_size=GLOBAL_BATCH,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses],
        **settings,
    )
    trainer.fit(module, DataLoader(Plain(samples), batch_size=batch_size, shuffle=True))
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return losses.values, weights, float(trainer.callback_metrics["loss"])


def train_all() -> dict[str, Any]:
    warnings.simplefilter("error")
    return {name: train(*case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train_all()


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_losses_agree_with_one_process(world_size: int, alone: dict[str, Any]) -> None:
    ranks = run_ranks(train_all, world_size)
    for name, (settings, samples, _) in CASES.items():
        losses, weights, mean = alone[name]
        steps = -(-samples // GLOBAL_BATCH) * 3
        assert len(losses) == steps, (name, settings)
        for rank, results in enumerate(ranks):
            got_losses, got_weights, got_mean = results[name]
            assert got_losses == pytest.approx(losses, abs=1e-5), (name, rank)
            assert got_mean == pytest.approx(mean, rel=1e-5), (name, rank)
            for key, value in weights.items():
                torch.testing.assert_close(
                    got_weights[key], value, atol=1e-5, rtol=0, msg=f"{name}, rank {rank}: {key}"
                )
                assert torch.equal(got_weights[key], ranks[0][name][1][key]), f"{name}: {key} differs on rank {rank}"


# ---- every strategy, on a small transformer

STRATEGIES = {name: case for name, case in parity_table.CASES.items() if PIPES or not name.startswith("PP")}
FEW = [name for name, case in STRATEGIES.items() if case.ranks <= 2 and not case.package]
MANY = [name for name, case in STRATEGIES.items() if case.ranks > 2 and not case.package]
FEW_STEPS = 8  # the warm-up and some more; the kept table has 20
DEEPSPEED = [name for name, case in STRATEGIES.items() if case.package == "deepspeed"]
groups = pytest.mark.parametrize(
    "names", [pytest.param(FEW, id="torch"), pytest.param(DEEPSPEED, id="deepspeed", marks=pytest.mark.deepspeed)]
)


class Runs:
    """Losses of runs that left checkpoints in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.losses: dict[str, list[float]] = {}
        self.loaded: dict[tuple[str, str], list[float]] = {}

    def train(self, names: list[str]) -> None:
        self.losses |= by_ranks([name for name in names if name not in self.losses], losses_of, self.folder, FEW_STEPS)

    def load(self, names: list[str], sources: list[str]) -> None:
        self.loaded |= by_ranks(names, load, sources, self.folder)

    def far(self) -> dict[Any, float]:
        """What differs by more than the limit."""
        alone = self.losses["single process"]
        found: dict[Any, float] = {name: difference(losses, alone) for name, losses in self.losses.items()}
        found |= {pair: difference(losses, after_saving(alone)) for pair, losses in self.loaded.items()}
        return {key: value for key, value in found.items() if value > LIMIT}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("parity"))


@pytest.mark.dist
@groups
def test_strategies_of_two_processes_agree(runs: Runs, names: list[str]) -> None:
    runs.train(["single process", *names])
    print("\n".join(parity_table.parity_rows(runs.losses)))
    assert runs.far() == {}
    assert all(len(losses) == FEW_STEPS and losses[-1] < losses[0] - 0.2 for losses in runs.losses.values())


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.campaign
def test_strategies_of_four_processes_agree(runs: Runs) -> None:
    runs.train(["single process", *MANY])
    assert runs.far() == {}


@pytest.mark.dist
@pytest.mark.slow
@groups
@pytest.mark.campaign
def test_checkpoints_load_under_other_strategies(runs: Runs, names: list[str]) -> None:
    """All by one process, and those of every kind by all; docs/scale/parity.md has every pair."""
    runs.train(["single process", "FSDP x2", *names])
    runs.load(["single process"], list(runs.losses))
    runs.load([name for name in names if name != "single process"], ["single process", "FSDP x2"])
    print("\n".join(parity_table.matrix_rows(runs.loaded, runs.losses["single process"])))
    assert runs.far() == {}


@pytest.mark.dist
@pytest.mark.extras
def test_saved_memory_changes_no_loss_also_of_a_checkpoint_of_another_number_of_processes(tmp_path: Path) -> None:
    names = [name for name in parity_table.MEMORY if STRATEGIES[name].ranks <= 2]
    alone = by_ranks(["single process"], losses_of, str(tmp_path), FEW_STEPS)["single process"]
    losses = by_ranks(names, parity_table.memory_losses, str(tmp_path), FEW_STEPS)
    assert len(losses) == 4 * len(names)
    for key, found in losses.items():
        assert difference(found, after_saving(alone) if key[2] == "resumed" else alone) < LIMIT, key


def losses_in(precision: str, names: list[str]) -> dict[str, list[float]]:
    return {name: train_gpt(steps=4, precision=precision, **STRATEGIES[name].settings()).losses for name in names}


@pytest.mark.dist
@pytest.mark.campaign
def test_strategies_agree_in_mixed_precision_but_for_its_rounding() -> None:
    alone = losses_in("bf16-mixed", ["single process"])["single process"]
    exact = losses_in("32-true", ["single process"])["single process"]
    names = [name for name in ("DDP x2", "FSDP x2", "TP x2", "PP x2 (1F1B)") if name in STRATEGIES]
    [first, _] = run_ranks(losses_in, 2, "bf16-mixed", names)
    for name, losses in first.items():
        assert difference(losses, alone) < 0.01, name
        assert difference(losses, exact) > LIMIT, f"{name} trained in float32"


def test_the_kept_tables_hold_every_strategy() -> None:
    parity, matrix = TABLE.read_text().split("## Checkpoints under other strategies")
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", parity, re.MULTILINE))
    kept = [*parity_table.CASES, parity_table.XLA]
    assert [name for name in rows if name in kept] == kept
    assert all(float(rows[name]) <= LIMIT for name in kept)
    cells = [
        float(cell) * 1e-7 for row in re.findall(r"^\| \d+: .*", matrix, re.MULTILINE) for cell in row.split("|")[2:-1]
    ]
    assert len(cells) == len(kept) ** 2
    assert all(cell <= LIMIT for cell in cells)
