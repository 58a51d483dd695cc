from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from instep.callbacks import DeviceStatsMonitor
from instep.callbacks.guests import device_stats_monitor
from instep.errors import MissingPackageError, SettingError
from tests.callbacks.fakes import RecordingLogger
from tests.trainer.toys import Toy, loader, quiet

PREFIX = "DeviceStatsMonitor"


def fit(monitor: DeviceStatsMonitor, **settings: object) -> RecordingLogger:
    logger = RecordingLogger()
    options = {"max_steps": 4, "log_every_n_steps": 2, "accumulate_grad_batches": 2, **settings}
    trainer = quiet(logger=logger, callbacks=monitor, **options)
    trainer.fit(Toy(), loader(48), loader(12))
    return logger


def test_the_processor_by_step_and_in_validation_and_the_thread_ends() -> None:
    logger = fit(DeviceStatsMonitor(), val_check_interval=4, num_sanity_val_steps=2)
    for name, step in (("train", [2, 4]), ("validation", [2, 4])):
        for value in ("cpu_percent", "cpu_vm_percent", "cpu_swap_percent"):
            values = logger.of(f"{PREFIX}.on_{name}_batch_end/{value}")
            assert list(values) == step
            assert all(0 <= one <= 100 for one in values.values())
    assert "device stats" not in [thread.name for thread in threading.enumerate()]


def test_device_stats_are_logged_only_for_the_keys_asked_for() -> None:
    logger = fit(DeviceStatsMonitor(filter_keys={"cpu_percent"}))
    assert {name for _, row in logger.rows for name in row} == {f"{PREFIX}.on_train_batch_end/cpu_percent"}
    with pytest.warns(UserWarning, match=r"keys not found in the device's statistics: gpu\. There are: cpu_percent,"):
        assert fit(DeviceStatsMonitor(filter_keys=["gpu"])).rows == []
    assert fit(DeviceStatsMonitor(cpu_stats=False)).rows == []
    assert fit(DeviceStatsMonitor(), log_every_n_steps=0).rows == []


def test_device_stats_monitor_needs_a_logger_and_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="Cannot use `DeviceStatsMonitor` callback"):
        quiet(callbacks=DeviceStatsMonitor(), max_steps=1).fit(Toy(), loader())
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'instep\[monitor\]'"):
        fit(DeviceStatsMonitor())


class NVMLError(Exception):
    pass


def test_nvml_names_the_device_by_uuid_and_leaves_out_what_it_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def no_rates(handle: str) -> None:
        asked.append(handle)
        raise NVMLError

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetUtilizationRates=no_rates,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=3, total=5),
        nvmlDeviceGetTemperature=lambda handle, sensor: 40,
        nvmlDeviceGetPowerUsage=lambda handle: 70500,
        nvmlDeviceGetClockInfo=lambda handle, clock: 1980,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    sample = device_stats_monitor._nvml_sampler(torch.device("cuda", 0))
    expected = {"memory.used": 3, "memory.total": 5, "temperature.gpu": 40, "power.draw": 70.5, "clocks.sm": 1980}
    assert sample() == expected
    assert sample() == expected
    assert asked == ["GPU-12-34"] * 2  # two of its names, once each
    nvml.nvmlInit = lambda: no_rates("")
    with pytest.warns(UserWarning, match="logs memory alone of cuda:0"):
        assert device_stats_monitor._nvml_sampler(torch.device("cuda", 0))() == {}
