"""The loop of `accelerate_run` with instep's Accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contenders import Save, accelerator_loop
from instep import Accelerator
from instep.accelerator import tqdm


def train(case: str, loader: Any, root: Path, log_every_n_steps: int = 50) -> Save:
    """One epoch."""
    return accelerator_loop.train(Accelerator, tqdm, case, loader, root, log_every_n_steps)
