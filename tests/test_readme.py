"""The tests that README.md of this folder, and the page of faults, name are there; CITATION.cff has the version."""

from __future__ import annotations

import re
from pathlib import Path

import instep

TESTS = Path(__file__).parent
PATH, NAME = r"(?:[\w]+/)*test_\w+\.py", r"test_\w+"


def test_what_holds_a_bar_is_there() -> None:
    assert _named((TESTS / "README.md").read_text()) > 100
    for script in re.findall(r"`(benchmarks/\w+\.py)`", (TESTS / "README.md").read_text()):
        assert (TESTS.parent / script).exists(), script


def test_what_holds_a_fault_is_there() -> None:
    page = (TESTS.parent / "docs/reference/fault_table.md").read_text()
    assert _named(page) > 40
    assert sorted(map(int, re.findall(r"^\| (\d+) \|", page, re.MULTILINE))) == list(range(1, 27))
    proved = [number for line in re.findall(r"^- \*\*([\d, ]+):", page, re.MULTILINE) for number in line.split(", ")]
    assert sorted(map(int, proved)) == list(range(1, 27))


def test_the_citation_has_the_version() -> None:
    citation = (TESTS.parent / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [instep.__version__]


def _named(text: str) -> int:
    """Count the tests that a text names, as `path::name` or, after a path, as `::name`; each must be there."""
    file, named = "", 0
    for path, name in re.findall(rf"`({PATH})?(?:::({NAME}))?`", text):
        file = path or file
        if name:
            assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), f"{file} has no {name}"
            named += 1
    return named
