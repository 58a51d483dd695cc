"""Running a function on some processes only, decided when it is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from instep.errors import SettingError
from instep.state.environment import ProcessEnvironment


def run_where(function: Callable[..., Any] | None, here: Callable[[], bool]) -> Any:
    """`function` behind the question `here()`, with its name kept; a decorator if there is no function yet."""
    if function is None:
        return lambda function: run_where(function, here)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if here() else None

    return call


def check_index(decorator: str, name: str, index: int | None) -> None:
    """Refuse a decorator without a number: it would silently run nowhere."""
    if index is None:
        raise SettingError(f"{decorator} needs to know on which process: give {name}=...", field=name)
    if index < 0:
        raise SettingError(f"{name}={index} must be at least 0", field=name, got=index)


def is_index(environment: ProcessEnvironment, name: str, index: int | None, local: bool) -> bool:
    """Whether this process has that number; a process alone has every number."""
    if environment.world_size == 1:
        return True
    count = environment.local_world_size if local else environment.world_size
    assert index is not None
    if index >= count:
        where = "this node has" if local else "the job has"
        raise SettingError(f"{name}={index}: {where} {count} processes, from 0 to {count - 1}", field=name, got=index)
    return index == (environment.local_rank if local else environment.rank)
