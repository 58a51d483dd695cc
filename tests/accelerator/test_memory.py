from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from instep.accelerator.memory import (
    clear_device_cache,
    find_executable_batch_size,
    is_out_of_memory,
    release_memory,
)
from instep.distributed import gather_object
from instep.errors import DistributedError, HookError, RemoteError, SettingError, UsageError
from instep.state import PartialState, process
from tests.helpers.spawn import RanksFailed, run_ranks


def real_cpu_error() -> BaseException:
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError("an exbibyte was found")


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("XPU out of memory. Tried to allocate 20 MiB"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RemoteError("a step failed", rank=1, traceback="Traceback ...\nMemoryError"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, short: bool) -> None:
    assert is_out_of_memory(error) is short


def test_the_host_s_allocator_and_chained_errors_count() -> None:
    error = real_cpu_error()
    assert is_out_of_memory(error)
    chained = ValueError("the step failed")
    chained.__cause__ = error
    assert is_out_of_memory(chained)


def test_sizes_are_halved_and_the_one_that_worked_is_kept() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, offset: int, *, scale: int = 1) -> int:
        """Trains."""
        tried.append(batch_size)
        if batch_size > 12:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch_size * scale + offset

    assert train(1, scale=2) == 25
    assert tried == [100, 50, 25, 12]
    assert train(0) == 12
    assert tried[4:] == [12]
    assert (train.__name__, train.__doc__) == ("train", "Trains.")
    assert not process.is_held()  # the function may build the state as it likes


def test_a_batch_size_is_searched_with_the_users_own_reduction() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda size: size - 3)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        raise MemoryError("no room")

    with pytest.raises(UsageError, match=r"tried 8, 5, 2\. The last error was:\nMemoryError: no room"):
        train()
    stuck = find_executable_batch_size(lambda batch_size: real_cpu_raise(), 8, reduce_batch_size_fn=lambda size: size)
    with pytest.raises(SettingError, match=r"reduce_batch_size_fn\(8\) gave 8"):
        stuck()


def real_cpu_raise() -> None:
    raise real_cpu_error()


def test_a_failed_attempt_leaves_nothing_behind() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> list[bool]:
        if batch_size == 4:
            batch = torch.ones(batch_size)
            held.append(weakref.ref(batch))
            raise MemoryError
        return [ref() is None for ref in held]

    assert train() == [True]


def test_an_error_that_is_not_out_of_memory_is_raised_unchanged() -> None:
    calls: list[int] = []

    @find_executable_batch_size
    def train(batch_size: int) -> None:
        calls.append(batch_size)
        raise KeyError("label")

    with pytest.raises(KeyError, match=r"label"):
        train()
    assert calls == [128]


@pytest.mark.parametrize(
    "function", [lambda: None, lambda *, batch_size: None, lambda **options: None, lambda self, batch_size: None]
)
def test_functions_that_take_no_batch_size(function: Callable[..., Any]) -> None:
    with pytest.raises(HookError, match=r"must take the batch size as its first argument"):
        find_executable_batch_size(function)


def test_the_batch_size_is_left_out_of_the_call() -> None:
    train = find_executable_batch_size(lambda batch_size, model: model)
    with pytest.raises(HookError, match=r"too many positional arguments.*leave it out of the call"):
        train(128, "model")
    for size in (0, -1, 2.0, True):
        with pytest.raises(SettingError, match=r"starting_batch_size="):
            find_executable_batch_size(starting_batch_size=size)  # pyright: ignore[reportCallIssue,reportArgumentType]


def test_release_memory_drops_the_objects() -> None:
    class Model(torch.nn.Linear):
        pass

    model, optimizer = Model(2, 2), None
    model.itself = [model]  # a cycle, as hooks and closures make them
    reference = weakref.ref(model)
    gc.disable()
    try:
        model, optimizer = release_memory(model, optimizer)
        assert model is None
        clear_device_cache()
        assert reference() is not None
        clear_device_cache(garbage_collection=True)
        assert reference() is None
    finally:
        gc.enable()


def one_rank_short(short_rank: int) -> tuple[int, list[int]]:
    rank, tried = PartialState().process_index, []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if rank == short_rank and batch_size > 4:
            raise real_cpu_error()
        return batch_size

    return train(), tried


@pytest.mark.dist
@pytest.mark.parametrize("short_rank", [0, 1])
def test_all_ranks_settle_on_one_size(short_rank: int) -> None:
    assert run_ranks(one_rank_short, 2, short_rank) == [(4, [16, 8, 4])] * 2


def one_rank_fails() -> tuple[str, str]:
    rank = PartialState().process_index

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> None:
        if rank == 0:
            raise MemoryError
        raise KeyError("label")

    try:
        train()
    except (KeyError, RemoteError) as error:
        return type(error).__name__, str(error)
    return "", ""


def no_size_fits() -> str:
    state = PartialState()

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> None:
        if state.process_index == 1:
            raise MemoryError("here")

    with pytest.raises(UsageError) as caught:
        train()
    return str(caught.value)


def sizes_differ() -> str:
    rank = PartialState().process_index
    with pytest.raises(DistributedError) as caught:
        find_executable_batch_size(lambda batch_size: None, starting_batch_size=8 + rank)()
    return str(caught.value)


def all_cases() -> list[Any]:
    return [one_rank_fails(), no_size_fits(), sizes_differ(), gather_object(0)]


@pytest.mark.dist
def test_errors_reach_all_ranks() -> None:
    for rank, (failed, never, unlike, _) in enumerate(run_ranks(all_cases, 2)):
        assert failed[0] == ("RemoteError", "KeyError")[rank]
        assert "label" in failed[1]
        assert "tried 2, 1. The last error was:\nMemoryError: here" in never
        assert "different batch sizes: [8, 9] by rank" in unlike


def leaves_early() -> None:
    PartialState()

    @find_executable_batch_size
    def train(batch_size: int) -> None:
        if PartialState().process_index == 1:
            raise SystemExit(3)

    train()


@pytest.mark.dist
def test_a_rank_that_leaves_is_not_waited_for() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(leaves_early, 2)
    assert "SystemExit" in caught.value.errors[1]
    assert "ran past" not in str(caught.value)
