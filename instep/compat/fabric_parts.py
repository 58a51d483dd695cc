"""`Fabric` over instep's strategies, and what else programs of Lightning Fabric use and instep calls otherwise."""

from __future__ import annotations

import copy
import inspect
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.flop_counter import FlopCounterMode

from instep import loggers as ours_loggers
from instep.accelerator.unwrapping import compiled_as, without_compile
from instep.checkpoint import CheckpointStore, Reader, find_checkpoint
from instep.checkpoint.lineage import Line
from instep.checkpoint.resume import ResumeReport
from instep.checkpoint.run_state import RunState, clean_names, load_model_state
from instep.compat.fabric import command
from instep.distributed import all_reduce_, broadcast_object, gather, send_to_device
from instep.distributed.nested import map_leaves
from instep.distributed.rank_zero import on_rank_zero
from instep.errors import CheckpointError, SettingError, UsageError
from instep.launchers.notebook import notebook_launcher
from instep.state import PartialState, find_device_kind, read_environment
from instep.strategies import DataParallelStrategy as _DataParallelStrategy
from instep.strategies import FSDPStrategy as _FSDPStrategy
from instep.strategies import Precision as _Precision
from instep.strategies import Strategy, resolve_strategy
from instep.strategies.gradients import parameters_of
from instep.trainer.devices import connect, count_devices
from instep.trainer.devices import launch as run_again
from instep.trainer.module import TrainModule
from instep.trainer.settings import resolve
from instep.types import Stateful
from instep.utils import porting
from instep.utils.flops import peak_flops
from instep.utils.seed import seed_process
from instep.utils.warn import warn_user

_SEED = "PL_GLOBAL_SEED"  # Fabric's programs read it
_STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")
MisconfigurationException = SettingError
PossibleUserWarning = UserWarning
Optimizable = Optimizer
_Stateful = Stateful


# ---- precision, devices, strategies


class Precision(_Precision):
    """instep's precision, by the methods that Fabric's has."""

    precision = property(lambda self: self.name)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context for a forward pass."""
        return self.context() or nullcontext()

    def convert_input(self, data: Any) -> Any:
        """Cast floating tensors to the dtype that the model takes."""
        return data if self.name == "32-true" else _cast(data, self.dtype or torch.get_default_dtype())

    def convert_output(self, data: Any) -> Any:
        """Cast floating tensors to the default dtype."""
        return data if self.name == "32-true" else _cast(data, torch.get_default_dtype())

    def convert_module(self, module: nn.Module) -> Any:
        """Cast a module's weights in place, and return it."""
        super().convert_module(module)
        return module


def _cast(data: Any, dtype: torch.dtype) -> Any:
    return map_leaves(lambda leaf: leaf.to(dtype) if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf, data)


class _PrecisionPlugin:
    """A precision by its class, for `Fabric(plugins=)`."""

    def __init__(self, precision: Any, device: Any = None) -> None:
        self.precision = precision


MixedPrecision = HalfPrecision = _PrecisionPlugin
DoublePrecision = partial(_PrecisionPlugin, "64-true")


class Accelerator:
    """Kind of device: how many are there."""

    kind = "auto"

    @classmethod
    def is_available(cls) -> bool:
        """Return True if this machine has such a device."""
        return cls.auto_device_count() > 0

    @classmethod
    def auto_device_count(cls) -> int:
        """Return how many this machine has."""
        try:
            return find_device_kind(cls.kind).count()
        except SettingError:
            return 0


CPUAccelerator, CUDAAccelerator, MPSAccelerator, XLAAccelerator = (
    type(f"{kind.upper()}Accelerator", (Accelerator,), {"kind": kind}) for kind in ("cpu", "cuda", "mps", "xla")
)


class _Kinds(type):
    """Type of a strategy's class that a program only asks about by `isinstance`."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return vars(cls)["means"](instance)


class SingleDeviceStrategy(metaclass=_Kinds):
    """The strategy of one process."""

    means = staticmethod(lambda strategy: type(strategy) is Strategy)


class ParallelStrategy(metaclass=_Kinds):
    """Strategies of several processes or devices."""

    means = staticmethod(lambda strategy: isinstance(strategy, Strategy) and type(strategy) is not Strategy)


DataParallelStrategy = _DataParallelStrategy


class FSDPStrategy(_FSDPStrategy):
    """instep's FSDP, which is torch's FSDP2, by the options of Lightning's; the others have no effect."""

    def __init__(
        self,
        *,
        auto_wrap_policy: Any = None,
        activation_checkpointing_policy: Any = None,
        sharding_strategy: Any = "FULL_SHARD",
        cpu_offload: bool = False,
        **others: Any,
    ) -> None:
        left = sorted(others.keys() - {"state_dict_type", "process_group_backend", "timeout"})
        if left:
            warn_user(f"FSDPStrategy({'=, '.join(left)}=) has no effect: instep shards by FSDP2")
        kind = str(sharding_strategy).rpartition(".")[2]
        super().__init__(
            auto_wrap_policy,
            cpu_offload=bool(cpu_offload),
            activation_checkpointing=activation_checkpointing_policy,
            reshard_after_forward=False if kind in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") else None,
            dp_replicate="auto" if kind.startswith("HYBRID") else 1,
        )


# ---- what `setup` returns

_in_backward: list[bool] = []  # one entry inside of `Fabric.backward`


class _FabricModule(nn.Module):
    """A module as the strategy calls it; attributes and the state dict are the user's module's.

    Args:
        forward_module: what the strategy made of the module.
        strategy: its strategy.
        original_module: the user's.
    """

    def __init__(self, forward_module: Any, strategy: Any, original_module: Any = None) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = forward_module if original_module is None else original_module
        self._strategy = strategy
        self._forward_methods: set[str] = set(_STEP_METHODS)
        self._is_made = True

    @property
    def module(self) -> Any:
        """The user's module."""
        return self._original_module

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next((p.device for p in self._original_module.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return next((p.dtype for p in self._original_module.parameters()), torch.get_default_dtype())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module in the precision of the run."""
        precision = self._strategy.precision
        args, kwargs = precision.convert_input((args, kwargs))
        with precision.forward_context():
            output = self._forward_module(*args, **kwargs)
        output = precision.convert_output(output)
        if getattr(precision, "scaler", None) is not None:
            map_leaves(_watch_backward, output)
        return output

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the user's module."""
        return self._original_module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the user's module."""
        return self._original_module.load_state_dict(state_dict, strict=strict, assign=assign)

    def mark_forward_method(self, method: MethodType | str) -> None:
        """Let a method of the module run as its forward does: through the strategy, in the precision.

        Raises:
            TypeError: it is neither a method nor a name.
            ValueError: it is `forward`.
            AttributeError: the module has no such method.
        """
        if not isinstance(method, MethodType | str):
            raise TypeError(f"Expected a method or a string, but got: {type(method).__name__}")
        name = method if isinstance(method, str) else method.__name__
        if name == "forward":
            raise ValueError("You cannot mark the forward method itself as a forward method.")
        if not isinstance(getattr(self._original_module, name, None), MethodType):
            kind = type(self._original_module).__name__
            raise AttributeError(f"`{kind}.{name}` does not exist or is not a method.")
        self._forward_methods.add(name)

    def _through_forward(self, name: str) -> Callable[..., Any]:
        module = self._original_module

        def call_forward_module(*args: Any, **kwargs: Any) -> Any:
            own = vars(module).get("forward")

            def forward(*args: Any, **kwargs: Any) -> Any:
                restore()  # the method may call the real one
                return getattr(module, name)(*args, **kwargs)

            def restore() -> None:
                vars(module).pop("forward", None)
                if own is not None:
                    module.forward = own

            module.forward = forward
            try:
                return self.forward(*args, **kwargs)
            finally:
                restore()

        return call_forward_module

    def _outside(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Make a method raise where it runs the module past the strategy."""

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            called: list[Any] = []
            hooks = [one.register_forward_hook(lambda *_: called.append(1)) for one in self._original_module.modules()]
            try:
                output = method(*args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()
            if called:
                raise RuntimeError(
                    f"You are calling the method `{type(self._original_module).__name__}.{name}()` from outside the "
                    f"model, past the strategy: call `fabric_model.mark_forward_method({name!r})` first."
                )
            return output

        return call

    def __getattr__(self, name: str) -> Any:
        if name in ("_forward_module", "_original_module", "_forward_methods"):
            return super().__getattr__(name)
        spread = self._forward_module is not self._original_module
        if spread and name in self._forward_methods:
            return self._through_forward(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self._original_module, name)
            return self._outside(found, name) if spread and inspect.ismethod(found) else found

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_made" not in vars(self):
            return super().__setattr__(name, value)
        ours, theirs = name in dir(self), hasattr(self._original_module, name)
        if theirs or not ours:
            setattr(self._original_module, name, value)
        if ours:
            super().__setattr__(name, value)
        return None


def _watch_backward(leaf: Any) -> Any:
    def check(_: Tensor) -> None:
        if not _in_backward:
            raise RuntimeError(
                "This precision scales losses: it requires you to call `fabric.backward(loss)` instead of "
                "`loss.backward()`."
            )

    if torch.is_tensor(leaf) and leaf.requires_grad:
        leaf.register_hook(check)
    return leaf


class _FabricOptimizer:
    """An optimizer that the strategy steps; everything else is the user's.

    Args:
        optimizer: the user's.
        strategy: how it steps.
        callbacks: whose `on_after_optimizer_step` is called.
    """

    def __init__(self, optimizer: Any, strategy: Any, callbacks: Sequence[Any] = ()) -> None:
        self.optimizer, self._strategy, self._callbacks = optimizer, strategy, callbacks
        kind: Any = optimizer.__class__
        self.__class__ = type(f"Fabric{kind.__name__}", (type(self), kind), {})
        self.steps_taken = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and return the loss of the closure."""
        losses: list[Any] = []
        if closure is None:
            self._strategy.gradients.step(self.optimizer)
        else:
            self._strategy.gradients.step(self.optimizer, lambda: losses.append(closure()) or losses[-1])
        self.steps_taken += 1
        for callback in self._callbacks:
            hook = getattr(callback, "on_after_optimizer_step", None)
            if hook is not None:
                hook(strategy=self._strategy, optimizer=self.optimizer)
        return losses[0] if losses else None

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(*args, **kwargs)
        self._strategy.gradients.forget(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the user's optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the user's optimizer's state."""
        self.optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet: while being copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class _FabricDataLoader:
    """A loader whose batches come on the device; its state dict is the place in the data.

    Args:
        dataloader: torch's.
        device: where batches go; None leaves them.
    """

    def __init__(self, dataloader: Any, device: torch.device | None = None) -> None:
        vars(self).update(vars(dataloader))
        self._dataloader, self._device = dataloader, device
        self._passes = self._batches = 0
        self._random = torch.get_rng_state()
        self._resumed: Tensor | None = None

    @property
    def device(self) -> torch.device | None:
        """Where batches go."""
        return self._device

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        now, self._resumed = self._resumed, None
        skipped = 0 if now is None else self._batches
        if now is not None:
            torch.set_rng_state(self._random if skipped else now)
        if not skipped:
            self._passes, self._random = self._passes + 1, torch.get_rng_state()
        for sampler in (self._dataloader.sampler, getattr(self._dataloader.batch_sampler, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._passes - 1)
                break
        self._batches = 0
        for batch in self._dataloader:
            self._batches += 1
            if self._batches > skipped:
                yield batch if self._device is None else send_to_device(batch, self._device)
            elif self._batches == skipped and now is not None:
                torch.set_rng_state(now)
        self._batches = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data, and torch's random numbers at the start of the pass and now."""
        if hasattr(self._dataloader, "state_dict"):
            return self._dataloader.state_dict()
        place = {"passes": self._passes, "batches": self._batches}
        return {**place, "random": self._random, "now": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batch that was given last, with the random numbers of then; those of other ranks stay."""
        if hasattr(self._dataloader, "load_state_dict"):
            self._dataloader.load_state_dict(state)
            return
        self._passes, self._batches, self._random = state["passes"], state["batches"], state["random"]
        self._resumed = state["now"] if PartialState().is_main_process else torch.get_rng_state()

    def __getattr__(self, name: str) -> Any:
        if name == "_dataloader":  # not set yet: while being copied
            raise AttributeError(name)
        return getattr(self._dataloader, name)


def is_wrapped(obj: Any) -> bool:
    """Return True if Fabric has set an object up."""
    return isinstance(without_compile(obj), _FabricModule | _FabricOptimizer | _FabricDataLoader)


def _unwrapped(obj: Any) -> Any:
    inner = without_compile(obj) if isinstance(obj, nn.Module) else obj
    if isinstance(inner, _FabricModule):
        return without_compile(inner._forward_module)
    if isinstance(inner, _FabricOptimizer):
        return inner.optimizer
    return inner._dataloader if isinstance(inner, _FabricDataLoader) else inner


def _unwrap_objects(collection: Any) -> Any:
    """Return a collection with what the user gave to Fabric, in place of what that returned."""
    return map_leaves(_unwrapped, collection)


# ---- Fabric


def _nothing(fabric: Any) -> None:
    """Do nothing: `Fabric.launch()` without a function."""


class Fabric:
    """A handwritten loop over instep's strategies, by the methods of Lightning's Fabric.

    Args:
        accelerator: kind of device: "auto", "cpu", "gpu", "cuda", "mps", "tpu".
        strategy: a name or an instep Strategy.
        devices: processes of this machine.
        num_nodes: number of machines.
        precision: a name, such as "bf16-mixed".
        plugins: a precision's plug-in.
        callbacks: objects whose methods `call` calls.
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
        for plugin in _listed(plugins):
            if not isinstance(plugin, _PrecisionPlugin) or precision is not None:
                raise UsageError(
                    f"Fabric(plugins={type(plugin).__name__}(...)) has no counterpart in instep, which finds the "
                    "launcher and writes checkpoints itself; a precision is given by its name, or by one plug-in"
                )
            precision = plugin.precision
        names = {field: values for (owner, field), values in porting.VALUES.items() if owner == "Trainer"}
        given = {"accelerator": accelerator, "strategy": strategy, "precision": precision}
        given = {key: names[key].get(value, value) if isinstance(value, str) else value for key, value in given.items()}
        if isinstance(accelerator, Accelerator):
            given["accelerator"] = accelerator.kind
        self._settings = resolve(devices=devices, num_nodes=num_nodes, **given)
        self._environment = read_environment()
        self._count = count_devices(self._settings, self._environment)
        self._callbacks, self._loggers = _listed(callbacks), _listed(loggers)
        self._models_setup = self._steps = 0
        self._models: list[tuple[nn.Module, Strategy]] = []
        self._optimizers: list[_FabricOptimizer] = []
        self._line = Line()
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

    # ---- the process

    strategy = property(lambda self: self._strategy, doc="The strategy.")
    device = property(lambda self: self._strategy.device, doc="Device of this process.")
    accelerator = property(lambda self: globals()[f"{self.device.type.upper()}Accelerator"](), doc="Kind of device.")
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
        """Start the ranks, where no launcher has: this program runs again as each; then call a function.

        With "ddp_spawn", "ddp_fork" or "ddp_notebook" the ranks are forks of this process, which run the function.

        Raises:
            TypeError: the function is none, or takes no argument.
        """
        if not callable(function):
            raise TypeError(f"`Fabric.launch(...)` needs to be a callable, but got {function}: leave out its ()")
        if not inspect.signature(function).parameters:
            raise TypeError(f"`Fabric.launch({function})` needs to take at least one argument, the `Fabric` object.")
        if not self._launched and not self._forks:
            run_again(self._settings, self._count, command())
        if not self._launched and function is _nothing:
            raise TypeError("To fork processes, `Fabric.launch()` needs to be called with the function that they run.")
        if not self._launched:
            return notebook_launcher(self._run_forked, (function, args, kwargs), self._count)[0]
        return function(self, *args, **kwargs)

    def _run_forked(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._environment = read_environment()
        self._connect()
        return function(self, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program: for a subclass, whose code runs on all ranks."""

    def _run_launched(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.launch()
        return run(*args, **kwargs)

    # ---- setting up

    def setup(
        self,
        module: nn.Module,
        *optimizers: Optimizer,
        scheduler: Any = None,
        move_to_device: bool = True,
        _reapply_compile: bool = True,
    ) -> Any:
        """Spread a module and make its optimizers step through the strategy; return what to use in their place."""
        self._check_launched()
        if any(isinstance(optimizer, _FabricOptimizer) for optimizer in optimizers):
            raise ValueError("An optimizer should be passed only once to the `setup` method.")
        wrapped = self._spread("setup", module, optimizers, move_to_device, _reapply_compile)
        stepped = [self._step_through(optimizer) for optimizer in optimizers]
        self.call("on_after_setup", fabric=self, module=wrapped)
        if not optimizers:
            return wrapped
        return (wrapped, *stepped) if scheduler is None else (wrapped, *stepped, scheduler)

    def setup_module(
        self, module: nn.Module, move_to_device: bool = True, _reapply_compile: bool = True
    ) -> _FabricModule:
        """Spread a module."""
        self._check_launched()
        return self._spread("setup_module", module, (), move_to_device, _reapply_compile)

    def _spread(self, method: str, module: Any, optimizers: Any, moves: bool, again: bool) -> _FabricModule:
        if isinstance(without_compile(module), _FabricModule):
            raise ValueError(f"A model should be passed only once to the `{method}` method.")
        given, module = module, without_compile(module) if again else module
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
            self._strategy = strategy  # it steps, scales and clips by itself
        if again and given is not module:
            known: Any = given
            forward = compiled_as(given, module) if forward is module else type(known)(forward, known.dynamo_ctx)
        self._models.append((module, strategy))
        self._models_setup += 1
        return _FabricModule(forward, strategy, module)

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Make optimizers step through the strategy."""
        self._check_launched()
        if not optimizers:
            raise ValueError("`setup_optimizers` requires at least one optimizer as input.")
        if any(isinstance(optimizer, _FabricOptimizer) for optimizer in optimizers):
            raise ValueError("An optimizer should be passed only once to the `setup_optimizers` method.")
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
        self._optimizers.append(_FabricOptimizer(optimizer, self._strategy, self._callbacks))
        return self._optimizers[-1]

    def setup_dataloaders(
        self, *dataloaders: DataLoader[Any], use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Give each rank its part of each loader's data, on its device."""
        self._check_launched()
        if not dataloaders:
            raise ValueError("`setup_dataloaders` requires at least one dataloader as input.")
        if any(isinstance(loader, _FabricDataLoader) for loader in dataloaders):
            raise ValueError("A dataloader should be passed only once to the `setup_dataloaders` method.")
        if not all(isinstance(loader, DataLoader) for loader in dataloaders):
            raise TypeError("Only PyTorch DataLoader are currently supported in `setup_dataloaders`.")
        device = self.device if move_to_device else None
        found = [
            _FabricDataLoader(self._shared(one) if use_distributed_sampler else one, device) for one in dataloaders
        ]
        return found[0] if len(found) == 1 else found

    def _shared(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader of this rank's part of the data, by torch's DistributedSampler."""
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
        seed, shuffles = int(os.environ.get(_SEED, "0")), isinstance(sampler, RandomSampler)
        other, mine = copy.copy(loader), DistributedSampler(loader.dataset, parts, part, shuffle=shuffles, seed=seed)
        vars(other).update(sampler=mine, _iterator=None)
        if batches is not None:
            vars(other)["batch_sampler"] = batches = copy.copy(batches)
            batches.sampler = mine
        return other

    # ---- the step

    def backward(self, tensor: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        """Backpropagate, scaled where the precision scales."""
        _in_backward.append(True)
        try:
            (self._strategy if model is None else model._strategy).backward(tensor, *args, **kwargs)
        finally:
            _in_backward.pop()

    def clip_gradients(
        self,
        module: Any,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip gradients by value or by norm; return the norm before.

        Raises:
            ValueError: both or none of `clip_val` and `max_norm` are given.
            RuntimeError: the norm is not finite, `error_if_nonfinite` is set, and no gradient scaler skips such steps.
        """
        if (clip_val is None) == (max_norm is None):
            raise ValueError("Either `clip_val` or `max_norm` should be set, and only one of them.")
        gradients, optimizer = self._strategy.gradients, _unwrapped(optimizer)
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
        """Return the precision's context."""
        return self._strategy.precision.forward_context()

    def no_backward_sync(self, module: Any, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context for a micro-batch whose gradients need not be reduced yet."""
        module = without_compile(module)
        if not isinstance(module, _FabricModule):
            raise TypeError(
                "You need to set up the model first before you can call `fabric.no_backward_sync()`: "
                "`model = fabric.setup(model, ...)`"
            )
        return module._strategy.no_sync() if enabled else nullcontext()

    # ---- all ranks

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each machine."""
        self._process.print(*args, **kwargs)

    def to_device(self, obj: Any) -> Any:
        """Move a module, or nested tensors, to the device."""
        return obj.to(self.device) if isinstance(obj, nn.Module) else send_to_device(obj, self.device)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self._process.wait_for_everyone(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give one rank's object to all."""
        self._check_launched()
        return broadcast_object(obj, src)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack each rank's tensors along a new first dimension; with one process they stay as they are."""
        self._check_launched()
        data = self._tensors("all_gather", data, group)
        if self.world_size == 1:
            return data
        together = _gather_with_graph if sync_grads else lambda leaf: gather(leaf[None])
        return map_leaves(lambda leaf: together(leaf) if torch.is_tensor(leaf) else leaf, data)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Combine each rank's tensors, in place."""
        self._check_launched()
        name = str(reduce_op).rpartition(".")[2].lower().replace("avg", "mean")
        data = self._tensors("all_reduce", data, group)
        return map_leaves(lambda leaf: all_reduce_(leaf, name) if torch.is_tensor(leaf) else leaf, data)

    def _tensors(self, method: str, data: Any, group: Any) -> Any:
        """Make tensors of numbers, on the device."""
        if group is not None:
            raise UsageError(f"fabric.{method}(group=...) has no counterpart in instep: use torch.distributed")
        data = map_leaves(lambda leaf: torch.tensor(leaf) if isinstance(leaf, bool | int | float) else leaf, data)
        return send_to_device(data, self.device)

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Return a context whose block runs on the first rank, then on the others."""
        return self._process.local_main_process_first() if local else self._process.main_process_first()

    # ---- large models

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make a module's weights on the device, in the precision's dtype; empty ones where they are loaded."""
        self._check_launched()
        with ExitStack() as stack:
            if empty_init is not False and self._strategy.sharded:
                stack.enter_context(self._strategy.model_context())
            else:
                stack.enter_context(torch.device(self.device))
                if empty_init:
                    stack.enter_context(_SkipInit())
            stack.enter_context(_default_dtype(self._strategy.precision.dtype))
            yield

    @contextmanager
    def init_tensor(self) -> Iterator[None]:
        """Make tensors on the device, in the precision's dtype."""
        with torch.device(self.device), _default_dtype(self._strategy.precision.dtype):
            yield

    def sharded_model(self) -> AbstractContextManager[Any]:
        """Return the strategy's context for building a large module; `init_module` is the newer name."""
        self._check_launched()
        warn_user("`Fabric.sharded_model()` is deprecated in favor of `Fabric.init_module()`.", DeprecationWarning)
        return self._strategy.model_context()

    # ---- saving

    def save(
        self, path: Any, state: dict[str, Any], filter: dict[str, Callable[[str, Any], bool]] | None = None
    ) -> None:
        """Save a state as a verified folder, to which `path` then points; an older one there goes after that.

        Raises:
            TypeError, ValueError: a filter is no function, or of no entry of the state.
            UnsavableStateError: an entry is neither of tensors and plain values, nor has a state dict of these.
            CheckpointError: it could not be written; the older one is intact.
        """
        _check_filter(filter, state)
        _Checkpoint(self, state, filter or {}).save(Path(path))

    def load(
        self, path: Any, state: Any = None, strict: bool = True, *, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a state into the given objects, in place, and return what is left of it.

        Args:
            path: what `save` wrote, or a file of `torch.save`.
            state: a dict of objects and values; a module or an optimizer alone; None returns all.
            strict: whether each entry must be there, and weights fit exactly.
            weights_only: False lets a file of `torch.save` run code.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError: there is none, or it does not verify.
            KeyError: an entry is missing.
        """
        remainder = _load(self, Path(path), state, strict, weights_only is not False)
        self.barrier("load")
        return remainder

    def load_raw(self, path: Any, obj: Any, strict: bool = True, *, weights_only: bool | None = None) -> None:
        """Load the state of one module or optimizer alone."""
        _load(self, Path(path), obj, strict, weights_only is not False)

    # ---- callbacks and loggers

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of each callback that has it, with the arguments that it takes."""
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
        """Seed all generators alike on all ranks."""
        return seed_everything(seed, workers is not False, verbose)


def _gather_with_graph(leaf: Tensor) -> Tensor:
    from torch.distributed.nn.functional import all_gather  # late: few programs ask for it

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
    """Mode in which `torch.nn.init` leaves tensors as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---- checkpoints


def _check_filter(filter: Any, state: dict[str, Any]) -> None:
    if filter is None:
        return
    if not isinstance(filter, dict):
        raise TypeError(f"Filter should be a dictionary, given {filter!r}")
    if unknown := filter.keys() - state.keys():
        raise ValueError(f"The filter keys {unknown} are not present in the state keys {set(state)}.")
    for key, function in filter.items():
        if not callable(function):
            raise TypeError(f"Expected `fabric.save(filter=...)` for key {key!r} to be a callable, given {function!r}")


def _plain(module: nn.Module) -> Strategy:
    """Return a strategy for the state of a module that was not set up."""
    strategy = Strategy()
    strategy.module = module
    return strategy


class _Checkpoint:
    """A state on its way to the disk: weights and optimizers by parameter name, the rest as values.

    Args:
        fabric: whose models these may be.
        state: what is saved.
        filter: by key, which entries of a state dict are.
    """

    def __init__(self, fabric: Fabric, state: dict[str, Any], filter: Mapping[str, Callable[[str, Any], bool]]) -> None:
        self.fabric = fabric
        modules, optimizers, values = _sorted(fabric, state)
        strategies = [strategy for strategy in modules.values() if strategy.sharded]
        weights = {
            key: {name: value for name, value in strategy.model_state().items() if _keeps(filter, key, name, value)}
            for key, strategy in modules.items()
        }
        trees: list[Any] = []
        kept: dict[str, int] = {}
        for key, optimizer in optimizers.items():
            home = _home(optimizer, [*modules.values(), *(its for _, its in fabric._models)])
            if key in filter or home is None:
                tree = optimizer.state_dict()
                values[key] = {name: value for name, value in tree.items() if _keeps(filter, key, name, value)}
                continue
            kept[key] = len(trees)
            trees.append(home.optimizer_state(optimizer))
        for key, value in values.items():
            if isinstance(value, dict) and key in filter and key not in optimizers:
                values[key] = {name: one for name, one in value.items() if _keeps(filter, key, name, one)}
        merged: dict[str, Any] | None = None
        for key, own in weights.items():
            part = modules[key].local_shards(own)
            if part is not None:
                merged = (merged or {}) | clean_names(part, "" if len(weights) == 1 else f"{key}.")
        own_trees = fabric.strategy.local_shards(trees) if trees else None
        shared = {"models": list(weights), "optimizers": kept, "values": values}
        self._written = RunState("fabric", bool(strategies), merged, own_trees, shared, None)

    def save(self, path: Path) -> None:
        """Write the folder, and let the path point to it. Collective."""
        fabric, path = self.fabric, path.expanduser().absolute()
        old = on_rank_zero(lambda: _place(path), f"looking at {path}")
        store = CheckpointStore(path.parent)
        store.clean_stale()
        step = max((optimizer.steps_taken for optimizer in fabric._optimizers), default=0)
        folder = store.save(step, self._written.write, info={"kind": "fabric"}, name=path.name, line=fabric._line)

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


def _keeps(filter: Mapping[str, Callable[[str, Any], bool]], key: str, name: str, value: Any) -> bool:
    return key not in filter or bool(filter[key](name, value))


def _sorted(fabric: Fabric, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
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
            optimizers[key] = _unwrapped(value)
        else:
            values[key] = value.state_dict() if isinstance(value, Stateful) else value
    return modules, optimizers, values


def _home(optimizer: Any, strategies: list[Strategy]) -> Strategy | None:
    """Return the strategy of the module that has all of an optimizer's parameters; None where none has."""
    for strategy in strategies:
        own = {id(parameter) for parameter in strategy.parameters()}
        if all(id(parameter) in own for parameter in parameters_of(optimizer)):
            return strategy
    return None


def _load(fabric: Fabric, path: Path, state: Any, strict: bool, weights_only: bool) -> dict[str, Any]:
    path, alone = path.expanduser(), isinstance(state, nn.Module | Optimizer)
    kind = None if not alone else "models" if isinstance(state, nn.Module) else "optimizers"
    saved = torch.load(path, map_location="cpu", weights_only=weights_only) if path.is_file() else _read(path, kind)
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
    return torch.load(path, map_location="cpu", mmap=True) if path.is_file() else _read(path, None)


def _load_optimizer(fabric: Fabric, optimizer: Any, modules: Mapping[str, Strategy], value: Any, strict: bool) -> None:
    if "shapes" not in value:  # as torch gives it
        optimizer.load_state_dict(value)
        return
    home = _home(optimizer, [*modules.values(), *(its for _, its in fabric._models)])
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


# ---- loggers


class Logger:
    """Base of a program's own loggers, which override `log_metrics` and `log_hyperparams`."""

    root_dir = log_dir = name = version = None
    group_separator = "/"

    @property
    def experiment(self) -> Any:
        """What the logger writes with; None."""
        return None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write numbers by name."""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Write hyperparameters."""

    def save(self) -> None:
        """Write what waits."""

    def finalize(self, status: str = "success") -> None:
        """End the run."""


class CSVLogger(ours_loggers.CSVLogger):
    """instep's CSVLogger, with the folders of Fabric's."""

    def __init__(self, root_dir: Any, name: str | None = "lightning_logs", version: Any = None, **options: Any) -> None:
        super().__init__(root_dir, name, version, **options)


class TensorBoardLogger(ours_loggers.TensorBoardLogger):
    """instep's TensorBoardLogger, with the folders of Fabric's."""

    def __init__(self, root_dir: Any, name: str | None = "lightning_logs", version: Any = None, **options: Any) -> None:
        super().__init__(root_dir, name, version, **options)


# ---- small functions


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed python, numpy and torch alike on all ranks; samplers of shuffled loaders take this seed too.

    Raises:
        ValueError: it is no number, or out of numpy's range.
    """
    asked = os.environ.get(_SEED, "0") if seed is None else seed
    try:
        seed = int(asked)
    except ValueError:
        raise ValueError(f"Invalid seed specified via {_SEED}: {asked!r}") from None
    if not 0 <= seed < 2**32:
        raise ValueError(f"{seed} is not in bounds, numpy accepts from 0 to {2**32 - 1}")
    os.environ[_SEED], os.environ["PL_SEED_WORKERS"] = str(seed), str(int(workers))
    import numpy  # noqa: F401  the program may load it later: seed it now

    seed_process(seed)
    return seed


def reset_seed() -> None:
    """Seed again as `seed_everything` did; without one nothing is done."""
    if _SEED in os.environ:
        seed_everything(None, os.environ.get("PL_SEED_WORKERS") == "1", verbose=False)


def convert_tensors_to_scalars(metrics: Any) -> Any:
    """Make numbers of tensors of one element."""

    def number(leaf: Any) -> Any:
        if torch.is_tensor(leaf) and leaf.numel() != 1:
            raise ValueError(
                f"The metric `{leaf}` does not contain a single element, thus it cannot be converted to a scalar."
            )
        return leaf.item() if torch.is_tensor(leaf) else leaf

    return map_leaves(number, metrics)


def is_overridden(method_name: str, instance: Any, parent: Any = TrainModule) -> bool:
    """Return True if an object's class has a method of its own in place of a parent's."""
    own = getattr(type(instance), method_name, None)
    return own is not None and own is not getattr(parent, method_name, None)


def measure_flops(
    model: nn.Module, forward_fn: Callable[[], Any], loss_fn: Callable[[Any], Tensor] | None = None
) -> int:
    """Count the operations of a forward, with a loss also of its backward."""
    counter = FlopCounterMode(display=False)
    with counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    return counter.get_total_flops()


def get_available_flops(device: torch.device, dtype: Any) -> float | None:
    """Return how many operations a second a device can do; None where that is not known."""
    names = {torch.float32: "32-true", torch.float16: "16-true", torch.bfloat16: "bf16-true"}
    return peak_flops(device, names.get(dtype, "32-true"))


class Throughput:
    """Rates over a window of updates, as Fabric names them.

    Args:
        available_flops: operations a second that a device can do.
        world_size: number of devices.
        window_size: number of updates that the rates are taken over.
        separator: between "device" and a rate's name.
    """

    def __init__(
        self,
        available_flops: float | None = None,
        world_size: int = 1,
        window_size: int = 100,
        separator: str = "/",
        **_: Any,
    ) -> None:
        self.available_flops, self.world_size, self.separator = available_flops, world_size, separator
        self._window_size = window_size
        self.reset()

    def reset(self) -> None:
        """Forget all updates."""
        self._updates: deque[dict[str, float]] = deque(maxlen=self._window_size)
        self._flops: deque[float] = deque(maxlen=self._window_size)

    def update(
        self, *, time: float, batches: int, samples: int, lengths: int | None = None, flops: int | None = None
    ) -> None:
        """Take the totals so far, and the operations since the last update.

        Raises:
            ValueError: a total is less than before, or there are fewer samples than batches.
        """
        totals = {"time": time, "batches": batches, "samples": samples, "lengths": lengths}
        now = {name: value for name, value in totals.items() if value is not None}
        if samples < batches or (lengths is not None and lengths < samples):
            raise ValueError(f"Expected lengths >= samples >= batches, got {lengths}, {samples}, {batches}")
        if self._updates and any(value < self._updates[-1].get(name, value) for name, value in now.items()):
            raise ValueError(f"Expected the values to increase, last: {self._updates[-1]}, current: {now}")
        self._updates.append(now)
        if flops is not None:
            self._flops.append(flops * self.world_size)

    def compute(self) -> dict[str, float]:
        """Return totals, and rates once the window is full."""
        last = self._updates[-1]
        found = dict(last)
        if len(self._updates) < self._window_size:
            return found
        first, names = self._updates[0], {"batches": "batches", "samples": "samples", "lengths": "items"}
        elapsed = last["time"] - first["time"]
        rates = {
            f"{name}_per_sec": (last[key] - first[key]) / elapsed
            for key, name in names.items()
            if key in last and key in first
        }
        if len(self._flops) == self._window_size:
            rates["flops_per_sec"] = (sum(self._flops) - self._flops[0]) / elapsed / self.world_size
        for name, rate in rates.items():
            found[f"device{self.separator}{name}"] = rate
            if self.world_size > 1:
                found[name] = rate * self.world_size
        if "flops_per_sec" in rates and self.available_flops:
            found[f"device{self.separator}mfu"] = rates["flops_per_sec"] / self.available_flops
        return found


class ThroughputMonitor(Throughput):
    """Throughput of a Fabric, which logs it.

    Args:
        fabric: whose loggers and devices these are.
        **options: of `Throughput`.
    """

    def __init__(self, fabric: Fabric, **options: Any) -> None:
        flops = peak_flops(fabric.device, fabric.strategy.precision.name)
        super().__init__(flops, fabric.world_size, **options)
        self._fabric = fabric

    def compute_and_log(self, step: int | None = None, **kwargs: Any) -> dict[str, float]:
        """Return the rates, and log them."""
        found = self.compute(**kwargs)
        self._fabric.log_dict(found, step)
        return found
