"""Small helper functions that do not depend on training; public names are imported when they are first used.

All other names in this package are internal and may change in any release.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "AttributeDict": "hparams",
    "HyperParameters": "hparams",
    "rank_zero_debug": "rank_zero",
    "rank_zero_deprecation": "rank_zero",
    "rank_zero_info": "rank_zero",
    "rank_zero_only": "rank_zero",
    "rank_zero_warn": "rank_zero",
    "seed_everything": "seed",
}

if TYPE_CHECKING:
    from instep.utils.hparams import AttributeDict as AttributeDict
    from instep.utils.hparams import HyperParameters as HyperParameters
    from instep.utils.rank_zero import rank_zero_debug as rank_zero_debug
    from instep.utils.rank_zero import rank_zero_deprecation as rank_zero_deprecation
    from instep.utils.rank_zero import rank_zero_info as rank_zero_info
    from instep.utils.rank_zero import rank_zero_only as rank_zero_only
    from instep.utils.rank_zero import rank_zero_warn as rank_zero_warn
    from instep.utils.seed import seed_everything as seed_everything

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    # `loads` of imports.py is not used here: this file must be fast, since every import from the package runs it.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public are: {', '.join(_HOME)}")
    globals()[name] = value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
