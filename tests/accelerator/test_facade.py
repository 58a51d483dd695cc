"""What an Accelerator passes on, over two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from instep import Accelerator
from tests.accelerator.loops import Net
from tests.helpers.spawn import run_ranks

pytestmark = pytest.mark.dist


def _passed_on() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    rows = torch.full((1 + rank, 1), float(rank))
    model = accelerator.prepare(Net())
    report = {
        "local main": accelerator.is_local_main_process,
        "gathered": accelerator.gather({"x": torch.tensor([rank, 7])})["x"].tolist(),
        "padded": accelerator.pad_across_processes(rows, pad_index=-1).flatten().tolist(),
        "padded first": accelerator.pad_across_processes(rows, pad_index=-1, pad_first=True).flatten().tolist(),
        "names": list(accelerator.get_state_dict(model)),
        "wrapped": list(model.state_dict()),
    }
    accelerator.end_training()
    return report


def test_collectives_and_places() -> None:
    first, second = run_ranks(_passed_on, 2)
    assert (first["local main"], second["local main"]) == (True, False)
    assert first["gathered"] == second["gathered"] == [0, 7, 1, 7]
    assert (first["padded"], second["padded"]) == ([0.0, -1.0], [1.0, 1.0])
    assert (first["padded first"], second["padded first"]) == ([-1.0, 0.0], [1.0, 1.0])
    assert first["names"] == second["names"] == list(Net().state_dict())
    assert first["wrapped"] == [f"module.{name}" for name in first["names"]]
