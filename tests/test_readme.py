"""The tests that README.md of this folder names are there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PATH, NAME = r"(?:[\w]+/)*test_\w+\.py", r"test_\w+"


def test_what_holds_a_bar_is_there() -> None:
    file, named = "", 0
    for path, name in re.findall(rf"`({PATH})?::({NAME})`", (TESTS / "README.md").read_text()):
        file = path or file
        assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), f"{file} has no {name}"
        named += 1
    assert named > 100
    for script in re.findall(r"`(benchmarks/\w+\.py)`", (TESTS / "README.md").read_text()):
        assert (TESTS.parent / script).exists(), script
