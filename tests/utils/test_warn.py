"""Warnings show the line of the user's program."""

from __future__ import annotations

import ast
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import instep
from instep import Trainer
from instep.utils.warn import warn_user
from tests.trainer.toys import QUIET, SkippingToy, Toy, loader, quiet

PACKAGE = Path(instep.__file__).parent


class Trained(SkippingToy):
    skipped = (0,)


class Untrained(Toy):
    def configure_optimizers(self) -> Any:
        torch.optim.SGD(self.parameters(), lr=0.1)


class Unvalidated(Toy):
    validation_step = None  # pyright: ignore[reportAssignmentType]


CALLS: dict[str, Callable[[], Any]] = {
    "self.log": lambda: Toy().log("a", 1.0),
    "Trainer(...)": lambda: Trainer(gradient_clip_algorithm="norm", **QUIET),
    "fit in eval mode": lambda: quiet(max_steps=1).fit(Toy().eval(), loader()),
    "a batch without a loss": lambda: quiet(max_steps=2).fit(Trained(), loader()),
    "no optimizer": lambda: quiet(max_steps=1).fit(Untrained(), loader()),
    "no validation_step": lambda: quiet(max_steps=1).fit(Unvalidated(), loader(), loader()),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_line_is_the_users(name: str):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CALLS[name]()
    first = CALLS[name].__code__.co_firstlineno
    assert [(it.filename, it.lineno) for it in caught] == [(__file__, first)]


def test_without_a_line_of_the_users_it_is_the_callers():
    ours: dict[str, Any] = {"warn_user": warn_user}
    code = compile("\n\ndef call():\n    warn_user('x')\n", str(PACKAGE / "somewhere.py"), "exec")
    exec(code, ours)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=ours["call"])
        thread.start()
        thread.join()
    assert [(it.filename, it.lineno) for it in caught] == [(str(PACKAGE / "somewhere.py"), 4)]


def test_every_warning_of_the_package_goes_this_way():
    others = {"warn.py", "rank_zero.py"}  # the second has Lightning's function of that name, with its stacklevel
    for path in PACKAGE.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        assert path.name in others or not [c for c in calls if ast.unparse(c.func) == "warnings.warn"], path
