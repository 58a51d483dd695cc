"""`TorchDynamoPlugin`: how `prepare` compiles models."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from torch import nn

from instep.errors import SettingError
from instep.utils.checks import FLAG, Check, check_fields

_BACKEND = Check(lambda value: isinstance(value, str) and value != "", 'a name such as "inductor", or "no"')


@dataclass(frozen=True)
class TorchDynamoPlugin:
    """Arguments of `torch.compile`, for `Accelerator(dynamo_plugin=...)`: `prepare` compiles each model then.

    Args:
        backend: torch's name, in capitals or not; "no" compiles nothing.
        mode: "default", "reduce-overhead" or "max-autotune".
        fullgraph: a graph that breaks is an error.
        dynamic: whether shapes may vary; None: as torch finds out.
        options: of the backend.
        disable: compile nothing, for a test.
        use_regional_compilation: compile the blocks in the model's `nn.ModuleList`s, which are alike, and not the whole
            model; a model without such a list is compiled as a whole.

    Example:
        >>> TorchDynamoPlugin(backend="EAGER", dynamic=True).to_kwargs()
        {'backend': 'eager', 'dynamic': True}

    Source:
        Names and meaning are those of Hugging Face Accelerate's TorchDynamoPlugin. Environment variables are not read.
    """

    backend: Annotated[str, _BACKEND] = "no"
    mode: str | None = None
    fullgraph: Annotated[bool, FLAG] = False
    dynamic: Annotated[bool | None, FLAG] = None
    options: dict[str, Any] | None = None
    disable: Annotated[bool, FLAG] = False
    use_regional_compilation: Annotated[bool, FLAG] = False

    def __post_init__(self) -> None:
        check_fields(self)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that differ from its own."""
        known = [each for each in fields(self) if each.name != "use_regional_compilation"]
        given = {each.name: value for each in known if (value := getattr(self, each.name)) != each.default}
        return {**given, "backend": str(getattr(self.backend, "value", self.backend)).lower()}


def dynamo_asked_for(plugin: TorchDynamoPlugin | None, backend: str | None) -> TorchDynamoPlugin | None:
    """Return how models are compiled; None where they are not.

    Raises:
        SettingError: both are given.
    """
    if plugin is not None and backend is not None:
        raise SettingError("give dynamo_plugin or dynamo_backend, not both", field="dynamo_backend", got=backend)
    plugin = plugin if backend is None else TorchDynamoPlugin(backend=backend)
    return None if plugin is None or plugin.to_kwargs()["backend"] == "no" else plugin


def compiled(model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
    """Compile a model, or its blocks; a model that is compiled stays as it is."""
    if hasattr(model, "_orig_mod"):
        return model
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part)]
    if not plugin.use_regional_compilation or not lists:
        return torch.compile(model, **plugin.to_kwargs())  # pyright: ignore[reportReturnType]
    for block in [block for part in lists for block in part]:
        block.compile(**plugin.to_kwargs())
    return model
