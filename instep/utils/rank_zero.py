"""lightning-utilities' functions that act on rank 0 alone; the rank comes from instep.

Before the process state exists, the launcher's environment says which rank this is. The rank is looked up at each call,
so that a function decorated before a fork is right in every rank.
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
    """Decorator of a function that runs on rank 0 only.

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
            function: what rank 0 runs.
            default: what the other ranks return.
        """

        @wraps(function)
        def on_rank_zero(*args: Any, **kwargs: Any) -> T | None:
            return _library().rank_zero_only(function, default)(*args, **kwargs)

        return on_rank_zero


rank_zero_only = _RankZeroOnly()


def rank_zero_warn(message: str | Warning, stacklevel: int = 2, **kwargs: Any) -> None:
    """Warn on rank 0 alone.

    Args:
        message, kwargs: as for `warnings.warn`.
        stacklevel: 2 names the line of this call in the warning, 3 the line of the call around it, and so on.

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
    """Warn of something deprecated on rank 0 alone.

    Args:
        message, stacklevel, kwargs: as for `rank_zero_warn`; the category is `DeprecationWarning`.

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
    """Log a message at INFO on rank 0, by lightning-utilities' logger; print it if logging is not set up.

    The message appears whatever the root logger's level is, as with Lightning. To turn it off, set the level of a
    logger below the root: `logging.getLogger("lightning_utilities").setLevel(logging.WARNING)`.

    Args:
        message, args, kwargs: as for `logging.info`.
        stacklevel: 2 names the line of this call in the record, 3 the line of the call around it, and so on.

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
    """Log a message of level DEBUG on rank 0 alone, by lightning-utilities' logger.

    Args:
        message, args, kwargs: as for `logging.debug`.
        stacklevel: 2 names the line of this call in the record, 3 the line of the call around it, and so on.

    Example:
        >>> rank_zero_debug("batch %d has %d tokens", 3, 512)
    """
    _library().rank_zero_debug(message, *args, stacklevel=stacklevel + _INNER, **kwargs)


def _let_infos_through(log: logging.Logger) -> None:
    """Set the logger's level to INFO, unless it or a parent other than the root already has a level."""
    above: logging.Logger | None = log
    while above is not None and above.parent is not None:
        if above.level != logging.NOTSET:
            return
        above = above.parent
    log.setLevel(logging.INFO)


_INNER = 3  # frames of lightning-utilities between these functions and `warnings.warn`


def _library() -> Any:
    """Return lightning-utilities' module after setting its rank to this process's."""
    from lightning_utilities.core import rank_zero  # imported late: 40 ms, which importing the Trainer does not pay

    from instep.state import process, read_environment  # imported late: loads torch

    place = process.held().environment if process.is_held() else read_environment()
    rank_zero.rank_zero_only.rank = place.rank  # pyright: ignore[reportFunctionMemberAccess]
    return rank_zero
