"""Accelerate's words for how processes are laid out."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from instep import Accelerator
from instep.accelerator import ParallelismConfig
from instep.errors import SettingError
from tests.helpers.spawn import run_ranks


def test_sizes_give_a_strategy() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2)
    strategy: Any = config.strategy()
    strategy.check_world_size(config.total_size)
    assert strategy.sizes == {"pp": 1, "dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2}
    assert (config.data_parallel_size, config.non_data_parallel_size) == (4, 2)
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "tp"]
    assert ParallelismConfig(dp_replicate_size=4).strategy() == "ddp"
    assert ParallelismConfig().build_device_mesh("cpu") is None


def test_sizes_that_do_not_go_together_are_refused(make: Any) -> None:
    with pytest.raises(SettingError, match="dp_shard_size above 1"):
        ParallelismConfig(dp_replicate_size=2, tp_size=2)
    with pytest.raises(SettingError, match="tp_size=0"):
        ParallelismConfig(tp_size=0)
    with pytest.raises(SettingError, match="not both"):
        make(strategy="ddp", parallelism_config=ParallelismConfig())


def sharded() -> tuple[bool, list[str]]:
    config = ParallelismConfig(dp_shard_size=2)
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    model = accelerator.prepare(nn.Linear(4, 4))
    mesh: Any = config.build_device_mesh("cpu")
    names = [name for name in ("dp_shard", "dp", "dp_cp") if mesh[name].size() == 2]
    accelerator.end_training()
    return isinstance(accelerator.unwrap_model(model), FSDPModule), names


@pytest.mark.dist
def test_a_model_is_spread_as_it_says() -> None:
    assert run_ranks(sharded, 2) == [(True, ["dp_shard", "dp", "dp_cp"])] * 2
