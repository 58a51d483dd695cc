"""Seeding, and the state of every random generator of this process."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from instep.errors import CorruptCheckpointError, SettingError
from instep.utils.generators import check_numpy, check_python, check_torch

_others: dict[str, tuple[Callable[[], int], Callable[[int], Any]]] = {}


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a pure function of its parts.

    Example:
        >>> derive_seed(0, "epoch", 3) == derive_seed(0, "epoch", 3)
        True
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)


def add_generator(name: str, get_state: Callable[[], int], set_state: Callable[[int], Any]) -> None:
    """Let a generator that torch's seed does not reach be seeded, saved and restored with the others from here on.

    Args:
        name: of its kind of device.
        get_state: returns its state, of at most 64 bits.
        set_state: takes such a state, or a seed.
    """
    _others[name] = get_state, set_state


def seed_process(seed: int) -> None:
    """Seed python's, numpy's (when it is loaded) and every torch generator of this process."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.manual_seed(seed)
    for _, set_state in _others.values():
        set_state(seed)


def seed_everything(seed: int = 0, workers: bool = True) -> int:
    """Seed python, numpy and torch alike on all ranks.

    The Trainer takes its own seed (shuffling, per-rank random streams) from torch's initial seed, so one call at the
    top of a script makes a run repeatable. Ranks still draw different random numbers: at the start of a fit each rank
    moves to a stream of its own, derived from this seed and its rank.

    Args:
        seed: 0 to 2**63 - 1.
        workers: as in Lightning; loader workers are seeded in any case, so False is refused.

    Returns:
        The seed.

    Raises:
        SettingError: the seed is out of range, or `workers` is False.

    Example:
        >>> seed_everything(7)
        7
    """
    if not 0 <= seed < 2**63:
        raise SettingError(f"seed={seed} is out of range: give an integer from 0 to 2**63 - 1", field="seed", got=seed)
    if not workers:
        raise SettingError(
            "workers=False: instep seeds loader workers in any case; leave the argument out", field="workers"
        )
    import numpy  # noqa: F401  the user's code may load it later: seed it now

    seed_process(seed)
    return seed


def rng_state() -> dict[str, Any]:
    """The state of every random generator of this process, as tensors and JSON values.

    Returns:
        `python` (list), `numpy` (list, absent while numpy is not loaded), `torch` (uint8 tensor), and `cuda` and `xpu`
        (uint8 tensors of every device), `mps` (one) and those of `add_generator` (integers) where they are used.
    """
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    for name, module in _devices():
        if module.is_initialized():
            state[name] = module.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state | {name: get_state() for name, (get_state, _) in _others.items()}


def set_rng_state(state: dict[str, Any], source: Path | None = None) -> None:
    """Restore what `rng_state` returned.

    Args:
        state: what it returned.
        source: the checkpoint that it was read from; all of it is then checked before any of it is set.

    Raises:
        CorruptCheckpointError: a generator cannot have such a state.
    """
    if source is not None:
        try:
            _check(state)
        except ValueError as error:
            raise CorruptCheckpointError(
                f"the random generators' states in {source} are damaged: {error}. Resume from another checkpoint, or "
                "take up its weights alone with Resume.weights().",
                path=source,
            ) from error
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    for name, module in _devices():
        # A machine with fewer devices takes what it has a place for.
        module.set_rng_state_all(state.get(name, [])[: module.device_count()])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
    for name, (_, set_state) in _others.items():
        if name in state:
            set_state(state[name])


def _check(state: Any) -> None:
    missing = [name for name in ("python", "torch") if not isinstance(state, dict) or name not in state]
    if missing:
        raise ValueError(f"those of {' and '.join(missing)} are missing")
    check_python(state["python"])
    check_torch(state["torch"], torch.get_rng_state().numel())
    if "numpy" in state:
        check_numpy(state["numpy"])
    for name, module in _devices():
        there = state.get(name, [])
        if not isinstance(there, list | tuple):
            raise ValueError(f"those of {name} are a {type(there).__name__}; expected a list")
        for index, one in enumerate(there[: module.device_count()]):
            check_torch(one, module.get_rng_state(index).numel(), name)
    if "mps" in state and torch.backends.mps.is_available():
        check_torch(state["mps"], torch.mps.get_rng_state().numel(), "mps")
    for name in _others.keys() & state.keys():
        if not isinstance(state[name], int) or not -(2**63) <= state[name] < 2**64:
            raise ValueError(f"that of {name} is {str(state[name])[:40]}; expected an integer of 64 bits")


def _devices() -> Iterator[tuple[str, Any]]:
    """The kinds of devices that may be several, where there are any."""
    for name in ("cuda", "xpu"):
        module = getattr(torch, name)
        if module.is_available():
            yield name, module
