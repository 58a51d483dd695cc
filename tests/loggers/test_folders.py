"""Which folder a run, or one of its loggers, writes into; and what a logger's author reads."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import pytest

from instep.loggers import Logger
from instep.loggers.folders import Place, choose_place, name_in

# What the user asked for, what there is, and the folder that is chosen.
PLACES: dict[str, tuple[str | None, dict[str, Any], Place]] = {
    "a first run": (None, {}, Place("version_0", True)),
    "a run beside others": (None, {"next_number": 3}, Place("version_3", True)),
    "the user's version": ("best", {"next_number": 3}, Place("best", True)),
    "a version with another run's files": ("best", {"is_free": False, "next_number": 3}, Place("version_3", True)),
    "a resumed run": (None, {"goes_on": "version_1", "next_number": 3}, Place("version_1", False)),
    "a resumed run of the user's version": ("best", {"goes_on": "best", "is_free": False}, Place("best", False)),
    "a run before which a logger was used": (None, {"opened": "version_2", "next_number": 3}, Place("version_2", True)),
    "used before a run that goes on": (None, {"opened": "version_2", "goes_on": "version_1"}, Place("version_2", True)),
    "a logger beside the one that decides": (None, {"run": "version_4", "next_number": 2}, Place("version_4", False)),
    "the same in a resumed run": (None, {"run": "version_4", "goes_on": "version_1"}, Place("version_4", False)),
    "a logger of the run's version": ("best", {"run": "best", "is_free": False}, Place("best", False)),
    "a logger of another version": ("mine", {"run": "version_4"}, Place("mine", True)),
    "a logger of another version, resumed": ("mine", {"run": "version_4", "goes_on": "mine"}, Place("mine", False)),
    "a version without a name": ("", {"next_number": 3}, Place("", True)),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
def test_the_folder_of_a_run_is_chosen_as_the_table_says(case: str) -> None:
    asked, there, chosen = PLACES[case]
    assert choose_place(asked, **there) == chosen


@pytest.mark.parametrize(
    ("folder", "asked", "name"),
    [
        ("runs/version_0", None, "version_0"),
        ("runs/a/b", "a/b", "a/b"),
        ("runs/a/b", None, None),
        ("runs", "", ""),
        ("elsewhere/version_0", None, None),
        (None, None, None),
    ],
)
def test_a_run_folder_has_a_name_only_among_the_loggers_own(folder: str | None, asked: str | None, name: str | None):
    assert name_in(Path("runs"), None if folder is None else Path(folder).absolute(), asked) == name


def test_a_logger_is_small_enough_to_be_read() -> None:
    """Its methods and properties: what users call, and the hooks of a subclass."""
    kinds = (property, classmethod, staticmethod, functools.cached_property)
    own = [name for name, value in vars(Logger).items() if inspect.isfunction(value) or isinstance(value, kinds)]
    assert len(own) <= 53
