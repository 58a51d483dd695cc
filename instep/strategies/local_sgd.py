"""Local SGD: each rank steps its own copy of the weights, and the copies are averaged every few steps.

It is used by DDP's `comm_hook="post_local_sgd"` and by `instep.accelerator.LocalSGD`.
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
    """When the ranks' copies of the weights are averaged.

    Args:
        period: number of optimizer steps from one average of the weights to the next.
        warmup_steps: number of optimizer steps at the start in which gradients are averaged over all ranks as usual.
        within_node: whether gradients are averaged over the ranks of each machine after the warmup.

    Raises:
        SettingError: an argument is wrong.
    """

    period: Annotated[int, at_least(1)] = 8
    warmup_steps: Annotated[int, at_least(0)] = 0
    within_node: Annotated[bool, FLAG] = False

    def __post_init__(self) -> None:
        check_fields(self)

    @staticmethod
    def of(state: Mapping[str, Any]) -> LocalSGDPlan:
        """Make a plan from the argument `comm_state` of `DDPStrategy`."""
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
        """Start local SGD for a module by this plan."""
        return PostLocalSGD(self, module, optimizers)


@torch.no_grad()
def average_weights(tensors: Iterable[Tensor]) -> None:
    """Average weights and buffers over all ranks in place; integer tensors are not changed. Collective.

    Args:
        tensors: tensors of one model, with the same number and shapes on all ranks.
    """
    for tensor in tensors:
        if _differs(tensor):
            tensor.copy_(all_reduce_(tensor.detach().clone(memory_format=torch.contiguous_format), "mean"))


class PostLocalSGD:
    """Local SGD for a module under DDP, which begins after the warmup steps of the plan.

    Args:
        plan: when the copies of the weights are averaged.
        module: this rank's copy of the module.
        optimizers: optimizers of the module, which step together.
    """

    def __init__(self, plan: LocalSGDPlan, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.plan = plan
        self.steps = 0
        """Number of optimizer steps so far."""
        self.drifted = False
        """Whether replicas have stepped independently since they were averaged last."""
        self._module, self._optimizers = module, list(optimizers)
        self._node = _node_group() if plan.within_node else None
        self._ddp: DistributedDataParallel | None = None
        # A hook on one optimizer is enough to count steps, since all optimizers step together.
        self._handle = self._optimizers[-1].register_step_post_hook(self._stepped)

    @property
    def apart(self) -> bool:
        """Whether the warmup is over, so that the next step is local."""
        return self.steps >= self.plan.warmup_steps

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Register a communication hook in a DDP module.

        In the warmup, the hook averages gradients over all ranks. Later it averages them over the ranks of this machine
        if the plan has `within_node`, and else leaves them as they are.
        """

        def travel(_, bucket):  # not annotated: DDP checks annotations, which would be strings in this file
            if not self.apart or self._node is not None:
                return mean_of(bucket.buffer(), self._node if self.apart else None)
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        ddp.register_comm_hook(None, travel)
        self._ddp = ddp
        self._part()

    def detach(self) -> None:
        """Remove the optimizer hook that counts steps."""
        self._handle.remove()
        self._ddp = None

    def _stepped(self, *_: Any) -> None:
        self.drifted = self.drifted or self.apart
        self.steps += 1
        self._part()
        if self.apart and (self.steps - self.plan.warmup_steps) % self.plan.period == 0:
            self.average_replicas()

    def _part(self) -> None:
        """Stop DDP from copying rank 0's buffers, if local steps have begun."""
        if self.apart:
            for name in ("forward_sync_buffers", "broadcast_buffers"):  # names in new and old versions of torch
                if hasattr(self._ddp, name):
                    setattr(self._ddp, name, False)

    def average_replicas(self) -> None:
        """Average weights and floating-point buffers over ranks, if local steps have made them differ. Collective."""
        if self.drifted:
            average_weights((*self._module.parameters(), *self._module.buffers()))
        self.drifted = False

    # ---- state

    def mean(self, tree: Any) -> Any:
        """Return a state in which every floating-point tensor is averaged over the ranks. Collective."""
        return map_leaves(lambda leaf: reduce(leaf) if isinstance(leaf, Tensor) and _differs(leaf) else leaf, tree)

    def rank_state(self) -> dict[str, Any]:
        """Return the number of steps and, after the warmup, this rank's weights and optimizer states."""
        if not self.apart:
            return {"steps": self.steps}
        return {
            "steps": self.steps,
            "drifted": self.drifted,
            "module": self._module.state_dict(),
            "optimizers": [optimizer_state(self._module, optimizer) for optimizer in self._optimizers],
        }

    def load_rank_state(self, state: Mapping[str, Any], own: bool) -> None:
        """Load a result of `rank_state`, after the averaged state was loaded.

        Args:
            state: state of this rank, or of rank 0.
            own: whether `state` is the state of this rank; from the state of rank 0 only the number of steps is used.
        """
        self.steps = state["steps"]
        self._part()
        if own and "module" in state:
            self._module.load_state_dict(state["module"])
            # Checkpoints of older versions of instep have a single optimizer state, under the key `optimizer`.
            trees = state["optimizers"] if "optimizers" in state else [state["optimizer"]]
            for optimizer, tree in zip(self._optimizers, trees, strict=True):
                load_optimizer_state(self._module, optimizer, tree)
            self.drifted = state["drifted"]


def _differs(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _node_group() -> Any:
    """Make the process group of the ranks on this machine; warn if these are all ranks."""
    if read_environment().num_nodes == 1:
        warn_user(
            "comm_hook='post_local_sgd' with within_node=True averages gradients over the ranks of a machine in every "
            "step, and all ranks of this run are on one: nothing is local. Set within_node=False"
        )
    nodes = gather_object(read_environment().node_rank)
    ranks = [[rank for rank, node in enumerate(nodes) if node == each] for each in sorted(set(nodes))]
    return torch.distributed.new_subgroups_by_enumeration(ranks)[0]
