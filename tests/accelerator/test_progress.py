from __future__ import annotations

import io
import sys

import pytest

from instep.accelerator.logging import tqdm
from instep.errors import MissingPackageError
from instep.state import PartialState
from tests.helpers.spawn import run_ranks


def shown(main_process_only: bool) -> str:
    PartialState(cpu=True)
    stream = io.StringIO()
    assert list(tqdm(range(3), main_process_only=main_process_only, file=stream, desc="train")) == [0, 1, 2]
    return stream.getvalue()


def both() -> tuple[bool, bool]:
    return "train" in shown(True), "train" in shown(False)


@pytest.mark.dist
def test_one_bar_per_node() -> None:
    assert run_ranks(both, 2) == [(True, True), (False, True)]


def test_a_user_s_disable_holds() -> None:
    stream = io.StringIO()
    assert sum(tqdm([1, 2], disable=True, file=stream)) == 3
    assert stream.getvalue() == ""


def test_the_bar_without_tqdm_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(MissingPackageError, match=r"pip install tqdm$"):
        tqdm([1])
