"""Signals to a whole process group leave loader workers at work."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from instep.data import prepare_loader

IN_WORKERS = (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class SignalledMap(Dataset[Any]):
    """Every worker gets the signals while it loads its first sample."""

    def __init__(self) -> None:
        self.sent = False

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self._send()
        return index

    def _send(self) -> None:
        if not self.sent:
            self.sent = True
            for number in IN_WORKERS:
                os.kill(os.getpid(), number)


class SignalledStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        data = SignalledMap()
        for index in range(4):
            yield data[index]


def mark(worker_id: int) -> None:
    torch.utils.data.get_worker_info().dataset.sent = worker_id == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("data", "expected"),
    [(SignalledMap(), [*range(8)]), (SignalledStream(), sorted([*range(4)] * 2))],
    ids=["map", "stream"],
)
def test_signals_but_a_second_sigterm_are_left_to_the_main_process(data: Any, expected: list[int]) -> None:
    loader: DataLoader[Any] = DataLoader(data, batch_size=2, num_workers=2)
    batches = list(prepare_loader(loader))
    assert sorted(torch.cat(batches).tolist()) == expected
    assert loader.worker_init_fn is None


class Sender(SignalledMap):
    """The worker gets SIGTERM twice."""

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        return index


def test_a_second_sigterm_ends_a_worker() -> None:
    with pytest.raises(RuntimeError, match=r"worker.* exited unexpectedly"):
        list(prepare_loader(DataLoader(Sender(), batch_size=2, num_workers=1)))


def test_the_users_own_init_function_runs() -> None:
    loader: DataLoader[Any] = DataLoader(SignalledMap(), batch_size=2, num_workers=2, worker_init_fn=mark)
    assert sum(len(batch) for batch in prepare_loader(loader)) == 8
    assert loader.worker_init_fn is mark


def kill_the_main_process(worker_id: int) -> None:
    main = os.getppid()
    os.kill(main, signal.SIGKILL)
    while os.getppid() == main:
        os.sched_yield()


class Full(SignalledMap):
    """More bytes than a pipe takes, in a process that does not end for want of room in it."""

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            kill_the_main_process(0)
        return bytes(1 << 20)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(SignalledMap(), num_workers=1, worker_init_fn=kill_the_main_process, multiprocessing_context="fork"),
        DataLoader(Full(), num_workers=2, collate_fn=list, multiprocessing_context="fork"),
    ],
    ids=["while it starts", "while it passes on a batch"],
)
def test_a_worker_ends_with_the_main_process(loader: DataLoader[Any]) -> None:
    reader, writer = os.pipe()
    main = os.fork()
    if main == 0:
        os.setpgid(0, 0)
        next(iter(prepare_loader(loader)))
        signal.pause()
    os.close(writer)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(main, 0)[1]) == -signal.SIGKILL
        assert select.select([reader], [], [], 20.0)[0], "a worker, which holds the other end, lives on"
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(main, signal.SIGKILL)
