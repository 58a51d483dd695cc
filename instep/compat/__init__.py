"""Names of other packages, for scripts that are not ported yet."""

from instep.compat import accelerate, fabric, lightning

__all__ = ["accelerate", "fabric", "lightning"]
