"""Make the optimizer that a DeepSpeed configuration describes, and check and name optimizers for ZeRO."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch.optim import Optimizer

from instep.errors import SettingError
from instep.strategies.deepspeed.config import AUTO, offload_device

# Optimizers of torch that step each element separately, so that they can step a part of a flattened group.
_ELEMENTWISE = ("Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_ADAMS = ("DeepSpeedCPUAdam", "FusedAdam")


def kind_of(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class for a checkpoint.

    DeepSpeed's versions of Adam and AdamW get the names of torch's, which compute the same.
    """
    name = type(optimizer).__name__
    if name not in _ADAMS:
        return name
    mode = getattr(optimizer, "adamw_mode", getattr(optimizer, "adam_w_mode", True))
    return "AdamW" if mode else "Adam"


def counts_in_ints(optimizer: Optimizer) -> bool:
    """Return True if `step` in an optimizer's state is an int and not a tensor."""
    return type(optimizer).__name__ in _ADAMS


def check_optimizer(optimizer: Optimizer, config: Mapping[str, Any], stage: int) -> None:
    """Raise an error for an optimizer that is not known to step each element of a parameter separately.

    ZeRO gives each process only a part of the flattened parameters. An optimizer that needs whole parameters, such as
    for their norms, would make wrong steps.

    Raises:
        SettingError: the optimizer may need whole parameters (the message names alternatives), or one of its groups has
            no parameters.
    """
    name = type(optimizer).__name__
    if any(not group["params"] for group in optimizer.param_groups):
        cut = " Stage 3 has cut parameters up when it is made: tell them apart by p.ds_shape, not by p.ndim or p.shape."
        raise SettingError(
            f"{name} has a parameter group without parameters. Leave it out.{cut if stage == 3 else ''}",
            field="strategy",
            got=name,
        )
    known = type(optimizer).__module__.startswith("deepspeed.") or name in _ELEMENTWISE
    if stage == 0 or known or config.get("zero_allow_untested_optimizer"):
        return
    raise SettingError(
        f"{name} may look at whole parameters, and ZeRO gives each process a run of all of them in one tensor. Use one "
        f"of {', '.join(_ELEMENTWISE)} or of deepspeed.ops, or stage 0; where it treats each element by itself, say so "
        "by zero_allow_untested_optimizer=true in DeepSpeed's config.",
        field="strategy",
        got=name,
    )


def make_optimizer(config: Mapping[str, Any], parameters: Iterable[Any], device: torch.device, **given: Any) -> Any:
    """Make the optimizer that a DeepSpeed configuration describes.

    Args:
        config: configuration with a section `optimizer`.
        parameters: parameters, or parameter groups.
        device: device of the module.
        given: values for entries that are "auto". Other "auto" entries get the optimizer's default.

    Raises:
        SettingError: there is no section `optimizer`, its type is unknown, or a given value contradicts it.
    """
    section = config.get("optimizer")
    if not isinstance(section, Mapping) or "type" not in section:
        raise SettingError(
            "DeepSpeed's config has no optimizer section. Return an optimizer from configure_optimizers instead.",
            field="config",
        )
    name, params = str(section["type"]), dict(section.get("params") or {})
    for key, value in given.items():
        if params.setdefault(key, AUTO) not in (AUTO, value):
            raise SettingError(
                f"{key}={value!r} was given, and DeepSpeed's config has {key}={params[key]!r}. Make it 'auto' there.",
                field=key,
                got=value,
            )
        params[key] = value
    params = {key: value for key, value in params.items() if value != AUTO}
    as_torch = params.pop("torch_adam", False)
    adamw = params.pop("adam_w_mode", True)
    lower = name.lower()
    on_cpu = offload_device(config, "offload_optimizer") is not None
    if lower in ("adam", "adamw") and not as_torch and (on_cpu or device.type == "cuda"):
        adams = import_module("deepspeed.ops.adam")  # imported late: DeepSpeed is an optional package
        adamw = adamw or lower == "adamw"
        if on_cpu:
            return adams.DeepSpeedCPUAdam(parameters, adamw_mode=adamw, **params)
        return adams.FusedAdam(parameters, adam_w_mode=adamw, **params)
    if lower == "adam":
        name = "AdamW" if adamw else "Adam"
    of_torch = {kind.lower(): getattr(torch.optim, kind, None) for kind in (name, *_ELEMENTWISE)}
    if lower == "lion" and (on_cpu or device.type == "cuda"):
        lion = import_module("deepspeed.ops.lion")  # imported late: DeepSpeed is an optional package
        return (lion.DeepSpeedCPULion if on_cpu else lion.FusedLion)(parameters, **params)
    made = of_torch.get(name.lower())
    if made is None:
        raise SettingError(
            f"optimizer.type={name!r} in DeepSpeed's config is not known here. Use one of {', '.join(_ELEMENTWISE)} or "
            "Lion, or make the optimizer in configure_optimizers.",
            field="config",
            got=name,
        )
    return made(parameters, **params)
