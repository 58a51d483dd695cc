"""Other packages' names, for scripts that were not ported yet."""

from instep.compat import lightning

__all__ = ["lightning"]
