"""The hooks of a TrainModule, and the table of those that are overridden.

A hook that nobody overrides costs nothing: `HookTable` finds the overridden ones once, before the loop, and the loop
iterates tuples that are mostly empty.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from instep.callbacks.base import Callback
from instep.distributed import send_to_device

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule
    from instep.trainer.log import MetricLog

Hook = Callable[..., Any]


class ModuleHooks:
    """Every hook that a `TrainModule` may override, with Lightning's names and signatures.

    The docstring of `Trainer.fit` shows when each is called.
    """

    # ---- set-up

    def configure_callbacks(self) -> Callback | list[Callback]:
        """Return the module's own callbacks. Each of them replaces the Trainer's callback of the same type."""
        return []

    def configure_model(self) -> None:
        """Create layers here that are too large to create in `__init__`.

        Each run calls this method, also if an earlier run has already created the layers.
        """

    def prepare_data(self) -> None:
        """Download data and prepare it on disk. Called on one process, or one per node with `prepare_data_per_node`."""

    def setup(self, stage: str) -> None:
        """Called on every process at the start of a run; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Called on every process at the end of a run, after an error too."""

    # ---- fit

    def on_fit_start(self) -> None:
        """Called at the start of fit, when the optimizers exist."""

    def on_fit_end(self) -> None:
        """Called at the end of fit."""

    def on_train_start(self) -> None:
        """Called before the first epoch, after the sanity check."""

    def on_train_end(self) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Called at the start of a training epoch."""

    def on_train_epoch_end(self) -> None:
        """Called at the end of a training epoch, after its validation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called before each training batch. Return -1 to skip the rest of the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after each training batch and its optimizer step.

        `outputs` is the detached output of `training_step`.
        """

    # ---- optimization

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called before the gradients are zeroed."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before backward; `loss` is already weighted for accumulation."""

    def on_after_backward(self) -> None:
        """Called after backward."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before the optimizer step; gradients are complete, unscaled and not clipped yet."""

    # ---- evaluation

    def on_validation_start(self) -> None:
        """Called at the start of validation."""

    def on_validation_end(self) -> None:
        """Called at the end of validation, when its metrics are final."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation batch."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each validation batch."""

    def on_validation_model_zero_grad(self) -> None:
        """Called before a validation inside fit. Free gradients here to save memory; by default they are kept."""

    def on_validation_model_eval(self) -> None:
        """Set the module to eval mode for validation."""
        self.trainer.model.eval()  # pyright: ignore[reportAttributeAccessIssue]

    def on_validation_model_train(self) -> None:
        """Called after validation, when every submodule is back in the mode it had before."""

    def on_test_start(self) -> None:
        """Called at the start of test."""

    def on_test_end(self) -> None:
        """Called at the end of test, when its metrics are final."""

    def on_test_epoch_start(self) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each test batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each test batch."""

    def on_test_model_eval(self) -> None:
        """Set the module to eval mode for test."""
        self.trainer.model.eval()  # pyright: ignore[reportAttributeAccessIssue]

    def on_test_model_train(self) -> None:
        """Called after test, when every submodule is back in the mode it had before."""

    def on_predict_start(self) -> None:
        """Called at the start of predict."""

    def on_predict_end(self) -> None:
        """Called at the end of predict."""

    def on_predict_epoch_start(self) -> None:
        """Called before the first predict batch."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last predict batch."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each predict batch."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each predict batch."""

    def on_predict_model_eval(self) -> None:
        """Set the module to eval mode for predict."""
        self.trainer.model.eval()  # pyright: ignore[reportAttributeAccessIssue]

    # ---- loader methods, used if no loader is passed to the Trainer's method and there is no DataModule

    def train_dataloader(self) -> Any:
        """Return the training loader, or several loaders in a dict or list."""

    def val_dataloader(self) -> Any:
        """Return the validation loader, or a list of validation loaders."""

    def test_dataloader(self) -> Any:
        """Return the test loader, or a list of test loaders."""

    def predict_dataloader(self) -> Any:
        """Return the predict loader, or a list of predict loaders."""

    # ---- batches and checkpoints

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch before it goes to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Move a batch to the device. Override this for types of batches that instep does not know."""
        return send_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device, for instance to augment it there."""
        return batch

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add keys of your own (tensors and JSON values) to `checkpoint`, or change `checkpoint["state_dict"]`.

        Only the keys of rank 0 are saved. If a strategy shards the weights, each rank's state dict has the shards of
        this rank.
        """

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before weights are loaded. Read back what `on_save_checkpoint` added, or change the state dict.

        If a strategy shards the weights, the state dict has lazy values in place of tensors: `value.read()` returns the
        tensor.
        """


STEPS = ("training_step", "validation_step", "test_step", "predict_step")
LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
# lowest similarity (difflib ratio) at which a name is suggested: on_train_epoch_finish and on_train_epoch_end have 0.82
_ALIKE = 0.8


def nearest(name: str, known: Iterable[str], alike: float = _ALIKE) -> str | None:
    """Return the one of the `known` names that `name` was probably meant to be; None if none is similar enough."""
    words = {"val": "validation"} if "dataloader" not in name else {"validation": "val"}
    spelt = "_".join(words.get(word, word) for word in name.split("_"))
    return next(iter(get_close_matches(spelt, known, 1, alike)), None)


def own_methods(owner: object, base: type) -> dict[str, Any]:
    """Collect the methods that the user's classes, and the object itself, add to `base` or override."""
    theirs = [cls for cls in type(owner).__mro__ if issubclass(cls, base) and not cls.__module__.startswith("instep.")]
    members = {name: value for cls in reversed(theirs) for name, value in vars(cls).items()} | vars(owner)
    return {name: value for name, value in members.items() if callable(value)}


def misspelt(owner: object, name: str, base: type) -> str | None:
    """Return a method of `owner` whose name is probably a misspelling of `name`; None if there is none."""
    return next((own for own in own_methods(owner, base) if not hasattr(base, own) and nearest(own, [name])), None)


def is_overridden(owner: object, name: str, base: type) -> bool:
    """Return True if `owner` overrides `name`, in a subclass or as an instance attribute.

    An attribute that is None does not override.
    """
    own = getattr(owner, "__dict__", {})
    if name in own:
        return own[name] is not None
    mine = getattr(type(owner), name, None)
    return mine is not None and mine is not getattr(base, name, None)


def with_stage(hook: Hook) -> Hook:
    """Return a `setup` or `teardown` hook that gets the stage as a keyword, if the hook has a parameter `stage`."""
    return (lambda stage: hook(stage=stage)) if "stage" in inspect.signature(hook).parameters else hook


class HookTable:
    """The overridden hooks of one run: `table["on_train_batch_end"]` is a tuple of callables.

    Hooks of callbacks come before the module's hook. Only the `on_..._end` hooks of callbacks with `runs_last` come
    after the module's hook.

    Args:
        trainer: the Trainer, which is passed to the hooks of callbacks.
        module: the module, whose hooks are called too.
        callbacks: the callbacks, in the order in which they are called.
    """

    def __init__(self, trainer: Trainer, module: TrainModule, callbacks: Iterable[Callback]) -> None:
        self._trainer = trainer
        self._module = module
        self._callbacks = tuple(callbacks)

    def of_callbacks(self, name: str, only: Callable[[Callback], bool] = lambda _: True) -> tuple[Hook, ...]:
        """Return the overridden hooks `name` of the callbacks that `only` accepts."""
        chosen = [c for c in self._callbacks if only(c) and is_overridden(c, name, Callback)]
        called = ((c, partial(getattr(c, name), self._trainer, self._module)) for c in chosen)
        return tuple(self._logged(name, hook, f"[Callback]{c.state_key}.{name}") for c, hook in called)

    def of_module(self, name: str) -> tuple[Hook, ...]:
        """Return the module's hook `name` in a tuple; an empty tuple if the module does not override it."""
        if not is_overridden(self._module, name, ModuleHooks):
            return ()
        return (self._logged(name, getattr(self._module, name), f"[TrainModule]{type(self._module).__name__}.{name}"),)

    def __getitem__(self, name: str) -> tuple[Hook, ...]:
        if not name.endswith("_end"):
            return self.of_callbacks(name) + self.of_module(name)
        # Callbacks with `runs_last` save, and a checkpoint must hold what the module's hook has done.
        others = self.of_callbacks(name, lambda callback: not callback.runs_last)
        return others + self.of_module(name) + self.of_callbacks(name, lambda callback: callback.runs_last)

    def call(self, name: str, *args: Any) -> None:
        """Call the hooks named `name` in order. Used only outside the step loop."""
        for hook in self[name]:
            hook(*args)

    def _logged(self, name: str, hook: Hook, action: str) -> Hook:
        """Wrap a hook, so that the log knows which hook calls `self.log`, and the profiler measures the hook."""
        if name in ("setup", "teardown"):
            hook = with_stage(hook)

        def logged(*args: Any) -> Any:
            log: MetricLog | None = self._trainer._log
            if log is None:
                return hook(*args)
            before = log.enter(name)
            try:
                return hook(*args)
            finally:
                log.leave(before)

        logged.__wrapped__ = hook  # type: ignore[attr-defined]  gives it the signature of `hook`
        profiler = self._trainer.profiler
        return logged if profiler.off else profiler.wrap(action, logged)
