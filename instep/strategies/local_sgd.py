"""Local SGD: replicas take optimizer steps of their own, and their mean every few of them.

`average_weights` takes the mean, for DDP's `comm_hook="post_local_sgd"` here and for `instep.accelerator.LocalSGD`.
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
    """Plan that says when replicas take their mean.

    Args:
        period: optimizer steps between two means of the weights.
        warmup_steps: so many optimizer steps come first in which gradients are averaged over all ranks, as always.
        within_node: whether, after that, gradients are still averaged over the ranks of each machine.

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
        """Return the plan that `DDPStrategy(comm_state=...)` asks for."""
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
    """Average weights and buffers over all ranks, in place; integer ones stay as they are. Collective.

    Args:
        tensors: of one model, alike on all ranks in number and shape.
    """
    for tensor in tensors:
        if _differs(tensor):
            tensor.copy_(all_reduce_(tensor.detach().clone(memory_format=torch.contiguous_format), "mean"))


class PostLocalSGD:
    """Local SGD of one module under DDP, after steps in which gradients are averaged.

    Args:
        plan: when the replicas take their mean.
        module: this rank's replica.
        optimizers: those that step it, together.
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
        self._handle = self._optimizers[-1].register_step_post_hook(self._stepped)  # all optimizers step together

    @property
    def apart(self) -> bool:
        """Whether each replica takes the next step alone."""
        return self.steps >= self.plan.warmup_steps

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Register in a DDP how far gradients are sent, according to the plan."""

        def travel(_, bucket):  # no annotations: torch compares them with classes, and here they are texts
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
        """Let each replica keep its own buffers once it trains alone."""
        if self.apart:
            for name in ("forward_sync_buffers", "broadcast_buffers"):  # names in newer and in older torch
                if hasattr(self._ddp, name):
                    setattr(self._ddp, name, False)

    def average_replicas(self) -> None:
        """Average weights and floating buffers over replicas; do nothing while they are the same. Collective."""
        if self.drifted:
            average_weights((*self._module.parameters(), *self._module.buffers()))
        self.drifted = False

    # ---- state

    def mean(self, tree: Any) -> Any:
        """Return a state with the mean of every floating tensor over the ranks. Collective."""
        return map_leaves(lambda leaf: reduce(leaf) if isinstance(leaf, Tensor) and _differs(leaf) else leaf, tree)

    def rank_state(self) -> dict[str, Any]:
        """Return the count of steps, and this rank's replica if it trains alone."""
        if not self.apart:
            return {"steps": self.steps}
        return {
            "steps": self.steps,
            "drifted": self.drifted,
            "module": self._module.state_dict(),
            "optimizers": [optimizer_state(self._module, optimizer) for optimizer in self._optimizers],
        }

    def load_rank_state(self, state: Mapping[str, Any], own: bool) -> None:
        """Load the state of `rank_state`, after the mean was loaded.

        Args:
            state: this rank's, or the first one's.
            own: whether it is this rank's; the first one's tells the count only.
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
    """Make the group of this machine's ranks; warn where they are all that there are."""
    if read_environment().num_nodes == 1:
        warn_user(
            "comm_hook='post_local_sgd' with within_node=True averages gradients over the ranks of a machine in every "
            "step, and all ranks of this run are on one: nothing is local. Set within_node=False"
        )
    nodes = gather_object(read_environment().node_rank)
    ranks = [[rank for rank, node in enumerate(nodes) if node == each] for each in sorted(set(nodes))]
    return torch.distributed.new_subgroups_by_enumeration(ranks)[0]
