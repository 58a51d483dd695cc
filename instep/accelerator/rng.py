"""Seeding the random generators, and setting them to the same state on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from instep.distributed import broadcast_object
from instep.errors import SettingError
from instep.state import PartialState
from instep.utils.checks import choice
from instep.utils.seed import rng_state, seed_everything, set_rng_state

RNG_TYPES = ("torch", "cuda", "xpu", "python", "numpy", "generator")


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> int:
    """Seed Python, numpy and torch.

    Args:
        seed: seed from 0 to 2**63 - 1, also after the rank is added.
        device_specific: whether to add the rank, so that every process draws different numbers.
        deterministic: whether torch must use deterministic algorithms, and raise if there is none.

    Returns:
        The seed of this process.

    Raises:
        ValueError: the seed is out of range.

    Example:
        >>> set_seed(7)
        7
    """
    if device_specific:
        seed += PartialState().process_index
    seed_everything(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
    return seed


def synchronize_rng_states(
    types: Sequence[str] = ("torch", "cuda", "python", "numpy"), generator: torch.Generator | None = None
) -> None:
    """Set the random generators of all ranks to the states that they have on rank 0. Collective.

    Args:
        types: the generators: "torch" (of the CPU), "cuda" and "xpu" (of the current device, if there is one),
            "python", "numpy", "generator".
        generator: one more torch generator to set; required if `types` has "generator".

    Raises:
        SettingError: a type is unknown, or `types` has "generator" and `generator` is None.

    Example:
        >>> synchronize_rng_states(["torch", "python"])
    """
    for name in types:
        choice(*RNG_TYPES)("types", name)
    if "generator" in types and generator is None:
        raise SettingError('types has "generator", so pass it as well: generator=...', field="generator")
    state = rng_state()
    chosen: dict[str, Any] = {
        name: state[name] for name in ("torch", "python", "numpy") if name in types and name in state
    }
    devices = [name for name in ("cuda", "xpu") if name in types and getattr(torch, name).is_available()]
    # Take the state of the current device alone: each rank sets it below for its own current device, whose index may
    # differ from rank 0's.
    chosen.update({name: getattr(torch, name).get_rng_state() for name in devices})
    if generator is not None:
        chosen["generator"] = generator.get_state()
    chosen = broadcast_object(chosen)
    for name in devices:
        getattr(torch, name).set_rng_state(chosen.pop(name))
    if generator is not None:
        generator.set_state(chosen.pop("generator"))
    # The generators of cuda and xpu are set above.
    others = {name: value for name, value in state.items() if name not in ("cuda", "xpu")}
    set_rng_state({**others, **chosen})
