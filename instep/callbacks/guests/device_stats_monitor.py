"""`DeviceStatsMonitor`: log the load and the memory of the CPU and the GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from instep.callbacks.base import Callback, logs_here
from instep.errors import SettingError
from instep.utils.checks import FLAG
from instep.utils.imports import require
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

_EVERY_S = 1.0  # seconds between two samples; a sample takes 0.1 ms of CPU time, and a few ms if NVML is read

Sampler = Callable[[], dict[str, float]]


class DeviceStatsMonitor(Callback):
    """Log statistics of this process's device to the loggers, every `log_every_n_steps` batches.

    A thread takes a sample every second and the training loop logs the newest sample, so that a step waits neither for
    the operating system nor for a driver. The logged names have the form
    `DeviceStatsMonitor.on_train_batch_end/cpu_percent`, with `on_validation_batch_end` or `on_test_batch_end` in
    validation and test.

    - CPU, read by psutil: `cpu_percent`, `cpu_vm_percent` (memory) and `cpu_swap_percent`, of the whole machine.
    - CUDA, read by torch: all values of `torch.cuda.memory_stats`, such as `allocated_bytes.all.peak`.
    - CUDA, read by nvidia-ml-py if it is installed, under the names of nvidia-smi: `utilization.gpu` and
      `utilization.memory` (percent), `memory.used` and `memory.total` (bytes, of all processes), `temperature.gpu`
      (degrees Celsius), `power.draw` (watts) and `clocks.sm` (MHz). Values that a device does not report are left out.

    By default only the main process logs, so the values are those of its machine and its device.

    Args:
        cpu_stats: whether to log the CPU's statistics. None: only if the device is not a CUDA device.
        filter_keys: statistics to log, such as {"cpu_percent", "power.draw"}. None: all statistics.

    Raises:
        SettingError: there is no logger.
        MissingPackageError: the CPU's statistics are to be logged and psutil is not installed.

    Example:
        >>> monitor = DeviceStatsMonitor(filter_keys={"cpu_percent", "allocated_bytes.all.peak"})
        >>> sorted(monitor.filter_keys or ())
        ['allocated_bytes.all.peak', 'cpu_percent']

    Source: the names are those of Lightning's `DeviceStatsMonitor`.
    """

    def __init__(self, cpu_stats: bool | None = None, filter_keys: Iterable[str] | None = None) -> None:
        if isinstance(filter_keys, str):
            filter_keys = [filter_keys]
        self.cpu_stats = None if cpu_stats is None else FLAG("cpu_stats", cpu_stats)
        self.filter_keys = None if filter_keys is None else frozenset(filter_keys)
        self._every = 0
        self._logged_step = -1
        self._samplers: list[Sampler] = []
        self._newest: dict[str, float] | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if not trainer.loggers and not trainer.fast_dev_run:
            raise SettingError(
                "Cannot use `DeviceStatsMonitor` callback with `Trainer(logger=False)`: give Trainer(logger=...) one, "
                "or leave the callback out."
            )
        # Measure nothing in a process that does not log.
        self._every = trainer.log_every_n_steps if trainer.loggers and logs_here(trainer) else 0
        if not self._every:
            return
        self._samplers = self._choose(trainer.strategy.root_device)
        # psutil returns 0.0 as the first CPU percentage; each later percentage covers the time since the last call.
        self._newest = self._sample()
        unknown = (self.filter_keys or frozenset()) - self._newest.keys()
        if unknown:
            warn_user(
                f"DeviceStatsMonitor's filter_keys contains keys not found in the device's statistics: "
                f"{', '.join(sorted(unknown))}. There are: {', '.join(sorted(self._newest))}"
            )
        if self._samplers:
            self._over = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._over,), name="device stats", daemon=True)
            self._thread.start()

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._over.set()
            thread.join(_EVERY_S)  # the timeout lets the run end even if a driver hangs in the thread
        self._samplers, self._newest = [], None

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._logged_step = trainer.global_step  # a resumed run has already logged this step

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self._every and step % self._every == 0 and step != self._logged_step:
            self._logged_step = step
            self._log(trainer, "on_train_batch_end")

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._every and (batch_idx + 1) % self._every == 0 and not trainer.sanity_checking:
            self._log(trainer, "on_validation_batch_end")

    def on_test_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._every and (batch_idx + 1) % self._every == 0:
            self._log(trainer, "on_test_batch_end")

    def _log(self, trainer: Trainer, hook: str) -> None:
        values = self._newest or {}
        if self.filter_keys is not None:
            values = {name: value for name, value in values.items() if name in self.filter_keys}
        if values:
            prefix = f"{type(self).__qualname__}.{hook}/"
            named = {prefix + name: value for name, value in values.items()}
            for logger in trainer.loggers:
                logger.log_metrics(named, step=trainer.global_step)

    def _choose(self, device: torch.device) -> list[Sampler]:
        samplers: list[Sampler] = []
        if device.type == "cuda":
            samplers.append(lambda: torch.cuda.memory_stats(device))
            if find_spec("pynvml") is not None:
                samplers.append(_nvml_sampler(device))
        if self.cpu_stats or (self.cpu_stats is None and device.type != "cuda"):
            samplers.append(_cpu_sampler())
        return samplers

    def _sample(self) -> dict[str, float]:
        return {name: value for sampler in self._samplers for name, value in sampler().items()}

    def _run(self, over: threading.Event) -> None:
        wait_s = 0.1  # the first wait is short, so that the first real CPU percentage is available soon
        while not over.wait(wait_s):
            self._newest = self._sample()
            wait_s = _EVERY_S


def _cpu_sampler() -> Sampler:
    psutil: Any = require("psutil", extra="monitor", purpose="DeviceStatsMonitor: `psutil` is not installed, and it")
    return lambda: {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }


def _nvml_sampler(device: torch.device) -> Sampler:
    """Make the function that reads a GPU's statistics through NVML; it skips a statistic that has failed once."""
    pynvml: Any = require("pynvml", extra="monitor", purpose="DeviceStatsMonitor")
    try:
        pynvml.nvmlInit()
        # Find the device by its UUID, since NVML ignores the numbering of CUDA_VISIBLE_DEVICES.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    # NVML raises an error for a slice of a GPU (MIG), or in a container without the driver's library.
    except pynvml.NVMLError as error:
        warn_user(f"DeviceStatsMonitor logs memory alone of {device}: NVIDIA's library says {error}")
        return dict
    questions: dict[str, Callable[[], float]] = {
        "utilization.gpu": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "utilization.memory": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).memory,
        "memory.used": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used,
        "memory.total": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        "temperature.gpu": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "power.draw": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "clocks.sm": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
    }

    def sample() -> dict[str, float]:
        values: dict[str, float] = {}
        for name, ask in tuple(questions.items()):
            try:
                values[name] = float(ask())
            except pynvml.NVMLError:  # not every device has every statistic: a MIG slice has no utilization
                del questions[name]
        return values

    return sample
