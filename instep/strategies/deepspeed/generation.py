"""Text generation under ZeRO stage 3, where all ranks must run the same number of forwards to gather weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature

from torch import nn


def sync_generation(module: nn.Module) -> Callable[[], None]:
    """Make `synced_gpus=True` the default of `generate` in the transformers models of a module.

    With `synced_gpus=True`, a rank whose texts are finished runs forwards until the last rank has finished, since other
    ranks need it to gather weights. transformers sets this default for torch's FSDP; for DeepSpeed, only if the
    DeepSpeed integration of transformers is used.

    Args:
        module: module whose parts with a method `generate(..., synced_gpus=...)` are changed.

    Returns:
        A function that restores the original methods.
    """
    made = [part for part in module.modules() if "generate" not in part.__dict__ and _can_sync(type(part))]
    for part in made:
        part.generate = partial(part.generate, synced_gpus=True)  # type: ignore[assignment, operator]

    def undo() -> None:
        for part in made:
            part.__dict__.pop("generate", None)

    return undo


def _can_sync(kind: type[nn.Module]) -> bool:
    generate = getattr(kind, "generate", None)
    return callable(generate) and "synced_gpus" in signature(generate).parameters
