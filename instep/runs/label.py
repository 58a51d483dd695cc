"""The label that a user gives a run: name, tags, note and whether it is archived, in `label.json` of the run folder."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from instep.errors import UsageError
from instep.runs.status import own
from instep.utils.atomic import replace
from instep.utils.untrusted_files import LEASE_BYTES, clean, parse_object, read_regular

FILE = "label.json"
# Limits: characters of a name, characters of a note, characters of a tag, and number of tags.
MOST_NAME, MOST_NOTE, MOST_TAG, MOST_TAGS = 200, 4000, 64, 32


@dataclass(frozen=True)
class Label:
    """What a user has written about a run.

    Args:
        name: name of the run, in one line; "" if the user gave none.
        tags: tags of the run, each a word.
        note: note about the run, of any number of lines.
        archived: whether `instep runs ls` leaves the run out.

    Example:
        >>> print(Label("baseline", ("paper",)))
        baseline, tag paper
    """

    name: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""
    archived: bool = False

    def __str__(self) -> str:
        name = self.name or "no name"
        return ", ".join([name, *(f"tag {tag}" for tag in self.tags), *(["archived"] if self.archived else [])])


def label_of(said: Any) -> Label:
    """Make a label from untrusted JSON values: drop values of wrong types, and cut long ones.

    Example:
        >>> label_of({"name": "base\\x1b[2J", "tags": ["good", 3], "archived": 1})
        Label(name='base\\\\x1b[2J', tags=('good',), note='', archived=False)
    """
    said = said if isinstance(said, dict) else {}
    tags = said.get("tags")
    return Label(
        _text(said.get("name"), MOST_NAME),
        tuple(filter(None, (_text(tag, MOST_TAG) for tag in (tags if isinstance(tags, list) else [])[:MOST_TAGS]))),
        _text(said.get("note"), MOST_NOTE, "\n\t"),
        said.get("archived") is True,
    )


def _text(value: Any, most: int, kept: str = "") -> str:
    return clean(value[:most], kept).strip()[:most] if isinstance(value, str) else ""


def read_label(folder: Path) -> Label:
    """Read the label of a run; return an empty label if no label can be read."""
    path = folder / FILE
    with suppress(OSError, ValueError):
        if own(path, folder):
            return label_of(parse_object(read_regular(path, LEASE_BYTES)))
    return Label()


def write_label(folder: Path, label: Label) -> None:
    """Write the label of a run, and replace the old label atomically.

    Args:
        folder: the run folder.
        label: the new label.

    Raises:
        UsageError: the name, a tag or the note is not allowed.
        OSError: the folder cannot be written to.
    """
    _check("name", label.name, MOST_NAME, "a name is one line")
    _check("note", label.note, MOST_NOTE, "a note is lines of text", "\n\t")
    _check_tags(label.tags)
    replace(folder / FILE, (json.dumps(asdict(label), indent=1, ensure_ascii=False) + "\n").encode())


def _check(what: str, text: str, most: int, expected: str, kept: str = "") -> None:
    bad = next((char for char in text if not char.isprintable() and char not in kept), None)
    if len(text) > most or bad is not None:
        got = f"{len(text):,} characters" if bad is None else f"the character {clean(bad, '')}, which is not printed"
        raise UsageError(f"the {what} has {got}; {expected}, of at most {most:,} printed characters")


def _check_tags(tags: tuple[str, ...]) -> None:
    for tag in tags:
        if not tag or len(tag) > MOST_TAG or not tag.isprintable() or "," in tag or " " in tag:
            raise UsageError(
                f"the tag {clean(tag, '')[:MOST_TAG]!r} is no word: at most {MOST_TAG} printed characters, without "
                "blanks and commas"
            )
    if len(tags) > MOST_TAGS:
        raise UsageError(f"a run has at most {MOST_TAGS} tags, and would have {len(tags)}; take some off with --remove")
