"""Estimate the training memory for one strategy and precision; for DeepSpeed's ZeRO, sum up its buffers.

ZeRO needs real tensors, so its steps cannot be simulated.
"""

from __future__ import annotations

from dataclasses import replace

from instep.cli.memory.simulate import Estimate, Setup, simulate
from instep.cli.memory.subject import Subject
from instep.errors import one_of
from instep.strategies.precision import precision_name

_SAME_BYTES = {"16-mixed": "bf16-mixed", "16-true": "bf16-true"}
_KNOWN = ("32-true", "64-true", "bf16-mixed", "bf16-true")

_STAGES = {"deepspeed": 2, **{f"deepspeed_stage_{stage}": stage for stage in range(4)}}
_BUCKET = 500_000_000  # maximum number of elements in a bucket of gradients, by default in DeepSpeed
_LIVE = 1_000_000_000  # maximum number of elements of parameters that are gathered at a time in stage 3


def estimate_deepspeed(subject: Subject, setup: Setup) -> Estimate:
    """Estimate the memory of a rank under DeepSpeed.

    Raises:
        SettingError: the strategy is not a stage of DeepSpeed's ZeRO, or it offloads.
    """
    if setup.strategy not in _STAGES:
        raise one_of("strategy", setup.strategy, tuple(_STAGES))
    stage, ranks = _STAGES[setup.strategy], setup.devices
    lower = setup.precision.startswith("bf16")
    inner = setup.precision if not lower else "bf16-mixed" if stage == 0 else "bf16-true"
    alone = simulate(subject, replace(setup, strategy="single_device", precision=inner, devices=1, on_gpu=False))
    steps = simulate(replace(subject, batch=None), Setup("single_device", "32-true"))
    # Bytes of temporary memory of the optimizer for each byte of the largest parameter.
    whole = steps.weights + steps.gradients + steps.optimizer
    ratio = max(0, steps.peak - whole) / (4 * max(1, steps.largest))
    width = 2 if lower and stage else 4
    elements = steps.gradients // 4
    weights, exact, state = alone.weights, 4 * elements, steps.optimizer
    gradients = width * elements
    bucket = width * min(elements, _BUCKET)
    part = exact // ranks
    layer = 2 * width * alone.largest
    activations = alone.activations or 0
    if stage == 0:
        kept = weights + state
        most = (kept + activations + gradients + layer, kept + 2 * gradients, kept + gradients + ratio * layer / 2)
        shown = (weights, gradients, state)
    elif stage in (1, 2):
        kept = weights + part + state // ranks
        # In stage 1 too, a rank keeps only its own part of the gradients: other parts are released after they are
        # reduced.
        own = gradients // ranks
        during = _backward(activations, bucket + own, setup.on_gpu)
        most = (kept + during + layer, kept + part * (1 + ratio))
        shown = (weights, own, part + state // ranks)
    else:
        own = part  # counted as float32 with any precision, since the optimizer's step converts them to float32
        kept = weights // ranks + part + state // ranks + own + bucket
        gathered = min(gradients, width * _LIVE)
        most = (kept + gathered + activations + gradients // ranks + layer, kept - bucket + part * (2 + ratio))
        shown = (weights // ranks, own, part + state // ranks)
    peak = max(map(int, most))
    return Estimate(*shown, alone.activations, peak, alone.largest)


def _backward(activations: int, buckets: int, on_gpu: bool) -> int:
    """Return the peak bytes of a backward: activations plus gradient buckets on a GPU, the larger of both on a CPU."""
    return activations + buckets if on_gpu else max(activations, buckets)


def estimate(subject: Subject, setup: Setup) -> Estimate:
    """Estimate the memory that a process needs for training.

    Raises:
        SettingError: the memory of this strategy or precision cannot be estimated.
        UsageError: the training step cannot run on tensors without values.
    """
    name = precision_name("precision", setup.precision)
    name = _SAME_BYTES.get(name, name)
    if name not in _KNOWN:
        raise one_of("precision", setup.precision, (*_KNOWN, *_SAME_BYTES))
    setup = replace(setup, precision=name)
    if setup.strategy.startswith("deepspeed"):
        return estimate_deepspeed(subject, setup)
    return simulate(subject, setup)
