"""Hostile texts, and what of them must never reach a terminal raw."""

from __future__ import annotations

import random
import re

CODES = (
    "\x1b]0;owned\x07",
    "\x1b]8;;http://evil\x1b\\",
    "\x1b[31m",
    "\x1b[2J",
    "\x1b[6n",
    "\x1bc",
    "\x1bP+q\x1b\\",
    "\x9b31m",
    "\x9d0;owned\x9c",
    "\x85",
    "\x07",
    "\x08\x08\x08",
    "\x7f",
    "\x0b",
    "\x0c",
    "\r",
    "\x1b",
    "\u202e",
    "\u2066",
    "\u2067x\u2069",
    "\u200f",
    "\u061c",
    "\u2028",
    "\u2029",
)
RAW = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""What must not come out; a newline and a tab may, where the text has lines."""


def texts(count: int = 300, seed: int = 0) -> list[str]:
    """Make so many different texts, each with at least one code, and each with a number of its own."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        codes = [CODES[number % len(CODES)], *draw.choices(CODES, k=draw.randrange(3))]
        words = [f"n{number}", *draw.choices(("loss", "[red]", "a b", "é", "%s", "{x}"), k=len(codes))]
        draw.shuffle(words)
        made.append("".join(word + code for word, code in zip(words, [*codes, ""], strict=True)))
    return made


def raw_in(text: str) -> list[str]:
    """Return the places of a text at which something raw is."""
    return [repr(text[max(0, found.start() - 30) : found.end() + 10]) for found in RAW.finditer(text)]
