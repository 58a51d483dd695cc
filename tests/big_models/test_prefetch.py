"""The next block is read while the current one computes."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from instep.big_models.offload import WeightsMap
from instep.big_models.pages import in_memory, read_ahead
from instep.big_models.prefetch import Prefetcher, prefetch_blocks
from instep.checkpoint.weights import stored_weights
from tests.helpers.spawn import HANG_S


class Slow:
    """A weight that cannot be mapped: reading one says so, and waits for a sign."""

    shape, dtype = torch.Size([2]), torch.float32

    def __init__(self, name: str, read: list[str], error: Exception | None = None) -> None:
        self.name, self.log, self.error = name, read, error
        self.seen = threading.Event()

    def read(self, box: Any = None) -> Tensor:
        self.log.append(f"{self.name} in {threading.current_thread().name}")
        self.seen.set()
        if self.error is not None:
            raise self.error
        return torch.full((2,), float(len(self.log)))


def test_blocks_are_staged_ahead_and_dropped() -> None:
    log: list[str] = []
    slow = [Slow(name, log) for name in "abcd"]
    weights = WeightsMap({each.name: each for each in slow})
    prefetcher = Prefetcher(weights, [["a"], ["b"], ["c"], ["d"]], ["cpu"] * 4)
    for number, each in enumerate(slow):
        prefetcher.begin(number)
        each.seen.clear()
        following = slow[(number + 1) % 4]
        assert following.seen.wait(HANG_S)
        assert each.name in weights.staged
        assert set(weights.staged) <= {each.name, following.name}
        assert weights[each.name] is weights.staged[each.name]
    assert log[0] == "a in MainThread"
    assert log[1:] == [f"{name} in instep-prefetch" for name in "bcda"]
    prefetcher.begin(0)  # the next forward
    assert slow[1].seen.wait(HANG_S)
    for block in (2, 0, 2, 0):  # another order, which is learned
        prefetcher.begin(block)
    assert set(prefetcher._held) == {0, 2}
    for block in (0, 1, 2, 3, 3, 2, 1, 0) * 2:  # a forward and the backward
        prefetcher.begin(block)
    assert set(prefetcher._held) == {0}
    prefetcher.begin(0)
    prefetcher.begin(1)
    assert set(prefetcher._held) == {1, 2}


def test_forwards_in_several_threads_share_a_prefetcher() -> None:
    weights = WeightsMap({name: Slow(name, []) for name in "abcd"})
    prefetcher = Prefetcher(weights, [["a"], ["b"], ["c"], ["d"]], ["cpu"] * 4)

    def forwards() -> None:
        for block in [*range(4)] * 50:
            prefetcher.begin(block)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(forwards) for _ in range(4)]:
                done.result(HANG_S)
    finally:
        sys.setswitchinterval(before)
    assert len(weights.staged) <= 2


def test_an_error_of_the_thread_is_raised_where_the_block_is_used() -> None:
    log: list[str] = []
    bad = Slow("b", log, OSError("the disk is gone"))
    prefetcher = Prefetcher(WeightsMap({"a": Slow("a", log), "b": bad}), [["a"], ["b"]], ["cpu"] * 2)
    prefetcher.begin(0)
    assert bad.seen.wait(HANG_S)
    with pytest.raises(OSError, match="the disk is gone"):
        prefetcher.begin(1)
    bad.error = None
    prefetcher.begin(1)  # tried again


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "instep-prefetch"]


class Layers(nn.Module):
    """A model with a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) * self.scale
        return x


def test_a_mapped_model_reads_its_blocks_ahead(tmp_path: Path) -> None:
    model = Layers()
    expected = model(torch.ones(2, 4))
    save_file(model.state_dict(), tmp_path / "x.safetensors")
    weights = WeightsMap(stored_weights(tmp_path / "x.safetensors"))
    for name, parameter in model.named_parameters():
        parameter.data = weights[name]
    before = threads()
    prefetcher = prefetch_blocks(model, weights, {"layers": "cpu", "scale": "cpu"})
    assert prefetcher is not None
    assert prefetcher._work.blocks == [("scale",), *[(f"layers.{i}.0.weight", f"layers.{i}.0.bias") for i in range(3)]]
    assert torch.equal(model(torch.ones(2, 4)), expected)
    assert not weights.staged
    made = [thread for thread in threads() if thread not in before]
    assert len(made) == 1
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(torch.ones(2, 4)), expected)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(model.first(torch.ones(2, 4)) * 0, torch.zeros(2, 4)) and _begins(prefetcher) else 1)
    assert os.waitpid(child, 0)[1] == 0
    del model, prefetcher, other
    gc.collect()
    made[0].join(HANG_S)
    assert not made[0].is_alive()


def _begins(prefetcher: Prefetcher) -> bool:
    """Whether a block can begin in a process that was forked, and with a thread of its own."""
    prefetcher.begin(0)
    prefetcher.begin(1)
    return len(threads()) == 1


def test_pages_come_back(tmp_path: Path) -> None:
    save_file({"a": torch.ones(300_000), "b": torch.ones(300_000)}, tmp_path / "x.safetensors")
    weights = WeightsMap(stored_weights(tmp_path / "x.safetensors"))
    file = os.open(tmp_path / "x.safetensors", os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
    read_ahead(weights.values())
    assert in_memory(weights["a"])
    assert in_memory(weights["b"])
    assert float(weights["b"].sum()) == 300_000
