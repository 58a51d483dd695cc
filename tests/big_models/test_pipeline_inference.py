from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from instep.big_models import init_empty_weights, load_checkpoint_in_model, prepare_pippy
from instep.checkpoint import write_tensors
from instep.checkpoint.lazy import LazyTensor
from instep.errors import DataError, SettingError, UsageError
from instep.state import PartialState
from tests.helpers.spawn import run_ranks

needs_torch = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.11", reason="prepare_pippy needs torch 2.11 for several processes"
)


class Skips(nn.Module):
    """What makes a cut hard: a tied weight, an input that a late block uses, values that skip stages, tuples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.arange(8.0), persistent=False)

    def forward(self, ids: Tensor, mask: Tensor | None = None, double: bool = False) -> dict[str, Any]:
        first = x = self.embed(ids) + torch.arange(ids.shape[1])[:, None]
        left, right = x.chunk(2, dim=-1)
        for block in self.blocks:
            x = block(x).relu()
        if mask is not None:
            x = x * mask[..., None]
        x = x + self.shift + first + torch.cat([right, left], -1)
        return {"logits": self.head(x) * (2 if double else 1), "more": (first, None, x.mean((1, 2)))}


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def _leaves(data: Any) -> list[Tensor]:
    return [data["logits"], data["more"][0], data["more"][2]]


def _two_ranks() -> dict[str, Any]:
    state = PartialState(cpu=True)
    whole, model, named = Skips(), Skips(), Skips()
    seen: dict[str, Any] = {"same": []}
    prepare_pippy(model, gather_output=True)
    prepare_pippy(named, ["blocks.3"], num_chunks=3)
    ids = torch.arange(70).reshape(7, 10) % 11
    mask = (ids > 2).float()
    for rows, columns, given in [(7, 10, mask), (1, 10, mask), (5, 10, mask), (3, 6, mask[:1])]:
        batch = ids[:rows, :columns], given[:rows, :columns]
        expected = whole(*batch, double=True)
        got = model(*batch, double=True) if state.is_main_process else model()  # the others need no inputs
        assert list(got) == ["logits", "more"]
        assert got["more"][1] is None
        torch.testing.assert_close(_leaves(got), _leaves(expected))
    got = named(ids)
    assert (got is not None) == state.is_last_process  # as Accelerate's
    if got is not None:
        torch.testing.assert_close(_leaves(got), _leaves(whole(ids)))
    seen["points"] = model.hf_split_points, named.hf_split_points
    for error, call in {
        "scalar": lambda: prepare_pippy(_Loss(), ["b"])(ids[:2].float()),
        "sizes": lambda: model(ids, mask[:3]),
        "nothing": lambda: model(3),
        "branches": lambda: prepare_pippy(nn.Sequential(nn.Linear(8, 8), Branches()))(torch.ones(2, 8)),
        "order": lambda: prepare_pippy(Skips(), ["embed"])(ids),
        "count": lambda: prepare_pippy(Skips(), ["blocks.1", "blocks.2"]),
        "name": lambda: prepare_pippy(Skips(), ["blocks.9"]),
        "small": lambda: prepare_pippy(nn.Linear(8, 8))(torch.ones(2, 8)),
    }.items():
        with pytest.raises((DataError, SettingError, UsageError)) as caught:
            call()
        seen[error] = str(caught.value)
    return seen


class _Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(10, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).mean()


def _from_checkpoint(file: Path) -> dict[str, Any]:
    PartialState(cpu=True)
    mapped: list[str] = []
    plain = LazyTensor.map
    ids = torch.arange(20).reshape(2, 10) % 11
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LazyTensor, "map", lambda stored: (mapped.append(stored.parts[0].name), plain(stored))[1])
        with init_empty_weights():
            model = Skips()
            load_checkpoint_in_model(model, file)
        before = list(mapped)
        prepare_pippy(model, example_args=(ids,), gather_output=True)
    assert not before
    return {"read": sorted(mapped), "output": _leaves(model(ids)), "expected": _leaves(Skips()(ids))}


@pytest.mark.dist
@needs_torch
def test_each_rank_reads_the_weights_of_its_stage(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_tensors(file, {name: tensor for name, tensor in Skips().state_dict().items() if name != "head.weight"})
    first, last = run_ranks(_from_checkpoint, 2, file)
    assert first["read"] == ["blocks.0.bias", "blocks.0.weight", "blocks.1.bias", "blocks.1.weight", "embed.weight"]
    assert last["read"] == ["blocks.2.bias", "blocks.2.weight", "blocks.3.bias", "blocks.3.weight", "embed.weight"]
    for rank in (first, last):
        torch.testing.assert_close(rank["output"], rank["expected"])


@pytest.mark.dist
@needs_torch
def test_stages_on_two_ranks_give_what_the_model_does_for_any_number_of_samples() -> None:
    first, last = run_ranks(_two_ranks, 2)
    assert first == last
    assert first["points"] == (["blocks.2"], ["blocks.3"])
    for case, text in {
        "scalar": "has the shape (), without a batch dimension",
        "sizes": "first dimension is the batch, or 1 for what all samples share; got the sizes [3, 7]",
        "nothing": "must be tensors whose first dimension is the batch",
        "branches": "torch.export cannot trace Sequential",
        "order": "the first not at its very beginning",
        "count": "name the 1 modules that the stages of 2 processes but the first one begin with",
        "name": "the model has no 'blocks.9'",
        "small": "2 stages, one for each process, cannot be made of the 1 parts",
    }.items():
        assert text in first[case]


def test_a_process_alone_runs_the_whole_model(tmp_path: Path) -> None:
    ids = torch.zeros(3, 4, dtype=torch.long)
    expected = Skips()(ids)["logits"]
    write_tensors(tmp_path / "model.safetensors", Skips().state_dict())
    with init_empty_weights():
        model = Skips()
        load_checkpoint_in_model(model, tmp_path)
    assert torch.equal(prepare_pippy(model, example_args=(ids,))(ids)["logits"], expected)
    assert not model.training


def test_what_cannot_be_a_pipeline_is_refused() -> None:
    with pytest.raises(SettingError, match="num_chunks=0 must be at least 1"):
        prepare_pippy(Skips(), num_chunks=0)
    with pytest.raises(SettingError, match=r"embed\.weight, blocks\.0\.weight.* have no values.*inside the block"):
        prepare_pippy(Skips().to("meta"))
    model = Skips()
    model.hf_device_map = {"embed": 0, "blocks": "cpu"}  # type: ignore[assignment]
    with pytest.raises(SettingError, match="has a device map"):
        prepare_pippy(model)
