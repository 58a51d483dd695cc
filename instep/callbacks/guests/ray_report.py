"""`RayReport`: report metrics and checkpoints to Ray Tune or Ray Train."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.callbacks.guests.reporting import Reporting
from instep.distributed.objects import broadcast_object
from instep.utils.checks import METRIC
from instep.utils.imports import require

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer

_NAME = "checkpoint"  # name of instep's checkpoint folder inside Ray's checkpoint


class RayReport(Reporting):
    """Report metrics and a checkpoint to Ray Tune or Ray Train after each validation.

    If fit does not validate, the callback reports at the end of each epoch. In a Tune trial only the main process
    reports. In a Train worker every rank reports, as Ray requires, and the main process adds the checkpoint. Ray's
    scheduler may end the trial during a report. Ray's own `CheckpointConfig` decides which checkpoints are kept; pass
    `ckpt_path=RayReport.ckpt_path()` to `fit` so that a trial that Ray restarts resumes.

    Args:
        metrics: the logged metrics to report: a name, a list of names, or a dict from names in Ray to logged names.
            None: all logged metrics.
        save_checkpoints: whether to report a full checkpoint with the metrics.

    Raises:
        SettingError: a name is not valid. (In the run:) no metric of that name was logged.
        MissingPackageError: Ray is not installed.

    Example:
        >>> from instep import Trainer
        >>> def train(config):  # for ray.tune.Tuner(train, ...) and ray.train.torch.TorchTrainer(train, ...)
        ...     trainer = Trainer(max_epochs=10, callbacks=[RayReport("val_loss")])
        ...     trainer.fit(Model(lr=config["lr"]), datamodule=data, ckpt_path=RayReport.ckpt_path())
    """

    def __init__(
        self, metrics: str | Sequence[str] | Mapping[str, str] | None = None, save_checkpoints: bool = True
    ) -> None:
        require("ray", extra="ray", purpose="RayReport")
        names = [metrics] if isinstance(metrics, str) else metrics
        pairs = names if isinstance(names, Mapping) or names is None else {name: name for name in names}
        self.metrics = None if pairs is None else {name: METRIC("metrics", logged) for name, logged in pairs.items()}
        self.save_checkpoints = save_checkpoints

    @staticmethod
    def ckpt_path() -> str | None:
        """Return the checkpoint path from which Ray resumes this trial or worker; None for a new trial or worker."""
        checkpoint = _session().get_checkpoint()
        return None if checkpoint is None else str(Path(checkpoint.to_directory(), _NAME))

    def _report(self, trainer: Trainer) -> None:
        values = self._values(trainer)
        ray, folder = _session(), None
        if self.save_checkpoints:
            folder = broadcast_object(tempfile.mkdtemp(prefix="ray-") if trainer.is_global_zero else None)
            trainer.save_checkpoint(Path(folder, _NAME))
        try:
            if ray.__name__ == "ray.train":
                checkpoint = folder if trainer.is_global_zero else None
                ray.report(values, checkpoint=None if checkpoint is None else ray.Checkpoint.from_directory(checkpoint))
            elif trainer.is_global_zero:
                ray.report(values, checkpoint=None if folder is None else ray.Checkpoint.from_directory(folder))
        finally:
            if folder is not None and trainer.is_global_zero:  # delete the folder, since Ray has copied it
                shutil.rmtree(folder, ignore_errors=True)

    def _values(self, trainer: Trainer) -> dict[str, float]:
        logged = trainer.callback_metrics
        pairs = {name: name for name in logged} if self.metrics is None else self.metrics
        self._check_logged(trainer, "metrics", pairs.values())
        counted = {"epoch": float(trainer.current_epoch), "step": float(trainer.global_step)}
        return {**counted, **{name: float(logged[key]) for name, key in pairs.items()}}


def _session() -> Any:
    """Return the Ray module with the `report` function: `ray.train` in a Train worker, else `ray.tune`."""
    from ray import train, tune

    try:
        train.get_context()
    except (RuntimeError, DeprecationWarning):  # this process is not a Train worker
        return tune
    return train
