"""Optimizers: parameter groups by name, learning rates by layer, and whole-matrix optimizers for sharded weights.

The module of a name is imported when the name is first used.
"""

from typing import TYPE_CHECKING

from instep.utils.imports import loads

if TYPE_CHECKING:
    from instep.optim.groups import biases_and_norms as biases_and_norms
    from instep.optim.groups import layerwise_lr as layerwise_lr
    from instep.optim.groups import param_groups as param_groups
    from instep.optim.whole_matrix import WholeMatrix as WholeMatrix

__all__, __getattr__, __dir__ = loads(__name__)
