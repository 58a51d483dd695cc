"""Hiding of secrets in what is kept, shown or sent: values of variables and options whose names look secret."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "***"
_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)  # matches the name of a variable or setting
# In an option's name it must be a word of its own: --tokenizer and --num_tokens are no secrets.
_WORD = (
    r"(?<![a-z])(?:(?:api|access|secret|private|auth)?(?:key|token)|secret|pass|passwd|password|passphrase|pwd"
    r"|credentials?)(?![a-z])"
)
_OPTION = re.compile(rf"(?i)(?=.*{_WORD})(?!.*(?:file|path|dir|folder)$)[-+~\w.:/\[\]]+")
# matches inside JSON, or a URL's query
_INSIDE = re.compile(rf"""(?i)({_WORD}["']?\s*[:=]\s*)("[^"]*"|'[^']*'|[^"',}}\s&]+)""")
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
# Keys that services issue, recognized by their prefix.
_ISSUED = re.compile(r"\b(?:sk-|gh[a-z]_|github_pat_|hf_|glpat-|xox[a-z]-|AKIA|ASIA|eyJ)[\w.-]{12,}")


def hide(value: Any) -> Any:
    """Hide the secrets in a setting's value; the name of a mapping's entry decides whether it is hidden.

    Example:
        >>> hide({"WANDB_API_KEY": "abc", "NCCL_DEBUG": "INFO"})
        {'WANDB_API_KEY': '***', 'NCCL_DEBUG': 'INFO'}
    """
    if isinstance(value, Mapping):
        return {
            name: HIDDEN if inner is not None and _NAME.search(name) else hide(inner) for name, inner in value.items()
        }
    return value


def hide_arguments(words: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Hide the secrets in the words of a command line.

    Hidden are the values of options whose names say so (`--api-key VALUE`, `--wandb.token=VALUE`, `password=VALUE`),
    the same within JSON and URLs, and what looks like a key that a service has issued. A number is shown.

    Args:
        words: the command line.

    Returns:
        The words, and the names of the options that lack something.

    Example:
        >>> hide_arguments(["train.py", "--lr", "0.1", "--api-key", "abc"])
        (('train.py', '--lr', '0.1', '--api-key', '***'), ('--api-key',))
    """
    shown: list[str] = []
    left_out: list[str] = []
    option = ""  # the option whose value is the next word
    for word in words:
        name, equals, value = word.partition("=")
        if option and not word.startswith("--"):
            safe = word if _is_number(word) else HIDDEN
        elif equals and _OPTION.fullmatch(name):
            safe = word if not value or _is_number(value) else f"{name}={HIDDEN}"
        else:
            safe = _INSIDE.sub(rf"\1{HIDDEN}", word)
            for pattern in (_IN_URL, _ISSUED):
                safe = pattern.sub(HIDDEN, safe)
        if safe != word:
            left_out.append(option or (name if equals and name.strip("-").replace(".", "").isidentifier() else safe))
        shown.append(safe)
        option = word if not option and not equals and word.startswith("-") and _OPTION.fullmatch(word) else ""
    return tuple(shown), tuple(left_out)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.lower() in ("true", "false", "none", "null")
    return len(text) < 8  # False for a longer number, which may be a password
