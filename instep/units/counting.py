"""`Tokens` and `Samples`: callbacks that count over all ranks, and act when the count reaches given numbers.

A batch is counted before its step. If a sum over ranks is needed and the count is on the host, the sum starts before
the step and is read after the step. So only a rank that is ahead of the others waits for the sum. A count on the
device, or of several accumulated batches, is summed after the step. All ranks know the same total after the same
optimizer step, so they set the Trainer's triggers without another agreement, and the loop acts at this step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.callbacks.base import Callback
from instep.checkpoint.edge import check, count
from instep.distributed import find_batch_size, gather_object
from instep.distributed.collectives import all_reduce_
from instep.errors import DataError, SettingError
from instep.state import PartialState
from instep.state.collective_checks import announce
from instep.state.process import step_group
from instep.state.rank_records import awaited
from instep.utils.checks import FLAG, is_int, is_number, wrong
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

IGNORED = {"attention_mask": 0, "loss_mask": 0, "sequence_ids": 0, "labels": -100}
"""Key of a batch -> the value of its entries that do not count."""


class UnitCount(Callback):
    """Base class of `Tokens` and `Samples`: count a unit over all ranks, and act when the total reaches given numbers.

    Args:
        maximum: count at which the run ends, at the first optimizer step that reaches it; None for no limit.
        val_every: units between validations. A validation runs after each step at which the total passes a multiple of
            this number. None for no validations.
        save_every: units between checkpoints. A checkpoint is saved after each step at which the total passes a
            multiple of this number. None for no saves.
        log: whether to send the total to the loggers.

    Attributes:
        total: count of all ranks up to the last optimizer step, including the time before a resume.
    """

    # run before other callbacks, so that callbacks that save or read metrics at this step see the new total
    runs_first = True
    unit = ""
    on_host = False
    """Whether units can be counted without values from the device."""

    def __init__(self, maximum: float | None, val_every: float | None, save_every: float | None, log: bool) -> None:
        self.maximum = self._whole(f"max_{self.unit}", maximum)
        self.val_every = self._whole(f"val_check_{self.unit}", val_every)
        self.save_every = self._whole(f"save_every_{self.unit}", save_every)
        self.asks_to_validate = val_every is not None
        self._logs = bool(FLAG("log", log))
        self.total, self._loaded = 0, False
        self._world, self._counts, self._early, self._takes_own = 1, True, False, False
        self._log_every, self._logged_step = 0, -1
        self._begin()

    def count_batch(self, batch: Any, samples: float | None) -> int | Tensor:
        """Return the units in this rank's part of a batch.

        If the result is a tensor on the device, it is read after the step has begun.

        Args:
            batch: the batch, as `training_step` gets it.
            samples: number of samples in the batch that count; None if unknown.
        """
        raise NotImplementedError

    def per_sample(self) -> int | None:
        """Return the units of each sample; None if samples have different numbers of units."""
        return None

    def settle(self) -> int:
        """Add the counts of the batches since the last step to the total, and return the total. Collective."""
        if self._begun:
            mine = self._mine + sum(value.read() for value in self._on_device)
            if self._world == 1:
                self._all += mine
            elif self._asks:
                self._all += int(all_reduce_(torch.tensor([mine]))[0])
            for work, summed in self._sums:
                group: Any = PartialState().control_group
                with nullcontext() if work.is_completed() else awaited(group, f"{type(self).__name__}: the sum"):
                    work.wait()  # if the sum has failed, `wait` raises an error
                self._all += int(summed[0])
            self.total += self._all
            self._begin()
        return self.total

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the total over all ranks, at the end of the last optimizer step."""
        return {"total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the total. The number of ranks may differ from that of the saved run."""
        check(state_dict, {"total": count}, "the state")
        self.total, self._loaded = state_dict["total"], True

    # ---- the run

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit" and (trainer.global_step == 0 or trainer.resumed_from is not None):
            self.total = 0  # another Trainer may have used this object; `load_state_dict` sets a resumed run's total
        self._loaded = False

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Decide which ranks count, and end the run at once if it has already reached its limit."""
        self._world = trainer.world_size
        # Ranks of tensor, context and pipeline parallelism read the same data, so only the first of them counts it.
        self._counts = (
            gather_object(trainer.strategy.data_rank).index(trainer.strategy.data_rank) == trainer.global_rank
        )
        self._log_every, self._logged_step = (trainer.log_every_n_steps if self._logs else 0), trainer.global_step
        self._plan()
        if trainer.resumed_from is not None and not self._loaded and trainer.global_step and trainer.is_global_zero:
            warn_user(
                f"the checkpoint at step {trainer.global_step} has no count of {type(self).__name__}, which begins at 0"
            )
        if self.save_every is not None and trainer.checkpoint_callback is None and not trainer.fast_dev_run:
            raise SettingError(
                f"save_every_{self.unit}={self.save_every}: the run has no ModelCheckpoint that saves. Add one to the "
                f"callbacks, such as ModelCheckpoint(every_n_epochs=0), or leave save_every_{self.unit} out.",
                field=f"save_every_{self.unit}",
                got=self.save_every,
            )
        if self.val_every is not None and not trainer.enable_validation and trainer.is_global_zero:
            warn_user(f"val_check_{self.unit}={self.val_every} is not used: the run has nothing to validate")
        self._stop_at_maximum(trainer, agreed=False)

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        # Start the sum before the step if the count is known by then. A count on a device is not, nor the count of
        # several accumulated batches.
        self._early = trainer.accumulate_grad_batches == 1 and (self.on_host or module.device.type == "cpu")
        self._begin()

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        self._takes_own = batch is None  # the step is a training_step(dataloader_iter), which takes its batches itself
        if not self._takes_own:
            mine, of_all, *_ = trainer.batch_share
            self._add(batch, mine, of_all)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._takes_own:
            self._add(None, trainer.batch_weight, None)
        at = trainer.position
        if at.batch != at.window_batch:
            return  # this batch is in the middle of an accumulation window
        if self.settle() >= self._next:
            self._act(trainer)
        step = at.global_step
        if self._log_every and step % self._log_every == 0 and step != self._logged_step:
            self._logged_step = step
            for logger in trainer.loggers:
                logger.log_metrics({self.unit: self.total}, step=step)

    # ---- counting in one accumulation window

    def _begin(self) -> None:
        self._all = self._mine = 0
        self._begun = self._asks = False
        self._on_device: list[_OnDevice] = []
        self._sums: list[tuple[Any, Tensor]] = []

    def _add(self, batch: Any, samples: float | None, of_all: int | None) -> None:
        """Count a batch.

        Args:
            batch: the batch; None if the step has taken its batches itself.
            samples: number of this rank's samples in it; None if unknown.
            of_all: number of samples of all ranks; None if unknown.
        """
        self._begun, each = True, self.per_sample()
        if each is not None and of_all is not None:
            self._all += each * of_all
            return
        mine: int | Tensor = 0
        # 0 marks a batch that this rank repeats because other ranks have more batches
        if self._counts and samples != 0:
            mine = self.count_batch(batch, samples)
        if isinstance(mine, Tensor) and mine.device.type != "cpu" and not self._early:
            self._on_device.append(_OnDevice(mine))
            mine = 0
        if self._early and self._world > 1:
            self._sums.append(_start_sum(int(mine)))
        else:
            self._mine += int(mine)
            self._asks = True

    # ---- actions that depend on the total

    def _plan(self) -> None:
        """Find the next total at which the run validates, saves or ends."""
        every = [each for each in (self.val_every, self.save_every) if each is not None]
        marks = [(self.total // each + 1) * each for each in every]
        self._acted, self._next = self.total, min((*marks, math.inf if self.maximum is None else self.maximum))

    def _act(self, trainer: Trainer) -> None:
        for name, every in (("validate", self.val_every), ("save", self.save_every)):
            if every is not None and self.total // every > self._acted // every:
                trainer.set_trigger(name, f"{self.total} {self.unit}", agreed=True)
        self._stop_at_maximum(trainer, agreed=True)
        self._plan()

    def _stop_at_maximum(self, trainer: Trainer, agreed: bool) -> None:
        if self.maximum is not None and self.total >= self.maximum and not trainer.should_stop:
            trainer.set_trigger("stop", f"max_{self.unit}={self.maximum} reached", agreed=agreed)

    def _whole(self, name: str, value: float | None) -> int | None:
        """Return a number of units as an integer; floats such as 2e9 are allowed."""
        if value is not None and (not is_number(value) or not 1 <= value < math.inf or int(value) != value):
            raise wrong(name, value, f"a whole number of {self.unit} of at least 1, or None")
        return None if value is None else int(value)


class _OnDevice:
    """A number on a device, which is being copied to the host."""

    def __init__(self, value: Tensor) -> None:
        self._event, self._value = None, value
        if value.device.type == "cuda":
            self._value = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(value.device))

    def read(self) -> int:
        """Wait for the number, and return it."""
        if self._event is not None:
            self._event.synchronize()
        return int(self._value)


def _start_sum(mine: int) -> tuple[Any, Tensor]:
    """Start the sum of a number over all ranks.

    Return torch's work object, and the tensor that has the sum when the work is done.
    """
    group: Any = step_group()
    summed = torch.tensor([mine], dtype=torch.int64)
    announce(PartialState().control_group, "a count over ranks")
    # `torch.distributed.all_reduce` calls `group.allreduce` too, but takes twice the time
    return group.allreduce([summed]), summed


class Samples(UnitCount):
    """Callback that counts and logs the samples of all ranks; the run validates, saves and ends by this count.

    Each sample counts once: a batch that a rank runs a second time, to make as many steps as the others, does not
    count, and ranks of tp, cp and pp that read the same data count it once. Counts are taken at optimizer steps: each
    action happens at the first step that reaches its number, on all ranks. A checkpoint holds the total, so a run may
    resume on a different number of ranks. If instep divides the data among ranks, the count needs no communication.

    Args:
        max_samples: number of samples at which the run ends, like `max_steps`; a float such as 2e9 is allowed. None for
            no limit.
        val_check_samples: validate after each step that passes a multiple of this number, in addition to the
            validations of the Trainer's `val_check_interval`. Callbacks that read a metric act after each validation.
        save_every_samples: save through the run's first ModelCheckpoint, without a ranking by a metric, after each step
            that passes a multiple of this number. If a validation is due at the same step, it comes first.
        log: whether to log the total as `samples` every `log_every_n_steps` steps, which a logger with
            `x_axis="samples"` needs.

    Attributes:
        total: samples of all ranks up to the last optimizer step, including the time before a resume.

    Raises:
        SettingError: an argument is wrong.

    Example:
        >>> from instep import Trainer
        >>> samples = Samples(max_samples=1_000_000, val_check_samples=50_000)
        >>> trainer = Trainer(max_epochs=-1, callbacks=[samples], logger=False, enable_checkpointing=False)
        >>> samples.total
        0
    """

    unit = "samples"
    on_host = True

    def __init__(
        self,
        *,
        max_samples: float | None = None,
        val_check_samples: float | None = None,
        save_every_samples: float | None = None,
        log: bool = True,
    ) -> None:
        super().__init__(max_samples, val_check_samples, save_every_samples, log)

    def per_sample(self) -> int:
        """Return 1: a sample is one unit."""
        return 1

    def count_batch(self, batch: Any, samples: float | None) -> int:
        """Return the number of samples in a batch."""
        return _size(self, batch, samples)


class Tokens(UnitCount):
    """Callback that counts and logs the tokens of all ranks; the run validates, saves and ends by this count.

    `count` says what a token is. As with `Samples`, each batch counts once, at its optimizer step, also with gradient
    accumulation. The tokens of a step that `Trainer(nonfinite="skip")` leaves out count too, as `global_step` counts
    the step.

    Args:
        count: name of a key or an attribute of the batch that holds a tensor. The tensor's entries are counted, except
            those equal to `ignore`. Or a function of the batch, as `training_step` gets it, that returns an integer or
            a 0-dim integer tensor. Or an integer: the number of tokens in each sample, if all have the same length;
            then the batch is not read.
        max_tokens: number of tokens at which the run ends, like `max_steps`; a float such as 2e9 is allowed. None for
            no limit.
        val_check_tokens: validate after each step that passes a multiple of this number, in addition to the validations
            of the Trainer's `val_check_interval`. Callbacks that read a metric act after each validation.
        save_every_tokens: save through the run's first ModelCheckpoint, without a ranking by a metric, after each step
            that passes a multiple of this number. If a validation is due at the same step, it comes first.
        log: whether to log the total as `tokens` every `log_every_n_steps` steps, which a logger with `x_axis="tokens"`
            needs.
        ignore: value of the entries that do not count. None: 0 for `attention_mask`, `loss_mask` and `sequence_ids`,
            -100 for `labels`; for any other key all entries count.

    Attributes:
        total: tokens of all ranks up to the last optimizer step, including the time before a resume.

    Raises:
        SettingError: an argument is wrong.

    Example:
        >>> tokens = Tokens("attention_mask", max_tokens=2e9, val_check_tokens=100e6, save_every_tokens=500e6)
        >>> tokens.maximum
        2000000000
    """

    unit = "tokens"

    def __init__(
        self,
        count: str | int | Callable[[Any], int | Tensor],
        *,
        max_tokens: float | None = None,
        val_check_tokens: float | None = None,
        save_every_tokens: float | None = None,
        log: bool = True,
        ignore: int | None = None,
    ) -> None:
        if not (callable(count) or is_int(count, 1) or (isinstance(count, str) and count)):
            expected = 'a key of the batch such as "attention_mask", a function of the batch, or tokens of each sample'
            raise wrong("count", count, expected)
        if ignore is not None and not (is_int(ignore) and isinstance(count, str)):
            raise wrong("ignore", ignore, "a token's number, where count is a key of the batch; else None")
        super().__init__(max_tokens, val_check_tokens, save_every_tokens, log)
        self.count = count
        self.ignore = IGNORED.get(count) if ignore is None and isinstance(count, str) else ignore
        self.on_host = is_int(count) or (isinstance(count, str) and self.ignore is None)

    def per_sample(self) -> int | None:
        """Return the number of tokens in each sample if `count` is an integer; else None."""
        return self.count if isinstance(self.count, int) else None

    def count_batch(self, batch: Any, samples: float | None) -> int | Tensor:
        """Return the number of tokens in a batch."""
        if isinstance(self.count, int):
            return self.count * _size(self, batch, samples)
        if batch is None:
            raise SettingError(
                "Tokens: training_step(dataloader_iter) takes its batches itself, and nobody sees them all. Give the "
                "tokens of each sample, Tokens(count=2048), or take the batch as an argument.",
                field="count",
                got=self.count,
            )
        if callable(self.count):
            found = self.count(batch)
            if not (
                is_int(found, 0) or (isinstance(found, Tensor) and found.ndim == 0 and not found.is_floating_point())
            ):
                raise wrong("count", found, "a function that returns a number of tokens, or a 0-dim integer tensor")
            return found
        values = batch.get(self.count) if isinstance(batch, Mapping) else getattr(batch, self.count, None)
        if not isinstance(values, Tensor):
            there = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            raise DataError(
                f"Tokens(count={self.count!r}): the batch has no tensor of that name; it is {there}. Give another key, "
                "or a function of the batch."
            )
        if self.ignore is None:
            return values.numel()
        return torch.count_nonzero(values != self.ignore if self.ignore else values)


def _size(counter: UnitCount, batch: Any, samples: float | None) -> int:
    size = find_batch_size(batch) if samples is None else int(samples)
    if size is None:
        raise DataError(
            f"{type(counter).__name__} cannot tell how many samples a batch has (a {type(batch).__name__} without "
            "tensors). Use Tokens(count=...) with a function of the batch."
        )
    return size
