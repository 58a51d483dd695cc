"""ZeRO stage 1 under DDP: each rank keeps optimizer state for its part of the parameters, and updates only that part.

After the step, each rank sends its part of the weights to all ranks. The optimizer stays the user's object, with all
parameters in its groups, so schedulers, clipping and parameter names work as without ZeRO. During a step, the gradients
of other ranks' parameters are None. Every torch optimizer skips such parameters, so it has state only for this rank's
parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.distributed import control_group, gather_object
from instep.distributed.nested import iter_leaves, map_leaves
from instep.errors import SettingError
from instep.state import PartialState
from instep.strategies.gradients import parameters_of
from instep.utils.optimizer_state import load_optimizer_state, names_of, optimizer_state, whole

_BUFFER_BYTES = 25 * 2**20  # bytes per broadcast, as for DDP's initial broadcast of weights
# The OptimizerShards of each optimizer, since several models may have the same optimizer.
_divided: WeakKeyDictionary[Optimizer, OptimizerShards] = WeakKeyDictionary()


class OptimizerShards:
    """Divide the parameter updates of an optimizer among the ranks.

    Args:
        optimizer: optimizer that updates every parameter separately, as all of torch's do except L-BFGS. Its state for
            other ranks' parameters is deleted.

    Raises:
        SettingError: the optimizer cannot be divided.

    Source:
        Rajbhandari, Rasley, Ruwase, He: ZeRO, SC 2020 (https://arxiv.org/abs/1910.02054); torch's
        ZeroRedundancyOptimizer divides parameters in the same way, the largest first.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if type(optimizer).__name__ == "LBFGS":
            raise SettingError(
                "zero_redundancy_optimizer=True cannot divide LBFGS: it steps all parameters together. Leave the "
                "option out, or take another optimizer, such as AdamW.",
                field="zero_redundancy_optimizer",
                got="LBFGS",
            )
        state = PartialState()
        self._rank = state.process_index
        self._loads = [0] * state.num_processes
        self._owners: dict[Tensor, int] = {}
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._assign(parameters_of(optimizer))
        for p in parameters_of(optimizer):
            if not self.owns(p):
                optimizer.state.pop(p, None)  # Adagrad has state for all parameters from the start
        self._handles: list[Any] = []
        _divided[optimizer] = self

    @staticmethod
    def attach(optimizer: Optimizer) -> OptimizerShards | None:
        """Divide the updates of an optimizer among the ranks from now on; return the object that divides them.

        Return None for torch's ZeroRedundancyOptimizer, which divides its updates itself.
        """
        if is_torch_zero(optimizer):
            return None
        shards = _divided.get(optimizer) or OptimizerShards(optimizer)
        shards._assign(parameters_of(optimizer))  # parameter groups may have been added since an earlier `attach`
        if not shards._handles:
            shards._handles = [
                optimizer.register_step_pre_hook(shards._before_step),
                optimizer.register_step_post_hook(shards._after_step),
            ]
        return shards

    def owns(self, parameter: Tensor) -> bool:
        """Return True if this rank updates a parameter."""
        return self._owners[parameter] == self._rank

    def detach(self) -> None:
        """Stop dividing the updates; the optimizer still has state only for this rank's parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _assign(self, parameters: Iterable[Tensor]) -> None:
        """Assign each new parameter to the rank with the fewest elements; all ranks get the same result."""
        new = [p for p in parameters if p not in self._owners]
        for p in sorted(new, key=lambda p: p.numel(), reverse=True):
            owner = self._owners[p] = self._loads.index(min(self._loads))
            self._loads[owner] += p.numel()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        # The closure computes and clips all gradients, so call it before other ranks' parameters lose their gradients.
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = (optimizer,), {**kwargs, "closure": lambda: loss}
        parameters = parameters_of(optimizer)
        self._assign(parameters)  # parameter groups may have been added since the last step
        self._hidden = [(p, p.grad) for p in parameters if p.grad is not None and not self.owns(p)]
        for p, _ in self._hidden:
            p.grad = None
        return args, kwargs

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        for p, gradient in self._hidden:
            p.grad = gradient
        self._hidden = []
        parts: list[list[Tensor]] = [[] for _ in self._loads]
        for p in parameters_of(optimizer):
            if p.requires_grad:
                parts[self._owners[p]].append(p.detach())
        group = torch.distributed.distributed_c10d._get_default_group()
        for owner, part in enumerate(parts):
            if part:
                torch.distributed._broadcast_coalesced(group, part, _BUFFER_BYTES, owner)


def is_divided(optimizer: Optimizer) -> bool:
    """Return True if each rank has only a part of the optimizer's state."""
    return optimizer in _divided or is_torch_zero(optimizer)


def is_torch_zero(optimizer: Optimizer) -> bool:
    """Return True if the optimizer is torch's ZeroRedundancyOptimizer, without importing that class."""
    return type(optimizer).__name__ == "ZeroRedundancyOptimizer"


def part_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return this rank's part of an optimizer's state: the state of its parameters, and the groups' settings."""
    if not is_torch_zero(optimizer):
        return optimizer_state(module, optimizer)
    names = names_of(module, [optimizer])
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    shapes = {names[p]: list(p.shape) for p in parameters_of(optimizer)}
    return {**optimizer_state(module, _inner(optimizer)), "shapes": shapes, "groups": groups}


def load_part(module: nn.Module, optimizer: Optimizer, tree: Mapping[str, Any], strict: bool) -> list[str]:
    """Load this rank's part of an optimizer's whole state; other ranks' parts are not read.

    Returns:
        Messages about what was not loaded, as from `Strategy.load_optimizer_state`.
    """
    target = _inner(optimizer) if is_torch_zero(optimizer) else optimizer
    names, shards = names_of(module, [optimizer]), _divided.get(optimizer)
    mine = {names[p] for p in parameters_of(target) if shards is None or shards.owns(p)}
    state = {name: value for name, value in tree["state"].items() if name in mine}
    tree = {**tree, "state": state}
    if target is not optimizer:
        shapes = {name: shape for name, shape in tree["shapes"].items() if name in mine}
        groups = [{**group, "params": [name for name in group["params"] if name in mine]} for group in tree["groups"]]
        tree = {**tree, "shapes": shapes, "groups": groups}
    left_out = load_optimizer_state(module, target, map_leaves(whole, tree), strict)
    if target is not optimizer:
        for own, loaded in zip(optimizer.param_groups, target.param_groups, strict=True):
            own.update({key: value for key, value in loaded.items() if key != "params"})
    return left_out


def consolidate(tree: dict[str, Any]) -> dict[str, Any]:
    """Join the parts of an optimizer's state from all ranks on rank 0, in host memory. Collective: all ranks call it.

    Returns:
        The whole state on rank 0; on other ranks `tree` unchanged.
    """
    process, group = PartialState(), control_group()
    layouts = gather_object(map_leaves(_without_data, tree["state"]))
    state: dict[str, Any] = {}
    for rank, layout in enumerate(layouts):
        if rank == 0:
            state |= tree["state"]
        elif process.is_main_process:
            state |= map_leaves(lambda leaf, rank=rank: _receive(leaf, rank, group), layout)
        elif rank == process.process_index:
            for _, leaf in iter_leaves(tree["state"]):
                if isinstance(leaf, Tensor):
                    torch.distributed.send(_bytes(leaf.detach().cpu().contiguous()), 0, group=group)
    if not process.is_main_process:
        return tree
    return {**tree, "state": {name: state[name] for name in tree["shapes"] if name in state}}


def _inner(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of this rank's part inside torch's ZeroRedundancyOptimizer."""
    return optimizer.optim  # pyright: ignore[reportAttributeAccessIssue]


def _without_data(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf


def _receive(leaf: Any, rank: int, group: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
    torch.distributed.recv(_bytes(tensor), rank, group=group)
    return tensor


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
