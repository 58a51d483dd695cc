"""Write and read the files of `Fabric.save` and `Fabric.load`, in the format of torch.save, as in Lightning."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from instep.accelerator.unwrapping import without_compile
from instep.checkpoint.edge import reading
from instep.checkpoint.foreign.torch_files import read_torch_file
from instep.checkpoint.resume import ResumeReport
from instep.checkpoint.run_state import clean_names, load_model_state
from instep.compat.fabric_wrappers import _FabricModule, unwrapped
from instep.distributed.nested import iter_leaves, map_leaves
from instep.distributed.rank_zero import on_rank_zero
from instep.errors import CheckpointError, CheckpointNotFoundError, UnsavableStateError, UsageError
from instep.strategies import FSDPStrategy, Strategy
from instep.strategies.dtensors import gather_whole
from instep.strategies.gradients import parameters_of
from instep.types import Stateful
from instep.utils.atomic import replacing
from instep.utils.untrusted_files import clean

_PLAIN = (torch.Tensor, nn.Parameter, str, bytes, bool, float, int, type(None), set, torch.device, torch.dtype)


def _plain(module: nn.Module) -> Strategy:
    """Return a single-device strategy, which saves and loads the state of a module that Fabric has not set up."""
    strategy = Strategy()
    strategy.module = module
    return strategy


def save_state(
    fabric: Any, path: Path, state: dict[str, Any], filter: Mapping[str, Callable[[str, Any], bool]]
) -> None:
    """Save a state as a file; all ranks must call this. The arguments are those of `Fabric.save`."""
    if unknown := filter.keys() - state.keys():
        raise ValueError(f"The filter keys {unknown} are not present in the state keys {set(state)}.")
    path = path.expanduser().absolute()
    modules, optimizers, values = _sorted(fabric, state)
    values |= {key: clean_names(strategy.full_model_state()) for key, strategy in modules.items()}
    values |= {key: _optimizer_state(fabric, optimizer, modules) for key, optimizer in optimizers.items()}
    kept = {key: values[key] for key in state}
    for key, wanted in filter.items():
        if isinstance(kept[key], dict):
            kept[key] = {name: value for name, value in kept[key].items() if wanted(name, value)}
    on_rank_zero(lambda: _write(path, kept), f"saving {path}")


def _optimizer_state(fabric: Any, optimizer: Any, modules: Mapping[str, Strategy]) -> dict[str, Any]:
    """Return an optimizer's state dict.

    For a sharded model, it has the names of the parameters in place of their numbers, and only rank 0 gets the values.
    """
    home = _home(fabric, optimizer, modules)
    if home is None or not home.sharded:
        return optimizer.state_dict()
    if not isinstance(home, FSDPStrategy):
        raise UsageError(
            f"fabric.save() cannot save the optimizer, whose state is divided by strategy={home.name!r}: leave it out, "
            "or use instep.Accelerator, whose save_state() can"
        )

    def gather(leaf: Any) -> Any:
        whole = gather_whole(leaf)
        return None if fabric.global_rank else whole.cpu() if torch.is_tensor(whole) else whole

    return map_leaves(gather, home.optimizer_state(optimizer))


def _write(path: Path, state: dict[str, Any]) -> None:
    """Write a file of torch.save; a reader of the path sees either the whole old file or the whole new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as part:
            torch.save(state, part)
            # read the file as `load` does, so that an unreadable file raises now
            torch.load(part, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        raise CheckpointError(f"could not write {path}: {error.strerror or error}", path=path) from error
    except (AttributeError, TypeError, pickle.PicklingError, pickle.UnpicklingError) as error:
        odd = [f"{where} ({type(leaf).__name__})" for where, leaf in iter_leaves(state) if type(leaf) not in _PLAIN]
        such = f", not objects such as {', '.join(odd[:3])}" if odd else ""
        # Torch's message after "This file can still" is dropped, since it explains how to load files unsafely.
        why = str(error).splitlines()[0].partition(" This file can still")[0]
        raise UnsavableStateError(
            f"this state cannot be saved as {path}: {clean(why).rstrip(' .')}. Give tensors, plain values, and objects "
            f"with state_dict and load_state_dict{such}; the file that was there is intact.",
            path=path,
        ) from error


def _sorted(fabric: Any, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split a state into strategies (one for each module), optimizers, and other values, each by key."""
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
    """Return the strategy of the module that has all of an optimizer's parameters; None if no module has them."""
    for strategy in [*modules.values(), *(its for _, its in fabric._models)]:
        own = {id(parameter) for parameter in strategy.parameters()}
        if all(id(parameter) in own for parameter in parameters_of(optimizer)):
            return strategy
    return None


def load_state(fabric: Any, path: Path, state: Any, strict: bool) -> dict[str, Any]:
    """Load a saved state into objects, and return entries that were not loaded; all ranks must call this.

    The arguments are those of `Fabric.load`.
    """
    path, alone = path.expanduser(), isinstance(state, nn.Module | Optimizer)
    saved = _lazy_load(path)
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
    """Read a file of torch.save. If the file has checksums, they are verified, since torch does not check them."""
    path = Path(filename).expanduser()
    if not path.exists():
        raise CheckpointNotFoundError(f"there is no file {path}", path=path)
    with reading(path, "is damaged"):
        if zipfile.is_zipfile(path) and (damaged := zipfile.ZipFile(path).testzip()) is not None:
            raise ValueError(f"the checksum of its record {damaged} does not fit")
    return read_torch_file(path)


def _load_optimizer(fabric: Any, optimizer: Any, modules: Mapping[str, Strategy], value: Any, strict: bool) -> None:
    if "shapes" not in value:  # without shapes, this is an ordinary state dict of torch
        optimizer.load_state_dict(value)
        return
    home = _home(fabric, optimizer, modules)
    if home is None:
        raise UsageError(
            f"the state of {type(optimizer).__name__} was saved by the names of its parameters: set up the model that "
            "has them, or load it beside."
        )
    home.load_optimizer_state(optimizer, value, strict)
