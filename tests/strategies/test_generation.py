"""Texts of different lengths are generated where each forward gathers weights that are spread over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from instep import Trainer, TrainModule
from tests.helpers.spawn import run_ranks


class Writer(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM  # late: an optional package

        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=50, hidden_size=64, intermediate_size=16, num_hidden_layers=2)
        self.lm = LlamaForCausalLM(config).eval()

    def predict_step(self, lengths: Tensor) -> Any:
        length = int(lengths[0])
        model: Any = self.lm
        prompt = torch.full((1, 3), length, device=model.device)
        return model.generate(prompt, max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0)


def written(strategy: str) -> list[list[list[int]]]:
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", strategy=strategy, enable_model_summary=False, **quiet)
    writer = Writer()
    texts: Any = trainer.predict(writer, DataLoader([2, 7, 5, 1, 3]))  # pyright: ignore[reportArgumentType]
    assert "generate" not in writer.lm.__dict__, "as it was before"
    return [text.tolist() for text in texts]


@pytest.mark.dist
@pytest.mark.transformers
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("deepspeed_stage_3", marks=pytest.mark.deepspeed)])
def test_ranks_go_on_until_the_longest_text_is_done(strategy: str) -> None:
    alone = written("auto")
    assert [len(text[0]) for text in alone] == [5, 10, 8, 4, 6]
    assert run_ranks(written, 2, strategy) == [alone, alone]
