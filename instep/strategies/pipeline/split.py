"""Divide a module into the stages of a pipeline, and save and load the parts of its state.

A module lists its parts in `pipeline_stages`, in the order of its forward. A stage consists of consecutive parts. Each
rank keeps the parts of its own stages, and replaces other parts by `Absent`. Names, shapes and shared tensors of the
whole module are recorded before that, because a checkpoint contains the whole module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.distributed.nested import tensor_leaves, with_tensors
from instep.errors import HookError, SettingError
from instep.utils.checks import choice
from instep.utils.optimizer_state import clean_name


class StagePart(NamedTuple):
    """One entry of a module's `pipeline_stages`: a submodule or function that the forward calls."""

    name: str
    call: Callable[..., Any]
    owned: tuple[nn.Module | nn.Parameter, ...]
    """Submodules and parameters that hold the weights of this part."""

    @property
    def modules(self) -> list[nn.Module]:
        """All modules in this part, including submodules."""
        return [inner for entry in self.owned if isinstance(entry, nn.Module) for inner in entry.modules()]

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters and buffers of this part."""
        found: list[Tensor] = []
        for entry in self.owned:
            found += [entry] if isinstance(entry, Tensor) else [*entry.parameters(), *entry.buffers()]
        return found


def parts_of(module: nn.Module) -> list[StagePart]:
    """Return the parts that a module lists in `pipeline_stages`.

    Raises:
        HookError: the list has an invalid entry, or a parameter of the module is in none of the parts.
    """
    names: dict[Any, str] = {submodule: clean_name(name) for name, submodule in module.named_modules()}
    parts = []
    for entry in module.pipeline_stages():  # type: ignore[operator]
        call, *owned = entry if isinstance(entry, tuple) else (entry, entry)
        if not callable(call) or not owned or not all(isinstance(entry, nn.Module | nn.Parameter) for entry in owned):
            raise HookError(
                f"{type(module).__name__}.pipeline_stages() lists {entry!r}. Each entry is a submodule, or a tuple of "
                "a function and the submodules whose weights it uses: (self.embed, self.tokens, self.positions)."
            )
        name = names.get(call) or getattr(call, "__name__", str(len(parts)))
        parts.append(StagePart(name, call, tuple(owned)))
    known = {id(tensor) for part in parts for tensor in part.tensors}
    missing = [name for name, parameter in module.named_parameters() if id(parameter) not in known]
    if missing:
        raise HookError(
            f"{type(module).__name__}.pipeline_stages() leaves out the parameters {', '.join(missing[:5])}: no stage "
            "would train them. Name their submodules in the entries that use them."
        )
    return parts


def runs_of(parts: Sequence[StagePart], count: int, starts: Sequence[str]) -> list[range]:
    """Choose the range of consecutive parts for each stage.

    Args:
        parts: all parts, in order.
        count: number of stages.
        starts: names of the parts with which the stages begin, except the first stage. Empty: distribute the parameters
            evenly.
    """
    names = [part.name for part in parts]
    if len(parts) < count:
        raise SettingError(
            f"{count} stages cannot be made of the {len(parts)} parts in pipeline_stages ({', '.join(names)}). List "
            "smaller parts, or use fewer stages.",
            field="pp",
            got=count,
        )
    if starts:
        for start in starts:
            choice(*names)("split", start)
        cuts = [names.index(start) for start in starts]
        twice = [start for start in starts if names.count(start) > 1]
        if twice:
            raise SettingError(
                f"split={list(starts)!r}: several parts are called {twice[0]!r} among {', '.join(names)}. Begin "
                "stages with submodules, or let pipeline_stages() list functions of different names.",
                field="split",
                got=starts,
            )
        if len(starts) != count - 1 or cuts != sorted(set(cuts)) or cuts[0] == 0:
            raise SettingError(
                f"split={list(starts)!r} must name the first part of each of the {count} stages but the first one, in "
                f"order; the parts are {', '.join(names)}.",
                field="split",
                got=starts,
            )
    else:
        cuts = even_cuts([1 + sum(t.numel() for t in part.tensors) for part in parts], count)
    bounds = [0, *cuts, len(parts)]
    return [range(first, end) for first, end in pairwise(bounds)]


class Stage(nn.Module):
    """Module that calls consecutive parts one after the other, and returns the tensors of the output as a tuple.

    Args:
        parts: parts of this stage.
        last: whether it is the last stage, whose output may be nested tensors.
        whole: module that contains the parts; the submodules of the stage have the same names as in this module.
    """

    output_outline: Any = None
    """Structure of the last stage's output, with tensors on the meta device, which have no values."""

    def __init__(self, parts: Sequence[StagePart], last: bool, whole: nn.Module | None = None) -> None:
        super().__init__()
        self._parts = tuple(parts)  # a tuple, so that nn.Module does not register the modules
        self._last = last
        owned = dict.fromkeys(item for part in parts for item in part.owned)
        self.loose_parameters = [item for item in owned if isinstance(item, nn.Parameter)]
        """Parameters that parts of this stage list by themselves, and not through a submodule."""
        names = {} if whole is None else {item: name for name, item in whole.named_modules()}
        for number, item in enumerate(item for item in owned if isinstance(item, nn.Module)):
            *parents, key = names.get(item, f"part_{number}").split(".")
            home: nn.Module = self
            for depth, parent in enumerate(parents):
                if parent not in home._modules:
                    like = None if whole is None else whole.get_submodule(".".join(parents[: depth + 1]))
                    home.add_module(parent, nn.ModuleList() if isinstance(like, nn.ModuleList) else nn.Module())
                home = home.get_submodule(parent)
            if key not in home._modules:
                home.add_module(key, item)

    def forward(self, *args: Any) -> Any:
        output: Any = args
        for part in self._parts:
            output = part.call(*args)
            args = output if isinstance(output, tuple) else (output,)
        if self._last:
            tensors = tuple(leaf for _, leaf in tensor_leaves(output, "the output of a pipeline"))
            self.output_outline = with_tensors(output, (torch.empty_like(tensor, device="meta") for tensor in tensors))
            return tensors
        wrong = [type(value).__name__ for value in args if not isinstance(value, Tensor)]
        if wrong:
            raise HookError(
                f"the pipeline's part {self._parts[-1].name!r} returned {', '.join(wrong)}; between stages go tensors, "
                "alone or in a tuple, with the batch as their first dimension. Cut elsewhere with split, or change it."
            )
        return args


class Absent(nn.Module):
    """Placeholder for a submodule whose stage is on another rank."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._absent_name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "_absent_name" not in self.__dict__:
            return super().__getattr__(name)
        raise AttributeError(
            f"{name!r} of {self._absent_name!r} is asked for on a rank that does not have it: its stage of the "
            "pipeline is on another rank. Go over self.named_parameters(), which has what is here."
        )

    def forward(self, *_: Any) -> Any:
        raise HookError(
            f"{self._absent_name!r} is called on a rank that does not have it: its stage of the pipeline is on another "
            "rank. Call self(...), which runs all stages."
        )


class Cut:
    """Divide a module into pipeline stages, keep those of this rank, and record what the other ranks have.

    Args:
        module: the whole module; afterwards it has only this rank's parts.
        count: total number of stages.
        starts: names of the parts with which the stages begin; see `runs_of`.
        rank: rank of this process in its pipeline.
        ranks: number of processes in the pipeline; stage s is on rank `s % ranks`.
    """

    def __init__(self, module: nn.Module, count: int, starts: Sequence[str], rank: int, ranks: int) -> None:
        parts = parts_of(module)
        runs = runs_of(parts, count, starts)
        self.rank, self.ranks = rank, ranks
        self.stages = {
            index: Stage([parts[i] for i in run], index == count - 1, module)
            for index, run in enumerate(runs)
            if index % ranks == rank
        }
        homes: dict[int, list[int]] = {}  # ranks that hold each tensor and module, by the object's id
        for index, run in enumerate(runs):
            for item in (item for i in run for item in (*parts[i].tensors, *parts[i].modules)):
                home = homes.setdefault(id(item), [])
                if index % ranks not in home:
                    home.append(index % ranks)
        everywhere = list(range(ranks))
        self.shapes: dict[str, torch.Size | None] = {}
        """Name -> shape of each entry in the whole module's state; None if the entry is no tensor."""
        self.homes: dict[str, list[int]] = {}
        """Name -> ranks of the pipeline that have the entry of the state; the first of them saves it."""
        self.first_names: dict[str, str] = {}
        """Name -> first name of the same tensor. The two names differ only if the tensor is shared."""
        first: dict[int, str] = {}
        for raw, value in module.state_dict(keep_vars=True).items():
            name, is_tensor = clean_name(raw), isinstance(value, Tensor)
            # An entry that is not a tensor is from the get_extra_state of a submodule.
            owner = value if is_tensor else module.get_submodule(raw.rpartition(".")[0])
            self.shapes[name] = value.shape if is_tensor else None
            self.homes[name] = homes.get(id(owner), everywhere)
            self.first_names[name] = first.setdefault(id(value), name) if is_tensor else name
        self._remove(module, parts, runs, ranks)

    def shared(self, module: nn.Module) -> list[tuple[nn.Parameter, list[int]]]:
        """Return this rank's parameters that other ranks of the pipeline have too, each with the ranks that have it.

        The order is the same on all ranks.
        """
        found = {
            self.first_names[name]: (parameter, self.homes[name])
            for name, parameter in ((clean_name(name), p) for name, p in module.named_parameters())
            if len(self.homes[name]) > 1
        }
        return [found[name] for name in sorted(found)]

    def _remove(self, module: nn.Module, parts: Sequence[StagePart], runs: Sequence[range], ranks: int) -> None:
        kept: set[int] = set()
        foreign: set[int] = set()
        for index, run in enumerate(runs):
            for owned in (item for i in run for item in parts[i].owned):
                inside = owned.modules() if isinstance(owned, nn.Module) else (owned,)
                (kept if index % ranks == self.rank else foreign).update(map(id, inside))
        foreign -= kept
        for path, parent in list(module.named_modules(remove_duplicate=False)):
            if id(parent) in foreign:
                continue
            for name, child in list(parent._modules.items()):
                if id(child) in foreign:
                    parent._modules[name] = Absent(f"{path}.{name}" if path else name)
            for name, parameter in list(parent._parameters.items()):
                if id(parameter) in foreign:
                    parent._parameters[name] = None

    # ---- state dicts with the names of the whole module

    def saved_here(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of this rank's state dict that this rank saves; a shared tensor under all of its names."""
        own = {clean_name(name): value for name, value in state.items()}
        by_first = {self.first_names[name]: value for name, value in own.items()}
        return {
            name: own.get(name, by_first.get(first))
            for name, first in self.first_names.items()
            if self.homes[name][0] == self.rank and first in by_first
        }

    def loaded_here(self, state: Mapping[str, Any], own: Mapping[str, Any], strict: bool) -> dict[str, Any]:
        """Return the entries of the whole module's state dict that this rank loads.

        Args:
            state: state dict of the whole module, from a checkpoint.
            own: state dict of this rank.
            strict: whether `state` must have exactly the names of the whole module.

        Raises:
            RuntimeError: a name is missing or unexpected; raised on every rank.
        """
        missing = [name for name in self.shapes if name not in state]
        unexpected = [name for name in state if name not in self.shapes]
        if strict and (missing or unexpected):
            raise RuntimeError(f"missing are {missing[:5]}, unexpected are {unexpected[:5]}")
        return {name: state[clean_name(name)] for name in own if clean_name(name) in state}

    def optimizer_saved_here(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of this rank's optimizer state that this rank saves, under each parameter's first name."""

        def saves(name: str) -> bool:
            # Rank 0 saves the state of parameters that are not in the module.
            return self.homes.get(name, [0])[0] == self.rank

        return self._with_names(tree, lambda name: self.first_names.get(name, name) if saves(name) else None)

    def optimizer_loaded_here(self, tree: Mapping[str, Any], own: Iterable[str]) -> dict[str, Any]:
        """Return the part of an optimizer's whole state that this rank loads, under the names in `own`.

        State under a name that is not in the module belongs to no stage; every rank loads it.

        Args:
            tree: the whole state, from a checkpoint.
            own: names of the parameters in this rank's optimizer.
        """
        names = {self.first_names.get(name, name): name for name in own}

        def to_own(name: str) -> str | None:
            return names.get(name, name if self.rank in self.homes.get(name, [self.rank]) else None)

        return self._with_names(tree, to_own)

    @staticmethod
    def _with_names(tree: Mapping[str, Any], rename: Callable[[str], str | None]) -> dict[str, Any]:
        """Rename the parameters in an optimizer's state, and remove those for which `rename` returns None."""

        def renamed(entries: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for old, value in entries.items() if (name := rename(old)) is not None}

        groups = [{**group, "params": list(renamed(dict.fromkeys(group["params"])))} for group in tree["groups"]]
        kept = {key: renamed(tree[key]) for key in ("shapes", "dtypes", "state") if key in tree}
        return {**tree, **kept, "groups": groups}


def even_cuts(sizes: Sequence[int], count: int) -> list[int]:
    """Divide a sequence into consecutive, non-empty runs so that the largest run is as small as possible.

    Args:
        sizes: sizes of the items, in order; at least `count` of them.
        count: number of runs.

    Returns:
        The index of the first item of each run, except the first run.

    Example:
        >>> even_cuts([1, 1, 2, 4], 2)
        [3]
    """
    best: dict[tuple[int, int], tuple[int, list[int]]] = {(0, 0): (0, [])}
    for runs in range(1, count + 1):
        for end in range(runs, len(sizes) + 1):
            best[runs, end] = min(
                (max(best[runs - 1, start][0], sum(sizes[start:end])), [*best[runs - 1, start][1], start])
                for start in range(runs - 1, end)
                if (runs - 1, start) in best
            )
    return best[count, len(sizes)][1][1:]
