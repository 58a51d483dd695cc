"""The contract of a callback."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.callbacks import Callback
from instep.testing.runs import (
    ContractError,
    FailingNet,
    Net,
    check_hook_names,
    check_resume,
    expect_failure,
    made,
    run_folder,
    small_trainer,
)
from instep.trainer import Trainer, TrainModule


def check_callback(make: Callable[[], Callback], *, module: Callable[[], TrainModule] = Net) -> None:
    """Check that a callback keeps the rules of callbacks, by small runs on the CPU.

    The rules: no method looks like a hook and is none; fit, validate, test and predict run with it; its state is of
    tensors and JSON values; a run that is resumed in the middle of an epoch, with a new object that took up the state,
    ends with the same bits as one that was not stopped; no hook raises after a step has failed; and the object can be
    used again then.

    Args:
        make: the class, or a function without arguments that makes a new object at each call.
        module: makes what is trained, with loaders of its own, for a callback that needs more than a regression on
            batches `(x, y)` of shapes (4, 8) and (4, 2), which logs `train_loss` and `val_loss`.

    Raises:
        ContractError: with the rule that is broken and what was seen.

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
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = small_trainer(folder / "stages", [callback], logger="csv")
            trainer.fit(module())
            for stage in (trainer.validate, trainer.test, trainer.predict):
                stage(module())
        check_hook_names(caught, name, "check_callback")

        def run(root: Path, checkpoint: Path | None) -> tuple[Trainer, dict[str, Any]]:
            one = make()
            trainer = small_trainer(root, [one], logger="csv")
            trainer.fit(module(), ckpt_path=checkpoint)
            state = one.state_dict()
            if not isinstance(state, dict):
                raise ContractError(f"{name}.state_dict() returned {type(state).__name__}; expected a dict.")
            return trainer, {"state": state}

        check_resume(name, run, folder)
        again = make()
        expect_failure(lambda: small_trainer(folder / "failed", [again], logger="csv").fit(FailingNet()), name)
        small_trainer(folder / "again", [again], logger="csv", max_epochs=1).fit(module())
