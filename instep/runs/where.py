"""Conditions on runs, such as `lr<0.1 and state=finished`; this module parses them, and never runs them as code."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from instep.errors import UsageError

Condition = Callable[[Callable[[str], Any]], bool]
"""Condition on a run. It gets a function that returns the run's value for a name: a number, text, tuple or None."""

_TOKEN = re.compile(r"\s*(?:([()])|(<=|>=|!=|==?|<|>|~)|\"([^\"]*)\"|'([^']*)'|([^\s()<>=!~\"']+))")
_MOST_DEPTH, _MOST_CHARACTERS = 50, 2000
_EXPECTED = "write it as 'lr<0.1 and state=finished'; there are = != < <= > >= ~ (contains), and, or, not, ( )"


def parse(text: str) -> Condition:
    """Parse a condition into a function of a run.

    `not` binds closer than `and`, and `and` closer than `or`. Numbers are compared as numbers, texts as texts. If a run
    has no value for the name, only the comparison `!=` is true. A tuple, such as the tags, is equal to each of its
    members.

    Args:
        text: names, comparison signs and values; a name or value that contains blanks is written in quotes.

    Raises:
        UsageError: the text is not a condition; the message shows the place.

    Example:
        >>> run = {"lr": 0.01, "state": "finished"}
        >>> parse("lr<0.1 and (state=failed or not state=running)")(run.get)
        True
    """
    parser = _Parser(text)
    condition = parser.either(0)
    if parser.at < len(parser.tokens):
        raise parser.wrong()
    return condition


def names_in(text: str) -> list[str]:
    """List the names in a condition."""
    return [name for (_, name), (kind, _) in pairwise(_Parser(text).tokens) if kind == "sign"]


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.tokens, self.at = text, list[tuple[str, str]](), 0
        end = len(text.rstrip())
        place = 0
        while place < end:
            match = _TOKEN.match(text, place)
            if match is None or len(text) > _MOST_CHARACTERS:
                raise UsageError(
                    f"--where {text[:80]!r}: cannot be read from {text[place : place + 20]!r} on; {_EXPECTED}"
                )
            bracket, sign, *quoted, word = match.groups()
            kind = "bracket" if bracket else "sign" if sign else "word" if word else "quoted"
            self.tokens.append((kind, bracket or sign or word or quoted[0] or quoted[1] or ""))
            place = match.end()

    def wrong(self) -> UsageError:
        got = repr(self.tokens[self.at][1]) if self.at < len(self.tokens) else "the end"
        before = " ".join(text for _, text in self.tokens[: self.at])
        return UsageError(f"--where {self.text[:80]!r}: {got} is not expected after {before[-40:]!r}; {_EXPECTED}")

    def _next(self, kind: str, *texts: str) -> str | None:
        """Take the next token and return its text, if it has this kind; else return None.

        With `texts`, the token's text must also be one of these.
        """
        if self.at < len(self.tokens):
            found, text = self.tokens[self.at]
            if found == kind and (not texts or text.lower() in texts):
                self.at += 1
                return text
        return None

    def either(self, depth: int) -> Condition:
        parts = [self._all(depth)]
        while self._next("word", "or"):
            parts.append(self._all(depth))
        return lambda run: any(part(run) for part in parts)

    def _all(self, depth: int) -> Condition:
        parts = [self._one(depth)]
        while self._next("word", "and"):
            parts.append(self._one(depth))
        return lambda run: all(part(run) for part in parts)

    def _one(self, depth: int) -> Condition:
        if depth > _MOST_DEPTH:
            raise self.wrong()
        if self._next("word", "not"):
            inner = self._one(depth + 1)
            return lambda run: not inner(run)
        if self._next("bracket", "("):
            inner = self.either(depth + 1)
            if not self._next("bracket", ")"):
                raise self.wrong()
            return inner
        name = self._next("word") or self._next("quoted")
        sign = self._next("sign") if name else None
        given = self._next("word") if sign else None
        if sign and given is None:
            given = self._next("quoted")
        if name is None or sign is None or given is None:
            raise self.wrong()
        return lambda run: _holds(run(name), sign, given)


def _holds(value: Any, sign: str, given: str) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    if sign == "!=":
        return not any(_compare(part, "=", given) for part in parts)
    return any(_compare(part, sign, given) for part in parts)


def _compare(value: Any, sign: str, given: str) -> bool:
    if value is None:
        return False
    one, other = _number(value), _number(given)
    if sign == "~":
        return given.lower() in str(value).lower()
    if one is None or other is None:
        same = str(value).lower() == given.lower() if isinstance(value, bool) else str(value) == given
        return sign in ("=", "==") and same
    difference = 0.0 if one == other else one - other
    return {"=": difference == 0, "==": difference == 0, "<": difference < 0, ">": difference > 0}.get(
        sign, difference <= 0 if sign == "<=" else difference >= 0
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(number) else number
