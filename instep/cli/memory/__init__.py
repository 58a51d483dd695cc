"""Estimate the memory of a model: in training, measured on tensors that have sizes but no values, and in inference.

- `subject`: what is trained: a module by import path, a model of transformers, a file of weights.
- `simulate`: two training steps under a strategy, with every byte counted.
- `inference`: what the loaded model takes, without a step.
- `estimate`: the estimate for one strategy and precision: by `simulate`, or for DeepSpeed as a sum of buffers.
"""
