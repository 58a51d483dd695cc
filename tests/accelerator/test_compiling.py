"""Models that `prepare` compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from instep.accelerator import TorchDynamoPlugin
from instep.errors import SettingError
from tests.accelerator.loops import Net


def test_each_prepared_model_is_compiled(make: Any) -> None:
    accelerator = make(dynamo_backend="EAGER")
    model = Net().eval()  # without dropout
    prepared = accelerator.prepare(model)
    assert prepared._orig_mod is model
    assert accelerator.prepare(prepared) is prepared
    assert torch.equal(prepared(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
    assert list(accelerator.get_state_dict(prepared)) == list(model.state_dict())


def test_blocks_are_compiled_by_themselves(make: Any) -> None:
    plugin = TorchDynamoPlugin("eager", use_regional_compilation=True, fullgraph=True)
    assert plugin.to_kwargs() == {"backend": "eager", "fullgraph": True}
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert make(dynamo_plugin=plugin).prepare(model) is model
    assert all(block._compiled_call_impl is not None for block in model.blocks)
    model = Net()  # without a list of blocks
    assert make(dynamo_plugin=plugin).prepare(model)._orig_mod is model


def test_no_compiles_nothing_and_two_settings_are_refused(make: Any) -> None:
    model = Net()
    assert make(dynamo_plugin=TorchDynamoPlugin()).prepare(model) is model
    with pytest.raises(SettingError, match="not both"):
        make(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin("eager"))
