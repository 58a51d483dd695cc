"""Read settings from environment variables, such as INSTEP_PRECISION, which a launcher passes to a program.

`instep launch` sets these variables for its ranks, from its command line, config file and own environment; if you start
a program another way, you may set them yourself. They are used only if the program itself does not give the setting.
`from_env` reads them in the program. `instep launch` reads them as one of several sources of its settings
(`instep.config.layers`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from instep.errors import SettingError
from instep.utils.checks import read_flag


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


# For each setting: the function that converts its text, and a description of valid text for error messages.
VARIABLES: dict[str, tuple[Callable[[str], Any], str]] = {
    "accelerator": (str, "a name"),
    "strategy": (str, "a name"),
    "strategy_options": (_object, 'a JSON object such as {"stage": 2}'),
    "precision": (str, "a name"),
    "accumulate_grad_batches": (int, "an integer"),
    "grace_period_s": (float, "a number of seconds"),
    "hang_timeout_s": (float, "a number of seconds"),
    "debug": (read_flag, "1 or 0"),
}


# Other environment variables of instep, which are read by `instep launch`, agents, the config file or `instep replay`.
_MORE = (
    "devices", "num_processes", "num_nodes", "node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint",
    "rdzv_conf", "run_id", "local_addr", "max_restarts", "log_dir", "tee", "cpu_affinity", "cpu_threads", "env", "ray",
    "config_file", "agent_pid", "heartbeat_file", "job_id", "restart", "min_nodes", "replay",
    "external_callbacks", "job_secret", "job_secret_file", "meeting_file", "ended_file", "hydra_new_folder",
)  # fmt: skip
# For `instep fit`, jsonargparse reads INSTEP_CONFIG and INSTEP_SUBCOMMAND, and variables with "__" in their names.
_OF_PARSERS = ("config", "subcommand")


def misspelt_variables(environ: Mapping[str, str] | None = None) -> str:
    """Return a warning about environment variables that probably misspell a variable of instep; "" if there are none.

    Example:
        >>> misspelt_variables({"INSTEP_PRECISON": "bf16", "INSTEP_OF_MY_OWN": "1"})
        'nobody reads INSTEP_PRECISON (did you mean INSTEP_PRECISION?)'
    """
    known = (*VARIABLES, *_MORE)
    said: list[str] = []
    for variable in sorted(os.environ if environ is None else environ):
        name = variable.removeprefix("INSTEP_").lower()
        if variable.startswith("INSTEP_") and name not in (*known, *_OF_PARSERS) and "__" not in name:
            near = get_close_matches(name, known, n=1, cutoff=0.75)
            said += [f"{variable} (did you mean {variable_of(other)}?)" for other in near]
    return f"nobody reads {', '.join(said)}" if said else ""


def variable_of(setting: str) -> str:
    """Return the name of the environment variable for a setting.

    Example:
        >>> variable_of("precision")
        'INSTEP_PRECISION'
    """
    return f"INSTEP_{setting.upper()}"


def from_env(
    setting: str, check: Callable[[str, Any], Any] | None = None, environ: Mapping[str, str] | None = None
) -> Any:
    """Read a setting from its environment variable, for a program that does not give the setting itself.

    Args:
        setting: name of the setting, one of `VARIABLES`.
        check: function that is called with the variable's name and the value, and returns the final value.
        environ: the environment variables. None: `os.environ`.

    Returns:
        The value; None if the variable is not set or empty.

    Raises:
        SettingError: the text of the variable is not valid.

    Example:
        >>> from_env("accumulate_grad_batches", environ={"INSTEP_ACCUMULATE_GRAD_BATCHES": "4"})
        4
    """
    name = variable_of(setting)
    text = (os.environ if environ is None else environ).get(name, "").strip()
    if not text:
        return None
    read, expected = VARIABLES[setting]
    try:
        value = read(text)
    except ValueError:
        raise SettingError(
            f"the environment variable {name}={text!r} must be {expected}", field=name, got=text
        ) from None
    return value if check is None else check(name, value)


def as_variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """Convert settings to environment variables; a setting whose value is None is left out.

    Example:
        >>> as_variables({"strategy": "deepspeed", "strategy_options": {"stage": 3}, "debug": True, "precision": None})
        {'INSTEP_STRATEGY': 'deepspeed', 'INSTEP_STRATEGY_OPTIONS': '{"stage": 3}', 'INSTEP_DEBUG': '1'}
    """

    def text(value: Any) -> str:
        value = int(value) if isinstance(value, bool) else value
        return json.dumps(value) if isinstance(value, dict) else str(value)

    return {variable_of(name): text(value) for name, value in settings.items() if value is not None}
