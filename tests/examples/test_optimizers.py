"""The example of many optimizers: each learns something in its first epoch."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "optimizers.py"


@pytest.mark.filterwarnings("ignore")  # the example's script, as a user runs it
def test_the_example_of_optimizers_learns_with_each() -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    reached = main(["--smoke", "--schedule", "wsd"])
    assert set(reached) == {"sgd", "adamw", "nadam", "radam", "adafactor", "lbfgs", "muon"}
    assert min(accuracy for name, accuracy in reached.items() if name != "lbfgs") > 0.3, "lbfgs has done one step"
    assert reached["muon"] > 0.8
