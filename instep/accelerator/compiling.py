"""`TorchDynamoPlugin`: settings with which `Accelerator.prepare` compiles models."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from torch import nn

from instep.compile import CompileConfig, compile_regions, resolve_compile
from instep.errors import SettingError
from instep.utils.checks import FLAG, Check, check_fields

_BACKEND = Check(lambda value: isinstance(value, str) and value != "", 'a name such as "inductor", or "no"')


@dataclass(frozen=True)
class TorchDynamoPlugin:
    """Arguments of `torch.compile`, for `Accelerator(dynamo_plugin=...)`.

    With this plugin, `prepare` compiles each model.

    Args:
        backend: torch's name of the backend, in upper or lower case; "no" compiles nothing.
        mode: "default", "reduce-overhead" or "max-autotune".
        fullgraph: whether a graph break raises an error.
        dynamic: whether shapes may vary; None lets torch find out.
        options: options of the backend.
        disable: whether to compile nothing, for instance in a test.
        use_regional_compilation: whether to compile the repeated blocks in each `nn.ModuleList` of the model instead of
            the whole model. A model without such a list is compiled as a whole.

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
        """Return `backend`, and the other arguments that differ from the defaults of `torch.compile`."""
        known = [each for each in fields(self) if each.name != "use_regional_compilation"]
        given = {each.name: value for each in known if (value := getattr(self, each.name)) != each.default}
        return {**given, "backend": str(getattr(self.backend, "value", self.backend)).lower()}


def compile_asked_for(
    compile: Any,  # this argument is named as in torch, although the name hides the builtin
    plugin: TorchDynamoPlugin | None,
    backend: str | None,
) -> CompileConfig | None:
    """Return the options with which models are compiled; None if models are not compiled.

    Raises:
        SettingError: more than one argument is given, or `compile` asks to compile the whole training step.
    """
    given = {"compile": compile, "dynamo_plugin": plugin, "dynamo_backend": backend}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise SettingError(f"give {names[0]} or {names[1]}, not both", field=names[1], got=given[names[1]])
    plugin = plugin if backend is None else TorchDynamoPlugin(backend=backend)
    if plugin is not None:
        options = plugin.to_kwargs()
        if options["backend"] == "no" or options.pop("disable", False):
            return None
        return CompileConfig(regions=plugin.use_regional_compilation, **options)
    config = resolve_compile("compile", compile)
    if config is not None and config.scope == "step":
        raise SettingError(
            "compile='step': with an Accelerator the step is a function of yours. Compile it by "
            "torch.compile(step), and use compile='module' to compile the models alone.",
            field="compile",
            got=compile,
        )
    return config


def compiled(model: nn.Module, config: CompileConfig) -> nn.Module:
    """Compile a model, or its blocks. A model that is compiled already is returned unchanged."""
    if hasattr(model, "_orig_mod"):
        return model
    if compile_regions(model, config):
        return model
    return torch.compile(model, **config.options_of_torch())  # pyright: ignore[reportReturnType]
