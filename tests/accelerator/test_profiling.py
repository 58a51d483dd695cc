from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.accelerator.handlers import ProfileKwargs, profile


def operations(path: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}


def test_one_trace_per_rank(tmp_path: Path) -> None:
    handler = ProfileKwargs(activities=["cpu"], record_shapes=True, output_trace_dir=tmp_path / "traces")
    for rank in (0, 1):
        with profile(handler, rank):
            torch.ones(3, 4) @ torch.ones(4, 2)
    files = sorted((tmp_path / "traces").iterdir())
    assert [file.name for file in files] == ["profile_0.json", "profile_1.json"]
    assert all("aten::mm" in operations(file) for file in files)


# Said of the profiler's own tables; the traces are per cycle by design.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_schedule_writes_each_cycle_and_calls_back(tmp_path: Path) -> None:
    ready: list[Any] = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 2},
        on_trace_ready=ready.append,
        output_trace_dir=str(tmp_path),
    )
    with profile(handler, 3) as profiler:
        for _ in range(6):
            torch.ones(2).exp()
            profiler.step()
    assert {file.name for file in tmp_path.iterdir()} == {"profile_3.json", "profile_3_2.json"}
    assert ready == [profiler] * 2


def test_a_trace_that_was_never_taken_is_said(tmp_path: Path) -> None:
    handler = ProfileKwargs(
        activities=["cpu"], schedule_option={"wait": 5, "warmup": 1, "active": 1}, output_trace_dir=tmp_path
    )
    with pytest.warns(UserWarning, match=r"nothing was recorded"), profile(handler) as profiler:
        profiler.step()
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_the_trace(tmp_path: Path) -> None:
    handler = ProfileKwargs(activities=["cpu"], output_trace_dir=tmp_path)
    with pytest.raises(ZeroDivisionError), profile(handler):
        [torch.ones(2).exp(), 1 // 0]
    assert "aten::exp" in operations(tmp_path / "profile_0.json")


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_an_error_of_the_callback_waits_for_the_end() -> None:
    seen: list[int] = []

    def fails(profiler: Any) -> None:
        seen.append(profiler.step_num)
        raise OSError(f"disk full at step {profiler.step_num}")

    handler = ProfileKwargs(["cpu"], {"wait": 0, "warmup": 1, "active": 1}, fails)
    with pytest.raises(OSError, match="disk full at step 2"), profile(handler) as profiler:
        [(torch.ones(2).exp(), profiler.step()) for _ in range(4)]
    assert seen == [2, 4]
