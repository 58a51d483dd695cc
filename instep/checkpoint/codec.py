"""Encode a state as strict JSON and a dict of tensors, without pickle, and decode it with the same types.

JSON values are written as they are. Any other value becomes a JSON object whose key `$` names the type. Tensors and
plain numpy arrays are put into a separate dict, under a key made of their path in the state, to be written as
safetensors.
"""

from __future__ import annotations

import base64
import math
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from datetime import date, datetime, timedelta, timezone
from enum import Enum
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from instep.checkpoint.tensors import Shard, StoredTensor, dtype_from_name, dtype_name, why_unsavable
from instep.errors import CheckpointError, CorruptCheckpointError, InstepError, UnsavableStateError
from instep.utils.named import Named
from instep.utils.seed import check_bit_generator, check_python, check_torch
from instep.utils.untrusted_files import MOST_DEPTH

TAG = "$"
# Largest number of containers within each other. One becomes up to three levels of JSON: object, list of pairs, pair.
_MOST_OPEN = MOST_DEPTH // 3 - 5
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple)}
_PURE_PATHS: dict[str, type[PurePath]] = {"posix": PurePosixPath, "windows": PureWindowsPath}
_ARRAY_KINDS = "biufc"  # `dtype.kind` of numpy arrays that become tensors, if torch has the dtype
_RAW_KINDS = "biufcUSMm"  # `dtype.kind` of numpy arrays and scalars that can be saved as bytes

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def state_of(obj: Any) -> tuple[str, Any, dict[str, Any]] | None:
    """Describe how to save an object that is rebuilt from a state, such as an enum member or a random generator.

    Returns:
        The name of the object's type in JSON, the object's state (which must be encoded too), and further JSON values
        to store. None for an object of a type that is not rebuilt from a state.

    Raises:
        ValueError: the object's type is rebuilt from a state, but this object cannot be saved; the message says what
            to do.
    """
    kind = type(obj)
    if kind is datetime:
        return _datetime_state(obj)
    if kind is date:
        return "date", [obj.year, obj.month, obj.day], {}
    if kind is Named:
        return "named", [obj.path, obj.args, obj.keywords], {}
    if isinstance(obj, Enum):
        return _enum_state(obj)
    if kind is random.Random:
        version, words, gauss = obj.getstate()
        return "random.Random", [version, list(words), gauss], {}
    if kind is torch.Generator:
        return "torch.Generator", obj.get_state(), {"device": str(obj.device)}
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None and kind in (numpy_random.Generator, numpy_random.RandomState):
        legacy = kind is numpy_random.RandomState
        state = obj.get_state(legacy=False) if legacy else obj.bit_generator.state
        if state["bit_generator"] not in _BIT_GENERATORS:
            raise ValueError(f"a generator over {state['bit_generator']}; use one of {', '.join(_BIT_GENERATORS)}")
        return f"numpy.{kind.__name__}", state, {}
    return None


def _datetime_state(when: datetime) -> tuple[str, Any, dict[str, Any]]:
    zone = when.tzinfo
    if zone is not None and type(zone) is not timezone:
        raise ValueError(f"a datetime in the zone {zone!r}; save when.astimezone(datetime.timezone.utc)")
    fields = [when.year, when.month, when.day, when.hour, when.minute, when.second, when.microsecond]
    return "datetime", fields, {"fold": when.fold, "offset_s": None if zone is None else _seconds(zone, when)}


def _seconds(zone: timezone, when: datetime) -> float:
    return zone.utcoffset(when).total_seconds()


def _enum_state(member: Enum) -> tuple[str, Any, dict[str, Any]]:
    kind = type(member)
    if getattr(member, "_name_", None) not in kind._member_map_:
        raise ValueError(f"{member!r}, a combination of flags; save its value")
    if _class_named(kind.__module__, kind.__qualname__) is not kind:
        raise ValueError(
            f"{member!r}, whose class {kind.__module__}.{kind.__qualname__} cannot be found under that name; define it "
            "at the top of a module, or save the member's name"
        )
    return "enum", member._name_, {"module": kind.__module__, "class": kind.__qualname__}


def _class_named(module: str, qualified: str) -> Any:
    """Find a class by its dotted name in a module that is already imported; None if there is none.

    `getattr` is not used, since it may import modules or run code of a class.
    """
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        if not isinstance(found, (ModuleType, type)):
            return None
        found = vars(found).get(part)
    return found


def _enum(name: Any, node: Mapping[str, Any]) -> Any:
    module, qualified = node["module"], node["class"]
    kind = _class_named(module, qualified)
    if not isinstance(kind, type) or not issubclass(kind, Enum):
        raise CheckpointError(
            f"this state holds {qualified}.{name} of the module {module}, which has no such enum here. Import that "
            "module before the checkpoint is read; where the enum was renamed or removed, give it its old name again."
        )
    if name not in kind._member_map_:
        raise CheckpointError(
            f"this state holds {module}.{qualified}.{name}, and that enum has no such member; it has "
            f"{', '.join(kind._member_map_)}."
        )
    return kind._member_map_[name]


def _named(fields: Any, _: Mapping[str, Any]) -> Named:
    path, args, keywords = fields
    texts = [path, *(keywords or {})]
    right = isinstance(args, list | tuple | None) and isinstance(keywords, dict | None)
    if not right or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{fields!r} is no name of a class or function")
    return Named(path, None if args is None else tuple(args), keywords)


def _random(state: Any, _: Mapping[str, Any]) -> Any:
    check_python(state)
    version, words, gauss = state
    generator = random.Random(0)
    generator.setstate((version, tuple(words), gauss))
    return generator


def _torch_generator(state: Any, node: Mapping[str, Any]) -> Any:
    device = torch.device(node["device"])
    try:
        if device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("no CUDA device")  # torch.Generator("cuda") may crash without a CUDA device
        generator = torch.Generator(device)
    except RuntimeError as error:
        raise CheckpointError(
            f"this state holds a torch.Generator of {device}, which this process does not have: {error}"
        ) from error
    check_torch(state, generator.get_state().numel(), device.type)
    generator.set_state(state)
    return generator


def _numpy_generator(state: Any, node: Mapping[str, Any]) -> Any:
    import numpy as np  # imported late: only needed if a state holds a numpy generator

    if state["bit_generator"] not in _BIT_GENERATORS:
        raise ValueError(f"{state['bit_generator']!r} is no bit generator of numpy")
    check_bit_generator(state)
    bits = getattr(np.random, state["bit_generator"])()
    if node["$"] == "numpy.Generator":
        bits.state = state
        return np.random.Generator(bits)
    generator = np.random.RandomState(bits)
    generator.set_state(state)
    return generator


def _datetime(fields: Any, node: Mapping[str, Any]) -> datetime:
    offset_s = node["offset_s"]
    zone = None if offset_s is None else timezone(timedelta(seconds=offset_s))
    return datetime(*fields, tzinfo=zone, fold=node["fold"])


# For each type name in JSON: a function that makes the object from its decoded state and the JSON object around it.
MAKERS: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "date": lambda fields, _: date(*fields),
    "datetime": _datetime,
    "enum": _enum,
    "named": _named,
    "numpy.Generator": _numpy_generator,
    "numpy.RandomState": _numpy_generator,
    "random.Random": _random,
    "torch.Generator": _torch_generator,
}


def _to_text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _from_text(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _float_out(value: float) -> Any:
    if math.isfinite(value):
        return value
    sign = "-" if math.copysign(1.0, value) < 0 else ""  # str() of a negative nan has no sign
    return {TAG: "float", "v": f"{sign}{abs(value)}"}


def _float_in(value: Any) -> float:
    return float(value["v"]) if isinstance(value, dict) else float(value)


# Types whose values contain no other objects: name in JSON, type, function to encode, function to decode.
_LEAVES: tuple[tuple[str, type, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    ("bytes", bytes, _to_text, _from_text),
    ("bytearray", bytearray, _to_text, lambda v: bytearray(_from_text(v))),
    ("complex", complex, lambda z: [_float_out(z.real), _float_out(z.imag)], lambda v: complex(*map(_float_in, v))),
    ("timedelta", timedelta, lambda d: [d.days, d.seconds, d.microseconds], lambda v: timedelta(*v)),
    ("range", range, lambda r: [r.start, r.stop, r.step], lambda v: range(*v)),
    ("torch.dtype", torch.dtype, dtype_name, dtype_from_name),
    ("torch.device", torch.device, str, torch.device),
    ("torch.Size", torch.Size, list, torch.Size),
)
_LEAF_BY_TYPE = {kind: (tag, out) for tag, kind, out, _ in _LEAVES}
_LEAF_BY_TAG = {tag: back for tag, _, _, back in _LEAVES}

# Containers that are encoded as a list of their items.
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_SEQUENCE_BY_TAG: dict[str, Any] = {tag: kind for kind, tag in _SEQUENCES.items()}


def encode(tree: Any, where: str = "") -> tuple[Any, dict[str, Tensor | Shard]]:
    """Encode a state as a JSON tree and a dict of its tensors.

    These types are restored exactly: None, bool, int, float (nan and inf too), complex, str, bytes, bytearray, list,
    tuple, dict with any keys, OrderedDict, defaultdict of a builtin type, Counter, set, frozenset, deque, range,
    timedelta, date, datetime (without a time zone or with a fixed one), paths, enum members, `Named` hyperparameters,
    torch's dtype, device, Size, Generator and Tensor, numpy arrays and scalars, `random.Random`, and numpy's Generator
    and RandomState. A `Shard` stores a part of a tensor. A Parameter is restored as a Tensor. An Enum member that is
    also a str or int is restored as that str or int, which compares equal.

    Args:
        tree: the state.
        where: name of the tree in errors, such as "callbacks['EMA']".

    Returns:
        The JSON tree (strict JSON, without nan and inf) and the tensors by key. The tensors are those of the state, not
        copies.

    Raises:
        UnsavableStateError: a value cannot be encoded; the message has its path in the state and says what to do.

    Example:
        >>> encode({"betas": (0.9, 0.999), "step": torch.tensor(3)})
        ({'betas': {'$': 'tuple', 'v': [0.9, 0.999]}, 'step': {'$': 'tensor', 'v': 'step'}}, {'step': tensor(3)})
    """
    encoder = _Encoder(where)
    return encoder.node(tree, ()), encoder.tensors


def decode(json_tree: Any, tensors: Mapping[str, Tensor] | Mapping[str, StoredTensor]) -> Any:
    """Decode a result of `encode` to the original state.

    Only objects of the types that `encode` lists are made, whatever the tree contains, so no code from a checkpoint
    runs.

    Args:
        json_tree: the JSON tree.
        tensors: the tensors by key, or `StoredTensor` objects, which read them later.

    Returns:
        The state; its tensors are the objects in `tensors`.

    Raises:
        CorruptCheckpointError: the tree or the tensors are not a result of `encode`.
        CheckpointError: the state has an enum member whose class or name does not exist here, or a torch.Generator of a
            device that this process does not have.

    Example:
        >>> decode({"$": "tuple", "v": [1, None]}, {})
        (1, None)
    """
    try:
        return _decode(json_tree, tensors)
    except InstepError:
        raise
    except Exception as error:  # damaged JSON may cause any error
        raise CorruptCheckpointError(
            f"a saved state cannot be decoded ({type(error).__name__}: {error}); "
            "it is damaged, or a newer instep wrote it"
        ) from error


class _Encoder:
    def __init__(self, where: str) -> None:
        self.where = where
        self.tensors: dict[str, Tensor | Shard] = {}
        self._open: set[int] = set()
        self._inside = ""  # "a set" or "a dict key" while one is encoded, since neither may contain tensors

    def node(self, obj: Any, path: tuple[Any, ...]) -> Any:
        kind = type(obj)
        if obj is None or kind is bool or kind is str:
            return obj
        if kind is int:  # more than 64 bits are stored as text, since many JSON readers would round them
            return obj if obj.bit_length() <= 64 else {TAG: "int", "v": hex(obj)}
        if kind is float:
            return _float_out(obj)
        if kind in _LEAF_BY_TYPE:
            tag, out = _LEAF_BY_TYPE[kind]
            return {TAG: tag, "v": out(obj)}
        if isinstance(obj, Tensor | Shard):
            problem = why_unsavable(obj.local if isinstance(obj, Shard) else obj)
            if problem is not None:
                raise self._refuse(path, problem)
            return {TAG: "tensor", "v": self._keep(obj.detach() if isinstance(obj, Tensor) else obj, path)}
        if isinstance(obj, PurePath):
            return {TAG: "path", "v": str(obj), "pure": _pure_flavour(obj)}
        if isinstance(obj, Enum) and isinstance(obj, (str, int)):
            return str.__str__(obj) if isinstance(obj, str) else self.node(int(obj), path)
        numpy = sys.modules.get("numpy")
        if numpy is not None and (kind is numpy.ndarray or isinstance(obj, numpy.generic)):
            return self._numpy(obj, path)
        try:
            known = state_of(obj)
        except ValueError as error:
            raise self._refuse(path, str(error)) from None
        if known is not None:
            tag, state, beside = known
            return {TAG: tag, "v": self.node(state, path), **beside}
        return self._container(obj, kind, path)

    def _container(self, obj: Any, kind: type, path: tuple[Any, ...]) -> Any:
        if id(obj) in self._open:
            raise self._refuse(path, "a container that contains itself; break the cycle")
        if len(self._open) == _MOST_OPEN:
            raise self._refuse(path[:3], f"more than {_MOST_OPEN} containers within each other; save a flat list")
        self._open.add(id(obj))
        try:
            if kind is list:
                return [self.node(item, (*path, i)) for i, item in enumerate(obj)]
            if kind is dict:
                return self._dict(obj, path)
            if kind is tuple:
                return {TAG: "tuple", "v": [self.node(item, (*path, i)) for i, item in enumerate(obj)]}
            if kind is set or kind is frozenset:
                return {TAG: _SEQUENCES[kind], "v": self._without_tensors("a set", obj, path)}
            if kind is deque:
                items = [self.node(item, (*path, i)) for i, item in enumerate(obj)]
                return {TAG: "deque", "v": items, "maxlen": obj.maxlen}
            if kind is OrderedDict or kind is Counter:
                return {TAG: kind.__name__, "v": self._pairs(obj, path)}
            if kind is defaultdict:
                factory = obj.default_factory
                name = None if factory is None else getattr(factory, "__name__", "")
                if name is not None and _FACTORIES.get(name) is not factory:
                    raise self._refuse(path, f"a defaultdict of {factory!r}, which is no builtin; save dict(...)")
                return {TAG: "defaultdict", "v": self._pairs(obj, path), "of": name}
        finally:
            self._open.discard(id(obj))
        raise self._refuse(path, _describe(obj))

    def _dict(self, obj: dict[Any, Any], path: tuple[Any, ...]) -> Any:
        if all(type(key) is str for key in obj) and TAG not in obj:
            return {key: self.node(value, (*path, key)) for key, value in obj.items()}
        return {TAG: "dict", "v": self._pairs(obj, path)}

    def _pairs(self, obj: Mapping[Any, Any], path: tuple[Any, ...]) -> list[Any]:
        keys = self._without_tensors("a dict key", obj, path)
        return [[key, self.node(value, (*path, name))] for key, (name, value) in zip(keys, obj.items(), strict=True)]

    def _without_tensors(self, inside: str, items: Any, path: tuple[Any, ...]) -> list[Any]:
        outer, self._inside = self._inside, self._inside or inside
        try:
            return [self.node(item, (*path, item)) for item in items]
        finally:
            self._inside = outer

    def _keep(self, tensor: Tensor | Shard, path: tuple[Any, ...]) -> str:
        if self._inside:
            raise self._refuse(path, f"a tensor in {self._inside}; use a number or a string there")
        name = ".".join(str(part) for part in path).encode("utf-8", "backslashreplace").decode()
        key, copies = name or "value", 1
        while key in self.tensors or key == "__metadata__":
            copies += 1
            key = f"{name}~{copies}"
        self.tensors[key] = tensor
        return key

    def _numpy(self, obj: Any, path: tuple[Any, ...]) -> Any:
        import numpy as np  # imported late: only needed if a state holds numpy values

        dtype = obj.dtype
        if isinstance(obj, np.ndarray) and dtype.kind in _ARRAY_KINDS and dtype.isnative and not self._inside:
            ready = obj if obj.flags.c_contiguous and obj.flags.writeable else obj.copy(order="C")
            try:
                tensor = torch.from_numpy(ready)
            except TypeError:  # torch does not have the dtype, such as longdouble
                pass
            else:
                return {TAG: "array", "v": self._keep(tensor, path)}
        if dtype.kind not in _RAW_KINDS:
            raise self._refuse(path, f"a numpy {type(obj).__name__} of dtype {dtype}; save plain arrays of numbers")
        raw = _to_text(np.asarray(obj).tobytes())
        if isinstance(obj, np.ndarray):
            return {TAG: "raw array", "v": raw, "dtype": dtype.str, "shape": list(obj.shape)}
        return {TAG: "scalar", "v": raw, "dtype": dtype.str}

    def _refuse(self, path: tuple[Any, ...], what: str) -> UnsavableStateError:
        place = (self.where or "the state") + "".join(f"[{part!r}]" for part in path)
        return UnsavableStateError(f"{place} is {what}. Checkpoints hold no pickles, so it cannot be saved as it is.")


def _describe(obj: Any) -> str:
    """Return a text that says which unsupported type an object has, and what to save instead."""
    kind = type(obj)
    name = f"a {kind.__module__}.{kind.__qualname__}"
    if isinstance(obj, type) or (callable(obj) and hasattr(obj, "__qualname__")):
        return f"{obj!r}, which is code; save its name and look it up when loading"
    if isinstance(obj, tuple) and hasattr(obj, "_asdict"):
        return f"{name}, a namedtuple; save {kind.__name__}._asdict()"
    if hasattr(obj, "state_dict"):
        return f"{name}; save its state_dict()"
    if is_dataclass(obj):
        return f"{name}, a dataclass; save dataclasses.asdict(...)"
    if hasattr(obj, "getstate"):
        return f"{name}; save its getstate()"
    if hasattr(obj, "bit_generator"):
        return f"{name}; save its bit_generator.state"
    base = next((plain for plain in (str, int, float, dict, list, tuple, set) if isinstance(obj, plain)), None)
    if base is not None:
        return f"{name}, a subclass of {base.__name__}; save {base.__name__}(...)"
    return f"{name}; save tensors, numbers, strings and containers of them"


def _pure_flavour(path: PurePath) -> str | None:
    if isinstance(path, Path):
        return None
    return "windows" if isinstance(path, PureWindowsPath) else "posix"


def _decode(node: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        if isinstance(node, float) and not math.isfinite(node):  # JSON text such as 1e999 is read as infinity
            raise ValueError("a number that no float can hold")
        return node
    if TAG not in node:
        return {key: _decode(value, tensors) for key, value in node.items()}
    tag, value = node[TAG], node["v"]
    if tag == "tensor":
        return tensors[value]
    if tag in _LEAF_BY_TAG:
        return _LEAF_BY_TAG[tag](value)
    if tag == "int":
        return int(value, 16)
    if tag == "float":
        return float(value)
    if tag == "path":
        return Path(value) if node["pure"] is None else _PURE_PATHS[node["pure"]](value)
    if tag in MAKERS:
        return MAKERS[tag](_decode(value, tensors), node)
    if tag in ("array", "raw array", "scalar"):
        return _decode_numpy(tag, value, node, tensors)
    if tag in _SEQUENCE_BY_TAG:
        return _SEQUENCE_BY_TAG[tag](_decode(item, tensors) for item in value)
    if tag == "deque":
        return deque((_decode(item, tensors) for item in value), maxlen=node["maxlen"])
    if tag in ("dict", "OrderedDict", "Counter", "defaultdict"):
        return _decode_mapping(tag, [(_decode(k, tensors), _decode(v, tensors)) for k, v in value], node)
    raise ValueError(f"unknown type {tag!r}")


def _decode_mapping(tag: str, pairs: list[tuple[Any, Any]], node: dict[str, Any]) -> Any:
    if tag == "dict":
        return dict(pairs)
    if tag == "OrderedDict":
        return OrderedDict(pairs)
    if tag == "Counter":
        return Counter(dict(pairs))
    return defaultdict(None if node["of"] is None else _FACTORIES[node["of"]], pairs)


def _decode_numpy(tag: str, value: str, node: dict[str, Any], tensors: Mapping[str, Any]) -> Any:
    import numpy as np  # imported late: only needed if a state holds numpy values

    if tag == "array":
        array = tensors[value]
        return (array if isinstance(array, Tensor) else array.read()).numpy()
    dtype = np.dtype(node["dtype"])
    if dtype.kind not in _RAW_KINDS:
        raise ValueError(f"numpy dtype {node['dtype']!r} is not allowed in a checkpoint")
    shape = node["shape"] if tag == "raw array" else ()
    array = np.ndarray(shape, dtype, buffer=_from_text(value)).copy()
    return array if tag == "raw array" else array[()]
