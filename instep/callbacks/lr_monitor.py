"""Log learning rates, and momenta and weight decays if asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from instep.callbacks.base import Callback
from instep.errors import SettingError
from instep.utils.checks import choice

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from instep.callbacks.base import Trainer, TrainModule


class LearningRateMonitor(Callback):
    """Log the learning rate of every optimizer and parameter group to the loggers.

    The value at global step N is the one that the next optimizer step uses. Names: `lr-Adam`; `lr-Adam-1` for the
    second Adam; `/pg1`, `/pg2` or `/<name>` added for several parameter groups (a group's "name" key); a scheduler's
    `name` from `configure_optimizers` replaces `lr-Adam`; `-momentum` and `-weight_decay` added for those.

    Args:
        logging_interval: "step": every `log_every_n_steps` steps, for 0 never; "epoch": at every epoch's start; None:
            each as its scheduler's interval says, and by step where there is none.
        log_momentum: log momentum too, for Adam and its kind the first beta; 0 where an optimizer has none.
        log_weight_decay: log weight decay too; 0 where an optimizer has none.
        log_key_prefix: put before every name.

    Attributes:
        latest: the values logged last, by name.

    Raises:
        SettingError: `logging_interval` is unknown; there is no logger; two groups of one optimizer have one name.

    Example:
        >>> LearningRateMonitor(logging_interval="step").latest
        {}
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
        log_key_prefix: str | None = None,
    ) -> None:
        if logging_interval is not None:
            choice("step", "epoch")("logging_interval", logging_interval)
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.log_key_prefix = log_key_prefix or ""
        self.latest: dict[str, float] = {}
        self._logged_step = -1
        if logging_interval != "epoch":  # of this object, not of the class: others have no call at every step
            self.on_train_batch_start = self._before_batch

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.loggers and not trainer.fast_dev_run:
            raise SettingError(
                "LearningRateMonitor has no logger to write to. "
                "Give Trainer(logger=...) one, or leave the callback out.",
                field="logger",
            )
        for optimizer in trainer.optimizers:
            twice = [name for name, count in Counter(_group_names(optimizer)).items() if count > 1]
            if twice and len(optimizer.param_groups) > 1:
                raise SettingError(
                    f"LearningRateMonitor: parameter groups of {type(optimizer).__name__} have the same "
                    f"name {twice[0]!r}. Give every group its own name, or none.",
                    field="name",
                    got=twice[0],
                )
        self._logged_step = -1

    def _before_batch(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        type(self).on_train_batch_start(self, trainer, module, batch, batch_idx)  # a subclass's
        step, every = trainer.global_step, trainer.log_every_n_steps
        if every and step % every == 0 and step != self._logged_step:
            self._logged_step = step  # accumulation: several batches come at one step
            self._log(trainer, "step")

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self.logging_interval != "step" and not trainer.progress.outer_batch:  # else it is resumed within the epoch
            self._log(trainer, "epoch")

    def _log(self, trainer: Trainer, interval: str) -> None:
        values = dict(self._values(trainer, interval))
        if values:
            self.latest = values
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)

    def _values(self, trainer: Trainer, interval: str) -> Iterator[tuple[str, float]]:
        for optimizer, name, own_interval in _named(trainer):
            if self.logging_interval is None and own_interval != interval:
                continue
            groups = optimizer.param_groups
            for group, group_name in zip(groups, _group_names(optimizer), strict=True):
                suffix = f"/{group_name}" if len(groups) > 1 or "name" in group else ""
                key = f"{self.log_key_prefix}{name}{suffix}"
                yield key, float(group["lr"])
                if self.log_momentum:
                    yield f"{key}-momentum", float(group["betas"][0] if "betas" in group else group.get("momentum", 0))
                if self.log_weight_decay:
                    yield f"{key}-weight_decay", float(group.get("weight_decay", 0))


def _named(trainer: Trainer) -> Iterator[tuple[Optimizer, str, str]]:
    """Give every optimizer with its name and the interval of its scheduler: those with a scheduler first."""
    seen: list[int] = []
    names: Counter[str] = Counter()
    pairs: list[tuple[Optimizer, str | None, str]] = [
        (config.scheduler.optimizer, config.name, config.interval)
        for config in trainer.lr_scheduler_configs
        if hasattr(config.scheduler, "optimizer")
    ]
    pairs += [(optimizer, None, "step") for optimizer in trainer.optimizers]
    for optimizer, given, interval in pairs:
        if id(optimizer) in seen:
            continue
        seen.append(id(optimizer))
        name = given or f"lr-{type(optimizer).__name__}"
        count = names[name]
        names[name] += 1
        yield optimizer, f"{name}-{count}" if count else name, interval


def _group_names(optimizer: Optimizer) -> list[str]:
    return [str(group.get("name", f"pg{number}")) for number, group in enumerate(optimizer.param_groups, start=1)]
