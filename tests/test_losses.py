"""A loss that never holds all logits is the plain loss, with its gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from instep.errors import SettingError
from instep.losses import linear_cross_entropy
from tests.helpers.spawn import run_ranks

SETTINGS = [
    {"label_smoothing": smoothing, "z_loss": z_loss, "reduction": reduction}
    for smoothing, z_loss, reduction in itertools.product((0.0, 0.1), (0.0, 0.01), ("mean", "sum"))
]


def inputs(dtype: torch.dtype = torch.float64, words: int = 11) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, and targets of which some do not count."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()
        for shape in ((3, 7, 5), (words, 5), (words,))
    )
    target = torch.randint(words, (3, 7), generator=generator)
    target[0, :3] = -100
    return x, weight, bias, target


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, settings: dict[str, Any]) -> Tensor:
    logits, counts = F.linear(x, weight, bias).flatten(0, 1), target.flatten() != -100
    total = F.cross_entropy(logits, target.flatten(), label_smoothing=settings["label_smoothing"], reduction="sum")
    total = total + settings["z_loss"] * (logits.logsumexp(1).square() * counts).sum()
    return total / counts.sum() if settings["reduction"] == "mean" else total


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_loss_and_gradients_are_the_plain_ones(settings: dict[str, Any], biased: bool) -> None:
    x, weight, bias, target = inputs()
    wanted = [x, weight, bias] if biased else [x, weight]
    expected = plain(x, weight, bias if biased else None, target, settings)
    loss = linear_cross_entropy(x, weight, target, bias if biased else None, chunk_tokens=4, **settings)
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(3 * loss, wanted)  # as of a loss that is scaled
    torch.testing.assert_close(found, torch.autograd.grad(3 * expected, wanted))


def test_in_bfloat16_the_logits_are_low_and_the_sums_are_not() -> None:
    x, weight, _, target = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, target)
        expected = F.cross_entropy(F.linear(x, weight).float().flatten(0, 1), target.flatten())
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert (loss.dtype, weight.grad.dtype, x.grad.dtype) == (torch.float32,) * 3  # type: ignore[union-attr]


class Seen(TorchDispatchMode):
    """The largest tensor that any operation has made, and the number of products of matrices."""

    numel = products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        for one in out if isinstance(out, (tuple, list)) else (out,):
            self.numel = max(self.numel, one.numel() if isinstance(one, Tensor) else 0)
        return out


def test_no_tensor_is_larger_than_a_chunk_and_an_evaluation_makes_no_gradient() -> None:
    x, weight = torch.randn(64, 4, requires_grad=True), torch.randn(100, 4, requires_grad=True)
    target = torch.randint(100, (64,))
    with Seen() as seen:
        linear_cross_entropy(x, weight, target, chunk_tokens=8).backward()
    assert (seen.numel, seen.products) == (8 * 100, 8 * 3), "eight chunks: logits, and two gradients"
    with torch.no_grad(), Seen() as seen:
        linear_cross_entropy(x, weight, target, chunk_tokens=8)
    assert seen.products == 8


def cut_vocabulary() -> list[tuple[Tensor, Tensor, Tensor]]:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    results = []
    for settings in SETTINGS:
        x, weight, _, target = inputs()
        cut = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
        loss = linear_cross_entropy(x, cut, target, chunk_tokens=4, **settings)
        loss.backward()
        results.append((loss.detach(), x.grad, cut.grad.full_tensor()))  # type: ignore[union-attr]
    return results  # type: ignore[return-value]


@pytest.mark.dist
def test_a_vocabulary_that_ranks_share_gives_the_same_loss_and_gradients() -> None:
    for found in run_ranks(cut_vocabulary, 2):
        for settings, (loss, of_x, of_weight) in zip(SETTINGS, found, strict=True):
            x, weight, _, target = inputs()
            expected = plain(x, weight, None, target, settings)
            expected.backward()
            torch.testing.assert_close((loss, of_x, of_weight), (expected.detach(), x.grad, weight.grad))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"reduction": "none"}, "reduction"),
        ({"label_smoothing": 2}, "a number from 0 to 1"),
        ({"z_loss": -1}, "at least 0"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"target": torch.zeros(3, 6, dtype=torch.int64)}, r"target \(3, 6\)"),
    ],
)
def test_linear_cross_entropy_refuses_arguments_that_do_not_fit(change: dict[str, Any], text: str) -> None:
    x, weight, _, target = inputs()
    with pytest.raises(SettingError, match=text):
        linear_cross_entropy(x, weight, **{"target": target, **change})
