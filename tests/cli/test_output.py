"""What commands print, on a terminal and elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from instep.cli import output
from instep.errors import UsageError

ROWS = [("a[bold]", 1), ("b" * 150, None)]


def test_a_table_elsewhere_is_one_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("name", "n"), ROWS, right=("n",))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{'name':150}  n", f"{'a[bold]':150}  1", "b" * 150]


def test_a_table_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output.table(("name", "n"), ROWS, right=("n",))
    shown = capsys.readouterr().out
    assert "│ a[bold]" in shown, "names are not markup"
    assert shown.count("b") >= 150, "nothing is cut off"


def test_json_output_is_strict_and_names_large_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    large = torch.zeros(3, 4, dtype=torch.bfloat16)
    output.say_json({1: (float("nan"), float("-inf")), "t": torch.ones(2), "large": large, "p": Path("x"), "b": True})
    assert json.loads(capsys.readouterr().out) == {
        "1": ["nan", "-inf"],
        "t": [1.0, 1.0],
        "large": {"dtype": "bfloat16", "shape": [3, 4]},
        "p": "x",
        "b": True,
    }


def test_a_tree_shows_nested_values_by_indentation(capsys: pytest.CaptureFixture[str]) -> None:
    output.tree("nothing", {})
    output.tree("title", {"a": {"b": [1, 2], "c": [{"d": None}, {"d": [[1], [2]]}]}, "t": torch.zeros(9), "empty": {}})
    assert capsys.readouterr().out.splitlines() == [
        "",
        "title",
        "  a:",
        "    b: [1, 2]",
        "    c:",
        "      0:",
        "        d: null",
        "      1:",
        "        d:",
        "          [1]",
        "          [2]",
        "  t: float32 [9]",
        "  empty: {}",
    ]


@pytest.mark.parametrize(("created", "said"), [("yesterday", "yesterday"), ("2999-01-01T00:00:00+00:00", "0 s ago")])
def test_the_age_of_an_odd_time_is_shown_as_it_is(created: str, said: str) -> None:
    assert output.age(created) == said


def test_a_question_is_refused_without_a_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="say --yes"):
        output.confirm("3 runs", "Delete?", "Look at it, then say --yes.", "nothing was deleted")
