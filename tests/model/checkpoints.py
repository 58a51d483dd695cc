"""Checkpoints of one ModelCheckpoint: when it saves, what it keeps, and which one is "best" and "last"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tests.model.trace import Refused

if TYPE_CHECKING:
    from tests.model.run import Run


@dataclass(frozen=True)
class Checkpoints:
    """Arguments of ModelCheckpoint.

    Attributes:
        monitor: rank by the validations' metric "val".
        mode: "min" or "max".
        save_top_k: how many of the best to keep: -1 for all, 0 for none. Without `monitor` how many of the newest.
        save_last: keep the newest too, and save the end of the fit.
        every_n_train_steps: save after so many optimizer steps; None: save by epochs.
        every_n_epochs: save after so many epochs.
        save_on_train_epoch_end: save at the end of epochs (True) or of validations (False). None: of epochs, where each
            has one validation at its end or none ever runs; else of validations.
    """

    monitor: bool = False
    mode: str = "min"
    save_top_k: int = 1
    save_last: bool = False
    every_n_train_steps: int | None = None
    every_n_epochs: int = 1
    save_on_train_epoch_end: bool | None = None


class Saved(NamedTuple):
    """A checkpoint; its score is None where it was not ranked."""

    step: int
    score: float | None


@dataclass
class Saver:
    """Saves and deletes."""

    given: Checkpoints
    kept: list[Saved] = field(default_factory=list)
    waits: bool = False  # a save by steps waits for a validation
    decided_at: int = -1  # the step that was last saved, or ranked and not saved

    # ---- when

    def after_window(self, run: Run, validates_now: bool) -> None:
        """Save by optimizer steps. Where it ranks, it waits for a validation that is due now, and for the first one."""
        every = self.given.every_n_train_steps
        if every is None or run.step % every:
            return
        if self.given.monitor and run.val_batches is not None and (validates_now or "val" not in run.metrics):
            self.waits = True
            self.note_newest(run)
        else:
            self.save(run)

    def after_validation(self, run: Run) -> None:
        if self.waits:
            self.waits = False
            self.save(run)
        elif not self.at_epoch_ends(run):
            self.save_by_epoch(run)

    def after_epoch(self, run: Run) -> None:
        """Save at the end of a complete epoch."""
        if self.at_epoch_ends(run):
            self.save_by_epoch(run)

    def after_cut_epoch(self, run: Run) -> None:
        """Save where the run ends within an epoch. Its metrics are not there, so this one is not ranked."""
        if self.given.save_top_k != 0 or self.given.save_last:
            self.save_end(run)

    def after_training(self, run: Run) -> None:
        if self.given.save_last:
            self.save_end(run)

    def at_epoch_ends(self, run: Run) -> bool:
        s = run.case.settings
        if self.given.save_on_train_epoch_end is not None:
            return self.given.save_on_train_epoch_end
        once = (
            isinstance(s.val_check_interval, float) and s.val_check_interval == 1.0 and s.check_val_every_n_epoch == 1
        )
        return once or run.val_batches is None

    def save_by_epoch(self, run: Run) -> None:
        if self.given.every_n_train_steps is None and (run.epoch + 1) % self.given.every_n_epochs == 0:
            self.save(run)

    # ---- what

    def save(self, run: Run) -> None:
        """Save, if the new one is among those to keep; one step is saved once."""
        if run.step == self.decided_at:
            return
        score = None
        if self.given.monitor:
            if "val" not in run.metrics:
                raise Refused("SettingError", "the monitored metric was not logged before saving")
            score = run.metrics["val"]
        self.decided_at = run.step
        self.note_newest(run)
        new = Saved(run.step, score)
        if self.given.save_last or new in self.to_keep([*self.kept, new]):
            self.add(new)

    def save_end(self, run: Run) -> None:
        """Save the present step as the newest, without a rank, if it is not there."""
        if not self.kept or self.kept[-1].step != run.step:
            self.add(Saved(run.step, None))
            self.note_newest(run)

    def note_newest(self, run: Run) -> None:
        """Note that the newest state can be gone back to from here on.

        A run with `ckpt_path="auto"` keeps it whenever this decides whether to save, also where it is not of the best.
        """
        if self.given.save_top_k != 0 or self.given.save_last:
            run.note("S", "saved", run.step, run.epochs_done > run.epoch)

    def add(self, new: Saved) -> None:
        """Keep the new one, which is the newest, and those that the policy keeps; delete the others."""
        candidates = [*self.kept, new]
        keep = self.to_keep(candidates)
        self.kept = [one for one in candidates if one in keep or one is new]

    def to_keep(self, candidates: list[Saved]) -> list[Saved]:
        """Return those that the policy keeps: the best, of equal ones the older; or the newest ones."""
        k = self.given.save_top_k
        if not self.given.monitor:
            return candidates if k == -1 else candidates[len(candidates) - k :]
        if k == -1:
            return candidates
        return self.best_first(candidates)[:k]

    def best_first(self, candidates: list[Saved]) -> list[Saved]:
        sign = 1 if self.given.mode == "min" else -1
        ranked = [one for one in candidates if one.score is not None]
        return sorted(ranked, key=lambda one: sign * (one.score or 0.0))

    @property
    def best(self) -> int | None:
        """The step of the best checkpoint; without `monitor` of the newest."""
        if not self.given.monitor:
            return self.last
        best = self.best_first(self.kept)
        return best[0].step if best and self.given.save_top_k != 0 else None

    @property
    def last(self) -> int | None:
        """The step of the newest checkpoint."""
        return self.kept[-1].step if self.kept else None
