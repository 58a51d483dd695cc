"""Pickles read as data: whatever they name becomes a record of that name, and nothing of theirs is called or imported.

Python's own reader does the work, with a `find_class` that returns records. Of its instructions only those are left
that programs use for data. None of them returns what a program has registered (the extension codes of `copyreg`), or
asks for memory by a length alone.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

_INSTRUCTIONS = (
    *("PROTO", "FRAME", "MARK", "STOP", "POP", "POP_MARK", "PERSID", "BINPERSID", "GLOBAL", "STACK_GLOBAL"),
    *("NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT"),
    *("BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT"),
    *("LONG_BINPUT", "MEMOIZE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST"),
    *("EMPTY_DICT", "EMPTY_SET", "APPEND", "APPENDS", "REDUCE", "BUILD"),
)


class Record:
    """Record in the place of a name in a pickle, or of an object made by it.

    Its methods are those that a pickle calls. They keep what they are given.

    Attributes:
        name: with its module, such as "collections.OrderedDict"; empty for a persistent id.
        args: what it was called with, a tuple; None for the name itself; of a persistent id, that.
        state: what the object's state was to be; None without one.
        items: pairs that were set in it.
        entries: values that were appended to it.
    """

    __slots__ = ("args", "entries", "items", "name", "state")

    def __init__(self, name: str, args: Any = None) -> None:
        self.name, self.args = name, args
        self.state: Any = None
        self.items: list[tuple[Any, Any]] = []
        self.entries: list[Any] = []

    def __call__(self, *args: Any) -> Record:
        return Record(self.name if self.args is None else f"{self.name}()", args)

    def __setstate__(self, state: Any) -> None:
        if self.args is None or self.state is not None:  # of two states a check would see only one
            raise ValueError(f"a state of {self.name}, which is a name or has one")
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        """Keep a value that a pickle appends."""
        self.entries.append(value)


def read_pickle(data: bytes | BinaryIO) -> Any:
    """Read a pickle as data, with records in place of all that it names.

    Args:
        data: the pickle; of a stream the next one, which is left at its end.

    Returns:
        Plain values, containers of them, and records.

    Raises:
        ValueError: it is no whole pickle, or one that no program writes for data. A damaged one may raise other errors.
    """
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    try:
        return _Reader(stream, encoding="latin1").load()
    except pickle.UnpicklingError as error:  # the error says that loading the file would run code
        raise ValueError(str(error)) from error


def records_in(value: Any) -> Iterable[Record]:
    """Return every record in what `read_pickle` returned, once."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            waiting.extend(_inner(one))
            if type(one) is Record:
                yield one


def _inner(value: Any) -> Iterable[Any]:
    kind = type(value)
    if kind is Record:
        return [value.args, value.state, *(part for pair in value.items for part in pair), *value.entries]
    if kind is dict:
        return [*value, *value.values()]
    return value if kind in (list, tuple, set, frozenset) else ()


_known = pickle._Unpickler.dispatch


def _refuse(_: Any) -> None:
    raise ValueError("an instruction that no program uses for data")


def _is_flat(key: Any, levels: int = 3) -> bool:
    """Return True unless tuples lie so deep in each other that Python's hash of them, in C, would never come back."""
    return type(key) not in (tuple, frozenset) or (levels > 0 and all(_is_flat(part, levels - 1) for part in key))


def _hashing(name: str, keys: slice) -> Callable[[Any], None]:
    """Make the instruction that hashes these values of the stack, with a check of them."""

    def checked(reader: Any) -> None:
        if not all(map(_is_flat, reader.stack[keys])):
            raise ValueError("a key of tuples within tuples")
        _known[getattr(pickle, name)[0]](reader)

    return checked


_HASHING = {
    "SETITEM": slice(-2, -1),
    **dict.fromkeys(("SETITEMS", "DICT"), slice(0, None, 2)),
    **dict.fromkeys(("ADDITEMS", "FROZENSET"), slice(None)),
}


class _Reader(pickle._Unpickler):
    """Python's reader in Python: unlike the one in C it can be left without some of the instructions."""

    dispatch = {
        **dict.fromkeys(range(256), _refuse),
        **{getattr(pickle, name)[0]: _known[getattr(pickle, name)[0]] for name in _INSTRUCTIONS},
        **{getattr(pickle, name)[0]: _hashing(name, keys) for name, keys in _HASHING.items()},
        pickle.NEWOBJ[0]: _known[pickle.REDUCE[0]],  # NEWOBJ's own looks for the `__new__` of whatever is there
    }

    def find_class(self, module: str, name: str) -> Any:
        return Record(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return Record("", pid)
