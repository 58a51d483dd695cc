"""Train models larger than a device: the frozen base weights are offloaded, the adapters are not."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from instep.big_models.dispatch import offloading_hooks
from instep.big_models.hooks import AlignDevicesHook, as_device
from instep.errors import SettingError, UsageError
from instep.strategies.materialize import Materializer


def prepare_offloaded_training(model: nn.Module, blocks: Collection[str] | str | None = None) -> nn.Module:
    """Make a dispatched model with adapters ready to be trained.

    The forward brings a block's frozen weights to the device, and so does the backward, in reverse order. So the device
    never holds more of the base than the blocks in use. A block whose weights are copied to the device keeps no
    activations, and computes them again in the backward. If the weights are mapped from files on a CPU, nothing is
    computed twice. Adapters that peft left on the meta device, because the layers under them are there, are
    initialized. Gradients are bit for bit those of a model that is on the device as a whole.

    Call it after the adapters were added and before the optimizer is made. Give the optimizer the trainable parameters,
    and let the checkpoints of a `TrainModule` hold these alone by `checkpoint_filter = "trainable"`.

    Args:
        model: a model that `load_checkpoint_and_dispatch` or `dispatch_model` returned, perhaps inside another model,
            such as a peft model; changed in place.
        blocks: names of the classes whose modules are computed again, one at a time. None: the blocks of a transformers
            model, or else the items of lists of modules (`nn.ModuleList`, `nn.Sequential`).

    Returns:
        The model.

    Raises:
        UsageError: nothing of the model is offloaded.
        SettingError: a trainable weight is offloaded; offloaded weights that are copied to the device are in no block;
            or nothing initializes a weight of an adapter that is on the meta device.

    Example:
        >>> model = load_checkpoint_and_dispatch(model, folder, "auto", max_memory={"cpu": "6GB"})  # doctest: +SKIP
        >>> model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))  # doctest: +SKIP
        >>> prepare_offloaded_training(model)  # doctest: +SKIP
        >>> optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)  # doctest: +SKIP

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016 (arXiv:1604.06174), for what is computed
    again; Hu et al., LoRA, 2021 (arXiv:2106.09685).
    """
    hooks = dict(offloading_hooks(model))
    if not hooks:
        raise UsageError(
            f"nothing of this {type(model).__name__} is offloaded, so it is trained as any other model. Dispatch it "
            "first, by load_checkpoint_and_dispatch with a device_map that leaves modules on 'cpu' or 'disk'."
        )
    empty = {
        value: f"{name}.{leaf}"
        for name, hook in hooks.items()
        for leaf, value in zip(hook.names, hook.empty, strict=True)
    }
    trainable = [name.removeprefix(".") for value, name in empty.items() if value.requires_grad]
    if trainable:
        raise SettingError(
            f"{len(trainable)} offloaded weights require gradients, such as {trainable[0]}, and nothing could change "
            "them where they lie. Freeze them (requires_grad_(False)) and add adapters, as get_peft_model does, or "
            "give their modules a device in the device_map.",
            field="device_map",
            got=trainable,
        )
    maker = Materializer(_device(next(iter(hooks.values()))), empty)
    maker.make_all(model)
    if maker.without_values:
        names = sorted(maker.without_values)
        raise SettingError(
            f"{len(names)} weights and buffers of adapters lost their values to the meta device, where the layers "
            f"under them are, and no reset_parameters() of their modules sets them: {', '.join(names[:5])}. Add these "
            "adapters before the model is dispatched.",
            field="model",
            got=names,
        )
    copied = {name for name, hook in hooks.items() if _is_copied(hook)}
    if copied:
        _compute_again(model, blocks, copied)
    return model


def _device(hook: AlignDevicesHook) -> torch.device:
    """Return the device where a module with offloaded weights computes."""
    return as_device("cpu" if hook.execution_device is None else hook.execution_device)


def _is_copied(hook: AlignDevicesHook) -> bool:
    """Return True if each forward copies weights to the device; the graph would keep the copies until the backward."""
    weights: Any = hook.weights_map
    for name in hook.names:
        first = weights[name]
        if first.device != _device(hook) or weights[name] is not first:
            return True
    return False


def _compute_again(model: nn.Module, blocks: Collection[str] | str | None, copied: set[str]) -> None:
    """Make blocks with copied weights keep no activations; the backward computes them again."""
    inside: set[str] = set()
    for name, part in model.named_modules():
        if any(name.startswith(f"{outer}.") or not outer for outer in inside):
            continue
        if blocks is None and getattr(part, "supports_gradient_checkpointing", False):
            # The method of transformers is used, since it also keeps the second forward from filling the cache of keys
            # again.
            part.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            inside.add(name)
    if inside:
        return
    found = [name for name in _blocks(model, blocks) if any(f"{each}.".startswith(f"{name}.") for each in copied)]
    if not found:
        raise SettingError(
            f"no block of {type(model).__name__} has offloaded weights (blocks={blocks!r}), so a backward would hold "
            "all of them on the device. Name the classes of its blocks.",
            field="blocks",
            got=blocks,
        )
    for name in found:
        part = model.get_submodule(name)
        part.forward = wraps(part.forward)(partial(_forward_again, part, part.forward))


def _forward_again(part: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.is_grad_enabled():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return forward(*args, **kwargs)


def _blocks(model: nn.Module, classes: Collection[str] | str | None) -> Iterator[str]:
    """Yield the names of the outermost blocks of a model."""
    named = (classes,) if isinstance(classes, str) else classes
    outer: list[str] = []
    for name, part in model.named_modules():
        if any(name.startswith(f"{each}.") for each in outer):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        listed = isinstance(parent, nn.ModuleList | nn.Sequential)
        if name and (listed if named is None else type(part).__name__ in named):
            outer.append(name)
            yield name
