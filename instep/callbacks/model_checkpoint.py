"""When to save, what to keep: `ModelCheckpoint`."""

from __future__ import annotations

import math
import os
import re
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.callbacks.base import Callback, acts_at_epoch_end
from instep.errors import Preempted, SettingError, one_of
from instep.types import PathLike

if TYPE_CHECKING:
    from instep.checkpoint import Reader
    from instep.trainer import Trainer, TrainModule


@dataclass(frozen=True)
class TopK:
    """Which checkpoints to keep by score. Pure: it decides, and touches no disk.

    Args:
        k: how many; -1 keeps all, 0 none.
        mode: "min" or "max".
    """

    k: int
    mode: str

    def better(self, a: float, b: float) -> bool:
        """Whether score `a` beats `b`; NaN beats nothing, and everything else beats NaN."""
        if math.isnan(a) or math.isnan(b):
            return math.isnan(b) and not math.isnan(a)
        return a < b if self.mode == "min" else a > b

    def worst(self, scores: dict[str, float]) -> str:
        """The key of the worst score; the oldest of equals."""
        keys = iter(scores)
        worst = next(keys)
        for key in keys:
            if self.better(scores[worst], scores[key]):
                worst = key
        return worst

    def takes(self, score: float, scores: dict[str, float]) -> bool:
        """Whether a checkpoint with this score is worth saving beside those kept."""
        if self.k == 0:
            return False
        if self.k == -1 or len(scores) < self.k:
            return True
        return self.better(score, scores[self.worst(scores)])


class ModelCheckpoint(Callback):
    """Saves checkpoints, and deletes old ones once a newer one has verified.

    A checkpoint is a folder that is committed in one instant or not at all. What to do is decided on the main process
    and the same on all ranks. Without `monitor` the newest is kept (`save_top_k=1`) or all (-1).

    Args:
        dirpath: where; by default `checkpoints/` in the run folder.
        filename: the folder's name, a template of logged metrics such as "{epoch}-{val_loss:.2f}"; by default
            `step-<8 digits>`. An attempt number follows in any case.
        monitor: the logged metric to rank by.
        verbose: print what is saved and deleted.
        save_last: keep the newest as well, whatever its score. With a monitor it is saved at every occasion.
        save_top_k: how many of the best to keep; -1 for all, 0 for none.
        save_on_exception: save when the run fails. With several processes only if all of them get that far. What
            failed may have left half an optimizer step, so that checkpoint is of a kind of its own: "auto", "last" and
            "best" do not resume from it, its path does. Nothing older is deleted for it.
        save_weights_only: leave out what only a resumed run needs.
        mode: "min" or "max".
        auto_insert_metric_name: write "val_loss=0.25" rather than "0.25" into names.
        every_n_train_steps: save every so many optimizer steps.
        train_time_interval: save every so much time (by the main process's clock).
        every_n_epochs: save every so many epochs (validations, when saving after validation). The default, 1, holds
            when none of the three is given; 0 turns it off.
        save_on_train_epoch_end: save at the end of training epochs (True) or of validations (False). None: of
            training epochs where each ends with one validation or there is none, else of validations.
        enable_version_counter: accepted for Lightning's sake; a checkpoint is never written over another.

    Raises:
        SettingError: contradicting arguments.

    Example:
        >>> ModelCheckpoint(monitor="val_loss", save_top_k=3, save_last=True).monitor
        'val_loss'
    """

    monitoring = True

    def __init__(
        self,
        dirpath: PathLike | None = None,
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
    ) -> None:
        if mode not in ("min", "max"):
            raise one_of("mode", mode, ("min", "max"))
        if save_top_k < -1:
            raise SettingError(f"save_top_k={save_top_k} must be -1 (all) or more", field="save_top_k", got=save_top_k)
        if monitor is None and save_top_k not in (-1, 0, 1):
            raise SettingError(
                f"save_top_k={save_top_k} ranks checkpoints, so it needs monitor='<a logged metric>'. Without one use "
                "1 (keep the newest), -1 (keep all) or 0.",
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
            raise SettingError(f"{' and '.join(several)} exclude each other; give one of them", field=several[0])
        for name in ("every_n_train_steps", "every_n_epochs"):
            value = given[name]
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise SettingError(f"{name}={value!r} must be an integer, 0 to turn it off", field=name, got=value)
        if save_last not in (None, True, False):
            raise SettingError(
                f"save_last={save_last!r}: use True; 'last' is found by scanning, so there is no link.",
                field="save_last",
            )
        self.dirpath = None if dirpath is None else Path(dirpath).absolute()
        self.filename = filename
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = bool(save_last)
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
            self.on_train_batch_end = self._after_batch  # a hook per step only for who needs it
        self.policy = TopK(save_top_k, mode)
        self.best_model_score: float | None = None
        self.best_model_path = ""
        self.last_model_path = ""
        self.best_k_models: dict[str, float] = {}
        self._last_step_saved = -1
        self._position_saved: dict[str, Any] | None = None
        self._next_time = math.inf

    @property
    def state_key(self) -> str:
        """Another key for every metric, mode and schedule, so that several can be used together."""
        return (
            f"ModelCheckpoint(monitor={self.monitor!r}, mode={self.mode!r}, every_n_train_steps="
            f"{self.every_n_train_steps}, every_n_epochs={self.every_n_epochs}, "
            f"train_time_interval={self.train_time_interval!r})"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_model_score": self.best_model_score,
            "best_model_path": self.best_model_path,
            "last_model_path": self.last_model_path,
            "best_k_models": dict(self.best_k_models),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there; `on_train_start` forgets checkpoints that have gone in the meantime."""
        self.best_k_models = dict(state_dict["best_k_models"])
        self.best_model_score = state_dict["best_model_score"]
        self.best_model_path = state_dict["best_model_path"]
        self.last_model_path = state_dict["last_model_path"]

    # ---- when

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._fitting = stage == "fit"

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._last_step_saved, self._position_saved = -1, None
        self._forget_the_gone(trainer)
        if trainer.resumed_from is not None:
            self._adopt(trainer.resumed_from)
            self._last_step_saved, self._position_saved = trainer.global_step, trainer.position.state_dict()
        if self.train_time_interval is not None and trainer.is_global_zero:
            self._next_time = time.monotonic() + self.train_time_interval.total_seconds()

    def _forget_the_gone(self, trainer: Trainer) -> None:
        """What the main process does not find on the disk is forgotten on all ranks."""
        known = {*self.best_k_models, self.best_model_path, self.last_model_path}
        there = trainer.agree({path for path in known if os.path.isdir(path)})
        self.best_k_models = {path: score for path, score in self.best_k_models.items() if path in there}
        self.last_model_path = self.last_model_path if self.last_model_path in there else ""
        if self.best_model_path not in there:
            self.best_model_path, self.best_model_score = "", None
            self._find_best()

    def _adopt(self, resumed_from: Reader) -> None:
        """The checkpoint that the run went on from was committed after its own state was collected: take it in."""
        path, info = str(resumed_from.path), resumed_from.manifest.info
        if self.monitor is None:
            self.best_k_models |= {path: float("nan")} if self.save_top_k else {}
        elif info.get("monitor") == self.monitor and info.get("score") is not None:
            self.best_k_models[path] = float(info["score"])
            if self.best_model_score is None or self.policy.better(float(info["score"]), self.best_model_score):
                self.best_model_path, self.best_model_score = path, float(info["score"])
        self.last_model_path = path

    def _after_batch(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        at = trainer.position
        if at.batch != at.window_batch:
            return  # in the middle of an optimizer window, where a run cannot go on
        step = at.global_step
        due = self.every_n_train_steps and step and step % self.every_n_train_steps == 0
        if due and step != self._last_step_saved:
            self._save(trainer)
        elif self._next_time != math.inf and time.monotonic() >= self._next_time:
            assert self.train_time_interval is not None
            self._next_time = time.monotonic() + self.train_time_interval.total_seconds()
            trainer.set_trigger("save", "train_time_interval")

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if (
            self._fitting
            and not trainer.sanity_checking
            and not acts_at_epoch_end(trainer, self.save_on_train_epoch_end)
        ):
            self._save_by_epoch(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if acts_at_epoch_end(trainer, self.save_on_train_epoch_end):
            self._save_by_epoch(trainer)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """With `save_last`, the end of the run is kept too."""
        if self.save_last and self._last_step_saved != trainer.global_step:
            self._save(trainer, last=True)

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        if not self.save_on_exception or isinstance(exception, Preempted) or trainer.global_step == 0:
            return
        if trainer.all_ranks_arrive(timeout_s=10.0):
            kind = "weights" if self.save_weights_only else "exception"
            name = self._name(trainer)
            path = trainer.save_to(self.dirpath, name, weights_only=self.save_weights_only, kind=kind)
            if self.verbose:
                trainer.print(f"saved {path}")
        else:
            warnings.warn("no checkpoint of the failed run: not all processes got to saving it", stacklevel=2)

    def save_now(self, trainer: Trainer, reason: str = "") -> Path:
        """Save whatever the schedule says: before a preemption, or because somebody asked. Collective."""
        saved = self._position_saved == trainer.position.state_dict() and Path(self.last_model_path or "-").is_dir()
        if trainer.agree(saved and not self.save_weights_only):
            return Path(self.last_model_path)
        return self._save(trainer, last=True, full=True)

    def _save_by_epoch(self, trainer: Trainer) -> None:
        due = self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0
        if due and self._last_step_saved != trainer.global_step:
            self._save(trainer)

    # ---- what

    def _save(self, trainer: Trainer, last: bool = False, full: bool = False) -> Path:
        """Save if it is worth it, then delete what is not kept any more."""
        ranked = self.monitor is None or not last  # nobody has measured this very step: it is kept, but not ranked
        score = self._score(trainer) if ranked else float("nan")
        ranks = self.save_top_k != 0 if self.monitor is None else self.policy.takes(score, self.best_k_models)
        wanted = last or self.save_last or ranks
        if not trainer.agree(wanted):
            self._last_step_saved = trainer.global_step
            return Path(self.last_model_path)
        path = trainer.save_to(
            self.dirpath,
            self._name(trainer),
            weights_only=self.save_weights_only and not full,
            monitor=self.monitor,
            mode=self.mode,
            score=None if self.monitor is None or math.isnan(score) else score,
        )
        self._last_step_saved, self._position_saved = trainer.global_step, trainer.position.state_dict()
        before, self.last_model_path = self.last_model_path, str(path)
        if self.verbose:
            trainer.print(f"saved {path}")
        doomed = self._rank(str(path), score, trainer) if ranked else set()
        if before and before not in self.best_k_models and before != self.last_model_path and self.save_top_k != -1:
            doomed.add(before)
        self._delete(trainer, path, trainer.agree(doomed))
        return path

    def _rank(self, path: str, score: float, trainer: Trainer) -> set[str]:
        """Take the new one into the best, and return those that fall out."""
        if self.monitor is None:
            # No score: the newest is the best.
            doomed = set(self.best_k_models) if self.save_top_k == 1 else set()
            self.best_k_models = {path: score} if self.save_top_k == 1 else {**self.best_k_models, path: score}
            if self.save_top_k == 0:
                self.best_k_models = {}
            self.best_model_path = path
            return doomed
        doomed = set()
        if self.policy.takes(score, self.best_k_models):
            self.best_k_models[path] = score
            if self.save_top_k != -1 and len(self.best_k_models) > self.save_top_k:
                worst = self.policy.worst(self.best_k_models)
                del self.best_k_models[worst]
                doomed.add(worst)
        self._find_best()
        return doomed

    def _find_best(self) -> None:
        """The best of those kept; where nothing has a score, what was the best stays."""
        if self.monitor is None:
            self.best_model_path = next(reversed(self.best_k_models), self.best_model_path)
            return
        ranked = {key: value for key, value in self.best_k_models.items() if not math.isnan(value)}
        if ranked:
            best = next(iter(ranked))
            for key, value in ranked.items():
                if self.policy.better(value, ranked[best]):
                    best = key
            self.best_model_path, self.best_model_score = best, ranked[best]

    def _delete(self, trainer: Trainer, newest: Path, doomed: set[str]) -> None:
        """Old checkpoints go only after the new one was read back and verified."""
        doomed.discard(str(newest))
        if not doomed:
            return
        problems = trainer.verify_checkpoint(newest)
        if problems:
            warnings.warn(f"{newest} does not verify ({'; '.join(problems)}); nothing older is deleted", stacklevel=2)
            return
        for path in sorted(doomed):
            trainer.delete_checkpoint(Path(path))
            if self.verbose:
                trainer.print(f"deleted {path}")

    def _score(self, trainer: Trainer) -> float:
        if self.monitor is None:
            return float("nan")
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            raise SettingError(
                f"ModelCheckpoint(monitor={self.monitor!r}): that was not logged before saving. Logged so far: "
                f"{', '.join(sorted(metrics)) or 'nothing'}. Log it with self.log({self.monitor!r}, ...), or save "
                "where it exists (save_on_train_epoch_end, every_n_epochs).",
                field="monitor",
                got=self.monitor,
            )
        return trainer.agree(float(metrics[self.monitor]))

    def _name(self, trainer: Trainer) -> str | None:
        if self.filename is None:
            return None
        values: dict[str, Any] = {name: float(v) for name, v in trainer.callback_metrics.items()}
        values |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        return trainer.agree(format_name(self.filename, values, self.auto_insert_metric_name))


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
