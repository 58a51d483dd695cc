"""Contract test of a TrainModule: `check_module`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.nn.parameter import is_lazy

from instep.callbacks import Callback
from instep.data import DataModule
from instep.testing.runs import (
    ContractError,
    check_hook_names,
    check_resume,
    comparable,
    made,
    run_folder,
    small_trainer,
)
from instep.trainer import Trainer, TrainModule

_SHORT: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 2}


def check_module(make: Callable[[], TrainModule], train: Any = None, val: Any = None) -> None:
    """Check that a module keeps the rules of a TrainModule, by runs of a few batches on the CPU.

    The rules: no method has a name that resembles a hook's name but is never called. Each trainable parameter gets a
    gradient, as training in several processes requires. Validation changes no weight and no buffer. A run that is
    resumed in the middle, with all objects new, ends in the same state, bit for bit, as a run that was not stopped. A
    module that saved its hyperparameters can be loaded from a checkpoint by its class.

    Args:
        make: the class, or a function without arguments that makes a new module at each call.
        train: a loader of at least four batches, or a DataModule; None if the module has its own loaders.
        val: a loader for validation; None if the module or the DataModule has one, or if there is none.

    Raises:
        ContractError: a rule is broken; the message has the rule and what was seen.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from instep.testing.runs import Net, samples
        >>> check_module(Net, DataLoader(samples(48), batch_size=4, shuffle=True))
    """
    with run_folder("check_module") as folder:
        module = made(make, TrainModule, "check_module")
        name, watch = type(module).__name__, Gradients()
        check_hook_names(module, TrainModule, "check_module")
        trainer = small_trainer(folder / "first", [watch], **_SHORT)
        trainer.fit(module, train, val)
        if missing := watch.without():
            raise ContractError(
                f"{name}: no loss reached these parameters in {trainer.global_step} steps: {', '.join(missing)}. Use "
                "them in the step, or set requires_grad = False: ranks wait for the gradients of all others."
            )
        if val is not None or module.trainer.num_val_batches:
            before = comparable(module.state_dict(), "")
            data = train if val is None and isinstance(train, DataModule) else val
            small_trainer(folder / "validated", **_SHORT).validate(module, data)
            if comparable(module.state_dict(), "") != before:
                raise ContractError(f"{name}: validation changed weights or buffers. Change them in training only.")
        if module.hparams:
            _check_loaded(module, next((folder / "first").glob(f"**/step-{trainer.global_step:08d}*")))

        def run(root: Path, checkpoint: Path | None) -> tuple[Trainer, dict[str, Any]]:
            trainer = small_trainer(root, **_SHORT)
            trainer.fit(make(), train, val, ckpt_path=checkpoint)
            return trainer, {}

        check_resume(name, run, folder)


class Gradients(Callback):
    """Callback that records which trainable parameters have had a gradient."""

    def __init__(self) -> None:
        self.seen: dict[str, bool] = {}

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        """Record the parameters that have a gradient."""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and not is_lazy(parameter):
                self.seen[name] = self.seen.get(name, False) or parameter.grad is not None

    def without(self) -> list[str]:
        """Return the names of parameters that never had a gradient."""
        return [name for name, seen in self.seen.items() if not seen]


def _check_loaded(module: TrainModule, checkpoint: Path) -> None:
    name = type(module).__name__
    try:
        loaded = type(module).load_from_checkpoint(checkpoint)
    except Exception as error:
        raise ContractError(
            f"{name}.load_from_checkpoint(path) failed with {type(error).__name__}: {error}. Call "
            "self.save_hyperparameters() in __init__, with all arguments that it needs."
        ) from error
    if comparable(loaded.state_dict(), "") != comparable(module.state_dict(), ""):
        raise ContractError(f"{name}: load_from_checkpoint gives other weights than the module had when it was saved.")
