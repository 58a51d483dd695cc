"""Generation with weights spread over ranks (stage 3): every forward gathers them, so all ranks run as many."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature

from torch import nn


def sync_generation(module: nn.Module) -> Callable[[], None]:
    """Let the transformers models in a module generate until the last rank is done.

    Texts end at different lengths, and ranks that are done would not take part in the others' gathering.
    transformers asks torch's FSDP for it by itself, but of DeepSpeed it knows only what its own integration set up.

    Args:
        module: each part with a method `generate(..., synced_gpus=...)` gets True as that argument's default.

    Returns:
        What undoes this.
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
