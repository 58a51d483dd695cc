"""Saving of a run's newest full state, beside the checkpoints that its ModelCheckpoints keep.

Imported only when needed. With a policy such as "the best two", a crash would lose all steps since the best checkpoint.
A run that resumes by itself (by `ckpt_path="auto"` or "last", or under a launcher that restarts it) therefore keeps one
more state: the newest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.callbacks.model_checkpoint import ModelCheckpoint
from instep.checkpoint.retention import Saved
from instep.trainer.context import Position, RunContext

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule


class NewestState(ModelCheckpoint):
    """Saver of a run's newest full state. Its hooks run after those of all ModelCheckpoints.

    If a ModelCheckpoint has decided at a step whether to save, but none of them has saved a full state of this step,
    `NewestState` saves a full state in the folder of the first ModelCheckpoint. It keeps only its last state, and
    deletes this one too once a newer full state of any callback has been verified.

    Args:
        beside: the ModelCheckpoints of the run.
        at: position of the run in the training.
    """

    state_key = "newest"  # type: ignore[assignment]  # a run has at most one

    def __init__(self, beside: list[ModelCheckpoint], at: Position) -> None:
        first, self._at = beside[0], at
        super().__init__(first.own_folder, every_n_epochs=0, background=first.background, on_error=first.on_error)
        self._beside = beside
        self.due = False  # whether a ModelCheckpoint has decided on a save since the last `settle`
        # the callback that saved the newest full state; `_step` and `_position` are those of this state
        self._holder: ModelCheckpoint = self
        self._step = -1
        self._position: dict[str, Any] | None = None
        if any("on_train_batch_end" in vars(each) for each in beside):
            self.on_train_batch_end = self._after_batch

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_train_start(trainer, module)
        if trainer.resumed_from is not None:
            self.note(self)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.settle(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.settle(trainer)

    def _after_batch(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.settle(trainer)

    def settle(self, trainer: Trainer) -> None:
        """If a save is due, save a full state, unless one of this step exists or is being saved. Collective."""
        if self.due:
            self.due = False
            if self._step != trainer.global_step:
                self._save(trainer, last=True)

    def take(self, trainer: Trainer, at_once: bool, must: bool) -> Path:
        """Save the current state, unless a checkpoint has it already. Collective.

        Args:
            trainer: the Trainer.
            at_once: whether to save at once, not in the background.
            must: whether a failed save raises an error even if `on_error` says otherwise.

        Returns:
            The newest full checkpoint.
        """
        self._holder._finish_pending(trainer)
        if self._position != trainer.position.reached:
            self._save(trainer, last=True, at_once=at_once, must=must)
        self.due = False
        return self.path

    @property
    def _folders(self) -> list[Path | None]:
        # Search the folders of all ModelCheckpoints. The state is in the folder of the first ModelCheckpoint, but
        # before a restart another ModelCheckpoint may have been the first.
        return list(dict.fromkeys(each.own_folder for each in self._beside))

    @property
    def path(self) -> Path:
        """Path of the newest full checkpoint that is known to exist."""
        return self._path(self._holder.last_model_path)

    def _want_newest(self, trainer: Trainer) -> None:
        return None  # nothing to do, since this callback itself saves the newest state

    def note(self, holder: ModelCheckpoint | None) -> None:
        """Record the callback that has saved, or is saving, a full state of this step; None if the save has failed."""
        self._holder = holder or self
        self._step = -1 if holder is None else self._at.global_step
        self._position = None if holder is None else self._at.reached

    def superseded(self, by: ModelCheckpoint, step: int) -> list[str]:
        """Return the checkpoints that a newer full state replaces.

        These are the checkpoints that this callback saved, and the ones that a ModelCheckpoint kept only because they
        were the newest.

        Args:
            by: callback that saves the newer state. If it saves in the background, it deletes only in its own folder.
            step: step of the newer state.
        """
        found = [saved.key for saved in self.saved]
        for each in self._beside:
            if each.monitor is not None and each.keep is None and not each.save_last and each is not by:
                found += each.policy.to_delete([*each.saved, Saved("", step)])
        here = by.dirpath
        return [key for key in found if not by.background or str(self._path(key).parent) == here]

    def forget(self, deleted: Sequence[str], by: ModelCheckpoint) -> None:
        """Remove deleted checkpoints from the lists of all callbacks that save.

        If the last checkpoint of a callback was deleted, the last checkpoint of `by` takes its place.
        """
        gone = {self._path(key) for key in deleted}
        for each in (self, *self._beside):
            each.saved = [saved for saved in each.saved if saved.key not in deleted]
            if each.last_model_path and self._path(each.last_model_path) in gone:
                each.last_model_path = by.last_model_path


def newest_state(ctx: RunContext) -> NewestState | None:
    """Make the callback that saves the newest state of a fit.

    If no ModelCheckpoint has `keeps_newest`, return None, and print the reason if `ckpt_path` is "auto" or "last".
    """
    savers = [each for each in ctx.callbacks if isinstance(each, ModelCheckpoint)]
    wanting = [each for each in savers if each.keeps_newest]
    if wanting:
        return NewestState(savers, ctx.position)
    if ctx.resumes and not ctx.settings.fast_dev_run:
        ctx.trainer._print(f"ckpt_path={ctx.ckpt_path!r}: {_why_not(savers)}")
    return None


def _why_not(savers: list[ModelCheckpoint]) -> str:
    if not savers:
        return "there is no ModelCheckpoint, so nothing is saved to resume from."
    if all(each.saves_nothing for each in savers):
        return "ModelCheckpoint(save_top_k=0) saves nothing to resume from; save_last=True keeps the newest."
    return "with ModelCheckpoint(save_last=False) a crash goes back to the best checkpoint."
