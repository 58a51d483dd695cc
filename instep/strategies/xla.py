"""`XLAStrategy`: training on XLA devices, such as TPUs, by torch_xla."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.distributed.nested import map_leaves
from instep.errors import SettingError, StateError
from instep.state import PartialState, active_run, read_environment
from instep.strategies.base import Strategy
from instep.strategies.gradients import Gradients
from instep.strategies.precision import Precision
from instep.utils.checks import choice
from instep.utils.imports import require
from instep.utils.seed import add_generator, derive_seed

_NAMES = {"no": "xla", "data": "xla_spmd", "fsdp": "xla_fsdp"}
_AXIS = "devices"


class XLAGradients(Gradients):
    """Gradients that are averaged over processes once per optimizer step."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self.reduced: set[int] = set()
        """Ids of the optimizers whose gradients are already reduced over all processes."""
        self._stateful: set[int] = set()  # ids of optimizers whose state is sharded already

    def unscale(self, optimizer: Optimizer) -> None:
        self._reduce(optimizer)

    def _reduce(self, optimizer: Optimizer) -> None:
        """Average the accumulated gradients over processes, once per optimizer step.

        With one process there is nothing to do: if it controls several devices, the compiled graph has already averaged
        the gradients over them.
        """
        if id(optimizer) in self.reduced:
            return
        if PartialState().num_processes > 1:
            self.strategy._xla_model.reduce_gradients(optimizer)
        self.reduced.add(id(optimizer))
        _say_synced(True)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> None:
        strategy = self.strategy
        if closure is None:
            self._reduce(optimizer)
            super().step(optimizer, **kwargs)
        else:

            def reduced() -> Any:
                loss = closure()
                self._reduce(optimizer)
                return loss

            super().step(optimizer, reduced, **kwargs)
        if strategy._mesh is not None and id(optimizer) not in self._stateful:
            strategy._split_state(optimizer)  # shard the new states of a first step before they are computed
            if optimizer.state:
                self._stateful.add(id(optimizer))
        self.reduced.discard(id(optimizer))
        _say_synced(False)
        strategy._torch_xla.sync()


class XLAStrategy(Strategy):
    """Training on XLA devices, where the operations of a step are recorded, compiled once, and run as one graph.

    A graph ends after each micro-batch, optimizer step and evaluation step. Every new shape of a batch is compiled
    again, so use `drop_last=True` and pad to few lengths. Reading a value within a step (`.item()`, `print`) runs an
    extra graph.

    There are two ways to use several devices. With `spmd`, one process controls all devices that it sees: batches are
    split over them by sample, and the compiler adds the communication, so that losses are those of one device. The
    dataloader yields the batch for all devices together. Without `spmd`, each device has its own process, started by
    `torch_xla.launch`, and gradients are averaged. This second way follows torch_xla's documentation, and was not
    tested on a TPU.

    Checkpoints are written from copies on the host, in the same format as under every other strategy.

    Args:
        spmd: "no": one device per process. "data": each device of the process has the whole weights. "fsdp": weights,
            gradients and optimizer states are sharded over the devices.
        blocks: for "fsdp": classes of modules (such as a transformer's block) whose first output stays split by sample.
            This prevents the compiler from gathering activations instead of weights.

    Raises:
        SettingError: an argument is wrong. (When a run starts:) the device is not an XLA device, or the precision is
            16-mixed.
        StateError: (when a run starts) gradients were computed in this process before any XLA device was used.
        MissingPackageError: (when a run starts) torch_xla is not installed.

    Example:
        >>> XLAStrategy(spmd="fsdp").name
        'xla_fsdp'

    Source:
        Xu et al.: GSPMD, 2021 (https://arxiv.org/abs/2105.04663), as built in XLA.
    """

    multi_process = True
    steps_can_be_undone = False
    inference_mode = False
    runs_on_xla = True
    gradients_class = XLAGradients
    gradients: XLAGradients  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, spmd: str = "no", *, blocks: Sequence[type[nn.Module]] = ()) -> None:
        choice(*_NAMES)("spmd", spmd)
        if blocks and spmd != "fsdp":
            raise SettingError(
                f"blocks belongs to spmd='fsdp', and this is spmd={spmd!r}. Leave it out.", field="blocks", got=blocks
            )
        self.spmd = spmd
        self.blocks = tuple(blocks)
        self.name = _NAMES[spmd]
        self._mesh: Any = None
        self._hooks: list[Any] = []

    # ---- set-up and tear-down

    def check_world_size(self, world_size: int) -> None:
        if world_size == 1:
            return
        if self.spmd != "no":
            problem = "drives all devices from one process. Use devices=1"
        elif read_environment().launcher != "xla":
            problem = (
                "has one process per device, which torch_xla starts: call torch_xla.launch(main) with a "
                "Trainer(accelerator='xla') in main. Or let one process drive all: strategy='xla_spmd', devices=1"
            )
        else:
            return
        raise self._refused(f"{problem}; this run has {world_size} processes.")

    def connect(self, device: torch.device, precision: Precision) -> None:
        super().connect(device, precision)
        if device.type != "xla":
            raise self._refused(
                f"runs on XLA devices, and this run is on {device}. Use Trainer(accelerator='xla'), or "
                "PartialState(xla=True) before an Accelerator."
            )
        if precision.name == "16-mixed":
            raise SettingError(
                "precision='16-mixed' is not for XLA devices, which compute in bfloat16. Use 'bf16-mixed', whose "
                "gradients need no scaling.",
                field="precision",
                got=precision.name,
            )
        self._torch_xla = require("torch_xla", extra="xla", purpose="XLAStrategy")
        self._xla_model = require("torch_xla.core.xla_model", extra="xla", purpose="XLAStrategy")
        if self.spmd != "no":
            self._mesh = self._make_mesh()
        _check_backward(device)
        # torch.manual_seed does not seed the XLA device, so derive a seed for it from the state of the CPU generator.
        self._xla_model.set_rng_state(derive_seed("xla", torch.get_rng_state().numpy().tobytes().hex()))
        add_generator("xla", self._xla_model.get_rng_state, self._xla_model.set_rng_state)

    def _make_mesh(self) -> Any:
        runtime = require("torch_xla.runtime", extra="xla", purpose="XLAStrategy")
        if runtime.process_count() > 1:
            raise self._refused(
                f"drives the devices of one process, and torch_xla has {runtime.process_count()} of them. Use "
                "strategy='xla' with torch_xla.launch."
            )
        self._spmd = require("torch_xla.distributed.spmd", extra="xla", purpose="XLAStrategy")
        if not runtime.is_spmd():
            runtime.use_spmd()
        mesh = self._spmd.get_1d_mesh(_AXIS)
        self._spmd.set_global_mesh(mesh)
        return mesh

    def prepare_module(self, module: nn.Module) -> None:
        shared = _shared_parameters(module)
        super().prepare_module(module)
        for (owner, name), *others in shared:  # moving to XLA has untied parameters, so tie them
            for other, other_name in others:
                other._parameters[other_name] = owner._parameters[name]
        if self._mesh is None:
            return
        for tensor in (*module.parameters(), *module.buffers()):
            self._spmd.clear_sharding(tensor)  # an earlier run may have sharded the tensor in another way
            self._split(tensor, self._weight_dim(tensor) if isinstance(tensor, nn.Parameter) else -1)
        for block in module.modules():
            if isinstance(block, self.blocks):
                self._hooks.append(block.register_forward_hook(self._split_output))

    def prepare_training(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if PartialState().num_processes > 1:
            self._xla_model.broadcast_master_param(module)

    def wrap(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        if PartialState().num_processes > 1:
            raise self._refused(
                "runs a handwritten loop in one process. Use strategy='xla_spmd' for all its devices, or the Trainer."
            )
        if self._mesh is not None:
            self._hooks.append(module.register_forward_pre_hook(self._split_inputs, with_kwargs=True))
        return module

    def teardown(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    # ---- sharding under SPMD, which changes where tensors are stored, but not the results

    def _weight_dim(self, weight: Tensor) -> int:
        """Return the index of the longest dimension that can be split evenly; -1 if there is none.

        Weights are split only with `spmd="fsdp"`; otherwise return -1.
        """
        even = [size if size % self._mesh.size() == 0 else 0 for size in weight.shape]
        return even.index(max(even)) if any(even) and self.spmd == "fsdp" else -1

    def _split(self, tensor: Tensor, dim: int) -> None:
        spec = tuple(_AXIS if index == dim else None for index in range(tensor.ndim))
        self._spmd.mark_sharding(tensor, self._mesh, spec)

    def _split_state(self, optimizer: Optimizer) -> None:
        """Shard an optimizer's state like the weights; otherwise the compiler may choose a new sharding each step."""
        for weight, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor) and value.device.type == "xla" and value.shape == weight.shape:
                    self._split(value, self._weight_dim(value))

    def _split_samples(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and value.device.type == "xla":
            self._split(value, 0)
        return value

    def _split_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        map_leaves(self._split_samples, (args, kwargs))

    def _split_output(self, block: nn.Module, args: Any, output: Any) -> None:
        self._split_samples(output[0] if isinstance(output, tuple) else output)

    # ---- the step

    def step_function(self, name: str) -> Callable[..., Any]:
        step = super().step_function(name)
        ends = name != "training_step"  # in training, the backward or the optimizer step ends the graph

        def run(*args: Any) -> Any:
            if self._mesh is not None:
                map_leaves(self._split_samples, args)
            output = step(*args)
            if ends:
                self._torch_xla.sync()
            return output

        return run

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield
        self._torch_xla.sync()  # `sync` ends the graph, so that all micro-batches run the same graph

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.gradients.reduced.clear()
        super().backward(loss, *args, **kwargs)

    # ---- state

    def model_state(self) -> dict[str, Any]:
        return _on_host(self.module.state_dict(keep_vars=True))

    def average_replicas(self) -> None:
        """Do nothing, since buffers are on XLA devices, and only tensors on the host can be broadcast here."""

    def model_state_from(self, held: Mapping[str, Tensor]) -> dict[str, Any]:
        return _on_host({**self.module.state_dict(keep_vars=True), **held})

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return _on_host(super().optimizer_state(optimizer))

    def load_optimizer_state(self, optimizer: Optimizer, tree: Mapping[str, Any], strict: bool = True) -> list[str]:
        left_out = super().load_optimizer_state(optimizer, tree, strict)
        if self._mesh is not None:
            self._split_state(optimizer)
        return left_out


def _check_backward(device: torch.device) -> None:
    try:
        torch.ones((), device=device, requires_grad=True).backward()
    except RuntimeError as error:
        raise StateError(
            "torch computed gradients in this process before it knew of the XLA device, and has no thread for it. "
            "Begin the program with: import torch_xla.runtime; torch_xla.runtime.addressable_runtime_device_count()"
        ) from error


def _shared_parameters(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return for each tied parameter the list of modules and attribute names that have it."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((owner, name))
    return [group for group in places.values() if len(group) > 1]


def _on_host(state: Any) -> Any:
    """Return a state with its tensors copied to the host; tied weights stay the same tensor."""
    copies: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = value.detach().cpu()
        return copies[id(value)]

    return map_leaves(copy, state)


def _say_synced(synced: bool) -> None:
    run = active_run()
    if run is not None:
        run.gradient.is_xla_gradients_synced = synced
