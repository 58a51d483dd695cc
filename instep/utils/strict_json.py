"""JSON that anybody may have written, read as the format says and no further."""

from __future__ import annotations

import json
from typing import Any

MOST_DEPTH = 256  # containers within each other; who walks over the value recursively must come to its end


def parse_json(text: bytes | bytearray | str) -> Any:
    """The value of a JSON text.

    Stricter than `json.loads`: UTF-8 alone, no key twice in an object, no NaN or Infinity, and at most 256 containers
    within each other.

    Raises:
        ValueError: it is not such a text.

    Example:
        >>> parse_json(b'{"a": [1, 2.5]}')
        {'a': [1, 2.5]}
    """
    if not isinstance(text, str):
        text = bytes(text).decode("utf-8")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise _too_deep() from None
    if text.count("[") + text.count("{") > MOST_DEPTH:
        _check_depth(value)
    return value


def parse_object(text: bytes | bytearray | str) -> dict[str, Any]:
    """The same, of a text that holds one object.

    Raises:
        ValueError: it is not such a text, or holds something else.
    """
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, where an object is expected")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise _too_deep()
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer if type(outer) is list else ())
            if type(inner) is dict or type(inner) is list
        ]


def _too_deep() -> ValueError:
    return ValueError(f"more than {MOST_DEPTH} containers are within each other")
