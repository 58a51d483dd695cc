"""ZeRO by DeepSpeed's engine.

The Trainer's loop stays in charge. Its accumulation windows tell the engine when gradients are complete, its clipping
value is passed to the engine, and the engine steps the user's optimizer and schedules. Checkpoints have instep's
format: each rank writes its parts of the float32 weights and of the optimizer's state, by parameter names.

    strategy.py     the life of an engine, the steps, and the state: out to a checkpoint and in
    config.py       the JSON configuration: "auto" values, and what the Trainer decides
    optimizers.py   the optimizer that a configuration describes
    partitions.py   which run of a parameter's elements this rank holds, and where it lies
    loading.py      importing deepspeed, and builds of its operators that were killed
"""

from instep.strategies.deepspeed.strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy"]
