"""`seed_everything` and functions that save and restore the state of every random generator of this process."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from instep.errors import CorruptCheckpointError, SettingError
from instep.utils.checks import at_least

_others: dict[str, tuple[Callable[[], int], Callable[[int], Any]]] = {}

_WORDS = 624  # number of words in the state of a Mersenne Twister
# layout of the head of torch's state: seed, number of words left, whether it was seeded, index of the next word
_TORCH_HEAD = struct.Struct("<QiiQ")


def check_python(state: Any) -> None:
    """Raise ValueError if a value is not a state of `random.Random`: [version, [*words, position], gauss]."""
    version, words, gauss = _parts(state, 3, "the state of python's generator")
    _number(version, "the version of python's generator", 3, 3)
    *words, position = _parts(words, _WORDS + 1, "the words of python's generator")
    _words(words, "a word of python's generator", 32)
    _number(position, "the position of python's generator", 0, _WORDS)
    if gauss is not None:
        _real(gauss, "the gauss of python's generator")


def check_numpy(state: Any) -> None:
    """Raise ValueError if a value is not a state of numpy's global generator, as `numpy.random.get_state()` returns."""
    name, words, position, has_gauss, gauss = _parts(state, 5, "the state of numpy's generator")
    if name != "MT19937":
        raise ValueError(f"the kind of numpy's generator is {name!r}; expected 'MT19937'")
    _check_twister({"key": words, "pos": position})
    _number(has_gauss, "has_gauss of numpy's generator", 0, 1)
    _real(gauss, "the gauss of numpy's generator")


def check_bit_generator(state: Any) -> None:
    """Raise ValueError if a value is not a state of a bit generator of numpy, or of a RandomState that uses one."""
    name, inner = _of(state, "bit_generator"), _of(state, "state")
    if name == "MT19937":
        _check_twister(inner)
    elif name in ("PCG64", "PCG64DXSM"):
        for key in ("state", "inc"):
            _number(_of(inner, key), f"{key} of {name}", 0, 2**128 - 1)
    elif name == "Philox":
        arrays = (_of(inner, "counter"), 4), (_of(inner, "key"), 2), (_of(state, "buffer"), 4)
        for words, count in arrays:
            _words(_parts(words, count, "the words of Philox"), "a word of Philox", 64)
        _number(_of(state, "buffer_pos"), "buffer_pos of Philox", 0, 4)
    elif name == "SFC64":
        _words(_parts(_of(inner, "state"), 4, "the words of SFC64"), "a word of SFC64", 64)
    else:
        raise ValueError(f"{name!r} is no bit generator of numpy that is known here")
    for key, most in (("has_uint32", 1), ("uinteger", 2**32 - 1), ("has_gauss", 1)):
        if key in state:
            _number(state[key], f"{key} of {name}", 0, most)
    if "gauss" in state:
        _real(state["gauss"], f"gauss of {name}")


def check_torch(state: Any, size: int, device: str = "cpu") -> None:
    """Raise ValueError if a value is not a state of a generator of torch.

    Args:
        state: the value.
        size: size of a state in bytes.
        device: type of the generator's device, such as "cuda".
    """
    what = f"the state of torch's {device} generator"
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8 or state.device.type != "cpu":
        kind = f"{state.dtype} on {state.device}" if isinstance(state, torch.Tensor) else type(state).__name__
        raise ValueError(f"{what} is {kind}; expected a uint8 tensor on the CPU")
    if state.shape != (size,):
        raise ValueError(f"{what} has the shape {list(state.shape)}; expected [{size}]")
    if device == "cpu":
        _, left, seeded, after = _TORCH_HEAD.unpack(bytes(state[: _TORCH_HEAD.size].tolist()))
        unused = (left, after) == (1, 0)
        if not unused and not (1 <= after <= _WORDS and left + after == _WORDS + 1):
            raise ValueError(
                f"{what} has {left} words left and goes on at {after}; expected 1 to {_WORDS}, "
                f"with the sum {_WORDS + 1}"
            )
        _number(seeded, f"seeded of {what}", 0, 1)


def _check_twister(state: Any) -> None:
    words = _parts(_of(state, "key"), _WORDS, "the words of numpy's MT19937")
    _words(words, "a word of numpy's MT19937", 32)
    _number(_of(state, "pos"), "the position of numpy's MT19937", 0, _WORDS)


def _of(state: Any, key: str) -> Any:
    if not isinstance(state, Mapping) or key not in state:
        raise ValueError(f"a generator's state has no {key!r}")
    return state[key]


def _parts(value: Any, count: int, what: str) -> list[Any]:
    parts = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(parts, list | tuple) or len(parts) != count:
        got = f"{len(parts)} values" if isinstance(parts, list | tuple) else f"a {type(value).__name__}"
        raise ValueError(f"{what}: got {got}, expected {count} values")
    return list(parts)


def _words(words: Iterable[Any], what: str, bits: int) -> None:
    for word in words:
        _number(word, what, 0, 2**bits - 1)


def _number(value: Any, what: str, least: int, most: int) -> None:
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{what} is {str(value)[:40]}; expected an integer from {least} to {most}")


def _real(value: Any, what: str) -> None:
    if not isinstance(value, int | float):
        raise ValueError(f"{what} is a {type(value).__name__}; expected a number")


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends only on the arguments.

    Example:
        >>> derive_seed(0, "epoch", 3) == derive_seed(0, "epoch", 3)
        True
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)


def add_generator(name: str, get_state: Callable[[], int], set_state: Callable[[int], Any]) -> None:
    """Register a random generator that `torch.manual_seed` does not seed; instep then seeds, saves and restores it.

    Args:
        name: name of the generator's device type.
        get_state: function that returns the state of the generator, an integer of at most 64 bits.
        set_state: function that takes a result of `get_state`, or a seed.
    """
    _others[name] = get_state, set_state


def seed_process(seed: int) -> None:
    """Seed the generators of Python, of numpy (if imported) and all generators of torch in this process."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.manual_seed(seed)
    for _, set_state in _others.values():
        set_state(seed)


def seed_everything(seed: int = 0, workers: bool = True) -> int:
    """Seed Python, numpy and torch, with the same seed on all ranks.

    The Trainer derives its own seeds (for shuffling, and for the random numbers of each rank) from torch's initial
    seed, so one call at the top of a script makes a run repeatable. The ranks still draw different random numbers: when
    a fit starts, each rank is seeded anew with a seed derived from this seed and its rank.

    Args:
        seed: the seed, from 0 to 2**63 - 1.
        workers: accepted as in Lightning. Workers of loaders are always seeded, so False is an error.

    Returns:
        The seed.

    Raises:
        SettingError: the seed is no integer or out of range, or `workers` is False.

    Example:
        >>> seed_everything(7)
        7
    """
    seed = at_least(0, most=2**63 - 1)("seed", seed)
    if not workers:
        raise SettingError(
            "workers=False: instep seeds loader workers in any case; leave the argument out", field="workers"
        )
    import numpy  # noqa: F401  the user's code may load it later: seed it now

    seed_process(seed)
    return seed


def rng_state() -> dict[str, Any]:
    """Return the state of every random generator of this process, as tensors and JSON values.

    Returns:
        Entries `python` (a list), `numpy` (a list; only if numpy is imported) and `torch` (a uint8 tensor). For
        devices in use: `cuda` and `xpu` (a uint8 tensor for each device), and `mps` (a uint8 tensor). Each generator of
        `add_generator` has an entry with an integer.
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
    """Restore the state of every random generator.

    Args:
        state: state that `rng_state` returned.
        source: checkpoint that the state was read from; the whole state is then checked before any generator is set.

    Raises:
        CorruptCheckpointError: a part of the state is not a state of its generator.
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
        if name in state:  # use only as many states as this machine has devices
            module.set_rng_state_all(state[name][: module.device_count()])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
    for name, (_, set_state) in _others.items():
        if name in state:
            set_state(state[name])


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Restore every random generator of this process after the block, as if the block had drawn no random numbers.

    Args:
        include_cuda: whether the generators of GPUs are restored too.

    Example:
        >>> with isolate_rng():
        ...     first = torch.rand(())
        >>> bool(torch.rand(()) == first)
        True
    """
    state = rng_state()
    if not include_cuda:
        state.pop("cuda", None)
    try:
        yield
    finally:
        set_rng_state(state)


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
    """Yield name and torch module of the device types ("cuda", "xpu") that this machine has."""
    for name in ("cuda", "xpu"):
        module = getattr(torch, name)
        if module.is_available():
            yield name, module
