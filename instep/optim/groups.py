"""Make parameter groups for optimizers: options by the names of parameters, and learning rates by layer.

Names are the ones in `module.named_parameters()`, without the parts that `torch.compile` and other wrappers add.

Example:
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    >>> groups = param_groups(model, {biases_and_norms: {"weight_decay": 0.0}, "2.*": {"lr": 0.01}}, lr=0.1)
    >>> for group in torch.optim.AdamW(groups, weight_decay=0.05).param_groups:
    ...     print(group["name"], group["lr"], group["weight_decay"], len(group["params"]))
    rest 0.1 0.05 1
    biases_and_norms 0.1 0.0 3
    2 0.01 0.05 1
    biases_and_norms+2 0.01 0.0 1
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import Tensor, nn, optim

from instep.errors import SettingError
from instep.utils.checks import is_number, wrong
from instep.utils.optimizer_state import clean_name, names_of

Which: TypeAlias = "str | Callable[[str, Tensor], bool]"
"""Choice of parameters: a pattern for their names, as for files ("*.bias"), or a function of name and parameter."""

__all__ = ["biases_and_norms", "layerwise_lr", "param_groups"]

_LISTED = 5  # maximum number of names in an error text


def biases_and_norms(name: str, parameter: Tensor) -> bool:
    """Return True if a parameter has fewer than two dimensions, as biases and norm weights have.

    Weight decay is usually set to 0 for these parameters.

    Args:
        name: name of the parameter.
        parameter: the parameter, of any shape; DeepSpeed may have divided it over ranks.

    Example:
        >>> import torch
        >>> biases_and_norms("norm.weight", torch.zeros(8)), biases_and_norms("fc.weight", torch.zeros(8, 4))
        (True, False)
    """
    return len(getattr(parameter, "ds_shape", parameter.shape)) < 2


def param_groups(
    module: nn.Module,
    options: Mapping[Which, Mapping[str, Any]] | None = None,
    *,
    frozen: bool = False,
    **defaults: Any,
) -> list[dict[str, Any]]:
    """Sort a module's parameters into groups, each with the options for the names of its parameters.

    Every parameter is in exactly one group. A parameter that matches several entries of `options` gets the options of
    all of them; if two entries have the same option, the later entry counts. The `name` of a group, which
    `LearningRateMonitor` shows, is made from the patterns and function names of the entries that its parameters match.
    An entry's option `"name"` takes the place of its pattern.

    Args:
        module: the module, on any device, sharded or not.
        options: dict of options of the optimizer. A key is a pattern of names, as in
            `{"*.bias": {"weight_decay": 0.0}}`, or a function of name and parameter, such as `biases_and_norms`. A tied
            parameter matches if one of its names does.
        frozen: whether parameters that do not require gradients are included.
        defaults: options of all groups, unless an entry sets the same option; for example `lr=1e-3`.

    Returns:
        The groups, for an optimizer, in the order of their first parameters.

    Raises:
        SettingError: an entry matches no parameter, there is no parameter to optimize, or an entry has an option that
            neither an optimizer of torch.optim nor `defaults` has.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
        >>> groups = param_groups(model, {biases_and_norms: {"weight_decay": 0.0}}, lr=1e-3, weight_decay=0.05)
        >>> [(group["name"], group["weight_decay"], len(group["params"])) for group in groups]
        [('rest', 0.05, 1), ('biases_and_norms', 0.0, 3)]
        >>> optimizer = torch.optim.AdamW(groups)
    """
    return _grouped(_module(module), _rules(options, defaults), frozen, defaults)


def layerwise_lr(
    module: nn.Module,
    layers: str,
    *,
    lr: float,
    decay: float = 0.75,
    options: Mapping[Which, Mapping[str, Any]] | None = None,
    frozen: bool = False,
    **defaults: Any,
) -> list[dict[str, Any]]:
    """Make groups in which each layer has a learning rate that falls from the output to the input.

    Parameters after the layers, such as the head's, get `lr`. With n layers, the last layer gets `lr * decay` and the
    first layer `lr * decay**n`. Parameters before the layers, such as embeddings, get `lr * decay**(n + 1)`. "Before"
    and "after" refer to the order of `named_parameters()`. The groups are called "above", "layer 11" to "layer 0" and
    "below".

    Args:
        module: the module, on any device, sharded or not.
        layers: name of a layer, with one `*` in the place of its number: "encoder.layers.*".
        lr: learning rate of the parameters after the layers.
        decay: the rate of a layer is the rate of the layer after it, multiplied by this factor; above 0, at most 1.
        options: further options by name, as in `param_groups`; an "lr" in them replaces the rate of the layer.
        frozen: as in `param_groups`.
        defaults: as in `param_groups`.

    Returns:
        The groups, for an optimizer, in the order of their first parameters.

    Raises:
        SettingError: no parameter is in a layer that `layers` matches, or an argument is wrong.

    Example:
        >>> import torch
        >>> model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 4),
        ...     "layers": torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2)), "head": torch.nn.Linear(4, 1)})
        >>> [(group["name"], group["lr"]) for group in layerwise_lr(model, "layers.*", lr=0.8, decay=0.5)]
        [('below', 0.1), ('layer 0', 0.2), ('layer 1', 0.4), ('above', 0.8)]

    Source: ULMFiT's discriminative rates, arXiv:1801.06146, in the form of BEiT, arXiv:2106.08254.
    """
    if not is_number(decay) or not 0 < decay <= 1:
        raise wrong("decay", decay, "a factor above 0 to 1")
    if not isinstance(layers, str) or layers.count("*") != 1:
        raise wrong("layers", layers, 'the name of a layer with one * for its number, such as "encoder.layers.*"')
    pattern = re.compile(re.escape(layers).replace(r"\*", r"(\d+)") + r"(?:\.|$)")
    names = list(names_of(_module(module)).values())
    numbers = [int(found[1]) if (found := pattern.match(name)) else None for name in names]
    known = sorted({number for number in numbers if number is not None})
    if not known:
        raise _unmatched("layers", layers, names)
    last = len(numbers) - next(at for at, number in enumerate(reversed(numbers)) if number is not None)
    members: dict[str, set[str]] = {"below": set(), **{f"layer {number}": set() for number in known}, "above": set()}
    here = "below"
    for at, (name, number) in enumerate(zip(names, numbers, strict=True)):
        here = f"layer {number}" if number is not None else here if at < last else "above"
        members[here].add(name)
    depths = zip(members, range(len(members) - 1, -1, -1), strict=True)
    rates = {label: lr * decay**depth for label, depth in depths}
    rules: list[_Rule] = [(label, _among(own), {"lr": rates[label]}) for label, own in members.items() if own]
    rules += _rules(options, defaults)
    return _grouped(module, rules, frozen, defaults)


# ---- rules: the name of a group, a function that chooses its parameters, and their options

_Rule: TypeAlias = "tuple[str, Callable[[str, Tensor], bool], dict[str, Any]]"


def _rules(options: Any, defaults: Mapping[str, Any]) -> list[_Rule]:
    """Check the user's argument `options`, and make a rule from each of its entries."""
    if options is not None and not isinstance(options, Mapping):
        raise wrong("options", options, 'options by pattern, such as {"*.bias": {"weight_decay": 0.0}}')
    rules = []
    for which, given in (options or {}).items():
        if not isinstance(given, Mapping):
            raise wrong("options", options, f'a dict of options for {_label(which)!r}, such as {{"weight_decay": 0.0}}')
        rules.append((_label(which), _matcher(which), dict(given)))
    known = _optimizer_options() if rules else set()
    for label, _, given in rules:
        for option in given:
            if option not in known and option not in defaults:
                near = get_close_matches(str(option), sorted(known | set(defaults)), 1)
                raise SettingError(
                    f"options: {label!r} has the option {option!r}, which no optimizer of torch.optim takes."
                    f"{f' Did you mean {near[0]!r}?' if near else ''} Give an option of another optimizer a default "
                    f"too: {option}=... as an argument.",
                    field="options",
                    got=option,
                )
    return rules


def _optimizer_options() -> set[str]:
    """Return the option names of all torch optimizers, and the keys that schedulers and instep add to groups."""
    kinds = [kind for kind in vars(optim).values() if inspect.isclass(kind) and issubclass(kind, optim.Optimizer)]
    names = {name for kind in kinds for name in inspect.signature(kind).parameters}
    return (names - {"params", "defaults", "args", "kwargs"}) | {"name", "initial_lr", "max_lr", "min_lr"}


def _module(module: Any) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise SettingError(
            f"module is a {type(module).__name__}: expected the nn.Module itself, which knows its parameters' names, "
            "and the options by name after it.",
            field="module",
            got=module,
        )
    return module


def _grouped(
    module: nn.Module, rules: Sequence[_Rule], frozen: bool, defaults: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Make one group of all parameters that match the same rules, with the options of these rules."""
    first = names_of(module)
    aliases: dict[Tensor, list[str]] = {parameter: [name] for parameter, name in first.items()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases[parameter].append(clean_name(name))
    members: dict[tuple[int, ...], list[Tensor]] = {}
    unused = set(range(len(rules)))
    for parameter, names in aliases.items():
        matched = [number for number, rule in enumerate(rules) if any(rule[1](name, parameter) for name in names)]
        unused -= set(matched)
        if frozen or parameter.requires_grad:
            members.setdefault(tuple(matched), []).append(parameter)
    if unused:
        raise _unmatched("options", rules[min(unused)][0], list(first.values()))
    if not members:
        raise SettingError(
            f"{type(module).__name__} has no parameter that requires gradients, so there is nothing to optimize. "
            "Unfreeze some, or take them with frozen=True.",
            field="module",
        )
    groups = []
    for matched, parameters in members.items():
        parts = [rules[number][2].get("name") or _short(rules[number][0], rules) for number in matched]
        group = {"params": parameters, **defaults}
        for number in matched:
            group |= rules[number][2]
        groups.append({**group, "name": "+".join(parts) or "rest"})
    return groups


def _matcher(which: Which) -> Callable[[str, Tensor], bool]:
    if callable(which):
        return which
    if not isinstance(which, str):
        raise wrong("options", which, 'keys that are patterns, such as "*.bias", or functions of name and parameter')
    return lambda name, _: fnmatchcase(name, which)


def _among(names: Collection[str]) -> Callable[[str, Tensor], bool]:
    return lambda name, _: name in names


def _label(which: Any) -> str:
    return which if isinstance(which, str) else getattr(which, "__name__", str(which))


def _short(label: str, rules: Sequence[_Rule]) -> str:
    """Shorten "head.*" to "head", unless another rule has the same short form."""
    short = label.strip("*.") or label
    return short if sum((other.strip("*.") or other) == short for other, *_ in rules) == 1 else label


def _unmatched(field: str, pattern: str, names: Sequence[str]) -> SettingError:
    """Make the error for a pattern that matches no parameter; its text has the most similar names."""
    near = get_close_matches(pattern.strip("*."), names, _LISTED, 0.4) or list(names[:_LISTED])
    return SettingError(
        f"{field}: {pattern!r} matches no parameter. {'Near' if near else 'There is no name'}: "
        f"{', '.join(near)}{', ...' if len(names) > len(near) else ''}. "
        "Patterns are matched against whole names, as of files: '*' stands for anything.",
        field=field,
        got=pattern,
    )
