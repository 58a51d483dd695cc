"""`StochasticWeightAveraging`: average the weights that the model has at the ends of the last epochs."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import SWALR

from instep.callbacks.guests.weight_averaging import WeightAveraging
from instep.distributed import all_reduce_
from instep.errors import SettingError
from instep.state.device import widest_float
from instep.utils.checks import at_least, choice, is_int, is_number
from instep.utils.optimizers import LRSchedulerConfig
from instep.utils.rank_zero import rank_zero_info
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from instep.callbacks.base import Trainer, TrainModule


class StochasticWeightAveraging(WeightAveraging):
    """Average the weights at the end of each epoch from `swa_epoch_start` on, with the learning rate `swa_lrs`.

    From that epoch on, torch's `SWALR` replaces the run's learning-rate scheduler and brings the learning rate to
    `swa_lrs`. When fit ends, the module gets the averaged weights, and one more pass over the training data computes
    the statistics of its BatchNorm layers. By default validation and checkpoints use the trained weights, not the
    averaged ones. `WeightAveraging` offers other averages.

    Args:
        swa_lrs: the learning rate of the averaged epochs: a number for all parameter groups, or a list with one number
            for each group.
        swa_epoch_start: the first averaged epoch, counted from 1; a float is a fraction of `max_epochs`.
        annealing_epochs: number of epochs in which the learning rate changes to `swa_lrs`.
        annealing_strategy: "cos" or "linear": how the learning rate changes to `swa_lrs`.
        avg_fn: function that updates the average, as torch's `AveragedModel` takes it. None: the plain mean.
        device: device of the average. None: the device of the weights.
        use_for: what the average is used for: "val", "save" or "end", as in `WeightAveraging`. With "val" or "save" the
            BatchNorm statistics are computed after each averaged epoch.

    Raises:
        SettingError: an argument is wrong. (When training starts:) there is not exactly one optimizer, or more than one
            scheduler; `swa_epoch_start` is a float and `max_epochs` is -1; or the module has BatchNorm layers and uses
            manual optimization.

    Example:
        >>> StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=5).use_for
        ('end',)

    Source:
        Izmailov et al.: Averaging Weights Leads to Wider Optima and Better Generalization, UAI 2018
        (https://arxiv.org/abs/1803.05407).
    """

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: str = "cos",
        avg_fn: Callable[[Tensor, Tensor, Any], Tensor] | None = None,
        device: torch.device | str | None = "cpu",
        *,
        use_for: str | Sequence[str] = ("end",),
    ) -> None:
        whole = is_int(swa_epoch_start, 1)
        if not whole and not (isinstance(swa_epoch_start, float) and 0 <= swa_epoch_start <= 1):
            raise SettingError(
                f"swa_epoch_start={swa_epoch_start!r} should be a >0 integer or a float between 0 and 1.",
                field="swa_epoch_start",
                got=swa_epoch_start,
            )
        rates = swa_lrs if isinstance(swa_lrs, list) else [swa_lrs]
        if not rates or not all(isinstance(rate, float) and is_number(rate) and rate > 0 for rate in rates):
            raise SettingError(
                f"swa_lrs={swa_lrs!r}: The `swa_lrs` should be a positive float, or a list of positive floats",
                field="swa_lrs",
                got=swa_lrs,
            )
        super().__init__(device, use_buffers=False, use_for=use_for, avg_fn=avg_fn)
        self.swa_lrs = swa_lrs
        self.swa_epoch_start = swa_epoch_start
        self.annealing_epochs = at_least(0)("annealing_epochs", annealing_epochs)
        self.annealing_strategy = choice("cos", "linear")("annealing_strategy", annealing_strategy)
        self._first_epoch = 0
        self._scheduled = False
        self._has_batchnorm = self._fresh = False

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the average now: at the end of each epoch from `swa_epoch_start` on."""
        return epoch_idx is not None and epoch_idx >= self._first_epoch

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit" and trainer.global_step == 0:
            self._scheduled = False  # an earlier run may have set this flag; a resumed run loads it later

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        name = type(self).__name__
        if len(trainer.optimizers) != 1:
            raise SettingError(
                f"{name}: SWA currently works with 1 `optimizer`, and configure_optimizers returned "
                f"{len(trainer.optimizers)}. Use WeightAveraging, which leaves learning rates alone.",
                field="callbacks",
            )
        if len(trainer.lr_scheduler_configs) > 1:
            raise SettingError(
                f"{name}: SWA currently not supported for more than 1 `lr_scheduler`. Use WeightAveraging.",
                field="callbacks",
            )
        groups = len(trainer.optimizers[0].param_groups)
        if isinstance(self.swa_lrs, list) and len(self.swa_lrs) != groups:
            raise SettingError(
                f"swa_lrs has {len(self.swa_lrs)} learning rates, and the optimizer has {groups} parameter groups",
                field="swa_lrs",
                got=self.swa_lrs,
            )
        first = self.swa_epoch_start
        if isinstance(first, float):
            if trainer.max_epochs == -1:
                raise SettingError(
                    "SWA with `swa_epoch_start` as a float is not supported when `max_epochs=-1` (no limit, which "
                    "max_steps or max_time alone also mean). Please provide `swa_epoch_start` as an integer.",
                    field="swa_epoch_start",
                    got=first,
                )
            first = int(trainer.max_epochs * first)
        self._first_epoch = max(first - 1, 0)
        if self._first_epoch >= trainer.max_epochs != -1:
            warn_user(
                f"swa_epoch_start={first} comes after the last of max_epochs={trainer.max_epochs}: {name} averages "
                "nothing. Let it begin sooner"
            )
        self._has_batchnorm = any(isinstance(part, _BatchNorm) for part in module.modules())
        takes_batches = "dataloader_iter" in signature(module.training_step).parameters
        if self._has_batchnorm and (takes_batches or not module.automatic_optimization):
            raise SettingError(
                f"{name} runs training_step on a batch, without a step, for BatchNorm's statistics; neither "
                "manual optimization nor training_step(dataloader_iter) can. Use WeightAveraging, which averages them.",
                field="callbacks",
            )
        super().on_fit_start(trainer, module)
        self._fresh = False
        # The checkpoint was saved after the switch to SWALR: switch now, so that SWALR's state can be loaded.
        if self._scheduled:
            self._schedule(trainer)

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._scheduled or trainer.position.epoch < self._first_epoch:
            return
        if trainer.position.epoch > self._first_epoch:
            warn_user(
                f"{type(self).__name__} begins with epoch {trainer.position.epoch + 1} and not with "
                f"{self._first_epoch + 1}: the run went on from a checkpoint without it"
            )
        for config in trainer.lr_scheduler_configs:
            if config.interval != "epoch" or config.frequency != 1:
                warn_user(f"SWA is currently only supported every epoch. Found {config}: SWALR steps once an epoch")
            rank_zero_info(f"Swapping scheduler `{type(config.scheduler).__name__}` for `SWALR`")
        self._schedule(trainer)

    def _schedule(self, trainer: Trainer) -> None:
        optimizer = trainer.optimizers[0]
        groups = optimizer.param_groups
        rates = self.swa_lrs if isinstance(self.swa_lrs, list) else [self.swa_lrs] * len(groups)
        for group, rate in zip(groups, rates, strict=True):
            group["initial_lr"] = rate
        strategy: Any = self.annealing_strategy
        schedule = _SWALR(optimizer, rates, self.annealing_epochs, strategy)  # pyright: ignore[reportArgumentType]
        trainer.lr_scheduler_configs[:] = [LRSchedulerConfig(schedule)]
        self._scheduled = True

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        before = self._latest_update_epoch
        super().on_train_epoch_end(trainer, module)
        if before != self._latest_update_epoch:
            self._fresh = False
            if {"val", "save"} & set(self.use_for):
                self._refresh_batchnorm(trainer, module)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if "end" in self.use_for:
            self._refresh_batchnorm(trainer, module)
        super().on_train_end(trainer, module)

    def _refresh_batchnorm(self, trainer: Trainer, module: TrainModule) -> None:
        """Compute the BatchNorm statistics for the averaged weights. Collective: all ranks call it."""
        if not self._has_batchnorm or self._fresh or not self.n_averaged:
            return
        self._swap_models(trainer)
        update_batchnorm(trainer, module)
        self._take_buffers(trainer.strategy)
        self._swap_models(trainer)
        self._fresh = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `WeightAveraging`, and whether SWALR has replaced the scheduler."""
        return {**super().state_dict(), "scheduled": self._scheduled}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._scheduled = bool(state_dict.get("scheduled"))


class _SWALR(SWALR):
    """torch's SWALR without the function that its `state_dict` contains before torch 2.10."""

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "anneal_func"}


def update_batchnorm(trainer: Trainer, module: TrainModule) -> None:
    """Compute the statistics of the module's BatchNorm layers by one pass over the training data. Collective.

    The statistics are the mean over all batches of all ranks, with equal weight for each batch, as in
    `torch.optim.swa_utils.update_bn`. Layers in eval mode are not changed.
    """
    layers = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.training]
    statistics = [_BatchStatistics(layer) for layer in layers if layer.running_mean is not None]

    def before_batch(counts: bool) -> None:
        for one in statistics:
            one.counts = counts

    if not statistics:
        return
    try:
        trainer._forward_training_data(before_batch)
    finally:
        for one in statistics:
            one.close()
    for one in statistics:
        one.write(trainer.world_size // trainer.strategy.data_world_size)


class _BatchStatistics:
    """Sum of a BatchNorm layer's statistics over batches, updated after each forward of the layer.

    The layer's momentum is set to 1, so that its buffers hold the statistics of the last batch alone. Therefore it does
    not matter that DDP overwrites the buffers between two forwards.

    Args:
        layer: a BatchNorm layer with running statistics.
    """

    def __init__(self, layer: _BatchNorm) -> None:
        self._layer, self._momentum = layer, layer.momentum
        self._before = [buffer.clone() for buffer in layer.buffers()]
        layer.momentum = 1.0
        mean, variance = self._running()
        self._sums = torch.zeros(2 * mean.numel() + 1, dtype=widest_float(mean.device), device=mean.device)
        mean.zero_()
        variance.fill_(1.0)
        self._handle = layer.register_forward_hook(self._add)
        self.counts = True

    def _running(self) -> tuple[Tensor, Tensor]:
        mean, variance = self._layer.running_mean, self._layer.running_var
        assert mean is not None
        assert variance is not None
        return mean, variance

    def _add(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if self.counts:
            mean, variance = self._running()
            self._sums += torch.cat([mean, variance, mean.new_ones(1)])

    def close(self) -> None:
        """Restore the layer's momentum and buffers, and remove the forward hook."""
        self._handle.remove()
        self._layer.momentum = self._momentum
        for buffer, before in zip(self._layer.buffers(), self._before, strict=True):
            buffer.copy_(before)

    def write(self, copies: int) -> None:
        """Set the layer's running statistics to the mean over the batches of all ranks. Collective: all ranks call it.

        Args:
            copies: number of ranks that read the same data.
        """
        all_reduce_(self._sums, "sum")
        batches = self._sums[-1]
        if not batches:
            warn_user("BatchNorm's statistics are those of the training: its data could not be read a second time")
            return
        mean, variance = self._running()
        means = (self._sums[:-1] / batches).to(mean.dtype)
        mean.copy_(means[: mean.numel()])
        variance.copy_(means[mean.numel() :])
        if self._layer.num_batches_tracked is not None:
            self._layer.num_batches_tracked.copy_(batches / copies)
