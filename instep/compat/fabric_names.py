"""Names of Fabric's modules other than `Fabric`: precision, devices, strategies, loggers, seeds and throughput.

Subclasses of instep's precision and loggers have the prefix `Fabric` in this file, since a configuration finds a
subclass by its name, which must be unique.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from instep import loggers as ours_loggers
from instep.callbacks.guests.throughput_monitor import Totals
from instep.compat.fsdp import FullyShardedDataParallelPlugin
from instep.distributed.nested import map_leaves
from instep.errors import SettingError
from instep.state import find_device_kind
from instep.strategies import DataParallelStrategy as DataParallelStrategy
from instep.strategies import Precision as _Precision
from instep.strategies import Strategy
from instep.trainer import hooks
from instep.trainer.module import TrainModule
from instep.types import Stateful
from instep.utils.flops import peak_flops
from instep.utils.seed import seed_process

SEED_VARIABLE = "PL_GLOBAL_SEED"  # name of the environment variable from which programs of Fabric read the seed
MisconfigurationException = SettingError
PossibleUserWarning, Optimizable, _Stateful = UserWarning, Optimizer, Stateful

# ---- precision, devices, strategies


class FabricPrecision(_Precision):
    """instep's precision with the methods of Fabric's precision."""

    precision = property(lambda self: self.name)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context in which a forward pass runs."""
        return self.context() or nullcontext()

    def convert_input(self, data: Any) -> Any:
        """Cast floating-point tensors to the dtype that the step computes in."""
        return data if self.compute_dtype is None else _cast(data, self.compute_dtype)

    def convert_output(self, data: Any) -> Any:
        """Cast floating-point tensors to torch's default dtype."""
        return data if self.compute_dtype is None else _cast(data, torch.get_default_dtype())

    def convert_module(self, module: nn.Module) -> Any:
        """Cast a module's weights in place, and return the module."""
        super().convert_module(module)
        return module


Precision = FabricPrecision


def _cast(data: Any, dtype: torch.dtype) -> Any:
    return map_leaves(lambda leaf: leaf.to(dtype) if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf, data)


class Accelerator:
    """A kind of device, with the number of such devices on this machine."""

    kind = "auto"

    @classmethod
    def is_available(cls) -> bool:
        """Return True if this machine has a device of this kind."""
        return cls.auto_device_count() > 0

    @classmethod
    def auto_device_count(cls) -> int:
        """Return the number of devices of this kind."""
        try:
            return find_device_kind(cls.kind).count()
        except SettingError:
            return 0


ACCELERATORS = {
    kind: type(f"{kind.upper()}Accelerator", (Accelerator,), {"kind": kind}) for kind in ("cpu", "cuda", "mps", "xla")
}
CPUAccelerator, CUDAAccelerator, MPSAccelerator, XLAAccelerator = ACCELERATORS.values()


class _Kinds(type):
    """Metaclass of strategy classes that programs use only in `isinstance`."""

    def __instancecheck__(cls, instance: Any) -> bool:
        alone = type(instance) is Strategy
        return alone if cls.__name__ == "SingleDeviceStrategy" else isinstance(instance, Strategy) and not alone


SingleDeviceStrategy, ParallelStrategy = (_Kinds(name, (), {}) for name in ("SingleDeviceStrategy", "ParallelStrategy"))


FSDPStrategy = FullyShardedDataParallelPlugin

# ---- loggers


class Logger:
    """Base of a program's own loggers, which override `log_metrics` and `log_hyperparams`."""

    root_dir = log_dir = name = version = experiment = None
    group_separator = "/"

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing; a program's own logger overrides the methods that it needs."""

    log_metrics = log_hyperparams = log_graph = save = finalize = _do_nothing


class _InFoldersOfFabric:
    def __init__(self, root_dir: Any, name: str | None = "lightning_logs", version: Any = None, **options: Any) -> None:
        super().__init__(root_dir, name, version, **options)  # pyright: ignore[reportCallIssue]  of the other base


class FabricCSVLogger(_InFoldersOfFabric, ours_loggers.CSVLogger):
    """instep's CSVLogger, which writes into Fabric's folders."""


class FabricTensorBoardLogger(_InFoldersOfFabric, ours_loggers.TensorBoardLogger):
    """instep's TensorBoardLogger, which writes into Fabric's folders."""


CSVLogger, TensorBoardLogger = FabricCSVLogger, FabricTensorBoardLogger


# ---- small functions


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed python, numpy and torch in the same way on all ranks; samplers of shuffled loaders use this seed too.

    Raises:
        ValueError: the seed is not a number, or outside numpy's range.
    """
    asked = os.environ.get(SEED_VARIABLE, "0") if seed is None else seed
    try:
        seed = int(asked)
    except ValueError:
        raise ValueError(f"Invalid seed specified via {SEED_VARIABLE}: {asked!r}") from None
    if not 0 <= seed < 2**32:
        raise ValueError(f"{seed} is not in bounds, numpy accepts from 0 to {2**32 - 1}")
    os.environ[SEED_VARIABLE], os.environ["PL_SEED_WORKERS"] = str(seed), str(int(workers))
    import numpy  # noqa: F401  imported so that `seed_process` seeds it, since the program may use it later

    seed_process(seed)
    return seed


def reset_seed() -> None:
    """Seed again with the seed of `seed_everything`; do nothing if `seed_everything` was not called."""
    if SEED_VARIABLE in os.environ:
        seed_everything(None, os.environ.get("PL_SEED_WORKERS") == "1", verbose=False)


def convert_tensors_to_scalars(metrics: Any) -> Any:
    """Convert tensors with one element to numbers, in nested data."""

    def number(leaf: Any) -> Any:
        if torch.is_tensor(leaf) and leaf.numel() != 1:
            raise ValueError(
                f"The metric `{leaf}` does not contain a single element, thus it cannot be converted to a scalar."
            )
        return leaf.item() if torch.is_tensor(leaf) else leaf

    return map_leaves(number, metrics)


def is_overridden(method_name: str, instance: Any, parent: Any = TrainModule) -> bool:
    """Return True if an object's class overrides a method of a parent class."""
    return hooks.is_overridden(instance, method_name, parent)


def measure_flops(
    model: nn.Module, forward_fn: Callable[[], Any], loss_fn: Callable[[Any], Tensor] | None = None
) -> int:
    """Count the floating-point operations of a forward pass; with `loss_fn`, also those of the backward pass."""
    with FlopCounterMode(display=False) as counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    return counter.get_total_flops()


@dataclass
class Throughput:
    """Rates over a window of updates, with the names of Fabric's metrics.

    Args:
        available_flops: operations per second that a device can do.
        world_size: number of devices.
        window_size: number of updates over which the rates are computed.
        separator: text between "device" and the name of a rate.
    """

    available_flops: float | None = None
    world_size: int = 1
    window_size: int = 100
    separator: str = "/"

    def __post_init__(self) -> None:
        self._window: deque[Totals] = deque(maxlen=self.window_size)

    def reset(self) -> None:
        """Drop all updates."""
        self._window.clear()

    def update(
        self, *, time: float, batches: int, samples: int, lengths: int | None = None, flops: int | None = None
    ) -> None:
        """Add an update: all values are totals since the start, except `flops`, which counts from the last update.

        Raises:
            ValueError: a total is less than at the last update.
        """
        last = self._window[-1] if self._window else Totals()
        now = Totals(time, batches, samples, lengths or 0, last.flops + (flops or 0))
        if min(now.minus(last)) < 0:
            raise ValueError(f"Expected the values to increase, last: {last}, current: {now}")
        self._window.append(now)

    def compute(self) -> dict[str, float]:
        """Return the totals and, once the window is full, the rates."""
        last = self._window[-1]
        found: dict[str, float] = {"time": last.time_s, "batches": last.batches, "samples": last.samples}
        if last.lengths:
            found["lengths"] = last.lengths
        if len(self._window) < (self._window.maxlen or 0):
            return found
        done = last.minus(self._window[0])
        counts = {"batches": done.batches, "samples": done.samples, "items": done.lengths, "flops": done.flops}
        rates = {f"{name}_per_sec": count / done.time_s for name, count in counts.items() if count}
        found |= {f"device{self.separator}{name}": rate for name, rate in rates.items()}
        if self.world_size > 1:
            found |= {name: rate * self.world_size for name, rate in rates.items()}
        if self.available_flops and done.flops:
            found[f"device{self.separator}mfu"] = done.flops / done.time_s / self.available_flops
        return found


class ThroughputMonitor(Throughput):
    """Throughput whose rates are logged by a Fabric.

    Args:
        fabric: the Fabric whose loggers and devices are used.
        **options: further arguments of `Throughput`.
    """

    def __init__(self, fabric: Any, **options: Any) -> None:
        flops = peak_flops(fabric.device, fabric.strategy.precision.name)
        super().__init__(flops, fabric.world_size, **options)
        self._fabric = fabric

    def compute_and_log(self, step: int | None = None, **kwargs: Any) -> dict[str, float]:
        """Return the totals and rates, and log them."""
        found = self.compute(**kwargs)
        self._fabric.log_dict(found, step)
        return found
