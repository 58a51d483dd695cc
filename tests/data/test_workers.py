"""Signals to a whole process group leave loader workers at work, and no way out of a pass leaves one behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from instep.data import CombinedLoader, prepare_loader
from instep.data.workers import worker_failure
from instep.errors import LoaderWorkerError
from tests.helpers.spawn import run_command

REPO = Path(__file__).parents[2]

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
    [(SignalledMap(), [*range(8)]), (SignalledStream(), [*range(4)])],
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


class Exits(IterableDataset[int]):
    """The worker's process ends in the middle of the data."""

    def __iter__(self) -> Iterator[int]:
        yield from range(4)
        os._exit(3)


class Killed(SignalledMap):
    """The system ends the worker, as for want of memory."""

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


@pytest.mark.parametrize(
    ("data", "how"), [(Sender(), "SIGTERM"), (Killed(), "SIGKILL. .*memory runs out"), (Exits(), "exit code 3")]
)
def test_a_dead_worker_is_named_with_what_ended_it(data: Any, how: str) -> None:
    with pytest.raises(LoaderWorkerError, match=rf"worker \(pid \d+\) exited unexpectedly: (ended by )?{how}"):
        list(prepare_loader(DataLoader(data, batch_size=2, num_workers=1)))


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), EOFError(), FileNotFoundError("/tmp/pipe")])
def test_a_broken_pipe_to_a_dead_worker_is_told_from_errors_of_the_data(error: Exception) -> None:
    worker = multiprocessing.get_context("fork").Process(target=os._exit, args=(9,))
    worker.start()
    started = SimpleNamespace(_workers=[worker])
    assert "exit code 9" in str(worker_failure(error, started))
    assert worker_failure(RuntimeError("Caught ValueError in DataLoader worker process 0."), started) is None
    assert worker_failure(ValueError("of the data set"), started) is None
    assert worker_failure(error, None) is None


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


class Broken(Dataset[Any]):
    """One sample raises; where `stuck`, the other worker does not come back from the batch after it."""

    def __init__(self, stuck: bool = False) -> None:
        self.broken, self.stuck = True, stuck

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if self.broken and index == 5:
            raise ValueError("corrupt")
        if self.stuck and index == 6:
            signal.pause()
        return index


class Wrapped(DataLoader[Any]):
    """A loader whose iterator is none of torch's."""

    def __iter__(self) -> Any:
        return map(torch.clone, super().__iter__())


class Stateful(StatefulDataLoader[Any]):
    pass


def workers() -> list[Any]:
    """Return the loader workers of this process; other tests may have left ranks that are kept."""
    return [one for one in multiprocessing.active_children() if one.daemon and not one.name.startswith("kept rank")]


LOADERS = pytest.mark.parametrize("kind", [DataLoader, Wrapped, Stateful])
PERSISTENT = pytest.mark.parametrize("persistent", [False, True])


@LOADERS
@PERSISTENT
@pytest.mark.parametrize("stuck", [False, True])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata with a new torch
def test_an_error_in_a_worker_ends_all_and_the_loader_can_be_used_again(
    kind: Any, persistent: bool, stuck: bool
) -> None:
    data = Broken(stuck)
    loader = kind(data, batch_size=2, num_workers=2, persistent_workers=persistent)
    source = prepare_loader(loader)
    with pytest.raises(ValueError, match=r"(?s)Caught ValueError in DataLoader worker process 0.*corrupt") as caught:
        list(source)
    assert workers() == [], "though the error with its frames is held"
    if kind is DataLoader and sys.version_info >= (3, 11):
        assert "The data set raised this for sample 5." in str(caught.value)
        assert caught.value.__notes__ == ["Batch 2 of epoch 0 has the samples [4, 5]."]
    data.broken = data.stuck = False
    source.set_epoch(1)
    assert torch.cat(list(source)).tolist() == [*range(12)]
    source.close()
    assert workers() == []


@LOADERS
@PERSISTENT
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_closing_a_source_ends_the_workers_of_a_pass_that_is_held(kind: Any, persistent: bool) -> None:
    source = prepare_loader(kind(range(12), batch_size=2, num_workers=2, persistent_workers=persistent))
    first = iter(source)
    next(first)
    second = iter(source)  # the first is held still, as by the frames of an error
    next(second)
    assert len(workers()) == 2
    source.close()
    source.close()
    assert workers() == []


def test_leaving_a_combined_pass_ends_the_workers_of_its_loaders_and_no_later_pass() -> None:
    loaders = [DataLoader(range(12), batch_size=2, num_workers=1) for _ in range(2)]  # type: ignore[arg-type]
    source = CombinedLoader(loaders).map(prepare_loader)
    first = iter(source)
    next(first)
    second = iter(source)
    next(second)
    del first
    assert len(workers()) == 2
    assert len(list(second)) == 5
    third = iter(source)
    next(third)
    del third
    assert workers() == []


@pytest.mark.parametrize("kind", [DataLoader, Wrapped])
def test_the_users_own_persistent_workers_stay_the_users(kind: Any) -> None:
    loader = kind(range(12), batch_size=2, num_workers=2, persistent_workers=True)
    before = sorted(worker.pid for worker in (list(loader), workers())[1])
    source = prepare_loader(loader)
    for epoch in range(2):
        source.set_epoch(epoch)
        assert torch.cat(list(source)).tolist() == [*range(12)]
    source.close()
    assert set(before) <= {worker.pid for worker in workers()}
    assert torch.cat(list(loader)).tolist() == [*range(12)]
    del loader, source
    assert workers() == []


class FourInAll(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class TensorState(DataLoader[Any]):
    """A loader with a state of its own that holds a tensor."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.zeros(2)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def leave_running(how: str, kind: str = "") -> Any:
    """End this process in some way while a worker of it, which does not listen, is in the middle of a sample."""
    data: Any = FourInAll() if kind else Broken(stuck=True)
    loader = TensorState if kind == "stateful" else DataLoader
    source = prepare_loader(loader(data, batch_size=2, num_workers=2, persistent_workers=not kind))
    batches = iter(source)
    next(batches)
    if how == "a variable":  # it is cleared after some modules
        return batches
    if how == "a garbage collection":  # the last one, at the interpreter's end
        cycle: list[Any] = [batches]
        cycle.append(cycle)
        return None
    sys.kept = batches  # type: ignore[attr-defined]
    if how == "a process of multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=leave_running, args=("",))
        child.start()
        child.join()
    if how == "an error":
        raise ValueError("on purpose")
    return None


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("the end of the script", ""),
        pytest.param("an error", "", marks=pytest.mark.campaign),
        pytest.param("a process of multiprocessing", "", marks=pytest.mark.campaign),
        pytest.param("a variable", "stream", marks=pytest.mark.campaign),
        ("a garbage collection", "stream"),
        pytest.param("a garbage collection", "stateful", marks=pytest.mark.campaign),
    ],
)
def test_a_program_ends_though_a_pass_is_held(how: str, kind: str) -> None:
    script = f"from tests.data.test_workers import leave_running; kept = leave_running({how!r}, {kind!r})"
    done = run_command([sys.executable, "-c", script], cwd=REPO, env={"PYTHONPATH": str(REPO)})
    assert done.returncode == (how == "an error"), done.stderr
    assert done.stderr.count("Traceback") == (how == "an error")


@pytest.mark.parametrize("data", [range(4), FourInAll()], ids=["indexed", "iterable"])
def test_the_descriptors_of_workers_are_closed_with_the_pass_and_not_by_the_garbage_collector(data: Any) -> None:
    def open_after(passes: int) -> int:
        for epoch in range(passes):
            source.set_epoch(epoch)
            assert len(list(source)) == 2
        return len(os.listdir("/proc/self/fd"))

    source = prepare_loader(DataLoader(data, batch_size=2, num_workers=2))
    gc.collect()
    gc.disable()
    try:
        few = open_after(2)
        assert open_after(8) <= few + 8, "each pass would leave four"
    finally:
        gc.enable()
