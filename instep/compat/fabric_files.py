"""Files of `Fabric.save` and `Fabric.load`: verified folders, to which the path that the user gave points."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from instep.accelerator.unwrapping import without_compile
from instep.checkpoint import CheckpointStore, Reader, find_checkpoint
from instep.checkpoint.foreign.torch_files import read_torch_file
from instep.checkpoint.resume import ResumeReport
from instep.checkpoint.run_state import RunState, clean_names, load_model_state
from instep.compat.fabric_wrappers import _FabricModule, unwrapped
from instep.distributed.rank_zero import on_rank_zero
from instep.errors import CheckpointError, UsageError
from instep.strategies import Strategy
from instep.strategies.gradients import parameters_of
from instep.types import Stateful


def _plain(module: nn.Module) -> Strategy:
    """Return a strategy for the state of a module that was not set up."""
    strategy = Strategy()
    strategy.module = module
    return strategy


def save_state(
    fabric: Any, path: Path, state: dict[str, Any], filter: Mapping[str, Callable[[str, Any], bool]]
) -> None:
    """Save a state as a folder, and let the path point to it. Collective.

    Weights and optimizers are stored by parameter name, the rest as values.

    Args:
        fabric: whose models these may be.
        path: what points to the folder.
        state: what is saved.
        filter: by key, which entries of a state dict are.
    """
    if unknown := filter.keys() - state.keys():
        raise ValueError(f"The filter keys {unknown} are not present in the state keys {set(state)}.")

    def kept(key: str, tree: Any) -> Any:
        if key not in filter or not isinstance(tree, dict):
            return tree
        return {name: value for name, value in tree.items() if filter[key](name, value)}

    modules, optimizers, values = _sorted(fabric, state)
    values = {key: kept(key, value) for key, value in values.items()}
    trees: list[Any] = []
    places: dict[str, int] = {}
    for key, optimizer in optimizers.items():
        home = _home(fabric, optimizer, modules)
        if key in filter or home is None:
            values[key] = kept(key, optimizer.state_dict())
        else:
            places[key] = len(trees)
            trees.append(home.optimizer_state(optimizer))
    weights: dict[str, Any] | None = None
    for key, strategy in modules.items():
        part = strategy.local_shards(kept(key, dict(strategy.model_state())))
        if part is not None:
            weights = (weights or {}) | clean_names(part, "" if len(modules) == 1 else f"{key}.")
    shared = {"models": list(modules), "optimizers": places, "values": values}
    sharded = any(strategy.sharded for strategy in modules.values())
    own_trees = fabric.strategy.local_shards(trees) if trees else None
    _write(fabric, path.expanduser().absolute(), RunState("fabric", sharded, weights, own_trees, shared, None))


def _write(fabric: Any, path: Path, written: RunState) -> None:
    old = on_rank_zero(lambda: _place(path), f"looking at {path}")
    store = CheckpointStore(path.parent)
    store.clean_stale()
    step = max((optimizer.steps_taken for optimizer in fabric._optimizers), default=0)
    folder = store.save(step, written.write, info={"kind": "fabric"}, name=path.name, line=fabric._line)

    def point() -> None:
        link = path.with_name(f".{path.name}.new")
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        os.replace(link, path)

    on_rank_zero(point, f"pointing {path} to {folder}")
    if old is not None and old.is_dir():
        store.delete(old)


def _place(path: Path) -> Path | None:
    """Return the folder that a path points to, which is deleted after the next save; None without one."""
    if path.is_symlink():
        return path.parent / os.readlink(path)
    if path.is_dir():
        raise CheckpointError(
            f"{path} is a folder that fabric.save did not make. Give another path, or a name within it.", path=path
        )
    return None


def _sorted(fabric: Any, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Part a state into strategies of modules, optimizers, and values."""
    modules: dict[str, Strategy] = {}
    optimizers: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for key, value in state.items():
        module = without_compile(value) if isinstance(value, nn.Module) else None
        if module is not None:
            module = module.module if isinstance(module, _FabricModule) else module
            known = [strategy for one, strategy in fabric._models if one is module]
            modules[key] = known[0] if known else _plain(module)
        elif isinstance(value, Optimizer):
            optimizers[key] = unwrapped(value)
        else:
            values[key] = value.state_dict() if isinstance(value, Stateful) else value
    return modules, optimizers, values


def _home(fabric: Any, optimizer: Any, modules: Mapping[str, Strategy]) -> Strategy | None:
    """Return the strategy of the module that has all of an optimizer's parameters; None where none has."""
    for strategy in [*modules.values(), *(its for _, its in fabric._models)]:
        own = {id(parameter) for parameter in strategy.parameters()}
        if all(id(parameter) in own for parameter in parameters_of(optimizer)):
            return strategy
    return None


def load_state(fabric: Any, path: Path, state: Any, strict: bool) -> dict[str, Any]:
    """Load what was saved into objects, and return the rest. Collective; the arguments are those of `Fabric.load`."""
    path, alone = path.expanduser(), isinstance(state, nn.Module | Optimizer)
    kind = None if not alone else "models" if isinstance(state, nn.Module) else "optimizers"
    saved = read_torch_file(path) if path.is_file() else _read(path, kind)
    if state is None:
        return saved
    wanted: Any = {"": state} if alone else state
    here = {"": saved} if alone else saved
    modules, optimizers, _ = _sorted(fabric, wanted)
    if strict and (missing := [key for key in wanted if key not in here]):
        raise KeyError(f"{path} has no {missing[0]!r}, which is asked for; it has {', '.join(here)}.")
    for key in [key for key in wanted if key in here]:
        value = here.pop(key)
        if key in modules:
            strategy = modules[key]
            load_model_state(strategy.load_model_state, strategy.model_shapes(), value, strict, ResumeReport(path, ()))
        elif key in optimizers:
            _load_optimizer(fabric, optimizers[key], modules, value, strict)
        elif isinstance(wanted[key], Stateful):
            wanted[key].load_state_dict(value)
        else:
            wanted[key] = value
    return here


def _lazy_load(filename: Any) -> Any:
    """Return what `Fabric.save` or `torch.save` wrote."""
    path = Path(filename).expanduser()
    return read_torch_file(path) if path.is_file() else _read(path, None)


def _load_optimizer(fabric: Any, optimizer: Any, modules: Mapping[str, Strategy], value: Any, strict: bool) -> None:
    if "shapes" not in value:  # as torch gives it
        optimizer.load_state_dict(value)
        return
    home = _home(fabric, optimizer, modules)
    if home is None:
        raise UsageError(
            f"the state of {type(optimizer).__name__} was saved by the names of its parameters: set up the model that "
            "has them, or load it beside."
        )
    home.load_optimizer_state(optimizer, value, strict)


def _read(path: Path, alone: str | None) -> Any:
    """Read a folder of `save`, verified: all entries, or its only one of a kind. Collective."""
    found = on_rank_zero(lambda: find_checkpoint(Path(os.path.realpath(path))), f"finding {path}")
    reader: Reader = CheckpointStore(found.parent).open_verified(found)
    if not reader.has("fabric.json"):
        raise CheckpointError(
            f"{path} was not saved by fabric.save(). Load its weights alone by instep.checkpoint.load_weights(path).",
            path=found,
        )
    shared = reader.state("fabric")
    if alone is not None and len(shared[alone]) != 1:
        raise CheckpointError(f"{path} has {len(shared[alone])} {alone}: load them by their names", path=path)
    every, weights = dict(shared["values"]), dict[str, Any]()
    if shared["models"]:
        weights |= reader.weights()
    if reader.has_state("model_extra"):
        weights |= reader.state("model_extra")
    for key in shared["models"]:
        prefix = "" if len(shared["models"]) == 1 else f"{key}."
        every[key] = {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}
    trees = reader.state("optimizer") if shared["optimizers"] else []
    every |= {key: trees[place] for key, place in shared["optimizers"].items()}
    return every if alone is None else every[next(iter(shared[alone]))]
