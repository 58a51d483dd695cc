from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from instep import Accelerator
from instep.accelerator.handlers import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    by_kind,
)
from instep.errors import SettingError
from instep.state import PartialState
from instep.strategies import DDPStrategy, Precision


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: AutocastKwargs(enabled=1), r"enabled=1: expected True or False"),
        (lambda: ProjectConfiguration(project_dir=3), r"project_dir=3: expected the path of a folder"),
        (lambda: InitProcessGroupKwargs(backend="glo"), r"backend='glo': expected a backend of torch"),
        (lambda: Accelerator(cpu="x"), r"cpu='x': expected True or False"),
        (lambda: DistributedDataParallelKwargs(bucket_cap_mb=0), r"bucket_cap_mb=0.*above 0"),
        (lambda: DistributedDataParallelKwargs(comm_hook="fp_16"), r"comm_hook='fp_16'.*Did you mean 'fp16'"),
        (lambda: DistributedDataParallelKwargs(comm_wrapper="powersgd"), r"comm_wrapper='powersgd'.*no, fp16, bf16"),
        (lambda: DistributedDataParallelKwargs(comm_state_option=[1]), r"comm_state_option=.*a dict"),
        (lambda: DistributedDataParallelKwargs(static_graph=None), r"static_graph=None.*True or False"),
        (lambda: GradScalerKwargs(init_scale=0.0), r"init_scale=0.0.*above 0"),
        (lambda: GradScalerKwargs(growth_factor=1.0), r"growth_factor=1.0.*above 1"),
        (lambda: GradScalerKwargs(backoff_factor=1.5), r"backoff_factor=1.5.*between 0 and 1"),
        (lambda: GradScalerKwargs(growth_interval=0.5), r"growth_interval=0.5.*at least 1"),
        (lambda: InitProcessGroupKwargs(timeout=0), r"timeout=0.*above 0"),
        (lambda: InitProcessGroupKwargs(timeout=timedelta(0)), r"timeout=.*above 0"),
        (lambda: InitProcessGroupKwargs(backend=""), r"backend=''.*a backend"),
        (lambda: ProfileKwargs(activities="cpu"), r"activities='cpu'.*a list"),
        (lambda: ProfileKwargs(activities=["gpu"]), r"activities='gpu'.*cuda"),
        (lambda: ProfileKwargs(on_trace_ready="print"), r"on_trace_ready='print'.*a function"),
        (lambda: ProfileKwargs(schedule_option={"wait": 1, "actives": 2}), r"'actives'.*Did you mean 'active'"),
        (lambda: ProfileKwargs(schedule_option={"wait": 1, "active": 2}), "at least wait, warmup and active"),
        (lambda: ProfileKwargs(schedule_option={"wait": 0, "warmup": 0, "active": 0}), "active at least 1"),
        (lambda: GradientAccumulationPlugin(num_steps=0), r"num_steps=0.*at least 1"),
        (lambda: GradientAccumulationPlugin(num_steps=True), r"num_steps=True.*at least 1"),
        (lambda: GradientAccumulationPlugin(adjust_scheduler="yes"), r"adjust_scheduler='yes'.*True or False"),
        (lambda: ProjectConfiguration("runs", None, True, 0), r"total_limit=0.*at least 1"),
    ],
)
def test_values_are_checked_at_construction(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        make()


def test_the_environment_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7")
    monkeypatch.setenv("INSTEP_GRADIENT_ACCUMULATION_STEPS", "7")
    assert GradientAccumulationPlugin(num_steps=3).num_steps == 3


def test_handlers_are_sorted_by_kind_and_what_is_none_is_refused() -> None:
    scaler, ddp = GradScalerKwargs(init_scale=2.0), DistributedDataParallelKwargs()
    assert by_kind([scaler, ddp]) == {GradScalerKwargs: scaler, DistributedDataParallelKwargs: ddp}
    assert by_kind(None) == {}
    with pytest.raises(SettingError, match=r"two GradScalerKwargs: .*init_scale=2.0.*Keep one"):
        by_kind([scaler, GradScalerKwargs()])
    with pytest.raises(SettingError, match=r"has {'init_scale': 2.0}, which is no kwargs handler.*GradScalerKwargs"):
        by_kind([{"init_scale": 2.0}])  # pyright: ignore[reportArgumentType]
    with pytest.raises(SettingError, match=r"pass it as gradient_accumulation_plugin="):
        by_kind([GradientAccumulationPlugin()])  # pyright: ignore[reportArgumentType]


def test_options_are_what_the_lower_floors_take() -> None:
    ddp = DistributedDataParallelKwargs(
        bucket_cap_mb=5, static_graph=True, comm_hook="power_sgd", comm_state_option={"matrix_approximation_rank": 2}
    )
    strategy = DDPStrategy(**ddp.options())
    assert strategy.find_unused_parameters is False
    assert (strategy.hook.name, strategy.hook.state) == ("power_sgd", {"matrix_approximation_rank": 2})
    assert strategy.ddp_options == {"bucket_cap_mb": 5, "static_graph": True}
    by_type = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.POWER_SGD, comm_wrapper=DDPCommunicationHookType("fp16")
    )
    hook = DDPStrategy(**by_type.options()).hook
    assert (repr(hook.name), repr(hook.wrapper)) == ("'power_sgd'", "'fp16'")
    assert "bucket_cap_mb" not in DistributedDataParallelKwargs().options()  # torch's own is not the same as 25
    assert DistributedDataParallelKwargs(broadcast_buffers=False).options()["broadcast_buffers"] is False
    state = PartialState(cpu=True, **InitProcessGroupKwargs(timeout=90).options())
    assert state.num_processes == 1
    precision = Precision(
        "bf16-mixed", torch.device("cpu"), autocast_options=AutocastKwargs(cache_enabled=False).options()
    )
    context = precision.context()
    assert isinstance(context, torch.autocast)
    assert context._cache_enabled is False
    assert torch.amp.GradScaler("cpu", **GradScalerKwargs(init_scale=8.0).options()).get_scale() == 8.0


def test_loggers_write_into_the_project_unless_told_otherwise() -> None:
    assert ProjectConfiguration("runs").logging_dir == "runs"
    assert ProjectConfiguration("runs", "logs").logging_dir == "logs"


def test_a_limit_that_limits_nothing_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"total_limit=2.*automatic_checkpoint_naming"):
        config = ProjectConfiguration(total_limit=2)
    config.set_directories("runs")
    assert (config.project_dir, config.logging_dir) == ("runs", "runs")
    config.set_directories("other")
    assert (config.project_dir, config.logging_dir) == ("other", "runs")
    with pytest.raises(SettingError, match="project_dir=5: expected the path of a folder"):
        config.set_directories(5)  # pyright: ignore[reportArgumentType]
