"""`ModelCheckpoint`: the callback that decides when a checkpoint is saved and which ones are kept."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.callbacks.base import Callback, acts_now, print_text
from instep.checkpoint import names, retention
from instep.checkpoint.edge import check, count, flag, none_or, number, text
from instep.checkpoint.retention import Retention, Saved
from instep.distributed.after_error import all_arrive, device_failed
from instep.errors import NonFiniteError, Preempted, SettingError, UsageError
from instep.types import Location
from instep.utils.checks import FLAG, METRIC, Check, at_least, choice, or_none, wrong
from instep.utils.paths import to_path
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule
    from instep.checkpoint import CheckpointInfo, Reader
    from instep.checkpoint.background import PendingSave
    from instep.trainer.newest import NewestState


def _check_template(name: str, value: Any) -> None:
    """Check that a template gives a valid folder name for any logged values."""
    expected = 'a template such as "{epoch}-{val_loss:.2f}"'
    try:
        folder = format_name(value, {}, True)
        names.base_name(0, folder)
    except (TypeError, ValueError) as error:  # SettingError is a ValueError too
        raise wrong(name, value, f"{expected} ({error})") from None
    if "{" in folder or "}" in folder:
        raise wrong(name, value, f"{expected}; a brace has no other")


_PERIOD = or_none(at_least(0, "0 to turn it off"))
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "filename": or_none(_check_template),
    "monitor": or_none(METRIC),
    "verbose": FLAG,
    "save_last": or_none(
        Check(lambda value: isinstance(value, bool), "True or False; 'last' is found by scanning, so there is no link")
    ),
    "save_top_k": at_least(-1, "-1 for all"),
    "save_on_exception": FLAG,
    "save_weights_only": FLAG,
    "mode": choice("min", "max"),
    "auto_insert_metric_name": FLAG,
    "every_n_train_steps": _PERIOD,
    "train_time_interval": or_none(
        Check(lambda value: isinstance(value, timedelta) and value > timedelta(0), "a timedelta above 0")
    ),
    "every_n_epochs": _PERIOD,
    "save_on_train_epoch_end": or_none(FLAG),
    "enable_version_counter": FLAG,
    "background": FLAG,
    "on_error": choice("raise", "warn"),
}


class ModelCheckpoint(Callback):
    """Save checkpoints, and delete old ones once a newer one has verified.

    A checkpoint is a folder that appears complete or not at all. The main process decides what to save and to delete,
    for all ranks. Without `monitor`, the newest checkpoint is kept (`save_top_k=1`), or all are (-1).

    Args:
        dirpath: where, a folder or a URL such as "s3://bucket/run"; by default `checkpoints/` in the run folder.
        filename: the folder's name, a template of logged metrics such as "{epoch}-{val_loss:.2f}"; by default
            `step-<8 digits>`. An attempt number follows in any case.
        monitor: the logged metric to rank by; "epoch" and "step" need not be logged.
        verbose: print what is saved and deleted.
        save_last: keep the newest as well, whatever its score. With a monitor it is saved at every occasion, and once
            more at the end of fit. None: in a run that goes on by itself (`ckpt_path="auto"` or "last", or a launcher
            that starts it again) one newest full state is kept beside what all ModelCheckpoints keep, saved at each of
            their occasions; in other runs none. False: none there either, so that a crash goes back to the best.
        save_top_k: how many of the best to keep; -1 for all, 0 for none.
        save_on_exception: save when the run fails. With several processes only if all of them get that far. What
            failed may have left half an optimizer step, so that checkpoint is of a kind of its own: "auto", "last" and
            "best" do not resume from it, its path does. Nothing older is deleted for it.
        save_weights_only: leave out what only a resumed run needs.
        mode: "min" or "max".
        auto_insert_metric_name: write "val_loss=0.25" rather than "0.25" into names.
        every_n_train_steps: save every so many optimizer steps. A save that ranks, or is named after a metric, waits
            for a validation that is due at the same step; one that ranks, for the first one too.
        train_time_interval: save every so much time (by the main process's clock).
        every_n_epochs: save every so many epochs (validations, when saving after validation). The default, 1, holds
            when none of the three is given; 0 turns it off.
        save_on_train_epoch_end: save at the end of training epochs (True) or of validations (False). None: of
            training epochs where each ends with one validation or there is none, else of validations.
        enable_version_counter: accepted for Lightning's sake; a checkpoint is never written over another.
        keep: what to keep, where `save_top_k` cannot say it: a policy of `instep.checkpoint`, or several joined by
            `|`. At every occasion one is saved, and the newest is kept in any case.
        background: copy the state to host memory, which is kept from save to save (about as much as this process
            writes), and write, verify and delete beside the training. At most one save is under way: the next one
            waits for it. This callback lists a checkpoint (`best_model_path`, `last_model_path`) and shows it to the
            loggers from the next save on, or from the end of `fit`. What preempts or ends a run is saved at once.
        on_error: what a failed save comes to: "raise" ends the run, "warn" goes on without that checkpoint. With
            `background` it shows at the next save and at the end. Nothing older is deleted for it, and a preemption
            that cannot be saved is an error in any case.

    Attributes:
        best_model_path: the best checkpoint; without `monitor` the newest. "" while there is none.
        best_model_score: its score, a 0-dim tensor; None while there is none.
        current_score: the score of the checkpoint that was ranked last.
        last_model_path: the newest checkpoint that this callback has saved, or that the run was resumed from.

    Raises:
        SettingError: contradicting arguments.

    Example:
        >>> from instep.checkpoint import KeepEvery, KeepNewest
        >>> ModelCheckpoint(monitor="val_loss", save_top_k=3, save_last=True).monitor
        'val_loss'
        >>> ModelCheckpoint(every_n_train_steps=1_000, keep=KeepNewest(3) | KeepEvery(10_000)).every_n_train_steps
        1000
    """

    runs_last = True

    def __init__(
        self,
        dirpath: Location | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        keep: Retention | None = None,
        background: bool = False,
        on_error: str = "raise",
    ) -> None:
        arguments = locals()
        for name, check_value in _CHECKS.items():
            check_value(name, arguments[name])
        if monitor is None and save_top_k not in (-1, 0, 1):
            raise SettingError(
                f"ModelCheckpoint(save_top_k={save_top_k}, monitor=None) is not a valid configuration: to rank "
                "checkpoints it needs monitor='<a logged metric>'. Without one use 1 (keep the newest), -1 (keep all) "
                "or 0.",
                field="save_top_k",
                got=save_top_k,
            )
        given = {
            "every_n_train_steps": every_n_train_steps,
            "train_time_interval": train_time_interval,
            "every_n_epochs": every_n_epochs,
        }
        several = [name for name, value in given.items() if value]
        if len(several) > 1:
            raise SettingError(
                f"Combination of parameters {', '.join(several)}: they exclude each other; give one of them",
                field=several[0],
            )
        self.dirpath = dirpath
        self.filename = filename
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = bool(save_last)
        # With save_last=False the user does not want the newest checkpoint, even for a run that restarts by itself.
        self._only_ranked = save_last is False
        self.save_top_k = save_top_k
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.mode = mode
        self.auto_insert_metric_name = auto_insert_metric_name
        self.every_n_train_steps = every_n_train_steps or 0
        self.train_time_interval = train_time_interval
        self.every_n_epochs = every_n_epochs if every_n_epochs is not None else int(not several)
        self.save_on_train_epoch_end = save_on_train_epoch_end
        if self.every_n_train_steps or train_time_interval is not None:
            self.on_train_batch_end = self._after_batch  # only a callback that saves by steps has a hook at each step
        self.keep = keep
        self.policy = _policy(keep, monitor, mode, save_top_k)
        self.background = background
        self.on_error = on_error
        self._pending: tuple[PendingSave, Saved] | None = None
        self.saved: list[Saved] = []
        self.current_score: Tensor | None = None
        self.best_model_score: Tensor | None = None
        self.best_model_path = ""
        self.last_model_path = ""
        # A step is judged after its checkpoint was ranked, or kept without a rank.
        self._last_step_saved = self._last_step_judged = -1
        self._position_saved: dict[str, Any] | None = None
        self._next_time = math.inf
        self._top_k_before = 0  # number of top checkpoints in the run that this one continues
        self._deferred = False  # True if a save by steps waits for the validation that gives its metric
        self._run_folder: Any = None  # the Trainer's run folder

    @property
    def dirpath(self) -> str | None:
        """The folder of checkpoints: the given one, else the run's; None until the run's folder is known."""
        folder = self.own_folder or getattr(self._run_folder, "checkpoints", None)
        return None if folder is None else str(folder)

    @dirpath.setter
    def dirpath(self, dirpath: Location | None) -> None:
        self.own_folder: Path | None = None if dirpath is None else to_path(dirpath).absolute()

    @property
    def state_key(self) -> str:
        """State key that differs by metric, mode and schedule, so that several can be used together."""
        return (
            f"ModelCheckpoint(monitor={self.monitor!r}, mode={self.mode!r}, every_n_train_steps="
            f"{self.every_n_train_steps}, every_n_epochs={self.every_n_epochs}, "
            f"train_time_interval={self.train_time_interval!r})"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_model_score": None if self.best_model_score is None else float(self.best_model_score),
            "best_model_path": self.best_model_path,
            "last_model_path": self.last_model_path,
            "deferred": self._deferred,
            "save_top_k": self.save_top_k,
            "saved": [[saved.key, saved.step, saved.score] for saved in self.saved],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the list; `on_train_start` drops checkpoints that have gone in the meantime."""
        saved = [Saved(*fields) for fields in state_dict["saved"]]
        for checkpoint in saved:
            check(vars(checkpoint), {"key": text, "step": count, "score": none_or(number)}, "a saved checkpoint")
        texts = dict.fromkeys(("best_model_path", "last_model_path"), text)
        may_lack = {"deferred": flag, "save_top_k": number}
        check(state_dict, {**texts, "best_model_score": none_or(number)}, "the state", may_lack)
        self.saved = saved
        self.best_model_score = _tensor(state_dict["best_model_score"])
        self.best_model_path = state_dict["best_model_path"]
        self._deferred = state_dict.get("deferred", False)
        self._top_k_before = state_dict.get("save_top_k", 0)
        self.last_model_path = state_dict["last_model_path"]

    @property
    def best_k_models(self) -> dict[str, Tensor]:
        """Checkpoints that the policy keeps, with their scores; one that is kept only as the newest is left out."""
        scores = {one.key: math.nan if one.score is None else one.score for one in self._ranked()}
        return {key: torch.tensor(score, dtype=torch.float64) for key, score in scores.items()}

    def _ranked(self) -> list[Saved]:
        kept = self.policy.kept(self.saved)
        return [one for one in self.saved if one.key in kept and (self.monitor is None or one.score is not None)]

    def _worst(self) -> Saved | None:
        """Return the checkpoint that the next better one replaces; None while there are fewer than `save_top_k`."""
        ranked = self._ranked() if self.monitor is not None else []
        return retention.best_first(ranked, self.mode)[-1] if ranked and len(ranked) == self.save_top_k else None

    @property
    def kth_best_model_path(self) -> str:
        """The worst of the `save_top_k` best, which the next better checkpoint replaces; "" while there are fewer."""
        worst = self._worst()
        return "" if worst is None else worst.key

    @property
    def kth_value(self) -> Tensor:
        """The score of `kth_best_model_path`; before there is one, infinity, or with mode "max" minus infinity."""
        worst = self._worst()
        nothing = math.inf if self.mode == "min" else -math.inf
        score = nothing if worst is None or worst.score is None else worst.score
        return torch.tensor(score, dtype=torch.float64)

    def to_yaml(self, filepath: Location | None = None) -> None:
        """Write the paths and scores of `best_k_models` as YAML.

        Args:
            filepath: the file; by default `best_k_models.yaml` in `dirpath`.

        Raises:
            UsageError: there is no file, and no folder yet.
        """
        import yaml  # imported late: not needed where nobody asks

        if filepath is None and self.dirpath is None:
            raise UsageError("to_yaml() has no folder to write into before fit: give a file, to_yaml(filepath)")
        path = self._path(self.dirpath or "") / "best_k_models.yaml" if filepath is None else to_path(filepath)
        path.write_text(yaml.safe_dump({key: float(score) for key, score in self.best_k_models.items()}))

    @property
    def settled_step(self) -> int:
        """Step up to which no save is due: the newest that was saved, resumed from, or ranked and not kept; else 0."""
        last = 0 if self._position_saved is None else int(self._position_saved["global_step"])
        return max(last, self._last_step_saved, *(saved.step for saved in self.saved), 0)

    @property
    def saves_nothing(self) -> bool:
        """Return True if no schedule saves a checkpoint."""
        return self.save_top_k == 0 and self.keep is None and not self.save_last

    @property
    def keeps_newest(self) -> bool:
        """Return True if a run that restarts by itself keeps its newest full state, by this callback's schedule."""
        return not (self._only_ranked or self.saves_nothing)

    # ---- when to save

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._run_folder = trainer.run_folder

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._last_step_saved, self._last_step_judged, self._position_saved = -1, -1, None
        apart = self._forget_missing(trainer)
        if trainer.resumed_from is not None:
            self._add_committed(trainer, trainer.resumed_from)
            self._warn_of_fewer(trainer)
            self._warn_of_another_folder(trainer, trainer.resumed_from, apart)
            self._position_saved = trainer.position.reached
            about = trainer.resumed_from.manifest.info
            # If another callback saved this checkpoint, this callback's own save may still be due.
            if about.get("saver") == self.state_key:
                self._last_step_saved = trainer.global_step
                # A checkpoint without a rank was saved before the validation that ranks it.
                if self.monitor is None or about.get("ranked"):
                    self._last_step_judged = trainer.global_step
        self._start_clock(trainer)

    def _start_clock(self, trainer: Trainer) -> None:
        if self.train_time_interval is not None and trainer.is_global_zero:
            self._next_time = time.monotonic() + self.train_time_interval.total_seconds()

    def _forget_missing(self, trainer: Trainer) -> list[str]:
        """Remove checkpoints from the list that the main process does not find on the disk, or that another run saved.

        A run that continues in another folder, or counts steps from 0 again, leaves the first run's checkpoints alone.

        Returns:
            Ranked ones that are there, but in another folder.
        """
        known = {*(saved.key for saved in self.saved), self.best_model_path, self.last_model_path}
        there = trainer.agree({path for path in known if path and self._path(path).is_dir()})
        ranked = [saved for saved in self.saved if saved.key in there and saved.score is not None]
        self.saved = [saved for saved in self.saved if saved.key in there and self._owns(trainer, saved)]
        apart = [saved.key for saved in ranked if saved not in self.saved and saved.step <= trainer.global_step]
        self.last_model_path = self.last_model_path if self.last_model_path in there else ""
        if self.best_model_path not in there:
            self.best_model_path, self.best_model_score = "", None
            self._find_best()
        return apart

    def _warn_of_another_folder(self, trainer: Trainer, resumed: Reader, apart: list[str]) -> None:
        """Warn about the ranked checkpoints of the last run if none of them is in this run's folder."""
        about = resumed.manifest.info
        if about.get("saver") == self.state_key and about.get("score") is not None:
            # A checkpoint is saved before it joins the list, so its own list lacks it.
            apart += [str(resumed.path)] * (resumed.path.parent != self.own_folder)
        ranked = any(saved.score is not None for saved in self.saved)
        if apart and not ranked and self.own_folder is not None and trainer.is_global_zero:
            warn_user(
                f"ModelCheckpoint(monitor={self.monitor!r}) ranks anew: what it kept so far lies in another folder and "
                f"stays there ({', '.join(apart)}). Give the same dirpath to rank on"
            )

    def _warn_of_fewer(self, trainer: Trainer) -> None:
        """Name the ranked checkpoints that a resumed run with a smaller `save_top_k` will delete at its next save."""
        ranked = [saved for saved in self.saved if saved.score is not None]
        kept = self.policy.kept(self.saved)
        gone = [saved.key for saved in ranked if saved.key not in kept]
        before = self._top_k_before if self._top_k_before != -1 else math.inf
        if gone and 0 <= self.save_top_k < before and self.keep is None and trainer.is_global_zero:
            warn_user(
                f"ModelCheckpoint(save_top_k={self.save_top_k}) keeps fewer than the run before: its next save deletes "
                f"{', '.join(gone)}. Give the former save_top_k, or move them away, to have them still"
            )

    def _owns(self, trainer: Trainer, saved: Saved) -> bool:
        here = self.own_folder or trainer.run_folder.checkpoints
        return self._path(saved.key).parent == here and saved.step <= trainer.global_step

    def _add_committed(self, trainer: Trainer, resumed_from: Reader) -> None:
        """Add checkpoints that were committed after the list was saved.

        These are the checkpoint that the run resumes from and, with saves in the background, one that was being written
        when the list was saved. Checkpoints of another callback or of the user are left out.
        """
        self.last_model_path = str(resumed_from.path)
        found: list[CheckpointInfo] = []
        for store in map(trainer.saver.store, self._folders):
            found += store.ranks.on_rank_zero(store.scan, f"looking for checkpoints in {store.root}")[::-1]
        known, listed = {saved.key: saved for saved in self.saved}, {str(info.path) for info in found}
        self.saved = [saved for saved in self.saved if saved.key not in listed]  # drop damaged checkpoints first
        for info in found:
            about, key = info.manifest.info, str(info.path)
            score = about.get("score")  # None if the score was nan
            if not about.get("ranked") or about.get("monitor") != self.monitor:
                score = None
            if key in known:
                self.saved.append(known[key])
            elif about.get("saver") == self.state_key and trainer.line.has(info.manifest.run_id, info.step):
                # A weights-only checkpoint of a later step gets no score; it is deleted when its step is saved again.
                if info.step > trainer.global_step:
                    score = None
                self.saved.append(Saved(key, info.step, None if score is None else float(score)))
        self._find_best()

    def _after_batch(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        at = trainer.position
        if at.batch != at.window_batch:
            return  # a run cannot continue in the middle of an optimizer window
        step = at.global_step
        due = self.every_n_train_steps and step and step % self.every_n_train_steps == 0
        if due and step != self._last_step_saved:
            # A checkpoint gets its rank and name from the validation at the same step.
            waits = trainer._validates_now and (self.monitor is not None or _METRIC_IN_NAME(self.filename or ""))
            first = not waits and self.monitor is not None and trainer.enable_validation
            self._deferred = bool(waits or (first and trainer.agree(self.monitor not in _values(trainer))))
            self._want_newest(trainer)
            if not self._deferred:
                self._save(trainer)
        elif self._next_time != math.inf and time.monotonic() >= self._next_time:
            trainer.set_trigger("save", self.state_key)  # repeated until this callback's save is due

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._deferred and not trainer.sanity_checking and trainer.state.fn == "fit":
            self._deferred = False
            self._save(trainer)
        if acts_now(trainer, self.save_on_train_epoch_end, after_validation=True):
            self._save_by_epoch(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if acts_now(trainer, self.save_on_train_epoch_end, after_validation=False):
            self._save_by_epoch(trainer)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Wait for the save in progress; with `save_last`, save the end of the run too."""
        self._finish_pending(trainer)
        if self.save_last and self._last_step_saved != trainer.global_step:
            self._save(trainer, last=True, at_once=True)

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        pending, self._pending = self._pending, None
        # The run has waited for the earlier save as long as it could.
        if pending is not None and pending[0].path is not None:
            self._record(trainer, pending[0].path, pending[1])
        if not self.save_on_exception or isinstance(exception, Preempted | NonFiniteError) or trainer.global_step == 0:
            return
        if device_failed(exception, module.device):
            return  # The error that is raised says this too, and names the last checkpoint.
        if all_arrive(timeout_s=10.0):
            kind = "weights" if self.save_weights_only else "exception"
            path = trainer.save_to(self.own_folder, self._name(trainer), weights_only=self.save_weights_only, kind=kind)
            if self.verbose:
                print_text(trainer, f"saved {path}")
        else:
            warn_user("no checkpoint of the failed run: not all processes got to saving it")

    def save_now(self, trainer: Trainer, reason: str = "", final: bool = True) -> Path:
        """Save now, whatever the schedule says: before a preemption, or on request. Collective.

        Args:
            trainer: the Trainer.
            reason: of the request; this callback's own `state_key` means that its time interval is over.
            final: the run may end right after, so that it is saved at once and a failure is an error.

        Returns:
            The newest checkpoint.
        """
        self._finish_pending(trainer)
        due = reason == self.state_key
        if due:
            self._start_clock(trainer)
        there = self.last_model_path != "" and self._path(self.last_model_path).is_dir()
        saved = there and self._position_saved == trainer.position.reached
        if trainer.agree(saved and (due or not self.save_weights_only)):
            return self._path(self.last_model_path)
        self._save(trainer, last=True, full=not due, at_once=final, must=final)
        newest = trainer.saver.newest
        if newest is None:
            return self._path(self.last_model_path)
        newest.settle(trainer)
        return newest.path

    def _save_by_epoch(self, trainer: Trainer) -> None:
        due = self.every_n_epochs and (trainer.position.epoch + 1) % self.every_n_epochs == 0
        if due and self._last_step_judged != trainer.global_step:
            self._save(trainer)

    # ---- what to save

    @property
    def _folders(self) -> list[Path | None]:
        """Folders that may hold this callback's checkpoints; None is the run's folder."""
        return [self.own_folder]

    def _path(self, text: str) -> Path:
        return to_path(text, like=self.own_folder)

    def _save(
        self, trainer: Trainer, last: bool = False, full: bool = False, at_once: bool = False, must: bool = False
    ) -> None:
        """Save if the policy keeps the checkpoint, then delete those that it no longer keeps.

        Args:
            last: save it without a rank, also where the policy would not keep it.
            full: never the weights alone.
            at_once: not beside the training.
            must: raise an error whatever `on_error` says.
        """
        self._finish_pending(trainer)
        # A save that was not due is kept as the newest but not ranked, since nobody has measured this step.
        score = None if last or self.monitor is None else self._score(trainer)
        # A score of nan counts as judged, but as no score: the checkpoint is kept as the newest, without a rank.
        bad = score is not None and math.isnan(score)
        new = Saved("", trainer.global_step, None if bad else score)
        newest = self._want_newest(trainer)
        # A resumed run may validate and rank steps again that the interrupted run had saved.
        again = [] if last else [one for one in self.saved if one.step == new.step]
        others = [one for one in self.saved if one not in again]
        wanted = self.save_last or self.keep is not None or self.policy.takes(new, others)
        wanted = wanted or (bad and newest is None and self.keeps_newest)
        self._last_step_saved = trainer.global_step
        if self.monitor is None or score is not None:
            self._last_step_judged = trainer.global_step
        wanted = trainer.agree(wanted)
        if last and not wanted and newest is not None:
            newest.take(trainer, at_once, must)  # the newest checkpoint of the run, which is not one of the ranked ones
        if not wanted and not (last and newest is None):
            return
        self.current_score = self.current_score if score is None else _tensor(score)
        weights_only = self.save_weights_only and not full
        name, drop, background = self._name(trainer), [one.key for one in again], self.background and not at_once
        how: dict[str, Any] = {"weights_only": weights_only, "background": background}
        how |= {"keep": self.policy, "known": others, "drop": drop, "keeper": self}
        about = {"saver": self.state_key, "monitor": self.monitor, "mode": self.mode, "score": new.score}
        try:
            pending = trainer.saver.save(self.own_folder, name, ranked=score is not None, **how, **about)
        except Exception as error:  # noqa: BLE001  it is the same on all ranks, of whatever kind it is here
            self._fail(trainer, error, must)
            return
        self._pending, self._position_saved = (pending, new), trainer.position.reached
        if not pending.background:
            self._finish_pending(trainer, must)

    def _want_newest(self, trainer: Trainer) -> NewestState | None:
        """Request a save of the newest full state now; return its saver, or None if the run keeps no newest state."""
        newest = trainer.saver.newest if self.keeps_newest else None
        if newest is not None:
            newest.due = True
        return newest

    def _finish_pending(self, trainer: Trainer, must: bool = False) -> None:
        """Wait for the save in progress. Collective; all ranks return the same."""
        if self._pending is None:
            return
        (pending, new), self._pending = self._pending, None
        # stays None until the save is known to be on the disk
        reached, self._position_saved = self._position_saved, None
        try:
            path = trainer.saver.finish(pending)
        except Exception as error:  # noqa: BLE001  `_fail` decides
            if pending.path is not None:  # checkpoints that could not be deleted stay in the list
                self._record(trainer, pending.path, new)
                # A pending save with a path and an error means that a logger failed after the save.
                self._drop_deleted(trainer, () if pending.error else pending.dropped)
            self._fail(trainer, error, must)
        else:
            self._record(trainer, path, new)
            self._drop_deleted(trainer, pending.dropped)
            self._position_saved = reached

    def _fail(self, trainer: Trainer, error: Exception, must: bool = False) -> None:
        self._last_step_saved, self._last_step_judged, self._position_saved = -1, -1, None
        if self.on_error == "raise" or must:
            raise error
        if trainer.is_global_zero:
            warn_user(f"a checkpoint was not saved, and training goes on: {error}")

    def _record(self, trainer: Trainer, path: Path, new: Saved) -> None:
        self.last_model_path = str(path)
        self.saved.append(replace(new, key=str(path)))
        self._find_best()
        if self.verbose:
            print_text(trainer, f"saved {path}")

    def _drop_deleted(self, trainer: Trainer, deleted: Sequence[str]) -> None:
        self.saved = [saved for saved in self.saved if saved.key not in deleted]
        if trainer.saver.newest is not None:
            trainer.saver.newest.forget(deleted, self)
        self._find_best()
        for path in deleted if self.verbose else ():
            print_text(trainer, f"deleted {path}")

    def _find_best(self) -> None:
        """Find the best of the kept checkpoints; if none has a score, keep the best one as it is."""
        if self.monitor is None:
            self.best_model_path = self.saved[-1].key if self.saved else ""
            return
        best = next(iter(retention.best_first(self._ranked(), self.mode)), None)
        if best is not None and best.score is not None and not math.isnan(best.score):
            self.best_model_path, self.best_model_score = best.key, _tensor(best.score)

    def _score(self, trainer: Trainer) -> float:
        values = _values(trainer)
        if self.monitor not in values:
            self._save(trainer, last=True, full=True, at_once=True)  # saved without a rank, so that nothing is lost
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            saved = self.last_model_path if trainer.saver.newest is None else trainer.saver.newest.path
            raise SettingError(
                f"ModelCheckpoint(monitor={self.monitor!r}): that was not logged before saving. The run is saved as "
                f"{saved or 'nothing'}. Logged so far: {logged}. Log it with self.log("
                f"{self.monitor!r}, ...), or save where it exists (save_on_train_epoch_end, every_n_epochs).",
                field="monitor",
                got=self.monitor,
            )
        trainer.metrics.warn_of_training(self.monitor, f"ModelCheckpoint(monitor={self.monitor!r})")
        return trainer.agree(float(values[self.monitor]))

    def _name(self, trainer: Trainer) -> str | None:
        if self.filename is None:
            return None
        return trainer.agree(format_name(self.filename, _values(trainer), self.auto_insert_metric_name))


_METRIC_IN_NAME = re.compile(r"\{(?!(?:epoch|step)[:}])[^{}]").search


def _values(trainer: Trainer) -> dict[str, float]:
    """Return the values for ranks and names of checkpoints: metrics, and `epoch` and `step`, logged or not."""
    values: dict[str, float] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for name, counted in (("epoch", trainer.position.epoch), ("step", trainer.global_step)):
        logged = values.get(name, math.nan)
        values[name] = int(logged) if math.isfinite(logged) else counted
    return values


def _tensor(score: float | None) -> Tensor | None:
    """Return a score as a 0-dim float64 tensor, as in Lightning."""
    return None if score is None else torch.tensor(score, dtype=torch.float64)


def _policy(keep: Retention | None, monitor: str | None, mode: str, save_top_k: int) -> Retention:
    """Make the retention policy from `save_top_k` and `keep`."""
    if keep is None:
        if save_top_k == -1:
            return retention.KeepAll()
        return retention.KeepNewest(save_top_k) if monitor is None else retention.KeepBest(save_top_k, mode)
    if not isinstance(keep, Retention):
        raise SettingError(f"keep={keep!r}: a policy such as KeepNewest(3) | KeepEvery(10_000)", field="keep", got=keep)
    if save_top_k != 1:
        raise SettingError(
            f"save_top_k={save_top_k} and keep={keep} both say what to keep; say it with keep=KeepBest({save_top_k})",
            field="keep",
            got=keep,
        )
    modes = retention.modes(keep)
    if modes and monitor is None:
        raise SettingError(f"keep={keep} ranks checkpoints, so it needs monitor='<a logged metric>'", field="monitor")
    if modes - {mode}:
        raise SettingError(f"keep={keep} contradicts mode={mode!r}: give both the same mode", field="mode", got=mode)
    return keep


def format_name(template: str, values: dict[str, Any], insert_names: bool) -> str:
    """Fill a filename template.

    Args:
        template: text with `{metric}` or `{metric:format}`; a metric that was not logged counts as 0.
        values: metrics, `epoch` and `step`.
        insert_names: put "metric=" before each value.

    Example:
        >>> format_name("{epoch}-{val/loss:.2f}", {"epoch": 3, "val/loss": 0.256}, True)
        'epoch=3-val_loss=0.26'
    """

    def fill(match: re.Match[str]) -> str:
        name, spec = match[1], match[2] or ""
        text = format(values.get(name, 0), spec)
        return f"{name}={text}" if insert_names else text

    return re.sub(r"\{([^{}:]+)(?::([^{}]*))?\}", fill, template).replace("/", "_")
