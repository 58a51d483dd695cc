"""One part of a module whose activations are made again in the backward."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from instep.activations.recompute import contexts_of, recompute
from instep.errors import SettingError

aten = torch.ops.aten


class Operations(TorchDispatchMode):
    """Counter of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Part(nn.Module):
    """A product, a norm of the batch, two masks and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(nn.functional.gelu(self.norm(self.up(x))), 0.5)
        return self.down(nn.functional.dropout(x, 0.5)).relu()


def gradients(change: Callable[[nn.Module], Any] = lambda part: None) -> tuple[Part, list[Tensor], Counter[str]]:
    torch.manual_seed(0)
    part = Part()
    change(part)
    with Operations() as seen:
        for _ in range(2):
            part(torch.randn(16, 8)).sum().backward()
    return part, [p.grad for p in part.parameters() if p.grad is not None], seen.counts


@pytest.mark.parametrize(
    ("save", "once", "twice"),
    [
        (None, [], ["addmm", "gelu", "native_dropout"]),
        ("ops", ["addmm"], ["gelu", "native_dropout"]),
        ([aten.gelu.default], ["gelu"], ["addmm", "native_dropout"]),
        ([aten.native_dropout.default, aten.addmm.default], ["addmm"], ["gelu", "native_dropout"]),
    ],
)
def test_a_second_forward_changes_no_gradient_mask_or_statistic(save: Any, once: list[str], twice: list[str]) -> None:
    plain, expected, counts = gradients()
    part, found, again = gradients(lambda part: recompute(part, contexts_of(save)))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    state = plain.state_dict()
    assert list(part.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in part.state_dict().items())
    assert part.norm.momentum == 0.1
    assert all(again[name] == counts[name] for name in once)
    assert all(again[name] == 2 * counts[name] for name in twice)


def test_averages_of_batch_statistics_count_each_batch_once() -> None:
    def cumulative(part: Any) -> None:
        part.norm.momentum = None

    plain, _, _ = gradients(cumulative)
    part, _, _ = gradients(lambda part: (cumulative(part), recompute(part)))
    assert part.norm.num_batches_tracked == 2
    assert torch.equal(part.norm.running_var, plain.norm.running_var)


class Normed(nn.Module):
    """A convolution under a spectral norm, and a norm with statistics that is put in after the part was changed."""

    def __init__(self, spectral: Any) -> None:
        super().__init__()
        self.turn, self.norm = spectral(nn.Conv1d(4, 4, 1)), nn.Identity()

    def forward(self, x: Tensor, *, debug: bool = False, context_fn: Any = None) -> Tensor:
        assert debug
        assert context_fn == "mine"
        return self.norm(self.turn(x)).tanh()


@pytest.mark.parametrize("spectral", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_buffers_of_other_norms_change_once_and_a_forwards_own_keywords_reach_it(spectral: Any) -> None:
    def run(again: bool) -> Normed:
        torch.manual_seed(0)
        part = Normed(spectral)
        if again:
            recompute(part)
        part.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        for _ in range(2):  # of two forwards before a backward each has vectors of its own
            first, second = (part(torch.randn(3, 4, 5), debug=True, context_fn="mine") for _ in range(2))
            loss = first.sum() - 2 * second.square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        return part

    plain, part = run(False), run(True)
    for (name, a), b in zip(plain.named_parameters(), part.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    state = plain.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in part.state_dict().items())


def test_a_copy_runs_its_own_weights() -> None:
    part = Part().eval()
    recompute(part)
    twin = copy.deepcopy(part)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    x = torch.randn(4, 8)
    assert twin(x).abs().sum() == 0
    assert part(x).abs().sum() > 0


def test_a_part_is_recomputed_once_and_gets_its_forward_back() -> None:
    part = Part()
    own = part.forward
    undo = recompute(part)
    with pytest.raises(SettingError, match="a Part would be recomputed twice"):
        recompute(part)
    undo()
    assert part.forward == own
    assert "forward" not in vars(part)
    recompute(part)()
    assert "forward" not in vars(part)


def test_a_forward_that_was_compiled_stays_recomputed_and_the_next_run_takes_it_as_it_is() -> None:
    part = Part()
    undo = recompute(part)
    compiled = part.forward = partial(part.forward)  # as a strategy leaves it
    for _ in range(2):
        undo()
        undo = recompute(part)
        assert part.forward is compiled
        with pytest.raises(SettingError, match="a Part would be recomputed twice"):
            recompute(part)


@pytest.mark.parametrize("save", ["all", [], ["aten.mm"], torch.ops.aten.mm.default, [torch.ops.aten.mm]])
def test_what_is_kept_is_ops_or_operators(save: Any) -> None:
    with pytest.raises(SettingError, match="save"):
        contexts_of(save)
