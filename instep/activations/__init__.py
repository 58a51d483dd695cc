"""Activation memory: parts of a module keep little in the forward and run again in the backward, in any strategy.

`recompute` changes one part, and is the only function that strategies call; `checkpointing` chooses the parts for a
run. A name is loaded when it is first used.
"""

from typing import TYPE_CHECKING

from instep.utils.imports import loads

if TYPE_CHECKING:
    from instep.activations.checkpointing import ActivationCheckpointing as ActivationCheckpointing

__all__, __getattr__, __dir__ = loads(__name__)
