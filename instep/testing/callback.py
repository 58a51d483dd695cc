"""Contract test of a callback: `check_callback`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.callbacks import Callback
from instep.testing.runs import (
    EPOCHS,
    SAVED_EVERY,
    ContractError,
    FailAt,
    Net,
    check_hook_names,
    check_resume,
    expect_failure,
    made,
    run_folder,
    small_trainer,
)
from instep.trainer import Trainer, TrainModule
from instep.trainer.hooks import is_overridden

_STAGES = {
    "validate": ("validation_step", "val_dataloader"),
    "test": ("test_step", "test_dataloader"),
    "predict": ("predict_dataloader",),
}
"""Methods that a module must define for each stage after fit; a stage without them is not run."""


def check_callback(make: Callable[[], Callback], *, module: Callable[[], TrainModule] = Net) -> None:
    """Check that a callback keeps the rules of callbacks, by small runs on the CPU.

    The rules: no method has a name that resembles a hook's name but is never called. fit runs with the callback, and so
    do validate, test and predict if `module` has a step and a loader for them. The callback's state consists of tensors
    and JSON values. A run that is resumed in the middle of an epoch, with a new callback that loads the state, ends in
    the same state, bit for bit, as a run that was not stopped, except for durations (the keys `time_s` and
    `time_elapsed` of the state). No hook raises after a batch has failed, and the callback can be used again after the
    failure.

    Args:
        make: the class, or a function without arguments that makes a new callback at each call.
        module: function that makes the module to train, which has its own loaders. The default is a regression on
            batches `(x, y)` of shapes (4, 8) and (4, 2) that logs `train_loss` and `val_loss`; pass a function for
            another module if the callback needs one.

    Raises:
        ContractError: a rule is broken; the message has the rule and what was seen.

    Example:
        >>> from instep import Callback
        >>> class CountBatches(Callback):
        ...     batches = 0
        ...
        ...     def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        ...         self.batches += 1
        ...
        ...     def state_dict(self):  # and no load_state_dict: a resumed run counts from 0
        ...         return {"batches": self.batches}
        >>> try:
        ...     check_callback(CountBatches)
        ... except AssertionError as error:
        ...     print(str(error).splitlines()[0])
        CountBatches: a run that is resumed at step 21 ends in another way than one that is not stopped:
    """
    with run_folder("check_callback") as folder:
        callback = made(make, Callback, "check_callback")
        name = type(callback).__name__
        check_hook_names(callback, Callback, "check_callback")
        trainer = small_trainer(folder / "stages", [callback], logger="csv")
        trainer.fit(module())
        for stage, needed in _STAGES.items():
            one = module()
            if all(is_overridden(one, each, TrainModule) for each in needed):
                getattr(trainer, stage)(one)
        every = SAVED_EVERY - 2 if trainer.num_training_batches % SAVED_EVERY == 0 else SAVED_EVERY
        fails_at = trainer.global_step * 2 // EPOCHS

        def run(root: Path, checkpoint: Path | None) -> tuple[Trainer, dict[str, Any]]:
            one = make()
            trainer = small_trainer(root, [one], every, logger="csv")
            trainer.fit(module(), ckpt_path=checkpoint)
            state = one.state_dict()
            if not isinstance(state, dict):
                raise ContractError(f"{name}.state_dict() returned {type(state).__name__}; expected a dict.")
            return trainer, {"state": state}

        check_resume(name, run, folder, every)
        again = make()
        failing = small_trainer(folder / "failed", [again, FailAt(fails_at)], logger="csv")
        expect_failure(lambda: failing.fit(module()), name)
        small_trainer(folder / "again", [again], logger="csv", max_epochs=1).fit(module())
