"""Activation memory: parts of a module whose forward keeps little and runs again in the backward, in any strategy.

`recompute` does it to one part, and is all that strategies know of; `checkpointing` chooses the parts for a run.
A name is loaded when it is first used.
"""

from typing import TYPE_CHECKING

from instep.utils.imports import loads

if TYPE_CHECKING:
    from instep.activations.checkpointing import ActivationCheckpointing as ActivationCheckpointing

__all__, __getattr__, __dir__ = loads(__name__)
