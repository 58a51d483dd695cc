"""`WandbSweep`: report a metric's best value to a Weights & Biases sweep, and let the sweep restart the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instep.callbacks.base import Callback
from instep.errors import Preempted, SettingError
from instep.utils.checks import METRIC, choice

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

_MODE = choice("min", "max")


class WandbSweep(Callback):
    """Report a metric's best value to a Weights & Biases sweep, and let the sweep restart the run after a preemption.

    A sweep reads the summary of the W&B run, which by default holds the last value of a metric. This callback adds the
    best value, for instance as "val_loss.min"; use that name in the sweep's configuration. A run that a signal ends is
    marked as preempted, so that the sweep gives it to the next agent. To resume on that agent, the run needs a root
    folder of its own and `ckpt_path="auto"`. `WandbLogger` must be one of the Trainer's loggers.

    Args:
        monitor: name of the logged metric.
        mode: "min" or "max": whether the smallest or the largest value is the best.

    Raises:
        SettingError: `monitor` is not a name, `mode` is neither "min" nor "max", or there is no WandbLogger.

    Example:
        >>> from instep import Trainer
        >>> from instep.loggers import WandbLogger
        >>> def train():  # for wandb.agent(sweep_id, train)
        ...     run = wandb.init()
        ...     trainer = Trainer(
        ...         default_root_dir=f"runs/{run.id}",
        ...         logger=WandbLogger(experiment=run),
        ...         callbacks=[WandbSweep("val_loss")],
        ...     )
        ...     trainer.fit(Model(lr=run.config["lr"]), datamodule=data, ckpt_path="auto")
    """

    def __init__(self, monitor: str, mode: str = "min") -> None:
        self.monitor = METRIC("monitor", monitor)
        self.mode = _MODE("mode", mode)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        run = self._run(trainer)
        if trainer.is_global_zero:
            run.define_metric(self.monitor, summary=self.mode)

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        if isinstance(exception, Preempted) and trainer.is_global_zero:
            self._run(trainer).mark_preempting()

    def _run(self, trainer: Trainer) -> Any:
        for logger in trainer.loggers:
            if any(kind.__name__ == "WandbLogger" for kind in type(logger).__mro__):
                return logger.experiment
        raise SettingError(
            "WandbSweep needs a run of W&B to report to: give Trainer(logger=WandbLogger(...)).", field="logger"
        )
