"""A module's hooks, checked before a run: none missing, none that nothing would call, no setting against them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instep.errors import HookError, UsageError
from instep.trainer.hooks import is_overridden
from instep.trainer.module import TrainModule

if TYPE_CHECKING:
    from instep.trainer.session import Session

GONE = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
    "predict_epoch_end": "on_predict_epoch_end",
    "training_step_end": "training_step",
    "validation_step_end": "validation_step",
    "test_step_end": "test_step",
}
"""Hooks of Lightning 1.x, and what took their place."""

_NEEDED = {
    "fit": ("training_step", "configure_optimizers"),
    "validate": ("validation_step",),
    "test": ("test_step",),
}


def check_hooks(run: Session) -> None:
    """Raise where the module's hooks do not fit what is to run.

    Raises:
        HookError: one is missing, or of Lightning 1.x; the text names its successor.
        UsageError: a setting has no effect in manual optimization.
    """
    module, name = run.module, type(run.module).__name__
    for old, successor in GONE.items():
        if callable(getattr(module, old, None)):
            raise HookError(
                f"{name}.{old} is not called by instep (nor by Lightning 2). Use {successor}; what the steps returned "
                "can be kept in an attribute."
            )
    for needed in _NEEDED.get(run.fn, ()):
        if not is_overridden(module, needed, TrainModule):
            raise HookError(f"{name} has no {needed}; trainer.{run.fn} needs it")
    if run.fn == "fit" and not module.automatic_optimization:
        for setting in ("gradient_clip_val", "global_batch_size"):
            if getattr(run.settings, setting) is not None:
                raise UsageError(
                    f"Trainer({setting}=...) has no effect in manual optimization, where training_step does it: leave "
                    "it out, and use self.clip_gradients or your own accumulation there."
                )
        if run.accumulate != 1:
            raise UsageError(
                "Trainer(accumulate_grad_batches=...) has no effect in manual optimization: leave it out and step "
                "every N batches in training_step."
            )
