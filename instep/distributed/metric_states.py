"""States of metric objects, such as torchmetrics has: found in a module, saved, restored, and merged over ranks.

torchmetrics itself is not imported: any object that has a `metric_state` and counts its updates is a metric.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from instep.errors import LogError
from instep.utils.warn import warn_user

_MERGED: dict[str, Any] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
    "dim_zero_cat": lambda a, b: torch.cat([torch.atleast_1d(a), torch.atleast_1d(b)]),
}


def metric_objects(module: nn.Module) -> dict[str, Any]:
    """Return the metric objects in a module, by name."""
    return {
        name: submodule
        for name, submodule in module.named_modules()
        if hasattr(submodule, "metric_state") and hasattr(submodule, "_update_count")
    }


def metric_states(module: nn.Module) -> dict[str, Any]:
    """Return name in the module -> state, for this rank's metric objects that were updated since their last reset."""
    return {
        name: {"updates": metric._update_count, "state": _state(metric)}
        for name, metric in metric_objects(module).items()
        if metric._update_count
    }


def _state(metric: Any) -> dict[str, Any]:
    # Copy a list, since torchmetrics clears the list itself when it resets.
    return {name: list(value) if isinstance(value, list) else value for name, value in metric.metric_state.items()}


def load_metric_states(module: nn.Module, states: Mapping[str, Any]) -> None:
    """Restore the result of `metric_states`; skip a metric that the module no longer has."""
    metrics = {name: metric for name, metric in metric_objects(module).items() if name in states}
    for metric in metrics.values():  # reset all metrics before loading any: a metric composed of others resets these
        metric.reset()  # drops what hooks have counted since the start of this run: the loaded state has it already
    for name, metric in metrics.items():
        metric._update_count = states[name]["updates"]
        known, device = metric.metric_state, getattr(metric, "device", None)
        for attribute, value in states[name]["state"].items():
            if attribute in known:  # set only attributes that are states, since a checkpoint is not trusted
                setattr(metric, attribute, _on(device, value))


def restore_metric_states(module: nn.Module, before: Mapping[str, Any]) -> None:
    """Restore the metric objects from a copy of the result of `metric_states`."""
    # tensors that are created by the reset must not be inference tensors, which fit could not use
    with torch.inference_mode(False):
        reset_others(module, before)
        load_metric_states(module, before)


def reset_others(module: nn.Module, states: Mapping[str, Any]) -> None:
    """Reset the metric objects of a module that have no entry in `states`."""
    for name, metric in metric_objects(module).items():
        if name not in states:
            metric.reset()


@contextmanager
def uncounted(module: nn.Module) -> Iterator[None]:
    """Undo what metric objects count inside the `with` block, for a batch that a rank only replays."""
    before = copy.deepcopy(metric_states(module))
    try:
        yield
    finally:
        restore_metric_states(module, before)


class Counts:
    """Copy of the counts of metric objects. Making it resets the objects, so that they can count other data meanwhile.

    Args:
        objects: metric objects. Metric objects inside them, such as the parts of a wrapper, are included.

    Example:
        >>> from torchmetrics import MeanMetric
        >>> mean = MeanMetric()
        >>> mean.update(1.0)
        >>> counts = Counts([mean])
        >>> mean.update(3.0)
        >>> with counts.held():
        ...     float(mean.compute())
        1.0
        >>> float(mean.compute())
        3.0
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._parts = {id(part): part for one in objects for _, part in with_parts(one)}
        self._attributes = {key: _attributes(part) for key, part in self._parts.items()}
        reset_metrics(self._parts.values())

    def __contains__(self, metric: Any) -> bool:
        return id(metric) in self._parts

    def put_back(self, metrics: Iterable[Any]) -> None:
        """Restore the stored counts in these metric objects, in place of later counts, and forget the stored ones."""
        keys = [id(metric) for metric in metrics]
        _set_attributes([(self._parts.pop(key), self._attributes.pop(key)) for key in keys])

    @property
    def objects(self) -> list[Any]:
        return list(self._parts.values())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Put the stored counts into the metric objects for a `with` block; then restore the objects' own counts."""
        others = [(part, _attributes(part)) for part in self._parts.values()]
        _set_attributes([(part, self._attributes[key]) for key, part in self._parts.items()])
        try:
            yield
        finally:
            _set_attributes(others)

    def add_up(self, others: Iterable[Counts] = ()) -> list[Any]:
        """Add the stored counts to what the metric objects have counted since they were reset.

        Args:
            others: further `Counts` to add, whose counts were stored at other times.

        Returns:
            The metric objects whose states cannot be added up, such as a mean over batches. They are not changed.
        """
        left: list[Any] = []
        sums: list[tuple[Any, dict[str, Any]]] = []
        every = [self, *others]
        for key, part in {key: part for counts in every for key, part in counts._parts.items()}.items():
            taken = [counts._attributes[key] for counts in every if key in counts._attributes]
            names = part.metric_state
            states = [
                {"": {"updates": one["_update_count"], "state": {name: one[name] for name in names}}}
                for one in [*taken, _attributes(part)]
                if one["_update_count"]
            ]
            if len(states) == 1:
                merged = {"": states[0][""]}
            else:
                merged, refused = merge_metric_states(states, {"": part})
                left += [part] if refused else []
            if merged:
                sums.append((part, {"_update_count": merged[""]["updates"], **merged[""]["state"]}))
        _set_attributes(sums)
        return left


def _attributes(part: Any) -> dict[str, Any]:
    """Return a metric object's states and its other counters."""
    numbers = {name: value for name, value in vars(part).items() if type(value) in (int, float)}
    return {**numbers, **_state(part)}


def _set_attributes(of_parts: Sequence[tuple[Any, Mapping[str, Any]]]) -> None:
    # A metric composed of others has no state itself. It is not reset, since it would reset the others.
    reset_metrics([part for part, _ in of_parts if part.metric_state])
    for part, attributes in of_parts:
        for name, value in attributes.items():
            setattr(part, name, list(value) if isinstance(value, list) else value)


def reset_metrics(metrics: Iterable[Any]) -> None:
    """Reset metric objects. Their new state tensors are not inference tensors, so any later stage can use them."""
    with torch.inference_mode(False):
        for metric in metrics:
            metric.reset()


def with_groups(metrics: Iterable[Any], module: nn.Module | None) -> list[Any]:
    """Return each metric object once, together with the objects that share its states.

    In a torchmetrics collection, one object of a compute group counts for the whole group.
    """
    found = {id(metric): metric for metric in metrics}
    for collection in () if module is None or not found else module.modules():
        groups = getattr(collection, "compute_groups", None)
        for names in groups.values() if isinstance(groups, dict) else ():
            members = [part for name in names if (part := getattr(collection, "_modules", {}).get(name)) is not None]
            if any(id(member) in found for member in members):
                found.update((id(member), member) for member in members)
    return list(found.values())


def merge_metric_states(
    by_rank: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Merge the metric states of several ranks into states for one rank; the other ranks then start from zero.

    The merge is exact if the ranks' states are summed, concatenated, or reduced by minimum or maximum. Other states,
    such as means over ranks, cannot be loaded on a different number of ranks.

    Args:
        by_rank: result of `metric_states` on each rank.
        metrics: the module's metric objects by name, which have the reductions of the states.

    Returns:
        The states by name; and the names of metrics whose states cannot be merged.
    """
    merged: dict[str, Any] = {}
    refused: list[str] = []
    for name in dict.fromkeys(name for states in by_rank for name in states):
        kept = [states[name] for states in by_rank if name in states]
        known = hasattr(metrics.get(name), "_reductions")
        reductions: Mapping[str, Any] = getattr(metrics.get(name), "_reductions", {})
        state: dict[str, Any] = {}
        for attribute in kept[0]["state"] if known else ():
            rule = _MERGED.get(getattr(reductions.get(attribute), "__name__", ""))
            values = [each["state"][attribute] for each in kept]
            if all(isinstance(value, list) for value in values) and (rule or reductions.get(attribute) is None):
                state[attribute] = [part for value in values for part in value]
            elif rule is not None and all(isinstance(value, Tensor) for value in values):
                state[attribute] = reduce(rule, values)
            else:
                break
        if not known or len(state) < len(kept[0]["state"]):
            refused.append(name)
        else:
            merged[name] = {"updates": sum(each["updates"] for each in kept), "state": state}
    return merged, refused


# ---- ranks whose metric objects have counted nothing


def list_shapes(metric: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape (without dimension 0) of the first entry of each list state that is not empty."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, one in with_parts(metric):
        for attribute, value in one.metric_state.items():
            if isinstance(value, list) and value and isinstance(value[0], Tensor):
                found[f"{name}.{attribute}"] = str(value[0].dtype).removeprefix("torch."), tuple(value[0].shape[1:])
    return found


def counted(accumulators: Iterable[Any]) -> dict[str, tuple[dict[str, Any], int]]:
    """Return name of a metric -> the shapes of its list states, and its number of updates (1 if unknown)."""
    found: dict[str, tuple[dict[str, Any], int]] = {}
    for one in accumulators:
        if one.metric is not None:
            with one.held():
                parts = with_parts(one.metric)
                updates = sum(part._update_count for _, part in parts) if parts else 1
                found[one.epoch_name] = list_shapes(one.metric), updates
    return found


def warn_of_none(metric: Any, name: str) -> None:
    """Warn of a metric whose value is nan because no rank has updated it."""
    warn_user(
        f"the {type(metric).__name__} that is logged as {name!r} was not updated, and computes nan: call its update(), "
        "or the object itself, before the epoch's end"
    )


def not_apart(name: str, metric: Any, what: str) -> LogError:
    """Return the error for a metric object that has no `metric_state` but is logged in several stages or loaders.

    Args:
        name: name under which the object is logged.
        metric: the metric object.
        what: "stage" or "loader": where else the object counts.
    """
    return LogError(
        f"self.log({name!r}): this {type(metric).__name__} counts for another {what} too, and has no metric_state (as "
        "torchmetrics' objects have) by which instep could keep the two apart. Use one object for each stage and each "
        "loader."
    )


def not_the_same(name: str, before: Any, value: Any) -> LogError:
    """Return the error for two metric objects that are logged under one name in one epoch."""
    return LogError(
        f"self.log({name!r}) got a {type(value).__name__} after the metric object {type(before).__name__} in the same "
        "epoch. Log one object under one name, or use two names."
    )


@contextmanager
def able_to_compute(metric: Any, shapes: Mapping[str, Any], of_this_rank: bool = False) -> Iterator[None]:
    """Let a metric that has counted nothing on this rank take part in `compute` inside a `with` block.

    Its empty list states get the dtypes and shapes of the other ranks' states, since torchmetrics gathers only tensors
    with equal numbers of dimensions. Its number of updates becomes 1, since torchmetrics warns of a metric without an
    update.

    Args:
        metric: a metric object.
        shapes: entries of `list_shapes` from the ranks whose list states are not empty.
        of_this_rank: True: compute from this rank's counts alone, since the other ranks do not compute. Otherwise
            torchmetrics would wait for them.
    """
    changed: list[tuple[Any, str, Any]] = []

    def put(*change: Any) -> None:
        changed.append((*change[:2], getattr(*change[:2])))
        setattr(*change)

    for name, one in with_parts(metric):
        if of_this_rank and hasattr(one, "distributed_available_fn"):
            put(one, "distributed_available_fn", lambda: False)
        if not one._update_count:
            put(one, "_update_count", 1)
        for attribute, value in one.metric_state.items():
            if isinstance(value, list) and not value and (known := shapes.get(f"{name}.{attribute}")) is not None:
                device = getattr(one, "device", None)
                put(one, attribute, [torch.empty((0, *known[1]), dtype=getattr(torch, known[0]), device=device)])
    try:
        yield
    finally:
        for change in changed:
            setattr(*change)


def with_parts(metric: Any) -> list[tuple[str, Any]]:
    """Return a metric object and the metric objects inside it; empty if the object is not a module."""
    return list(metric_objects(metric).items()) if isinstance(metric, nn.Module) else []


def _on(device: Any, value: Any) -> Any:
    """Return a state (a tensor, or a list of tensors) moved to a device."""
    if isinstance(value, list):
        return [_on(device, part) for part in value]
    return value.to(device) if isinstance(value, Tensor) and isinstance(device, torch.device) else value
