from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from instep.data import prepare_loader
from instep.data.prefetch import prefetch


def to_gpu(batch: Any) -> Any:
    return [part.to("cuda", non_blocking=True) for part in batch]


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


@pytest.mark.gpu
def test_a_batch_that_the_device_still_computes_is_waited_for() -> None:
    def computed() -> Any:
        for number in range(4):
            x = torch.zeros(2**20, device="cuda")
            torch.cuda._sleep(50_000_000)
            x += number
            yield [x, number]

    sums = []
    for batch in prefetch(computed(), lambda batch: [batch[0].double(), batch[1]]):
        sums.append(batch[0].mean())
        del batch
    assert [float(each) for each in sums] == [0.0, 1.0, 2.0, 3.0]
