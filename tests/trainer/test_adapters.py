"""LoRA by peft: adapters alone in the checkpoint, under every strategy, and in peft's own folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from instep import TrainModule
from instep.callbacks import ModelCheckpoint
from instep.checkpoint import load_weights
from instep.errors import CheckpointError, Preempted
from tests.helpers.spawn import run_ranks
from tests.trainer.resuming import StopAt
from tests.trainer.toys import assert_same, quiet

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft reads it
]


def base(seed: int = 1) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    size = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**size, resid_pdrop=0.1, bos_token_id=0, eos_token_id=0))


class Tuned(TrainModule):
    checkpoint_filter = "trainable"

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
        self.model: Any = get_peft_model(base(seed), config)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def fit(root: Path, *others: Any, **settings: Any) -> tuple[Tuned, Any, Path]:
    seed = settings.pop("seed", 1)
    module, saver = Tuned(seed), ModelCheckpoint(save_last=True)
    torch.manual_seed(5)
    trainer = quiet(
        **{"max_epochs": 2, "default_root_dir": root, "trigger_every": 1, "enable_checkpointing": True, **settings},
        callbacks=[saver, *others],
    )
    tokens = torch.arange(96).view(12, 8) % 29
    try:
        trainer.fit(module, DataLoader(tokens, 2, shuffle=True), ckpt_path="auto")
    except Preempted:
        assert others
    return module, trainer, Path(saver.last_model_path)


def is_adapters(path: Path) -> bool:
    names = load_weights(path)
    return len(names) == 4 and all(".lora_" in name for name in names)


def test_a_checkpoint_of_adapters_resumes_loads_and_becomes_pefts_folder(tmp_path: Path) -> None:
    from peft import PeftModel

    whole, _, path = fit(tmp_path / "whole")
    assert is_adapters(path)
    assert (path / "model.safetensors").stat().st_size < 10_000
    for stop in (2, 8):
        fit(tmp_path / "stopped", StopAt(stop))
    again, *_ = fit(tmp_path / "stopped")
    assert_same(dict(again.state_dict()), dict(whole.state_dict()))
    with pytest.raises(CheckpointError, match="not those of that run"):
        Tuned.load_from_checkpoint(path, seed=2)
    loaded = Tuned.load_from_checkpoint(path)
    loaded.model.save_pretrained(tmp_path / "adapters")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = whole.eval().model(ids).logits
        taken = PeftModel.from_pretrained(base(), tmp_path / "adapters").eval()
        assert torch.equal(taken(ids).logits, expected)
        assert torch.allclose(taken.merge_and_unload()(ids).logits, expected, atol=1e-6)


def tune_on_ranks(root: Path, strategies: list[str]) -> list[tuple[bool, dict[str, Any]]]:
    results = []
    for strategy in strategies:
        whole = fit(root / f"whole-{strategy}", strategy=strategy, devices="auto")
        fit(root / strategy, StopAt(2), strategy=strategy, devices="auto")
        _, trainer, path = fit(root / strategy, strategy=strategy, devices="auto")
        states = [t.strategy.full_model_state() for t in (whole[1], trainer)]
        for name in states[0]:
            assert torch.equal(states[0][name], states[1][name]), (strategy, name)
        results.append((is_adapters(path), states[0]))
    fit(root / "changed", StopAt(2), strategy=strategies[0], devices="auto")
    assert is_adapters(fit(root / "changed", strategy=strategies[-1], devices="auto")[2])
    return results


@pytest.mark.dist
@pytest.mark.parametrize(
    "strategies",
    [
        ["ddp", "fsdp"],
        pytest.param(["ddp", "deepspeed_stage_2"], marks=pytest.mark.deepspeed),
        pytest.param(["fsdp", "deepspeed_stage_3"], marks=pytest.mark.deepspeed),
    ],
)
def test_every_strategy_trains_and_saves_adapters_alone(tmp_path: Path, strategies: list[str]) -> None:
    results = run_ranks(tune_on_ranks, 2, tmp_path, strategies)[0]
    assert all(adapters for adapters, _ in results)
    for name, value in results[0][1].items():
        torch.testing.assert_close(results[1][1][name].float(), value.float(), atol=1e-3, rtol=1e-3)
