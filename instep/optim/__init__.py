"""Optimizers: parameter groups by name, rates by layer, and optimizers of whole matrices for weights that ranks share.

A name is loaded when it is first used.
"""

from typing import TYPE_CHECKING

from instep.utils.imports import loads

if TYPE_CHECKING:
    from instep.optim.groups import biases_and_norms as biases_and_norms
    from instep.optim.groups import layerwise_lr as layerwise_lr
    from instep.optim.groups import param_groups as param_groups
    from instep.optim.whole_matrix import WholeMatrix as WholeMatrix

__all__, __getattr__, __dir__ = loads(__name__)
