"""Read pickles without importing or calling anything: a plain record replaces each class and function in them.

Python's own unpickler is used, with a `find_class` that returns records. Only the instructions that pickles of data
need are allowed. No allowed instruction returns registered objects (extension codes of `copyreg`), and none allocates
memory only because the file states a length.
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
    """Record that replaces a class or function in a pickle, or an object that the pickle makes by calling it.

    The methods of a record are those that a pickle calls; they only store their arguments.

    Attributes:
        name: dotted name of the class or function, such as "collections.OrderedDict"; "" for a persistent id.
        args: arguments of the call, as a tuple; None for the class or function itself. For a persistent id, the id.
        state: state that the pickle set on the object; None if there is none.
        items: pairs of a key and a value that the pickle set in the object.
        entries: values that the pickle appended to the object.
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
        # Refuse a second state, since checks of the record would see only one of the two.
        if self.args is None or self.state is not None:
            raise ValueError(f"a state of {self.name}, which is a name or has one")
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        """Store a value that the pickle appends to the object."""
        self.entries.append(value)


def read_pickle(data: bytes | BinaryIO) -> Any:
    """Read a pickle, with records in place of all classes, functions and objects that it names.

    Args:
        data: the pickle, or a stream. From a stream, one pickle is read, and the stream's position is after it.

    Returns:
        A value made of plain values, containers and records.

    Raises:
        ValueError: the pickle is incomplete, or has instructions that pickles of data do not need. A damaged pickle may
            raise other errors too.
    """
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    try:
        return _Reader(stream, encoding="latin1").load()
    # Here an UnpicklingError means a damaged pickle, but callers report it as a file that needs to run code.
    except pickle.UnpicklingError as error:
        raise ValueError(str(error)) from error


def records_in(value: Any) -> Iterable[Record]:
    """Return all records in a result of `read_pickle`, each of them once."""
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
    """Return False for deeply nested tuples: computing their hash may take almost forever."""
    return type(key) not in (tuple, frozenset) or (levels > 0 and all(_is_flat(part, levels - 1) for part in key))


def _hashing(name: str, keys: slice) -> Callable[[Any], None]:
    """Replace an instruction of the unpickler by a function that refuses deeply nested keys before it hashes them."""

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
    """Unpickler with fewer instructions. Its base class is the Python one, since the C class cannot be restricted."""

    dispatch = {
        **dict.fromkeys(range(256), _refuse),
        **{getattr(pickle, name)[0]: _known[getattr(pickle, name)[0]] for name in _INSTRUCTIONS},
        **{getattr(pickle, name)[0]: _hashing(name, keys) for name, keys in _HASHING.items()},
        pickle.NEWOBJ[0]: _known[pickle.REDUCE[0]],  # Python's own NEWOBJ would call `__new__` of any object
    }

    def find_class(self, module: str, name: str) -> Any:
        return Record(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return Record("", pid)
