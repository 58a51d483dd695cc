from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from instep.health import progress_file
from instep.health.progress_file import ProgressFile, plain_metrics
from instep.health.run_status import PROGRESS, begin_status


def test_the_last_facts_stay_in_the_file_and_a_new_run_removes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_file, "_FIRST_S", 0.0)
    asked, step = threading.Event(), 7

    def facts() -> dict[str, Any]:
        asked.set()
        return {"global_step": step, "metrics": plain_metrics({"loss": float("nan"), "lr": 0.1})}

    file = ProgressFile(tmp_path, facts)
    assert asked.wait(30)
    file.close()
    path = tmp_path / PROGRESS
    told = json.loads(path.read_text())
    assert (told["global_step"], told["metrics"], told["steps_per_s"]) == (7, {"loss": "nan", "lr": 0.1}, 0.0)

    asked.clear()
    failed = ProgressFile(tmp_path, facts)
    assert asked.wait(30)
    step = 8
    failed.close(ValueError, ValueError("x"))
    assert json.loads(path.read_text())["global_step"] == 7, "it has what the run was doing before its error"

    begin_status(tmp_path, {"status": "running"})
    assert not path.exists()
