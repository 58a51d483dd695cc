"""Select submodules (blocks) of a module by class, by size or by a function, for sharding and recomputation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from instep.errors import SettingError, one_of
from instep.utils.checks import is_int, wrong

Policy: TypeAlias = "str | type[nn.Module] | Iterable[str | type[nn.Module]] | int | Callable[[str, nn.Module], bool]"
"""Which submodules to wrap: classes or their names, a minimum number of parameters, or a function (name, module)."""


def check_policy(field: str, policy: Any) -> Any:
    """Check a wrapping policy, and return it with its classes as a tuple.

    Raises:
        SettingError: the value is not a class, a name, a number, a function, a collection of classes, or None.
    """
    if policy is None or is_int(policy, 1):
        return policy and int(policy)
    classes = (policy,) if isinstance(policy, str | type) else policy
    if isinstance(classes, Collection) and classes and all(_is_class(kind) for kind in classes):
        return tuple(classes)
    if callable(policy) and not isinstance(policy, type):
        return policy
    raise wrong(
        field,
        policy,
        "a module class or its name, a list of them, a number of parameters from 1 on, or a function of a module's "
        "name and the module that says True or False",
    )


def _is_class(kind: Any) -> bool:
    return isinstance(kind, str) or (isinstance(kind, type) and issubclass(kind, nn.Module))


def select(field: str, policy: Any, module: nn.Module) -> dict[str, nn.Module]:
    """Return the submodules that a policy selects, by name, outer ones first; the module itself is not included.

    Args:
        field: name of the setting, for error messages.
        policy: result of `check_policy`. None: select the classes that a transformers model lists in
            `_no_split_modules`, or else the blocks of a transformer. Blocks are the items of an `nn.ModuleList`, and
            those items of an `nn.Sequential` that have submodules with weights and whose class occurs at least twice in
            it. Only the outermost containers are used.
        module: module to search.

    Raises:
        SettingError: a class, or the whole policy, matches no submodule.
    """
    inside = {
        name: part for name, part in module.named_modules() if name and type(part).forward is not nn.Module.forward
    }
    if policy is None:
        found = _unsplittable(module, inside) or _blocks(module, inside)
    elif isinstance(policy, int):
        found = _by_size(module, policy, inside)
    elif isinstance(policy, tuple):
        found = _by_class(field, policy, inside)
    else:
        found = {name: part for name, part in inside.items() if policy(name, part)}
    found = {name: part for name, part in found.items() if any(True for _ in part.parameters())}
    if not found and policy is not None:
        raise SettingError(
            f"{field}={policy!r} means no part of {type(module).__name__} that has parameters, so nothing would come "
            "of it. Name a class that is there, a smaller size, or leave it out.",
            field=field,
            got=policy,
        )
    return found


def _by_class(field: str, classes: tuple[Any, ...], inside: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for wanted in classes:
        if isinstance(wanted, str):
            hits = {
                name: part for name, part in inside.items() if wanted in {kind.__name__ for kind in type(part).__mro__}
            }
        else:
            hits = {name: part for name, part in inside.items() if isinstance(part, wanted)}
        if not hits:
            present = {type(part).__name__ for part in inside.values()}
            error = one_of(field, wanted if isinstance(wanted, str) else wanted.__name__, sorted(present))
            raise SettingError(f"no part of the module is of this class: {error}", field=field, got=wanted)
        found |= hits
    return {name: part for name, part in inside.items() if name in found}


def _by_size(module: nn.Module, size: int, inside: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the submodules with at least `size` parameters, not counting parameters in selected inner modules."""
    found: dict[str, nn.Module] = {}

    def visit(part: nn.Module, name: str) -> int:
        left = sum(p.numel() for p in part.parameters(recurse=False))
        left += sum(visit(child, f"{name}.{key}" if name else key) for key, child in part.named_children())
        if left < size or name not in inside:
            return left
        found[name] = part
        return 0

    visit(module, "")
    return {name: part for name, part in inside.items() if name in found}


def _unsplittable(module: nn.Module, inside: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    return {name: part for name, part in inside.items() if type(part).__name__ in names}


def _blocks(module: nn.Module, inside: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    outer: tuple[str, ...] = ()
    names: set[str] = set()
    for name, part in module.named_modules():  # outer modules first
        prefix = f"{name}." if name else ""
        if not name.startswith(outer) and (items := _items(part)):
            outer += (prefix,)
            names |= {f"{prefix}{item}" for item in items}
    return {name: part for name, part in inside.items() if name in names}


def _items(container: nn.Module) -> list[str]:
    """Return the names of a container's items that may be blocks."""
    items = list(container.named_children())
    if isinstance(container, nn.ModuleList):
        return [name for name, _ in items]
    if not isinstance(container, nn.Sequential):
        return []
    kinds = Counter(type(part) for _, part in items)
    return [
        name
        for name, part in items
        if kinds[type(part)] > 1 and any(True for child in part.children() for _ in child.parameters())
    ]


def units_of(module: nn.Module, policy: Any, strategy: str) -> dict[str, nn.Module]:
    """Return the submodules that FSDP shards and gathers separately, by name.

    Args:
        module: the whole module.
        policy: result of `check_policy` for the argument `wrap`.
        strategy: name of the strategy, for error messages.

    Raises:
        SettingError: the policy selects nothing, or would separate tied weights; or a module with manual optimization
            has weights outside of submodules.
    """
    units = select("wrap", policy, module)
    if is_manual(module):
        # In manual optimization, the backward runs within the step, but FSDP puts its backward hooks on the outputs of
        # a sharded module's call. So the children that the step calls are sharded, and not the module itself.
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own:
            raise SettingError(
                f"{type(module).__name__} optimizes manually and has weights of its own ({', '.join(own)}), which "
                "no forward gathers. Put them into a submodule that the step calls.",
                field="strategy",
                got=strategy,
            )
        units |= _called_parts(module)
    kept, shared = untie(module, units)
    chosen = isinstance(policy, tuple) or callable(policy) or is_manual(module)
    if len(kept) < len(units) and chosen:
        raise SettingError(
            f"wrap={policy!r} would shard {', '.join(sorted(units.keys() - kept.keys()))} apart from what shares its "
            f"weights ({', '.join(shared)}), and they would be tied no more. Wrap other parts: weights that are tied "
            "have to be in the same one.",
            field="wrap",
            got=policy,
        )
    return kept


def is_manual(module: nn.Module) -> bool:
    """Return True if a module uses manual optimization."""
    return not getattr(module, "automatic_optimization", True)


def _called_parts(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Return the children of a module by name, where a container without a forward is replaced by its items."""
    parts: dict[str, nn.Module] = {}
    for key, child in module.named_children():
        if type(child).forward is nn.Module.forward:
            parts |= _called_parts(child, f"{prefix}{key}.")
        elif any(True for _ in child.parameters()):
            parts[f"{prefix}{key}"] = child
    return parts


def recomputed_of(module: nn.Module, policy: Any, units: Mapping[str, nn.Module]) -> set[nn.Module]:
    """Return the submodules whose activations are recomputed in the backward.

    Args:
        module: the whole module.
        policy: result of `check_policy` for `activation_checkpointing`. True: all of `units`. False: none.
        units: result of `units_of`.

    Raises:
        SettingError: the policy selects nothing.
    """
    if policy is not True:
        return set(select("activation_checkpointing", policy, module).values()) if policy else set()
    if not units:
        raise SettingError(
            f"activation_checkpointing=True means the parts of wrap, and {type(module).__name__} has none. Name "
            "the classes whose activations are to be computed again.",
            field="activation_checkpointing",
            got=True,
        )
    return set(units.values())


def untie(module: nn.Module, units: Mapping[str, nn.Module]) -> tuple[dict[str, nn.Module], list[str]]:
    """Return the units that share no parameter with other parts of the module, and the names of shared parameters.

    Sharding a unit replaces its parameters, and would replace a tied parameter in this unit only.
    """
    left, shared = dict(units), []
    while True:
        owners: dict[Tensor, set[str]] = {}
        names: dict[Tensor, str] = {}
        for name, part in module.named_modules(remove_duplicate=False):
            for key, parameter in part.named_parameters(recurse=False):
                owners.setdefault(parameter, set()).add(_unit_of(name, left))
                names.setdefault(parameter, f"{name}.{key}" if name else key)
        apart = {parameter: homes for parameter, homes in owners.items() if len(homes) > 1}
        if not apart:
            return left, shared
        shared += [names[parameter] for parameter in apart]
        for homes in apart.values():
            for home in homes:
                left.pop(home, None)


def _unit_of(name: str, units: Mapping[str, nn.Module]) -> str:
    while name and name not in units:
        name = name.rpartition(".")[0]
    return name
