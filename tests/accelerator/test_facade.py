"""What an Accelerator passes on, over two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from instep import Accelerator
from instep.distributed import gather_object
from instep.errors import DistributedError
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
        "joined": gather_object([rank]),
        "tail": [],
    }
    for (x,) in accelerator.prepare(DataLoader(TensorDataset(torch.arange(7)), 2)):
        try:
            report["tail"] += accelerator.gather(x).tolist()
        except DistributedError as error:
            report["tail"] += [str(error)]
    accelerator.end_training()
    return report


def test_collectives_and_places_of_an_accelerator_on_two_ranks() -> None:
    first, second = run_ranks(_passed_on, 2)
    assert (first["local main"], second["local main"]) == (True, False)
    assert first["gathered"] == second["gathered"] == [0, 7, 1, 7]
    assert (first["padded"], second["padded"]) == ([0.0, -1.0], [1.0, 1.0])
    assert (first["padded first"], second["padded first"]) == ([-1.0, 0.0], [1.0, 1.0])
    assert first["joined"] == second["joined"] == [0, 1]
    for report in (first, second):
        assert report["tail"][:4] == [0, 1, 2, 3]
        assert "accelerator.gather_for_metrics" in report["tail"][4]
    assert first["names"] == second["names"] == list(Net().state_dict())
    assert first["wrapped"] == [f"module.{name}" for name in first["names"]]
