"""Which devices a run gets, and what happens when they are not there."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from instep import PartialState
from instep.errors import SettingError
from instep.launch import engine
from instep.state import ProcessEnvironment
from instep.state.device import KINDS, DeviceKind
from instep.trainer import devices as place
from instep.trainer.settings import Settings

ALONE = ProcessEnvironment()
LAUNCHED = ProcessEnvironment(world_size=2, local_world_size=2, launcher="torchrun")


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = KINDS["cuda"]
    kind = DeviceKind(cuda.name, cuda.backend, cuda.distributed_type, lambda: 4)
    monkeypatch.setattr(place, "find_device_kind", lambda accelerator: kind)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, "1,2"), ("4,5,6,7", "5,6"), ("GPU-a, GPU-b, GPU-c", "GPU-b,GPU-c")]
)
def test_chosen_devices_are_among_the_visible_ones(
    visible: str | None, expected: str, four_gpus: None, monkeypatch: pytest.MonkeyPatch
):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    specs: list[Any] = []
    monkeypatch.setattr(engine, "run", lambda spec: specs.append(spec) or 0)
    monkeypatch.setattr("instep.launch.command.this_command", lambda: ("train.py",))
    settings = Settings(accelerator="gpu", devices=(1, 2))
    with pytest.raises(SystemExit):
        place.launch(settings, place.count_devices(settings, ALONE))
    assert specs[0].env["CUDA_VISIBLE_DEVICES"] == expected
    for name, value in specs[0].env.items():
        monkeypatch.setenv(name, value)
    assert place.count_devices(settings, LAUNCHED) == 2, "the ranks run the same program with the same argument"


def test_a_launcher_has_chosen_the_devices(four_gpus: None):
    with pytest.raises(SettingError, match=r"devices=\[2, 3\].*CUDA_VISIBLE_DEVICES=2,3 .*devices=2"):
        place.count_devices(Settings(accelerator="gpu", devices=(2, 3)), LAUNCHED)


def test_devices_must_be_there(four_gpus: None):
    with pytest.raises(SettingError, match=r"devices=\[4\]: this process sees 4 cuda devices"):
        place.count_devices(Settings(accelerator="gpu", devices=(4,)), ALONE)


def test_another_kind_of_device_than_the_process_has(four_gpus: None):
    PartialState(cpu=True)
    with pytest.raises(SettingError, match="accelerator='gpu' means cuda here, but this process runs on cpu"):
        place.connect(Settings(accelerator="gpu"))


def test_the_chosen_device_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch):
    current: list[torch.device] = []
    monkeypatch.setattr(place, "make_current", current.append)
    process = PartialState(cpu=True)
    assert place.device_of(Settings(devices=(1,)), process, ALONE) == torch.device("cpu", 1)
    assert current == [torch.device("cpu", 1)]
    assert place.device_of(Settings(devices=2), process, LAUNCHED) == process.device


def test_deterministic_runs_on_cuda_have_a_cublas_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(name, "")  # so that it is restored afterwards
    monkeypatch.delenv(name)
    for settings, kind in ((Settings(), "cuda"), (Settings(deterministic=True), "cpu")):
        place.make_cublas_repeatable(settings, kind)
        assert name not in os.environ
    place.make_cublas_repeatable(Settings(deterministic="warn"), "cuda")
    assert os.environ[name] == ":4096:8"
    monkeypatch.setenv(name, ":16:8")
    place.make_cublas_repeatable(Settings(deterministic=True), "cuda")
    assert os.environ[name] == ":16:8", "the user's"
