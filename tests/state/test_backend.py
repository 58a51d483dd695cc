from __future__ import annotations

import pytest
import torch.distributed as dist

from instep.errors import SettingError
from instep.state import DEVICE_KINDS, ProcessEnvironment
from instep.state.process_group import resolve_backend

TORCHRUN = ProcessEnvironment(world_size=2, launcher="torchrun")
MPIRUN = ProcessEnvironment(world_size=2, launcher="openmpi")


@pytest.fixture
def everything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)


@pytest.mark.usefixtures("everything_is_built")
@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [
        (None, "cpu", "gloo"),
        (None, "cuda", "cpu:gloo,cuda:nccl"),
        (None, "xpu", "cpu:gloo,xpu:xccl"),
        ("NCCL", "cuda", "cpu:gloo,cuda:nccl"),
        ("gloo", "cuda", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda", "cpu:gloo,cuda:nccl"),
        ("mpi", "cpu", "cpu:mpi"),
        ("mpi", "cuda", "cpu:mpi,cuda:mpi"),
    ],
)
def test_the_backend_is_the_devices_own_or_the_users(backend: str | None, device: str, expected: str) -> None:
    assert resolve_backend(backend, DEVICE_KINDS[device], MPIRUN) == expected


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        ("glo", "cpu", r"backend='glo' is not known.*Did you mean 'gloo'"),
        ("cpu:gloo,cuda:ncl", "cuda", r"backend='ncl' is not known.*Did you mean 'nccl'"),
        ("mpi", "cpu", r"backend='mpi': this torch \(.*\) was built without it"),
        (None, "mps", "one of 2 processes, but torch has no collectives for mps"),
    ],
)
def test_what_torch_lacks_is_refused(backend: str | None, device: str, message: str) -> None:
    if backend == "mpi" and dist.is_mpi_available():
        pytest.skip("this torch has MPI")
    with pytest.raises(SettingError, match=message):
        resolve_backend(backend, DEVICE_KINDS[device], TORCHRUN)


@pytest.mark.usefixtures("everything_is_built")
def test_what_the_device_or_the_launcher_cannot_use_is_refused() -> None:
    with pytest.raises(SettingError, match="backend='nccl' serves cuda, but this process computes on cpu"):
        resolve_backend("nccl", DEVICE_KINDS["cpu"], TORCHRUN)
    with pytest.raises(SettingError, match=r"backend='mpi' numbers the processes.* but torchrun started these"):
        resolve_backend("mpi", DEVICE_KINDS["cpu"], TORCHRUN)


def test_a_backend_that_comes_with_a_package_names_it() -> None:
    with pytest.raises(ImportError, match="habana_frameworks"):
        resolve_backend(None, DEVICE_KINDS["hpu"], TORCHRUN)
