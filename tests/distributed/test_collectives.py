from __future__ import annotations

from typing import Any

import pytest
import torch

from instep.distributed import all_reduce_, broadcast, gather, pad_across_processes, reduce
from instep.errors import DataError, DistributedError, SettingError
from instep.state import PartialState
from tests.helpers.spawn import run_ranks

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
]
DTYPES += [torch.uint8, torch.bool]


def value_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[rank, 1], [0, rank + 2]]).to(dtype)


# One process.


def test_a_process_alone_gets_what_several_would() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    gathered = gather({"x": x, "n": torch.tensor(3), "none": None})
    assert gathered["x"].tolist() == [1.0, 2.0]
    assert not gathered["x"].requires_grad
    assert gathered["n"].shape == (1,)
    assert gathered["none"] is None
    assert reduce(torch.tensor([1, 2]), "mean").dtype is torch.float64
    assert reduce(torch.tensor([True]), "sum").dtype is torch.int64
    assert broadcast((x,))[0].tolist() == [1.0, 2.0]
    assert pad_across_processes(x) is x
    assert all_reduce_(gathered["x"], "mean") is gathered["x"]


def test_reduce_gives_a_new_tensor() -> None:
    x = torch.ones(2)
    result = reduce(x, "sum")
    result += 1
    assert x.tolist() == [1.0, 1.0]
    assert reduce(x, "none") is x


def test_wrong_arguments_are_refused() -> None:
    for function in (reduce, all_reduce_):
        with pytest.raises(SettingError, match="op='avg' is not known"):
            function(torch.ones(1), "avg")
    for function in (gather, reduce, broadcast, pad_across_processes):
        with pytest.raises(DataError, match=f"{function.__name__} takes tensors, but got a float"):
            function({"a": 1.5})


# Several.


def _gathering() -> dict[str, Any]:
    rank = PartialState(cpu=True, timeout=40).process_index
    report: dict[str, Any] = {str(dtype): gather(value_of(rank, dtype)) for dtype in DTYPES}
    report["nested"] = gather({"loss": torch.tensor(float(rank)), "rest": [torch.full((2,), rank), None]})
    report["empty"] = gather(torch.empty(0, 3))
    report["strided"] = gather(torch.arange(4).reshape(2, 2).T + rank)
    graph = torch.ones(1, requires_grad=True) * 2
    report["detached"] = not gather(graph).requires_grad
    padded = pad_across_processes({"x": torch.full((rank + 1, 2), rank), "n": torch.tensor(1)}, pad_index=-1)
    report["padded"] = gather(padded)["x"]
    report["padded first"] = pad_across_processes(torch.full((2, rank + 1), rank), dim=-1, pad_index=9, pad_first=True)
    report["broadcast"] = broadcast({"x": torch.full((2, 2), rank).T, "b": torch.tensor(rank == 1)}, from_process=1)
    mine = torch.full((2,), rank)
    broadcast(mine, from_process=1)
    report["untouched"] = mine
    return report


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3])
def test_gather_pad_and_broadcast(world: int) -> None:
    for rank, report in enumerate(run_ranks(_gathering, world)):
        for dtype in DTYPES:
            expected = torch.cat([value_of(other, dtype) for other in range(world)])
            assert report[str(dtype)].dtype is dtype
            assert torch.equal(report[str(dtype)], expected)
        assert report["nested"]["loss"].tolist() == [float(other) for other in range(world)]
        assert report["nested"]["rest"][0].tolist() == [other for other in range(world) for _ in range(2)]
        assert report["nested"]["rest"][1] is None
        assert report["empty"].shape == (0, 3)
        assert report["strided"].tolist() == [[a + r, b + r] for r in range(world) for a, b in ((0, 2), (1, 3))]
        assert report["detached"]
        rows = [[other if row <= other else -1] * 2 for other in range(world) for row in range(world)]
        assert report["padded"].tolist() == rows
        assert report["padded first"].tolist() == [[9] * (world - rank - 1) + [rank] * (rank + 1)] * 2
        assert report["broadcast"]["x"].tolist() == [[1, 1], [1, 1]]
        assert bool(report["broadcast"]["b"])
        assert report["untouched"].tolist() == [rank, rank]


def _reducing() -> dict[str, Any]:
    rank = PartialState(cpu=True, timeout=40).process_index
    report: dict[str, Any] = {}
    for op in ("sum", "mean", "min", "max", "none"):
        for dtype in DTYPES:
            mine = value_of(rank, dtype)
            report[f"{op} {dtype}"] = reduce(mine, op)
            assert torch.equal(mine, value_of(rank, dtype)), "the input was changed"
    report["large mean"] = reduce(torch.tensor(2**52 + rank), "mean")
    report["half"] = reduce(torch.tensor([40000.0 + rank * 32], dtype=torch.float16), "mean")
    report["nested"] = reduce([torch.tensor(float(rank)), {"empty": torch.empty(0)}], "sum")
    bare = torch.tensor([float(rank), 1.0], dtype=torch.float64)
    report["bare"] = all_reduce_(bare, "mean") is bare, bare
    return report


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3])
def test_reduce_agrees_with_the_reduction_of_the_stacked_values(world: int) -> None:
    for rank, report in enumerate(run_ranks(_reducing, world)):
        for dtype in DTYPES:
            stacked = torch.stack([value_of(other, dtype) for other in range(world)])
            whole = not dtype.is_floating_point
            assert torch.equal(report[f"sum {dtype}"], stacked.sum(0))
            assert report[f"sum {dtype}"].dtype is (torch.int64 if whole else dtype)
            mean = stacked.double().mean(0)
            assert torch.allclose(report[f"mean {dtype}"].double(), mean, atol=0 if whole else 1e-2)
            assert report[f"mean {dtype}"].dtype is (torch.float64 if whole else dtype)
            for op, extreme in (("min", stacked.amin(0)), ("max", stacked.amax(0))):
                assert torch.equal(report[f"{op} {dtype}"], extreme)
                assert report[f"{op} {dtype}"].dtype is dtype
            assert torch.equal(report[f"none {dtype}"], value_of(rank, dtype))
        assert float(report["large mean"]) == (world * 2**52 + sum(range(world))) / world
        assert torch.isfinite(report["half"]).all()
        assert float(report["nested"][0]) == sum(range(world))
        assert report["bare"][0]
        assert report["bare"][1].tolist() == [sum(range(world)) / world, 1.0]


def _disagreeing() -> list[str]:
    rank = PartialState(cpu=True, timeout=40).process_index
    odd = rank == 1
    calls = [
        lambda: gather(torch.ones(2 if odd else 1)),
        lambda: gather({"b" if odd else "a": torch.ones(1)}),
        lambda: reduce(torch.ones(1, dtype=torch.float64 if odd else torch.float32)),
        lambda: reduce(torch.ones(1), "sum" if odd else "mean"),
        lambda: gather(torch.ones(1)) if odd else reduce(torch.ones(1)),
        lambda: broadcast(torch.ones(1), from_process=rank),
        lambda: pad_across_processes([torch.ones(1)] * (rank + 1)),
    ]
    texts = []
    for call in calls:
        try:
            call()
            texts.append("no error")
        except DistributedError as error:
            texts.append(str(error))
    texts.append(f"and goes on: {float(reduce(torch.ones(1), 'sum'))}")
    return texts


@pytest.mark.dist
def test_ranks_that_disagree_all_get_an_error_that_says_in_what() -> None:
    for texts in run_ranks(_disagreeing, 2):
        assert "rank 0: gather, tensor: torch.float32 (1,)\n  rank 1: gather, tensor: torch.float32 (2,)" in texts[0]
        assert "rank 0: gather, ['a']: torch.float32 (1,)\n  rank 1: gather, ['b']" in texts[1]
        assert "rank 1: reduce(mean), tensor: torch.float64 (1,)" in texts[2]
        assert "rank 0: reduce(mean)" in texts[3]
        assert "rank 1: reduce(sum)" in texts[3]
        assert "rank 1: gather" in texts[4]
        assert "rank 1: broadcast(from_process=1)" in texts[5]
        assert "another number of tensors on each rank: [1, 2] by rank" in texts[6]
        assert texts[7] == "and goes on: 2.0"
