"""`ModelCheckpoint`: the callback that decides when to save a checkpoint and which checkpoints to keep."""

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
    """Check that a file name template, filled with any metrics, is a valid folder name."""
    expected = 'a template such as "{epoch}-{val_loss:.2f}"'
    try:
        folder = format_name(value, {"epoch": 0, "step": 0}, True, missing=0.0)  # a logged metric is a float
        names.base_name(0, folder)
    except (TypeError, ValueError) as error:  # also catches SettingError, which is a ValueError
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
    """Save checkpoints, and delete old checkpoints when a newer one has been verified.

    A checkpoint is a folder, which appears only when it is complete. The main process decides for all ranks what to
    save and to delete. Without `monitor`, `save_top_k` is 1 (keep the newest checkpoint), -1 (keep all) or 0.

    Args:
        dirpath: folder to save in, or a URL such as "s3://bucket/run"; by default `checkpoints/` in the run folder.
        filename: name of the checkpoint folder: a template with logged metrics, such as "{epoch}-{val_loss:.2f}"; by
            default `step-<8 digits>`. An attempt number is always added.
        monitor: name of the logged metric that ranks checkpoints; "epoch" and "step" need not be logged.
        verbose: print what is saved and deleted.
        save_last: True: keep the newest checkpoint as well, whatever its score. With a monitor it is saved whenever a
            save is due, and at the end of fit. None: a run that can resume by itself (`ckpt_path="auto"` or "last", or
            a launcher that restarts it) keeps its newest full state in one additional checkpoint, which is saved
            whenever a save of any ModelCheckpoint is due; other runs have no additional checkpoint. False: never keep
            a checkpoint only because it is the newest. After a crash, the run resumes from one that `save_top_k` keeps.
        save_top_k: number of best checkpoints to keep; -1 for all, 0 for none.
        save_on_exception: save when the run fails; with several processes only if all of them reach the save. An
            optimizer step may be half done, so `ckpt_path="auto"`, "last" and "best" ignore this checkpoint; to resume
            from it, give its path. No older checkpoint is deleted for it.
        save_weights_only: save only the weights, without the state that a resumed run needs.
        mode: "min" or "max": whether a smaller or a larger value of the metric is better.
        auto_insert_metric_name: write "val_loss=0.25" rather than "0.25" into names.
        every_n_train_steps: save every n optimizer steps. If a validation is due at the same step and `monitor` or
            `filename` needs a metric, the save comes after the validation. With `monitor`, the first save waits for the
            first validation.
        train_time_interval: save whenever this time has passed, by the main process's clock.
        every_n_epochs: save every n epochs; when saving after validations, after each validation of every n-th epoch.
            None: 1 if neither `every_n_train_steps` nor `train_time_interval` is given, otherwise 0. 0 turns it off.
        save_on_train_epoch_end: save at the end of training epochs (True) or after validations (False). None: at the
            end of training epochs if each has one validation or there is no validation, otherwise after validations.
        enable_version_counter: an argument of Lightning's; it has no effect, since no checkpoint is ever overwritten.
        keep: which checkpoints to keep, if `save_top_k` cannot express it: a policy of `instep.checkpoint`, or several
            joined by `|`. A checkpoint is saved whenever a save is due, and the newest one is always kept.
        background: copy the state to host memory, then write, verify and delete in the background while training
            continues. The memory (about as much as this process writes) is kept for the next save. At most one save is
            in progress: the next one waits for it. A checkpoint is listed (`best_model_path`, `last_model_path`) and
            passed to the loggers at the next save, or at the end of `fit`. The saves at a preemption and at the end of
            fit are not in the background.
        on_error: what happens if a save fails: "raise" ends the run, "warn" continues without that checkpoint. With
            `background` the error is raised or the warning given at the next save or at the end of fit. No older
            checkpoint is deleted after a failed save. If the save at a preemption fails, the error is always raised.

    Attributes:
        best_model_path: path of the best checkpoint, or of the newest one without `monitor`. "" if there is none.
        best_model_score: score of the best checkpoint, a 0-dim tensor; None if there is none.
        current_score: the score of the checkpoint that was scored last, which may be nan; None before the first one,
            also in a resumed run.
        last_model_path: path of the newest checkpoint that this callback has saved, or that the run resumed from.

    Raises:
        SettingError: arguments are wrong or contradict each other.

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
        # save_last=False: keep no newest checkpoint, even in a run that resumes by itself.
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
            # Set the hook only if it is needed: a ModelCheckpoint that saves by epoch then costs no call at each step.
            self.on_train_batch_end = self._after_batch
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
        # A step is "judged" if its checkpoint was ranked by its score, or saved without `monitor`.
        self._last_step_saved = self._last_step_judged = -1
        self._position_saved: dict[str, Any] | None = None
        self._next_time = math.inf
        self._top_k_before = 0  # `save_top_k` of the run that this run resumes
        self._deferred = False  # True while a save by steps waits for the validation that logs its metric
        self._run_folder: Any = None  # the Trainer's run folder

    @property
    def dirpath(self) -> str | None:
        """Folder of the checkpoints: the given `dirpath`, else `checkpoints/` in the run folder; None before a run."""
        folder = self.own_folder or getattr(self._run_folder, "checkpoints", None)
        return None if folder is None else str(folder)

    @dirpath.setter
    def dirpath(self, dirpath: Location | None) -> None:
        self.own_folder: Path | None = None if dirpath is None else to_path(dirpath).absolute()

    @property
    def state_key(self) -> str:
        """State key with metric, mode and intervals, so that a Trainer can have several ModelCheckpoints."""
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
        """Restore the list of checkpoints; `on_train_start` removes those that no longer exist."""
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
        """Paths and scores of the kept checkpoints, without a checkpoint that is kept only as the newest one."""
        scores = {one.key: math.nan if one.score is None else one.score for one in self._ranked()}
        return {key: torch.tensor(score, dtype=torch.float64) for key, score in scores.items()}

    def _ranked(self) -> list[Saved]:
        kept = self.policy.kept(self.saved)
        return [one for one in self.saved if one.key in kept and (self.monitor is None or one.score is not None)]

    def _worst(self) -> Saved | None:
        """Return the worst of the `save_top_k` best checkpoints; None while there are fewer."""
        ranked = self._ranked() if self.monitor is not None else []
        return retention.best_first(ranked, self.mode)[-1] if ranked and len(ranked) == self.save_top_k else None

    @property
    def kth_best_model_path(self) -> str:
        """Path of the worst of the `save_top_k` best checkpoints; "" while there are fewer."""
        worst = self._worst()
        return "" if worst is None else worst.key

    @property
    def kth_value(self) -> Tensor:
        """Score of `kth_best_model_path`; without one, infinity for mode "min" and minus infinity for "max"."""
        worst = self._worst()
        nothing = math.inf if self.mode == "min" else -math.inf
        score = nothing if worst is None or worst.score is None else worst.score
        return torch.tensor(score, dtype=torch.float64)

    def to_yaml(self, filepath: Location | None = None) -> None:
        """Write the paths and scores of `best_k_models` as YAML.

        Args:
            filepath: the file; by default `best_k_models.yaml` in `dirpath`.

        Raises:
            UsageError: `filepath` is None, and `dirpath` is not known before fit.
        """
        import yaml  # imported late: only this method needs it

        if filepath is None and self.dirpath is None:
            raise UsageError("to_yaml() has no folder to write into before fit: give a file, to_yaml(filepath)")
        path = self._path(self.dirpath or "") / "best_k_models.yaml" if filepath is None else to_path(filepath)
        path.write_text(yaml.safe_dump({key: float(score) for key, score in self.best_k_models.items()}))

    @property
    def settled_step(self) -> int:
        """The last step that needs no save; 0 if there is none.

        It was saved, or the run resumed from it, or a save was due but the policy would not have kept the checkpoint.
        """
        last = 0 if self._position_saved is None else int(self._position_saved["global_step"])
        return max(last, self._last_step_saved, *(saved.step for saved in self.saved), 0)

    @property
    def saves_nothing(self) -> bool:
        """True if this callback saves nothing at its intervals, since it would keep no checkpoint."""
        return self.save_top_k == 0 and self.keep is None and not self.save_last

    @property
    def keeps_newest(self) -> bool:
        """True if a run that resumes by itself also keeps its newest full state when a save of this callback is due."""
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
            # If this callback saved the checkpoint that the run resumes from, no other save is due at its step.
            if about.get("saver") == self.state_key:
                self._last_step_saved = trainer.global_step
                # Its ranking is done too, or not needed. Otherwise the validation that logs its metric comes later.
                if self.monitor is None or about.get("ranked"):
                    self._last_step_judged = trainer.global_step
        self._start_clock(trainer)

    def _start_clock(self, trainer: Trainer) -> None:
        if self.train_time_interval is not None and trainer.is_global_zero:
            self._next_time = time.monotonic() + self.train_time_interval.total_seconds()

    def _forget_missing(self, trainer: Trainer) -> list[str]:
        """Remove from the list all checkpoints that no longer exist, or that do not belong to this run.

        A run that resumes with another folder or starts at step 0 must not delete the checkpoints of the earlier run.

        Returns:
            Paths of ranked checkpoints that exist in another folder.
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
        """Warn if all ranked checkpoints of the resumed run are in another folder, so that the ranking starts anew."""
        about = resumed.manifest.info
        if about.get("saver") == self.state_key and about.get("score") is not None:
            # The list that is saved in a checkpoint lacks this checkpoint, which is added to the list after the save.
            apart += [str(resumed.path)] * (resumed.path.parent != self.own_folder)
        ranked = any(saved.score is not None for saved in self.saved)
        if apart and not ranked and self.own_folder is not None and trainer.is_global_zero:
            warn_user(
                f"ModelCheckpoint(monitor={self.monitor!r}) ranks anew: what it kept so far lies in another folder and "
                f"stays there ({', '.join(apart)}). Give the same dirpath to rank on"
            )

    def _warn_of_fewer(self, trainer: Trainer) -> None:
        """Warn about checkpoints that a resumed run with a smaller `save_top_k` will delete at its next save."""
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
        """Add the checkpoints that became complete after the list was saved.

        These are the checkpoint that the run resumes from and, with saves in the background, a checkpoint that was
        being written when the list was saved. Checkpoints of other callbacks or of the user are not added.
        """
        self.last_model_path = str(resumed_from.path)
        found: list[CheckpointInfo] = []
        for store in map(trainer.saver.store, self._folders):
            found += store.ranks.on_rank_zero(store.scan, f"looking for checkpoints in {store.root}")[::-1]
        known, listed = {saved.key: saved for saved in self.saved}, {str(info.path) for info in found}
        self.saved = [saved for saved in self.saved if saved.key not in listed]  # added again below
        for info in found:
            about, key = info.manifest.info, str(info.path)
            score = about.get("score")  # None if the monitored metric was nan
            if not about.get("ranked") or about.get("monitor") != self.monitor:
                score = None
            if key in known:
                self.saved.append(known[key])
            elif about.get("saver") == self.state_key and trainer.line.has(info.manifest.run_id, info.step):
                # This run will repeat the checkpoint's step, and the save at that step will replace the checkpoint.
                # Until then the checkpoint gets no score, so it is not ranked.
                if info.step > trainer.global_step:
                    score = None
                self.saved.append(Saved(key, info.step, None if score is None else float(score)))
        self._find_best()

    def _after_batch(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        at = trainer.position
        if at.batch != at.window_batch:
            return  # a run cannot resume within an accumulation window
        step = at.global_step
        due = self.every_n_train_steps and step and step % self.every_n_train_steps == 0
        if due and step != self._last_step_saved:
            # If a validation follows at this step, save after it, when the metric for the ranking or the name is known.
            waits = trainer._validates_now and (self.monitor is not None or _METRIC_IN_NAME(self.filename or ""))
            first = not waits and self.monitor is not None and trainer.enable_validation
            self._deferred = bool(waits or (first and trainer.agree(self.monitor not in _values(trainer))))
            self._want_newest(trainer)
            if not self._deferred:
                self._save(trainer)
        elif self._next_time != math.inf and time.monotonic() >= self._next_time:
            trainer.set_trigger("save", self.state_key)  # set again at each batch until the save is made

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
        """Wait for the save in progress; with `save_last`, save the final state too."""
        self._finish_pending(trainer)
        if self.save_last and self._last_step_saved != trainer.global_step:
            self._save(trainer, last=True, at_once=True)

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        pending, self._pending = self._pending, None
        # If the save in the background was finished before the error, list its checkpoint.
        if pending is not None and pending[0].path is not None:
            self._record(trainer, pending[0].path, pending[1])
        if not self.save_on_exception or isinstance(exception, Preempted | NonFiniteError) or trainer.global_step == 0:
            return
        if device_failed(exception, module.device):
            return  # the state on the device is lost; the error's text names the last checkpoint
        if all_arrive(timeout_s=10.0):
            kind = "weights" if self.save_weights_only else "exception"
            path = trainer.save_to(self.own_folder, self._name(trainer), weights_only=self.save_weights_only, kind=kind)
            if self.verbose:
                print_text(trainer, f"saved {path}")
        else:
            warn_user("no checkpoint of the failed run: not all processes got to saving it")

    def save_now(self, trainer: Trainer, reason: str = "", final: bool = True) -> Path:
        """Save now, even if no save is due: before a preemption, or on request. Collective: all ranks call it.

        Args:
            trainer: the Trainer.
            reason: reason of the request; the `state_key` of this callback means that `train_time_interval` is over.
            final: whether the run may end right after. Then the save is not in the background, and a failed save
                raises an error.

        Returns:
            Path of the newest checkpoint.
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
        """Folders that may hold this callback's checkpoints; None stands for `checkpoints/` in the run folder."""
        return [self.own_folder]

    def _path(self, text: str) -> Path:
        return to_path(text, like=self.own_folder)

    def _save(
        self, trainer: Trainer, last: bool = False, full: bool = False, at_once: bool = False, must: bool = False
    ) -> None:
        """Save a checkpoint if the policy would keep it, then delete checkpoints that the policy no longer keeps.

        Args:
            last: save even if the policy would not keep the checkpoint, and do not rank it.
            full: save the full state even with `save_weights_only`.
            at_once: save now even with `background`.
            must: raise the error of a failed save even with `on_error="warn"`.
        """
        self._finish_pending(trainer)
        # A save that was not due gets no score, since the metric may be that of an earlier step.
        score = None if last or self.monitor is None else self._score(trainer)
        # A checkpoint whose metric is nan counts as judged, but has no score: it is kept only as the newest one.
        bad = score is not None and math.isnan(score)
        new = Saved("", trainer.global_step, None if bad else score)
        newest = self._want_newest(trainer)
        # A resumed run may repeat a step that the interrupted run had saved: the new checkpoint replaces the old one.
        again = [] if last else [one for one in self.saved if one.step == new.step]
        others = [one for one in self.saved if one not in again]
        wanted = self.save_last or self.keep is not None or self.policy.takes(new, others)
        wanted = wanted or (bad and newest is None and self.keeps_newest)
        self._last_step_saved = trainer.global_step
        if self.monitor is None or score is not None:
            self._last_step_judged = trainer.global_step
        wanted = trainer.agree(wanted)
        if last and not wanted and newest is not None:
            newest.take(trainer, at_once, must)  # saves the newest state of the run, outside of the ranked checkpoints
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
        except Exception as error:  # noqa: BLE001  any error: a failed save raises an error on all ranks
            self._fail(trainer, error, must)
            return
        self._pending, self._position_saved = (pending, new), trainer.position.reached
        if not pending.background:
            self._finish_pending(trainer, must)

    def _want_newest(self, trainer: Trainer) -> NewestState | None:
        """Make a save of the run's newest full state due; return the object that saves it; None if there is none."""
        newest = trainer.saver.newest if self.keeps_newest else None
        if newest is not None:
            newest.due = True
        return newest

    def _finish_pending(self, trainer: Trainer, must: bool = False) -> None:
        """Wait for the save in progress, and record its result. Collective: all ranks call it."""
        if self._pending is None:
            return
        (pending, new), self._pending = self._pending, None
        # `_position_saved` stays None until the checkpoint is complete on the disk.
        reached, self._position_saved = self._position_saved, None
        try:
            path = trainer.saver.finish(pending)
        except Exception as error:  # noqa: BLE001  `_fail` raises it or gives a warning
            if pending.path is not None:  # the save worked, but a later action failed
                self._record(trainer, pending.path, new)
                # If `pending.error` is set, deleting failed: old checkpoints stay in the list. If not, a logger failed.
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
        """Update the best checkpoint from the list; if no checkpoint has a score, change nothing."""
        if self.monitor is None:
            self.best_model_path = self.saved[-1].key if self.saved else ""
            return
        best = next(iter(retention.best_first(self._ranked(), self.mode)), None)
        if best is not None and best.score is not None and not math.isnan(best.score):
            self.best_model_path, self.best_model_score = best.key, _tensor(best.score)

    def _score(self, trainer: Trainer) -> float:
        values = _values(trainer)
        if self.monitor not in values:
            self._save(trainer, last=True, full=True, at_once=True)  # save the state before the error ends the run
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
    """Return the values that rank and name checkpoints: the logged metrics, and always `epoch` and `step`."""
    values: dict[str, float] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for name, counted in (("epoch", trainer.position.epoch), ("step", trainer.global_step)):
        logged = values.get(name, math.nan)
        values[name] = int(logged) if math.isfinite(logged) else counted
    return values


def _tensor(score: float | None) -> Tensor | None:
    """Convert a score to a 0-dim float64 tensor, as in Lightning; None stays None."""
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


def format_name(template: str, values: dict[str, Any], insert_names: bool, missing: float = 0) -> str:
    """Fill in the metrics of a filename template.

    Args:
        template: text with `{metric}` or `{metric:format}`; a metric that was not logged counts as `missing`.
        values: metrics, `epoch` and `step`.
        insert_names: put "metric=" before each value.
        missing: value of a metric that was not logged.

    Example:
        >>> format_name("{epoch}-{val/loss:.2f}", {"epoch": 3, "val/loss": 0.256}, True)
        'epoch=3-val_loss=0.26'
    """

    def fill(match: re.Match[str]) -> str:
        name, spec = match[1], match[2] or ""
        text = format(values.get(name, missing), spec)
        return f"{name}={text}" if insert_names else text

    return re.sub(r"\{([^{}:]+)(?::([^{}]*))?\}", fill, template).replace("/", "_")
