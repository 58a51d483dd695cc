from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from instep import Accelerator
from instep.strategies.fsdp import FSDPStrategy
from tests.helpers.spawn import run_ranks
from tests.strategies.tiny_gpt import TinyGPT, loader

STEPS, SAVED = 4, 2


class GPT(nn.Module):
    """The small transformer without the Trainer's base class."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        tiny = TinyGPT(layers=1)
        self.embedding, self.position, self.blocks, self.norm = tiny.embedding, tiny.position, tiny.blocks, tiny.norm
        self.head = tiny.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(strategy: Any, folder: Path, order: str = "together", load: Path | None = None, **options: Any) -> Any:
    """4 optimizer steps of 16 samples, clipped; the losses, the norms, and what became of the weights."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    accelerator = Accelerator(strategy=strategy, cpu=True, gradient_accumulation_steps=4 // world, **options)
    model: Any = GPT()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if order == "state first":  # an optimizer that has stepped before
        model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    data: Any = loader(batch_size=4, shuffle=False)
    if order == "optimizer first":
        optimizer = accelerator.prepare(optimizer)
        model, data, schedule = accelerator.prepare(model, data, schedule)
    else:
        model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    if load is not None:
        accelerator.load_state(load)
    losses: list[float] = []
    norms: list[float] = []
    window: list[Tensor] = []
    for tokens, targets in data:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
            window.append(accelerator.gather(loss.detach()).mean())
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            assert norm is not None
            norms.append(float(norm))
            losses.append(float(torch.stack(window).mean()))
            window = []
            if len(losses) == SAVED and load is None:
                accelerator.save_state(folder / "state")
            if len(losses) == STEPS - (SAVED if load is not None else 0):
                break
    accelerator.save_model(model, folder)
    index = accelerator.save_model(model, folder / "parts", max_shard_size=8)
    assert index.name == "model.safetensors.index.json", "on every rank, also where no weights are"
    kinds = {type(p).__name__ for group in optimizer.optimizer.param_groups for p in group["params"]}
    parts = sum(isinstance(it, FSDPModule) for it in accelerator.unwrap_model(model).modules())
    whole = accelerator.get_state_dict(model)
    accelerator.end_training()
    return losses, norms, kinds, parts, sorted(whole)


def train_all(folder: Path) -> dict[str, Any]:
    warnings.simplefilter("error")
    kept = FSDPStrategy(reshard_after_forward=False)
    return {
        "together": train("fsdp", folder / "together"),
        "optimizer first": train(kept, folder / "first", "optimizer first", device_placement=False),
        "state first": train("fsdp", folder / "stepped", "state first"),
        "resumed": train("fsdp", folder / "resumed", load=folder / "together" / "state"),
        "from one": train("fsdp", folder / "from one", load=folder / "alone" / "state"),
        "mixed": train("fsdp", folder / "mixed", mixed_precision="bf16"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    return train("auto", folder / "alone"), train("auto", folder / "alone stepped", "state first")


@pytest.fixture(scope="module")
def ranks(folder: Path, alone: Any) -> list[dict[str, Any]]:
    return run_ranks(train_all, 2, folder)


@pytest.mark.dist
def test_a_loop_of_ones_own_is_that_of_one_process(ranks: list[dict[str, Any]], alone: Any, folder: Path) -> None:
    names = sorted(GPT().state_dict())
    for rank, seen in enumerate(ranks):
        for name, (losses, norms, kinds, parts, whole) in seen.items():
            expected = alone[name == "state first"]
            begin = SAVED if name in ("resumed", "from one") else 0
            near = 0.05 if name == "mixed" else 1e-5
            assert losses == pytest.approx(expected[0][begin:], abs=near), name
            assert norms == pytest.approx(expected[1][begin:], rel=1e-5 if near < 0.01 else 0.1), name
            assert len(losses) == STEPS - begin
            assert kinds == {"DTensor"}
            assert parts == 2  # the block, and what is left
            assert whole == (names if rank == 0 else [])
        assert seen["resumed"][0] == seen["together"][0][SAVED:]  # to the bit
    mine, others = (load_file(folder / it / "model.safetensors") for it in ("alone", "together"))
    for name, value in mine.items():
        if not name.endswith("k.bias"):  # without a gradient but rounding errors
            torch.testing.assert_close(others[name], value, atol=1e-5, rtol=0, msg=name)


@pytest.mark.dist
def test_one_process_goes_on_from_the_parts_of_two(ranks: list[dict[str, Any]], alone: Any, folder: Path) -> None:
    losses, *_ = train("auto", folder / "back", load=folder / "together" / "state")
    assert losses == pytest.approx(alone[0][0][SAVED:], abs=1e-5)
