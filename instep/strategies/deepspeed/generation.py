"""Generation with weights sharded over ranks (stage 3). Every forward gathers them, so all ranks must run as many."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature

from torch import nn


def sync_generation(module: nn.Module) -> Callable[[], None]:
    """Let the transformers models in a module generate until the last rank is done.

    Texts have different lengths, and ranks that are done would no longer take part when others gather weights.
    transformers does this itself for torch's FSDP, but for DeepSpeed only with its own integration.

    Args:
        module: each part with a method `generate(..., synced_gpus=...)` gets True as that argument's default.

    Returns:
        A function that undoes this.
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
