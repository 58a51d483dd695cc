from __future__ import annotations

import pytest
import torch

from instep.errors import SettingError
from instep.state import DEVICE_KINDS, DeviceKind, DistributedType, device, find_device_kind
from instep.state.device import device_of, widest_float


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> DeviceKind:
    kinds = {
        name: DeviceKind(name, kind.backend, kind.distributed_type, lambda: 0) for name, kind in DEVICE_KINDS.items()
    }
    kinds["cpu"] = DEVICE_KINDS["cpu"]
    kinds["cuda"] = DeviceKind("cuda", "nccl", DistributedType.MULTI_GPU, lambda: 2)
    monkeypatch.setattr(device, "KINDS", kinds)
    return kinds["cuda"]


def test_auto_and_gpu_take_the_first_kind_that_is_here(two_gpus: DeviceKind) -> None:
    assert find_device_kind("auto") is two_gpus
    assert find_device_kind("gpu") is two_gpus
    assert find_device_kind("cpu").backend == "gloo"


def test_a_missing_device_is_an_error_that_says_what_is_here(two_gpus: DeviceKind) -> None:
    with pytest.raises(SettingError, match=r"accelerator='xpu'.*It sees: cuda, cpu"):
        find_device_kind("xpu")
    with pytest.raises(SettingError, match=r"accelerator='cud' is not known.*Did you mean 'cuda'"):
        find_device_kind("cud")


def test_sums_are_as_wide_as_a_device_can() -> None:
    assert [widest_float(torch.device(name)) for name in ("cpu", "mps")] == [torch.float64, torch.float32]


def test_each_process_of_a_node_gets_its_own_device(two_gpus: DeviceKind) -> None:
    assert [device_of(two_gpus, rank) for rank in range(2)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(SettingError, match="local rank 2 has no cuda device: this node has 2"):
        device_of(two_gpus, 2)


def test_a_process_that_sees_one_device_takes_it() -> None:
    one = DeviceKind("cuda", "nccl", DistributedType.MULTI_GPU, lambda: 1)
    assert device_of(one, 3) == torch.device("cuda", 0)
    assert device_of(DEVICE_KINDS["cpu"], 3) == torch.device("cpu")


def test_distributed_type_is_a_string() -> None:
    assert DistributedType.MULTI_CPU == "MULTI_CPU"
    assert len(DistributedType) == 14
    assert all(member.value == member.name for member in DistributedType)
    assert f"{DistributedType.NO}" == "NO"
