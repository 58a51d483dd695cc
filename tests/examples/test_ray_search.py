from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.helpers.spawn import run_command

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_search.py"


@pytest.mark.ray
def test_a_trial_that_fails_goes_on_and_ends_as_one_that_does_not(tmp_path: Path) -> None:
    found: list[str] = []
    for fails in ([], ["--fail"]):
        done = run_command([sys.executable, str(EXAMPLE), "--smoke", *fails, "--root", str(tmp_path)], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert ("this trial fails once" in done.stdout + done.stderr) == bool(fails)
        found += re.findall(r"1 trials, 0 failed; best loss [\d.]+", done.stdout)
    assert len(found) == 2
    assert found[0] == found[1]
