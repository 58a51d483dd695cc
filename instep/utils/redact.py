"""Hide secrets before something is stored, shown or sent: values of variables and options with names like "TOKEN"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "***"
_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)  # matches names of variables with secret values
# in the name of an option the word must stand alone: --tokenizer and --num_tokens are no secrets
_WORD = (
    r"(?<![a-z])(?:(?:api|access|secret|private|auth)?(?:key|token)|secret|pass|passwd|password|passphrase|pwd"
    r"|credentials?)(?![a-z])"
)
_OPTION = re.compile(rf"(?i)(?=.*{_WORD})(?!.*(?:file|path|dir|folder)$)[-+~\w.:/\[\]]+")
# matches secrets inside JSON or in the query of a URL
_INSIDE = re.compile(rf"""(?i)({_WORD}["']?\s*[:=]\s*)("[^"]*"|'[^']*'|[^"',}}\s&]+)""")
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
# matches keys that services issue, by their prefixes
_ISSUED = re.compile(r"\b(?:sk-|gh[a-z]_|github_pat_|hf_|glpat-|xox[a-z]-|AKIA|ASIA|eyJ)[\w.-]{12,}")


def hide(value: Any) -> Any:
    """Return the value of a setting with "***" in place of secrets: entries of mappings whose key looks secret.

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
    """Return the words of a command line with "***" in place of secrets.

    Hidden are the values of options whose name looks secret (`--api-key VALUE`, `--wandb.token=VALUE`,
    `password=VALUE`), values under such names inside JSON and URLs, and words that look like a key that a service has
    issued. Short numbers are shown.

    Args:
        words: the words of the command line.

    Returns:
        The words, and the names of the options whose values were hidden.

    Example:
        >>> hide_arguments(["train.py", "--lr", "0.1", "--api-key", "abc"])
        (('train.py', '--lr', '0.1', '--api-key', '***'), ('--api-key',))
    """
    shown: list[str] = []
    left_out: list[str] = []
    option = ""  # name of the option whose value is the next word
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
    return len(text) < 8  # a longer number may be a password
