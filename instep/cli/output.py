"""Print the output of commands: tables for people, JSON for programs.

On a terminal rich draws the tables; elsewhere they are aligned text without colors, boxes or line breaks.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from instep.errors import UsageError
from instep.utils.untrusted_files import clean

_LONG_BITS = 256  # an integer with more bits than this is printed as a hexadecimal text
_FEW = 8  # maximum number of elements of a tensor that is printed


def say(text: str = "", kept: str = "\n\t") -> None:
    """Print one line or several; control characters of a terminal are escaped, except those in `kept`."""
    encoding = sys.stdout.encoding or "utf-8"
    text = clean(text, kept)
    # escape characters that the encoding of stdout does not have, such as a lone surrogate
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def warn(text: str) -> None:
    """Print a message for people on stderr; control characters of a terminal are escaped."""
    encoding = sys.stderr.encoding or "utf-8"
    text = clean(text)
    sys.stderr.write(f"instep: {text.encode(encoding, 'backslashreplace').decode(encoding)}\n")


def confirm(what: str, question: str, otherwise: str, refusal: str, yes: bool = False) -> None:
    """Ask the user to agree.

    Args:
        what: text about what will be done, in whole lines.
        question: question that the user answers with yes or no.
        otherwise: what the user should do if there is no terminal to ask on.
        refusal: text of the error after any other answer than yes.
        yes: whether the user has agreed by an option: `what` is printed, and no question is asked.

    Raises:
        UsageError: the user did not agree, or cannot be asked.
    """
    if yes:
        return warn(what)
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):  # None without a stdin, as under cron
        raise UsageError(f"{what}\n{otherwise}")
    warn(what)
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError(refusal)


def say_json(value: Any, indent: int | None = None) -> None:
    """Print a value as strict JSON; on a terminal, or with `indent`, on several lines."""
    say(json.dumps(plain(value), indent=1 if sys.stdout.isatty() else indent, allow_nan=False))


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], right: Iterable[str] = ()) -> None:
    """Print a table with one line per row.

    Args:
        headers: names of the columns.
        rows: cells of each row; None is an empty cell.
        right: names of the columns that are aligned to the right.
    """
    cells = [["" if cell is None else clean(str(cell), "") for cell in row] for row in rows]
    to_right = [name in set(right) for name in headers]
    if sys.stdout.isatty():
        from rich.console import Console  # imported late, since only a terminal needs it
        from rich.table import Table
        from rich.text import Text

        shown = Table()
        for name, is_right in zip(headers, to_right, strict=True):
            shown.add_column(name, justify="right" if is_right else "left", overflow="fold")
        for row in cells:
            # Plain texts, since rich would read brackets in a name as markup.
            shown.add_row(*(Text(cell) for cell in row))
        Console().print(shown)
        return
    widths = [max(len(row[i]) for row in [list(headers), *cells]) for i in range(len(headers))]
    for row in [list(headers), *cells]:
        parts = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, to_right, strict=True)
        ]
        say("  ".join(parts).rstrip())


def tree(title: str, value: Any) -> None:
    """Print a nested value below a title, one line for each leaf; print nothing if it is empty."""
    if value is None or value in ({}, []):
        return
    say(f"\n{title}")
    for line in _lines(plain(value), "  "):
        say(line)


def _lines(value: Any, indent: str) -> Iterable[str]:
    if isinstance(value, dict) and value and not _short(value):
        for key, inner in value.items():
            if _nested(inner):
                yield f"{indent}{key}:"
                yield from _lines(inner, f"{indent}  ")
            else:
                yield f"{indent}{key}: {_leaf(inner)}"
    elif isinstance(value, list) and value and not _short(value):
        for index, inner in enumerate(value):
            if _nested(inner):
                yield f"{indent}{index}:"
            yield from _lines(inner, f"{indent}  " if _nested(inner) else indent)
    else:
        yield f"{indent}{_leaf(value)}"


def _nested(value: Any) -> bool:
    return isinstance(value, (dict, list)) and bool(value) and not _short(value)


def _short(value: Any) -> bool:
    flat = isinstance(value, list) and not any(isinstance(inner, (dict, list)) for inner in value)
    return flat or (isinstance(value, dict) and value.keys() == {"dtype", "shape"})


def _leaf(value: Any) -> str:
    if isinstance(value, dict) and value:
        return f"{value['dtype']} {value['shape']}" if _short(value) else str(value)
    return value if isinstance(value, str) else json.dumps(value)


def plain(value: Any) -> Any:
    """Convert a value to JSON: a value that JSON lacks becomes text, a large tensor its dtype and shape."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    # Python refuses to convert an integer of more than 4,300 digits to decimal text.
    if isinstance(value, int) and value.bit_length() > _LONG_BITS:
        return hex(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner) for inner in value]
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # true for a tensor or a numpy array
        size = math.prod(value.shape)
        if size <= _FEW:
            return plain(value.tolist())
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    return str(value)


def count(number: int, what: str) -> str:
    """Format a number together with its noun.

    Example:
        >>> count(1, "tensor"), count(2000, "tensor")
        ('1 tensor', '2,000 tensors')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def size(count: float | None, unknown: str = "") -> str:
    """Format a number of bytes with its unit; return `unknown` for None.

    Example:
        >>> size(999), size(1500), size(2.5e9)
        ('999 B', '1.5 kB', '2.5 GB')
    """
    if count is None:
        return unknown
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def age(created: str, now: datetime | None = None) -> str:
    """Return how long ago a time in ISO 8601 was.

    Example:
        >>> age("2026-01-02T03:00:00+00:00", datetime(2026, 1, 2, 5, 30, tzinfo=timezone.utc))
        '2 h ago'
    """
    try:
        seconds = ((now or datetime.now(timezone.utc)) - datetime.fromisoformat(created)).total_seconds()
    except (ValueError, TypeError):
        return created
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {name} ago"
    return f"{max(seconds, 0):.0f} s ago"
