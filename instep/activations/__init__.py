"""Recompute parts of a module in the backward, so that their activations take little memory, under any strategy.

`recompute` changes a single part, and is the only function that strategies call. `checkpointing` chooses the parts for
a run. A name is loaded at its first use.
"""

from typing import TYPE_CHECKING

from instep.utils.imports import loads

if TYPE_CHECKING:
    from instep.activations.checkpointing import ActivationCheckpointing as ActivationCheckpointing

__all__, __getattr__, __dir__ = loads(__name__)
