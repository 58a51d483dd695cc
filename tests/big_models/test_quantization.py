"""Quantized models: the same bits from a file, a model and a checkpoint; training beside them; errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.big_models import BnbQuantizationConfig, TorchAoConfig, init_empty_weights, load_and_quantize_model
from instep.checkpoint.weights import write_plain
from tests.trainer.toys import assert_same

pytest.importorskip("torchao", reason="torchao is not installed")
BNB = pytest.mark.bitsandbytes
FOUR: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp32"}
NF4 = {**FOUR, "bnb_4bit_quant_type": "nf4"}
KINDS: dict[str, tuple[Callable[[], Any], float]] = {  # and the relative error of the output that is allowed
    "int8": (lambda: "int8", 0.01),
    "int8_dynamic": (lambda: TorchAoConfig("int8_dynamic"), 0.02),
    "int4": (lambda: TorchAoConfig("int4"), 0.15),
    "fp8": (lambda: TorchAoConfig("fp8"), 0.06),
    "bnb 8 bit": (lambda: BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32"), 0.02),
    "nf4": (lambda: BnbQuantizationConfig(**NF4), 0.2),
    "nf4 twice": (lambda: BnbQuantizationConfig(**NF4, bnb_4bit_use_double_quant=True), 0.2),
    "fp4": (lambda: BnbQuantizationConfig(**FOUR), 0.25),
}
EVERY = [pytest.param(kind, marks=() if kind in ("int8", "int8_dynamic", "int4", "fp8") else BNB) for kind in KINDS]


class Net(nn.Module):
    """A small language model with tied embeddings."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(50, 64)
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("places", torch.arange(3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.embedding(tokens)).relu()))


def empty() -> Net:
    with init_empty_weights():
        return Net().eval()


def save(model: nn.Module, path: Path) -> Path:
    write_plain({name: value for name, value in model.state_dict().items() if name != "head.weight"}, path)
    return path


TOKENS = torch.arange(20).view(2, 10)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", EVERY)
def test_a_model_has_the_same_bits_from_weights_a_file_and_a_state_dict(kind: str, tmp_path: Path) -> None:
    make, error = KINDS[kind]
    plain = Net().eval()
    expected = plain(TOKENS)
    model = load_and_quantize_model(empty(), make(), save(plain, tmp_path / "float.safetensors"))
    with torch.no_grad():
        got = model(TOKENS)
    assert 0 < (got - expected).norm() / expected.norm() < error
    assert model.head.weight is model.embedding.weight
    assert type(model.head) is nn.Linear
    assert torch.equal(load_and_quantize_model(Net().eval(), make())(TOKENS), got)
    state = model.state_dict()
    assert {type(value) for value in state.values()} == {Tensor}

    again = load_and_quantize_model(empty(), make(), save(model, tmp_path / "quantized.safetensors"))
    assert torch.equal(again(TOKENS), got)
    assert_same(dict(again.state_dict()), dict(state))
    other = load_and_quantize_model(Net(seed=1).eval(), make())
    assert not torch.equal(other(TOKENS), got)
    other.load_state_dict(state)
    assert torch.equal(other(TOKENS), got)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"first\.weight"):
        other.load_state_dict(plain.state_dict())
    assert_same(
        {name: other.state_dict()[name] for name in state if "first" in name},
        {n: before[n] for n in state if "first" in n},
    )
