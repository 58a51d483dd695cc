"""DeepSpeed's configuration: what is refused, what is filled in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.errors import SettingError
from instep.strategies import Precision
from instep.strategies.deepspeed.config import (
    check_accumulation,
    check_config,
    compute_kind,
    fill,
    make_config,
    read_config,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler"),
        ({"train_batch_size": 32}, "train_batch_size"),
        ({"amp": {"enabled": True}}, "amp"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "config"),
        ({"zero_optimization": {"stage": 4}}, "stage"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "stage"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "stage"),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, "stage"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, "mics_shard_size"),
    ],
)
def test_what_cannot_work_is_refused(config: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingError) as caught:
        check_config(config)
    assert caught.value.field == field


def test_what_is_off_or_auto_is_no_setting() -> None:
    config: dict[str, Any] = {"amp": {"enabled": False}, "train_batch_size": "auto", "fp16": {"enabled": "auto"}}
    assert check_config(config) == 2


def test_arguments_make_a_config() -> None:
    made = make_config(3, "cpu", "nvme", "/disk", {"sub_group_size": 10})
    assert made["zero_optimization"] == {
        "stage": 3,
        "sub_group_size": 10,
        "offload_optimizer": {"device": "cpu", "pin_memory": "auto"},
        "offload_param": {"device": "nvme", "pin_memory": "auto", "nvme_path": "/disk"},
    }
    with pytest.raises(SettingError, match="needs nvme_path"):
        make_config(3, "nvme", None, None, {})
    with pytest.raises(SettingError, match="Did you mean 'cpu'"):
        make_config(3, "cpuu", None, None, {})


def test_auto_values_are_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text(
        json.dumps(
            {
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
                "bf16": {"enabled": "auto"},
                "fp16": {"enabled": "auto", "loss_scale_window": 100},
                "zero_optimization": {
                    "stage": 3,
                    "reduce_bucket_size": "auto",
                    "stage3_prefetch_bucket_size": "auto",
                    "offload_optimizer": {"device": "cpu", "pin_memory": "auto"},
                },
                "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
            }
        )
    )
    config = read_config(path)
    kind = compute_kind(config, Precision("bf16-mixed", CPU), check_config(config))
    assert kind == "bf16"
    assert fill(config, kind=kind, device_type="cpu", accumulate=4, elements=7) == {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale_window": 100},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 8,
            "allgather_bucket_size": 8,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        },
    }
    assert config["zero_optimization"]["reduce_bucket_size"] == "auto"  # for the next run


def test_an_auto_without_a_value_is_named() -> None:
    config = {"zero_optimization": {"stage": 2}, "aio": {"block_size": "auto"}}
    with pytest.raises(SettingError, match=r"aio\.block_size"):
        fill(config, kind=None, device_type="cpu", accumulate=1, elements=2)


def test_the_run_decides_on_precision_and_accumulation() -> None:
    with pytest.raises(SettingError, match=r"bf16\.enabled=True, and the run has precision='32-true'"):
        compute_kind({"bf16": {"enabled": True}}, Precision("32-true", CPU), 2)
    with pytest.raises(SettingError, match="64-true"):
        compute_kind({}, Precision("64-true", CPU), 2)
    with pytest.raises(SettingError, match="stage 0"):
        compute_kind({}, Precision("16-true", CPU), 0)
    assert compute_kind({}, Precision("16-true", CPU), 1) == "fp16"
    assert compute_kind({"torch_autocast": {"enabled": True}}, Precision("bf16-mixed", CPU), 1) == "torch_autocast"
    check_accumulation({"gradient_accumulation_steps": "auto"}, 2)
    with pytest.raises(SettingError, match="accumulates 2"):
        check_accumulation({"gradient_accumulation_steps": 3}, 2)


def test_a_file_that_is_no_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text("[1]")
    with pytest.raises(SettingError, match="list, not a JSON object"):
        read_config(path)
    with pytest.raises(SettingError, match="cannot be read"):
        read_config(tmp_path / "missing.json")


@pytest.mark.deepspeed
def test_one_of_several_configs_is_chosen_by_name() -> None:
    from instep.strategies import DeepSpeedStrategy

    configs = {"small": {"zero_optimization": {"stage": 1}}, "large": {"zero_optimization": {"stage": 3}}}
    strategy = DeepSpeedStrategy(configs=configs, use="large")
    assert (strategy.stage, strategy.inference_mode) == (3, False)
    strategy.select("small")
    assert (strategy.stage, strategy.inference_mode) == (1, True)
    with pytest.raises(SettingError, match="Did you mean 'large'"):
        strategy.select("larger")
    with pytest.raises(SettingError, match="say it in the config"):
        DeepSpeedStrategy(stage=3, config={})
    with pytest.raises(SettingError, match="were not given"):
        DeepSpeedStrategy(use="small")


@pytest.mark.deepspeed
def test_the_optimizer_of_a_config_is_made() -> None:
    from instep.strategies import DeepSpeedStrategy

    section = {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "eps": "auto"}}
    strategy = DeepSpeedStrategy(config={"optimizer": section})
    strategy.device = CPU
    optimizer = strategy.make_optimizer([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["lr"] == 0.5
    assert list(optimizer.defaults["betas"]) == [0.9, 0.95]
    assert optimizer.defaults["eps"] == 1e-8
    with pytest.raises(SettingError, match="betas"):
        strategy.make_optimizer([torch.nn.Parameter(torch.ones(2))], betas=(0.9, 0.99))
    strategy.config = {}
    with pytest.raises(SettingError, match="no optimizer section"):
        strategy.make_optimizer([])
