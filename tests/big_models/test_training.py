"""Adapters that are trained on a base that is offloaded."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from instep import Trainer, TrainModule
from instep.big_models import (
    attach_align_device_hook,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_in_model,
    prepare_offloaded_training,
)
from instep.callbacks import ModelCheckpoint
from instep.checkpoint import load_weights
from instep.errors import SettingError, UsageError
from instep.strategies import FSDPStrategy
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import QUIET

WIDTH, BLOCKS = 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.adapter(x).tanh() + self.frozen(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Copies(Mapping[str, Tensor]):
    """Weights of which each use is a copy, as on another device; how many are alive is counted."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights, self.alive, self.most = weights, 0, 0

    def __getitem__(self, name: str) -> Tensor:
        made = self.weights[name].clone()
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(made.untyped_storage(), self._freed)
        return made

    def _freed(self) -> None:
        self.alive -= 1

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def net() -> Net:
    torch.manual_seed(0)
    made = Net()
    for name, parameter in made.named_parameters():
        parameter.requires_grad_("adapter" in name)
    return made


def gradients(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(1)
    loss = model(torch.randn(2, WIDTH)).square().sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_a_backward_brings_copied_weights_again() -> None:
    expected = gradients(net())
    most = {}
    for prepared in (False, True):
        model = net()
        copies = Copies({name: p.data for name, p in model.named_parameters() if "frozen" in name})
        attach_align_device_hook(model, "cpu", offload=True, weights_map=copies)
        copies.most = 0
        if prepared:
            assert prepare_offloaded_training(model) is model
        loss, found = gradients(model)
        assert loss == expected[0]
        assert found.keys() == expected[1].keys()
        for name, gradient in found.items():
            assert torch.equal(gradient, expected[1][name])  # bit for bit
        most[prepared] = copies.most
    assert most[False] >= BLOCKS  # the weight of each block waits for the backward
    assert most[True] <= 4  # weight and bias of the block in hand, and of the one before


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(UsageError, match=r"nothing of this Net is offloaded.*load_checkpoint_and_dispatch"):
        prepare_offloaded_training(net())
    model = Net()
    attach_align_device_hook(model, "cpu", offload=True)
    with pytest.raises(SettingError, match=r"32 offloaded weights require gradients, such as blocks.0.frozen.weight"):
        prepare_offloaded_training(model)
    model = net().requires_grad_(False)
    attach_align_device_hook(model, "cpu", offload=True)
    model.adapter = nn.Linear(WIDTH, WIDTH)
    model.adapter.register_buffer("rows", torch.arange(WIDTH))
    model.adapter.to("meta")
    with pytest.raises(SettingError, match=r"adapters lost their values .*: adapter\.rows\. Add these adapters before"):
        prepare_offloaded_training(model)
    model = net().requires_grad_(False)
    attach_align_device_hook(model, "cpu", offload=True, weights_map=Copies(dict(net().named_parameters())))
    with pytest.raises(SettingError, match=r"no block of Net has offloaded weights \(blocks='Blok'\)"):
        prepare_offloaded_training(model, blocks="Blok")


# ---- in a Trainer


class Tuned(TrainModule):
    """A model of transformers with LoRA, on the disk or not."""

    checkpoint_filter = "trainable"

    def __init__(self, folder: Path, offloaded: bool, trains_all: bool = False) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model

        with init_empty_weights():
            base = llama()
        if offloaded:
            where = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"}
            where["model.rotary_emb"] = "cpu"
            load_checkpoint_in_model(base, folder / "model.safetensors", device_map=where)
            base = dispatch_model(base, where)
        else:
            load_checkpoint_in_model(base, folder / "model.safetensors")
        self.model: Any = base if trains_all else get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
        if offloaded and not trains_all:
            prepare_offloaded_training(self.model)
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            if parameter.requires_grad and not trains_all:
                parameter.data = torch.randn(parameter.shape, generator=generator) / 10
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def llama() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    size: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**size, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
    return AutoModelForCausalLM.from_config(config)


def fit(module: TrainModule, folder: Path | None = None, ckpt_path: Path | None = None, **settings: Any) -> None:
    saver = [] if folder is None else [ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=2)]
    checkpoints = {"enable_checkpointing": folder is not None, "callbacks": saver}
    trainer = Trainer(**{**QUIET, "max_epochs": 1, **checkpoints, **settings})
    tokens: Any = torch.arange(64).view(8, 8) % 29
    trainer.fit(module, DataLoader(tokens, 2), ckpt_path=ckpt_path)


def two_ranks(folder: Path) -> list[list[float]]:
    with pytest.raises(SettingError, match=r"strategy='fsdp' spreads the weights over processes, and a model in Tuned"):
        fit(Tuned(folder, True), strategy=FSDPStrategy())
    losses = []
    for offloaded in (False, True):
        module = Tuned(folder, offloaded)
        fit(module, strategy="ddp")
        losses.append(module.losses)
    return losses


@pytest.mark.transformers
@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft reads it
def test_a_trainer_trains_adapters_on_an_offloaded_base(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {name: value.clone() for name, value in llama().state_dict().items() if name != "lm_head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    resident, offloaded = Tuned(tmp_path, False), Tuned(tmp_path, True)
    fit(resident)
    fit(offloaded, tmp_path / "checkpoints")
    assert offloaded.losses == resident.losses  # bit for bit
    saved = next((tmp_path / "checkpoints").glob("step-00000002-*"))
    assert len(load_weights(saved)) == 4
    assert all(".lora_" in name for name in load_weights(saved))
    again = Tuned(tmp_path, True)
    fit(again, tmp_path / "second", saved)
    assert again.losses == resident.losses[2:]
    with pytest.raises(SettingError, match=r"weights of Tuned that the optimizer is to train are offloaded"):
        fit(Tuned(tmp_path, True, trains_all=True))
    for resident_losses, losses in run_ranks(two_ranks, 2, tmp_path):
        assert len(losses) == 2
        assert losses == resident_losses
