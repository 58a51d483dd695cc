"""Calls that cannot work name the way out: after the end, with objects for tensors, with arguments swapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from instep import Accelerator, debug_launcher, notebook_launcher
from instep.accelerator import find_executable_batch_size
from instep.distributed import concatenate, gather, reduce
from instep.errors import (
    HookError,
    InstepError,
    NotTensorError,
    SettingError,
    ShapeMismatchError,
    StateError,
    UsageError,
)
from tests.helpers.spawn import run_ranks


class Boxes:
    """An object with a tensor, as detection models return it."""

    def __init__(self) -> None:
        self.xyxy = torch.ones(2, 4)


def call_after_the_end(folder: str) -> list[str]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.end_training()
    calls: dict[str, Callable[[], Any]] = {
        "save_model": lambda: accelerator.save_model(model, folder),
        "save_state": lambda: accelerator.save_state(folder),
        "load_state": lambda: accelerator.load_state(folder),
        "get_state_dict": lambda: accelerator.get_state_dict(model),
        "wait_for_everyone": accelerator.wait_for_everyone,
    }
    said = []
    for name, call in calls.items():
        with pytest.raises((UsageError, StateError)) as caught:
            call()
        said.append(f"{name}: {caught.value}")
    return said


@pytest.mark.dist
def test_what_all_processes_do_together_comes_before_end_training(tmp_path: Any) -> None:
    for said in run_ranks(call_after_the_end, 2, str(tmp_path)):
        assert all("end_training" in text for text in said), said


def gather_of(data: Any) -> Any:
    accelerator = Accelerator(cpu=True)
    try:
        return accelerator.gather_for_metrics(data)
    finally:
        accelerator.end_training()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: gather_of({"boxes": Boxes(), "score": torch.ones(1)}),
            r"gather_for_metrics .*Boxes at \['boxes'\].*use_gather",
        ),
        (lambda: gather_of([torch.ones(1), "a"]), r"gather_for_metrics takes tensors, but got a str at \[1\]"),
        (lambda: gather(["a"]), "gather takes tensors, but got a str"),
        (lambda: reduce(3.0), "reduce takes tensors, but got a float"),
    ],
)
def test_what_is_no_tensor_is_named_by_a_public_class(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(NotTensorError, match=text) as caught:
        call()
    assert isinstance(caught.value, TypeError)
    with pytest.raises(ShapeMismatchError):
        concatenate([torch.ones(1, 2), torch.ones(1, 3)])


def test_clipping_by_an_iterator_that_is_used_up_warns() -> None:
    accelerator = Accelerator(cpu=True)
    parameters = nn.Linear(2, 2).parameters()
    accelerator.clip_grad_norm_(parameters, 1.0)
    with pytest.warns(UserWarning, match=r"clip_grad_norm_ got an iterator without parameters, so it clips nothing"):
        accelerator.clip_grad_norm_(parameters, 1.0)
    accelerator.clip_grad_norm_([], 1.0)
    accelerator.end_training()


def train(batch_size: int = 1) -> None:
    """The function that is launched."""


def load(**given: Any) -> None:
    accelerator = Accelerator(cpu=True)
    try:
        accelerator.load_state("anywhere", **given)
    finally:
        accelerator.end_training()


def swapped(model: Any, batch_size: int) -> None:
    """Its batch size is not the first argument."""


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: load(strict=False), SettingError, r"load_state\(strict=...\) is not taken: .*strict=False\); resume="),
        (lambda: load(map_location="cpu"), SettingError, "leave it out: each tensor is read"),
        (lambda: load(anything=1), SettingError, "known are input_dir, resume"),
        (lambda: notebook_launcher(train, 4), SettingError, r"the third: notebook_launcher\(train, \(\), 4\)"),
        (lambda: notebook_launcher(train, "ab", 1), SettingError, r"notebook_launcher\(train, \('ab',\)\)"),
        (lambda: notebook_launcher(train(), (), 1), SettingError, "a function, .* without \\(\\) behind its name"),
        (lambda: debug_launcher(train, {"a": 1}), SettingError, "a tuple of the function's arguments"),
        (lambda: notebook_launcher(train, (), "4"), SettingError, "num_processes='4': expected an integer"),
        (lambda: find_executable_batch_size(8, train), SettingError, "a function first, then the size"),
        (lambda: find_executable_batch_size(8), SettingError, r"starting_batch_size=8\) decorates one"),
        (
            lambda: find_executable_batch_size(swapped, 8),
            HookError,
            "as model, its first argument. Put batch_size first",
        ),
    ],
)
def test_arguments_in_the_wrong_place_are_told_where_they_go(call: Callable[[], Any], error: Any, text: str) -> None:
    with pytest.raises(InstepError, match=text) as caught:
        call()
    assert isinstance(caught.value, error)
