"""instep's classes under the names of Accelerate, Fabric and Lightning, for scripts that are not ported yet."""

from instep.compat import accelerate, fabric, lightning

__all__ = ["accelerate", "fabric", "lightning"]
