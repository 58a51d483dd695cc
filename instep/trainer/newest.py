"""The newest full state of a run, kept beside what the policies of its ModelCheckpoints keep. Loads late.

A policy such as "the best two" has a crash throw away all since the best. A run that goes on by itself, by
`ckpt_path="auto"` or "last" or under a launcher that starts it again, therefore has one state more: the newest one.
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
    """Saver of a run's newest full state; its hooks run after those of all ModelCheckpoints.

    Where one of these has judged a step, and none has left a full state of it, this one saves the state, in the folder
    of the first of them. It keeps one, and that one goes once a newer full state has verified, whoever saved it.

    Args:
        beside: the ModelCheckpoints of the run.
        at: the run's place in the training.
    """

    state_key = "newest"  # type: ignore[assignment]  # one in a run

    def __init__(self, beside: list[ModelCheckpoint], at: Position) -> None:
        first, self._at = beside[0], at
        super().__init__(first.own_folder, every_n_epochs=0, background=first.background, on_error=first.on_error)
        self._beside = beside
        self.due = False  # a ModelCheckpoint has judged since the last look
        self._holder: ModelCheckpoint = self  # the callback that saved the newest full state, at this step and position
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
        """Save the state where one was due, and no full one of this step is there or under way. Collective."""
        if self.due:
            self.due = False
            if self._step != trainer.global_step:
                self._save(trainer, last=True)

    def take(self, trainer: Trainer, at_once: bool, must: bool) -> Path:
        """Save the state as it is now, unless it is there. Collective.

        Args:
            trainer: the Trainer.
            at_once: do not save in the background.
            must: a failure is an error in any case.

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
        return list(dict.fromkeys(each.own_folder for each in self._beside))  # another may have been the first

    @property
    def path(self) -> Path:
        """The newest full checkpoint that is known to be there."""
        return self._path(self._holder.last_model_path)

    def _want_newest(self, trainer: Trainer) -> None:
        return None  # it is the one that is asked

    def note(self, holder: ModelCheckpoint | None) -> None:
        """Record that the full state of this step is there, or under way; or, with None, that it was not saved."""
        self._holder = holder or self
        self._step = -1 if holder is None else self._at.global_step
        self._position = None if holder is None else self._at.reached

    def superseded(self, by: ModelCheckpoint, step: int) -> list[str]:
        """Return what a newer full state replaces: the last of this saver, and what others kept as the newest alone.

        Args:
            by: who saves it. In the background it deletes in its own folder only.
            step: of the newer one.
        """
        found = [saved.key for saved in self.saved]
        for each in self._beside:
            if each.monitor is not None and each.keep is None and not each.save_last and each is not by:
                found += each.policy.to_delete([*each.saved, Saved("", step)])
        here = by.dirpath
        return [key for key in found if not by.background or str(self._path(key).parent) == here]

    def forget(self, deleted: Sequence[str], by: ModelCheckpoint) -> None:
        """Remove what was deleted from the lists of all savers; a last one that is gone is now the newest one."""
        gone = {self._path(key) for key in deleted}
        for each in (self, *self._beside):
            each.saved = [saved for saved in each.saved if saved.key not in deleted]
            if each.last_model_path and self._path(each.last_model_path) in gone:
                each.last_model_path = by.last_model_path


def newest_state(ctx: RunContext) -> NewestState | None:
    """Make the saver of a fit's newest state; None, with a line that says why, where its savers want none."""
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
