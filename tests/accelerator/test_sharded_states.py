"""States that each rank writes its part of, and ranks that read the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instep import Accelerator
from instep.checkpoint import Reader
from tests.helpers.sharding import SameData
from tests.helpers.spawn import run_ranks

pytestmark = pytest.mark.dist


def data() -> DataLoader[Any]:
    x = torch.arange(20.0).reshape(10, 2) / 20
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def models(count: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)) for _ in range(count)]


def made(strategy: Any, count: int, steps: int) -> tuple[Accelerator, list[nn.Module], Any]:
    """Some models under one optimizer, trained for some steps."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    bare = models(count)
    ready = [accelerator.prepare_model(model, name=f"net{i}") for i, model in enumerate(bare)]
    optimizer = torch.optim.AdamW([p for model in bare for p in model.parameters()], lr=0.05)
    prepared, loader = accelerator.prepare(optimizer, data())
    for x, y in [batch for _ in range(2) for batch in loader][:steps]:
        prepared.zero_grad()
        accelerator.backward(torch.stack([nn.functional.mse_loss(model(x), y) for model in ready]).sum())
        prepared.step()
    return accelerator, bare, prepared


def state_of(bare: list[nn.Module], prepared: Any) -> list[Tensor]:
    moments = prepared.optimizer.state_dict()["state"]
    return [
        *(it.clone() for model in bare for it in model.state_dict().values()),
        *(it.clone() for entry in moments.values() for it in entry.values()),
    ]


def save(root: str, count: int) -> list[Tensor]:
    accelerator, bare, prepared = made(SameData(), count, 3)
    path = accelerator.save_state(Path(root, "state"))
    files = set(Reader(path).manifest.files)
    assert {f"{base}-0000{rank}-of-00002.safetensors" for base in ("model", "optimizer") for rank in (0, 1)} <= files
    assert "model.safetensors" not in files
    accelerator.save_state(Path(root, "beside"), background=True)
    beside = accelerator.wait_for_saves()
    assert beside is not None
    one, two = (
        {name: it for name, it in Reader(where).manifest.files.items() if name[:3] in ("mod", "opt")}
        for where in (path, beside)
    )
    assert one == two
    left = accelerator.get_state_dict(bare[0])
    assert list(left) == (list(bare[0].state_dict()) if accelerator.is_main_process else [])
    accelerator.save_model(bare[0], Path(root, "weights"))
    rows = [accelerator.gather_for_metrics(x[:, 0]) for x, _ in accelerator.prepare(data())]
    assert torch.cat(rows).tolist() == data().dataset[:][0][:, 0].tolist()  # pyright: ignore[reportIndexIssue]
    whole = state_of(bare, prepared)
    accelerator.end_training()
    again, others, stepped = made(SameData(), count, 1)
    again.load_state(Path(root, "state"))
    assert all(torch.equal(a, b) for a, b in zip(state_of(others, stepped), whole, strict=True))
    draws = torch.rand(3)
    assert torch.equal(torch.cat([draws, draws]), again.gather(draws))
    again.end_training()
    return whole


@pytest.mark.parametrize("count", [1, 2])
def test_a_state_in_parts_loads_here_and_in_one_process(tmp_path: Path, count: int) -> None:
    whole, other = run_ranks(save, 2, str(tmp_path), count)
    assert all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))
    accelerator, bare, prepared = made("auto", count, 1)
    accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(a, b) for a, b in zip(state_of(bare, prepared), whole, strict=True))
    accelerator.end_training()
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    assert all(torch.equal(it, weights[name]) for name, it in bare[0].state_dict().items())
