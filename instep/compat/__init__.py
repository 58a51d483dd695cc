"""Other packages' names, for scripts that were not ported yet."""

from instep.compat import accelerate, lightning

__all__ = ["accelerate", "lightning"]
