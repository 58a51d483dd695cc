"""Save and load an optimizer's state by parameter names, not by position.

torch numbers parameters in the order in which the optimizer got them: if two layers are swapped in the code, they would
silently swap their momenta. Here every entry has the canonical name of its parameter: the name in the module, without
the parts that wrappers add. A tied parameter has the first of its names. A checkpoint stores this tree:

    {"optimizer": "AdamW",
     "shapes": {"fc.weight": [10, 64], ...},
     "dtypes": {"fc.weight": torch.float32, ...},
     "state":  {"fc.weight": {"step": tensor, "exp_avg": tensor, ...}, ...},
     "groups": [{"params": ["fc.weight", ...], "lr": 0.001, ...}, ...]}
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from instep.errors import CheckpointError

_MOMENTS = {
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "exp_inf",
}  # fmt: skip
# For each optimizer of torch: the entries that its step needs in a parameter's state, if the state is not empty.
_LOOKED_UP = {
    "Adadelta": {"step", "square_avg", "acc_delta"},
    "Adagrad": {"step", "sum"},
    "Adam": {"step", "exp_avg", "exp_avg_sq"},
    "AdamW": {"step", "exp_avg", "exp_avg_sq"},
    "Adamax": {"step", "exp_avg", "exp_inf"},
    "ASGD": {"step", "eta", "mu", "ax"},
    "NAdam": {"step", "mu_product", "exp_avg", "exp_avg_sq"},
    "RAdam": {"step", "exp_avg", "exp_avg_sq"},
    "RMSprop": {"step", "square_avg"},
    "Rprop": {"step", "prev", "step_size"},
    "SparseAdam": {"step", "exp_avg", "exp_avg_sq"},
}
# For each optimizer of torch: entries that its step needs only if the parameter group has an option switched on.
_WITH_OPTION = {
    "Adam": {"amsgrad": "max_exp_avg_sq"},
    "AdamW": {"amsgrad": "max_exp_avg_sq"},
    "RMSprop": {"centered": "grad_avg", "momentum": "momentum_buffer"},
}
_FLOAT_BITS = 1024  # a larger integer cannot be converted to a float
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def clean_name(name: str, *, ddp: bool = False) -> str:
    """Return the name of a parameter or buffer without the parts that wrappers add, such as `_orig_mod.`.

    Args:
        name: name from `named_parameters()` or `state_dict()`.
        ddp: whether to remove the leading `module.` of DistributedDataParallel too. False by default, since an
            attribute of the user may be called `module`.

    Example:
        >>> clean_name("encoder._orig_mod.0._checkpoint_wrapped_module.weight")
        'encoder.0.weight'
    """
    if ddp:
        name = name.removeprefix("module.")
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def names_of(module: nn.Module, optimizers: Iterable[Optimizer] = ()) -> dict[Tensor, str]:
    """Return the canonical name (without wrappers) of every parameter of a module and of optimizers.

    Args:
        module: the module, with or without wrappers.
        optimizers: optimizers; their parameters that the module does not have get the name `(group,index)`.

    Returns:
        A dict from parameters to names. A tied parameter has the first of its names.
    """
    inner: nn.Module | None = module
    while inner is not None:  # a loop, since a compiled DDP module has two wrappers
        module = inner
        key = "module" if isinstance(module, DataParallel | DistributedDataParallel) else "_orig_mod"
        inner = module._modules.get(key)
    names: dict[Tensor, str] = {parameter: clean_name(name) for name, parameter in module.named_parameters()}
    for optimizer in optimizers:
        for group, options in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(options["params"]):
                names.setdefault(parameter, f"({group},{index})")
    return names


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state as a tree with canonical parameter names.

    Args:
        module: module with the optimizer's parameters.
        optimizer: any torch optimizer.

    Returns:
        The tree in this module's docstring. Its tensors are those of the optimizer, not copies.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> tree = optimizer_state(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> tree["groups"][0]["params"]
        ['weight', 'bias']
    """
    names = names_of(module, [optimizer])
    packed = optimizer.state_dict()
    by_index = {
        index: names[parameter]
        for options, saved in zip(optimizer.param_groups, packed["param_groups"], strict=True)
        for parameter, index in zip(options["params"], saved["params"], strict=True)
    }
    tree: dict[str, Any] = {
        "optimizer": type(optimizer).__name__,
        "shapes": _shapes(optimizer, names),
        "dtypes": {names[p]: p.dtype for options in optimizer.param_groups for p in options["params"]},
        "state": {by_index[key]: value for key, value in packed["state"].items() if key in by_index},
        "groups": [{**group, "params": [by_index[i] for i in group["params"]]} for group in packed["param_groups"]],
    }
    common = {key: value for key, value in packed["state"].items() if key not in by_index}
    if common:  # state of the optimizer that belongs to no single parameter
        tree["common"] = common
    return tree


def load_optimizer_state(
    module: nn.Module, optimizer: Optimizer, tree: Mapping[str, Any], strict: bool = True
) -> list[str]:
    """Load a result of `optimizer_state`, matched by parameter names.

    The order of parameters and of groups may differ from that of the save, but each group must have the same
    parameters. State keeps the dtype in which it was saved, with one exception: state that had the dtype of its
    parameter gets the parameter's current dtype.

    Args:
        module: module with the optimizer's parameters.
        optimizer: a new optimizer of the same parameters.
        tree: the saved state; its tensors are used without copying.
        strict: whether everything must fit. False: load what fits. Each group then gets the settings of the saved group
            that had its parameters. If none of its parameters was saved, or they were saved in several groups, the
            group keeps its own settings.

    Returns:
        Messages about what was not loaded; empty if `strict`.

    Raises:
        CheckpointError: the state is of another class of optimizer, parameters are missing or unexpected, or shapes or
            groups differ. In this case nothing was changed.
    """
    names = names_of(module, [optimizer])
    packed = optimizer.state_dict()["param_groups"]
    wanted = [
        {**own, "params": [names[parameter] for parameter in options["params"]]}
        for options, own in zip(optimizer.param_groups, packed, strict=True)
    ]
    kind = type(optimizer).__name__
    tree, settings, left_out = match_state(kind, _shapes(optimizer, names), wanted, tree, strict)
    groups = [{**saved, "params": own["params"]} for saved, own in zip(settings, packed, strict=True)]
    state: dict[Any, Any] = dict(tree.get("common", {}))
    by_index: dict[int, tuple[Tensor, str]] = {}
    for options, own, group in zip(optimizer.param_groups, packed, wanted, strict=True):
        by_index.update(zip(own["params"], zip(options["params"], group["params"], strict=True), strict=True))
    state.update({index: tree["state"][name] for index, (_, name) in by_index.items() if name in tree["state"]})
    if type(optimizer).__module__.partition(".")[0] == "torch":
        options_of = {name: saved for saved, group in zip(settings, wanted, strict=True) for name in group["params"]}
        _check_complete(kind, tree["state"], options_of)
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, name in by_index.values():
        then = tree.get("dtypes", {}).get(name, parameter.dtype)
        follows = then if then != parameter.dtype else None
        _keep_exact(optimizer.state.get(parameter, {}), tree["state"].get(name, {}), follows)
    return left_out


def match_state(
    kind: str,
    shapes: Mapping[str, list[int]],
    groups: list[dict[str, Any]],
    tree: Mapping[str, Any],
    strict: bool = True,
) -> tuple[Mapping[str, Any], list[dict[str, Any]], list[str]]:
    """Match a saved state tree to an optimizer, which is described by its parameters' shapes and its groups.

    Args:
        kind: name of the optimizer's class in checkpoints.
        shapes: shapes of the optimizer's parameters by name.
        groups: settings of the optimizer's groups, with parameter names under `params`.
        tree: result of `optimizer_state`.
        strict: whether the whole tree must fit; False: use what fits.

    Returns:
        The tree, or the part of it that fits; the settings to load for each group, in order; and messages about what
        does not fit.

    Raises:
        CheckpointError: the tree does not fit; see `load_optimizer_state`.
    """
    left_out: list[str] = []
    settings: list[dict[str, Any]] = []
    check_tree(tree)
    if strict:
        _check(kind, shapes, len(groups), tree)
    else:
        tree, left_out = _fitting(kind, shapes, tree)
    for own in groups:
        if strict:
            settings.append(_group_of(own["params"], len(settings), tree["groups"]))
            continue
        home = _home_of(own["params"], tree["groups"])
        if tree["groups"] and not home:
            left_out.append(f"the settings of parameter group {len(settings)}")
        settings.append({**own, **home})
    for own, taken in zip(groups, settings, strict=True):
        check_alike(own, taken)
    return tree, settings, left_out


def check_trees(trees: Any) -> None:
    """Raise an error if a value is not a list of valid state trees; the errors are those of `check_tree`."""
    if not isinstance(trees, list):
        raise TypeError(f"a {type(trees).__name__}, where a list of states is expected")
    for tree in trees:
        check_tree(tree)


def check_tree(tree: Mapping[str, Any]) -> None:
    """Raise an error if a value is not a valid state tree.

    torch itself would load the value, and then fail in the next step.

    Raises:
        TypeError: a value in the tree has a wrong type; the message names the value.
        KeyError: a value is missing.
    """
    shapes, state, groups = tree["shapes"], tree["state"], tree["groups"]
    if not (isinstance(tree["optimizer"], str) and isinstance(shapes, dict) and isinstance(groups, list)):
        raise TypeError("it is not the state of an optimizer")
    for name, values in state.items():
        if not isinstance(values, dict):
            raise TypeError(f"the state of {name} is a {type(values).__name__}, where a dict is expected")
        step = values.get("step", 0)
        if isinstance(step, bool) or not (
            isinstance(step, int | float) or math.prod(getattr(step, "shape", (2,))) == 1
        ):
            raise TypeError(f"the step of {name} is no number")
        for key in _MOMENTS.intersection(values):
            if values[key] is not None and not hasattr(values[key], "shape"):
                raise TypeError(f"{key} of {name} is a {type(values[key]).__name__}, where a tensor is expected")
    for group in groups:
        if not all(isinstance(name, str) for name in group["params"]):
            raise TypeError("a group's parameters have no names")


def _check_complete(
    kind: str, state: Mapping[str, Mapping[str, Any]], options_of: Mapping[str, Mapping[str, Any]]
) -> None:
    for name, values in state.items():
        more = _WITH_OPTION.get(kind, {}).items()
        looked_up = {key for option, key in more if options_of.get(name, {}).get(option)}
        lacking = (_LOOKED_UP.get(kind, set()) | looked_up).difference(values)
        if values and lacking:
            raise TypeError(f"the state of {name} lacks {', '.join(sorted(lacking))}")


def _shapes(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, list[int]]:
    return {names[p]: list(p.shape) for options in optimizer.param_groups for p in options["params"]}


def _keep_exact(loaded: dict[Any, Any], saved: Mapping[Any, Any], follows: torch.dtype | None) -> None:
    # torch's load_state_dict casts state to the parameter's dtype (such as a float32 moment of a bfloat16 weight), and
    # splits strings into characters. So such values are set again here, without a change.
    for key, value in saved.items():
        if isinstance(value, str):
            loaded[key] = value
        elif not isinstance(value, Tensor) or not isinstance(loaded.get(key), Tensor) or value.dtype == follows:
            continue
        elif loaded[key].dtype != value.dtype:
            loaded[key] = value.to(loaded[key].device)


def _fitting(
    kind: str, shapes: Mapping[str, list[int]], tree: Mapping[str, Any]
) -> tuple[Mapping[str, Any], list[str]]:
    """Return the part of a tree that fits an optimizer, and messages about the parts that do not fit."""
    saved = tree["shapes"]
    if tree["optimizer"] != kind:
        return {"state": {}, "groups": []}, [f"the state of {tree['optimizer']}, since this run has {kind}"]
    fits = {name for name, shape in shapes.items() if name in saved and list(saved[name]) == shape}
    left_out = [f"the state of {name!r}" for name in saved if name not in fits]
    state = {name: value for name, value in tree["state"].items() if name in fits}
    return {**tree, "state": state}, left_out


def _home_of(names: list[str], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of the saved group that has any of these parameters; {} if that is not exactly one group."""
    homes = [group for group in groups if not set(names).isdisjoint(group["params"])]
    return {key: value for key, value in homes[0].items() if key != "params"} if len(homes) == 1 else {}


def _group_of(names: list[str], position: int, groups: list[dict[str, Any]]) -> dict[str, Any]:
    wanted = set(names)
    # Begin with the saved group at the same position, since several groups may have no parameters at all.
    for group in [groups[position], *groups]:
        if set(group["params"]) == wanted:
            return group
    here: set[str] = next((set(group["params"]) for group in groups if wanted & set(group["params"])), set())
    moved = sorted(wanted ^ here)
    raise CheckpointError(
        f"The optimizer's parameter groups differ from the saved ones: {_few(moved)} left or joined the group of "
        f"{next(iter(names), 'none')!r}. Build the groups as they were, or resume from the weights alone."
    )


def _check(kind: str, shapes: Mapping[str, list[int]], groups: int, tree: Mapping[str, Any]) -> None:
    if tree["optimizer"] != kind:
        raise CheckpointError(
            f"The checkpoint holds the state of {tree['optimizer']}, but this run's optimizer is {kind}. "
            "Use the same optimizer, or resume from the weights alone."
        )
    saved = tree["shapes"]
    missing = [name for name in shapes if name not in saved]
    unexpected = [name for name in saved if name not in shapes]
    problems = []
    if missing:
        problems.append(f"missing in the checkpoint: {_few(missing)}")
    if unexpected:
        problems.append(f"in the checkpoint but not in the optimizer: {_few(unexpected)}")
    problems += [
        f"shape of {name!r}: {list(saved[name])} saved, {shape} now"
        for name, shape in shapes.items()
        if name in saved and list(saved[name]) != shape
    ]
    if not problems and len(tree["groups"]) != groups:
        problems.append(f"{len(tree['groups'])} parameter groups saved, {groups} now")
    if problems:
        raise CheckpointError(
            f"The saved state of {kind} does not fit its parameters. {'; '.join(problems[:5])}. "
            "Use the module and the optimizer of that run, or resume from the weights alone."
        )


def _few(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def check_alike(own: Mapping[str, Any], saved: Mapping[str, Any], owner: type | None = None) -> None:
    """Raise an error if saved settings have other types than an object's current settings.

    Args:
        own: current settings of the object.
        saved: saved settings; they may have more or fewer entries.
        owner: the object's class, if the settings are the object's attributes. A saved setting that is not in `own`
            must not have the name of a method or property of this class.

    Raises:
        TypeError: a saved setting has a different type, or the name of a method or property of `owner`; the message
            names the setting.
    """
    for key, value in saved.items():
        taken = None if key in own else inspect.getattr_static(owner, str(key), None)
        if not isinstance(key, str) or callable(taken) or isinstance(taken, property | staticmethod | classmethod):
            raise TypeError(f"{key!r} is no setting that can be taken up")
        if key in own and not _alike(own[key], value):
            raise TypeError(f"{key} is {str(value)[:80]!r}, where a {type(own[key]).__name__} is expected")


def _alike(own: Any, saved: Any) -> bool:
    if own is None or saved is None:
        return True
    if isinstance(own, bool) or isinstance(saved, bool):
        return isinstance(own, bool | int) and isinstance(saved, bool | int)
    if isinstance(own, int | float | Tensor):
        if isinstance(saved, int):
            return saved.bit_length() < _FLOAT_BITS
        return isinstance(saved, float) or (isinstance(saved, Tensor) and saved.numel() == 1)
    if isinstance(own, list | tuple):
        return isinstance(saved, list | tuple) and all(any(_alike(one, other) for one in own) for other in saved if own)
    if isinstance(own, dict):
        return isinstance(saved, dict)
    return isinstance(saved, type(own))


def whole(value: Any) -> Any:
    """Read a stored tensor; return any other value unchanged."""
    return value.read() if hasattr(value, "read") and not isinstance(value, Tensor) else value
