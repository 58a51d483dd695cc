from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from instep.big_models import get_max_memory, init_on_device
from instep.big_models.memory import _left_in_cgroups
from instep.errors import SettingError
from tests.helpers import gpu


def test_limits_are_read_and_ordered():
    given = {"disk": 0, "cpu": "1.5 GiB", 2: "10gb", 0: 7}
    assert [*get_max_memory(given).items()] == [(0, 7), (2, 10**10), ("cpu", 3 * 2**29), ("disk", 0)]
    assert given[2] == "10gb"
    for wrong in ({"gpu": 1}, {-1: 1}, {True: 1}, {0: -1}, {0: "-1GB"}, {"cpu": "much"}):
        with pytest.raises(SettingError, match="max_memory"):
            get_max_memory(wrong)


def test_free_memory_is_within_the_containers_limit(tmp_path, monkeypatch):
    free = get_max_memory()
    assert free["cpu"] > 2**20
    own = tmp_path / "own"
    own.write_text("5:memory:/outer/inner\n4:cpu:/\n0::/slice/job\n")

    def write(folder, **files):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / folder / name.replace("__", ".")).write_text(text)

    write("slice", memory__max="1000\n", memory__high="max\n", memory__current="400", memory__stat="inactive_file 100")
    write("slice/job", memory__max="max\n", memory__high="500", memory__current="150", memory__stat="anon 9")
    write(
        "memory",
        memory__limit_in_bytes="800",
        memory__usage_in_bytes="300",
        memory__stat="total_active_file 50\ncache 1",
    )
    assert sorted(_left_in_cgroups(tmp_path, own)) == [350, 550, 700]
    assert list(_left_in_cgroups(tmp_path, tmp_path / "nothing")) == []
    monkeypatch.setattr("instep.big_models.memory._left_in_cgroups", lambda: [2**20])
    assert get_max_memory()["cpu"] == 2**20


@pytest.mark.parametrize("integrated", [False, True])
def test_free_memory_of_accelerators(monkeypatch, integrated):
    def free(index):
        if index == 1:
            raise RuntimeError("CUDA-capable device(s) is/are busy")
        return 1000 + index, 5000

    stand_in = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 3,
        mem_get_info=free,
        memory_reserved=lambda index: 300,
        memory_allocated=lambda index: 100,
        get_device_properties=lambda index: SimpleNamespace(is_integrated=integrated),
    )
    monkeypatch.setattr(torch, "cuda", stand_in)
    with pytest.warns(UserWarning, match="cuda:1 is left out"):
        found = get_max_memory()
    # What torch's allocator holds and does not use is free; memory that is the machine's own is given once.
    assert list(found) == ([0, 2] if integrated else [0, 2, "cpu"])
    assert (found[0], found[2]) == (1200, 1202)


@pytest.mark.gpu
def test_free_memory_of_this_machines_gpus():
    before = get_max_memory()[gpu.IN_A_MAP]
    size = 10_000 if gpu.DEVICE == "cuda" else 100
    with init_on_device(gpu.DEVICE):
        layer = nn.Linear(size, size)
    assert layer.weight.device.type == gpu.DEVICE
    if gpu.on_device("how much free memory has gone"):
        assert before - get_max_memory()[gpu.IN_A_MAP] >= layer.weight.nbytes
