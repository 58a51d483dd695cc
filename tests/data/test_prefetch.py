from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from instep.data import prepare_loader
from instep.data.prefetch import prefetch
from instep.distributed.nested import iter_leaves


def to_gpu(batch: Any) -> Any:
    return [part.to("cuda", non_blocking=True) for part in batch]


def on_meta(samples: list[Any]) -> Tensor:
    return torch.stack(samples).to("meta")


@pytest.mark.parametrize(
    ("loader", "pinned"),
    [
        (DataLoader(torch.ones(6, 2), 3), 2),
        (DataLoader(torch.ones(6, 2), batch_size=None, sampler=range(2)), 2),
        (DataLoader(TensorDataset(torch.ones(6, 2, device="meta")), 3), 0),
        (DataLoader(torch.ones(6, 2), 3, collate_fn=on_meta, pin_memory=True), 0),
        (DataLoader(torch.ones(6, 2), 3, collate_fn=lambda samples: {"x": [on_meta(samples)], "n": 1}), 0),
    ],
)
def test_only_what_lies_on_the_host_is_pinned(
    loader: DataLoader[Any], pinned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def pin(batch: Any) -> Any:
        calls.append(batch)
        for _, leaf in iter_leaves(batch):
            if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
                raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        return batch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr("torch.utils.data._utils.pin_memory.pin_memory", pin)
    source = prepare_loader(loader, device=torch.device("cuda"))
    assert len(list(source)) == 2
    assert len(calls) == pinned


class OnDevice(Tensor):
    """A tensor that says it lies on a CUDA device."""

    is_cuda: Any = True


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ([torch.ones(2)], "side"),
        ({"x": torch.ones(2), "n": 1, "name": "a"}, "side"),
        ([torch.ones(2).as_subclass(OnDevice)], "step's"),
        ({"x": torch.ones(2), "y": [torch.ones(2).as_subclass(OnDevice)]}, "step's"),
        ([object()], "step's"),
    ],
)
def test_what_may_still_be_computed_is_moved_on_the_steps_stream(
    batch: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream:
        def __init__(self, name: Any = None) -> None:
            self.name = name if isinstance(name, str) else "side"

        def wait_stream(self, other: Stream) -> None: ...

    current, seen = [Stream("step's")], []

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    assert list(prefetch([batch], lambda moved: (seen.append(current[-1].name), moved)[1])) == [batch]
    assert seen == [expected]


@pytest.mark.gpu
def test_batches_arrive_whole_while_the_device_is_busy() -> None:
    data = TensorDataset(torch.arange(4096.0).repeat(512, 1) + torch.arange(512.0).unsqueeze(1))
    source = prepare_loader(DataLoader(data, batch_size=64, shuffle=True), device=torch.device("cuda"))
    expected = [batch[0].clone() for batch in source]
    busy = torch.randn(2048, 2048, device="cuda")
    sums, flags = [], []
    for batch in prefetch(source, to_gpu):
        for _ in range(20):
            busy = busy @ busy / busy.norm()
        sums.append(batch[0].sum(1))
        flags.append(source.share.last)
        del batch
    assert flags == [False] * 7 + [True]
    for total, batch in zip(sums, expected, strict=True):
        assert torch.equal(total.cpu(), batch.cuda().sum(1).cpu())


@pytest.mark.gpu
def test_the_copy_does_not_wait_for_the_step_before() -> None:
    batches = [[torch.ones(1024, 1024).pin_memory()] for _ in range(2)]
    busy = torch.randn(4096, 4096, device="cuda")
    copied, stepped = torch.cuda.Event(), torch.cuda.Event()

    def transfer(batch: Any) -> Any:
        moved = to_gpu(batch)
        copied.record()
        return moved

    iterator = prefetch(batches, transfer)
    next(iterator)
    for _ in range(200):
        busy = busy @ busy / busy.norm()
    stepped.record()
    next(iterator)
    copied.synchronize()
    assert not stepped.query()


@pytest.mark.gpu
def test_other_batches_are_moved_on_the_steps_stream() -> None:
    class Own:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    streams = []

    def transfer(batch: Own) -> Own:
        streams.append(torch.cuda.current_stream())
        return Own(batch.x.cuda())

    for batch in prefetch([Own(torch.ones(2))], transfer, after=lambda own: Own(own.x + 1)):
        assert batch.x.tolist() == [2.0, 2.0]
    assert streams == [torch.cuda.current_stream()]
