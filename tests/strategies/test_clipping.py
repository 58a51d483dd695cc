from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.spawn import run_ranks

SHAPES = {"rows": (5, 3), "columns": (4, 6), "both": (8, 6), "single": (1,), "plain": (3, 2), "other": (7, 2)}
NORMS = (2.0, inf, 1.0, 3.0)


def whole_gradients(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def on_meshes(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """Parameters with gradients on a (2, 2) mesh, on its parts, on a mesh of all, and on none."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from instep.state import PartialState

    PartialState()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    places: dict[str, Any] = {
        "rows": (grid["dp"], [Shard(0)]),
        "columns": (grid, [Replicate(), Shard(1)]),
        "both": (grid, [Shard(0), Shard(1)]),
        "single": (line, [Shard(0)]),  # three of four ranks hold nothing
        "other": (line, [Shard(0)]),
    }
    made = {}
    for name, gradient in whole_gradients(dtype).items():
        cut = distribute_tensor(gradient, *places[name]) if name in places else gradient
        made[name] = nn.Parameter(torch.zeros_like(cut))
        made[name].grad = cut
    return made


def clip_everywhere() -> dict[str, Any]:
    from torch.distributed.tensor import DTensor, Partial

    from instep.strategies.clipping import clip_norm_, clip_value_
    from instep.strategies.dtensors import gather_whole

    def after(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        return {name: gather_whole(p.grad) for name, p in parameters.items()}

    seen: dict[str, Any] = {}
    for norm_type in NORMS:
        parameters = on_meshes()
        norm = clip_norm_(parameters.values(), 0.5, norm_type)
        seen[f"norm {norm_type}"] = (norm, after(parameters))
    parameters = on_meshes(torch.bfloat16)
    seen["bfloat16"] = (clip_norm_(parameters.values(), 1000.0), after(parameters))
    parameters = on_meshes()
    clip_value_(parameters.values(), 0.25)
    seen["value"] = after(parameters)
    parameters = on_meshes()
    columns: Any = parameters["columns"]
    parts = columns.grad.to_local() / 2  # a sum over dp that is still to be made, as tensor parallelism leaves it
    columns.grad = DTensor.from_local(parts, columns.device_mesh, [Partial(), columns.placements[1]], run_check=False)
    seen["partial"] = (clip_norm_(parameters.values(), 0.5), after(parameters))
    parameters = on_meshes()
    parameters["rows"].grad = None
    seen["absent"] = clip_norm_(parameters.values(), 0.5)
    parameters = on_meshes()
    skipped = [] if torch.distributed.get_rank() == 0 else list(parameters.values())
    alike: Any = torch.distributed.group.WORLD
    seen["stages"] = clip_norm_([parameters["plain"]], 0.5, groups=[alike], skip=skipped)
    return seen


@pytest.mark.dist
def test_every_element_counts_once_on_every_mesh() -> None:
    for rank, seen in enumerate(run_ranks(clip_everywhere, 4)):
        whole = whole_gradients()
        flat = torch.cat([it.flatten() for it in whole.values()])
        for norm_type in NORMS:
            norm, clipped = seen[f"norm {norm_type}"]
            right = torch.linalg.vector_norm(flat, norm_type)
            torch.testing.assert_close(norm, right)
            for name, gradient in whole.items():
                torch.testing.assert_close(clipped[name], gradient * 0.5 / (right + 1e-6), msg=f"{name}, rank {rank}")
        norm, same = seen["bfloat16"]
        assert norm.dtype == torch.float32
        rounded = torch.cat([it.flatten() for it in whole_gradients(torch.bfloat16).values()]).float()
        torch.testing.assert_close(norm, torch.linalg.vector_norm(rounded))
        assert all(torch.equal(same[name], it) for name, it in whole_gradients(torch.bfloat16).items())
        for name, gradient in whole.items():
            assert torch.equal(seen["value"][name], gradient.clamp(-0.25, 0.25)), name
        for got, wanted in zip(seen["partial"][1].values(), seen["norm 2.0"][1].values(), strict=True):
            torch.testing.assert_close(got, wanted)
        rest = torch.cat([it.flatten() for name, it in whole.items() if name != "rows"])
        torch.testing.assert_close(seen["absent"], torch.linalg.vector_norm(rest))
        torch.testing.assert_close(seen["stages"], torch.linalg.vector_norm(whole["plain"]))


def test_gradients_are_clipped_without_a_process_group() -> None:
    from instep.strategies.clipping import clip_norm_, clip_value_

    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    norm = clip_norm_([parameter, nn.Parameter(torch.zeros(3))], 1.0)
    assert norm.dtype == torch.float64
    assert norm.item() == 5.0
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8], dtype=torch.float64), rtol=1e-6, atol=0)
    clip_value_([parameter], 0.7)
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.7])
    assert clip_norm_([], 1.0).item() == 0.0
