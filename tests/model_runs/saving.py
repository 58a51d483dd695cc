"""Makes the callbacks that save and stop, and looks at what they have left on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from instep import Trainer
from instep.callbacks import EarlyStopping, ModelCheckpoint
from instep.errors import InstepError
from tests.model.checkpoints import Checkpoints
from tests.model.resume import ASKED
from tests.model.run import Case


def saver_options(given: Checkpoints) -> dict[str, Any]:
    """Return the arguments of ModelCheckpoint but its folder."""
    options = {**vars(given)}
    del options["folder"]
    if given.every_n_train_steps is not None:
        del options["every_n_epochs"]
    return options


def callbacks_of(case: Case, folder: str) -> list[Any]:
    """Make EarlyStopping and ModelCheckpoints of a case, as far as it has them."""
    savers = [given for given in (case.checkpoints, case.second) if given is not None]
    stopping = [] if case.stopping is None else [EarlyStopping(**vars(case.stopping))]
    return [*stopping, *(ModelCheckpoint(f"{folder}/{given.folder}", **saver_options(given)) for given in savers)]


def looks_at_disk(trainer: Trainer) -> list[tuple[Any, ...]]:
    """Return, for each ModelCheckpoint, the names in its folder, of the best with its score, and of the last."""
    looks = []
    for callback in trainer.checkpoint_callbacks:
        there = Path(callback.dirpath or "")
        names = sorted(path.name for path in there.iterdir() if path.name[0] != ".") if there.is_dir() else []
        score = None if callback.best_model_score is None else round(float(callback.best_model_score), 3)
        best, last = (Path(path).name or None for path in (callback.best_model_path, callback.last_model_path))
        looks.append((tuple(names), best, score, last))
    return looks


def ask(trainer: Trainer, module: Any, ckpt_path: str) -> str:
    """Validate, and return the name of the checkpoint whose weights are taken, or the class of the error."""
    try:
        trainer.validate(module, [torch.tensor([0])] * ASKED, ckpt_path=ckpt_path, verbose=False)
    except InstepError as error:
        return type(error).__name__
    return Path(str(trainer.ckpt_path or "")).name
