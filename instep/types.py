"""Protocols, type aliases and small base classes that several packages of instep use."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, overload, runtime_checkable

if TYPE_CHECKING:
    from typing_extensions import Self
    from upath import UPath

PathLike: TypeAlias = str | os.PathLike[str]
Location: TypeAlias = (
    "PathLike | UPath"  # path of a checkpoint: a local path, a URL as text, or a path of universal_pathlib
)
StateDict: TypeAlias = "dict[str, Any]"
T = TypeVar("T")


@runtime_checkable
class Stateful(Protocol):
    """Protocol of objects that a checkpoint can contain; their state has only tensors and JSON values.

    Example:
        >>> class Counter:
        ...     count = 0
        ...
        ...     def state_dict(self):
        ...         return {"count": self.count}
        ...
        ...     def load_state_dict(self, state_dict):
        ...         self.count = state_dict["count"]
        >>> isinstance(Counter(), Stateful)
        True
    """

    def state_dict(self) -> StateDict:
        """Return the state that is needed to resume, as tensors and JSON values."""
        ...

    def load_state_dict(self, state_dict: StateDict) -> Any:
        """Restore a state that `state_dict` returned."""
        ...


class Word(str, Enum):
    """Base class of enums whose members are strings, and are printed as these strings.

    Example:
        >>> Color = Word("Color", {"RED": "red"})
        >>> f"{Color.RED}", Color.RED == "red"
        ('red', True)
    """

    __str__ = str.__str__
    __format__ = str.__format__


class ReadOnly(Generic[T]):
    """Read-only attribute that is computed from its object, as a property without setter, written in one line.

    Args:
        read: function that takes the object and returns the value.
        doc: docstring of the attribute.

    Example:
        >>> class Square:
        ...     side = 3
        ...     area: ReadOnly[int] = ReadOnly(lambda self: self.side**2, "Square of the side.")
        >>> Square().area
        9
    """

    def __init__(self, read: Callable[[Any], T], doc: str | None = None) -> None:
        self._read = read
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object, owner: type) -> Self | T:
        return self if instance is None else self._read(instance)

    def __set__(self, instance: object, value: Any) -> None:
        raise AttributeError(f"{type(instance).__name__}.{self._name} can be read, not set")
