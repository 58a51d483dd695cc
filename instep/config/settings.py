"""The settings of `instep launch`, as one dataclass that also defines the config file and the environment variables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from instep.errors import SettingError
from instep.utils.checks import DEVICES, FLAG, TEXT, Check, above_zero, at_least, choice, is_int, read_flag, wrong
from instep.utils.plain_yaml import load
from instep.utils.porting import DISTRIBUTED_TYPES, FILES_REFUSED, INSTEAD, LAUNCH_SWITCHES, RENAMED

OTHER_NAMES = RENAMED["launch"]
"""Names that other launchers use for settings, each with instep's name."""

_ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "xpu", "hpu", "npu", "mps", "xla")
_PRECISIONS = (
    "32-true", "bf16-mixed", "16-mixed", "64-true", "bf16-true", "16-true", "fp8",
    "32", "64", "16", "fp16", "bf16", "fp16-true", "no",
)  # fmt: skip
_NODES = "a number, or MIN:MAX for a job that goes on with less"
_RANKS = "the ranks on a machine, such as 0,1"


class About(NamedTuple):
    """Description of a setting.

    Args:
        text: text for the help.
        rare: whether `--help` leaves the setting out.
    """

    text: str
    rare: bool = False


def _elastic(value: Any) -> bool:
    low, _, high = value.partition(":")
    return low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)


def _is_ranks(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, list) and all(is_int(rank, 0) for rank in value))


def _read_ranks(text: str) -> bool | list[int]:
    if text in ("all", "none"):
        return text == "all"
    if text.isdecimal():
        return [int(text)]
    return [int(part) for part in text.split(",") if part.strip()] if "," in text else read_flag(text)


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _texts(value: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(inner) for key, inner in value.items()}


_COUNT, _NATURAL, _SECONDS = at_least(1), at_least(0), above_zero("of seconds above 0")
_NUM_NODES = Check(
    lambda value: _elastic(value) if isinstance(value, str) else is_int(value, 1),
    _NODES,
    read=lambda text: int(text) if text.isdecimal() else text,
    schema={"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]},
)
_TEE = Check(
    _is_ranks,
    f"true, false, or {_RANKS}",
    read=_read_ranks,
    schema={"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "integer", "minimum": 0}}]},
)
_TEXTS = Check(
    lambda value: (
        _is_named(value)
        and not any(isinstance(inner, bool) or not isinstance(inner, str | int | float) for inner in value.values())
    ),
    "texts by name: put true and false in quotes",
    _texts,
    schema={"type": "object", "additionalProperties": {"type": "string"}},
)
_OPTIONS = Check(_is_named, "options by name", dict, schema={"type": "object"})


@dataclass(frozen=True)
class LaunchSettings:
    """The settings of a launch with their final values; each field has its check and its description."""

    accelerator: Annotated[
        str, choice(*_ACCELERATORS), About("kind of device: cpu, gpu, cuda, xpu, hpu, npu, mps, xla")
    ] = "auto"
    devices: Annotated[
        int | str | tuple[int, ...],
        DEVICES,
        About("processes per machine: a number, 'auto', -1 for all, or indices such as 0,1"),
    ] = "auto"
    num_processes: Annotated[
        int | None, _COUNT, About("processes over all machines, instead of devices", rare=True)
    ] = None
    num_nodes: Annotated[int | str, _NUM_NODES, About(f"machines: {_NODES}")] = 1
    node_rank: Annotated[int, _NATURAL, About("this machine's number, from 0")] = 0
    master_addr: Annotated[str, TEXT, About("address of machine 0")] = "127.0.0.1"
    master_port: Annotated[
        int | None, at_least(1, most=65535), About("a free port there, the same on all machines")
    ] = None
    rdzv_backend: Annotated[
        str | None, choice("static", "c10d"), About("how machines meet: static (numbered), c10d (who comes)")
    ] = None
    rdzv_endpoint: Annotated[
        str | None, TEXT, About("HOST:PORT where c10d meets; by default machine 0's", rare=True)
    ] = None
    rdzv_conf: Annotated[dict[str, str], _TEXTS, About("torchrun's settings of c10d", rare=True)] = field(
        default_factory=dict
    )
    run_id: Annotated[str | None, TEXT, About("the job's name under c10d", rare=True)] = None
    local_addr: Annotated[str | None, TEXT, About("this machine's address for the others", rare=True)] = None
    job_secret_file: Annotated[
        str | None, TEXT, About("file of mode 0600 with the secret that the machines of a job share", rare=True)
    ] = None
    max_restarts: Annotated[int, _NATURAL, About("starts over after a failure, a hang or a lost machine")] = 0
    strategy: Annotated[str, TEXT, About("ddp, fsdp, hsdp, tp, deepspeed_stage_2 ...")] = "auto"
    strategy_options: Annotated[dict[str, Any], _OPTIONS, About("its arguments: JSON, or name=value,name=value")] = (
        field(default_factory=dict)
    )
    precision: Annotated[
        str, choice(*_PRECISIONS), About("32-true, bf16-mixed, 16-mixed, 64-true, bf16-true, 16-true, fp8")
    ] = "32-true"
    accumulate_grad_batches: Annotated[int, _COUNT, About("micro-batches per optimizer step")] = 1
    debug: Annotated[bool, FLAG, About("compare collectives over the ranks before they run")] = False
    hang_timeout_s: Annotated[float | None, _SECONDS, About("seconds without a step after which a rank hangs")] = None
    grace_period_s: Annotated[float, _SECONDS, About("seconds that ranks have to save after a signal")] = 30.0
    log_dir: Annotated[str | None, TEXT, About("folder for what each rank prints")] = None
    tee: Annotated[bool | list[int], _TEE, About(f"print it too: all, none, or {_RANKS}")] = False
    cpu_affinity: Annotated[bool, FLAG, About("pin each rank to its share of the cores")] = False
    cpu_threads: Annotated[int | None, _COUNT, About("threads per rank (OMP_NUM_THREADS)")] = None
    env: Annotated[dict[str, str], _TEXTS, About("a variable for the ranks; can be repeated")] = field(
        default_factory=dict
    )
    ray: Annotated[str | None, TEXT, About("address of a Ray cluster to run on: auto, HOST:PORT, ray://...")] = None

    @property
    def most_nodes(self) -> int:
        """Maximum number of machines in the job."""
        return int(str(self.num_nodes).rpartition(":")[2])

    @property
    def least_nodes(self) -> int | None:
        """Minimum number of machines with which an elastic job continues; None if the job is not elastic."""
        return int(self.num_nodes.partition(":")[0]) if isinstance(self.num_nodes, str) else None


NAMES: tuple[str, ...] = tuple(setting.name for setting in fields(LaunchSettings))
DICTS = ("rdzv_conf", "strategy_options", "env")
SWITCHES = ("debug", "cpu_affinity")
_FROM_YES = "; YAML reads yes, no, on and off as true and false"


@cache
def _declared() -> dict[str, tuple[Check, About]]:
    hints = get_type_hints(LaunchSettings, include_extras=True)
    return {name: (get_args(hints[name])[1], get_args(hints[name])[2]) for name in NAMES}


def about(name: str) -> About:
    """Return the description of a setting."""
    return _declared()[name][1]


def choices(name: str) -> tuple[str, ...]:
    """Return the allowed values of a setting; empty if there is no list of allowed values.

    Example:
        >>> choices("rdzv_backend")
        ('static', 'c10d')
    """
    return _declared()[name][0].choices


def check(values: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """Check the values of settings, and convert them to their final form.

    Args:
        values: name of a setting -> its value; a value from a command line or a variable is text.
        sources: source of each value, for errors.

    Raises:
        SettingError: a value is wrong; each wrong value has a line with its source and the expected values.

    Example:
        >>> check({"devices": "0,1", "precision": 16, "env": "A=1"}, {})
        {'devices': (0, 1), 'precision': '16', 'env': {'A': '1'}}
    """
    resolved: dict[str, Any] = {}
    problems: dict[str, SettingError] = {}
    for name, value in values.items():
        try:
            resolved[name] = _resolve(name, value)
        except SettingError as error:
            problems[name] = error
    if problems:
        lines = [f"{sources[name]}: {error}" if name in sources else str(error) for name, error in problems.items()]
        first = next(iter(problems.values()))
        raise SettingError("\n".join(lines), field=first.field, got=first.got)
    return resolved


def _resolve(name: str, value: Any) -> Any:
    rule = _declared()[name][0]
    if name == "precision":
        # YAML reads `no` as False, and 16 as a number.
        value = "no" if value is False else value if isinstance(value, bool) else str(value)
    if isinstance(value, str):
        text = value.strip()
        value = rule.from_text(name, text) if name not in DICTS else rule(name, pairs(name, text))
    elif isinstance(value, bool) and name not in (*SWITCHES, "tee"):
        raise wrong(name, value, f"{rule.expected}{_FROM_YES}")
    else:
        value = rule(name, value)
    if name == "strategy" and value != "auto":
        from instep.strategies.registry import check_name  # imported late, since it loads torch

        value = check_name(value)
    return value


def pairs(name: str, text: str) -> dict[str, Any]:
    """Read the members of a setting that is a mapping: `{"a": 1}`, or `a=1,b=2`.

    In `env` the second form gives one member only, whose value may contain commas.

    Raises:
        SettingError: the text has neither form.
    """
    try:
        if text.startswith("{"):
            value = _object(text)
            if isinstance(value, dict):
                return value
        parts = [part.partition("=") for part in ([text] if name == "env" else text.split(",")) if part]
        if any(not sign or not key for key, sign, _ in parts):
            raise wrong(name, text, "NAME=VALUE")
        return {key.strip(): load(value, name) if name == "strategy_options" else value for key, _, value in parts}
    except SettingError as error:
        if error.got == text:
            raise
        raise wrong(name, text, f"JSON, or NAME=VALUE with a value as in YAML ({error})") from None


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return load(text, "the value")  # the text may be YAML, which needs fewer quotes than JSON


def schema() -> dict[str, Any]:
    """Describe the config file as a JSON schema, for editors and other programs."""
    from instep.strategies import strategy_names  # imported late, since it loads torch

    defaults = LaunchSettings()
    properties: dict[str, Any] = {}
    for name, (rule, what) in _declared().items():
        default = getattr(defaults, name)
        shape = dict(rule.schema) if default is not None else {"anyOf": [dict(rule.schema), {"type": "null"}]}
        properties[name] = {**shape, "default": default, "description": what.text}
    properties["strategy"]["examples"] = list(strategy_names())
    title = {"title": "instep's config file", "description": "Settings of `instep launch`"}
    return {**title, "type": "object", "properties": properties, "additionalProperties": False}


def advice(name: str, spelled: str = "{}") -> str:
    """Return advice about a name that is not a setting.

    Args:
        name: the unknown name of a setting or option.
        spelled: form in which settings are named in the advice; "--{}" for options.

    Example:
        >>> advice("num_machines")
        'num_machines is called num_nodes here'
        >>> advice("precison")
        'precison is no setting; did you mean precision?'
    """
    name = name.lstrip("-").replace("-", "_").partition("=")[0]
    if name in OTHER_NAMES:
        return f"{name} is called {_spell(OTHER_NAMES[name], spelled)} here"
    if name in LAUNCH_SWITCHES:
        stands_for = " and ".join(f"{key}: {value}" for key, value in LAUNCH_SWITCHES[name].items())
        return f"{name} is written {stands_for} here" if stands_for else f"{name} is not needed here; leave it out"
    instead = next((text for start, text in INSTEAD["launch"].items() if name.startswith(start)), None)
    if instead is not None:
        return f"{name} is another launcher's: {instead}"
    near = get_close_matches(name, NAMES, n=1, cutoff=0.7)
    return f"{name} is no setting{f'; did you mean {_spell(near[0], spelled)}?' if near else ''}"


def _spell(name: str, spelled: str) -> str:
    return spelled.format(name.replace("_", "-") if spelled != "{}" else name)


def translate(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Convert another launcher's config file to instep's names.

    Returns:
        The settings, and a line for each name that could not be converted.

    Raises:
        SettingError: the file is for Megatron-LM or SageMaker; its other settings would then have another meaning.

    Example:
        >>> translate({"distributed_type": "MULTI_GPU", "num_processes": 8, "mixed_precision": "bf16", "role": "x"})
        ({'accelerator': 'gpu', 'num_processes': 8, 'precision': 'bf16'}, ["role is another launcher's: all ranks ...
    """
    for (name, value), instead in FILES_REFUSED.items():
        if str(values.get(name)) == value:
            raise SettingError(f"{name}: {value} is refused. {instead}.", field=name, got=value)
    taken: dict[str, Any] = {}
    left: list[str] = []
    for name, value in values.items():
        if name in NAMES:
            taken[name] = value
        elif name in OTHER_NAMES:
            if value is not None:
                taken[OTHER_NAMES[name]] = value
        elif name in LAUNCH_SWITCHES:
            taken |= LAUNCH_SWITCHES[name] if value else {}
        elif name == "distributed_type" and str(value) in DISTRIBUTED_TYPES:
            taken |= DISTRIBUTED_TYPES[str(value)]
        elif name == "distributed_type":
            left.append(f"distributed_type: {value} is no kind of device that instep knows; set accelerator=...")
        elif value not in (None, "", "no", {}, [], False) and (name, value) != ("compute_environment", "LOCAL_MACHINE"):
            left.append(advice(name))
    if values.get("gpu_ids") is not None:
        _choose_gpus(taken, left)
    return taken, left


def gpu_ids(value: object) -> str:
    """Convert Accelerate's `gpu_ids` to `devices`, where a single number means a count.

    Example:
        >>> gpu_ids("all"), gpu_ids("0,1"), gpu_ids(1)
        ('all', '0,1', '1,')
    """
    text = str(value).strip()
    return f"{text}," if text.isdecimal() else text


def _choose_gpus(taken: dict[str, Any], left: list[str]) -> None:
    """Decide which GPUs and how many processes `gpu_ids` and `num_processes` mean together."""
    taken["devices"] = ids = gpu_ids(taken["devices"])
    if "num_processes" not in taken:
        return
    nodes = taken.get("num_nodes")
    count = len([each for each in ids.split(",") if each.strip()]) * (nodes if isinstance(nodes, int) else 1)
    if ids != "all" and count == taken["num_processes"]:
        del taken["num_processes"]
        return
    del taken["devices"]
    if ids != "all":
        left.append(f"gpu_ids: {ids} are not as many as num_processes={taken['num_processes']}; set devices=...")
