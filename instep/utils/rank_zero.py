"""Functions of lightning-utilities that do something on rank 0 only; instep tells them the rank.

The rank comes from the process state or, before this state exists, from the launcher's environment variables. The rank
is looked up at each call, so a function that was decorated before a fork uses the right rank in each process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from instep.utils.untrusted_files import clean

T = TypeVar("T")

__all__ = ["rank_zero_debug", "rank_zero_deprecation", "rank_zero_info", "rank_zero_only", "rank_zero_warn"]


class _RankZeroOnly:
    """Decorator that makes a function run on rank 0 only.

    Example:
        >>> @rank_zero_only
        ... def total(n: int) -> int:
        ...     return n + 1
        >>> total(1), rank_zero_only.rank
        (2, 0)
    """

    @property
    def rank(self) -> int:
        """This process's rank."""
        return _library().rank_zero_only.rank

    def __call__(self, function: Callable[..., T], default: T | None = None) -> Callable[..., T | None]:
        """Decorate a function.

        Args:
            function: function that rank 0 runs.
            default: value that the function returns on the other ranks.
        """

        @wraps(function)
        def on_rank_zero(*args: Any, **kwargs: Any) -> T | None:
            return _library().rank_zero_only(function, default)(*args, **kwargs)

        return on_rank_zero


rank_zero_only = _RankZeroOnly()


def rank_zero_warn(message: str | Warning, stacklevel: int = 2, **kwargs: Any) -> None:
    """Give a warning on rank 0 only.

    Args:
        message, kwargs: arguments of `warnings.warn`.
        stacklevel: line that the warning shows. 2: the line that calls this function; 3: the line that calls the
            function around that line, and so on.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     rank_zero_warn("the loader is slow")
        >>> str(caught[0].message)
        'the loader is slow'
    """
    _library().rank_zero_warn(message, stacklevel=stacklevel + _INNER, **kwargs)


def rank_zero_deprecation(message: str | Warning, stacklevel: int = 2, **kwargs: Any) -> None:
    """Give a DeprecationWarning on rank 0 only.

    Args:
        message, stacklevel, kwargs: as in `rank_zero_warn`.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     rank_zero_deprecation("use `lr` in place of `rate`")
        >>> caught[0].category.__name__
        'DeprecationWarning'
    """
    rank_zero_warn(message, stacklevel + 1, **{"category": DeprecationWarning, **kwargs})


def rank_zero_info(message: object, *args: Any, stacklevel: int = 2, **kwargs: Any) -> None:
    """Log a message of level INFO on rank 0 only, with lightning-utilities' logger; print it if logging has no handler.

    As with Lightning, the level of the root logger does not matter. To turn the messages off, set the level of another
    logger: `logging.getLogger("lightning_utilities").setLevel(logging.WARNING)`.

    Args:
        message, args, kwargs: arguments of `logging.info`.
        stacklevel: line that the record has. 2: the line that calls this function; 3: the line that calls the function
            around that line, and so on.

    Example:
        >>> rank_zero_info("training on %d samples", 1797)
    """
    library = _library()
    message = clean(message) if isinstance(message, str) else message
    if library.rank_zero_only.rank == 0:
        _let_infos_through(library.log)
        if not library.log.hasHandlers() and library.log.isEnabledFor(logging.INFO):
            sys.stderr.write(clean(f"{str(message) % args if args else message}\n"))
            return
    library.rank_zero_info(message, *args, stacklevel=stacklevel + _INNER, **kwargs)


def rank_zero_debug(message: object, *args: Any, stacklevel: int = 2, **kwargs: Any) -> None:
    """Log a message of level DEBUG on rank 0 only, with lightning-utilities' logger.

    Args:
        message, args, kwargs: arguments of `logging.debug`.
        stacklevel: as in `rank_zero_info`.

    Example:
        >>> rank_zero_debug("batch %d has %d tokens", 3, 512)
    """
    _library().rank_zero_debug(message, *args, stacklevel=stacklevel + _INNER, **kwargs)


def _let_infos_through(log: logging.Logger) -> None:
    """Set a logger's level to INFO, unless the logger or a parent below the root logger has a level already."""
    above: logging.Logger | None = log
    while above is not None and above.parent is not None:
        if above.level != logging.NOTSET:
            return
        above = above.parent
    log.setLevel(logging.INFO)


_INNER = 3  # number of frames of lightning-utilities between a function of this file and `warnings.warn`


def _library() -> Any:
    """Return the module `rank_zero` of lightning-utilities, with the rank of this process set in it."""
    from lightning_utilities.core import rank_zero  # imported late: it takes 40 ms, and few programs use it

    from instep.state import process, read_environment  # imported late: it imports torch

    place = process.held().environment if process.is_held() else read_environment()
    rank_zero.rank_zero_only.rank = place.rank  # pyright: ignore[reportFunctionMemberAccess]
    return rank_zero
