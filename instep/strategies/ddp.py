"""`DDPStrategy`: data parallelism with a copy of the model in each process, by torch's DistributedDataParallel."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from instep.distributed import broadcast
from instep.errors import DistributedError, HookError, SettingError, UsageError, one_of
from instep.state import PartialState, read_environment
from instep.strategies.base import Strategy
from instep.strategies.comm_hooks import CommHook
from instep.strategies.gradients import parameters_of
from instep.strategies.materialize import broadcast_weights, check_offloaded, dispatched_weights
from instep.strategies.precision import Precision
from instep.strategies.quantized_state import is_of_torchao, quantized_tensors
from instep.strategies.step_forward import StepForward
from instep.strategies.zero import OptimizerShards, consolidate, is_divided, load_part, part_state
from instep.utils.checks import FLAG, above_zero

if TYPE_CHECKING:
    from instep.strategies.local_sgd import LocalSGDPlan, PostLocalSGD

_TORCH_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_OURS = ("module", "device_ids", "output_device", "dim", "check_reduction", "forward_sync_buffers")


class NamingDDP(DistributedDataParallel):
    """torch's DDP, with the names of the parameters in its error for parameters without a gradient."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if found is None:
                raise
            module = self.module.module if isinstance(self.module, StepForward) else self.module
            names = [name for name, p in module.named_parameters() if p.requires_grad]
            unused = ", ".join(names[int(index)] for index in found.group(1).split())
            raise HookError(
                f"these parameters took no part in the last loss, so its gradients were never complete: {unused}. Use "
                "strategy='ddp_find_unused_parameters_true' (of an Accelerator: "
                "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]), set "
                "requires_grad=False on them, or let the loss need them."
            ) from error


class BucketOrder:
    """The order in which gradients come in the first backward; DDP builds its gradient buckets in this order.

    Args:
        ddp: a DDP module before its first backward.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.names: list[str] = []
        """Names of the parameters in the order of their gradients; empty if this order was not recorded."""
        self._ddp: DistributedDataParallel | None = ddp
        self._parameters = _parameters(ddp)  # parameters by their present names, which pruning may change
        self._handles: list[Any] = []
        # DDP does not regroup its buckets if it searches for unused parameters. With a static graph it does, but its
        # first backward, which records the graph, must not be the one that `restore` runs. With two ranks, buckets do
        # not change how a sum is rounded.
        regroups = not ddp.find_unused_parameters and not ddp.static_graph
        if torch.distributed.get_world_size(ddp.process_group) > 2 and regroups:
            self._handles = [
                p.register_post_accumulate_grad_hook(self._note(ddp, name)) for name, p in self._parameters.items()
            ]

    def _note(self, ddp: DistributedDataParallel, name: str) -> Any:
        def note(_: Tensor) -> None:
            if ddp.require_backward_grad_sync:
                self.names.append(name)
                if len(self.names) == len(self._handles):
                    self.stop()

        return note

    def stop(self) -> None:
        """Stop recording the order of gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._ddp = [], None

    def restore(self, names: Sequence[str]) -> None:
        """Make DDP build the same buckets as an earlier run, from that run's order of parameter names. Collective."""
        ddp = self._ddp
        if ddp is None or not self._handles:
            return
        parameters = self._parameters
        if len(names) != len(parameters) or set(names) != set(parameters):
            return
        self.stop()
        self.names = list(names)
        with torch.enable_grad():  # the names are reversed, since the backward visits the last operation first
            loss = torch.stack([(parameters[name].flatten()[:1] * 0).sum() for name in reversed(names)]).sum()
        reducer: Any = ddp.reducer
        reducer.prepare_for_backward([])
        loss.backward()
        for p in parameters.values():
            p.grad = None
        reducer._rebuild_buckets()


def _parameters(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    return {name: p for name, p in ddp.named_parameters() if p.requires_grad}


class DDPStrategy(Strategy):
    """`DistributedDataParallel`: gradients are averaged over processes during the backward.

    Args:
        find_unused_parameters: whether to search in each step for parameters that were not used. None: only in manual
            optimization, where one backward seldom reaches all parameters (such as the halves of a GAN).
        static_graph: promise that every step uses the same parameters in the same way; unused parameters are then
            searched only once.
        bucket_cap_mb: size of a gradient bucket in MiB; None: torch's default (1 for the first bucket, 25 for others).
        gradient_as_bucket_view: whether gradients are views of the buckets, which saves a copy.
        broadcast_buffers: whether each forward begins with the buffers of rank 0.
        comm_hook: how gradients are communicated. "no": unchanged. "fp16" and "bf16": rounded to 16 bits. "power_sgd":
            as low-rank factors, from step `start_powerSGD_iter` on (1000 by default). "post_local_sgd": gradients are
            not communicated, or only within each machine, and weights are averaged every few steps. The error memory of
            PowerSGD is not part of a checkpoint, so a resumed run starts it anew.
        comm_wrapper: "fp16" or "bf16": dtype to which gradients are rounded before PowerSGD.
        comm_state: arguments of torch's `PowerSGDState`, such as `{"matrix_approximation_rank": 2}`; for
            "post_local_sgd" arguments of `LocalSGDPlan`, such as `{"period": 8, "warmup_steps": 100}`.
        zero_redundancy_optimizer: whether each rank keeps the optimizer's state only for its part of the parameters,
            steps this part, and sends it to the other ranks (ZeRO stage 1). The weights are bit-identical to those
            without this option.
        consolidate_optimizer: whether the divided optimizer state is gathered in rank 0's memory for a checkpoint,
            which is then the same as without `zero_redundancy_optimizer`. Otherwise each rank writes its own part. Both
            forms can be loaded under any strategy and world size.
        **ddp_options: other arguments of `torch.nn.parallel.DistributedDataParallel`, such as `process_group`.

    Raises:
        SettingError: an argument is wrong, or two arguments contradict each other. (When training starts:) the device,
            the precision or the optimizers do not support an option.

    Example:
        >>> DDPStrategy(gradient_as_bucket_view=True, comm_hook="bf16").name
        'ddp'

    Source:
        Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019 (https://arxiv.org/abs/1905.13727), as built in torch. Lin,
        Stich, Patel, Jaggi: Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020 (https://arxiv.org/abs/1808.07217).
    """

    name = "ddp"
    multi_process = True

    def __init__(
        self,
        find_unused_parameters: bool | None = None,
        *,
        static_graph: bool = False,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool = True,
        comm_hook: str = "no",
        comm_wrapper: str = "no",
        comm_state: Mapping[str, Any] | None = None,
        zero_redundancy_optimizer: bool = False,
        consolidate_optimizer: bool = False,
        **ddp_options: Any,
    ) -> None:
        flags = {
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "broadcast_buffers": broadcast_buffers,
            "zero_redundancy_optimizer": zero_redundancy_optimizer,
            "consolidate_optimizer": consolidate_optimizer,
        }
        if find_unused_parameters is not None:
            flags["find_unused_parameters"] = find_unused_parameters
        for field, value in flags.items():
            FLAG(field, value)
        if bucket_cap_mb is not None:
            above_zero("of MiB above 0, or None")("bucket_cap_mb", bucket_cap_mb)
        for field in ddp_options:
            if field not in _TORCH_OPTIONS or field in _OURS:
                raise one_of(
                    "DDPStrategy's option", field, [option for option in _TORCH_OPTIONS if option not in _OURS]
                )
        self.hook = CommHook(comm_hook, comm_wrapper, dict(comm_state or {}))
        self.local_sgd_plan: LocalSGDPlan | None = None
        if comm_hook == "post_local_sgd":
            from instep.strategies.local_sgd import LocalSGDPlan  # imported late: rarely used

            self.local_sgd_plan = LocalSGDPlan.of(self.hook.state)
        self.replicas_diverge = self.local_sgd_plan is not None
        if consolidate_optimizer and not zero_redundancy_optimizer:
            raise _wrong("consolidate_optimizer", True, "belongs to zero_redundancy_optimizer=True; leave it out")
        if zero_redundancy_optimizer and self.local_sgd_plan is not None:
            raise _wrong(
                "zero_redundancy_optimizer", True, "needs replicas that are alike; comm_hook='post_local_sgd' is not"
            )
        self.find_unused_parameters = find_unused_parameters
        self.zero_redundancy_optimizer = zero_redundancy_optimizer
        self.consolidate_optimizer = consolidate_optimizer
        own = {
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
        }
        # Store a copy of `ddp_options`. If the dict itself were stored, jsonargparse would find out that it is passed
        # to torch's DDP, and would fill in the defaults of torch's DDP.
        self.ddp_options = {**ddp_options, **{option: value for option, value in own.items() if value}}
        if not broadcast_buffers:
            # Newer versions of torch have another name for this option, and warn about the old one.
            new, old = "forward_sync_buffers", "broadcast_buffers"
            self.ddp_options[new if new in _TORCH_OPTIONS else old] = False
        self._ddp: DistributedDataParallel | None = None
        self._order: BucketOrder | None = None
        self._local_sgd: PostLocalSGD | None = None
        self._shards: list[OptimizerShards | None] = []
        self._optimizers: Sequence[Optimizer] = ()
        self._trainable: set[nn.Parameter] = set()
        """Parameters that required gradients when DDP was last set up."""
        self._manual = False
        self._syncs = True

    def __deepcopy__(self, memo: dict[int, Any]) -> DDPStrategy:
        other = memo[id(self)] = copy(self)
        shared = {id(option): option for option in self.ddp_options.values()}  # a process group cannot be copied
        other.__dict__ = deepcopy(self.__getstate__(), memo | shared)
        return other

    # ---- set-up and tear-down

    def connect(self, device: torch.device, precision: Precision) -> None:
        super().connect(device, precision)
        parts = self.zero_redundancy_optimizer and not self.consolidate_optimizer
        self.sharded = parts and PartialState().num_processes > 1
        if self.local_sgd_plan is not None and precision.scaler is not None:
            raise _wrong(
                "comm_hook", "post_local_sgd", f"needs a precision without gradient scaling, not {precision.name!r}: "
                "ranks on their own would leave out different steps. Use precision='bf16-mixed'"
            )  # fmt: skip

    def prepare_training(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._manual = not getattr(module, "automatic_optimization", True)
        if self._manual and self.ddp_options.get("static_graph"):
            raise _wrong("static_graph", True, "needs one backward per step; manual optimization may have several")
        check_offloaded(module, optimizers)
        spreads = self._spreads(module, trains=bool(optimizers))
        self._optimizers, self._trainable = optimizers, _trainable(module)
        if spreads:
            self._ddp = self._distribute(StepForward(module), optimizers, unused=self._manual)

    @contextmanager
    def changing_trainable(self) -> Iterator[None]:
        yield
        before, self._trainable = self._trainable, _trainable(self.module)
        if self._optimizers and before != self._trainable and torch.distributed.is_initialized():
            again, self._ddp = self._ddp is not None, None
            if self._order is not None:
                self._order.stop()
            if self._trainable:
                self._ddp = self._distribute(
                    StepForward(self.module), self._optimizers, unused=self._manual, again=again
                )

    def wrap(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        if self.local_sgd_plan is not None:
            raise _wrong("comm_hook", "post_local_sgd", "is the Trainer's; a handwritten loop has accelerator.LocalSGD")
        if not self._spreads(module, trains=True):
            return module
        self._ddp = self._distribute(module, optimizers, unused=False)
        return self._ddp

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped

    def _spreads(self, module: nn.Module, trains: bool) -> bool:
        """Release an earlier DDP, and return True if the module needs a new one.

        If nothing is trained, only copy rank 0's weights to all ranks, and return False.
        """
        self.teardown()
        if not torch.distributed.is_initialized():
            world_size = read_environment().world_size
            if world_size > 1:
                raise DistributedError(
                    f"this process is one of {world_size}, but their process group is gone, so that each would train "
                    "by itself. Leave it alone until the run has ended: something called destroy_process_group()."
                )
            return False
        if trains and any(p.requires_grad for p in module.parameters()):
            return True
        # The weights of dispatched models need no copy, since each rank has read them from the same files.
        broadcast_weights(module, skip=dispatched_weights(module).__contains__)
        return False

    def _distribute(
        self, module: nn.Module, optimizers: Sequence[Optimizer], unused: bool, again: bool = False
    ) -> DistributedDataParallel:
        """Wrap the module in torch's DDP; with `again` (during training), do not copy rank 0's weights and buffers."""
        kept = dispatched_weights(module)
        # DDP cannot copy these parameters from rank 0. Torchao's tensors are copied below. Offloaded weights need no
        # copy, since each rank has read them from the same files.
        ignored = [
            name
            for name, p in module.named_parameters()
            if is_of_torchao(p) or (p in kept and p.is_meta and not p.requires_grad)
        ]
        if ignored:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        if not again:
            with torch.no_grad():
                for tensor in quantized_tensors(module):  # DDP does not copy these tensors, which are no parameters
                    tensor.copy_(broadcast(tensor))
        ddp = NamingDDP(
            module,
            device_ids=None if self.device.type == "cpu" else [self.device],
            find_unused_parameters=unused if self.find_unused_parameters is None else self.find_unused_parameters,
            **{**self.ddp_options, **({"init_sync": False} if again else {})},
        )
        self.hook.register(ddp)
        self._order = None
        # With these three hooks the rounding of gradients depends on the buckets, which a resumed run must build again.
        if not self._manual and self.hook.name in ("no", "fp16", "bf16"):
            self._order = BucketOrder(ddp)
        if self.local_sgd_plan is not None:
            if len(optimizers) > 1 and self._manual:
                raise _wrong("comm_hook", "post_local_sgd", f"counts the steps of one optimizer, not {len(optimizers)}")
            if self._local_sgd is None or not again:
                self._local_sgd = self.local_sgd_plan.start(self.module, optimizers)
            self._local_sgd.attach(ddp)
        self._shards = [self._divide(optimizer) for optimizer in optimizers]
        return ddp

    def _divide(self, optimizer: Optimizer) -> OptimizerShards | None:
        return OptimizerShards.attach(optimizer) if self.zero_redundancy_optimizer else None

    def rebind_optimizer(self, optimizer: Optimizer) -> None:
        own = set(self.module.parameters())
        if self._ddp is not None and not own.isdisjoint(parameters_of(optimizer)):
            self._shards.append(self._divide(optimizer))

    def teardown(self) -> None:
        # Keep the state of local SGD for a checkpoint that is saved after the run.
        self._ddp, self._optimizers = None, ()
        if self._order is not None:
            self._order.stop()
        if self._local_sgd is not None:
            self._local_sgd.detach()
        for shards in self._shards:
            if shards is not None:
                shards.detach()

    # ---- the step

    def abandon_step(self) -> None:
        # Remove DDP's autograd hooks, so that a later backward does not wait for gradients of the interrupted step.
        if self._ddp is not None:
            self._ddp.reducer._remove_autograd_hooks()
            self.teardown()

    def step_function(self, name: str) -> Callable[..., Any]:
        ddp = self._ddp
        if ddp is None or name != "training_step":
            return super().step_function(name)
        if not self._manual:
            return lambda *args: ddp(name, *args)

        def manual_step(*args: Any) -> Any:
            # In manual optimization the backward runs inside of the step, so DDP must not prepare its reducer at the
            # forward. `prepare_backward` does it for each backward.
            ddp.require_backward_grad_sync = False
            try:
                return ddp(name, *args)
            finally:
                ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True

        return manual_step

    def prepare_backward(self, loss: Tensor) -> None:
        ddp = self._ddp
        if ddp is None or not self._manual or not self._syncs or not torch.is_grad_enabled():
            return
        ddp.reducer.prepare_for_backward([loss] if ddp.find_unused_parameters and not ddp.static_graph else [])

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._ddp is None else self._without_sync(self._ddp)

    @contextmanager
    def _without_sync(self, ddp: DistributedDataParallel) -> Iterator[None]:
        if ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
            yield  # a static graph is recorded in the first backward, which must reduce gradients
            return
        # `prepare_backward` reads `_syncs` to know whether to reduce gradients. DDP's own flag for this,
        # `require_backward_grad_sync`, is False in each step of manual optimization.
        before, self._syncs = self._syncs, False
        try:
            with ddp.no_sync():
                yield
        finally:
            self._syncs = before

    def join(self) -> AbstractContextManager[Any]:
        if self._ddp is None:
            return super().join()
        if self.zero_redundancy_optimizer or self.local_sgd_plan is not None:
            raise UsageError(
                "ranks cannot wait for each other's last batches where their optimizer steps meet, as with "
                "zero_redundancy_optimizer=True and comm_hook='post_local_sgd'. Give all ranks as many batches."
            )
        return self._ddp.join(divide_by_initial_world_size=True)

    def average_replicas(self) -> None:
        if self._local_sgd is not None:
            self._local_sgd.average_replicas()  # averages weights and buffers
        elif self.ddp_options.keys().isdisjoint(("broadcast_buffers", "forward_sync_buffers")):
            # Neither option is set, so ranks do not keep their own buffers: copy rank 0's buffers to all ranks.
            super().average_replicas()

    # ---- state

    def model_state(self) -> dict[str, Any]:
        state = super().model_state()
        return self._local_sgd.mean(state) if self._local_sgd is not None and self._local_sgd.drifted else state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        tree = part_state(self.module, optimizer)
        if self._local_sgd is not None and self._local_sgd.apart:
            tree["state"] = self._local_sgd.mean(tree["state"])
        return consolidate(tree) if is_divided(optimizer) and not self.sharded else tree

    def load_optimizer_state(self, optimizer: Optimizer, tree: Mapping[str, Any], strict: bool = True) -> list[str]:
        return load_part(self.module, optimizer, tree, strict)

    def holds_all(self, optimizers: Sequence[Optimizer]) -> bool:
        return not self.sharded and self._local_sgd is None and not any(map(is_divided, optimizers))

    def local_shards(self, tree: Any) -> Any:
        if PartialState().is_main_process:
            return tree
        return _of_optimizers(tree) if self.sharded else None

    def rank_state(self) -> dict[str, Any]:
        if self._local_sgd is not None:
            return self._local_sgd.rank_state()
        return {"buckets": self._order.names} if self._order is not None and self._order.names else {}

    def load_rank_state(self, state: Mapping[str, Any], own: bool) -> None:
        if self._local_sgd is not None and "steps" in state:
            self._local_sgd.load_rank_state(state, own)
        if self._order is not None and own:
            self._order.restore(state.get("buckets", ()))


def _trainable(module: nn.Module) -> set[nn.Parameter]:
    return {p for p in module.parameters() if p.requires_grad}


def _of_optimizers(tree: Any) -> Any:
    """Return only the optimizer states of a tree. Each rank has a part of these; the weights are equal on all ranks."""
    if isinstance(tree, list):
        return [part for part in map(_of_optimizers, tree) if part is not None] or None
    return tree if isinstance(tree, Mapping) and {"optimizer", "shapes", "groups"} <= tree.keys() else None


def _wrong(field: str, value: Any, problem: str) -> SettingError:
    return SettingError(f"DDPStrategy: {field}={value!r} {problem}.", field=field, got=value)
