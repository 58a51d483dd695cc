"""`FSDPStrategy`: fully sharded data parallelism by torch's `fully_shard` (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from instep.activations.recompute import recompute
from instep.errors import SettingError, one_of
from instep.state import PartialState
from instep.strategies.base import Strategy
from instep.strategies.clipping import clip_norm_, clip_value_, local_part
from instep.strategies.dtensors import (
    gather_whole,
    parts_to_write,
    take_part,
    take_parts,
    take_state,
    with_local,
)
from instep.strategies.gradients import Gradients
from instep.strategies.materialize import (
    Materializer,
    broadcast_weights,
    no_values,
    read_values,
    refuse_dispatched,
)
from instep.strategies.precision import Precision
from instep.strategies.step_forward import gathered_methods
from instep.strategies.wrapping import (
    Policy,
    check_policy,
    is_manual,
    recomputed_of,
    units_of,
)
from instep.utils.checks import FLAG, at_least, wrong
from instep.utils.optimizer_state import load_optimizer_state, names_of, optimizer_state, whole
from instep.utils.porting import instead_of
from instep.utils.warn import warn_user

_placed: WeakKeyDictionary[nn.Module, tuple[set[str], dict[str, Any]]] = WeakKeyDictionary()
"""Module that an earlier run has sharded, and that stays sharded -> names of its weights that have no values yet, and
the settings with which it was sharded."""


class FSDPGradients(Gradients):
    """Gradients that FSDP2 shards over ranks."""

    def leaves(self) -> Iterable[Tensor]:
        yield from super().leaves()
        for entry in self.gathered():
            yield entry._unsharded_param

    def gathered(self) -> Iterator[Any]:
        """Yield FSDP2's private record (FSDPParam) of each sharded parameter that has been gathered before."""
        for part in self.strategy._sharded:
            for group in _param_groups(part):
                for entry in group.fsdp_params:
                    if hasattr(entry, "_unsharded_param"):
                        yield entry

    def clip(
        self, parameters: Sequence[Tensor], value: float, algorithm: str = "norm", norm_type: float = 2.0
    ) -> Tensor | None:
        # Include parameters without a gradient, since all ranks must reduce the same sums.
        if algorithm == "value":
            clip_value_(parameters, value)
            return None
        return clip_norm_(parameters, value, norm_type)

    def find_nonfinite(self, tensors: Sequence[Tensor], found: Tensor) -> None:
        super().find_nonfinite(
            [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors], found
        )


class FSDPStrategy(Strategy):
    """`fully_shard`: each rank keeps shards of weights, gradients and optimizer states, and gathers blocks when needed.

    Submodules that the module has sharded in its own `configure_model` are not changed (use the mesh
    `trainer.strategy.dp_mesh` there). All weights outside of the blocks are sharded together.

    Args:
        wrap: which submodules (blocks) are sharded and gathered separately: classes or their names, a minimum number of
            parameters, or a function of a submodule's name and the submodule. None: the blocks of a transformer in an
            `nn.ModuleList` or `nn.Sequential`, as found by `wrapping.select`.
        dp_replicate: number of copies of the weights, each sharded over `world size / dp_replicate` consecutive
            processes (HSDP). "auto": one copy per node, or two on a single node.
        reshard_after_forward: True: free a block's gathered weights after its forward, and gather them again for its
            backward. False: keep them, which needs memory but saves the second gathering. A number: keep them sharded
            over only this number of processes. None: torch's default, which is True for all but the root module.
        mp_policy: dtypes of gathered weights, of the reduction of gradients, and of outputs. None: with a precision
            that uses autocast, weights are gathered in the lower precision, and gradients are reduced in float32.
        cpu_offload: whether to keep weights, gradients and optimizer states in CPU memory.
        activation_checkpointing: submodules, chosen as in `wrap`, whose activations are recomputed in the backward.
            True: the blocks of `wrap`. The callback `instep.activations.ActivationCheckpointing` has more options and
            works under every strategy.
        meta_init: whether to run `configure_model` on the meta device. Modules are then materialized one at a time by
            their `reset_parameters`, in the order of the module. Weights of modules without this method must come from
            a checkpoint.
        accumulate_sharded: True: reduce gradients after each micro-batch, so that a rank holds only shards of them.
            False: until the optimizer step, a rank keeps weights gathered and gradients whole, and communicates
            nothing.
        forward_prefetch: number of blocks that are gathered ahead in the forward; 0: torch's default.
        backward_prefetch: number of blocks that are gathered ahead in the backward; 0: torch's default, which is one.
        compile: True, or a dict of options of `torch.compile`: compile the forward of each block of `wrap`.
        forward_methods: names of further methods of the module that use its weights and are called from outside.
        **unknown: any other argument raises an error that names a replacement.

    Raises:
        SettingError: an argument is wrong. (When training starts:) the module has no submodule of a class in `wrap`;
            the processes cannot be divided into this number of copies; weights have no values; or a block shares
            weights with another one.

    Example:
        >>> FSDPStrategy(wrap="Block", dp_replicate=2, activation_checkpointing=True).name
        'fsdp'

    Source:
        Zhao et al.: PyTorch FSDP, VLDB 2023 (https://arxiv.org/abs/2304.11277), as rewritten in torch.
    """

    name = "fsdp"
    multi_process = True
    gradients_class = FSDPGradients
    sharded = True
    whole_parameters = False
    inference_mode = False

    mesh: DeviceMesh
    """Mesh of all processes; its dimensions are named `dp_replicate` and `dp_shard`."""

    def __init__(
        self,
        wrap: Policy | None = None,
        *,
        dp_replicate: int | str = 1,
        reshard_after_forward: bool | int | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        cpu_offload: bool = False,
        activation_checkpointing: Policy | bool | None = None,
        meta_init: bool = False,
        accumulate_sharded: bool = False,
        forward_prefetch: int = 0,
        backward_prefetch: int = 0,
        compile: bool | Mapping[str, Any] = False,  # this argument has the name that torch uses
        forward_methods: Sequence[str] = (),
        **unknown: Any,
    ) -> None:
        if unknown:
            self._refuse(*unknown)
        if dp_replicate != "auto":
            dp_replicate = at_least(1, 'or "auto"')("dp_replicate", dp_replicate)
        for field, value in (("forward_prefetch", forward_prefetch), ("backward_prefetch", backward_prefetch)):
            at_least(0)(field, value)
        flags = {"cpu_offload": cpu_offload, "meta_init": meta_init, "accumulate_sharded": accumulate_sharded}
        for field, value in flags.items():
            FLAG(field, value)
        if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool)):
            reshard_after_forward = at_least(2, "or True or False")("reshard_after_forward", reshard_after_forward)
        if not isinstance(compile, bool | Mapping):
            raise wrong("compile", compile, "True, False, or a dict of options of torch.compile")
        if isinstance(forward_methods, str):
            raise wrong("forward_methods", forward_methods, "a list of names")
        if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
            raise wrong("mp_policy", mp_policy, "a torch.distributed.fsdp.MixedPrecisionPolicy")
        self.wrap_policy = check_policy("wrap", wrap)
        self.dp_replicate = dp_replicate
        self.reshard_after_forward = reshard_after_forward
        self.mp_policy = mp_policy
        self.cpu_offload = cpu_offload
        self.activation_checkpointing = (
            activation_checkpointing
            if isinstance(activation_checkpointing, bool)
            else check_policy("activation_checkpointing", activation_checkpointing)
        )
        self.meta_init = meta_init
        self.accumulate_sharded = accumulate_sharded
        self.forward_prefetch = forward_prefetch
        self.backward_prefetch = backward_prefetch
        self.compile = dict(compile) if isinstance(compile, Mapping) else {} if compile else None
        self.forward_methods = tuple(forward_methods)
        self._world: Any = None
        self._sharded: list[FSDPModule] = []
        self._freed: list[FSDPModule] = []
        """Blocks that free their gathered weights after the forward, except while gradients are not reduced."""
        self._parameters: list[nn.Parameter] = []
        self._without_values: set[str] = set()
        self._became: dict[int, tuple[ref[nn.Parameter], nn.Parameter]] = {}
        """Id of an old parameter -> that parameter and its replacement, for optimizers that still hold the old one."""

    def _refuse(self, option: str, *_: str) -> NoReturn:
        instead = instead_of("FSDPStrategy", option)
        if instead is not None:
            raise SettingError(f"{type(self).__name__} has no {option}: {instead}.", field=option)
        options = {**signature(type(self)).parameters, **signature(FSDPStrategy).parameters}
        raise one_of(
            "option",
            option,
            [name for name, parameter in options.items() if parameter.kind is not parameter.VAR_KEYWORD],
        )

    # ---- set-up and tear-down

    def check_world_size(self, world_size: int) -> None:
        if isinstance(self.dp_replicate, int):
            self._check_divides(self.dp_replicate, world_size)

    def _check_divides(self, copies: int, world_size: int) -> None:
        if world_size % copies:
            raise SettingError(
                f"dp_replicate={self.dp_replicate!r}: {copies} copies of the weights cannot be spread evenly over "
                f"{world_size} processes. Choose a divisor of their number.",
                field="dp_replicate",
                got=self.dp_replicate,
            )

    def connect(self, device: torch.device, precision: Precision) -> None:
        super().connect(device, precision)
        if device.type == "mps":
            raise self._refused(
                "gathers weights from other processes, and torch has no such thing on mps. Use accelerator='cpu' to "
                "try it, or one process with strategy='single_device'."
            )
        if not dist.is_initialized():  # sharding needs a process group even with one process
            backend = "gloo" if device.type == "cpu" else None
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        # A new process group needs a new mesh. With the same group, keep the mesh, on which a module may be sharded.
        if self._world is not dist.group.WORLD:
            self._world = dist.group.WORLD
            state, copies = PartialState(), self.dp_replicate
            if isinstance(copies, str):
                copies = state.num_nodes if state.num_nodes > 1 else 2
                self._check_divides(copies, state.num_processes)
            self.mesh = self.make_mesh({"dp_replicate": copies, "dp_shard": state.num_processes // copies})
        asked, size = self.reshard_after_forward, self.mesh["dp_shard"].size()
        if asked is not None and type(asked) is not bool and not (1 < asked <= size and size % asked == 0):
            expected = f"True, False, or a divisor of the {size} processes of a copy, from 2 on"
            raise wrong("reshard_after_forward", asked, expected)

    def make_mesh(self, sizes: dict[str, int]) -> DeviceMesh:
        """Make a device mesh of all processes from the names and sizes of dimensions, outermost first. Collective."""
        return init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    @property
    def dp_mesh(self) -> DeviceMesh:
        """Device mesh over which weights are sharded: 1-dim, or 2-dim (copies, shards) if there are copies."""
        copies = "dp_replicate" in (self.mesh.mesh_dim_names or ()) and self.mesh["dp_replicate"].size() > 1
        return self.mesh["dp_replicate", "dp_shard"] if copies else self.mesh["dp_shard"]

    def model_context(self) -> AbstractContextManager[Any]:
        return torch.device("meta") if self.meta_init else nullcontext()

    def prepare_module(self, module: nn.Module) -> None:
        refuse_dispatched(self.name, module)
        self.module = module
        settings = {"precision": self.precision.name, "mp_policy": self.mp_policy, "cpu_offload": self.cpu_offload}
        settings["mesh"] = self.mesh
        self._without_values, earlier = _placed.get(module, (set(), settings))
        if differ := [name for name, value in settings.items() if value != earlier[name]]:
            was = ", ".join(f"{name}={earlier[name]}" for name in differ)
            warn_user(f"an earlier run has sharded this module, and it keeps {was}. For another, make a new module")
        if module not in _placed:  # no earlier run has sharded the module
            self._freed.clear()
            before = dict(module.named_parameters(remove_duplicate=False))
            self.precision.convert_module(module)
            self.parallelize(module)
            self.shard(module)
            self._read_shards(module)
            self._bring(module)
            _placed[module] = self._without_values, settings
            self._became = {
                id(before[name]): (ref(before[name]), parameter)
                for name, parameter in module.named_parameters(remove_duplicate=False)
                if name in before
            }
        self._sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._reshard()
        # Record the sharded parameters now: while a block is gathered, the module has other parameters.
        self._parameters = list(module.parameters())

    @contextmanager
    def changing_trainable(self) -> Iterator[None]:
        self._reshard()  # the parameters of a gathered block are temporary
        yield
        for part in self._sharded:
            for group in _param_groups(part):
                # Set the dtypes for the reduction of gradients, which torch has not set for frozen parameters.
                group._init_mp_dtypes()

    def _read_shards(self, module: nn.Module) -> None:
        """Read the stored values of parameters that are on the meta device; each rank reads only its shards."""
        device = torch.device("cpu") if self.cpu_offload else self.device
        if not read_values(module, device, lambda stored, like: take_part(stored, like, device)):
            return
        for part in module.modules():
            if isinstance(part, FSDPModule):
                for group in _param_groups(part):
                    for entry in group.fsdp_params:
                        entry.reset_sharded_param()

    def _bring(self, module: nn.Module) -> None:
        """Move plain tensors, which `fully_shard` does not move, to the device."""
        for tensor in (*module.parameters(), *module.buffers()):
            if not isinstance(tensor, DTensor):  # a DTensor may be offloaded to the CPU on purpose
                tensor.data = tensor.data.to(self.device)

    def parallelize(self, module: nn.Module) -> None:
        """Divide the module over mesh dimensions such as "tp", before it is sharded over `dp_mesh`. Collective."""

    def shard(self, module: nn.Module) -> None:
        """Shard a module over `dp_mesh`, in place. Collective: all ranks call it.

        Args:
            module: module on any device, also the meta device; submodules may be sharded already.
        """
        for method in self.forward_methods:
            if not hasattr(module, method):
                raise wrong("forward_methods", method, f"methods that {type(module).__name__} has")
        done = any(isinstance(part, FSDPModule) for part in module.modules())
        units = {} if done else units_of(module, self.wrap_policy, self.name)
        recomputed = recomputed_of(module, self.activation_checkpointing, units)
        alone = is_manual(module)  # in manual optimization only the blocks are sharded
        maker = Materializer(self.device)

        def visit(part: nn.Module, name: str) -> None:
            maker.make(part, name)
            for key, child in part.named_children():
                visit(child, f"{name}.{key}" if name else key)
            maker.finish(part, name)
            if part in recomputed:
                recompute(part)
            if (name in units if name else not alone) and not isinstance(part, FSDPModule):
                self.share_weights(part)
                if self.compile is not None and name:
                    part.forward = torch.compile(part.forward, **self.compile)  # the part's hooks are not compiled
                self._fully_shard(part, root=not name, alone=alone)

        visit(module, "")
        self._without_values |= maker.without_values
        self._set_prefetch([part for name, part in units.items() if isinstance(part, FSDPModule)])
        for method in self.forward_methods:
            if isinstance(module, FSDPModule):
                setattr(module, method, gathered_methods(module).through(getattr(module, method), module))

    def share_weights(self, module: nn.Module) -> None:
        """Copy rank 0's weights and buffers to every rank, except those that are sharded. Collective."""
        broadcast_weights(module, skip=lambda tensor: isinstance(tensor, DTensor) or tensor.is_meta)

    def _fully_shard(self, module: nn.Module, root: bool, alone: bool) -> None:
        reshard = self.reshard_after_forward
        if root and reshard is not False:
            # None keeps the root's weights gathered after its forward, since a step may call the forward again.
            reshard = None
        elif alone and reshard is None:
            # Reshard after the forward even for the last block: there may be no backward, as in a GAN.
            reshard = True
        sharded = fully_shard(
            module,
            mesh=self.dp_mesh,
            reshard_after_forward=reshard,
            mp_policy=self._dtypes(root),
            offload_policy=CPUOffloadPolicy(self.device.type != "cpu") if self.cpu_offload else OffloadPolicy(),
        )
        if not root and not alone and type(reshard) is not int and reshard is not False:
            self._freed.append(sharded)

    def _dtypes(self, root: bool) -> MixedPrecisionPolicy:
        if self.mp_policy is not None:
            return self.mp_policy
        compute = self.precision.compute_dtype
        if compute is None or self.precision.dtype is not None:
            return MixedPrecisionPolicy()
        # Autocast is still used, for losses and norms. The root module's inputs are not cast: they include targets.
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=not root)

    def _set_prefetch(self, parts: Sequence[Any]) -> None:
        for index, part in enumerate(parts):
            if self.forward_prefetch:
                part.set_modules_to_forward_prefetch(list(parts[index + 1 : index + 1 + self.forward_prefetch]))
            if self.backward_prefetch:
                before = parts[max(0, index - self.backward_prefetch) : index]
                part.set_modules_to_backward_prefetch(list(reversed(before)))

    def prepare_training(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if self._without_values:
            raise no_values(module, self._without_values)

    def wrap(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        # `prepare_module` has not been called if the caller moves models to devices itself.
        if self.__dict__.get("module") is not module or not self._parameters:
            self.prepare_module(module)
        self.prepare_training(module, optimizers)
        return module

    def parameters(self) -> Iterable[nn.Parameter]:
        return self._parameters

    def rebind_optimizer(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for index, old in enumerate(group["params"]):
                known, new = self._became.get(id(old), (None, None))
                if known is None or new is None or known() is not old:
                    continue
                group["params"][index] = new
                state = optimizer.state.pop(old, None)
                if state is not None:
                    optimizer.state[new] = {key: take_state(value, new) for key, value in state.items()}

    # ---- the step

    def step_function(self, name: str) -> Callable[..., Any]:
        step = self._gathering(name)
        if name == "training_step":
            return step

        def evaluate(*args: Any) -> Any:
            try:
                return step(*args)
            finally:  # reshard, since weights that stay gathered would become stale
                self._reshard()

        return evaluate

    def _gathering(self, name: str) -> Callable[..., Any]:
        """Return a step method wrapped so that it gathers weights as `forward` does."""
        module = self.module
        if not isinstance(module, FSDPModule):
            return super().step_function(name)
        return gathered_methods(module).through(getattr(module, name), module)

    def abandon_step(self) -> None:
        for part in self._sharded:
            state = part._get_fsdp_state()
            if state._is_root and hasattr(part, "reset_iter_state"):
                part.reset_iter_state()
            elif state._training_state.name != "IDLE":
                raise self._refused("cannot go on after a step that was left in the middle; torch can from 2.13 on.")
        gradients: Any = self.gradients
        for entry in gradients.gathered():  # delete gradients that are not reduced yet
            entry._unsharded_param.grad = entry.unsharded_accumulated_grad = None
        self._reshard()

    def _reshard(self) -> None:
        for part in self._sharded:
            part.reshard()

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.accumulate_sharded else self._local_gradients()

    @contextmanager
    def _local_gradients(self) -> Iterator[None]:
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(True)

    def _set_sync(self, sync: bool) -> None:
        for part in self._sharded:
            part.set_requires_gradient_sync(sync, recurse=False)
            part.set_reshard_after_backward(sync, recurse=False)
            part.set_is_last_backward(sync)
        for part in self._freed:
            part.set_reshard_after_forward(sync, recurse=False)

    # ---- state

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        own = self.module.state_dict()
        taken: dict[str, Any] = {}
        for name, value in state.items():
            like = own.get(name)
            if not isinstance(like, Tensor) or not hasattr(value, "shape"):
                taken[name] = whole(value)
            elif value.shape == like.shape:
                taken[name] = take_part(value, like)
            else:
                # Pass on a tensor of the wrong shape, so that load_state_dict raises its usual error.
                taken[name] = torch.empty(value.shape, device="meta")
        result = self.module.load_state_dict(taken, strict=strict)
        self._without_values -= state.keys()
        return result

    def local_weights(self) -> dict[str, Tensor]:
        self._reshard()
        return {name: local_part(value) for name, value in super().local_weights().items()}

    def model_state_from(self, held: Mapping[str, Tensor]) -> dict[str, Any]:
        state = self.module.state_dict()
        return state | {name: with_local(value, state[name]) for name, value in held.items()}

    def local_part(self, name: str, value: Any) -> Tensor:
        return local_part(take_part(value, self.module.state_dict(keep_vars=True)[name]))

    def full_model_state(self) -> dict[str, Any]:
        main = PartialState().is_main_process
        first = _first_names(self.module)
        gathered: dict[str, Any] = {}
        for name, value in self.model_state().items():
            if first.get(name, name) in gathered:
                gathered[name] = gathered[first[name]]  # gather a tied parameter only once
                continue
            value = gather_whole(value)
            gathered[name] = value.cpu() if main and isinstance(value, Tensor) else value if main else None
        return gathered if main else {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._reshard()  # reshard first, since names are known only for sharded parameters
        return optimizer_state(self.module, optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, tree: Mapping[str, Any], strict: bool = True) -> list[str]:
        self._reshard()
        parameters = {name: p for p, name in names_of(self.module, [optimizer]).items()}
        return load_optimizer_state(self.module, optimizer, take_parts(tree, parameters), strict)

    def local_shards(self, tree: Any) -> Any:
        return parts_to_write(tree, PartialState().is_main_process, self.mesh)


def _param_groups(part: FSDPModule) -> list[Any]:
    """Return FSDP2's private groups (FSDPParamGroup) of parameters that are gathered together."""
    state = part._get_fsdp_state()
    return [group for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] if group]


def _first_names(module: nn.Module) -> dict[str, str]:
    """Return a dict from each name of a parameter to its first name; a tied parameter has several names."""
    firsts: dict[Tensor, str] = {}
    return {name: firsts.setdefault(p, name) for name, p in module.named_parameters(remove_duplicate=False)}
