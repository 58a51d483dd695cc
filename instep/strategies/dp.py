"""`DataParallelStrategy`: data parallelism over several GPUs in one process, by torch's DataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.optim import Optimizer

from instep.errors import SettingError
from instep.strategies.base import Strategy
from instep.strategies.precision import Precision
from instep.strategies.step_forward import StepForward
from instep.utils.checks import is_int, wrong
from instep.utils.warn import warn_user


class DataParallelStrategy(Strategy):
    """`nn.DataParallel`: one process splits each batch over its GPUs, with a thread for each GPU.

    `DDPStrategy` is faster, even on one machine: DataParallel copies the weights to every GPU in each forward, gathers
    all outputs on the first GPU, and runs all threads in one Python interpreter. This strategy is for programs that
    must use a single process.

    Only the forward of one module is split, along the first dimension of its arguments. The training step gets the
    whole batch, so losses, `self.log` and metrics are those of a single device. If the forward changes buffers, those
    of the first GPU are kept. On a machine with one GPU or only a CPU, the strategy warns and trains on this device.

    Args:
        device_ids: indices of the GPUs. None: all visible GPUs. Always use `Trainer(devices=1)`, since `devices` is the
            number of processes.
        module: name of the submodule whose forward is split, such as "net". None: the module's own `forward`, which
            `training_step` calls as `self(...)`.

    Raises:
        SettingError: the devices are wrong. (When training starts:) there is no such submodule, or it has no forward.

    Example:
        >>> DataParallelStrategy(device_ids=[0, 1], module="net").name
        'dp'
    """

    name = "dp"
    runs_copies = True

    def __init__(self, device_ids: Sequence[int] | None = None, module: str | None = None) -> None:
        ids = None if device_ids is None else list(device_ids)
        if ids is not None and (not ids or len(set(ids)) < len(ids) or not all(is_int(number, 0) for number in ids)):
            raise wrong("device_ids", device_ids, "different numbers of GPUs, such as [0, 1]; None for all")
        self.device_ids = ids
        self.module_name = module
        self._cut: nn.Module | None = None

    def connect(self, device: torch.device, precision: Precision) -> None:
        count = torch.cuda.device_count() if device.type == "cuda" else 0
        ids = list(range(count)) if self.device_ids is None else self.device_ids
        if ids and max(ids) >= count:
            seen = f"{count} GPUs, numbered from 0" if device.type == "cuda" else f"no GPU: it trains on {device.type}"
            raise SettingError(
                f"device_ids={ids}: this process sees {seen}. Leave device_ids out for all there are.",
                field="device_ids",
                got=ids,
            )
        if ids and ids[0] != (device.index or 0):
            raise SettingError(
                f"device_ids={ids} must begin with {device.index or 0}, the GPU of this run (Trainer(devices=[N]) "
                "chooses another).",
                field="device_ids",
                got=ids,
            )
        self._ids = ids
        if len(ids) < 2:
            warn_user(
                f"strategy='dp' has one device here, {device}, and trains on that alone. Leave strategy out, or use "
                "strategy='ddp' with devices=N"
            )
        super().connect(device, precision)

    def prepare_training(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.teardown()
        if self.module_name is None:
            target = module
            if type(target).forward is nn.Module.forward:
                raise SettingError(
                    f"strategy='dp' cuts up calls of self(...), and {type(module).__name__} has no forward. Define "
                    "it, or name the submodule that training_step calls: DataParallelStrategy(module='net').",
                    field="strategy",
                    got="dp",
                )
        else:
            try:
                target = module.get_submodule(self.module_name)
            except AttributeError as error:
                names = ", ".join(name for name, _ in module.named_children())
                raise SettingError(
                    f"DataParallelStrategy(module={self.module_name!r}): {error}. {type(module).__name__} has {names}.",
                    field="module",
                    got=self.module_name,
                ) from error
        if len(self._ids) > 1:
            self._cut = target
            target.forward = partial(DataParallel(StepForward(target, method="forward"), self._ids))

    def wrap(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        return DataParallel(module, self._ids) if len(self._ids) > 1 else module

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        return wrapped.module if isinstance(wrapped, DataParallel) else wrapped

    def teardown(self) -> None:
        if self._cut is not None:
            del self._cut.forward
        self._cut = None
