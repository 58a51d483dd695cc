"""Read YAML safely: check the size of the text first, then return plain values. All YAML in instep is read here.

A few hundred bytes of YAML can expand to billions of values (aliases of aliases), be nested deeper than Python's stack
allows, or name classes. So this module first counts the parser's events, which takes time proportional to the length of
the text, and refuses a text that is larger or deeper than any real configuration. Errors of the YAML library are
converted to errors of instep.
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
MAX_ITEMS = 4_000  # largest number of items in one list or mapping; for more, parsers need too long (quadratic time)
MAX_VALUES = 10_000  # largest number of keys and values in a text; values count again at each alias that repeats them
_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map", "merge")}
_HOW_ELSE = "Keep large values in a file of their own, which the program reads"


def read_text(path: Path) -> str:
    """Read the text of a configuration file.

    Raises:
        SettingError: the file is not a regular file, has more than `MAX_BYTES`, cannot be read, or is not UTF-8 text.
    """
    try:
        data = read_regular(path, MAX_BYTES)
    except (OSError, ValueError) as error:  # ValueError: the path contains a NUL character
        why = getattr(error, "strerror", None) or error
        raise SettingError(f"the config file {str(path)!r} cannot be read: {why}", field="config") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingError(f"{path} is no YAML: {error}", field="config") from error


def load(text: str, where: object) -> Any:
    """Parse YAML to plain values; 1e-5 is a number, as in JSON and YAML 1.2, and a date is a string.

    Args:
        text: text of one YAML document.
        where: where the text is from, for error messages.

    Raises:
        SettingError: the text is not valid YAML, or has more values than a configuration may have.

    Example:
        >>> load("{a: 1e-5, b: [yes, 2001-01-01]}", "an example")
        {'a': 1e-05, 'b': [True, '2001-01-01']}
    """
    return compose(text, where)[1]


def compose(text: str, where: object) -> tuple[Any, Any]:
    """Parse YAML; return the YAML library's node tree (with line numbers) and the plain values.

    Both are None if the text is empty.
    """
    import yaml  # imported late: only needed for a file

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
    """Raise an error if a YAML text expands to too many values, before any value is made."""
    import yaml  # imported late: only needed for a file

    if len(text) > MAX_BYTES:
        raise SettingError(f"{where} has more than {MAX_BYTES:,} characters. {_HOW_ELSE}.", field="config")
    sizes: dict[str, int] = {}  # number of values of each anchor
    # For each unfinished collection: anchor, number of values so far, number of items so far, limit for the items.
    open_: list[list[Any]] = [["", 0, 0, MAX_ITEMS]]
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
    """Return the YAML library's loader class for plain values; the one in C, if available, is 20 times as fast."""
    import yaml  # imported late: only needed for a file

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
