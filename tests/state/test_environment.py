from __future__ import annotations

import pytest

from instep.errors import SettingError
from instep.state import ProcessEnvironment, read_environment
from instep.state.environment import read_debug

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "3",
}


def test_without_variables_a_process_is_alone() -> None:
    assert read_environment({}) == ProcessEnvironment()
    assert read_environment({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == ProcessEnvironment()


def test_torchruns_variables_are_read() -> None:
    assert read_environment(TORCHRUN) == ProcessEnvironment(5, 1, 8, 4, 1, 2, "torchrun", 3)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, ProcessEnvironment(launcher="torchrun")),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, ProcessEnvironment(1, 1, 2, 2, launcher="torchrun")),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            ProcessEnvironment(3, 1, 4, 2, 1, 2, "torchrun"),
        ),
    ],
)
def test_variables_set_by_hand_are_completed(environ: dict[str, str], expected: ProcessEnvironment) -> None:
    assert read_environment(environ) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": None}, "RANK is not set"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"RANK": "8"}, "RANK=8 must be from 0 to 7"),
        ({"RANK": "one"}, "RANK='one' is not an integer"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 must be from 0 to 3"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 must be at least 1"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 must be from 1 to 8"),
    ],
)
def test_contradictions_are_errors_that_name_the_variable(change: dict[str, str | None], message: str) -> None:
    environ = {key: value for key, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(SettingError, match=message):
        read_environment(environ)


def test_debug_is_a_switch() -> None:
    assert [read_debug({"INSTEP_DEBUG": text}) for text in ("1", "true", "0", "")] == [True, True, False, False]
    assert read_debug({}) is False
    with pytest.raises(SettingError, match="INSTEP_DEBUG='maybe'"):
        read_debug({"INSTEP_DEBUG": "maybe"})
