"""The state of a module and an optimizer that DeepSpeed has cut into runs: out to a checkpoint, and in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from instep.checkpoint.tensors import Shard
from instep.errors import CheckpointError
from instep.state import PartialState
from instep.strategies.base import Strategy, shapes_of, whole
from instep.strategies.deepspeed import partitions
from instep.strategies.deepspeed.optimizers import counts_in_ints, kind_of
from instep.strategies.deepspeed.partitions import Part, is_cut, shape_of, take_run
from instep.utils.optimizer_state import match_state, names_of


class PartitionedState(Strategy):
    """What a checkpoint needs of a strategy whose ranks hold runs of flattened tensors."""

    stage: int
    """Of ZeRO; at 0 every rank has everything."""

    def __init__(self) -> None:
        self._parts: dict[Tensor, Part] = {}
        self._exact: dict[Tensor, Tensor] = {}  # float32 runs of weights that were cast to 16 bits before the engine
        self._groups: list[list[str]] = []  # names, by group of the optimizer
        self._shapes: dict[str, list[int]] = {}  # of the optimizer's parameters

    def _part_of(self, parameter: Tensor) -> Part | None:
        """What this rank holds of a parameter that is spread; None for one that every rank has whole."""
        part = self._parts.get(parameter)
        return partitions.cut_part(parameter) if part is None and is_cut(parameter) else part

    def _is_spread(self, parameter: Tensor, name: str) -> bool:
        return is_cut(parameter) or bool(self._parts and parameter.requires_grad and name in self._shapes)

    def model_state(self) -> dict[str, Any]:
        state = self.module.state_dict()
        first = names_of(self.module)
        for name, p in self.module.named_parameters(remove_duplicate=False):
            if name in state and self._is_spread(p, first[p]):
                part = self._part_of(p)
                if part is None or not part.count:
                    del state[name]  # others hold all of it
                else:
                    state[name] = part.shard(part.weights())
        return state

    def model_shapes(self) -> Mapping[str, torch.Size | None]:
        cut = {
            name: torch.Size(shape_of(p))
            for name, p in self.module.named_parameters(remove_duplicate=False)
            if is_cut(p)
        }
        return {name: cut.get(name, shape) for name, shape in shapes_of(self.module).items()}

    def full_model_state(self) -> dict[str, Any]:
        state, first = self.module.state_dict(), names_of(self.module)
        main = PartialState().is_main_process
        gathered: dict[Tensor, Tensor] = {}
        for name, p in self.module.named_parameters(remove_duplicate=False):
            if name not in state or not self._is_spread(p, first[p]):
                continue
            if p not in gathered:
                part = self._part_of(p)
                dtype = p.dtype if not self._parts else torch.float32
                run = torch.zeros(torch.Size(shape_of(p)).numel(), dtype=dtype, device=self.device)
                if part is not None:
                    run[part.begin : part.begin + part.count] = part.weights().to(self.device)
                dist.reduce(run, 0)
                gathered[p] = run.cpu().view(shape_of(p)) if main else run[:0]
            state[name] = gathered[p]
        return state if main else {}

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        own = dict(self.module.named_parameters(remove_duplicate=False))
        taken: dict[str, Any] = {}
        for name, value in state.items():
            p = own.get(name)
            if p is None or not hasattr(value, "shape"):
                taken[name] = whole(value)
            elif tuple(value.shape) != shape_of(p):
                taken[name] = torch.empty(value.shape, device="meta")  # for torch's own error
            else:
                taken[name] = self._take_weights(p, value)
        return self.module.load_state_dict(taken, strict=strict)

    def _take_weights(self, p: Any, value: Any) -> Tensor:
        """Load one parameter's runs; what remains for `load_state_dict`."""
        with torch.no_grad():
            part = self._parts.get(p)
            if part is not None:
                part.set_weights(take_run(value, part.begin, part.count))
            if not is_cut(p):
                return whole(value)
            if p.data.numel():  # gathered, as small ones stay
                p.partition()
            cut = partitions.cut_part(p)
            run = take_run(value, cut.begin, cut.count)
            cut.of(cut.flat).copy_(run)
            if part is None and self.precision.dtype is not None:
                self._exact[p] = run.to(self.device, torch.float32)
            return p.detach()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self.stage:
            return super().optimizer_state(optimizer)
        names = names_of(self.module)
        state: dict[str, dict[str, Any]] = {}
        for p, part in self._parts.items():
            kept = optimizer.state.get(part.flat, {})
            saved = {key: self._saved(part, key, value, kind_of(optimizer)) for key, value in kept.items()}
            if saved:
                state[names[p]] = saved
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": list(group_names)}
            for group, group_names in zip(optimizer.param_groups, self._groups, strict=True)
        ]
        dtypes = dict.fromkeys(self._shapes, torch.float32)  # of the master weights
        return {
            "optimizer": kind_of(optimizer),
            "shapes": self._shapes,
            "dtypes": dtypes,
            "state": state,
            "groups": groups,
        }

    def _saved(self, part: Part, key: str, value: Any, kind: str) -> Any:
        if isinstance(value, Tensor) and value.ndim:
            return part.shard(part.of(value) if part.fetch is None else part.fetch(key)[: part.count])
        if key == "step":  # a tensor, as torch's optimizers have it; every rank that has a part writes it
            return Shard(torch.tensor(float(value)), (), ())
        return Shard(value.detach().clone(), (), ()) if isinstance(value, Tensor) else value

    def load_optimizer_state(self, optimizer: Optimizer, tree: Mapping[str, Any], strict: bool = True) -> list[str]:
        if not self.stage:
            return super().load_optimizer_state(optimizer, tree, strict)
        wanted = [
            {**group, "params": list(names)} for group, names in zip(optimizer.param_groups, self._groups, strict=True)
        ]
        kept, settings, left_out = match_state(kind_of(optimizer), self._shapes, wanted, tree, strict)
        for group, saved in zip(optimizer.param_groups, settings, strict=True):
            group.update({key: value for key, value in saved.items() if key in group and key != "params"})
        names = names_of(self.module)
        by_flat: dict[Tensor, list[tuple[str, Part]]] = {}
        for p, part in self._parts.items():
            by_flat.setdefault(part.flat, []).append((names[p], part))
        for flat, parts in by_flat.items():
            self._load_flat(optimizer, flat, parts, kept["state"])
        return left_out

    def _load_flat(
        self, optimizer: Optimizer, flat: Tensor, parts: list[tuple[str, Part]], saved: Mapping[str, Any]
    ) -> None:
        """The state under one flat tensor, put together from that of the parameters in it."""
        known = [(name, part, saved[name]) for name, part in parts if saved.get(name)]
        if not known:
            return
        state: dict[str, Any] = dict(optimizer.state.get(flat, {}))
        with torch.no_grad(), parts[0][1].at_hand():
            for key in known[0][2]:
                values = [(name, part, kept.get(key)) for name, part, kept in known]
                first = values[0][2]
                if not hasattr(first, "shape") or not tuple(first.shape):
                    state[key] = self._scalar(optimizer, key, [whole(value) for _, _, value in values])
                    continue
                if parts[0][1].fetch is None or key not in state:  # those on a disk are known by their tensor
                    state[key] = torch.zeros_like(flat, dtype=first.dtype, requires_grad=False)
                for name, part, value in values:
                    if value is None or tuple(value.shape) != part.shape:
                        raise CheckpointError(
                            f"the state {key!r} of {name!r} has no element for each of the parameter's, so that it "
                            "cannot be cut into runs. Resume from the weights alone."
                        )
                    run = take_run(value, part.begin, part.count)
                    part.of(state[key]).copy_(run)
            optimizer.state[flat] = state

    def _scalar(self, optimizer: Optimizer, key: str, values: list[Any]) -> Any:
        numbers = {float(value) for value in values}
        if len(numbers) > 1:
            raise CheckpointError(
                f"the parameters of a group were stepped different numbers of times ({key}: {sorted(numbers)}), and "
                "DeepSpeed keeps one number for them. Put them into groups of their own, or resume from the weights "
                "alone."
            )
        value = values[0]
        if key == "step" and counts_in_ints(optimizer):
            return int(value)
        return value.clone() if isinstance(value, Tensor) else value

    def owned(self, tree: Any) -> Any:
        main = PartialState().is_main_process
        return _written(tree, main) if self.sharded else tree if main else None


def _written(tree: Any, main: bool) -> Any:
    """A state with this rank's parts; plain tensors are the same on all ranks, and the first one writes them."""
    if isinstance(tree, Mapping):
        return {key: _written(it, main) for key, it in tree.items() if main or not isinstance(it, Tensor)}
    if type(tree) in (list, tuple):
        return type(tree)([_written(it, main) for it in tree])
    return tree
