"""`warn_user`: warn with a line of the user's program, not a line of instep. All code of instep uses this function."""

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
    """Give a warning that shows the innermost line of the user's program, or the caller's line if there is none.

    `warnings.warn` needs the number of frames up to that line. The number differs from call to call, so it is counted
    here. (`warnings.warn` has an argument `skip_file_prefixes`, but only since Python 3.12.)

    Args:
        message: as in `warnings.warn`.
        category: as in `warnings.warn`.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and _is_passed_over(frame.f_code.co_filename):
        level += "importlib._bootstrap" not in frame.f_code.co_filename  # `warnings` does not count frames of imports
        frame = frame.f_back
    if isinstance(message, str) and not message.isprintable():
        from instep.utils.untrusted_files import clean  # imported late: few warnings have unprintable characters

        message = clean(message)
    warnings.warn(message, category, stacklevel=2 if frame is None else level)


def _is_passed_over(file: str) -> bool:
    """Return True for files of instep and for files of packages that call instep; False for the user's files."""
    if file.startswith((_OURS, "<frozen ", "<string>")):  # "<string>" is the generated `__init__` of a dataclass
        return True
    installed = any(f"{os.sep}{name}{os.sep}" in file for name in _PACKAGES)
    return any(name in file for name in _BETWEEN) if installed else file.startswith(_STDLIB)
