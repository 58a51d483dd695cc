from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from instep.data import prepare_loader
from instep.data.prefetch import batches_through, prefetch
from instep.distributed.nested import iter_leaves
from tests.helpers import gpu

DEVICE = torch.device(gpu.DEVICE)


def to_device(batch: Any) -> Any:
    return [part.to(DEVICE, non_blocking=True) for part in batch]


ROWS: Any = torch.ones(6, 2)


def on_meta(samples: list[Any]) -> Tensor:
    return torch.stack(samples).to("meta")


@pytest.mark.parametrize(
    ("loader", "device", "pinned"),
    [
        (DataLoader(ROWS, 3), "cuda", 2),
        (DataLoader(ROWS, batch_size=None, sampler=range(2)), "cuda", 2),
        (DataLoader(TensorDataset(torch.ones(6, 2, device="meta")), 3), "cuda", 0),
        (DataLoader(ROWS, 3, collate_fn=on_meta, pin_memory=True), "cuda", 0),
        (DataLoader(ROWS, 3, collate_fn=lambda samples: {"x": [on_meta(samples)], "n": 1}), "cuda", 0),
        (DataLoader(ROWS, 3), "cpu", 0),
        (DataLoader(ROWS, 3, pin_memory=True), None, 0),
    ],
)
def test_only_what_lies_on_the_host_is_pinned_where_there_is_a_device(
    loader: DataLoader[Any], device: str | None, pinned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def pin(batch: Any) -> Any:
        calls.append(batch)
        for _, leaf in iter_leaves(batch):
            if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
                raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        return batch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: device is not None)
    monkeypatch.setattr("torch.utils.data._utils.pin_memory.pin_memory", pin)
    source = prepare_loader(loader, device=None if device is None else torch.device(device))
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
    source = prepare_loader(DataLoader(data, batch_size=64, shuffle=True), device=DEVICE)
    expected = [batch[0].clone() for batch in source]
    if gpu.on_device("that batches lie in pinned memory"):
        assert all(batch[0].is_pinned() for batch in source)
    sums, flags = [], []
    for batch in batches_through(source, [to_device], DEVICE):
        gpu.keep_busy(0.02)
        sums.append(batch[0].sum(1))
        flags.append(source.share.last)
        del batch
    assert flags == [False] * 7 + [True]
    for total, batch in zip(sums, expected, strict=True):
        assert torch.equal(total.cpu(), batch.to(DEVICE).sum(1).cpu())


@pytest.mark.gpu
def test_the_copy_does_not_wait_for_the_step_before() -> None:
    batches = [[gpu.pinned(torch.ones(1024, 1024))] for _ in range(2)]
    copied, stepped = gpu.event(), gpu.event()

    def transfer(batch: Any) -> Any:
        moved = to_device(batch)
        copied.record()
        return moved

    iterator = batches_through(batches, [transfer], DEVICE)
    next(iterator)
    gpu.keep_busy(0.3)
    stepped.record()
    next(iterator)
    copied.synchronize()
    if gpu.on_device("that a copy does not wait for the step before"):
        assert not stepped.query()


@pytest.mark.gpu
def test_other_batches_are_moved_on_the_steps_stream() -> None:
    class Own:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    streams = []

    def transfer(batch: Own) -> Own:
        streams.append(gpu.current_stream())
        return Own(batch.x.to(DEVICE))

    for batch in batches_through([Own(torch.ones(2))], [transfer], DEVICE, after=lambda own: Own(own.x + 1)):
        assert batch.x.tolist() == [2.0, 2.0]
    assert streams == [gpu.current_stream()]


@pytest.mark.gpu
def test_batches_of_a_device_are_complete_where_they_are_used() -> None:
    source: Any = torch.arange(64.0, device=DEVICE).reshape(8, 8)

    def slowly(samples: list[Tensor]) -> Tensor:
        gpu.keep_busy(0.02)  # the stream of the step computes the batch, and has not begun yet when it is asked for
        return torch.stack(samples) + 1

    loader = prepare_loader(DataLoader(source, 2, collate_fn=slowly), device=DEVICE)
    given = [batch * 2 for batch in batches_through(loader, [lambda batch: batch.double()], DEVICE)]
    assert torch.equal(torch.cat(given), (source.double() + 1) * 2)
