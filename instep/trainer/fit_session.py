"""What `Trainer.fit` does around its loop: epochs, validation, triggers, saving, stopping."""

from __future__ import annotations

import copy
import math
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from instep.data import BatchSource
from instep.distributed import Trigger
from instep.errors import HookError, Preempted, SettingError
from instep.trainer import run_state
from instep.trainer.evaluation import evaluate
from instep.trainer.hooks import Hook, is_overridden
from instep.trainer.log import LogBook, metric_states, put_back
from instep.trainer.module import TrainModule
from instep.trainer.optimizers import step_schedulers
from instep.trainer.plugins import saves
from instep.trainer.session import Session
from instep.utils.seed import rng_state, set_rng_state


class FitSession(Session):
    """The session of one `fit`."""

    source: BatchSource
    _batches_without_loss = 0
    _last_without_loss = (-1, -1)
    _handed_over = 0  # the step whose values were handed over last: a manual step may take several batches
    _resume_last: Callable[[], None] | None = None  # restores what hooks before the first step would disturb

    # ---- before the first step

    def prepare(self) -> None:
        """Loaders and the log book; after this, `source` is the training data."""
        self.book = LogBook("train", self.world_size, counts=self.strategy.contributes)
        self.source = self.loaders.train
        self._validates = self.loaders.validates
        self._epochs_end = {
            "others": self.hooks.of_callbacks("on_train_epoch_end", lambda c: not c.monitoring),
            "monitoring": self.hooks.of_callbacks("on_train_epoch_end", lambda c: c.monitoring),
        }
        self._next_time_validation = math.inf
        if isinstance(self.settings.val_check_interval, timedelta):
            self._next_time_validation = time.monotonic() + self.settings.val_check_interval.total_seconds()
        scheduler_hook = is_overridden(self.module, "lr_scheduler_step", TrainModule)
        self._scheduler_hook = self.module.lr_scheduler_step if scheduler_hook else None

    def resume(self) -> None:
        """Take up a checkpoint's optimizers, position, data and random generators."""
        if self.report is None:
            return
        self._resume_last = run_state.resume(self)
        at = self.position
        batch = " done" if at.epoch_ended else f", batch {at.batch}"
        where = f"epoch {at.epoch + 1}{batch}, step {at.global_step}"
        if self.report.complete:
            self.trainer.print(f"Resuming from {self.report.path}: {where}.")
        else:
            self.trainer.print(f"{self.report}\n  goes on at {where}" if self.continues else self.report)
        if self.parts is not None and self.parts.lr is not None:
            now = [float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups]
            rates = ", ".join(dict.fromkeys(f"{rate:g}" for rate in now))
            self.trainer.print(f"  learning rate: Resume(lr={self.parts.lr}); after the schedules it is {rates}")
        self.trainer.resume_report = self.report

    def sanity_check(self) -> None:
        """A few validation batches, so that a broken validation shows before hours of training."""
        limit = self.settings.num_sanity_val_steps
        if not self._validates or limit == 0 or self.continues is not None:
            return
        rng = rng_state()
        self.hooks.call("on_sanity_check_start")
        sources = self.loaders.evaluation("val")
        if evaluate(self, "sanity_check", sources, None if limit == -1 else limit) is not None:
            self.hooks.call("on_sanity_check_end")
        set_rng_state(rng)  # training does not depend on whether it ran
        self.agree_on_triggers()

    def start_training(self) -> None:
        """Everything is ready: from here on the position is the loop's."""
        self.trainer.state.stage = self.trainer.progress.stage = "train"
        self._batches_before = self.position.earlier_batches + self.position.batch
        self.set_book(self.book)
        torch.set_grad_enabled(True)
        if not self.module.training:
            warnings.warn(
                f"{type(self.module).__name__} is in eval mode, so dropout is off. Call model.train() before fit, "
                "unless that is meant.",
                stacklevel=3,
            )
        if self.finished:
            at, s = self.position, self.settings
            self.trainer.print(
                f"Nothing is left to train: epoch {at.epoch + at.epoch_ended} and step {at.global_step} are done, with "
                f"max_epochs={s.max_epochs}, max_steps={s.max_steps}. Raise one of them, or make a new Trainer."
            )

    def check_saving(self) -> None:
        """What cannot be saved is found now, not in hour ten.

        The `state_dict` and `on_save_checkpoint` of callbacks and modules are called once for this.
        """
        if self.trainer.checkpoint_callback is not None:
            run_state.dry_run(self)

    # ---- epochs

    def say_why_it_ended(self) -> None:
        """One line for people: which limit was reached, or who asked for the stop."""
        at, s, trainer = self.position, self.settings, self.trainer
        if trainer._stop_agreed:
            why = trainer.stop_reason or "a stop was asked for"
        elif s.max_steps != -1 and at.global_step >= s.max_steps:
            why = f"max_steps={s.max_steps} reached"
        else:
            why = f"max_epochs={s.max_epochs} reached"
        trainer.print(f"fit ended at step {at.global_step}: {why}.")
        steps = [getattr(it, "newest_step", 0) for it in self.callbacks if saves(it)]
        newest = max(steps, default=at.global_step)
        if newest < at.global_step:
            trainer.print(
                f"Steps {newest + 1} to {at.global_step} are not in a checkpoint. ModelCheckpoint(save_last=True) "
                "saves the end of a fit too."
            )

    @property
    def finished(self) -> bool:
        """Whether training is over."""
        at, s = self.position, self.settings
        if s.max_steps != -1 and at.global_step >= s.max_steps:
            return True
        if s.max_epochs != -1 and at.epoch + at.epoch_ended >= s.max_epochs:
            return True
        return s.limit_train_batches == 0 or self.stopping

    @property
    def stopping(self) -> bool:
        """Whether a stop was agreed and the minimum of steps and epochs is reached."""
        at, s = self.position, self.settings
        if not self.trainer._stop_agreed:
            return False
        return at.global_step >= (s.min_steps or 0) and at.epoch + at.epoch_ended >= (s.min_epochs or 0)

    def begin_epoch(self) -> None:
        """Go to the next epoch, or on with the one that a checkpoint was in."""
        at = self.position
        inside = self._resume_last is not None and not at.epoch_ended
        if not inside:
            self.catch_up()
            self._resume_last = None
        if at.epoch_ended:
            at.next_epoch()
        self.heart.enter("epoch")
        every = self.settings.reload_dataloaders_every_n_epochs
        if every and at.epoch and at.epoch % every == 0 and not at.batch:
            self.loaders.reload_train()
            self.loaders.reload_evaluation("val")
            self.source = self.loaders.train
        self.source.set_epoch(at.epoch)
        if at.batch and not inside:
            self.source.start_at(at.batch)  # a second fit of this Trainer goes on where the first one stopped
        self.trainer.progress.outer_total = self.source.num_batches
        self.state.gradient.active_dataloader = self.source
        self.state.gradient.dataloader_references = [self.source]
        self._plan_validation()
        self.hooks.call("on_train_epoch_start")
        if inside:
            self.catch_up()  # the hook ran at this epoch's true start already
            self._resume_last = None
        self.book.enter("training_step")
        self.heart.enter("train")
        if inside:
            self._after_window()

    def catch_up(self) -> None:
        if self._resume_last is not None:
            self._resume_last()

    def _after_window(self) -> None:
        """What the loop had still to do after the step that the checkpoint was saved at."""
        every = self.settings.log_every_n_steps
        if every and self.position.global_step % every == 0:
            self.hand_over()
        if self.position.batch >= self.next_validation and not self.position.validated:
            self.validate()

    def batches(self) -> Iterator[Any]:
        """The rest of the epoch's batches, on the device."""
        if self.position.skipped_rest:
            return iter(())  # resumed after on_train_batch_start had left them out
        return self.on_device(self.source)

    def end_epoch(self, complete: bool) -> None:
        """Validation that waits for the epoch's end, epoch metrics, hooks, schedulers, agreement.

        Args:
            complete: whether all batches were done; a run that stops in the middle stays in the epoch.
        """
        at, trainer = self.position, self.trainer
        self.heart.enter("epoch")
        self._check_losses()
        self.settle()
        stopped = not complete and self.stopping
        if self._validates and not at.validated and (stopped or (complete and self._validates_at_end)):
            self.validate()  # also when a stop was asked for in the middle: its metrics are what the run ends with
        self.book.leave("")
        self.book.batch = self.book.weight = None
        arrived, metrics = self.book.reduce(at.global_step, reset=False)
        trainer.metrics.log_steps(arrived)
        trainer.metrics.put_epoch(metrics, final=False)
        for hook in (*self._epochs_end["others"], *self.hooks.of_module("on_train_epoch_end")):
            hook()
        arrived, metrics = self.book.reduce(at.global_step, reset=complete)
        trainer.metrics.log_steps(arrived)
        trainer.metrics.put_epoch(metrics)
        if complete:
            if self.module.automatic_optimization:
                step_schedulers(self.schedulers, "epoch", at.epoch + 1, trainer.callback_metrics, self._scheduler_hook)
            at.epoch_ended = True
            for hook in self._epochs_end["monitoring"]:
                hook()
        else:
            self._save_now("the run ended within an epoch")  # its metrics are not there to rank it by
        self.agree_on_triggers()

    def note_no_loss(self) -> None:
        """`training_step` returned None; perhaps not for the first time in this batch."""
        place = self.position.epoch, self.position.batch
        self._batches_without_loss += place != self._last_without_loss
        self._last_without_loss = place

    def _check_losses(self) -> None:
        """Raise where no batch so far had a loss: such a run has trained nothing, and must not look finished."""
        done = self.position.earlier_batches + self.position.batch - self._batches_before
        if self.optimizers and self._batches_without_loss and self._batches_without_loss == done:
            name = type(self.module).__name__
            raise HookError(
                f"{name}.training_step returned None for every batch so far ({done}), so nothing was trained. Return "
                "the loss. If training_step steps the optimizer itself, set self.automatic_optimization = False in "
                "__init__; if nothing is to be trained, return None from configure_optimizers."
            )

    def skips(self, hooks: tuple[Hook, ...], batch: Any, batch_idx: int) -> bool:
        """Call `on_train_batch_start`; True when one of them returned -1."""
        if -1 not in [hook(batch, batch_idx) for hook in hooks]:
            return False
        if self.world_size > 1:
            raise HookError(
                "on_train_batch_start returned -1 to skip the rest of the epoch. With several processes the others "
                "would not know: use trainer.set_trigger('stop') to end the run, or limit_train_batches."
            )
        return True

    # ---- validation

    def _plan_validation(self) -> None:
        """When to validate in this epoch: `next_validation` is a batch count, infinity for never."""
        s, at, batches = self.settings, self.position, self.source.num_batches
        self._validation_every: int | None = None
        self._validates_at_end = False
        self.next_validation: float = math.inf
        self.has_clock = False
        if not self._validates:
            return
        if isinstance(s.val_check_interval, timedelta):
            self.has_clock = self.rank == 0
            return
        if s.check_val_every_n_epoch is not None and (at.epoch + 1) % s.check_val_every_n_epoch:
            return
        if isinstance(s.val_check_interval, int):
            self._validation_every = s.val_check_interval
            if batches is not None and self._validation_every > batches and s.check_val_every_n_epoch is not None:
                warnings.warn(
                    f"val_check_interval={self._validation_every} is more than the {batches} batches of an epoch, so "
                    "nothing is validated. check_val_every_n_epoch=None counts across epochs.",
                    stacklevel=2,
                )
        elif s.val_check_interval == 1.0:
            self._validates_at_end = True
        elif batches is None:
            raise SettingError(
                f"val_check_interval={s.val_check_interval} is a fraction of an epoch, but the training data has no "
                "length. Use a number of batches, a time, or 1.0.",
                field="val_check_interval",
            )
        else:
            self._validation_every = max(1, int(batches * s.val_check_interval))
        self._plan_next()

    def _plan_next(self) -> None:
        every, at = self._validation_every, self.position
        if every is not None:
            before = at.earlier_batches if self.settings.check_val_every_n_epoch is None else 0
            done = before + at.batch
            due_now = at.batch > 0 and done % every == 0 and not at.validated
            self.next_validation = (done if due_now else (done // every + 1) * every) - before

    def look_at_clock(self) -> None:
        """On the main process: ask for the validation that is due by time."""
        if time.monotonic() >= self._next_time_validation:
            assert isinstance(self.settings.val_check_interval, timedelta)
            self._next_time_validation = time.monotonic() + self.settings.val_check_interval.total_seconds()
            self.triggers.set("validate", "val_check_interval")

    def validate(self) -> None:
        """Run the validation loaders, then agree on what was asked for in the meantime."""
        at = self.position
        self.settle()
        self.strategy.average_replicas()
        at.validated = True
        self.book.leave("training_step")
        before = BeforeValidation(self)
        if evaluate(self, "validate", self.loaders.evaluation("val")) is None:
            at.validated = False  # a resumed run validates again, from its start
            before.put_back()
        self._plan_next()
        self.agree_on_triggers()

    # ---- triggers

    def hand_over(self) -> None:
        """Pass on the values that were logged since the last time; step values once for a step that is due."""
        step, every = self.position.global_step, self.settings.log_every_n_steps
        due = bool(every) and step % every == 0 and step != self._handed_over
        self._handed_over = step
        self.trainer.metrics.log_steps(self.book.hand_over(step, step_values=due))
        self.settle()

    def agree_on_triggers(self) -> None:
        """Blocking: agree with all ranks on what was set so far, and act."""
        deferred, self.deferred = self.deferred, []
        self.act_on((*deferred, *self.triggers.sync()))

    def act_on(self, agreed: tuple[Trigger, ...]) -> None:
        """Do what the ranks agreed on, all at the same step."""
        for trigger in sorted(agreed, key=lambda it: it.name == "validate"):  # the others do not wait for its end
            if trigger.name == "stop":
                self.trainer._stop_agreed = True
                self.trainer.stop_reason = trigger.reason or self.trainer.stop_reason
            elif trigger.name == "save":
                self._save_now(trigger.reason, final=False)
            elif trigger.name == "validate":
                self.validate()
            elif trigger.name == "preempted":
                self._preempt(trigger)

    def _save_now(self, reason: str, final: bool = True) -> Any:
        """Let the saver that asked by its key save, else the first one."""
        savers: dict[str, Any] = {callback.state_key: callback for callback in self.callbacks if saves(callback)}
        saver = savers.get(reason, self.trainer.checkpoint_callback)
        return None if saver is None else saver.save_now(self.trainer, reason, final)

    def _preempt(self, trigger: Trigger) -> None:
        if self.trainer.checkpoint_callback is None:
            # Nothing can be saved, so nothing can be resumed: end as the signal would have.
            if trigger.reason == "SIGINT":
                raise KeyboardInterrupt
            raise SystemExit(128 + getattr(signal, trigger.reason, signal.SIGTERM))
        began = self.position.global_step > 0 or self.continues is not None
        # Before the first step there is nothing to lose, and what hooks drew and logged at the start comes again.
        path = self._save_now(trigger.reason) if began else None
        self.trainer.interrupted = True
        at, s, batches = self.position, self.settings, self.source.num_batches
        epoch = f"epoch {at.epoch + 1}{f'/{s.max_epochs}' if s.max_epochs != -1 else ''}"
        done = f"{epoch}, batch {at.window_batch}{f' of {batches}' if batches is not None else ''}. Saved {path}"
        message = (
            f"Stopped by {trigger.reason or 'the preempted trigger'} (rank {trigger.rank}) at step {at.global_step}: "
            f'{done if began else "nothing to save yet"}. To go on, run it again with ckpt_path="auto".'
        )
        self.trainer.print(message)
        error = Preempted(message, path)
        # Now, since torchrun sends SIGTERM to the ranks that are left once the first one has ended.
        self.trainer.stop_reason = trigger.reason
        with suppress(OSError):  # the session writes it again, and says what is wrong
            self.trainer.run_folder.write_status(self.trainer, error)
        self.preempted = True
        raise error


class BeforeValidation:
    """What a validation changes of a run, to be put back where it is left in the middle.

    Weights and optimizers it does not change. What callbacks count of it is theirs.

    Args:
        run: the session.
    """

    def __init__(self, run: FitSession) -> None:
        self._run = run
        self._rng = rng_state()
        self._counted = copy.deepcopy(metric_states(run.module))
        self._metrics = run.trainer.metrics.state_dict()
        self._loggers = {key: logger.state_dict() for key, logger in run_state.by_class(run.trainer.loggers).items()}

    def put_back(self) -> None:
        """The run is as if the validation had not begun; the loggers' rows of it are no part of the checkpoint."""
        put_back(self._run.module, self._counted)
        self._run.trainer.metrics.load_state_dict(self._metrics)
        self._run.logger_states = self._loggers
        set_rng_state(self._rng)
