"""The one reader of YAML: it checks a small text first, then returns plain values.

A few hundred bytes of YAML can stand for billions of values (aliases of aliases), nest deeper than Python's stack, or
name classes. So this module counts the text's parser events first, which takes time in proportion to its length, and
refuses a text that is larger than any real configuration. Any error of the YAML library becomes an error of instep.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from instep.errors import SettingError
from instep.utils.untrusted_files import read_regular

MAX_BYTES = 2**20
MAX_DEPTH = 50
MAX_ITEMS = 4_000  # items of one list or mapping; above this number, parsers take quadratic time
MAX_VALUES = 10_000  # keys and values; those that an alias repeats count at each repetition
_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map", "merge")}
_HOW_ELSE = "Keep large values in a file of their own, which the program reads"


def read_text(path: Path) -> str:
    """Read the text of a configuration file.

    Raises:
        SettingError: it is no regular file, has more than `MAX_BYTES`, cannot be read, or is no UTF-8.
    """
    try:
        data = read_regular(path, MAX_BYTES)
    except (OSError, ValueError) as error:  # ValueError: the path holds a NUL character
        why = getattr(error, "strerror", None) or error
        raise SettingError(f"the config file {str(path)!r} cannot be read: {why}", field="config") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingError(f"{path} is no YAML: {error}", field="config") from error


def load(text: str, where: object) -> Any:
    """Read plain values of YAML; 1e-5 is a number, as in JSON and YAML 1.2, and a date is a string.

    Args:
        text: of one document.
        where: it is from, for the text of errors.

    Raises:
        SettingError: it is no YAML, or more than a configuration may be.

    Example:
        >>> load("{a: 1e-5, b: [yes, 2001-01-01]}", "an example")
        {'a': 1e-05, 'b': [True, '2001-01-01']}
    """
    return compose(text, where)[1]


def compose(text: str, where: object) -> tuple[Any, Any]:
    """Return the library's node tree, with line numbers, and the plain values; None for an empty text."""
    import yaml  # imported late: not needed where there is no file

    try:
        _check_size(text, where)
        loader = _loader()(text)
        try:
            node = loader.get_single_node()
            return node, None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise SettingError(f"{where} is no YAML: {error}", field="config") from error
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, SettingError):
            raise
        raise SettingError(f"{where} has a value that cannot be read: {error}", field="config") from error


def _check_size(text: str, where: object) -> None:
    """Count the values to which a text expands, before any of them is built."""
    import yaml  # imported late: not needed where there is no file

    if len(text) > MAX_BYTES:
        raise SettingError(f"{where} has more than {MAX_BYTES:,} characters. {_HOW_ELSE}.", field="config")
    sizes: dict[str, int] = {}  # anchor -> values
    open_: list[list[Any]] = [["", 0, 0, MAX_ITEMS]]  # each entry: anchor, values so far, items so far, most items
    for event in yaml.parse(text, Loader=_base()):
        line = event.start_mark.line + 1
        tag = getattr(event, "tag", None)
        if tag not in (None, "!") and tag not in _PLAIN_TAGS:
            raise SettingError(
                f"{where}:{line}: the tag {tag} is not read; texts, numbers, true, false, null, lists and mappings are",
                field="config",
            )
        values = 1
        if isinstance(event, yaml.CollectionStartEvent):
            pairs = isinstance(event, yaml.MappingStartEvent)
            open_.append([event.anchor, 1, 0, 2 * MAX_ITEMS if pairs else MAX_ITEMS])
            if len(open_) > MAX_DEPTH:
                raise SettingError(f"{where}:{line}: nested more than {MAX_DEPTH} deep", field="config")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, values, *_ = open_.pop()
            sizes[anchor] = values
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise SettingError(f"{where}:{line}: *{event.anchor} stands for nothing before it", field="config")
            values = sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = 1
        else:
            continue
        open_[-1][1] += values
        open_[-1][2] += 1
        if open_[-1][1] > MAX_VALUES or open_[-1][2] > open_[-1][3]:
            raise SettingError(
                f"{where}:{line}: more than {MAX_VALUES:,} values, or {MAX_ITEMS:,} in one list or mapping. "
                f"{_HOW_ELSE}.",
                field="config",
            )


def _base() -> Any:
    """Return the library's loader of plain values: the C version if there is one, which is twenty times as fast."""
    import yaml  # imported late: not needed where there is no file

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def _loader() -> Any:
    loader = type("_Loader", (_base(),), {})
    resolvers = {
        first: [(tag, pattern) for tag, pattern in known if not tag.endswith(":timestamp")]
        for first, known in loader.yaml_implicit_resolvers.items()
    }
    loader.yaml_implicit_resolvers = resolvers  # pyright: ignore[reportAttributeAccessIssue]
    loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )
    return loader
