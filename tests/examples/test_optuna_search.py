from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.spawn import run_command
from tests.helpers.warm import warm_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "optuna_search.py"


@pytest.mark.optuna
@pytest.mark.dist
@pytest.mark.parametrize("launch", [[], ["-m", "torch.distributed.run", "--nproc-per-node", "2"]], ids=["1", "2"])
def test_the_optuna_example_finds_a_low_loss(launch: list[str], tmp_path: Path) -> None:
    done = run_command([warm_python(), *launch, str(EXAMPLE), "--smoke"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.search(r"3 trials, (\d) pruned; best loss ([\d.]+) with", done.stdout)
    assert found, done.stdout
    assert float(found[2]) < 0.5
    assert list(tmp_path.iterdir()) == []
