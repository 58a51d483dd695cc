"""instep's classes under the names of Lightning Fabric; once installed, they replace the package `lightning`.

Only the program that installs them is changed. Install them with `instep launch --as fabric script.py`, or call
`install()` before the first import of lightning. The names are those of `lightning.fabric`, `lightning_fabric` and
`from lightning import Fabric`; names of `lightning.pytorch` come from `instep.compat.lightning`. Nothing is written to
the disk, and an installed Lightning is not loaded. A name without a counterpart in instep can be imported; using it is
an error that says what to do.

Example:
    >>> from instep.compat.fabric import Fabric
    >>> from instep.compat.fabric.strategies import DDPStrategy
    >>> DDPStrategy
    <class 'instep.strategies.ddp.DDPStrategy'>
"""

from __future__ import annotations

import subprocess
from typing import Any

from instep.compat import tables
from instep.compat.door import Door
from instep.launch.command import this_command

__path__: list[str] = []  # marks this module as a package; `_door` makes the modules in it

VERSION = "2.6.0"
"""Version of Lightning whose names are provided."""

MODULES = frozenset(
    (
        "accelerator", "amp", "bitsandbytes", "checkpoint_io", "cloud_io", "cluster_environment", "collective",
        "connector", "consolidate_checkpoint", "cpu", "csv_logs", "cuda", "device_dtype_mixin", "double", "dp", "half",
        "init", "launcher", "load", "logger", "mps", "multiprocessing", "registry", "single_xla", "subprocess_script",
        "testing", "throughput", "torch_collective", "wrappers", "xla_fsdp",
    )
)  # fmt: skip
"""Words in the dotted names of Fabric's modules, besides the words in `tables.LIGHTNING_MODULES`."""


def command() -> tuple[str, ...]:
    """Return the arguments of Python that start this program again, with Fabric replaced if it is replaced now."""
    words, flags = this_command(), len(subprocess._args_from_interpreter_flags())  # pyright: ignore
    return (*words[:flags], "-m", "instep.compat", "fabric", *words[flags:]) if _door.installed else words


def _has(module: str) -> bool:
    """Return True if a full name can be that of a module of Lightning: all parts after the first are known."""
    return all(word in MODULES or word in tables.LIGHTNING_MODULES for word in module.split(".")[1:])


_door = Door(
    __name__,
    "lightning",
    VERSION,
    {"lightning.fabric": "lightning.fabric", "lightning_fabric": "lightning.fabric", "lightning": "lightning"},
    _has,
    *(f"instep.compat.fabric_{part}" for part in ("parts", "wrappers", "files", "names")),
)
install = _door.install


def __getattr__(name: str) -> Any:
    return _door.find(__name__, name)
