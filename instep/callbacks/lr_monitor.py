"""`LearningRateMonitor`: log learning rates, and on request momenta and weight decays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from instep.callbacks.base import Callback
from instep.errors import SettingError
from instep.utils.checks import choice
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from instep.callbacks.base import Trainer, TrainModule

_KEPT = 10_000


class LearningRateMonitor(Callback):
    """Log the learning rate of every optimizer and parameter group to the loggers.

    The value that is logged at global step N is the rate that the next optimizer step uses. It is also in
    `trainer.callback_metrics`. The logged name is `lr-Adam` for an Adam optimizer, and `lr-Adam-1` for a second one; if
    the scheduler has a `name` in `configure_optimizers`, this name replaces `lr-Adam`. With several parameter groups
    `/pg1`, `/pg2` and so on are added. If a group has a "name" key, `/<name>` is added instead, also if it is the only
    group. The names of momenta end in `-momentum`, those of weight decays in `-weight_decay`.

    Args:
        logging_interval: "step": log every `log_every_n_steps` steps (never if this is 0). "epoch": log at the start of
            every epoch. None: log at the interval of the optimizer's scheduler, and by step without a scheduler.
        log_momentum: log momentum too: for Adam and similar optimizers the first beta, or 0 without momentum.
        log_weight_decay: log weight decay too, or 0 if the optimizer has none.
        log_key_prefix: text to put before every name.

    Attributes:
        lrs: lists of the learning rates that were logged in this fit, by name; a list keeps at least the last ten
            thousand rates.
        last_momentum_values: logged name -> the momentum that was logged last. A value is None before the first log,
            and without `log_momentum`.
        last_weight_decay_values: logged name -> the weight decay that was logged last. A value is None before the first
            log, and without `log_weight_decay`.

    Raises:
        SettingError: `logging_interval` is unknown. (When training starts:) there is no logger, or two groups of an
            optimizer have the same name.

    Example:
        >>> LearningRateMonitor(logging_interval="step").lrs
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
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}
        self._logged_step = -1
        # The hook is set on this object, so that a monitor that logs by epoch costs no call at each step.
        if logging_interval != "epoch":
            self.on_train_batch_start = self._before_batch

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._logged_step = -1

    @property
    def state_key(self) -> str:
        """State key with the interval and the prefix, so that a Trainer can have several LearningRateMonitors."""
        return f"LearningRateMonitor({self.logging_interval!r}, log_key_prefix={self.log_key_prefix!r})"

    def state_dict(self) -> dict[str, Any]:
        """Return the last step whose rates were logged."""
        return {"logged_step": self._logged_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the last step whose rates were logged, so that a resumed run does not log it again."""
        self._logged_step = int(state_dict["logged_step"])

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.loggers and not trainer.fast_dev_run:
            raise SettingError(
                "LearningRateMonitor cannot be used with a `Trainer` that has no logger. "
                "Give Trainer(logger=...) one, or leave the callback out.",
                field="logger",
            )
        for optimizer in trainer.optimizers:
            twice = [name for name, count in Counter(_group_names(optimizer)).items() if count > 1]
            if twice and len(optimizer.param_groups) > 1:
                raise SettingError(
                    "LearningRateMonitor: A single `Optimizer` cannot have multiple parameter groups with identical "
                    f"`name` values: two of {type(optimizer).__name__} are called {twice[0]!r}. Give every group its "
                    "own name, or none.",
                    field="name",
                    got=twice[0],
                )
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if self.log_momentum and any("momentum" not in group and "betas" not in group for group in groups):
            warn_user(
                "LearningRateMonitor(log_momentum=True): some optimizers do not have momentum. 0 is logged for it.",
                RuntimeWarning,
            )
        names = [name for name, *_ in self._groups(trainer)]
        self.lrs = {name: [] for name in names}
        self.last_momentum_values = dict.fromkeys(f"{name}-momentum" for name in names)
        self.last_weight_decay_values = dict.fromkeys(f"{name}-weight_decay" for name in names)

    def _before_batch(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        type(self).on_train_batch_start(self, trainer, module, batch, batch_idx)  # the hook of a subclass, if any
        step, every = trainer.global_step, trainer.log_every_n_steps
        if every and step % every == 0 and step != self._logged_step:
            self._logged_step = step  # do not log the next batches of the same step (accumulation)
            self._log(trainer, "step")

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        # If the run was resumed within this epoch, the rates of the epoch are logged already.
        if self.logging_interval != "step" and not trainer.position.inside:
            self._log(trainer, "epoch")

    def _log(self, trainer: Trainer, interval: str) -> None:
        lrs, momenta, decays = {}, {}, {}
        for name, group, own_interval in self._groups(trainer):
            if self.logging_interval is None and own_interval != interval:
                continue
            lrs[name] = float(group["lr"])
            if self.log_momentum:
                momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0)
                momenta[f"{name}-momentum"] = float(momentum)
            if self.log_weight_decay:
                decays[f"{name}-weight_decay"] = float(group.get("weight_decay", 0))
        if not lrs:
            return
        for name, value in lrs.items():
            if name not in self.lrs:  # a second group was added, so the first one is called /pg1 now
                self.lrs[name] = self.lrs.pop(name.removesuffix("/pg1"), [])
            values = self.lrs[name]
            values.append(value)
            if len(values) == 2 * _KEPT:
                del values[:_KEPT]
        self.last_momentum_values |= momenta
        self.last_weight_decay_values |= decays
        values = lrs | momenta | decays
        trainer.metrics.callback.update(values)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)

    def _groups(self, trainer: Trainer) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield the logged name, the parameter group and the interval ("step" or "epoch") of every group."""
        for optimizer, name, interval in _named(trainer):
            groups = optimizer.param_groups
            for group, group_name in zip(groups, _group_names(optimizer), strict=True):
                suffix = f"/{group_name}" if len(groups) > 1 or "name" in group else ""
                yield f"{self.log_key_prefix}{name}{suffix}", group, interval


def _named(trainer: Trainer) -> Iterator[tuple[Optimizer, str, str]]:
    """Yield every optimizer, its logged name and its interval; optimizers with a scheduler come first."""
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
