"""`GradientMonitor` and `grad_norm`: norms of gradients by parameter or layer, and histograms of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from instep.callbacks.base import Callback, logs_here
from instep.errors import SettingError
from instep.state.device import widest_float
from instep.strategies.clipping import each_norm, gradient_of, local_part, reduce_shards
from instep.strategies.gradients import parameters_of
from instep.utils.checks import at_least
from instep.utils.optimizer_state import names_of
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from instep.callbacks.base import Trainer, TrainModule

_BINS = 64


class _Row(NamedTuple):
    """The gradient norms of one step, which are being copied from the device to the host."""

    step: int
    values: Tensor  # a row per parameter: norm, then (with histograms) largest absolute element and bin counts
    ready: Callable[[], bool]
    wait: Callable[[], None]
    names: list[str]
    suffix: str


class GradientMonitor(Callback):
    """Log the norm of each gradient, and of all gradients together, every `log_every_n_steps` optimizer steps.

    The logged names are `grad_2.0_norm/layer.weight` and `grad_2.0_norm_total`. The norms are computed right before
    the optimizer step: gradients are accumulated over all micro-batches, reduced over ranks, and unscaled, but not
    clipped yet. For sharded gradients (FSDP, tensor parallelism) the norm is that of the whole gradient; in a pipeline
    each process logs its own stage. The values are copied to the host while training continues, and logged under the
    step to which they belong.

    Args:
        norm_type: the order of the norm; "inf" for the largest absolute element.
        depth: None: log a norm for each parameter. A number: log a norm for each layer, that is for all parameters
            whose names have the same first `depth` parts, for example `encoder.0` with 2. 0: log only the total.
        histograms: log a histogram of each gradient too, by `logger.log_histogram`, as `gradients/layer.weight`.
        group_separator: text between `grad_2.0_norm` and the parameter's name in the logged names.

    Raises:
        SettingError: an argument is wrong. (At the start of fit:) there is no logger.

    Example:
        >>> GradientMonitor(depth=1).depth
        1

    Source: Lightning's `grad_norm`, which users call in their own module.
    """

    def __init__(
        self,
        norm_type: float | str = 2.0,
        depth: int | None = None,
        histograms: bool = False,
        group_separator: str = "/",
    ) -> None:
        try:
            self.norm_type = float(norm_type)
        except (TypeError, ValueError):
            self.norm_type = -1.0
        if not self.norm_type > 0:
            raise SettingError(
                f"norm_type={norm_type!r}: expected a number above 0, or 'inf'", field="norm_type", got=norm_type
            )
        self.depth = None if depth is None else at_least(0)("depth", depth)
        self.histograms = histograms
        self.group_separator = group_separator
        self._every = 0
        self._writes = True
        self._names: dict[Tensor, str] = {}
        self._waiting: list[_Row] = []

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.loggers and not trainer.fast_dev_run:
            raise SettingError(
                "GradientMonitor needs a logger: give Trainer(logger=...) one, or leave the callback out."
            )
        self._every = trainer.log_every_n_steps if trainer.loggers else 0
        self._writes = logs_here(trainer)
        self._names, self._waiting = {}, []

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        step = trainer.global_step + 1  # the loop logs other values of this step under the same step number
        if self._every and step % self._every == 0:
            self._deliver(trainer, only_ready=True)
            self._look(trainer, module, optimizer, step)

    def before_save(self, trainer: Trainer) -> None:
        self._deliver(trainer)  # log now: a run that resumes from this checkpoint does not repeat these steps

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._deliver(trainer)

    @torch.no_grad()
    def _look(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer, step: int) -> None:
        if not self._names:
            self._names = names_of(module, trainer.optimizers)
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        if not parameters:
            warn_user(
                f"GradientMonitor finds no gradients at step {step}: the strategy keeps them to itself, or the loss "
                "depends on no parameter"
            )
            return
        if not self._writes and not any(isinstance(p, DTensor) for p in parameters):
            return
        values = each_norm(parameters, self.norm_type)[:, None]
        if self.histograms:
            values = torch.cat([values, _histograms(parameters)], dim=1)
        if not self._writes:
            return
        index = trainer.optimizers.index(optimizer) if len(trainer.optimizers) > 1 else None
        suffix = "" if index is None else f"{self.group_separator}{index}"
        self._waiting.append(_on_its_way(step, values, [self._names[p] for p in parameters], suffix))
        self._deliver(trainer, only_ready=True)

    def _deliver(self, trainer: Trainer, only_ready: bool = False) -> None:
        """Log the norms in the order of steps: with `only_ready` those already copied to the host, otherwise all."""
        while self._waiting and (not only_ready or self._waiting[0].ready()):
            row = self._waiting.pop(0)
            row.wait()
            table = row.values.double().numpy()
            norms = self._norms(row.names, table[:, 0], row.suffix)
            for logger in trainer.loggers:
                logger.log_metrics(norms, step=row.step)
            if self.histograms:
                self._log_histograms(trainer, row, table[:, 1:])

    def _norms(self, names: list[str], each: np.ndarray, suffix: str) -> dict[str, float]:
        groups: dict[str, list[float]] = {}
        for name, norm in zip(names, each.tolist(), strict=True):
            label = name if self.depth is None else ".".join(name.split(".")[: self.depth])
            groups.setdefault(label, []).append(norm)
        prefix = f"grad_{self.norm_type}_norm"
        norms = {
            f"{prefix}{self.group_separator}{label}": float(np.linalg.norm(of_group, self.norm_type))
            for label, of_group in groups.items()
            if label
        }
        norms[f"{prefix}_total{suffix}"] = float(np.linalg.norm(each, self.norm_type))
        return norms

    def _log_histograms(self, trainer: Trainer, row: _Row, table: np.ndarray) -> None:
        for name, (largest, *counts) in zip(row.names, table.tolist(), strict=True):
            if not np.isfinite(largest):
                continue  # a gradient with inf or nan has no histogram
            edges = np.linspace(-1.0, 1.0, _BINS + 1) * (largest or 1.0)
            for logger in trainer.loggers:
                logger.log_histogram(
                    f"gradients{self.group_separator}{name}", (np.asarray(counts), edges), step=row.step
                )


def _histograms(parameters: list[Tensor]) -> Tensor:
    """Count each gradient's elements in bins. Collective: all ranks call it.

    Returns:
        A row per parameter: the largest absolute element, which is the limit of the bins, and the count of each bin.
    """
    largest = each_norm(parameters, inf)
    rows: list[Tensor] = []
    for parameter, most in zip(parameters, largest.unbind(), strict=True):
        gradient = gradient_of(parameter)
        assert gradient is not None
        values = local_part(gradient)
        scaled = values.float() / torch.where(most > 0, most, 1.0).to(values.device, non_blocking=True)
        with _in_any_order():
            # With a given range, torch does not wait for the device to find the smallest and the largest value.
            counts = torch.histc(scaled, _BINS, -1.0, 1.0)
        rows.append(counts.to(most.device, non_blocking=True))
    wide = widest_float(largest.device)
    counts = reduce_shards(torch.stack(rows).to(wide), parameters, 1.0)
    return torch.cat([largest[:, None].to(wide), counts], dim=1)


@contextmanager
def _in_any_order() -> Iterator[None]:
    """Turn off deterministic algorithms, which forbid `torch.histc` on CUDA, although its counts are always exact."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns)


def _on_its_way(step: int, values: Tensor, names: list[str], suffix: str) -> _Row:
    """Start the copy of the values to the host, without waiting for it on a GPU."""
    if values.device.type != "cuda":
        return _Row(step, values.cpu(), lambda: True, lambda: None, names, suffix)
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(values.device))
    return _Row(step, copy, event.query, event.synchronize, names, suffix)


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Compute the norm of each parameter's gradient, and of all gradients together, without waiting for the device.

    If a strategy shards parameters, the norms are those of this rank's shards.

    Args:
        module: the module; parameters without a gradient are left out.
        norm_type: the order of the norm, such as 2; "inf" for the largest absolute element.
        group_separator: text between `grad_2.0_norm` and the parameter's name in the keys.

    Returns:
        0-dim tensors under keys such as `grad_2.0_norm/layer.weight`, and `grad_2.0_norm_total` last, to be passed to
        `self.log_dict`; an empty dict if no parameter has a gradient.

    Raises:
        SettingError: `norm_type` is not above 0.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> layer.weight.grad = torch.full((1, 1), -3.0)
        >>> grad_norm(layer, 2)
        {'grad_2.0_norm/weight': tensor(3.), 'grad_2.0_norm_total': tensor(3.)}
    """
    order = float(norm_type)
    if not order > 0:
        raise SettingError(
            f"norm_type={norm_type!r}: expected a number above 0, or 'inf'", field="norm_type", got=order
        )
    norms = {
        f"grad_{order}_norm{group_separator}{name}": parameter.grad.detach().norm(order)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        norms[f"grad_{order}_norm_total"] = torch.stack(list(norms.values())).norm(order)
    return norms
