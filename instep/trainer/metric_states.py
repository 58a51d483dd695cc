"""The open sums of metric objects (torchmetrics) in the middle of an epoch, which are no part of a `state_dict`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def metric_states(module: nn.Module) -> dict[str, Any]:
    """What this rank's metric objects have seen since their last reset, by their names in the module."""
    return {
        name: {"updates": metric._update_count, "state": dict(metric.metric_state)}
        for name, metric in metric_objects(module).items()
        if metric._update_count
    }


def load_metric_states(module: nn.Module, states: dict[str, Any]) -> None:
    """Take up what `metric_states` gave; a metric that the module does not have any more is left out."""
    for name, metric in metric_objects(module).items():
        if name in states:
            metric.reset()  # what a hook has counted since the start is in the state already
            metric._update_count = states[name]["updates"]
            known = metric.metric_state.keys()
            for attribute, value in states[name]["state"].items():
                if attribute in known:  # a checkpoint sets no other attributes
                    setattr(metric, attribute, value)


def metric_objects(module: nn.Module) -> dict[str, Any]:
    """The module's metric objects by name; recognised without importing torchmetrics."""
    return {
        name: submodule
        for name, submodule in module.named_modules()
        if hasattr(submodule, "metric_state") and hasattr(submodule, "_update_count")
    }


@contextmanager
def uncounted(module: nn.Module) -> Iterator[None]:
    """What metric objects count within the block is forgotten: for a batch that is a replay."""
    before = copy.deepcopy(metric_states(module))
    try:
        yield
    finally:
        put_back(module, before)


def put_back(module: nn.Module, before: dict[str, Any]) -> None:
    """Make the metric objects what they were, as a copy of `metric_states` says."""
    with torch.inference_mode(False):  # what is reset must serve the next fit too
        for name, metric in metric_objects(module).items():
            if name not in before:
                metric.reset()
        load_metric_states(module, before)
