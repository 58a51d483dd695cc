"""What a launch can be told: one dataclass, the schema of the config file, of `instep launch` and of its variables.

Its annotations are checked by pydantic, which coerces, bounds and describes them (`schema()`); the dataclass itself is
plain, so that `--help` need not load pydantic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le

from instep.errors import SettingError, one_of
from instep.utils.plain_yaml import load

Accelerators = Literal["auto", "cpu", "gpu", "cuda", "xpu", "hpu", "npu", "mps", "xla"]
Backends = Literal["static", "c10d"]
Precisions = Literal[
    "32-true", "bf16-mixed", "16-mixed", "64-true", "bf16-true", "16-true", "fp8",
    "32", "64", "16", "fp16", "bf16", "fp16-true", "no",
]  # fmt: skip


class About(NamedTuple):
    """What a setting is.

    Args:
        text: for help.
        takes: for errors, what is expected where the type does not say it.
        rare: not in `--help`.
    """

    text: str
    takes: str = ""
    rare: bool = False


_Count = Annotated[int, Ge(1)]
_Natural = Annotated[int, Ge(0)]
_Port = Annotated[int, Ge(1), Le(65535)]
_Seconds = Annotated[float, Gt(0)]
_DEVICES = "'auto', -1 for all, or indices such as 0,1"
_NODES = "a number, or MIN:MAX for a job that goes on with less"
_TEE = "true, false, or the ranks on a machine, such as 0,1"


@dataclass(frozen=True)
class LaunchSettings:
    """The settings of a launch, in their resolved form. `about` says what each is."""

    accelerator: Annotated[Accelerators, About("kind of device: cpu, gpu, cuda, xpu, hpu, npu, mps, xla")] = "auto"
    devices: Annotated[
        int | Literal["auto"] | list[int],
        About(f"processes per machine: a number, {_DEVICES}", f"at least 1, {_DEVICES}"),
    ] = "auto"
    num_processes: Annotated[_Count | None, About("processes over all machines, instead of devices", rare=True)] = None
    num_nodes: Annotated[_Count | str, About(f"machines: {_NODES}", _NODES)] = 1
    node_rank: Annotated[_Natural, About("this machine's number, from 0")] = 0
    master_addr: Annotated[str, About("address of machine 0")] = "127.0.0.1"
    master_port: Annotated[_Port | None, About("a free port there, the same on all machines")] = None
    rdzv_backend: Annotated[Backends | None, About("how machines meet: static (numbered), c10d (who comes)")] = None
    rdzv_endpoint: Annotated[str | None, About("HOST:PORT where c10d meets; by default machine 0's", rare=True)] = None
    rdzv_conf: Annotated[dict[str, str], About("torchrun's settings of c10d", rare=True)] = field(default_factory=dict)
    run_id: Annotated[str | None, About("the job's name under c10d", rare=True)] = None
    local_addr: Annotated[str | None, About("this machine's address for the others", rare=True)] = None
    job_secret_file: Annotated[
        str | None, About("file of mode 0600 with the secret that the machines of a job share", rare=True)
    ] = None
    max_restarts: Annotated[_Natural, About("starts over after a failure, a hang or a lost machine")] = 0
    strategy: Annotated[str, About("ddp, fsdp, hsdp, tp, deepspeed_stage_2 ...")] = "auto"
    strategy_options: Annotated[dict[str, Any], About("its arguments: JSON, or name=value,name=value")] = field(
        default_factory=dict
    )
    precision: Annotated[Precisions, About("32-true, bf16-mixed, 16-mixed, 64-true, bf16-true, 16-true, fp8")] = (
        "32-true"
    )
    accumulate_grad_batches: Annotated[_Count, About("micro-batches per optimizer step")] = 1
    debug: Annotated[bool, About("compare collectives over the ranks before they run")] = False
    hang_timeout_s: Annotated[_Seconds | None, About("seconds without a step after which a rank hangs")] = None
    grace_period_s: Annotated[_Seconds, About("seconds that ranks have to save after a signal")] = 30.0
    log_dir: Annotated[str | None, About("folder for what each rank prints")] = None
    tee: Annotated[
        bool | list[_Natural], About("print it too: all, none, or ranks of the machine, such as 0,1", _TEE)
    ] = False
    cpu_affinity: Annotated[bool, About("pin each rank to its share of the cores")] = False
    cpu_threads: Annotated[_Count | None, About("threads per rank (OMP_NUM_THREADS)")] = None
    env: Annotated[dict[str, str], About("a variable for the ranks; can be repeated")] = field(default_factory=dict)
    ray: Annotated[str | None, About("address of a Ray cluster to run on: auto, HOST:PORT, ray://...")] = None

    @property
    def most_nodes(self) -> int:
        """Machines of the whole job."""
        return int(str(self.num_nodes).rpartition(":")[2])

    @property
    def least_nodes(self) -> int | None:
        """Machines that an elastic job goes on with; None for another."""
        return int(self.num_nodes.partition(":")[0]) if isinstance(self.num_nodes, str) else None


NAMES: tuple[str, ...] = tuple(setting.name for setting in fields(LaunchSettings))
DICTS = ("rdzv_conf", "strategy_options", "env")
SWITCHES = ("debug", "cpu_affinity")
_CLOSED = ("accelerator", "precision", "rdzv_backend")


@cache
def _hints() -> dict[str, Any]:
    return get_type_hints(LaunchSettings, include_extras=True)


def about(name: str) -> About:
    """What a setting is."""
    return next(note for note in get_args(_hints()[name]) if isinstance(note, About))


def choices(name: str) -> tuple[str, ...]:
    """The values of a setting that has a closed set of them; else none.

    Example:
        >>> choices("rdzv_backend")
        ('static', 'c10d')
    """
    if name not in _CLOSED:
        return ()
    kind = get_args(_hints()[name])[0]
    return get_args(next(part for part in (kind, *get_args(kind)) if get_origin(part) is Literal))


def check(values: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """Values of settings in their resolved form.

    Args:
        values: by name; what a command line or a variable says is text.
        sources: where each comes from, for errors.

    Raises:
        SettingError: every wrong value with its source and what is expected, on a line of its own.

    Example:
        >>> check({"devices": "0,1", "precision": 16, "env": "A=1"}, {})
        {'devices': [0, 1], 'precision': '16', 'env': {'A': '1'}}
    """
    if not values:
        return {}
    from pydantic import ValidationError  # late: a tenth of a second

    problems: dict[str, SettingError] = {}
    plain: dict[str, Any] = {}
    for name, value in values.items():
        try:
            plain[name] = _plain(name, value)
        except ValueError as error:
            problems[name] = _wrong(name, value, error)
    try:
        checked = _adapter().validate_python(plain)
    except ValidationError as error:
        for problem in reversed(error.errors()):  # of several of one setting the first
            if problem["loc"]:
                name = str(problem["loc"][0])
                problems[name] = _wrong(name, values[name], problem["msg"])
    else:
        plain = {name: getattr(checked, name) for name in plain}
    if "strategy" in plain and "strategy" not in problems and (unknown := _unknown_strategy(plain["strategy"])):
        problems["strategy"] = unknown
    if problems:
        found = {name: problems[name] for name in values if name in problems}
        lines = [f"{sources[name]}: {error}" if name in sources else str(error) for name, error in found.items()]
        first = next(iter(found.values()))
        raise SettingError("\n".join(lines), field=first.field, got=first.got)
    return plain


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter  # late, as above

    return TypeAdapter(LaunchSettings)


def _wrong(name: str, got: Any, why: object) -> SettingError:
    if isinstance(why, SettingError):
        return why
    if name in _CLOSED:
        return one_of(name, got, choices(name))
    message = about(name).takes or str(why).removeprefix("Input should be ").removeprefix("Value error, ")
    return SettingError(f"{name}={got!r}: expected {message}", field=name, got=got)


def _unknown_strategy(name: str) -> SettingError | None:
    if name == "auto":
        return None
    from instep.strategies.registry import check_name  # late: loads torch

    try:
        check_name(name)
    except SettingError as error:
        return error
    return None


def _plain(name: str, value: Any) -> Any:
    """What texts and YAML's habits stand for."""
    if name == "precision":
        return "no" if value is False else str(value)  # YAML reads `no` as false
    if isinstance(value, bool) and name not in (*SWITCHES, "tee"):
        raise ValueError("neither true nor false, which YAML also reads from yes, no, on and off")
    if isinstance(value, str):
        text = value.strip()
        if name in DICTS:
            return pairs(name, text)
        if name in ("devices", "tee") and text in ("all", "none"):
            return {"devices": {"all": -1}, "tee": {"all": True, "none": False}}[name].get(text, text)
        if name in ("devices", "tee") and "," in text:
            return [int(part) for part in text.split(",") if part.strip()]
        if name == "tee" and text.isdecimal():
            return [int(text)]
        if name in ("devices", "num_nodes") and text.lstrip("-").isdecimal():
            value = int(text)
        elif name == "num_nodes":
            low, _, high = text.partition(":")
            if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
                raise ValueError
    if name in ("env", "rdzv_conf") and isinstance(value, Mapping):
        if any(isinstance(inner, bool) for inner in value.values()):
            raise ValueError("texts: put true and false in quotes")
        return {key: str(inner) if isinstance(inner, (int, float)) else inner for key, inner in value.items()}
    if name == "devices" and isinstance(value, (int, list)):
        _check_devices(value)
    return value


def _check_devices(value: Any) -> None:
    if isinstance(value, int):
        right = value >= 1 or value == -1
    else:
        right = (
            value and len(set(value)) == len(value) and all(isinstance(index, int) and index >= 0 for index in value)
        )
    if not right:
        raise ValueError


def pairs(name: str, text: str) -> dict[str, Any]:
    """The members of a setting that is a mapping: `{"a": 1}`, or `a=1,b=2`; in `env` one only, which may have commas.

    Raises:
        ValueError: the text is neither; says what was expected.
    """
    try:
        if text.startswith("{"):
            value = _object(text)
            if isinstance(value, dict):
                return value
        parts = [part.partition("=") for part in ([text] if name == "env" else text.split(",")) if part]
        if any(not sign or not key for key, sign, _ in parts):
            raise ValueError("NAME=VALUE")
        return {key.strip(): load(value, name) if name == "strategy_options" else value for key, _, value in parts}
    except SettingError as error:
        raise ValueError(f"JSON, or NAME=VALUE with a value as in YAML ({error})") from None


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return load(text, "the value")  # which needs fewer quotes


def schema() -> dict[str, Any]:
    """The config file's JSON schema, for editors and other programs."""
    from instep.strategies import strategy_names  # late: loads torch

    described = _adapter().json_schema()
    for name, entry in described["properties"].items():
        entry["description"] = about(name).text
    described["properties"]["strategy"]["examples"] = list(strategy_names())
    title = {"title": "instep's config file", "description": "Settings of `instep launch`"}
    return {**described, **title, "additionalProperties": False}
