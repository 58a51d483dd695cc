"""A loop with Accelerate: `prepare`, `accelerator.backward`, and what its documentation does for logging.

It has no `self.log`: a running sum of the detached loss stands for it, as in its examples. It has no CSV tracker and
saves only when told to, so `everything` is that sum, its `tqdm` and its TensorBoard tracker every 50 steps.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from contenders import Save, accelerator_loop


def train(case: str, loader: Any, root: Path, log_every_n_steps: int = 50) -> Save:
    """One epoch."""
    accelerate: Any = import_module("accelerate")
    utils: Any = import_module("accelerate.utils")
    return accelerator_loop.train(accelerate.Accelerator, utils.tqdm, case, loader, root, log_every_n_steps)
