from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.spawn import run_ranks

SHAPE = (7, 5)


class Stored:
    """A stored tensor that tells which boxes were read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.boxes: list[Any] = []

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, box: Any = None) -> torch.Tensor:
        self.boxes.append(box)
        return self.tensor.clone() if box is None else self.tensor[box].clone()


def cut_and_put_together() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from instep.state import PartialState
    from instep.strategies import dtensors

    state = PartialState()
    first = state.is_main_process
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,))
    whole = torch.arange(35.0).reshape(SHAPE)
    both = torch.nn.Linear(5, 7)  # tensor parallel within, sharded without: 7 rows over 2 x 2 ranks
    with torch.no_grad():
        both.weight.copy_(whole)
    parallelize_module(both, grid["tp"], ColwiseParallel())
    fully_shard(both, mesh=grid["dp"])
    tensors = {
        "rows of four": distribute_tensor(whole, line, [Shard(0)]),
        "columns of two": distribute_tensor(whole, grid["dp"], [Shard(1)]),
        "copies of rows": distribute_tensor(whole, grid, [Replicate(), Shard(0)]),
        "rows and columns": distribute_tensor(whole, grid, [Shard(0), Shard(1)]),
        "copies": distribute_tensor(whole, grid, [Replicate(), Replicate()]),
        "two times rows": both.weight.detach(),
    }
    seen: dict[str, Any] = {"plain": dtensors.part_to_write(whole, first) is not None}
    for name, tensor in tensors.items():
        stored = Stored(whole.double())
        taken: Any = dtensors.take_part(stored, tensor)
        seen[name] = {
            "written": dtensors.part_to_write(tensor, first, grid),
            "same": torch.equal(taken.to_local(), tensor.to_local().double()) and taken.placements == tensor.placements,
            "sliced": torch.equal(dtensors.take_part(whole, tensor).to_local(), tensor.to_local()),  # type: ignore[attr-defined]
            "read": [[(it.start, it.stop) for it in box] for box in stored.boxes],
            "whole": torch.equal(dtensors.gather_whole(tensor), whole),
        }
    sharded = tensors["rows of four"]
    tree = {
        "optimizer": "Adafactor",
        "shapes": {"w": [7, 5], "b": [3], "moved": [2, 2]},
        "state": {
            "w": {
                "step": torch.tensor(3.0),
                "exp_avg": Stored(whole),
                "row": Stored(torch.ones(7, 1)),
                "kind": "x",
                "old": [Stored(torch.ones(7, 1)), None],
            },
            "b": {"exp_avg": Stored(torch.ones(3))},
            "moved": {"exp_avg": Stored(torch.ones(2, 2))},
            "gone": {"exp_avg": Stored(torch.ones(2))},
        },
        "groups": [{"params": ["w", "b"], "lr": Stored(torch.tensor(0.1))}],
    }
    cut = dtensors.take_parts(tree, {"w": sharded, "b": torch.zeros(3), "moved": torch.zeros(4)})
    kinds = {name: {key: type(it).__name__ for key, it in values.items()} for name, values in cut["state"].items()}
    seen["tree"] = (
        kinds,
        torch.equal(cut["state"]["w"]["exp_avg"].to_local(), sharded.to_local()),
        torch.equal(cut["state"]["w"]["row"].to_local(), torch.ones(7, 1)),
        torch.equal(cut["state"]["w"]["old"][0].to_local(), torch.ones(7, 1)),  # as L-BFGS has them
        cut["groups"][0]["lr"].item(),
        dtensors.parts_to_write([{"a": whole, "b": sharded, "n": None, "x": 1.5}], first),
    )
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(cut_and_put_together, 4)


@pytest.mark.dist
def test_parts_make_up_the_whole_once_and_only_boxes_are_read(ranks: list[dict[str, Any]]) -> None:
    whole = torch.arange(35.0).reshape(SHAPE)
    assert [seen["plain"] for seen in ranks] == [True, False, False, False]
    for name in ranks[0].keys() - {"plain", "tree"}:
        put = torch.zeros(SHAPE)
        times = torch.zeros(SHAPE)
        for rank, seen in enumerate(ranks):
            about = seen[name]
            assert about["same"], (name, rank)
            assert about["sliced"], (name, rank)
            assert about["whole"], (name, rank)
            part = about["written"]
            if isinstance(part, torch.Tensor):
                put += part
                times += 1
            elif part is not None:
                box = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.local.shape, strict=True))
                put[box] += part.local
                times[box] += 1
                assert about["read"] == [[(it.start, it.stop) for it in box]], (name, rank)
        assert torch.equal(times, torch.ones(SHAPE)), name
        assert torch.equal(put, whole), name


@pytest.mark.dist
def test_states_of_optimizers_are_cut_as_their_parameters_are(ranks: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(ranks):
        kinds, moments, factors, old, lr, written = seen["tree"]
        assert kinds == {
            "w": {"step": "Tensor", "exp_avg": "DTensor", "row": "DTensor", "kind": "str", "old": "list"},
            "b": {"exp_avg": "Tensor"},
            "moved": {"exp_avg": "Stored"},  # of another shape: not read, since nothing takes it
            "gone": {"exp_avg": "Stored"},
        }
        assert moments
        assert factors
        assert old
        assert lr == pytest.approx(0.1)
        assert written[0].keys() == ({"a", "b", "n", "x"} if rank == 0 else {"b", "n", "x"})
