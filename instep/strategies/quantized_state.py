"""Save quantized layers of bitsandbytes and torchao in state dicts as plain tensors, and load them in place.

A quantized weight consists of several tensors: bitsandbytes stores scales besides the weight, and torchao combines
several tensors in a tensor subclass. Checkpoints contain plain tensors. So each of these tensors gets a name in
`state_dict()`: for bitsandbytes the names that bitsandbytes uses (`weight.absmax`, `SCB` ...), for torchao the names of
the subclass's attributes (`weight.qdata`, `weight.scale` ...).

`load_state_dict` writes only into existing tensors of a layer. Shapes and block sizes from a file are compared with the
layer and never trusted, because the kernels do not check them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from instep.utils.untrusted_files import parse_object

# Beginning of a name in bitsandbytes' state dicts. The name ends with "nf4" or "fp4"; its value is a uint8 tensor with
# a JSON text about the quantized weight.
_ABOUT = "weight.quant_state.bitsandbytes__"
_OFFSET = "nested_offset"  # the only value in the JSON text of bitsandbytes that depends on the weight
_FORMAT = "weight_format"  # an obsolete entry, since bitsandbytes has only one 8-bit format now
_ABOUT_BYTES = 256  # size of the padded JSON, so that its tensor has the same shape in every model


def keep_as_tensors(layer: nn.Module) -> None:
    """Make a quantized layer, and all copies of it, save and load its state as plain tensors.

    Args:
        layer: a `Linear4bit` or `Linear8bitLt` of bitsandbytes, or a linear layer with a weight of torchao.
    """
    layer.register_state_dict_post_hook(_save)
    layer.register_load_state_dict_pre_hook(_load)


def is_stored_quantized(names: Mapping[str, Any], layer: str) -> bool:
    """Return True if stored weights contain the quantized tensors of a layer.

    Args:
        names: stored weights by name.
        layer: name of the layer in the model.
    """
    return f"{layer}.SCB" in names or any(f"{layer}.weight.{part}" in names for part in ("absmax", "qdata", "scale"))


def is_of_torchao(tensor: Any) -> bool:
    """Return True if a tensor belongs to a tensor subclass of torchao, which supports few operations."""
    return type(tensor).__module__.startswith("torchao.")


def quantized_tensors(module: nn.Module) -> list[Tensor]:
    """Return those plain tensors of a module's quantized layers that are neither parameters nor buffers."""
    found: list[Tensor] = []
    for layer in module.modules():
        weight: Any = getattr(layer, "weight", None)
        if is_of_torchao(weight) or type(weight).__name__ in ("Params4bit", "Int8Params"):
            found += _parts(layer).values()
            offset = getattr(getattr(weight, "quant_state", None), "offset", None)
            found += [] if offset is None else [offset]
    return found


def _save(layer: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """State dict hook: split a weight of torchao into plain tensors, and pad bitsandbytes' JSON to a fixed size."""
    if is_of_torchao(layer.weight):
        del state[f"{prefix}weight"]
        state.update({prefix + name: part for name, part in _parts(layer).items()})
    for name in [name for name in state if name.startswith(prefix + _ABOUT)]:
        about = state[name]
        state[name] = nn.functional.pad(about, (0, _ABOUT_BYTES - len(about)), value=ord(" "))


def _load(
    layer: Any,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Hook before `load_state_dict`: load the quantized tensors of a layer; torch loads the layer's other tensors."""
    weight, given = f"{prefix}weight", state.get(f"{prefix}weight")
    # The state dict has the weight as a tensor subclass (from torch.save). torch loads it without this hook's help.
    if is_of_torchao(layer.weight) and type(given) is type(layer.weight):
        return
    own = _parts(layer)
    about = next((name for name in layer.state_dict() if name.startswith(_ABOUT)), None)
    others = [name for name in (about, _FORMAT) if name]
    saved = {name: state.pop(prefix + name) for name in (*own, *others) if prefix + name in state}
    pairs = [(name, value, own[name]) for name, value in saved.items() if name in own]
    pairs += [("weight", given, layer.weight)] if given is not None else []
    wrong = [
        f"{prefix}{name} is {_kind(value)} in the checkpoint and {_kind(mine)} here"
        for name, value, mine in pairs
        if _kind(value) != _kind(mine) or is_of_torchao(mine)  # one tensor is not enough: torchao's weight has several
    ]
    offset = None
    if about in saved:
        try:
            offset = _read_about(saved[about], layer.weight.quant_state)
        except (ValueError, TypeError) as error:
            wrong.append(f"{prefix}{about}: {error}")
    if wrong:
        errors.extend(f"{line}: it is not quantized in the same way" for line in wrong)
    else:
        missing.extend(prefix + name for name in (*own, about) if name and name not in saved)
        with torch.no_grad():
            for name, mine in own.items():
                mine.copy_(saved.get(name, mine))
            if offset is not None:
                layer.weight.quant_state.offset.fill_(offset)
    if wrong or is_of_torchao(layer.weight):
        # Let torch load the weight from itself, so that it neither changes the weight nor reports it as missing.
        state[weight] = layer.weight


def _parts(layer: Any) -> dict[str, Tensor]:
    """Return the tensors of a quantized layer that are not parameters, by their names in the state dict."""
    if is_of_torchao(layer.weight):
        return _leaves(layer.weight, "weight")
    if hasattr(layer, "init_8bit_state"):
        return {"SCB": layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB}
    state = layer.weight.quant_state
    parts = {"weight.absmax": state.absmax, "weight.quant_map": state.code}
    if state.nested:
        parts |= {"weight.nested_absmax": state.state2.absmax, "weight.nested_quant_map": state.state2.code}
    return parts


def _leaves(tensor: Any, name: str) -> dict[str, Tensor]:
    """Return the plain tensors inside of a tensor subclass, by name."""
    found: dict[str, Tensor] = {}
    for part in tensor.__tensor_flatten__()[0]:
        value = getattr(tensor, part)
        found |= _leaves(value, f"{name}.{part}") if is_of_torchao(value) else {f"{name}.{part}": value}
    return found


def _kind(tensor: Tensor) -> str:
    if is_of_torchao(tensor):
        return f"a {type(tensor).__name__}"
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _read_about(about: Tensor, own: Any) -> float | None:
    """Read the JSON in which bitsandbytes stores settings of a quantized weight, and compare it with the layer.

    Returns:
        The offset of the scales; None if the scales are not quantized.

    Raises:
        ValueError: the settings differ from those of the layer, or the JSON is damaged.
    """
    if about.dtype != torch.uint8 or about.numel() > 4 * _ABOUT_BYTES:
        raise ValueError(f"{_kind(about)} is no description of a weight")
    said = parse_object(bytes(about.flatten().tolist()))
    mine = json.loads(json.dumps({name: v for name, v in own.as_dict().items() if not isinstance(v, Tensor)}))
    differ = [name for name in said.keys() | mine.keys() if name != _OFFSET and said.get(name) != mine.get(name)]
    if differ or (_OFFSET in said) != (_OFFSET in mine):
        names = sorted(differ) or [_OFFSET]
        there, here = ({name: each.get(name) for name in names} for each in (said, mine))
        raise ValueError(f"the checkpoint says {there}, and the layer has {here}")
    if _OFFSET not in said:
        return None
    if not isinstance(said[_OFFSET], float | int) or not math.isfinite(said[_OFFSET]):
        raise ValueError(f"the offset {said[_OFFSET]!r} is no number")
    return float(said[_OFFSET])
