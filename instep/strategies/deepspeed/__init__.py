"""ZeRO by DeepSpeed's engine.

The loop stays the Trainer's: its accumulation window tells the engine where gradients are complete, its clipping value
becomes the engine's, and the user's optimizer and schedules are those that the engine steps. Checkpoints are instep's
own: each rank writes its runs of the float32 weights and of the optimizer's state, under parameter names.

    strategy.py     the life of an engine, the steps, and the state: out to a checkpoint and in
    config.py       the JSON configuration: "auto" values, and what the Trainer decides
    optimizers.py   the optimizer that a configuration describes
    partitions.py   which run of a parameter's elements this rank holds, and where it lies
    loading.py      importing deepspeed, and builds of its operators that were killed
"""

from instep.strategies.deepspeed.strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy"]
