from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from instep.big_models import init_empty_weights
from instep.errors import SettingError
from instep.strategies.materialize import defer_weights, materialize_module

CPU = torch.device("cpu")


def llama() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    size: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = LlamaConfig(**size, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize("block", ["empty", "meta"])
def test_a_base_is_read_and_adapters_are_drawn(block: str) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    whole = llama()
    tokens = torch.arange(10)[None]
    with init_empty_weights() if block == "empty" else torch.device("meta"):
        base = llama()
        defer_weights(base, dict(whole.named_parameters()))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"]))
    materialize_module(model, CPU)
    assert torch.equal(model(tokens).logits, whole(tokens).logits)  # the adapters change nothing yet
    layer = base.model.layers[0].self_attn.q_proj
    assert layer.lora_A["default"].weight.std() > 0.05
    assert not layer.lora_B["default"].weight.any()


@pytest.mark.transformers
def test_a_model_of_transformers_is_drawn_in_its_own_way() -> None:
    with torch.device("meta"):
        model = llama()
    torch.manual_seed(0)
    materialize_module(model, CPU)
    weights = model.model.layers[0].mlp.up_proj.weight
    assert 0.015 < weights.std() < 0.025  # initializer_range
    assert torch.equal(model.model.rotary_emb.inv_freq, llama().model.rotary_emb.inv_freq)
    assert model.model.norm.weight.eq(1).all()


def test_a_weight_that_nothing_draws_is_named() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drawn, self.forgotten = nn.Parameter(torch.empty(2)), nn.Parameter(torch.empty(2))

        def reset_parameters(self) -> None:
            nn.init.ones_(self.drawn)

    with init_empty_weights():
        model = nn.Sequential(Half())
    with pytest.raises(SettingError, match=r"without values: 0\.forgotten\. Give them"):
        materialize_module(model, CPU)


@pytest.mark.parametrize("index", [torch.arange(4), torch.zeros(4, dtype=torch.int32), torch.tensor(0)])
@pytest.mark.parametrize("resets", [True, False])
def test_a_buffer_of_indices_that_nothing_sets_is_named(index: torch.Tensor, resets: bool) -> None:
    class Picked(nn.Linear):
        index: torch.Tensor

        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("index", index.to(self.weight.device))

        def reset_parameters(self) -> None:
            super().reset_parameters()
            if resets and hasattr(self, "index"):
                self.index.copy_(index)

    with torch.device("meta"):
        model = Picked()
    if resets:
        materialize_module(model, CPU)
        assert torch.equal(model.index, index)
    else:
        with pytest.raises(SettingError, match=r"without values: index\. Give them"):
            materialize_module(model, CPU)
