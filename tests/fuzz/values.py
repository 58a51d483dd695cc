"""Odd values: what hypothesis draws, and those that have broken readers."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.child import MARKER

CLASS = f"{MARKER}_module.Class"

NUMBERS: list[Any] = [
    0, -1, 1, 2, 255, 625, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**400,
    0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"), True, False,
]  # fmt: skip
TEXTS = [
    "", " ", "\0", "a\0b", "\ud800", "\udcff", "é" * 300, "x" * 100_000, "..", ".", "/", "../outside/file.safetensors",
    "../../outside/secret.json", "/etc/passwd", "/dev/zero", "in/../..", "nan", "1e999", "9" * 5000, "-1", "None",
    "true", "float32", "torch.float32", "float4_e2m1fn_x2", "F32", "U8", "model.safetensors", "manifest.json", "{}",
    "%s%n%d", "{0.__class__}", "\x1b[2J", "\n", "a/b", "~", "~nobody/x", "C:\\x", "file:///etc/passwd", "[" * 3000,
    CLASS, "torch.nn.Linear", "logging.FileHandler", "ctypes.CDLL", "antigravity.x", "os.system",
]  # fmt: skip
OBJECTS: list[Any] = [
    None, [], {}, [[]], [None], {"": None}, {"a": 1}, [1, 2, 3], ["a", "b"], [[1, 2], [3]], list(range(3000)),
    {str(i): i for i in range(3000)}, {"class_path": CLASS}, {"class_path": CLASS, "init_args": {"name": "x"}},
    {"_class_path": CLASS, "backbone": f'{{"class_path":\t"{CLASS}"}}'}, {"__tensor__": "x"}, {"$": []},
    {"class_path": "torch.nn.Sequential", "init_args": f'{{"class_path": "{CLASS}"}}'}, {"class_path": []},
]  # fmt: skip


def json_values() -> st.SearchStrategy[Any]:
    """Values that JSON can hold, nan and infinities too."""
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    )


@cache
def drawn_values(number: int) -> list[Any]:
    """Values for mutations: the same for one number."""
    return examples(json_values(), number, 300)


@cache
def drawn_texts(number: int) -> list[str]:
    """Texts for mutations and command lines, with surrogates."""
    return examples(st.text(st.characters(exclude_categories=()), max_size=30), number, 200)


def examples(strategy: st.SearchStrategy[Any], number: int, count: int) -> list[Any]:
    """What a strategy draws with a seed."""
    found: list[Any] = []

    @seed(number)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found
