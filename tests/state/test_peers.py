"""Processes and state: what trainers of this kind are known to get wrong, each as the behaviour that is right.

Each test fails on the behaviour that its docstring describes. Three more stand beside their like: `on_process` without
an index in `test_partial.py` (it silently runs nowhere); tuples, nested and mutated dicts, empty and unknown inputs of
`split_between_processes` in `test_split.py`. That an argument beats the configuration file is the command line's
to show.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from instep.distributed import gather_object
from instep.errors import RemoteError, SettingError, StateError
from instep.state import AcceleratorState, GradientState, PartialState, Run, active_run, pop_run, push_run
from tests.helpers.spawn import run_command, run_ranks
from tests.helpers.warm import warm_python


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


PROGRAM = """
from instep import PartialState, debug_launcher
from instep.distributed import gather_object


def who():
    state = PartialState(cpu=True)
    return state.num_processes, gather_object(state.process_index)


print(debug_launcher(who, num_processes=3))
"""


@pytest.mark.dist
def test_asking_for_n_cpu_processes_starts_n_that_know_each_other(tmp_path: Path) -> None:
    """One starts; or N start and each believes to be rank 0 of 1."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_command([warm_python(), str(program)])
    assert done.stdout.strip() == str([(3, [0, 1, 2])] * 3), done.stderr


@pytest.mark.parametrize(
    "environ",
    [
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_SIZE": "2"},
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "WORLD_SIZE": "1"},
    ],
)
def test_a_world_size_above_one_that_would_be_one_process_is_an_error(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process trains by itself, as rank 0 of 1."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingError):
        PartialState(cpu=True)
    assert repr(PartialState.__new__(PartialState)) == "PartialState(not initialized)"


def test_a_second_construction_with_other_arguments_is_an_error_that_names_both() -> None:
    """The time-out, the precision or the accumulation of the second one is ignored, or resets that of the first."""
    PartialState(cpu=True, timeout=1800, debug=False)
    PartialState(timeout=timedelta(minutes=30), debug=False)
    with pytest.raises(StateError, match=r"timeout=.*seconds=7.*already holds timeout=.*seconds=1800"):
        PartialState(timeout=7)
    with pytest.raises(StateError, match="cpu=False, but this process already holds cpu=True"):
        PartialState(cpu=False)
    with pytest.raises(StateError, match="backend='gloo', but this process already holds torch's default backend"):
        PartialState(backend="gloo")
    with pytest.raises(StateError, match="debug=True, but this process already holds debug=False"):
        PartialState(debug=True)
    run = push_run(Run("Trainer.fit", "bf16", num_steps=4))
    with pytest.raises(StateError, match=r"mixed_precision='fp16'.*Trainer\.fit.*mixed_precision='bf16'"):
        AcceleratorState("fp16")
    PartialState()
    AcceleratorState()
    assert (AcceleratorState().mixed_precision, GradientState().num_steps) == ("bf16", 4)
    inner = push_run(Run("Trainer.validate"))
    pop_run(inner)
    assert active_run() is run
    assert GradientState().num_steps == 4


@pytest.mark.parametrize(
    ("environ", "kwargs"),
    [
        ({"WORLD_SIZE": "2"}, {}),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "", "MASTER_PORT": ""}, {}),
        ({"INSTEP_DEBUG": "maybe"}, {}),
        ({}, {"timeout": 0}),
        ({}, {"time_out": 5}),
    ],
)
def test_construction_is_all_or_nothing(
    environ: dict[str, str], kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared state is half filled, and the next construction fails with a misleading error."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingError):
        PartialState(cpu=True, **kwargs)
    assert not dist.is_initialized()
    state = PartialState.__new__(PartialState)
    assert not state.initialized
    with pytest.raises(StateError, match="holds nothing"):
        _ = state.device
    for name in environ:
        monkeypatch.delenv(name)
    assert PartialState(cpu=True).num_processes == 1


@pytest.mark.parametrize("kind", [PartialState, AcceleratorState, GradientState])
@pytest.mark.parametrize("name", ["device", "num_processes", "mixed_precision", "sync_gradients", "initialized", "new"])
def test_nothing_can_be_assigned(kind: Any, name: str) -> None:
    """`PartialState().device = "banana"` sticks for all later readers."""
    state = kind()
    with pytest.raises(AttributeError, match=f"{kind.__name__}.{name} cannot be assigned"):
        setattr(state, name, "banana")
    with pytest.raises(AttributeError):
        delattr(state, name)


def test_a_view_that_raises_builds_no_process_state() -> None:
    """The same, by way of AcceleratorState."""
    with pytest.raises(StateError, match="no active run"):
        AcceleratorState("bf16", cpu=True)
    push_run(Run("Trainer.fit", "no"))
    with pytest.raises(StateError, match=r"'bf16'.*'no'"):
        AcceleratorState("bf16", cpu=True)
    assert repr(PartialState.__new__(PartialState)) == "PartialState(not initialized)"


def _end_and_build_again() -> list[Any]:
    report: list[Any] = []
    state = PartialState(cpu=True, timeout=300)
    state.destroy_process_group()
    state.destroy_process_group()
    report += [state.initialized, dist.is_initialized(), repr(state), error_of(lambda: state.num_processes)]
    state = PartialState(cpu=True, timeout=300)
    state.wait_for_everyone()
    report += [state.num_processes]
    state.wait_for_everyone()
    dist.destroy_process_group()  # behind the state's back
    report += [state.initialized, error_of(lambda: state.num_processes)]
    report += [PartialState(cpu=True).num_processes]
    state.wait_for_everyone()
    return report


@pytest.mark.dist
def test_after_its_group_is_destroyed_the_state_says_so_and_can_be_built_again() -> None:
    """It still claims two processes, and the next collective fails."""
    for report in run_ranks(_end_and_build_again, 2):
        assert report[:3] == [False, False, "PartialState(not initialized)"]
        assert report[3].startswith("StateError: the process state holds nothing: its process group was destroyed")
        assert report[4:6] == [2, False]
        assert "its process group was destroyed" in report[6]
        assert report[7] == 2


def _first() -> list[Any]:
    state = PartialState(cpu=True, timeout=300)
    report: list[Any] = []
    try:
        with state.main_process_first():
            report.append("ran")
            raise OSError("no space left")
    except (OSError, RemoteError) as error:
        report.append(type(error).__name__)
    return [*report, gather_object(state.process_index)]


@pytest.mark.dist
def test_an_error_on_the_main_process_does_not_pair_the_others_wait_with_the_next() -> None:
    """The others go on into the block, and their wait meets the main process's next collective."""
    assert run_ranks(_first, 2) == [["ran", "OSError", [0, 1]], ["RemoteError", [0, 1]]]


def _named() -> list[Any]:
    state = PartialState(cpu=True, timeout=300)

    @state.on_last_process
    def report() -> int:
        """What it does."""
        return state.process_index

    return [report.__name__, report.__doc__, report()]


@pytest.mark.dist
def test_a_decorated_function_keeps_its_name_also_where_it_does_not_run() -> None:
    """It is called do_nothing there."""
    assert run_ranks(_named, 2) == [["report", "What it does.", None], ["report", "What it does.", 1]]


def test_an_argument_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable wins."""
    for variable, argument in (("1", False), ("0", True), ("no switch at all", True)):
        monkeypatch.setenv("INSTEP_DEBUG", variable)
        assert PartialState(cpu=True, debug=argument).debug is argument
        PartialState._reset_state()
    monkeypatch.setenv("INSTEP_DEBUG", "1")
    assert PartialState(cpu=True).debug is True
