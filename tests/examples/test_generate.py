"""`examples/generate.py`: the same answers in order, however many processes there are and whoever divides the work."""

from __future__ import annotations

import contextlib
import io
from importlib import import_module
from pathlib import Path

import pytest

from tests.helpers.spawn import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
WAYS = ((), ("--strategy", "ddp"), ("--strategy", "fsdp"))


def run(*args: str) -> str:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.syspath_prepend(EXAMPLES)
        import_module("generate").main(["--smoke", *args])
    return said.getvalue()


def all_ways(processes: int) -> list[str]:
    return [run("--devices", str(processes), *way) for way in WAYS]


@pytest.mark.recipes
@pytest.mark.dist
def test_answers_come_once_and_in_order() -> None:
    alone = run()
    answers = [line.partition("|")[2] for line in alone.splitlines()]
    assert len(answers) == 7
    assert len(set(map(len, answers))) > 2, "texts end at different lengths"
    first, *others = run_ranks(all_ways, 3, 3)  # four batches: the parts are of two, one and one
    assert first == [alone] * len(WAYS)
    assert others == [[""] * len(WAYS)] * 2
