"""What other launchers (Accelerate, torchrun, Lightning's Fabric) call the settings of a launch.

The names that mean the same are accepted on the command line; those that have no setting are refused with an error
that says what takes their place. Config files have instep's names only; `instep config update` rewrites others.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from instep.config.settings import NAMES

RENAMED = {
    "nproc_per_node": "devices",
    "gpu_ids": "devices",
    "num_machines": "num_nodes",
    "nnodes": "num_nodes",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_address": "master_addr",
    "main_process_port": "master_port",
    "main_port": "master_port",
    "rdzv_id": "run_id",
    "mixed_precision": "precision",
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "num_cpu_threads_per_process": "cpu_threads",
    "enable_cpu_affinity": "cpu_affinity",
}
"""The same under another name."""

SWITCHES: dict[str, dict[str, Any]] = {
    "cpu": {"accelerator": "cpu"},
    "use_cpu": {"accelerator": "cpu"},
    "multi_gpu": {"accelerator": "gpu"},
    "tpu": {"accelerator": "xla"},
    "use_fsdp": {"strategy": "fsdp"},
    "use_deepspeed": {"strategy": "deepspeed"},
    "standalone": {"num_nodes": 1},
    "same_network": {},
}
"""What a switch of theirs stands for."""

_KINDS: dict[str, dict[str, Any]] = {
    "NO": {},
    "MULTI_CPU": {"accelerator": "cpu"},
    "MULTI_GPU": {"accelerator": "gpu"},
    "FSDP": {"strategy": "fsdp"},
    "DEEPSPEED": {"strategy": "deepspeed"},
    "XLA": {"accelerator": "xla"},
}  # Accelerate's distributed_type

_MESH = (
    "use --strategy with MeshStrategy's names (tp, cp, pp), or Trainer(strategy=MeshStrategy(dp_shard=, tp=, cp=, pp=))"
)
_INSTEAD = {
    "zero_stage": "use --strategy deepspeed_stage_2 (0 to 3)",
    "offload_": "use --strategy deepspeed_stage_3 --strategy-options offload_optimizer=cpu,offload_parameters=cpu",
    "deepspeed_config": "use --strategy deepspeed --strategy-options config=FILE",
    "deepspeed": "nodes are started by `instep slurm`, mpirun or `instep launch` on each; the rest of it are "
    "arguments of DeepSpeedStrategy",
    "zero3_": "weights are always built in parts and merged when they are saved (docs/strategies.md)",
    "gradient_clipping": "use Trainer(gradient_clip_val=...) or accelerator.clip_grad_norm_()",
    "fsdp": "use --strategy fsdp --strategy-options NAME=VALUE; docs/strategies.md lists FSDPStrategy's arguments",
    "megatron_lm": _MESH,
    "use_megatron_lm": _MESH,
    "parallelism_config": _MESH,
    "use_parallelism_config": _MESH,
    "dynamo": "compile the model in the program: module.compile()",
    "fp8": "use --precision fp8; for other recipes torchao's own call in configure_model",
    "downcast_bf16": "use --precision bf16-true",
    "no_tpu": "it is the default; leave it out",
    "tpu": "start the program on each host of the pod; docs/launching.md says how",
    "vm": "start the program on each host of the pod; docs/launching.md says how",
    "mpirun": "use `mpirun -n N python train.py`: instep reads its variables",
    "aws": "instep starts no cloud machines",
    "ec2": "instep starts no cloud machines",
    "compute_environment": "instep starts no cloud machines; leave it out",
    "main_training_function": "the whole script runs in each rank; leave it out",
    "monitor_interval": "the agent looks ten times a second; leave it out",
    "start_method": "ranks are programs of their own; leave it out",
    "role": "all ranks have the same role; leave it out",
    "redirects": "use --log-dir, which takes the output of all ranks",
    "local_ranks_filter": "use --log-dir with --tee 0",
    "logs_specs": "use --log-dir and --tee",
    "rdzv": "use --rdzv-backend, --rdzv-endpoint and --rdzv-conf",
    "debug_": "use --debug",
}  # the beginning of a name: what to do


def advice(name: str, spelled: str = "{}") -> str:
    """What to say about a name that is no setting.

    Args:
        name: of a setting, or an option.
        spelled: how names of ours are written there; "--{}" for options.

    Example:
        >>> advice("num_machines")
        'num_machines is called num_nodes here'
        >>> advice("precison")
        'precison is no setting; did you mean precision?'
    """
    name = name.lstrip("-").replace("-", "_").partition("=")[0]
    if name in RENAMED:
        return f"{name} is called {_spell(RENAMED[name], spelled)} here"
    if name in SWITCHES:
        stands_for = " and ".join(f"{key}: {value}" for key, value in SWITCHES[name].items())
        return f"{name} is written {stands_for} here" if stands_for else f"{name} is not needed here; leave it out"
    instead = next((text for start, text in _INSTEAD.items() if name.startswith(start)), None)
    if instead is not None:
        return f"{name} is another launcher's: {instead}"
    near = get_close_matches(name, NAMES, n=1, cutoff=0.7)
    return f"{name} is no setting{f'; did you mean {_spell(near[0], spelled)}?' if near else ''}"


def _spell(name: str, spelled: str) -> str:
    return spelled.format(name.replace("_", "-") if spelled != "{}" else name)


def translate(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Another launcher's config file in instep's names, and what could not be taken over.

    Example:
        >>> translate({"distributed_type": "MULTI_GPU", "num_processes": 8, "mixed_precision": "bf16", "role": "x"})
        ({'accelerator': 'gpu', 'num_processes': 8, 'precision': 'bf16'}, ["role is another launcher's: all ranks ...
    """
    taken: dict[str, Any] = {}
    left: list[str] = []
    for name, value in values.items():
        if name in NAMES:
            taken[name] = value
        elif name in RENAMED:
            if value is not None:
                taken[RENAMED[name]] = value
        elif name in SWITCHES:
            taken |= SWITCHES[name] if value else {}
        elif name == "distributed_type" and str(value) in _KINDS:
            taken |= _KINDS[str(value)]
        elif value not in (None, "", "no", {}, [], False) and (name, value) != ("compute_environment", "LOCAL_MACHINE"):
            left.append(advice(name))
    return taken, left
