"""instep's classes under the names of Accelerate; once installed, they replace the package `accelerate`.

Only the program that installs them is changed. Install them with `instep launch --as accelerate script.py`, or call
`install()` before the first import of accelerate. Nothing is written to the disk, and an installed accelerate is not
loaded. A name without a counterpart in instep can be imported; using it is an error that says what to do.

Example:
    >>> from instep.compat.accelerate import Accelerator
    >>> from instep.compat.accelerate.utils import DistributedType, set_seed
    >>> Accelerator.__mro__[2]
    <class 'instep.accelerator.accelerator.Accelerator'>
"""

from __future__ import annotations

from typing import Any

from instep.compat.door import Door

__path__: list[str] = []  # marks this module as a package; `_door` makes the modules in it

VERSION = "1.15.0"
"""Version of Accelerate whose names are provided."""

MODULES = frozenset(
    (
        "accelerator", "big_modeling", "checkpointing", "commands", "commands.config", "data_loader", "hooks",
        "inference", "launchers", "local_sgd", "logging", "memory_utils", "optimizer", "parallelism_config",
        "scheduler", "state", "test_utils", "test_utils.testing", "tracking", "utils", "utils.ao", "utils.bnb",
        "utils.constants", "utils.dataclasses", "utils.deepspeed", "utils.environment", "utils.fsdp_utils",
        "utils.imports", "utils.launch", "utils.megatron_lm", "utils.memory", "utils.modeling", "utils.offload",
        "utils.operations", "utils.other", "utils.random", "utils.torch_xla",
        "utils.transformer_engine", "utils.versions",
    )
)  # fmt: skip
"""Names of Accelerate's modules, without the prefix "accelerate."."""


def _has(module: str) -> bool:
    """Return True if Accelerate has a module of this full name."""
    return module.removeprefix("accelerate.") in MODULES


_door = Door(__name__, "accelerate", VERSION, {"accelerate": "accelerate"}, _has, "instep.compat.accelerate_parts")
install = _door.install


def __getattr__(name: str) -> Any:
    return _door.find(__name__, name)
