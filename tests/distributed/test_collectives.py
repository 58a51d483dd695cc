"""Collectives on tensors, over 2, 3 and 4 processes; one start of the processes serves all tests of a world size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from instep.distributed import all_reduce_, broadcast, gather, gather_ragged, pad_across_processes, reduce
from instep.errors import DataError, SettingError
from instep.state import PartialState
from tests.distributed.helpers import text_of
from tests.helpers.spawn import run_ranks

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
DTYPES = FLOATS + WHOLE


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
    assert broadcast(x, from_process=1).tolist() == [1.0, 2.0]
    assert pad_across_processes(x) is x
    assert all_reduce_(gathered["x"], "mean") is gathered["x"]


@pytest.mark.parametrize(
    ("rows", "x", "n"), [(None, [1, 2, 3], [7]), (2, [1, 2], [7]), (9, [1, 2, 3], [7]), (0, [], [])]
)
def test_a_process_alone_gives_its_rows(rows: int | None, x: list[int], n: list[int]) -> None:
    data = {"x": torch.tensor([1, 2, 3]), "n": torch.tensor(7), "none": None}
    gathered = gather_ragged(data, rows=rows)
    assert gathered["x"].tolist() == x
    assert gathered["n"].tolist() == n
    assert gathered["none"] is None
    assert data["x"].tolist() == [1, 2, 3]


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
    for function in (gather, gather_ragged, reduce, broadcast, pad_across_processes):
        with pytest.raises(DataError, match=f"{function.__name__} takes tensors, but got a float"):
            function({"a": 1.5})
    with pytest.raises(SettingError, match="rows=-1 must be at least 0"):
        gather_ragged(torch.ones(1), rows=-1)


# Several.


def _gathering(rank: int) -> dict[str, Any]:
    report: dict[str, Any] = {str(dtype): gather(value_of(rank, dtype)) for dtype in DTYPES}
    report["nested"] = gather({"loss": torch.tensor(float(rank)), "rest": [torch.full((2,), rank), None]})
    report["empty"] = gather(torch.empty(0, 3))
    report["strided"] = gather(torch.arange(4).reshape(2, 2).T + rank)
    graph = torch.ones(1, requires_grad=True) * 2
    report["detached"] = not gather(graph).requires_grad
    padded = pad_across_processes({"x": torch.full((rank + 1, 2), rank), "n": torch.tensor(1)}, pad_index=-1)
    report["padded"] = gather(padded)["x"]
    report["padded first"] = pad_across_processes(torch.full((2, rank + 1), rank), dim=-1, pad_index=9, pad_first=True)
    report["padded bool"] = pad_across_processes(torch.ones(rank + 1, dtype=torch.bool))
    report["broadcast"] = broadcast({"x": torch.full((2, 2), rank).T, "b": torch.tensor(rank == 1)}, from_process=1)
    report["broadcast dtypes"] = broadcast([value_of(rank, dtype) for dtype in DTYPES], from_process=1)
    mine = torch.full((2,), rank)
    broadcast(mine, from_process=1)
    report["untouched"] = mine
    return report


def _ragged(rank: int) -> dict[str, Any]:
    mine = torch.full((rank, 2), rank)  # none on rank 0
    report: dict[str, Any] = {str(dtype): gather_ragged(mine.to(dtype)) for dtype in DTYPES}
    report["nested"] = gather_ragged({"x": mine, "y": [torch.arange(rank).double(), None], "loss": torch.tensor(rank)})
    report["replayed"] = gather_ragged({"x": mine + 10, "loss": torch.tensor(rank)}, rows=0 if rank == 1 else None)
    report["first rows"] = gather_ragged(torch.arange(5) + 10 * rank, rows=rank + 1)
    report["nobody"] = gather_ragged(mine, rows=0)
    report["strided"] = gather_ragged(torch.arange(6).reshape(2, 3).T[: rank + 1])
    report["no columns"] = gather_ragged(torch.empty(rank, 0))
    report["even"] = gather_ragged(torch.full((2,), rank))
    report["many"] = gather_ragged([torch.full((rank + i % 2,), i) for i in range(40)])  # more than one message holds
    report["detached"] = not gather_ragged(torch.ones(rank + 1, requires_grad=True) * 2).requires_grad
    return report


def _reducing(rank: int) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for op in ("sum", "mean", "min", "max", "none"):
        for dtype in DTYPES:
            mine = value_of(rank, dtype)
            report[f"{op} {dtype}"] = reduce(mine, op)
            assert torch.equal(mine, value_of(rank, dtype)), "the input was changed"
    report["large mean"] = reduce(torch.tensor(2**52 + rank), "mean")
    report["half"] = reduce(torch.tensor([40000.0 + rank * 32], dtype=torch.float16), "mean")
    report["nested"] = reduce([torch.tensor(float(rank)), {"empty": torch.empty(0)}], "sum")
    report["strided"] = reduce(torch.arange(4.0).reshape(2, 2).T + rank, "max")
    bare = torch.tensor([float(rank), 1.0], dtype=torch.float64)
    report["bare"] = all_reduce_(bare, "mean") is bare, bare
    return report


def _disagreeing(rank: int) -> dict[str, str]:
    odd = rank == 1
    calls: dict[str, Callable[[], Any]] = {
        "shape": lambda: gather(torch.ones(2 if odd else 1)),
        "reduced shape": lambda: reduce(torch.ones(2 if odd else 1)),
        "broadcast shape": lambda: broadcast(torch.ones(2 if odd else 1)),
        "keys": lambda: gather({"b" if odd else "a": torch.ones(1)}),
        "dtype": lambda: reduce(torch.ones(1, dtype=torch.float64 if odd else torch.float32)),
        "op": lambda: reduce(torch.ones(1), "sum" if odd else "mean"),
        "operation": lambda: gather(torch.ones(1)) if odd else reduce(torch.ones(1)),
        "source": lambda: broadcast(torch.ones(1), from_process=int(odd)),
        "padded": lambda: pad_across_processes([torch.ones(1)] * (1 + odd)),
        "padded dtype": lambda: pad_across_processes(torch.ones(1, dtype=torch.int8 if odd else torch.int16)),
        "ragged": lambda: gather_ragged(torch.ones(rank, 2 if odd else 3)),
        "ragged and not": lambda: gather_ragged(torch.ones(1)) if odd else gather(torch.ones(1)),
    }
    report = {name: text_of(call) for name, call in calls.items()}
    report["afterwards"] = str(float(reduce(torch.ones(1), "sum")))
    try:
        broadcast(torch.ones(1), from_process=9)
    except SettingError as error:
        report["no such rank"] = str(error)
    return report


def _everything() -> dict[str, dict[str, Any]]:
    rank = PartialState(cpu=True, timeout=300).process_index
    parts = (_gathering, _ragged, _reducing, _disagreeing)
    return {part.__name__: part(rank) for part in parts}


@pytest.fixture(scope="module", params=[2, 3, 4], ids="{}-processes".format)
def reports(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(_everything, request.param)


Reports = list[dict[str, dict[str, Any]]]


@pytest.mark.dist
def test_gather_pad_and_broadcast(reports: Reports) -> None:
    world = len(reports)
    for rank, every in enumerate(reports):
        report = every["_gathering"]
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
        assert report["padded bool"].tolist() == [True] * (rank + 1) + [False] * (world - rank - 1)
        assert report["broadcast"]["x"].tolist() == [[1, 1], [1, 1]]
        assert bool(report["broadcast"]["b"])
        for got, dtype in zip(report["broadcast dtypes"], DTYPES, strict=True):
            assert got.dtype is dtype
            assert torch.equal(got, value_of(1, dtype))
        assert report["untouched"].tolist() == [rank, rank]


@pytest.mark.dist
def test_ragged_rows_arrive_in_rank_order_and_no_others(reports: Reports) -> None:
    world = len(reports)
    ranks = range(world)
    for every in reports:
        report = every["_ragged"]
        rows = [[rank] * 2 for rank in ranks for _ in range(rank)]
        for dtype in DTYPES:
            assert report[str(dtype)].dtype is dtype
            assert torch.equal(report[str(dtype)], torch.tensor(rows).to(dtype))
        assert report["nested"]["x"].tolist() == rows
        assert report["nested"]["y"][0].tolist() == [float(i) for rank in ranks for i in range(rank)]
        assert report["nested"]["y"][1] is None
        assert report["nested"]["loss"].tolist() == list(ranks)
        assert report["replayed"]["x"].tolist() == [[rank + 10] * 2 for rank in ranks if rank != 1 for _ in range(rank)]
        assert report["replayed"]["loss"].tolist() == [rank for rank in ranks if rank != 1]
        assert report["first rows"].tolist() == [i + 10 * rank for rank in ranks for i in range(min(5, rank + 1))]
        assert report["nobody"].shape == (0, 2)
        assert report["strided"].tolist() == [[i, i + 3] for rank in ranks for i in range(min(3, rank + 1))]
        assert report["no columns"].shape == (sum(ranks), 0)
        assert report["even"].tolist() == [rank for rank in ranks for _ in range(2)]
        assert [len(tensor) for tensor in report["many"]] == [sum(ranks) + world * (i % 2) for i in range(40)]
        assert all((tensor == i).all() for i, tensor in enumerate(report["many"]))
        assert report["detached"]


@pytest.mark.dist
def test_reduce_agrees_with_the_reduction_of_the_stacked_values(reports: Reports) -> None:
    world = len(reports)
    for every in reports:
        report = every["_reducing"]
        for dtype in DTYPES:
            stacked = torch.stack([value_of(other, dtype) for other in range(world)])
            assert torch.equal(report[f"sum {dtype}"], stacked.sum(0))
            assert report[f"sum {dtype}"].dtype is (torch.int64 if dtype in WHOLE else dtype)
            for op, extreme in (("min", stacked.amin(0)), ("max", stacked.amax(0))):
                assert torch.equal(report[f"{op} {dtype}"], extreme)
                assert report[f"{op} {dtype}"].dtype is dtype
        for dtype in FLOATS:
            mean = torch.stack([value_of(other, dtype) for other in range(world)]).double().mean(0)
            assert report[f"mean {dtype}"].dtype is dtype
            assert torch.allclose(report[f"mean {dtype}"].double(), mean, atol=1e-2)
        assert torch.isfinite(report["half"]).all()
        assert float(report["nested"][0]) == sum(range(world))
        assert report["nested"][1]["empty"].shape == (0,)
        assert report["strided"].tolist() == [[0.0 + world - 1, 2.0 + world - 1], [1.0 + world - 1, 3.0 + world - 1]]
        assert report["bare"][0]
        assert report["bare"][1].tolist() == [sum(range(world)) / world, 1.0]


@pytest.mark.dist
def test_reduce_none_sums_nothing(reports: Reports) -> None:
    for rank, every in enumerate(reports):
        for dtype in DTYPES:
            assert torch.equal(every["_reducing"][f"none {dtype}"], value_of(rank, dtype))


@pytest.mark.dist
def test_the_mean_of_integers_and_bools_is_exact(reports: Reports) -> None:
    world = len(reports)
    for every in reports:
        report = every["_reducing"]
        for dtype in WHOLE:
            mean = torch.stack([value_of(other, dtype) for other in range(world)]).double().mean(0)
            assert report[f"mean {dtype}"].dtype is torch.float64
            assert torch.equal(report[f"mean {dtype}"], mean)
        assert float(report["large mean"]) == (world * 2**52 + sum(range(world))) / world


@pytest.mark.dist
@pytest.mark.parametrize(
    ("what", "rank_0", "rank_1"),
    [
        ("shape", "gather, tensor: torch.float32 (1,)", "gather, tensor: torch.float32 (2,)"),
        ("reduced shape", "reduce(mean), tensor: torch.float32 (1,)", "reduce(mean), tensor: torch.float32 (2,)"),
        ("broadcast shape", "broadcast(from_process=0), tensor: torch.float32 (1,)", "torch.float32 (2,)"),
        ("keys", "gather, ['a']: torch.float32 (1,)", "gather, ['b']: torch.float32 (1,)"),
        ("dtype", "reduce(mean), tensor: torch.float32 (1,)", "reduce(mean), tensor: torch.float64 (1,)"),
        ("op", "reduce(mean)", "reduce(sum)"),
        ("operation", "reduce(mean)", "gather"),
        ("source", "broadcast(from_process=0)", "broadcast(from_process=1)"),
        ("padded", "pad_across_processes(dim=0), [0]: torch.float32 1-dim", "[0]: torch.float32 1-dim, [1]:"),
        ("padded dtype", "torch.int16 1-dim", "torch.int8 1-dim"),
        ("ragged", "gather_ragged, tensor: torch.float32 rows of (3,)", "torch.float32 rows of (2,)"),
        ("ragged and not", "gather, tensor: torch.float32 (1,)", "gather_ragged, tensor: torch.float32 rows of ()"),
    ],
)
def test_ranks_that_disagree_all_get_an_error_that_says_in_what(
    reports: Reports, what: str, rank_0: str, rank_1: str
) -> None:
    for every in reports:
        lines = every["_disagreeing"][what].split("\n")
        assert rank_0 in lines[1], what
        assert rank_1 in lines[2], what
        assert lines[1].startswith("  rank 0: ")
        assert lines[2].startswith("  rank 1: ")
        assert len(lines) == len(reports) + 2


@pytest.mark.dist
def test_after_a_disagreement_the_ranks_can_go_on(reports: Reports) -> None:
    for every in reports:
        assert every["_disagreeing"]["afterwards"] == str(float(len(reports)))
        assert f"from_process=9: the job has {len(reports)} processes" in every["_disagreeing"]["no such rank"]
