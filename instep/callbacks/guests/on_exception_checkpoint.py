"""`OnExceptionCheckpoint`: save a checkpoint when an exception ends the run, so that the run can resume from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from instep.callbacks.base import Callback
from instep.checkpoint.names import base_name
from instep.checkpoint.scan import read_or_say
from instep.checkpoint.store import CheckpointStore
from instep.distributed.after_error import device_failed
from instep.errors import NonFiniteError, Preempted, SettingError
from instep.types import Location
from instep.utils.paths import to_path
from instep.utils.untrusted_files import clean
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule


class OnExceptionCheckpoint(Callback):
    """Save a checkpoint when an exception ends fit, so that no step since the last regular checkpoint is lost.

    The checkpoint holds the state after the last optimizer step. If it is the newest checkpoint, `ckpt_path="auto"` and
    `ckpt_path="last"` resume from it, with or without a `ModelCheckpoint`, and so does a job that its launcher
    restarts. If the exception was raised within an optimizer step, the step may be half done: a run resumes from that
    checkpoint only if its path is given. Random numbers that the failed batch drew, and its changes of BatchNorm
    statistics, are not undone: the resumed run repeats the batch.

    With several processes, all save together. If only some processes failed, the others do not take part; then the
    failed processes save alone if each of them holds the whole state (`ddp`). Under other strategies no checkpoint is
    saved in that case.

    The checkpoint is deleted when the resumed run has finished and has a newer checkpoint that verifies. Nothing is
    saved after a preemption, for which the run has already saved, or after a NonFiniteError, whose state is useless.
    If a device has failed, as after an illegal memory access, its state cannot be saved.

    Args:
        dirpath: folder or URL for the checkpoint; a `ModelCheckpoint` may use the same one.
        filename: name of the checkpoint; a number is added to it for each new one.

    Raises:
        SettingError: `filename` is empty or is not a valid name of a folder.

    Example:
        >>> OnExceptionCheckpoint("checkpoints").filename
        'on_exception'
    """

    runs_last = True

    def __init__(self, dirpath: Location, filename: str = "on_exception") -> None:
        if not filename:
            raise SettingError("The filename cannot be empty", field="filename", got=filename)
        base_name(0, filename)
        self.own_folder: Path = to_path(dirpath).absolute()
        self.filename = filename
        self.saved_path = ""
        """Path of the checkpoint that was saved when the last run raised an exception; "" if there is none."""

    @property
    def dirpath(self) -> str:
        """The folder in which this callback saves its checkpoints."""
        return str(self.own_folder)

    @property
    def ckpt_path(self) -> str:
        """Path of the checkpoint without its number: pass it as `fit(ckpt_path=...)` to resume from the newest one."""
        return str(self.own_folder / self.filename)

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        begun = trainer.state.fn == "fit" and trainer.progress.stage is not None and trainer.global_step > 0
        if not begun or isinstance(exception, Preempted | NonFiniteError) or device_failed(exception, module.device):
            return
        path = trainer.save_after(exception, self.own_folder, self.filename)
        if path is None:
            warn_user("no checkpoint of the failed run: not all processes got to saving it, and none holds all of it")
            return
        self.saved_path = str(path)
        said = f"Saved {path} of the run that failed. To go on, run it again with ckpt_path='auto'."
        print(clean(said), flush=True)  # noqa: T201  on whatever rank did it

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Delete this callback's checkpoints of the run if a ModelCheckpoint has a newer checkpoint that verifies."""
        newer, old = trainer.agree(self._superseded(trainer) if trainer.is_global_zero else ("", []))
        if old and not trainer.verify_checkpoint(Path(newer)):
            for path in old:
                trainer.delete_checkpoint(Path(path))
            self.saved_path = ""

    def _superseded(self, trainer: Trainer) -> tuple[str, list[str]]:
        """Find the newest checkpoint of the ModelCheckpoints, and this callback's older checkpoints of the same run.

        Returns:
            Path of the newest checkpoint; paths of this callback's checkpoints of the run that are not newer.
        """
        paths = [each.last_model_path for each in trainer.checkpoint_callbacks if each.last_model_path]
        regular = [(found.order, path) for path in paths if (found := read_or_say(to_path(path))[0]) is not None]
        order, newest = max(regular, default=((-1, -1, -1), ""))
        old = [
            str(info.path)
            for info in CheckpointStore(self.own_folder).scan()
            if info.path.name.rpartition("-")[0] == self.filename
            and trainer.line.has(info.manifest.run_id, info.step)
            and info.manifest.order <= order
        ]
        return newest, old
