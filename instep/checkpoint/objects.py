"""Objects that are saved by what they hold: enum members by their names, random generators by their states, dates.

Making one again runs no code that the checkpoint chooses: an enum's class is looked up in modules that are loaded
already, by their plain attributes, and the generators are those listed here.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta, timezone
from enum import Enum
from types import ModuleType
from typing import Any

import torch

from instep.errors import CheckpointError
from instep.utils.generators import check_bit_generator, check_python, check_torch

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def state_of(obj: Any) -> tuple[str, Any, dict[str, Any]] | None:
    """How an object is saved; None where it is none of these.

    Returns:
        Its tag, its state, which is to be encoded in turn, and JSON values to keep beside.

    Raises:
        ValueError: it is one of these and cannot be saved all the same; the text says what to do.
    """
    kind = type(obj)
    if kind is datetime:
        return _datetime_state(obj)
    if kind is date:
        return "date", [obj.year, obj.month, obj.day], {}
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
    """What a loaded module has under that name. Never `getattr`: a module's own may import, a class's may run code."""
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


def _random(state: Any, _: Mapping[str, Any]) -> Any:
    check_python(state)
    version, words, gauss = state
    generator = random.Random(0)
    generator.setstate((version, tuple(words), gauss))
    return generator


def _torch_generator(state: Any, node: Mapping[str, Any]) -> Any:
    device = torch.device(node["device"])
    try:
        generator = torch.Generator(device)
    except RuntimeError as error:
        raise CheckpointError(
            f"this state holds a torch.Generator of {device}, which this process does not have: {error}"
        ) from error
    check_torch(state, generator.get_state().numel(), device.type)
    generator.set_state(state)
    return generator


def _numpy_generator(state: Any, node: Mapping[str, Any]) -> Any:
    import numpy as np  # late: needed only where a state holds one

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


# Tag: what makes the object again, of its decoded state and the JSON object around it.
MAKERS: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "date": lambda fields, _: date(*fields),
    "datetime": _datetime,
    "enum": _enum,
    "numpy.Generator": _numpy_generator,
    "numpy.RandomState": _numpy_generator,
    "random.Random": _random,
    "torch.Generator": _torch_generator,
}
