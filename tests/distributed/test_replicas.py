from __future__ import annotations

import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.data import DataLoader, TensorDataset

import instep
from instep.callbacks import ReplicaCheck
from instep.distributed import ReplicaDifference, compare_replicas, replicas
from instep.distributed.replicas import digest, weigh
from instep.errors import DistributedError, SettingError
from instep.state import PartialState
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import quiet


class Drifting(instep.TrainModule):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 1), nn.Linear(1, 1)
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.other(self.layer(batch[0])).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == self.at and self.trainer.global_rank == 1:
            with torch.no_grad():
                self.layer.weight[0, 2] += 1e-6  # a bit or two

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _fit(check: ReplicaCheck, at: int, **settings: Any) -> str:
    trainer = quiet(devices=3, max_steps=6, callbacks=check, **settings)
    try:
        with warnings.catch_warnings(record=True) as said:
            trainer.fit(Drifting(at), DataLoader(TensorDataset(torch.ones(40, 4)), 2))
    except (DistributedError, SettingError) as error:
        return str(error)
    return " ".join(str(it.message) for it in said)


def _ranks(folder: Path) -> dict[str, Any]:
    rank = PartialState(cpu=True).process_index
    same, odd = torch.arange(5.0), torch.zeros(3) + (rank == 2)
    mesh = init_device_mesh("cpu", (3,))
    placed = {
        "whole": DTensor.from_local(torch.full((2,), float(rank == 0)), mesh, [Replicate()], run_check=False),
        "sharded": DTensor.from_local(torch.full((2,), float(rank)), mesh, [Shard(0)], run_check=False),
        "sum": DTensor.from_local(torch.full((2,), float(rank)), mesh, [Partial()], run_check=False),
    }
    used = ReplicaCheck(every_n_steps=100)
    _fit(used, at=-1)
    return {
        "alike": compare_replicas({"same": same, **({"of mine": odd} if rank == 2 else {})}),
        "odd": compare_replicas({"same": same, "odd": odd}),
        "two": compare_replicas({"here": odd + rank} if rank else {}),
        "placed": compare_replicas(placed),
        "never": _fit(ReplicaCheck(every_n_steps=2), at=-1),
        "stop": _fit(ReplicaCheck(every_n_steps=2), at=2),
        "warn": _fit(ReplicaCheck(every_n_steps=4, on_difference="warn"), at=2),
        "end": _fit(used, at=2),  # an earlier run ended at the same step
        "local sgd": _fit(ReplicaCheck(), at=-1, strategy=instep.strategies.DDPStrategy(comm_hook="post_local_sgd")),
    }


@pytest.mark.dist
def test_ranks_whose_tensors_differ_are_named(tmp_path: Path) -> None:
    host = socket.gethostname()
    results = run_ranks(_ranks, 3, tmp_path)
    for found in results:
        assert found["alike"] == []
        assert found["odd"] == [ReplicaDifference("odd", (2,), (0, 1, 2), (host,))]
        assert found["two"] == [ReplicaDifference("here", (1, 2), (1, 2), (host, host))]
        assert found["placed"] == [ReplicaDifference("whole", (0,), (0, 1, 2), (host,))]
        assert found["never"] == ""
        for name, step in (("stop", 4), ("end", 6)):
            expected = f"replicas differ after step {step}: rank 1 (on {host}), in 1 of 4 tensors: layer.weight."
            assert found[name].startswith(expected)
        assert "trains them apart (local SGD)" in found["local sgd"]
    assert "replicas differ after step 4" in results[0]["warn"]
    assert results[1]["warn"] == ""


def test_the_digest_sees_one_changed_bit_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    other, swapped = tensor.clone(), tensor.flip(0)
    other.view(torch.int32)[777] ^= 1
    monkeypatch.setattr(replicas, "_CHUNK", 300)
    for of in (digest, lambda tensor: weigh(tensor.view(torch.uint8))):
        assert of(tensor) == of(tensor.clone())
        assert len({of(tensor), of(other), of(swapped)}) == 3
    assert digest(torch.zeros(3, dtype=torch.bfloat16)) != digest(torch.ones(3, dtype=torch.bfloat16))


def test_arguments_of_the_check_of_replicas_are_checked() -> None:
    with pytest.raises(SettingError, match="every_n_steps=0: expected an integer of at least 1"):
        ReplicaCheck(every_n_steps=0)
    with pytest.raises(SettingError, match="on_difference='halt' is not known"):
        ReplicaCheck(on_difference="halt")  # type: ignore[arg-type]
