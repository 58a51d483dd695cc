"""Checks of random generators' states: a library that is handed a wrong one reads past its arrays.

numpy takes any position and crashes, torch takes one that points behind its words. So a state that was read from a file
is checked here first. Each check raises ValueError, with what was wrong, got and expected.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_WORDS = 624  # of a Mersenne Twister
_TORCH_HEAD = struct.Struct("<QiiQ")  # torch's: seed, words left, whether it was seeded, the next word


def check_python(state: Any) -> None:
    """Check the state of `random.Random`: version, words with the position as the last, gauss."""
    version, words, gauss = _parts(state, 3, "the state of python's generator")
    _number(version, "the version of python's generator", 3, 3)
    *words, position = _parts(words, _WORDS + 1, "the words of python's generator")
    _words(words, "a word of python's generator", 32)
    _number(position, "the position of python's generator", 0, _WORDS)
    if gauss is not None:
        _real(gauss, "the gauss of python's generator")


def check_numpy(state: Any) -> None:
    """Check the state of numpy's global generator, as `numpy.random.get_state()` gives it."""
    name, words, position, has_gauss, gauss = _parts(state, 5, "the state of numpy's generator")
    if name != "MT19937":
        raise ValueError(f"the kind of numpy's generator is {name!r}; expected 'MT19937'")
    _check_twister({"key": words, "pos": position})
    _number(has_gauss, "has_gauss of numpy's generator", 0, 1)
    _real(gauss, "the gauss of numpy's generator")


def check_bit_generator(state: Any) -> None:
    """Check the state of a bit generator of numpy, or of a RandomState over one (with `legacy=False`)."""
    name = _of(state, "bit_generator")
    inner = _of(state, "state")
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
    """Check the state of a generator of torch.

    Args:
        state: its state.
        size: bytes that such a state has.
        device: its kind of device.
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
