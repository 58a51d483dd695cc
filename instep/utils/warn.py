"""The one way to warn: the user's line is shown, not one of ours."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

_PACKAGES = ("site-packages", "dist-packages")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_BETWEEN = tuple(f"{os.sep}{name}{os.sep}" for name in ("torch", "jsonargparse", "lightning_utilities"))


def warn_user(message: str | Warning, category: type[Warning] | None = None) -> None:
    """Warn at the innermost line of the user's program; if no user code called us, at the caller's line.

    `warnings.warn` wants a number of frames, which is another one for each way that leads to a warning, and Python has
    `skip_file_prefixes` from 3.12 on only.

    Args:
        message: as in `warnings.warn`.
        category: as in `warnings.warn`.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and _is_passed_over(frame.f_code.co_filename):
        level += "importlib._bootstrap" not in frame.f_code.co_filename  # `warnings` does not count these
        frame = frame.f_back
    if isinstance(message, str) and not message.isprintable():
        from instep.utils.untrusted_files import clean  # late: few warnings need it

        message = clean(message)
    warnings.warn(message, category, stacklevel=2 if frame is None else level)


def _is_passed_over(file: str) -> bool:
    """Return True for our own files and for files that call us back; False for the user's."""
    if file.startswith((_OURS, "<frozen ", "<string>")):  # the last is a dataclass's own `__init__`
        return True
    installed = any(f"{os.sep}{name}{os.sep}" in file for name in _PACKAGES)
    return any(name in file for name in _BETWEEN) if installed else file.startswith(_STDLIB)
