"""Other packages' names, for scripts that were not ported yet."""

from instep.compat import accelerate, fabric, lightning

__all__ = ["accelerate", "fabric", "lightning"]
