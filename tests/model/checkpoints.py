"""Checkpoints: when a ModelCheckpoint saves, under which name, what it keeps, and which one is "best" and "last"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from typing import TYPE_CHECKING, Any

from tests.model.stopping import at_epoch_ends
from tests.model.trace import Refused

if TYPE_CHECKING:
    from tests.model.run import Run

NEWEST = "newest"
"""Who saves the newest state of a run that goes on by itself."""


@dataclass(frozen=True)
class Checkpoints:
    """Arguments of ModelCheckpoint.

    Attributes:
        monitor: rank by this metric; None: by nothing.
        mode: "min" or "max".
        save_top_k: how many of the best to keep: -1 for all, 0 for none. Without `monitor` how many of the newest.
        save_last: True: keep the newest too, and save the end of the fit. False: do not even keep a newest state where
            the run goes on by itself. "link" is refused.
        every_n_train_steps: save after so many optimizer steps; None: save by epochs.
        every_n_epochs: save after so many epochs.
        save_on_train_epoch_end: save at the end of epochs (True) or of validations (False). None: of epochs, where each
            has one validation at its end or none ever runs; else of validations.
        filename: the name, made of metrics as in "{epoch}-{val:.2f}"; None: of the step.
        auto_insert_metric_name: "epoch=3" in such a name, rather than "3".
        save_weights_only: save what no run can go on from.
        folder: where.
    """

    monitor: str | None = None
    mode: str = "min"
    save_top_k: int = 1
    save_last: bool | str | None = None
    every_n_train_steps: int | None = None
    every_n_epochs: int = 1
    save_on_train_epoch_end: bool | None = None
    filename: str | None = None
    auto_insert_metric_name: bool = True
    save_weights_only: bool = False
    folder: str = "checkpoints"

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells the state of one ModelCheckpoint from that of another."""
        epochs = self.every_n_epochs if self.every_n_train_steps is None else None
        return (self.monitor, self.mode, self.every_n_train_steps, epochs)

    @property
    def metric(self) -> tuple[str | None, str]:
        return self.monitor, self.mode

    @property
    def saves_nothing(self) -> bool:
        return self.save_top_k == 0 and not self.save_last


@dataclass(frozen=True)
class Line:
    """A run, and the earlier ones that it goes on from, each up to a step. Within a run the step only grows."""

    run: int = 0
    before: tuple[tuple[int, int], ...] = ()

    def has(self, one: Saved) -> bool:
        """Return whether a checkpoint belongs to the line."""
        return one.line.run == self.run or any(one.line.run == run and one.step <= step for run, step in self.before)

    def behind(self, step: int, new_run: int | None) -> Line:
        """Return the line that goes on from a step of this one, as the same run or as a new one."""
        earlier = tuple(origin for origin in self.before if origin[0] != self.run)
        return Line(self.run if new_run is None else new_run, ((self.run, step), *earlier))


@dataclass(frozen=True)
class Saved:
    """A checkpoint.

    Attributes:
        folder, base, attempt: its folder's name is the base and the attempt.
        step: optimizer steps that were done.
        line: the run that saved it, and those that it goes on from.
        saver: the key of who saved it.
        metric: the one that its saver ranks by, and which way.
        score: of the metric; None where it was not ranked.
        judged: whether the metric was looked at; nan is no score.
        state: of the run; None of weights alone.
    """

    folder: str
    base: str
    attempt: int
    step: int = field(compare=False)
    line: Line = field(compare=False)
    saver: Any = field(compare=False)
    metric: tuple[str | None, str] = field(compare=False)
    score: float | None = field(compare=False)
    judged: bool = field(compare=False)
    state: dict[str, Any] | None = field(compare=False, repr=False)

    def __deepcopy__(self, memo: Any) -> Saved:
        return self  # a state that is saved knows of others, which do not change

    @property
    def name(self) -> str:
        return f"{self.base}-{self.attempt}"


@dataclass
class Disk:
    """The checkpoints that are there, in the order in which they were saved; it outlives a process."""

    saved: list[Saved] = field(default_factory=list)
    runs: int = 0
    held: dict[str, int] = field(default_factory=dict)  # which run saved last, or was about to, by folder
    tables: dict[int, list[Any]] = field(default_factory=dict)  # rows of CSV files

    def begin(self, folders: Sequence[str]) -> Line:
        """Begin a run."""
        self.runs += 1
        self.held |= dict.fromkeys(folders, self.runs)
        return Line(self.runs)

    def go_on(self, found: Saved, folders: Sequence[str]) -> Line:
        """Go on with the run of a checkpoint; with a new one, where the run had gone on from there already."""
        ahead = [
            one
            for one in self.saved
            if one.folder in (found.folder, *folders) and one.line.run == found.line.run and one.step > found.step
        ]
        begun = self.begin(folders)
        gone_back = any(one.state is not None for one in ahead)
        line = found.line.behind(found.step, begun.run if gone_back else None)
        self.held |= dict.fromkeys(folders, line.run)
        return line

    def add(self, new: Saved) -> Saved:
        """Add a checkpoint. Nothing is overwritten: of one step, and of one name, each has an attempt of its own."""
        alike = [
            one.attempt
            for one in self.saved
            if one.folder == new.folder and (one.step == new.step or one.base == new.base)
        ]
        new = replace(new, attempt=max(alike, default=0) + 1)
        self.saved.append(new)
        return new

    def delete(self, gone: Sequence[Saved]) -> None:
        self.saved = [one for one in self.saved if one not in gone]

    def names(self, folder: str) -> tuple[str, ...]:
        return tuple(sorted(one.name for one in self.saved if one.folder == folder))


@dataclass
class Saver:
    """Saves and deletes.

    Attributes:
        kept: what it has saved and not deleted, the oldest first.
        best: the best one that it knows of; without `monitor` the newest.
        last: the newest that it has saved, or that the run goes on from.
    """

    given: Checkpoints
    kept: list[Saved] = field(default_factory=list)
    best: Saved | None = None
    last: Saved | None = None
    waits: bool = False  # a save by steps waits for a validation
    saved_at: int = -1  # the step that was last saved, or decided not to be
    judged_at: int = -1  # the same with its metric
    place: tuple[Any, ...] = ()  # of the run when it last saved

    @property
    def keeps_newest(self) -> bool:
        """Whether a newest state is kept beside its own, where the run goes on by itself."""
        return self.given.save_last is not False and not self.given.saves_nothing

    def seen(self, disk: Disk) -> tuple[Any, ...]:
        """Return what a look at the disk and at the callback shows."""
        best, last = self.best, self.last
        score = None if best is None or best.score is None else round(best.score, 3)
        return disk.names(self.given.folder), best and best.name, score, last and last.name

    # ---- when

    def after_window(self, run: Run, validates_now: bool) -> None:
        """Save by optimizer steps.

        Where it ranks, it waits for a validation that is due now, and for the first one. A name with a metric waits for
        one that is due now.
        """
        every, given = self.given.every_n_train_steps, self.given
        if every is None or not run.step or run.step % every or run.step == self.saved_at:
            return
        names_metric = any(given.filename and f"{{{name}" in given.filename for name in ("val", "seen"))
        first = given.monitor is not None and run.loaders.validates and given.monitor not in run.metrics
        if first or (validates_now and (given.monitor is not None or names_metric)):
            self.waits = True
            run.want_newest(self)
        else:
            self.save(run)

    def after_validation(self, run: Run) -> None:
        if self.waits:
            self.waits = False
            self.save(run)
        if not at_epoch_ends(run, self.given.save_on_train_epoch_end):
            self.save_by_epoch(run)

    def after_epoch(self, run: Run) -> None:
        """Save at the end of a complete epoch."""
        if at_epoch_ends(run, self.given.save_on_train_epoch_end):
            self.save_by_epoch(run)

    def after_cut_epoch(self, run: Run) -> None:
        """Save where the run ends within an epoch. Its metrics are not there, so this one is not ranked."""
        if not self.given.saves_nothing:
            self.save_now(run)

    def save_now(self, run: Run) -> None:
        """Save what a run goes on from, whatever the policy says, unless it is there."""
        there = self.last in run.start.disk.saved and self.place == run.place
        if not there or self.given.save_weights_only:
            self.save(run, end=True, full=True)

    def after_training(self, run: Run) -> None:
        if self.given.save_last and self.saved_at != run.step:
            self.save(run, end=True)

    def save_by_epoch(self, run: Run) -> None:
        due = self.given.every_n_train_steps is None and (run.last_epoch + 1) % self.given.every_n_epochs == 0
        if due and self.judged_at != run.step:
            self.save(run)

    # ---- what

    def save(self, run: Run, end: bool = False, full: bool = False) -> None:
        """Save, if the new one is among those to keep, and delete those that are not any more.

        Args:
            run: as it is now.
            end: it is the newest that is wanted, whatever its metric.
            full: with all that a run goes on from, whatever is asked for.
        """
        given = self.given
        judged = given.monitor is not None and not end
        score = None
        if judged:
            if given.monitor not in run.metrics:
                self.save(run, end=True, full=True)
                raise Refused("SettingError", "the monitored metric was not logged before saving")
            score = run.metrics[given.monitor]
        nan = score is not None and isnan(score)  # nan is no better than nothing: it is the newest, and has no rank
        newest = run.want_newest(self)
        state = run.state() if full or not given.save_weights_only else None
        base = f"step-{run.step:08d}" if given.filename is None else name_of(given, run)
        new = Saved(
            given.folder, base, 0, run.step, run.line, given.key, given.metric, None if nan else score, judged, state
        )
        self.saved_at = run.step
        if judged or given.monitor is None:
            self.judged_at = run.step
        again = [] if end else [one for one in self.kept if one.step == run.step]  # before the run was broken off
        others = [one for one in self.kept if one not in again]
        wanted = bool(given.save_last) or new in self.to_keep([*others, new])
        wanted = wanted or (nan and newest is None and not given.saves_nothing and given.save_last is not False)
        if end and not wanted and newest is not None:
            newest.save_if_moved(run)
        if wanted or (end and newest is None):
            self.add(run, new, again)

    def add(self, run: Run, new: Saved, again: Sequence[Saved] = ()) -> None:
        """Save the new one; delete those that are kept no longer, and those of the same step that it stands for."""
        keep = self.to_keep([*(one for one in self.kept if one not in again), new])
        gone = [one for one in self.kept if one not in keep]
        if new.state is not None:
            gone += superseded_by(run, self)
        new = run.save(new)
        self.kept.append(new)
        self.last, self.place = new, run.place
        delete(run, gone, self)
        self.find_best()
        if new.state is not None and run.newest is not None:
            run.newest.step, run.newest.place = run.step, run.place

    def find_best(self) -> None:
        if self.given.monitor is None:
            self.best = self.kept[-1] if self.kept else None
            return
        kept = self.to_keep(self.kept)
        ranked = best_first([one for one in self.kept if one in kept], self.given.mode)
        self.best = ranked[0] if ranked else self.best

    def to_keep(self, candidates: list[Saved]) -> list[Saved]:
        """Return those that the policy keeps: the best, of equal ones the older; or the newest ones."""
        k = self.given.save_top_k
        if k == -1:
            return candidates
        if self.given.monitor is None:
            return candidates[len(candidates) - k :]
        return best_first(candidates, self.given.mode)[:k]

    # ---- resume

    def take_up(self, run: Run, resumed: Saved) -> None:
        """Go on with what is on the disk: what it has saved itself, on the line of the run."""
        own = [one for one in run.start.disk.saved if one.folder == self.given.folder and one.saver == self.given.key]
        self.kept = [one if one.step <= run.step else replace(one, score=None) for one in own if run.line.has(one)]
        self.best = self.best if self.best in run.start.disk.saved else None
        self.find_best()
        self.last, self.place = resumed, run.place
        self.saved_at = self.judged_at = -1
        if resumed.saver == self.given.key:
            self.saved_at = run.step
            self.judged_at = run.step if resumed.judged or self.given.monitor is None else -1


class Newest(Saver):
    """Saves the newest state of a run that goes on by itself, wherever a ModelCheckpoint decides about another one.

    It keeps one, unless a newer one that a run can go on from is there, whoever has saved it.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(Checkpoints(folder=folder))
        self.due = False
        self.step = -1

    def settle(self, run: Run) -> None:
        if self.due and self.step != run.step:
            self.save_now(run)
        self.due = False

    def save_if_moved(self, run: Run) -> None:
        if self.place != run.place:
            self.save_now(run)
        self.due = False

    def save_now(self, run: Run) -> None:
        base = f"step-{run.step:08d}"
        self.add(
            run, Saved(self.given.folder, base, 0, run.step, run.line, NEWEST, (None, ""), None, False, run.state())
        )

    def take_up(self, run: Run, resumed: Saved) -> None:
        super().take_up(run, resumed)
        self.kept = [one for one in run.start.disk.saved if one.saver == NEWEST and run.line.has(one)]
        self.step = run.step


def best_first(saved: Sequence[Saved], mode: str) -> list[Saved]:
    """Sort those with a score, of equal ones the older first."""
    sign = 1 if mode == "min" else -1
    return sorted((one for one in saved if one.score is not None), key=lambda one: sign * (one.score or 0.0))


def name_of(given: Checkpoints, run: Run) -> str:
    """Fill a file name with the values of `callback_metrics`, the epoch and the step; what is not there counts as 0."""
    values = {"epoch": run.last_epoch, "step": run.step, **run.metrics}
    parts = []
    for part in (given.filename or "").replace("}", "{").split("{"):
        name, colon, form = part.partition(":")
        if name in ("epoch", "step", "val", "seen"):
            text = format(values.get(name, 0), form)
            parts.append(f"{name}={text}" if given.auto_insert_metric_name else text)
        else:
            parts.append(part)
    return "".join(parts)


def superseded_by(run: Run, by: Saver) -> list[Saved]:
    """Return what a newer state makes needless: the newest one before, and what is kept elsewhere as the newest."""
    if run.newest is None:
        return []
    gone = list(run.newest.kept)
    for saver in run.savers:
        if saver is not by and saver.given.monitor is not None and not saver.given.save_last:
            keep = saver.to_keep(saver.kept)
            gone += [one for one in saver.kept if one not in keep]
    return gone


def delete(run: Run, gone: list[Saved], by: Saver) -> None:
    """Delete checkpoints. Where the newest of a saver goes, a newer one is there."""
    run.start.disk.delete(gone)
    for saver in [by] if run.newest is None else run.all_savers():
        saver.kept = [one for one in saver.kept if one not in gone]
        saver.last = by.last if run.newest is not None and saver.last in gone else saver.last
