"""Use a checkpoint's hyperparameters as defaults of a parser that builds objects and reads texts as YAML.

A text read as YAML could name a class to build, so the parser gets no text of a checkpoint: `described_arguments`
replaces every text by a stand-in, a made-up word.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from instep.utils.hparams import CLASS_PATH
from instep.utils.rebuild import Building, configured_class, with_code


def described_arguments(cls: type, saved: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, StandIn]]:
    """Describe the arguments of a module as defaults for a parser, without any text of the checkpoint.

    Args:
        cls: the module's class, or a base class of it.
        saved: the hyperparameters, with the path of the module's class.

    Returns:
        The arguments, with stand-ins in place of texts; and the stand-ins, by name.

    Raises:
        CheckpointError: in the same cases as for `configured_arguments`.
    """
    describing, built = _Describing(), configured_class(cls, saved)
    values = {key: value for key, value in saved.items() if key != CLASS_PATH}
    return describing.arguments(with_code(built, values), built, ""), describing.stand_ins


@dataclass(frozen=True)
class StandIn:
    """A checkpoint's value that a parser must not read; `described_arguments` puts a made-up word in its place.

    Args:
        value: the value in the checkpoint.
        is_text: whether the value is a text for an argument that accepts any text.
    """

    value: Any
    is_text: bool


class _Describing(Building):
    """Builder of a parser's defaults from a checkpoint's values, with stand-ins in place of its texts."""

    def __init__(self) -> None:
        self.stand_ins: dict[str, StandIn] = {}
        # A random name, so that the checkpoint cannot contain the name of a stand-in.
        self._secret = uuid.uuid4().hex

    def _stand_in(self, value: Any, is_text: bool) -> str:
        name = f"_of_checkpoint_{self._secret}_{len(self.stand_ins)}_"
        self.stand_ins[name] = StandIn(value, is_text)
        return name

    def text(self, text: str) -> Any:
        return self._stand_in(text, is_text=True)

    def anything(self, value: Any) -> Any:
        return self._stand_in(value, is_text=False)

    def open(self, value: Any, key: str, owner: type) -> Any:
        super().open(value, key, owner)  # checks the class paths inside the value: raises if a class is not allowed
        plain = value is None or isinstance(value, bool | int | float)
        return value if plain else self._stand_in(value, is_text=False)

    def made(self, cls: type, arguments: dict[str, Any], partly: bool) -> Any:
        return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": arguments}

    def structure(self, cls: type, fields: dict[str, Any]) -> Any:
        return fields
