"""Attention over sequences of which each rank has a part is attention over the whole sequences."""

from __future__ import annotations

import warnings
from collections import UserDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from instep.errors import DataError, HookError, SettingError
from instep.strategies.context_parallel import ContextParallel, RingAttention, sequence_positions
from tests.helpers.spawn import run_ranks

BATCH, HEADS, LENGTH, SIZE = 2, 4, 8, 3
attention = F.scaled_dot_product_attention


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def of_rank(rank: int, kind: type[ContextParallel] = ContextParallel, size: int = 2) -> ContextParallel:
    mesh: Any = SimpleNamespace(get_local_rank=lambda: rank, size=lambda: size)
    return kind(mesh)


# ---- cutting batches


def test_every_tensor_that_has_the_dimension_is_cut():
    tokens, labels, name = torch.arange(8).reshape(2, 4), torch.arange(2), "text"
    parts = [of_rank(rank).split((tokens, {"labels": labels, "name": name}), 1) for rank in (0, 1)]
    assert [it[0].tolist() for it in parts] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert all(it[1]["labels"].tolist() == [0, 1] and it[1]["name"] == "text" for it in parts)


def test_tensors_are_cut_by_key_or_index():
    features = torch.arange(12).reshape(4, 3)
    assert of_rank(1).split({"x": features, "y": features}, {"x": 0})["x"].tolist() == [[6, 7, 8], [9, 10, 11]]
    for batch in ([features, features], Pair(features, features), UserDict({0: features, 1: features})):
        parts = of_rank(1).split(batch, {1: 0})
        assert type(parts) is type(batch)
        assert (parts[0].shape, parts[1].shape, batch[1].shape) == ((4, 3), (2, 3), (4, 3))
    with pytest.raises(DataError, match=r"sequence_dim={'token': 1} names nothing in the batch of \['tokens'\]"):
        of_rank(1).split({"tokens": features}, {"token": 1})


def test_a_sequence_that_does_not_divide_is_refused():
    with pytest.raises(DataError, match="a sequence of 5 cannot be cut into 2 equal parts"):
        of_rank(0).split(torch.zeros(2, 5), 1)
    with pytest.raises(DataError, match="a sequence of 6 cannot be cut into 4 equal parts"):
        of_rank(0, RingAttention).split(torch.zeros(2, 6), 1)


def test_positions_are_those_of_the_part():
    assert sequence_positions(3).tolist() == [0, 1, 2]
    with of_rank(1).attention():
        assert sequence_positions(3).tolist() == [3, 4, 5]
        with of_rank(0).attention():  # a backward within the step
            assert sequence_positions(3).tolist() == [3, 4, 5]
        assert F.scaled_dot_product_attention is not attention
    assert F.scaled_dot_product_attention is attention
    assert sequence_positions(3).tolist() == [0, 1, 2]


def test_a_step_without_attention_is_refused():
    step = of_rank(0).step(lambda batch, batch_idx: batch.softmax(-1).sum(), 1)
    with pytest.raises(HookError, match=r"cp=2: the step did not call torch\.nn\.functional\.scaled_dot_product"):
        step(torch.zeros(2, 4), 0)
    assert F.scaled_dot_product_attention is attention


# ---- attention


class Encoder(nn.Module):
    """torch's own encoder layer, whose fused kernel for evaluation would pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(HEADS * SIZE, HEADS, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attend(parallel: ContextParallel | None, key_heads: int = HEADS, again: bool = False, **options: Any) -> Any:
    """The output and the gradients of an attention, those of this rank's part of the sequence."""

    def part(tensor: Tensor) -> Tensor:
        return tensor if parallel is None else parallel.part(tensor, -2)

    whole = [make(BATCH, heads, LENGTH, SIZE, seed=i) for i, heads in enumerate((HEADS, key_heads, key_heads))]
    leaves = [part(it).clone().requires_grad_() for it in whole]
    weights = part(make(BATCH, HEADS, LENGTH, SIZE, seed=3))

    def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, **options)

    if parallel is None:
        output = compute(*leaves)
        (output * weights).sum().backward()
    else:
        with parallel.attention():
            output = checkpoint(compute, *leaves, use_reentrant=False) if again else compute(*leaves)
        with parallel.attention():
            (output * weights).sum().backward()
    return [output.detach(), *(it.grad for it in leaves)]


def attention_in_ranks() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    warnings.simplefilter("error")
    parallel = ContextParallel(init_device_mesh("cpu", (2,)))

    def agrees(given: dict[str, Any] | None = None, **options: Any) -> None:
        expected = [parallel.part(it, -2) for it in attend(None, **options)]
        for got, wanted in zip(attend(parallel, **{**options, **(given or {})}), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)

    agrees()
    agrees(is_causal=True, scale=0.3)
    agrees(is_causal=True, again=True)  # what a backward computes again has to see the whole sequence too
    agrees(key_heads=2, enable_gqa=True, is_causal=True)
    agrees(key_heads=1, enable_gqa=True)  # fewer than ranks

    rows = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().roll(1, 1).logical_or(torch.eye(LENGTH) == 1)
    agrees(attn_mask=rows)
    agrees(attn_mask=rows, given={"attn_mask": parallel.part(rows, 0)})  # of this rank's queries
    per_head = make(BATCH, HEADS, LENGTH, LENGTH)
    agrees(attn_mask=per_head)
    keys = torch.arange(LENGTH).lt(6).expand(BATCH, 1, 1, LENGTH)
    agrees(attn_mask=keys, given={"attn_mask": parallel.part(keys, -1)})  # of this rank's keys

    bias = per_head.clone().requires_grad_()
    attend(None, attn_mask=bias)
    own_rows = parallel.part(per_head, -2).requires_grad_()
    attend(parallel, attn_mask=own_rows)
    assert bias.grad is not None
    torch.testing.assert_close(own_rows.grad, parallel.part(bias.grad, -2), rtol=0, atol=1e-12)

    half = torch.ones(LENGTH // 2, LENGTH // 2, dtype=torch.bool)
    with pytest.raises(DataError, match=r"an attn_mask of shape \(4, 4\) for this rank's 4 queries and 4 keys"):
        attend(parallel, attn_mask=half.tril())
    with pytest.raises(SettingError, match="cp=2 does not divide the 3 heads"), parallel.attention():
        F.scaled_dot_product_attention(make(1, 3, 2, SIZE), make(1, 3, 2, SIZE), make(1, 3, 2, SIZE))

    torch.manual_seed(0)
    encoder, x = Encoder().eval(), torch.randn(BATCH, LENGTH, HEADS * SIZE)
    with torch.inference_mode():
        whole = encoder(x)
        with parallel.attention():
            torch.testing.assert_close(encoder(parallel.part(x, 1)), parallel.part(whole, 1))

    # The ring's parts are those that torch's own cut makes, and within it positions are right too.
    ring = RingAttention(parallel.mesh)
    buffer = torch.arange(LENGTH)
    with context_parallel(ring.mesh, buffers=[buffer], buffer_seq_dims=[0]):
        assert ring.part(torch.arange(LENGTH), 0).tolist() == buffer.tolist()
    with ring.attention():
        assert sequence_positions(LENGTH // 2).tolist() == ring.part(torch.arange(LENGTH), 0).tolist()
        assert F.scaled_dot_product_attention is not attention
    assert F.scaled_dot_product_attention is attention


@pytest.mark.dist
def test_attention_by_parts_is_that_of_one_process():
    run_ranks(attention_in_ranks, 2)
