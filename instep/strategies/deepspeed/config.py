"""Read and check DeepSpeed's JSON configuration, and fill it with values of the Trainer and the module."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from instep.errors import SettingError, one_of
from instep.strategies.precision import Precision
from instep.types import PathLike
from instep.utils.checks import choice
from instep.utils.paths import to_path
from instep.utils.porting import INSTEAD

AUTO = "auto"
Config = dict[str, Any]

_DTYPES = {
    "32-true": None,
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "16-mixed": "fp16",
    "16-true": "fp16",
}
_REFUSED_ZERO = ("zenflow", "mics_shard_size", "zero_hpz_partition_size", "round_robin_gradients")


def read_config(config: Mapping[str, Any] | PathLike) -> Config:
    """Return a configuration that may be modified: a copy of the mapping, or the content of the JSON file.

    Raises:
        SettingError: the file cannot be read, or does not contain a JSON object.
    """
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    path = to_path(config)
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise SettingError(
            f"config={str(path)!r} cannot be read as a JSON file: {error}", field="config", got=path
        ) from error
    if not isinstance(found, dict):
        raise SettingError(f"{path} holds {type(found).__name__}, not a JSON object", field="config", got=path)
    return found


def make_config(
    stage: int,
    offload_optimizer: str | None,
    offload_parameters: str | None,
    nvme_path: PathLike | None,
    options: Mapping[str, Any],
) -> Config:
    """Make DeepSpeed's configuration from the arguments of `DeepSpeedStrategy`."""
    zero: Config = {"stage": stage, **options}
    for field, key, device in (
        ("offload_optimizer", "offload_optimizer", offload_optimizer),
        ("offload_parameters", "offload_param", offload_parameters),
    ):
        if device is None:
            continue
        choice("cpu", "nvme")(field, device)
        zero[key] = {"device": device, "pin_memory": AUTO}
        if device == "nvme":
            if nvme_path is None:
                raise SettingError(
                    f"{field}='nvme' needs nvme_path, a folder on a local disk", field="nvme_path", got=None
                )
            zero[key]["nvme_path"] = str(nvme_path)
    return {"zero_optimization": zero}


def check_config(config: Config) -> int:
    """Raise an error for settings of DeepSpeed that can never work with instep's loop.

    Returns:
        The ZeRO stage.

    Raises:
        SettingError: an entry cannot work; the message names it and a replacement.
    """
    for key, instead in INSTEAD["DeepSpeed's config"].items():
        value = config.get(key)
        given = value.get("enabled", True) if isinstance(value, Mapping) else value not in (None, AUTO, 1)
        if given:
            raise SettingError(f"{key!r} in DeepSpeed's config: {instead}. Leave it out.", field=key, got=value)
    zero = config.setdefault("zero_optimization", {})
    for key in _REFUSED_ZERO:
        if zero.get(key) not in (None, False, AUTO, 1, -1):
            raise SettingError(
                f"zero_optimization.{key} in DeepSpeed's config is not supported. Leave it out.",
                field=key,
                got=zero[key],
            )
    stage = zero.setdefault("stage", 2)
    if stage not in (0, 1, 2, 3):
        raise one_of("stage", stage, (0, 1, 2, 3))
    needs = {"offload_param": 3, "offload_optimizer": 1}
    for key, least in needs.items():
        device = offload_device(config, key)
        least = 3 if device == "nvme" else least
        if device is not None and stage < least:
            raise SettingError(
                f"{key} to {device!r} needs stage {least} or higher, and this is stage {stage}",
                field="stage",
                got=stage,
            )
    if all(_enabled(config, kind) is True for kind in ("fp16", "bf16")):
        raise SettingError("DeepSpeed's config enables both fp16 and bf16; choose one", field="config")
    return stage


def offload_device(config: Mapping[str, Any], key: str) -> str | None:
    """Return the device in the section `key` ("offload_optimizer" or "offload_param"); None without offloading."""
    device = (config.get("zero_optimization", {}).get(key) or {}).get("device")
    return None if device in (None, "none", AUTO) else device


def compute_kind(config: Mapping[str, Any], precision: Precision, stage: int) -> str | None:
    """Return the configuration section for the run's precision: "bf16", "fp16" or "torch_autocast"; None for float32.

    Raises:
        SettingError: DeepSpeed does not support the precision, or the configuration asks for another one.
    """
    if precision.name not in _DTYPES:
        raise SettingError(
            f"precision={precision.name!r} is not there with DeepSpeed. Use one of: {', '.join(_DTYPES)}.",
            field="precision",
            got=precision.name,
        )
    kind = _DTYPES[precision.name]
    for other in ("fp16", "bf16"):
        said = _enabled(config, other)
        if said is not None and said is not (kind == other):
            raise SettingError(
                f"DeepSpeed's config has {other}.enabled={said}, and the run has precision={precision.name!r}. Make "
                f"it {AUTO!r} there, and choose by Trainer(precision=...).",
                field="precision",
                got=precision.name,
            )
    by_torch = bool(_enabled(config, "torch_autocast"))
    if kind == "fp16" and (by_torch or stage == 0):
        where = "torch_autocast" if by_torch else "stage 0"
        raise SettingError(
            f"precision={precision.name!r} with {where} is not supported: the gradient scaler's state could not be "
            "saved. Use bf16-mixed, or DeepSpeed's own fp16 with stage 1 or higher.",
            field="precision",
            got=precision.name,
        )
    return "torch_autocast" if by_torch and kind is not None else kind


def fill(config: Config, *, kind: str | None, device_type: str, accumulate: int, elements: int) -> Config:
    """Return the configuration for the engine: a copy with a value in place of each "auto".

    Args:
        config: configuration that `check_config` accepted.
        kind: result of `compute_kind`.
        device_type: type of the device, such as "cuda".
        accumulate: number of micro-batches per optimizer step. It may be changed in the engine later.
        elements: number of elements of all parameters, an upper limit for the size of buckets.

    Raises:
        SettingError: the value for an "auto" is not known.
    """
    filled = copy.deepcopy(config)
    filled.pop("optimizer", None)  # the optimizer is made before the engine, and passed to the engine
    filled.pop("train_batch_size", None)
    filled["gradient_accumulation_steps"] = accumulate
    if filled.get("train_micro_batch_size_per_gpu", AUTO) == AUTO:
        filled["train_micro_batch_size_per_gpu"] = 1  # DeepSpeed uses this value only to print samples per second
    if filled.get("gradient_clipping") == AUTO:
        del filled["gradient_clipping"]  # the Trainer's clipping value is set at each step
    for other in ("fp16", "bf16"):
        if other in filled or kind == other:
            filled[other] = {**filled.get(other, {}), "enabled": kind == other}
    if kind == "torch_autocast":
        filled["torch_autocast"] = {**filled.get("torch_autocast", {}), "enabled": True, "dtype": "bfloat16"}
    filled.setdefault("zero_force_ds_cpu_optimizer", False)  # allow any optimizer with offloading to the CPU
    zero = filled["zero_optimization"]
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        if zero.get(key, AUTO) == AUTO:
            zero[key] = min(max(elements + elements % 2, 2), 500_000_000)
    for key in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(key), dict) and zero[key].get("pin_memory") == AUTO:
            zero[key]["pin_memory"] = device_type != "cpu"
    for key in _ZERO_DEFAULTS:
        if zero.get(key) == AUTO:
            del zero[key]
    left = list(_autos(filled))
    if left:
        raise SettingError(
            f"DeepSpeed's config says 'auto' where there is nothing to fill in: {', '.join(left)}. Give values, or "
            "leave them out for DeepSpeed's defaults.",
            field="config",
            got=left,
        )
    return filled


_ZERO_DEFAULTS = (
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "sub_group_size",
    "overlap_comm",
    "contiguous_gradients",
    "stage3_gather_16bit_weights_on_model_save",
)


def check_accumulation(config: Mapping[str, Any], accumulate: int) -> None:
    """Raise a `SettingError` if the configuration has a different number of micro-batches per step than the run."""
    said = config.get("gradient_accumulation_steps", AUTO)
    if said not in (AUTO, accumulate):
        raise SettingError(
            f"DeepSpeed's config has gradient_accumulation_steps={said}, and the run accumulates {accumulate} "
            "micro-batches. Make it 'auto' there, and say it by Trainer(accumulate_grad_batches=...).",
            field="accumulate_grad_batches",
            got=accumulate,
        )


def _enabled(config: Mapping[str, Any], key: str) -> bool | None:
    """Return the entry `enabled` of a section of the configuration; None if it is missing or "auto"."""
    said = (config.get(key) or {}).get("enabled", AUTO)
    return None if said == AUTO else bool(said)


def _autos(value: Any, at: str = "") -> Iterator[str]:
    if value == AUTO:
        yield at
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _autos(inner, f"{at}.{key}" if at else str(key))
