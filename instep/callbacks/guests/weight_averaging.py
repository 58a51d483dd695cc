"""`WeightAveraging` and `EMAWeightAveraging`: keep an average of the weights beside the trained weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from instep.callbacks.base import Callback
from instep.callbacks.guests.pruning import ModelPruning
from instep.checkpoint.edge import check, count, number
from instep.errors import SettingError
from instep.utils.checks import FLAG, Check, at_least, choice, is_number, or_none, wrong
from instep.utils.optimizer_state import clean_name
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule
    from instep.strategies import Strategy

_STATE = {"n_averaged": count, "latest_update_step": count, "latest_update_epoch": number}
USES = ("val", "save", "end")
_FUNCTIONS = ("avg_fn", "multi_avg_fn")
_DEVICE = (
    "a device such as 'cpu' or 'cuda:0', or None. It is the first argument; others are given by name, such as an "
    "EMAWeightAveraging's decay=0.999"
)


class WeightAveraging(Callback):
    """Keep an average of the weights during training, and use it instead of the trained weights, for instance to save.

    The average is computed as by torch's `AveragedModel`. Each rank averages the part of the weights that it holds, so
    all sharding strategies work, and no rank waits for another one. Override `should_update` to choose when the average
    is updated. By default this happens after every optimizer step, and the average is the mean of the weights after all
    these steps. Before the first update the trained weights are used.

    A checkpoint holds the trained weights and the average: one of the two as plain weights, which any program loads,
    and the other in an entry of its own. A resumed run continues with both of them, bit for bit, on any number of ranks
    and under any strategy. To load the trained weights from a checkpoint, use
    `load_from_checkpoint(path, which_weights="live")` or `instep merge-weights --weights live`.

    Weights of 16 bits are averaged in float32, so that small updates are not lost by rounding.

    Args:
        device: device of the average; "cpu" saves GPU memory. None: the device of the weights.
        use_buffers: True: average floating-point buffers too, such as BatchNorm's statistics. False: copy the module's
            buffers.
        use_for: what the average is used for, one name or several: "val": validation within fit. "save": the plain
            weights of checkpoints. "end": the weights of the module after fit, for `trainer.test` and
            `trainer.predict`.
        kwargs: `avg_fn` or `multi_avg_fn`, the arguments of torch's `AveragedModel`.

    Raises:
        SettingError: an argument is wrong. (When training starts:) there is another averaging callback or a
            ModelPruning, or the strategy allows different weights on the ranks (local SGD), or does not give access to
            the weights.

    Example:
        >>> averaging = WeightAveraging(use_for="val")
        >>> averaging.should_update(step_idx=0), averaging.should_update(epoch_idx=0)
        (True, False)

    Source:
        Izmailov et al.: Averaging Weights Leads to Wider Optima and Better Generalization, UAI 2018
        (https://arxiv.org/abs/1803.05407), as built in `torch.optim.swa_utils`.
    """

    runs_last = True  # called after the module's own hooks, so that the average includes changes by these hooks

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        *,
        use_for: str | Sequence[str] = USES,
        **kwargs: Any,
    ) -> None:
        for name in kwargs:
            if name not in _FUNCTIONS:
                raise wrong(name, kwargs[name], f"no such argument; functions are {' and '.join(_FUNCTIONS)}")
        given = {name: function for name, function in kwargs.items() if function is not None}
        for name, function in given.items():
            if not callable(function):
                raise wrong(name, function, "a function; The `avg_fn` should be callable")
        if len(given) > 1:
            raise SettingError("avg_fn and multi_avg_fn were both given; give one of them", field="avg_fn")
        try:
            self.device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError):
            raise wrong("device", device, _DEVICE) from None
        self.use_buffers = FLAG("use_buffers", use_buffers)
        self.use_for = _uses(use_for)
        self._functions = given
        self._n_averaged = 0
        # The average of each entry of the state dict. Integers, and buffers if not `use_buffers`, are copied instead.
        self._averages: dict[str, Tensor] | None = None
        self._averaged: list[str] = []  # names of the entries of `_averages` that are averaged
        self._copied: list[str] = []  # names of the entries of `_averages` that are copied
        self._untrained: list[str] = []  # names of buffers and of integer tensors
        self._live: dict[str, Tensor] | None = None  # the trained weights, while the module holds the average
        self._in_validation = False
        # the average's number of updates, as read from a checkpoint; None once the average itself is loaded
        self._updates: int | None = None
        self._latest_update_step = 0
        self._latest_update_epoch = -1
        self._asked_step = 0
        self._begins_late = False

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the average now: after every optimizer step, unless overridden.

        Args:
            step_idx: index of the optimizer step that has ended, from 0; None at an epoch's end.
            epoch_idx: index of the epoch that has ended, from 0; None after an optimizer step.
        """
        return step_idx is not None

    @property
    def n_averaged(self) -> int:
        """Number of updates of the average so far."""
        return self._n_averaged

    # ---- the run

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        strategy = trainer.strategy
        if sum(isinstance(callback, WeightAveraging) for callback in trainer.callbacks) > 1:
            raise SettingError(
                "two callbacks average the weights, and only one average can be validated and saved. Leave one of them "
                "out.",
                field="callbacks",
            )
        if any(isinstance(callback, ModelPruning) for callback in trainer.callbacks):
            raise SettingError(
                f"{type(self).__name__} averages parameters that stay the same, and ModelPruning exchanges them for "
                "masked ones in the middle of the run. Leave one of the two out; or prune a run that begins with the "
                "average: fit(..., ckpt_path=path, resume=Resume.weights()).",
                field="callbacks",
            )
        if strategy.replicas_diverge:
            raise SettingError(
                f"{type(self).__name__} needs replicas that are alike, and strategy={strategy.name!r} trains them "
                "apart between two means (comm_hook='post_local_sgd'). Leave one of the two out.",
                field="callbacks",
            )
        self._live, self._in_validation = None, False
        self._make(module, strategy.local_weights())
        saved, updates, self._updates = trainer.resumed_from, self._updates, None
        if updates and saved is not None and "averaged" in saved.weight_sets:
            self._load(strategy, saved.stored_weights("averaged"), updates)
        else:
            self._latest_update_step, self._latest_update_epoch = 0, -1
        self._begins_late = saved is not None and updates is None

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._asked_step = trainer.global_step
        if self._begins_late and trainer.global_step and trainer.is_global_zero:
            warn_user(
                f"the checkpoint that this run goes on from has no average for {type(self).__name__}: the average "
                f"begins with the weights after step {trainer.global_step}"
            )

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step <= self._asked_step:
            return  # gradients are being accumulated: this batch had no optimizer step
        self._asked_step = step
        if self.should_update(step_idx=step - 1):
            self._update(trainer.strategy)
            self._latest_update_step = step

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        epoch = trainer.position.epoch
        if epoch > self._latest_update_epoch and self.should_update(epoch_idx=epoch):
            self._update(trainer.strategy)
            self._latest_update_epoch = epoch

    def on_validation_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.state.fn == "fit" and "val" in self.use_for:
            self._in_validation = self._live is None
            if self._in_validation:
                self._swap_models(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._in_validation:
            self._in_validation = False
            self._swap_models(trainer)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if "end" in self.use_for:
            self._copy_average_to_current(trainer)

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        # Restore the trained weights without any collective, since other ranks may have ended.
        if self._in_validation and self._live is not None:
            self._in_validation = False
            _write(self._live, trainer.strategy.local_weights())
            self._live = None

    # ---- what is saved

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        if self._averages is None or not self.n_averaged:
            return
        if trainer.state.fn != "fit":
            if trainer.is_global_zero:
                warn_user(
                    f"{type(self).__name__}: this checkpoint is saved after a {trainer.state.fn}, which may have "
                    "loaded other weights; it has those of the module, without an average. Save it after fit"
                )
            return
        strategy, held = trainer.strategy, trainer.strategy.local_weights()
        if self._live is not None:
            checkpoint["state_dict"] = strategy.model_state_from(_by_all_names(self._live, held))
        checkpoint["averaged_state_dict"] = strategy.model_state_from(_by_all_names(self._averages, held))
        checkpoint["plain_weights"] = "averaged" if "save" in self.use_for else "live"

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates, and the last update's step and epoch, but not the average itself."""
        return {
            "n_averaged": self.n_averaged,
            "latest_update_step": self._latest_update_step,
            "latest_update_epoch": self._latest_update_epoch,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check({name: state_dict.get(name) for name in _STATE}, _STATE, "it")
        self._updates = state_dict["n_averaged"]
        self._latest_update_step = state_dict["latest_update_step"]
        self._latest_update_epoch = state_dict["latest_update_epoch"]

    # ---- the average

    def _make(self, module: TrainModule, held: Mapping[str, Tensor]) -> None:
        buffers = {name for name, _ in module.named_buffers()}
        self._n_averaged, self._averages = 0, {}
        self._averaged, self._copied, self._untrained = [], [], []
        for name, tensor in _once(held).items():
            floating = tensor.is_floating_point() or tensor.is_complex()
            device = tensor.device if self.device is None or not floating else self.device
            self._averages[name] = (_wide(tensor) if floating else tensor.detach()).to(device, copy=True)
            untrained = not floating or name in buffers
            (self._averaged if floating and (self.use_buffers or not untrained) else self._copied).append(name)
            if untrained:
                self._untrained.append(name)

    @torch.no_grad()
    def _load(self, strategy: Strategy, saved: Mapping[str, Any], updates: int) -> None:
        """Load this rank's part of the saved average, and set the average's number of updates."""
        assert self._averages is not None
        for name, average in self._averages.items():
            whole = saved.get(clean_name(name))
            if whole is not None:
                average.copy_(strategy.local_part(name, whole))
        self._n_averaged = updates

    @torch.no_grad()
    def _update(self, strategy: Strategy) -> None:
        assert self._averages is not None
        held = strategy.local_weights()
        # At the first update, the average is a copy of the weights.
        for name in self._copied if self._n_averaged else self._averages:
            self._averages[name].copy_(held[name])
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for name in self._averaged if self._n_averaged else ():
            average = self._averages[name]
            averages, values = groups.setdefault((average.device, average.dtype), ([], []))
            averages.append(average)
            values.append(_wide(held[name]).to(average.device))
        for (device, _), (averages, values) in groups.items():
            self._average(averages, values, device)
        self._n_averaged += 1

    def _average(self, averages: list[Tensor], values: list[Tensor], device: torch.device) -> None:
        """Update averages by torch's functions; `AveragedModel` itself would make the host wait for the GPU."""
        if not self._functions:
            get_swa_multi_avg_fn()(averages, values, self._n_averaged)  # pyright: ignore[reportArgumentType]
            return
        # torch.full sets the value by a kernel on the device, without a copy from the host, which would have to wait.
        count = torch.full((), self._n_averaged, dtype=torch.long, device=device)
        if several := self._functions.get("multi_avg_fn"):
            several(averages, values, count)
        else:
            for average, value in zip(averages, values, strict=True):
                average.copy_(self._functions["avg_fn"](average, value, count))

    @torch.no_grad()
    def _take_buffers(self, strategy: Strategy) -> None:
        """Copy the module's buffers and integer tensors into the average."""
        assert self._averages is not None
        held = strategy.local_weights()
        for name in self._untrained:
            self._averages[name].copy_(held[name])

    def _swap_models(self, trainer: Trainer) -> None:
        """Put the average into the module, or put the trained weights back. Collective: all ranks call it."""
        if not self.n_averaged:
            return
        strategy = trainer.strategy
        held = strategy.local_weights()
        if self._live is None:
            averages = self._averages or {}
            self._live = {name: held[name].detach().to(averages[name].device, copy=True) for name in averages}
            _write(averages, held)
            strategy.average_replicas()  # for the buffers, the only tensors that may differ between ranks here
        else:
            _write(self._live, held)
            self._live = None
        strategy.sync_local_weights()

    def _copy_average_to_current(self, trainer: Trainer) -> None:
        """Put the average into the module, to stay there after fit; keep the trained weights for a save. Collective."""
        if self._live is None:
            self._swap_models(trainer)


class EMAWeightAveraging(WeightAveraging):
    """`WeightAveraging` with an exponential moving average: average = decay * average + (1 - decay) * weights.

    Args:
        device: device of the average. None: the device of the weights.
        use_buffers: average floating-point buffers too.
        decay: weight of the old average, from 0 to 1.
        update_every_n_steps: update after each optimizer step whose index, from 0, is a multiple of this number; 0:
            never after steps, which requires `update_starting_at_epoch`.
        update_starting_at_step: no update after optimizer steps with an index, from 0, below this number. None: 0.
        update_starting_at_epoch: index of the first epoch that ends with an update, from 0. None: no updates by epoch.
        use_for: what the average is used for: "val", "save" or "end", as in `WeightAveraging`.

    Example:
        >>> averaging = EMAWeightAveraging(decay=0.99, update_every_n_steps=5, update_starting_at_step=10)
        >>> [step for step in range(20) if averaging.should_update(step_idx=step)]
        [10, 15]

    Source:
        `torch.optim.swa_utils.get_ema_multi_avg_fn`.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        *,
        use_for: str | Sequence[str] = USES,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            name = next(iter(kwargs))
            raise wrong(name, kwargs[name], "no such argument: decay gives the function; WeightAveraging takes one")
        _DECAY("decay", decay)
        self.decay = decay
        self.update_every_n_steps = at_least(0)("update_every_n_steps", update_every_n_steps)
        self.update_starting_at_step = _START("update_starting_at_step", update_starting_at_step)
        self.update_starting_at_epoch = _START("update_starting_at_epoch", update_starting_at_epoch)
        if not update_every_n_steps and update_starting_at_epoch is None:
            raise wrong(
                "update_every_n_steps",
                update_every_n_steps,
                "an integer of at least 1, or update_starting_at_epoch=...: else nothing is ever averaged",
            )
        super().__init__(device, use_buffers, use_for=use_for, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the average after this step or epoch, by the `update_...` arguments."""
        if step_idx is not None:
            started = self.update_starting_at_step is None or step_idx >= self.update_starting_at_step
            every = self.update_every_n_steps
            return started and every > 0 and step_idx % every == 0
        first = self.update_starting_at_epoch
        return epoch_idx is not None and first is not None and epoch_idx >= first


_DECAY = Check(lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1")
_START = or_none(at_least(0))


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor detached from its graph, and converted to float32 if it is a float of fewer bits."""
    tensor = tensor.detach()
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < _FLOAT_BYTES else tensor


_FLOAT_BYTES = 4


def _once(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each tensor once, under its first name: tied weights have several names."""
    first: dict[int, str] = {}
    return {name: tensor for name, tensor in held.items() if first.setdefault(id(tensor), name) == name}


def _by_all_names(values: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each value under all names of its tensor in `held`: tied weights have several names."""
    first: dict[int, str] = {}
    return {name: values[first.setdefault(id(tensor), name)] for name, tensor in held.items()}


@torch.no_grad()
def _write(values: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        held[name].copy_(value)


def _uses(use_for: str | Sequence[str]) -> tuple[str, ...]:
    uses = (use_for,) if isinstance(use_for, str) else tuple(use_for)
    for use in uses:
        choice(*USES)("use_for", use)
    return uses
