"""Pickles read as data: whatever they name becomes a record of that name, and nothing of theirs is called or imported.

`pickle.Unpickler` with a `find_class` of its own is not enough: a pickle may set attributes on what it is given, ask
for memory by a length alone, and share parts in such a way that hashing or walking over them never ends. So the opcodes
are taken one by one, by the standard library's own parser, and make plain containers and `Record`s only.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO

_LONG_BITS = 4096  # of a number: states of random generators have 128
_KEY_SIZE, _KEY_DEPTH = 1_000, 20  # of what is hashed: Python does that anew, and recursively, each time
_DEPTH = 400  # of containers within each other
_SHARED = 50  # how many times a part may be there, on average over all of them
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict, "EMPTY_SET": set}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PASSED_OVER = ("PROTO", "FRAME")
_PUTS, _GETS = ("PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")


class Record:
    """Record in the place of a name in a pickle, or of an object made by it.

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


def read_pickle(data: bytes | BinaryIO) -> Any:
    """Read a pickle as data, with records in place of all that it names.

    Args:
        data: the pickle; of a stream the next one, which is left at its end.

    Returns:
        Plain values, containers of them, and records.

    Raises:
        ValueError: it is no whole pickle, or one that no program writes for data.
    """
    machine = _Machine()
    count = 0
    for count, (opcode, arg, _) in enumerate(pickletools.genops(data)):  # noqa: B007
        machine.take(opcode.name, arg)
    value = machine.result()
    _check_shape(value, count)
    return value


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


class _Machine:
    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._weights: dict[int, tuple[Any, int, int]] = {}  # of tuples and frozen sets: themselves, size and depth

    def take(self, name: str, arg: Any) -> None:
        """Do one instruction."""
        stack = self._stack
        if name in _VALUES:
            if type(arg) is int and arg.bit_length() > _LONG_BITS:
                raise ValueError(f"a number of {arg.bit_length():,} bits")
            stack.append(arg)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _GETS:
            if int(arg) not in self._memo:
                raise ValueError(f"entry {arg} is used before it is there")
            stack.append(self._memo[int(arg)])
        elif name in _PUTS:
            self._memo[int(arg)] = self._top()
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif name in _TUPLES:
            self._push_frozen(tuple(self._pop_many(_TUPLES[name])))
        elif name not in _PASSED_OVER:
            known = _INSTRUCTIONS.get(name)
            if known is None:
                raise ValueError(f"the instruction {name}, which no program uses for data")
            known(self, arg)

    def result(self) -> Any:
        if len(self._stack) != 1 or self._marked:
            raise ValueError("the pickle leaves something open")
        return self._stack[0]

    def _top(self) -> Any:
        if not self._stack:
            raise ValueError("the pickle takes more values than it makes")
        return self._stack[-1]

    def _pop(self) -> Any:
        top = self._top()
        self._stack.pop()
        return top

    def _pop_many(self, count: int) -> list[Any]:
        return [self._pop() for _ in range(count)][::-1]

    def _pop_marked(self) -> list[Any]:
        if not self._marked:
            raise ValueError("the pickle takes more values than it makes")
        found, self._stack = self._stack, self._marked.pop()
        return found

    def _push_frozen(self, value: tuple[Any, ...] | frozenset[Any]) -> None:
        parts = [self._weight(part) for part in value]
        size, depth = 1 + sum(part[0] for part in parts), 1 + max((part[1] for part in parts), default=0)
        size = min(size, _KEY_SIZE + 1)  # of tuples that double at each level it would be a number of as many bits
        self._weights[id(value)] = (value, size, depth)
        self._stack.append(value)

    def _weight(self, value: Any) -> tuple[int, int]:
        return self._weights[id(value)][1:] if id(value) in self._weights else (1, 0)

    def _key(self, key: Any) -> Any:
        size, depth = self._weight(key)
        if size > _KEY_SIZE or depth > _KEY_DEPTH:
            raise ValueError("a key of too many parts")
        return key

    def _mark(self, _: Any) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _set_items(self, flat: list[Any]) -> None:
        if len(flat) % 2:
            raise ValueError("a key without a value")
        pairs = [(self._key(key), value) for key, value in zip(flat[::2], flat[1::2], strict=True)]
        target = self._top()
        if type(target) is Record:
            target.items.extend(pairs)
        elif type(target) is dict:
            target.update(pairs)
        else:
            raise ValueError(f"items of a {type(target).__name__}")

    def _append(self, values: list[Any]) -> None:
        target = self._top()
        entries = target.entries if type(target) is Record else target
        if type(entries) is not list:
            raise ValueError(f"entries of a {type(target).__name__}")
        entries.extend(values)

    def _add(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not set:
            raise ValueError(f"members of a {type(target).__name__}")
        target.update(map(self._key, values))

    def _stack_list(self) -> None:
        found = self._pop_marked()
        self._stack.append(found)

    def _make_dict(self, _: Any) -> None:
        flat = self._pop_marked()
        self._stack.append({})
        self._set_items(flat)

    def _name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name that is no text")
        self._stack.append(Record(f"{module}.{name}"))

    def _call(self, _: Any) -> None:
        what, args = self._pop_many(2)
        if type(what) is not Record or type(args) is not tuple:
            raise ValueError("a call of something else than a name")
        self._stack.append(Record(what.name if what.args is None else f"{what.name}()", args))

    def _build(self, _: Any) -> None:
        state = self._pop()
        target = self._top()
        if type(target) is not Record or target.args is None:
            raise ValueError(f"the state of a {type(target).__name__}, which has none")
        target.state = state

    def _persistent(self, pid: Any) -> None:
        self._stack.append(Record("", pid))


_INSTRUCTIONS: Mapping[str, Callable[[_Machine, Any], Any]] = {
    "MARK": _Machine._mark,
    "POP": lambda machine, _: machine._pop(),
    "POP_MARK": lambda machine, _: machine._pop_marked(),
    "LIST": lambda machine, _: machine._stack_list(),
    "TUPLE": lambda machine, _: machine._push_frozen(tuple(machine._pop_marked())),
    "DICT": _Machine._make_dict,
    "FROZENSET": lambda machine, _: machine._push_frozen(frozenset(map(machine._key, machine._pop_marked()))),
    "APPEND": lambda machine, _: machine._append([machine._pop()]),
    "APPENDS": lambda machine, _: machine._append(machine._pop_marked()),
    "SETITEM": lambda machine, _: machine._set_items(machine._pop_many(2)),
    "SETITEMS": lambda machine, _: machine._set_items(machine._pop_marked()),
    "ADDITEMS": lambda machine, _: machine._add(machine._pop_marked()),
    "GLOBAL": lambda machine, arg: machine._name(*arg.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine._name(*machine._pop_many(2)),
    "REDUCE": _Machine._call,
    "NEWOBJ": _Machine._call,
    "BUILD": _Machine._build,
    "PERSID": lambda machine, arg: machine._persistent(arg),
    "BINPERSID": lambda machine, _: machine._persistent(machine._pop()),
    "STOP": lambda machine, _: None,
}


def _inner(value: Any) -> Iterable[Any]:
    kind = type(value)
    if kind is Record:
        return [value.args, value.state, *(part for pair in value.items for part in pair), *value.entries]
    if kind is dict:
        return [*value, *value.values()]
    return value if kind in (list, tuple, set, frozenset) else ()


def _check_shape(root: Any, count: int) -> None:
    """Refuse what is within itself, too deep, or so shared that walking over it takes for ever."""
    known: dict[int, tuple[int, int]] = {}
    entered: set[int] = set()
    waiting = [root]
    while waiting:
        value = waiting[-1]
        if id(value) in known:
            waiting.pop()
            continue
        everything = list(_inner(value))
        inner = [part for part in everything if type(part) in _CONTAINERS]
        if id(value) not in entered:
            entered.add(id(value))
            new = {id(part): part for part in inner if id(part) not in known}  # each once, however often it is there
            if not entered.isdisjoint(new):
                raise ValueError("a container that contains itself")
            waiting.extend(new.values())
            continue
        waiting.pop()
        parts = [known[id(part)] for part in inner]
        size = 1 + len(everything) + sum(part[0] for part in parts)
        depth = 1 + max((part[1] for part in parts), default=0)
        if depth > _DEPTH or size > max(10**6, _SHARED * count):
            raise ValueError("containers within each other, too deep or too many times")
        known[id(value)] = (size, depth)


_CONTAINERS = (list, tuple, dict, set, frozenset, Record)
