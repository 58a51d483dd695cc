"""What comes off a model, and what stays on."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from instep.accelerator import convert_outputs_to_fp32, extract_model_from_parallel
from tests.accelerator.loops import Net


def test_a_foreign_wrapper_comes_off_and_a_compile_stays_on(make: Any) -> None:
    model = nn.Linear(2, 2)
    wrapped = DataParallel(model)
    compiled: Any = torch.compile(wrapped, backend="eager")
    for unwrap in (make().unwrap_model, extract_model_from_parallel):
        kept: Any = unwrap(compiled)
        assert kept._orig_mod is model
        assert compiled._orig_mod is wrapped, "what still trains keeps its wrapper"
        assert torch.equal(kept(torch.ones(1, 2)), model(torch.ones(1, 2)))
        assert unwrap(compiled, keep_torch_compile=False) is unwrap(wrapped) is model


def test_wrappers_inside_come_off_where_that_is_asked_for() -> None:
    inner = nn.Linear(2, 2)
    model = nn.Sequential(DataParallel(inner))
    assert extract_model_from_parallel(model)[0] is not inner
    assert extract_model_from_parallel(model, recursive=True)[0] is inner


def test_a_forward_gives_float32_until_that_is_taken_off() -> None:
    model = Net().bfloat16()
    model.forward = convert_outputs_to_fp32(model.forward)  # pyright: ignore
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    assert model(x).dtype == torch.float32
    plain = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert plain(x).dtype == torch.bfloat16
    assert pickle.loads(pickle.dumps(plain))(x).dtype == torch.bfloat16
