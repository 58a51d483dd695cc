"""Memory that a model takes: in training, measured on tensors that have sizes but no values, and in inference.

- `subject`: what is trained: a module by import path, a model of transformers, a file of weights.
- `simulate`: two steps of it under a strategy, with every byte counted.
- `inference`: what the loaded model takes, without a step.
- `estimate`: the estimate for one set-up: the simulation's, or a sum of buffers for DeepSpeed.
"""
