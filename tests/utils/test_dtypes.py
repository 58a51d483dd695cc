"""Complex numbers keep their imaginary parts when a module gets another precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from instep import TrainModule
from instep.big_models import attach_layerwise_casting_hooks
from instep.utils.dtypes import cast_module
from tests.trainer.toys import Toy, loader, quiet

ROTATIONS = torch.polar(torch.ones(3), torch.tensor([0.1, 0.2, 0.3]))  # as rotary embeddings keep them


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor([1 + 2j]))
        self.register_buffer("rotations", ROTATIONS.clone(), persistent=False)
        self.register_buffer("count", torch.tensor(3))


@pytest.mark.parametrize(
    ("dtype", "of_complex"),
    [
        (torch.bfloat16, torch.complex64),
        (torch.float16, torch.complex64),
        (torch.float64, torch.complex128),
        (torch.float32, torch.complex64),
    ],
)
def test_complex_parts_get_the_complex_dtype_of_a_precision(dtype: torch.dtype, of_complex: torch.dtype) -> None:
    module: Any = cast_module(Rotary(), dtype)
    assert module.layer.weight.dtype == module.layer.bias.dtype == dtype
    assert module.rotations.dtype == module.scale.dtype == of_complex
    assert module.count.dtype == torch.int64
    torch.testing.assert_close(module.rotations, ROTATIONS.to(of_complex))
    assert module.scale.item() == 1 + 2j


class Rotates(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rotations", ROTATIONS.clone(), persistent=False)
        self.turned: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.turned = torch.view_as_real(self.rotations.cfloat())
        return super().training_step(batch, batch_idx)


class RotatesLater(Rotates):
    def __init__(self) -> None:
        super().__init__()
        del self.rotations

    def configure_model(self) -> None:
        self.register_buffer("rotations", ROTATIONS.clone(), persistent=False)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "32-true", "bf16-mixed"])
@pytest.mark.parametrize("module", [Rotates, RotatesLater])
def test_a_run_in_any_precision_keeps_rotary_embeddings(module: type[Rotates], precision: Any) -> None:
    model: TrainModule = module()
    quiet(max_steps=1, precision=precision).fit(model, loader())
    torch.testing.assert_close(model.turned, torch.view_as_real(ROTATIONS))


def test_casting_by_layer_keeps_complex_buffers() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_buffer("rotations", ROTATIONS.clone())
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32)
    model(torch.ones(1, 4))
    torch.testing.assert_close(model[0].rotations, ROTATIONS)
