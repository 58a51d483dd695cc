"""The estimate for one set-up."""

from __future__ import annotations

from dataclasses import replace

from instep.cli.memory.deepspeed import estimate_deepspeed
from instep.cli.memory.simulate import Estimate, Setup, simulate
from instep.cli.memory.subject import Subject
from instep.errors import one_of
from instep.strategies.precision import precision_name

_SAME_BYTES = {"16-mixed": "bf16-mixed", "16-true": "bf16-true"}
_KNOWN = ("32-true", "64-true", "bf16-mixed", "bf16-true")


def estimate(subject: Subject, setup: Setup) -> Estimate:
    """What a process needs.

    Raises:
        SettingError: the strategy or the precision is not known here.
        UsageError: the step cannot run without values.
    """
    name = precision_name("precision", setup.precision)
    name = _SAME_BYTES.get(name, name)
    if name not in _KNOWN:
        raise one_of("precision", setup.precision, (*_KNOWN, *_SAME_BYTES))
    setup = replace(setup, precision=name)
    if setup.strategy.startswith("deepspeed"):
        return estimate_deepspeed(subject, setup)
    return simulate(subject, setup)
