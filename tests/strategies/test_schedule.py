from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from instep.errors import DataError, HookError, UsageError
from instep.state import PartialState
from instep.strategies.pipeline.runner import Micro, Pending, Runner
from instep.strategies.pipeline.split import Cut
from tests.helpers.spawn import run_ranks
from tests.strategies import PIPES

ROWS = [5, 4, 9, 1, 3]  # more than the first batch's, and fewer


class Net(nn.Module):
    """Two inputs, a part that counts batches, and a nest as output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def begin(self, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x) + shift, shift

    def middle(self, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x.flatten(0, -2)).view_as(x), shift

    def end(self, x: Tensor, shift: Tensor) -> Any:
        return {"scores": self.last(x), "rest": [shift.sum(-1)]}

    def forward(self, *inputs: Any) -> Any:
        return self.end(*self.middle(*self.begin(*inputs)))

    def pipeline_stages(self) -> list[Any]:
        return [(self.begin, self.first), (self.middle, self.norm), (self.end, self.last)]


def inputs(rows: int, *more: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, *more, 3, generator=generator), torch.randn(rows, *more, 1, generator=generator)


def runner(kind: str, alone: bool = True) -> tuple[Net, Runner]:
    module, group = Net(), dist.group.WORLD
    assert group is not None
    cut = Cut(module, 2, (), dist.get_rank(), 2)
    return module, Runner(kind, cut.stages, 2, 2, group, torch.device("cpu"), alone)


def loss_of(micro: Micro, output: Any, index: int) -> Tensor:
    samples = micro.samples(index)
    return output["scores"].square().mean() * ((samples.stop - samples.start) / micro.batch)


def outputs_and_gradients() -> dict[str, Any]:
    warnings.simplefilter("error")
    PartialState(cpu=True)
    found: dict[str, Any] = {}
    for kind in ("1f1b", "gpipe"):
        module, pipe = runner(kind)
        module.eval()
        found[kind] = [pipe.evaluate(inputs(rows)) for rows in ROWS]
        found[f"{kind}, longer"] = pipe.evaluate(inputs(4, 7))
        gradients = []
        for rows in ROWS:
            pipe.train(inputs(rows), loss_of)
            pipe.evaluate(inputs(rows))  # as a hook in the middle of a window may
            gradients.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
            module.zero_grad()
        found[f"{kind}, gradients"] = gradients
    module, pipe = runner("gpipe", alone=False)
    pipe.evaluate(inputs(4))
    found["counted"] = [int(it) for name, it in module.named_buffers() if name == "norm.num_batches_tracked"]
    pipe.train(inputs(4, 7), loss_of)  # another kind of use may have other lengths
    for name, wrong in (("length", inputs(4, 5)), ("rows", (torch.ones(3, 3), torch.ones(2, 1))), ("none", ())):
        try:
            pipe.evaluate(wrong)
        except (DataError, HookError) as error:
            found[name] = str(error)
    return found


@pytest.mark.dist
@pytest.mark.skipif(not PIPES, reason="pp needs torch 2.13")
def test_outputs_and_gradients_are_those_of_one_process() -> None:
    ranks = run_ranks(outputs_and_gradients, 2)
    alone = Net().eval()
    for kind in ("1f1b", "gpipe"):
        for rank in ranks:
            for rows, found in zip(ROWS, rank[kind], strict=True):
                torch.testing.assert_close(found, alone(*inputs(rows)))
            torch.testing.assert_close(rank[f"{kind}, longer"], alone(*inputs(4, 7)))
        for number, rows in enumerate(ROWS):
            alone.zero_grad()
            alone(*inputs(rows))["scores"].square().mean().backward()
            found = ranks[0][f"{kind}, gradients"][number] | ranks[1][f"{kind}, gradients"][number]
            torch.testing.assert_close(found, {name: p.grad for name, p in alone.named_parameters()})
    assert ranks[0]["counted"] + ranks[1]["counted"] == [2]  # micro-batches; finding shapes counts nothing
    for rank in ranks:
        assert "must keep their shape, but for the number of samples" in rank["length"]
        assert "whose first dimension is the batch; got sizes [2, 3]" in rank["rows"]
        assert "got sizes []" in rank["none"]


def test_what_a_micro_batch_stands_for() -> None:
    assert [Micro(3, 7, ()).samples(i) for i in range(4)] == [slice(0, 3), slice(3, 6), slice(6, 7), slice(7, 7)]


@pytest.mark.parametrize(
    "use",
    [
        lambda it: it.mean(),
        lambda it: it["logits"],
        lambda it: torch.stack([it, it]),
        lambda it: nn.functional.cross_entropy(it, torch.zeros(1, dtype=torch.long)),
    ],
)
def test_a_pending_output_cannot_be_used(use: Any) -> None:
    with pytest.raises(UsageError, match=r"training_step uses the output of self\(...\)"):
        use(Pending((torch.ones(1),)))
