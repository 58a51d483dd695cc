"""Local SGD: replicas take their own optimizer steps, and are averaged every few steps.

`average_weights` averages them, for DDP's `comm_hook="post_local_sgd"` and for `instep.accelerator.LocalSGD`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from instep.distributed import all_reduce_, gather_object, reduce
from instep.distributed.nested import map_leaves
from instep.errors import SettingError
from instep.state import read_environment
from instep.strategies.comm_hooks import mean_of
from instep.utils.checks import FLAG, at_least, check_fields
from instep.utils.optimizer_state import load_optimizer_state, optimizer_state
from instep.utils.warn import warn_user


@dataclass(frozen=True)
class LocalSGDPlan:
    """Plan of when replicas are averaged.

    Args:
        period: optimizer steps between two averages of the weights.
        warmup_steps: number of first optimizer steps in which gradients are averaged over all ranks as usual.
        within_node: whether gradients are still averaged over the ranks of each machine after these steps.

    Raises:
        SettingError: a value is wrong.
    """

    period: Annotated[int, at_least(1)] = 8
    warmup_steps: Annotated[int, at_least(0)] = 0
    within_node: Annotated[bool, FLAG] = False

    def __post_init__(self) -> None:
        check_fields(self)

    @staticmethod
    def of(state: Mapping[str, Any]) -> LocalSGDPlan:
        """Return the plan for `DDPStrategy(comm_state=...)`."""
        try:
            return LocalSGDPlan(**state)
        except TypeError as error:
            raise SettingError(
                f"comm_state={dict(state)!r} cannot be used: {error}. comm_hook='post_local_sgd' takes period, "
                "warmup_steps and within_node.",
                field="comm_state",
                got=state,
            ) from error

    def start(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> PostLocalSGD:
        """Start the local SGD of a module according to this plan."""
        return PostLocalSGD(self, module, optimizers)


@torch.no_grad()
def average_weights(tensors: Iterable[Tensor]) -> None:
    """Average weights and buffers over all ranks, in place, except integer ones. Collective.

    Args:
        tensors: tensors of one model, with the same number and shapes on all ranks.
    """
    for tensor in tensors:
        if _differs(tensor):
            tensor.copy_(all_reduce_(tensor.detach().clone(memory_format=torch.contiguous_format), "mean"))


class PostLocalSGD:
    """Local SGD of one module under DDP, after steps in which gradients are averaged.

    Args:
        plan: when the replicas are averaged.
        module: this rank's replica.
        optimizers: optimizers that step it together.
    """

    def __init__(self, plan: LocalSGDPlan, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.plan = plan
        self.steps = 0
        """Optimizer steps so far."""
        self.drifted = False
        """Whether replicas have stepped by themselves since the last mean."""
        self._module, self._optimizers = module, list(optimizers)
        self._node = _node_group() if plan.within_node else None
        self._ddp: DistributedDataParallel | None = None
        # one of them is enough, since all optimizers step together
        self._handle = self._optimizers[-1].register_step_post_hook(self._stepped)

    @property
    def apart(self) -> bool:
        """Whether each replica takes the next step on its own."""
        return self.steps >= self.plan.warmup_steps

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Register in a DDP whether gradients are averaged, and over which ranks, according to the plan."""

        def travel(_, bucket):  # without annotations: torch compares them with classes, and in this file they are texts
            if not self.apart or self._node is not None:
                return mean_of(bucket.buffer(), self._node if self.apart else None)
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        ddp.register_comm_hook(None, travel)
        self._ddp = ddp
        self._part()

    def detach(self) -> None:
        """Stop counting steps."""
        self._handle.remove()
        self._ddp = None

    def _stepped(self, *_: Any) -> None:
        self.drifted = self.drifted or self.apart
        self.steps += 1
        self._part()
        if self.apart and (self.steps - self.plan.warmup_steps) % self.plan.period == 0:
            self.average_replicas()

    def _part(self) -> None:
        """Let each replica keep its own buffers, once it trains on its own."""
        if self.apart:
            for name in ("forward_sync_buffers", "broadcast_buffers"):  # the option's name in newer and in older torch
                if hasattr(self._ddp, name):
                    setattr(self._ddp, name, False)

    def average_replicas(self) -> None:
        """Average weights and floating-point buffers over replicas, if they differ. Collective."""
        if self.drifted:
            average_weights((*self._module.parameters(), *self._module.buffers()))
        self.drifted = False

    # ---- state

    def mean(self, tree: Any) -> Any:
        """Return a state in which every floating-point tensor is averaged over the ranks. Collective."""
        return map_leaves(lambda leaf: reduce(leaf) if isinstance(leaf, Tensor) and _differs(leaf) else leaf, tree)

    def rank_state(self) -> dict[str, Any]:
        """Return the count of steps, and this rank's replica if it trains on its own."""
        if not self.apart:
            return {"steps": self.steps}
        return {
            "steps": self.steps,
            "drifted": self.drifted,
            "module": self._module.state_dict(),
            "optimizers": [optimizer_state(self._module, optimizer) for optimizer in self._optimizers],
        }

    def load_rank_state(self, state: Mapping[str, Any], own: bool) -> None:
        """Load the result of `rank_state`, after the averaged state is loaded.

        Args:
            state: state of this rank, or of rank 0.
            own: whether it is this rank's state; from rank 0's state only the count is used.
        """
        self.steps = state["steps"]
        self._part()
        if own and "module" in state:
            self._module.load_state_dict(state["module"])
            # Older checkpoints have a single optimizer.
            trees = state["optimizers"] if "optimizers" in state else [state["optimizer"]]
            for optimizer, tree in zip(self._optimizers, trees, strict=True):
                load_optimizer_state(self._module, optimizer, tree)
            self.drifted = state["drifted"]


def _differs(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _node_group() -> Any:
    """Make the group of this machine's ranks. Warn if these are all ranks."""
    if read_environment().num_nodes == 1:
        warn_user(
            "comm_hook='post_local_sgd' with within_node=True averages gradients over the ranks of a machine in every "
            "step, and all ranks of this run are on one: nothing is local. Set within_node=False"
        )
    nodes = gather_object(read_environment().node_rank)
    ranks = [[rank for rank, node in enumerate(nodes) if node == each] for each in sorted(set(nodes))]
    return torch.distributed.new_subgroups_by_enumeration(ranks)[0]
