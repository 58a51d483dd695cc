from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instep.errors import RemoteError, SettingError
from instep.state import DistributedType, PartialState
from tests.helpers.spawn import run_ranks

FACTS = (
    "device",
    "distributed_type",
    "backend",
    "num_processes",
    "process_index",
    "local_process_index",
    "num_nodes",
    "node_index",
    "is_main_process",
    "is_local_main_process",
    "is_last_process",
    "debug",
)


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_process_alone_knows_its_place() -> None:
    state = PartialState(cpu=True)
    assert [getattr(state, name) for name in FACTS] == [
        torch.device("cpu"), DistributedType.NO, None, 1, 0, 0, 1, 0, True, True, True, False,
    ]  # fmt: skip
    assert state.initialized
    assert state.control_group is None
    assert not state.owns_process_group
    assert not dist.is_initialized()
    state.wait_for_everyone()
    state.set_device()
    state.destroy_process_group()
    assert state.initialized


def test_a_backend_is_the_same_in_capitals() -> None:
    PartialState(cpu=True, backend="GLOO")
    PartialState(backend="gloo")
    PartialState(backend="GLOO")


def test_a_copy_in_another_process_holds_what_that_process_holds() -> None:
    assert pickle.loads(pickle.dumps(PartialState(cpu=True))).num_processes == 1
    assert repr(PartialState.__new__(PartialState)) != "PartialState(not initialized)"
    PartialState._reset_state()
    assert repr(PartialState.__new__(PartialState)) == "PartialState(not initialized)"


# One process: everything runs here, names are kept.


def named(value: int = 1) -> int:
    """A docstring."""
    return value


@pytest.mark.parametrize("decorator", ["on_main_process", "on_local_main_process", "on_last_process"])
def test_decorators_work_with_and_without_parentheses_and_keep_names(decorator: str) -> None:
    decorate = getattr(PartialState(cpu=True), decorator)
    for function in (decorate(named), decorate()(named)):
        assert function(value=3) == 3
        assert (function.__name__, function.__doc__) == ("named", "A docstring.")


def test_decorators_by_index_need_one_and_a_process_alone_always_runs() -> None:
    state = PartialState(cpu=True)
    assert state.on_process(named, process_index=3)() == 1
    assert state.on_local_process(local_process_index=3)(named)() == 1
    with pytest.raises(SettingError, match=r"on_process needs.*process_index"):
        state.on_process(named)
    with pytest.raises(SettingError, match=r"on_local_process needs.*local_process_index"):
        state.on_local_process()
    with pytest.raises(SettingError, match="process_index=-1"):
        state.on_process(named, process_index=-1)


def test_first_blocks_let_errors_through() -> None:
    state = PartialState(cpu=True)
    for first in (state.main_process_first, state.local_main_process_first):
        with first():
            pass
        with pytest.raises(KeyError, match="mine"), first():
            raise KeyError("mine")


def test_partial_state_prints_as_print_does(capsys: pytest.CaptureFixture[str]) -> None:
    PartialState(cpu=True).print("a", "b", sep="-")
    assert capsys.readouterr().out == "a-b\n"


# Several processes.


def _three_ranks() -> dict[str, Any]:
    state = PartialState(cpu=True, timeout=300)
    report: dict[str, Any] = {name: getattr(state, name) for name in FACTS}
    report["owned"] = state.owns_process_group
    report["control"] = dist.get_backend(state.control_group)
    report["conflict"] = error_of(PartialState, timeout=50)
    report["other backend"] = error_of(PartialState, backend="mpi")
    PartialState(backend="gloo")
    ran = [
        state.on_main_process(named)(),
        state.on_last_process(named)(),
        state.on_local_main_process(named)(),
        state.on_process(named, process_index=1)(),
        state.on_local_process(named, local_process_index=2)(),
    ]
    report["ran"] = [value is not None for value in ran]
    report["no such rank"] = error_of(state.on_process(named, process_index=3))
    with state.split_between_processes({"a": [1, 2, 3, 4], "b": {"c": (5, 6, 7, 8)}}, apply_padding=True) as part:
        report["part"] = part
    state.wait_for_everyone()
    state.destroy_process_group()
    return report


@pytest.mark.dist
def test_three_ranks_know_their_place() -> None:
    reports = run_ranks(_three_ranks, 3)
    for rank, report in enumerate(reports):
        assert [report[name] for name in FACTS] == [
            torch.device("cpu"), DistributedType.MULTI_CPU, "gloo", 3, rank, rank, 1, 0,
            rank == 0, rank == 0, rank == 2, False,
        ]  # fmt: skip
        assert report["owned"]
        assert report["control"] == "gloo"
        assert "seconds=50" in report["conflict"]
        assert "seconds=300" in report["conflict"]
        assert "backend='mpi', but this process already holds backend='gloo'" in report["other backend"]
        assert report["ran"] == [rank == 0, rank == 2, rank == 0, rank == 1, rank == 2]
        assert "process_index=3: the job has 3 processes" in report["no such rank"]
    parts = [report["part"] for report in reports]
    assert parts == [
        {"a": [1, 2], "b": {"c": (5, 6)}},
        {"a": [3, 4], "b": {"c": (7, 8)}},
        {"a": [4, 4], "b": {"c": (8, 8)}},
    ]


def _first_blocks(folder: str) -> dict[str, Any]:
    state = PartialState(cpu=True, timeout=300)
    report: dict[str, Any] = {}
    for name, first in (("main", state.main_process_first), ("local", state.local_main_process_first)):
        path = f"{folder}/{name}"
        with first():
            if state.is_main_process:
                with open(path, "w") as file:
                    file.write("done")
            else:
                with open(path) as file:
                    report[name] = file.read()
        entered = False
        try:
            with first():
                entered = True
                raise ValueError("the download failed")
        except (ValueError, RemoteError) as error:
            report[name + " error"] = (type(error).__name__, str(error), entered)
        # The others' wait was not left over to be paired with this one.
        with first():
            report[name + " again"] = True
    state.wait_for_everyone()
    return report


@pytest.mark.dist
def test_the_main_process_goes_first_and_its_error_reaches_the_others(tmp_path: Any) -> None:
    main, other = run_ranks(_first_blocks, 2, str(tmp_path))
    for name in ("main", "local"):
        assert main[name + " error"] == ("ValueError", "the download failed", True)
        kind, text, entered = other[name + " error"]
        assert (kind, entered) == ("RemoteError", False)
        assert f"the block under {'local_' if name == 'local' else ''}main_process_first() failed on rank 0" in text
        assert "ValueError: the download failed" in text
        assert other[name] == "done"
        assert main[name + " again"]
        assert other[name + " again"]


def _group_of_the_users_own() -> list[Any]:
    dist.init_process_group("gloo")
    report: list[Any] = [error_of(PartialState, cpu=True, timeout=20)]
    state = PartialState(cpu=True)
    state.wait_for_everyone()
    report += [state.num_processes, state.backend, state.owns_process_group]
    state.destroy_process_group()
    report += [state.initialized, dist.is_initialized(), PartialState(cpu=True).num_processes]
    return report


@pytest.mark.dist
def test_a_group_of_the_users_own_is_used_and_left_alone() -> None:
    for report in run_ranks(_group_of_the_users_own, 2):
        assert "timeout: the process group exists already" in report[0]
        assert report[1:] == [2, "gloo", False, False, True, 2]


def _several_that_look_like_one() -> str:
    dist.init_process_group("gloo")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    return error_of(PartialState, cpu=True)


@pytest.mark.dist
def test_several_processes_never_become_one() -> None:
    for rank, text in enumerate(run_ranks(_several_that_look_like_one, 2)):
        assert f"this process is rank {rank} of 2, but the environment says rank 0 of 1" in text
