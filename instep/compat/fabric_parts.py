"""`Fabric`: Lightning Fabric's class for handwritten loops, over instep's strategies."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from instep.accelerator.unwrapping import compiled_as, without_compile
from instep.compat.fabric import command
from instep.compat.fabric_files import load_state, save_state
from instep.compat.fabric_names import (
    ACCELERATORS,
    SEED_VARIABLE,
    Accelerator,
    FSDPStrategy,
    Precision,
    convert_tensors_to_scalars,
    seed_everything,
)
from instep.compat.fabric_wrappers import (
    _FabricDataLoader,
    _FabricModule,
    _FabricOptimizer,
    in_backward,
    is_wrapped,
    unwrapped,
)
from instep.distributed import all_reduce_, broadcast_object, gather, send_to_device
from instep.distributed.nested import map_leaves
from instep.errors import UsageError
from instep.launchers.notebook import notebook_launcher
from instep.state import PartialState, find_device_kind, read_environment
from instep.strategies import Strategy, resolve_strategy
from instep.strategies.gradients import parameters_of
from instep.trainer.devices import connect, count_devices
from instep.trainer.devices import launch as run_again
from instep.trainer.settings import resolve
from instep.utils import porting
from instep.utils.warn import warn_user


def _nothing(fabric: Any) -> None:
    """Do nothing; `Fabric.launch()` without a function runs this."""


class Fabric:
    """A handwritten loop over instep's strategies, with the methods of Lightning's Fabric.

    Args:
        accelerator: kind of device: "auto", "cpu", "gpu", "cuda", "mps", "tpu".
        strategy: a name or an instep Strategy.
        devices: number of processes on this machine.
        num_nodes: number of machines.
        precision: a name, such as "bf16-mixed".
        plugins: must be empty, since instep has no plug-ins.
        callbacks: objects whose methods `Fabric.call` calls.
        loggers: loggers of instep, or objects with `log_metrics`.
    """

    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Any = None,
    ) -> None:
        if plugins:
            raise UsageError(
                "Fabric(plugins=...) has no counterpart in instep, which finds the launcher and writes checkpoints "
                "itself; give a precision by its name: Fabric(precision='bf16-true')"
            )
        names = {field: values for (owner, field), values in porting.VALUES.items() if owner == "Trainer"}
        given = {"accelerator": accelerator, "strategy": strategy, "precision": precision}
        given = {key: names[key].get(value, value) if isinstance(value, str) else value for key, value in given.items()}
        if isinstance(accelerator, Accelerator):
            given["accelerator"] = accelerator.kind
        self._settings = resolve(devices=devices, num_nodes=num_nodes, **given)
        self._environment = read_environment()
        self._count = count_devices(self._settings, self._environment)
        self._callbacks, self._loggers = _listed(callbacks), _listed(loggers)
        self._models: list[tuple[nn.Module, Strategy]] = []
        self._strategy: Any = resolve_strategy(
            FSDPStrategy() if self._settings.strategy == "fsdp" else self._settings.strategy,
            self._count * num_nodes,
            find_device_kind(self._settings.accelerator).name,
        )
        self._forks = strategy in ("ddp_spawn", "ddp_fork", "ddp_notebook")
        self._launched = False
        if self._count * num_nodes == 1 or self._environment.launcher != "none":
            self._connect()
        if type(self).run is not Fabric.run:
            vars(self)["run"] = partial(self._run_launched, self.run)

    def _connect(self) -> None:
        process = connect(self._settings)
        self._strategy.connect(process.device, Precision(self._settings.precision, process.device))
        self._launched = True

    def _check_launched(self) -> None:
        if not self._launched:
            raise RuntimeError("To use Fabric with more than one device, you must call `.launch()` first.")

    # ---- this process and its device

    strategy = property(lambda self: self._strategy, doc="The strategy.")
    device = property(lambda self: self._strategy.device, doc="Device of this process.")
    accelerator = property(lambda self: ACCELERATORS[self.device.type](), doc="Kind of device.")
    loggers = property(lambda self: self._loggers, doc="The loggers.")
    logger = property(lambda self: self._loggers[0], doc="The first logger.")

    @property
    def _process(self) -> PartialState:
        self._check_launched()
        return PartialState()

    global_rank = property(lambda self: self._environment.rank, doc="Rank of this process.")
    local_rank = property(lambda self: self._environment.local_rank, doc="Its rank on this machine.")
    node_rank = property(lambda self: self._environment.node_rank, doc="Number of this machine.")
    world_size = property(lambda self: self._count * self._settings.num_nodes, doc="Number of processes.")
    is_global_zero = property(lambda self: self.global_rank == 0, doc="Whether this is rank 0.")

    def launch(self, function: Callable[..., Any] = _nothing, *args: Any, **kwargs: Any) -> Any:
        """Start the ranks if no launcher has started them, by running this program again; then call a function.

        With "ddp_spawn", "ddp_fork" or "ddp_notebook" the ranks are forks of this process, which run the function.

        Raises:
            TypeError: `function` cannot be called, takes no argument, or is missing though forks need it.
        """
        if not callable(function):
            raise TypeError(f"`Fabric.launch(...)` needs to be a callable, but got {function}: leave out its ()")
        if not inspect.signature(function).parameters:
            raise TypeError(f"`Fabric.launch({function})` needs to take at least one argument, the `Fabric` object.")
        if self._launched:
            return function(self, *args, **kwargs)
        if not self._forks:
            run_again(self._settings, self._count, command())
        if function is _nothing:
            raise TypeError("To fork processes, `Fabric.launch()` needs to be called with the function that they run.")
        return notebook_launcher(self._run_forked, (function, args, kwargs), self._count)[0]

    def _run_forked(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._environment = read_environment()
        self._connect()
        return function(self, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program on all ranks; a subclass of Fabric overrides this."""

    def _run_launched(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.launch()
        return run(*args, **kwargs)

    # ---- setting up modules, optimizers and loaders

    def setup(
        self, module: nn.Module, *optimizers: Optimizer, scheduler: Any = None, move_to_device: bool = True
    ) -> Any:
        """Distribute a module by the strategy, and wrap its optimizers; return the wrapped objects."""
        self._check_launched()
        _check_new("setup", "A model", [module], nn.Module)
        if optimizers:
            _check_new("setup", "An optimizer", optimizers)
        wrapped = self._spread(module, optimizers, move_to_device)
        stepped = [self._step_through(optimizer) for optimizer in optimizers]
        self.call("on_after_setup", fabric=self, module=wrapped)
        if not optimizers:
            return wrapped
        return (wrapped, *stepped) if scheduler is None else (wrapped, *stepped, scheduler)

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> _FabricModule:
        """Distribute a module by the strategy, and return the wrapped module."""
        self._check_launched()
        _check_new("setup_module", "A model", [module], nn.Module)
        return self._spread(module, (), move_to_device)

    def _spread(self, module: Any, optimizers: Any, moves: bool) -> _FabricModule:
        given, module = module, without_compile(module)
        strategy = copy.deepcopy(self._strategy)
        strategy.connect(self.device, self._strategy.precision)
        self._models = [(known, its) for known, its in self._models if known is not module]
        if moves:
            strategy.prepare_module(module)
        else:
            strategy.module = module
            strategy.precision.convert_module(module)
        for optimizer in optimizers:
            strategy.rebind_optimizer(optimizer)
        forward = strategy.wrap(module, optimizers) if strategy.wraps_with_optimizer else strategy.wrap(module)
        if strategy.wraps_with_optimizer:
            self._strategy = strategy  # steps, loss scaling and clipping now use the strategy of this module
        if given is not module:
            known: Any = given
            forward = compiled_as(given, module) if forward is module else type(known)(forward, known.dynamo_ctx)
        self._models.append((module, strategy))
        return _FabricModule(forward, strategy, module)

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Return optimizers that step through the strategy."""
        self._check_launched()
        _check_new("setup_optimizers", "An optimizer", optimizers)
        if self._strategy.wraps_with_optimizer:
            raise RuntimeError(
                f"strategy={self._strategy.name!r} requires the model and optimizer(s) to be set up jointly through "
                "`.setup(model, optimizer, ...)`."
            )
        for optimizer in optimizers:
            for _, strategy in self._models:
                strategy.rebind_optimizer(optimizer)
        stepped = tuple(self._step_through(optimizer) for optimizer in optimizers)
        return stepped[0] if len(stepped) == 1 else stepped

    def _step_through(self, optimizer: Optimizer) -> _FabricOptimizer:
        self._strategy.separate_random_streams(torch.initial_seed() & (2**63 - 1))
        return _FabricOptimizer(optimizer, self._strategy, self.call)

    def setup_dataloaders(
        self, *dataloaders: DataLoader[Any], use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Return loaders that give each rank its part of the data, on its device."""
        self._check_launched()
        _check_new("setup_dataloaders", "A dataloader", dataloaders, DataLoader)
        device = self.device if move_to_device else None
        found = [
            _FabricDataLoader(self._shared(one) if use_distributed_sampler else one, device) for one in dataloaders
        ]
        return found[0] if len(found) == 1 else found

    def _shared(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader of this rank's part of the data, with torch's DistributedSampler."""
        parts, part = self._strategy.data_world_size, self._strategy.data_rank
        batches: Any = loader.batch_sampler
        sampler = getattr(batches, "sampler", loader.sampler)
        streams = isinstance(loader.dataset, torch.utils.data.IterableDataset)
        if parts == 1 or streams or isinstance(sampler, DistributedSampler):
            return loader
        if not isinstance(sampler, RandomSampler | SequentialSampler):
            raise TypeError(
                f"You seem to have configured a sampler in your DataLoader ({type(sampler).__name__}), which a "
                "DistributedSampler would replace. Give each rank its part yourself, and set the loader up by "
                "`setup_dataloaders(..., use_distributed_sampler=False)`."
            )
        seed, shuffles = int(os.environ.get(SEED_VARIABLE, "0")), isinstance(sampler, RandomSampler)
        other, mine = copy.copy(loader), DistributedSampler(loader.dataset, parts, part, shuffle=shuffles, seed=seed)
        vars(other).update(sampler=mine, _iterator=None)
        if batches is not None:
            vars(other)["batch_sampler"] = batches = copy.copy(batches)
            batches.sampler = mine
        return other

    # ---- the training step

    def backward(self, tensor: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        """Run the backward pass; the loss is scaled if the precision needs it."""
        in_backward.append(True)
        try:
            (self._strategy if model is None else model._strategy).backward(tensor, *args, **kwargs)
        finally:
            in_backward.pop()

    def clip_gradients(
        self,
        module: Any,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip gradients by value or by norm; return the norm before clipping.

        Raises:
            ValueError: both or none of `clip_val` and `max_norm` are given.
            RuntimeError: the norm is not finite, `error_if_nonfinite` is set, and no gradient scaler skips such steps.
        """
        if (clip_val is None) == (max_norm is None):
            raise ValueError("Either `clip_val` or `max_norm` should be set, and only one of them.")
        gradients, optimizer = self._strategy.gradients, unwrapped(optimizer)
        gradients.unscale(optimizer)
        parameters = parameters_of(optimizer)
        if clip_val is not None:
            return gradients.clip(parameters, clip_val, "value")
        norm = gradients.clip(parameters, max_norm, norm_type=float(norm_type))
        scales = self._strategy.precision.scaler is not None
        if error_if_nonfinite and not scales and norm is not None and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped."
            )
        return norm

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of the precision."""
        return self._strategy.precision.forward_context()

    def no_backward_sync(self, module: Any, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context for a micro-batch whose gradients are not reduced over ranks yet."""
        module = without_compile(module)
        if not isinstance(module, _FabricModule):
            raise TypeError(
                "You need to set up the model first before you can call `fabric.no_backward_sync()`: "
                f"`model, optimizer = fabric.setup(model, optimizer)`. This is a {type(module).__name__}."
            )
        return module._strategy.no_sync() if enabled else nullcontext()

    # ---- methods that all ranks call

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each machine."""
        self._process.print(*args, **kwargs)

    def to_device(self, obj: Any) -> Any:
        """Move a module, or nested tensors, to the device."""
        return obj.to(self.device) if isinstance(obj, nn.Module) else send_to_device(obj, self.device)

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks have called this."""
        self._process.wait_for_everyone(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send one rank's object to all ranks."""
        self._check_launched()
        return broadcast_object(obj, src)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack each rank's tensors along a new first dimension; with one process add no dimension."""
        self._check_launched()
        data = self._tensors("all_gather", data, group)
        if self.world_size == 1:
            return data
        together = _gather_with_graph if sync_grads else lambda leaf: gather(leaf[None])
        return map_leaves(lambda leaf: together(leaf) if torch.is_tensor(leaf) else leaf, data)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Combine the tensors of all ranks, in place."""
        self._check_launched()
        name = str(reduce_op).rpartition(".")[2].lower().replace("avg", "mean")
        data = self._tensors("all_reduce", data, group)
        return map_leaves(lambda leaf: all_reduce_(leaf, name) if torch.is_tensor(leaf) else leaf, data)

    def _tensors(self, method: str, data: Any, group: Any) -> Any:
        """Convert numbers to tensors, and move all tensors to the device."""
        if group is not None:
            raise UsageError(f"fabric.{method}(group=...) has no counterpart in instep: use torch.distributed")
        data = map_leaves(lambda leaf: torch.tensor(leaf) if isinstance(leaf, bool | int | float) else leaf, data)
        return send_to_device(data, self.device)

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Return a context whose block runs first on the first rank, and then on the other ranks."""
        return self._process.local_main_process_first() if local else self._process.main_process_first()

    # ---- large models

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make a module's weights on the device, in the precision's dtype; `empty_init` leaves them uninitialized."""
        self._check_launched()
        spread = empty_init is not False and self._strategy.sharded
        skipping = _SkipInit() if empty_init and not spread else nullcontext()
        with self.init_tensor(), skipping, self._strategy.model_context() if spread else nullcontext():
            yield

    @contextmanager
    def init_tensor(self) -> Iterator[None]:
        """Make tensors on the device, in the precision's dtype."""
        precision = self._strategy.precision
        with torch.device(self.device), nullcontext() if precision.dtype is None else precision.forward_context():
            yield

    # ---- saving and loading

    def save(
        self, path: Any, state: dict[str, Any], filter: dict[str, Callable[[str, Any], bool]] | None = None
    ) -> None:
        """Save a state as a file of torch.save; replace an older file. All ranks must call this.

        Raises:
            ValueError: `filter` has a key that the state does not have.
            UnsavableStateError: an entry contains more than tensors and plain values. Of an entry with a state dict,
                only the state dict is saved and counts.
            CheckpointError: the file could not be written; an older file is intact.
        """
        save_state(self, Path(path), state, filter or {})

    def load(
        self, path: Any, state: Any = None, strict: bool = True, *, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a state into the given objects, in place, and return the entries that were not loaded.

        Args:
            path: file that `save` or `torch.save` wrote.
            state: a dict of objects and values; or a single module or optimizer; None returns the whole state.
            strict: whether each entry must be in the file, and weights must fit exactly.
            weights_only: has no effect, since no code in a file ever runs; a file that needs code is an error.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError: there is no file, or it does not verify.
            CheckpointError: the file needs code to run.
            KeyError: an entry is missing.
        """
        remainder = load_state(self, Path(path), state, strict)
        self.barrier("load")
        return remainder

    def load_raw(self, path: Any, obj: Any, strict: bool = True, *, weights_only: bool | None = None) -> None:
        """Load the state of a single module or optimizer from a file."""
        load_state(self, Path(path), obj, strict)

    # ---- callbacks and loggers

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of each callback that has it, with the arguments that the method accepts."""
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if method is not None and not callable(method):
                warn_user(f"Skipping the callback `{type(callback).__name__}.{hook_name}` because it is not callable.")
            elif method is not None:
                method(*args, **_taken(method, kwargs))

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Log a number."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers by name."""
        metrics = convert_tensors_to_scalars(metrics)
        for logger in self._loggers:
            logger.log_metrics(metrics=metrics, step=step)

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        """Seed all random generators in the same way on all ranks."""
        return seed_everything(seed, workers is not False, verbose)


def _check_new(method: str, what: str, objects: Sequence[Any], kind: type = object) -> None:
    """Raise if no object is given, if Fabric has set an object up already, or if an object is not of type `kind`."""
    if not objects:
        raise ValueError(f"`{method}` requires at least one {what.split()[1]} as input.")
    for one in objects:
        if is_wrapped(one):
            raise ValueError(f"{what} should be passed only once to the `{method}` method.")
        if not isinstance(one, kind):
            got = f"got {type(one).__name__} as {what.lower()}"
            raise TypeError(f"Only PyTorch {kind.__name__} are currently supported in `{method}`; {got}.")


def _gather_with_graph(leaf: Tensor) -> Tensor:
    from torch.distributed.nn.functional import all_gather  # imported late, since few programs use it

    return torch.stack(all_gather(leaf))


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _taken(method: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(method).parameters
    except (ValueError, TypeError):
        return kwargs
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}


class _SkipInit(TorchFunctionMode):
    """Mode in which functions of `torch.nn.init` do not change tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
