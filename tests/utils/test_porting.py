"""What other packages call things, and that the table says what there is."""

from __future__ import annotations

from typing import Any

import pytest

import instep
from instep.config.settings import NAMES, OTHER_NAMES, advice, check, translate
from instep.errors import SettingError
from instep.utils.porting import LAUNCH_SWITCHES, successor

# What `accelerate launch --help` of 1.15 and torchrun's of torch 2.13 list, without what is instep's own name.
_THEIRS = """
cpu multi_gpu tpu ipex mixed_precision num_processes num_machines num_cpu_threads_per_process enable_cpu_affinity
dynamo_backend dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic use_deepspeed use_fsdp use_parallelism_config
use_megatron_lm gpu_ids same_network machine_rank main_process_ip main_process_port role rdzv_id monitor_interval
tpu_cluster no_tpu_cluster tpu_use_sudo vm main_training_function downcast_bf16 deepspeed_config_file zero_stage
offload_optimizer_device gradient_accumulation_steps gradient_clipping zero3_init_flag deepspeed_hostfile
deepspeed_multinode_launcher fsdp_version fsdp_offload_params fsdp_min_num_params fsdp_auto_wrap_policy
megatron_lm_tp_degree fp8_backend aws_access_key_id mpirun_hostfile parallelism_config_tp_size nnodes
use_xpu use_mps_device command_file nproc_per_node standalone start_method redirects local_ranks_filter logs_specs
"""


@pytest.mark.parametrize("name", _THEIRS.split())
def test_names_of_theirs_are_known(name: str) -> None:
    assert name in {*NAMES, *OTHER_NAMES, *LAUNCH_SWITCHES} or "another launcher's" in advice(name)
    assert set(OTHER_NAMES.values()) <= set(NAMES)


def test_a_file_of_accelerate() -> None:
    theirs: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "debug": True, "distributed_type": "FSDP", "downcast_bf16": "no",
        "fsdp_config": {"fsdp_version": 2}, "machine_rank": 1, "main_process_ip": "host", "main_process_port": 29500,
        "main_training_function": "main", "mixed_precision": "bf16", "num_machines": 2, "num_processes": 16,
        "rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False, "use_cpu": False,
        "gpu_ids": None, "enable_cpu_affinity": False,
    }  # fmt: skip
    taken, left = translate(theirs)
    assert check(taken, {}) == {
        "debug": True, "strategy": "fsdp", "node_rank": 1, "master_addr": "host", "master_port": 29500,
        "precision": "bf16", "num_nodes": 2, "num_processes": 16, "rdzv_backend": "static", "cpu_affinity": False,
    }  # fmt: skip
    assert [text.split()[0] for text in left] == ["fsdp_config", "main_training_function"]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"gpu_ids": "all", "num_processes": 2}, {"num_processes": 2}),
        ({"gpu_ids": "all"}, {"devices": -1}),
        ({"gpu_ids": "2,3", "num_processes": 2}, {"devices": (2, 3)}),
        ({"gpu_ids": 1, "num_processes": 1}, {"devices": (1,)}),
        ({"gpu_ids": "0,1", "num_processes": 4, "num_machines": 2}, {"devices": (0, 1), "num_nodes": 2}),
    ],
)
def test_gpu_ids_say_which_and_num_processes_how_many(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    taken, left = translate(theirs)
    assert (check(taken, {}), left) == (ours, [])


def test_gpu_ids_that_do_not_fit() -> None:
    assert translate({"gpu_ids": "0,1", "num_processes": 3}) == (
        {"num_processes": 3},
        ["gpu_ids: 0,1 are not as many as num_processes=3; set devices=..."],
    )


def test_a_name_that_stands_for_two_things_goes_by_its_place() -> None:
    assert successor("lightning.callbacks.model_summary.ModelSummary") == "instep.callbacks.ModelSummary"
    assert successor("lightning.utilities.model_summary.ModelSummary") == "instep.callbacks.summarize"


@pytest.mark.parametrize(
    ("kind", "accelerator"), [("MULTI_XPU", "xpu"), ("MULTI_HPU", "hpu"), ("MULTI_CPU", "cpu"), ("XLA", "xla")]
)
def test_kinds_of_device_are_taken_over(kind: str, accelerator: str) -> None:
    assert translate({"distributed_type": kind, "ipex_config": {}}) == ({"accelerator": accelerator}, [])
    _, left = translate({"distributed_type": "MULTI_MLU", "ipex_config": {"ipex": True}})
    assert left[0] == "distributed_type: MULTI_MLU is no kind of device that instep knows; set accelerator=..."
    assert "leave it out: what it did is in torch itself" in left[1]


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ({"distributed_type": "MEGATRON_LM", "num_processes": 8}, r"MEGATRON_LM is refused.*MeshStrategy\(tp=, pp=\)"),
        ({"compute_environment": "AMAZON_SAGEMAKER", "mixed_precision": "fp16"}, "SAGEMAKER is refused.*hardware.md"),
    ],
)
def test_files_whose_rest_would_mean_something_else_are_refused(theirs: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        translate(theirs)


def test_an_import_of_a_name_of_others_says_what_to_do() -> None:
    with pytest.raises(ImportError, match=r"instep has no Megatron-LM: use Trainer\(strategy=.*MeshStrategy\(tp="):
        from instep.accelerator import MegatronLMPlugin  # noqa: F401  # pyright: ignore
    with pytest.raises(ImportError, match=r"use instep\.TrainModule"):
        from instep import LightningModule  # noqa: F401  # pyright: ignore
    with pytest.raises(SettingError, match="instep has no Megatron-LM; use strategy=MeshStrategy"):
        instep.Accelerator(megatron_lm_plugin=None)
    assert not hasattr(instep, "LightningModule")
