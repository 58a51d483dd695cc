"""ZeRO by DeepSpeed's engine, under the Trainer's loop.

The Trainer decides when gradients are accumulated and when they are complete, and it passes its clipping value to the
engine. The engine steps the user's optimizer; the Trainer steps the schedulers. Checkpoints have instep's format: each
rank writes its parts of the float32 weights and of the optimizer's state, under the names of the parameters.

    strategy.py     `DeepSpeedStrategy`: makes the engine, runs steps, saves and loads the state
    config.py       DeepSpeed's JSON configuration: "auto" values, and values that come from the Trainer
    optimizers.py   the optimizer that a configuration describes
    partitions.py   which elements of each parameter this rank holds, and where they are stored
    loading.py      the import of deepspeed, and a check for killed builds of its operators
    generation.py   text generation at stage 3, where all ranks must run the same number of forwards
"""

from instep.strategies.deepspeed.strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy"]
