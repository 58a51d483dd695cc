"""`ThroughputMonitor`: log batches, samples, tokens and floating-point operations per second, and MFU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from instep.callbacks.base import Callback
from instep.distributed import find_batch_size
from instep.distributed.collectives import all_reduce_
from instep.errors import SettingError
from instep.utils.checks import at_least, wrong
from instep.utils.flops import FlopCounter, peak_flops
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

_EVALUATIONS = ("validate", "test", "predict")


class Totals(NamedTuple):
    """Training time and counts of batches, samples, items and operations, of this rank or of all ranks."""

    time_s: float = 0.0
    batches: int = 0
    samples: int = 0
    lengths: int = 0
    flops: float = 0.0

    def minus(self, other: Totals) -> Totals:
        """Return the difference to the totals `other` of an earlier time."""
        return Totals(
            self.time_s - other.time_s,
            self.batches - other.batches,
            self.samples - other.samples,
            self.lengths - other.lengths,
            self.flops - other.flops,
        )


class ThroughputMonitor(Callback):
    """Log batches, samples, items and floating-point operations per second to the loggers, and their totals.

    These values are logged every `log_every_n_steps` steps, with `train/` before each name:

    - `time` (seconds of training, without validation), `batches` (of each process), `samples` and `lengths` (of all
      processes): totals since the run began, including what was counted before a restart. `samples` and `lengths` are
      also logged under the plain names `samples` and `tokens`, for loggers with `x_axis="samples"` or
      `x_axis="tokens"`.
    - `device/batches_per_sec`, `device/samples_per_sec`, `device/items_per_sec`, `device/flops_per_sec`, `device/mfu`:
      rates of this process over the last `window_size` batches; not logged before there are as many batches.
    - `batches_per_sec`, `samples_per_sec`, `items_per_sec`, `flops_per_sec`: rates of all processes together, if there
      are several. A batch that a rank repeats because other ranks have more batches does not count.

    Validation, test and prediction log the same values without operations, once at their end, under `validate/`,
    `test/` and `predict/`. Times are measured on the host without waiting for the device. The host may run ahead of the
    device, but by about the same time at both ends of the window, so the rates are right.

    The number of floating-point operations is the module's `flops_per_batch`, if it has this attribute or property
    (forward and backward of one batch on one process). Otherwise torch's formulas count the operations of the first
    training batch while it runs, and later batches are scaled by their number of samples. Operations that activation
    checkpointing repeats count twice. The operations of a compiled module cannot be counted: it needs
    `flops_per_batch`.

    Args:
        batch_size_fn: function that returns the number of samples in a batch. None: use the number that the training
            loop knows.
        length_fn: function that returns the number of items, such as tokens, in a batch.
        window_size: number of batches over which rates are computed.
        separator: text between the parts of a logged name.
        available_flops: peak operations per second of one device, for MFU. None: look it up in the table of
            `instep.utils.flops`, by the device's name and the precision.
        using_sparse_model: whether the model uses the device's structured sparsity, which has a higher peak.
        sparse_cuda_acceleration_factor: factor by which structured sparsity raises the peak.

    Attributes:
        metrics: the values that were logged last, by name.

    Raises:
        SettingError: an argument is wrong. (In the run:) the number of samples in a batch is unknown.

    Example:
        >>> monitor = ThroughputMonitor(length_fn=lambda batch: batch["tokens"].numel(), window_size=20)
        >>> monitor.window_size
        20

    Source: the names are those of Lightning's `ThroughputMonitor`; MFU is Chowdhery et al. 2022 (PaLM), appendix B.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        window_size: int = 100,
        separator: str = "/",
        available_flops: float | None = None,
        using_sparse_model: bool = False,
        sparse_cuda_acceleration_factor: float = 2.0,
    ) -> None:
        for name, function in (("batch_size_fn", batch_size_fn), ("length_fn", length_fn)):
            if function is not None and not callable(function):
                raise wrong(name, function, "a function of the batch, or None")
        self.batch_size_fn = batch_size_fn
        self.length_fn = length_fn
        self.window_size = at_least(2)("window_size", window_size)
        self.separator = separator
        self.available_flops = available_flops
        self._faster = sparse_cuda_acceleration_factor if using_sparse_model else 1.0
        self.metrics: dict[str, float] = {}
        self._peak: float | None = None
        self._module_tells = False
        self._counter: FlopCounter | None = None
        self._window: deque[Totals] = deque(maxlen=window_size)
        self._every = 0
        self._logged_step = -1
        self._evaluation: Totals | None = None
        self._reset()

    def _reset(self) -> None:
        self._before = Totals()  # totals of all ranks before the last restart
        self._mine = Totals()  # totals of this rank since the last restart
        self._saved = Totals()
        self._flops_per_sample: float | None = None
        self._clock = 0.0

    # ---- state

    def before_save(self, trainer: Trainer) -> None:
        self._saved, _ = self._over_ranks(trainer, Totals())

    def state_dict(self) -> dict[str, Any]:
        """Return the totals over all ranks at the last `before_save`."""
        return {**self._saved._asdict(), "flops_per_sample": self._flops_per_sample}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the totals of the run; this process starts to count from zero."""
        self._before = self._saved = Totals(*(state_dict[name] for name in Totals._fields))
        self._flops_per_sample = state_dict["flops_per_sample"]
        self._mine = Totals()

    # ---- training

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._every = trainer.log_every_n_steps
        if stage != "fit":
            return
        if trainer.global_step == 0:
            self._reset()  # the callback may hold the totals of an earlier run
        self._module_tells = hasattr(module, "flops_per_batch")

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._clock = time.perf_counter() - self._mine.time_s
        self._logged_step = trainer.global_step
        self._window.clear()
        if self._peak is None:
            device = trainer.strategy.root_device
            peak = self.available_flops or peak_flops(device, trainer.precision)
            self._peak = None if peak is None else peak * self._faster
            if peak is None and device.type != "cpu" and trainer.is_global_zero:
                warn_user(
                    f"ThroughputMonitor logs no MFU: the peak of this {device.type} device at precision="
                    f"{trainer.precision!r} is in no table. Give ThroughputMonitor(available_flops=...), in "
                    "floating-point operations a second"
                )

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        counts = not self._module_tells and not any(m._compiled_call_impl is not None for m in module.modules())
        # The hook is set on this object, so that a monitor that counts no operations costs no call at each step.
        self.on_train_batch_start = self._count_flops if counts else None  # pyright: ignore[reportAttributeAccessIssue]

    def _count_flops(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if self._flops_per_sample is None and self._counter is None:
            self._counter = FlopCounter()
            self._counter.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        samples, lengths = self._size(trainer, batch)
        if self._counter is not None:
            self._stop_counting(samples)
        now, mine = time.perf_counter(), self._mine
        if self._module_tells:
            flops: float = module.flops_per_batch  # pyright: ignore[reportAssignmentType]
        else:
            flops = (self._flops_per_sample or 0.0) * samples
        self._mine = mine = Totals(
            now - self._clock, mine.batches + 1, mine.samples + samples, mine.lengths + lengths, mine.flops + flops
        )
        self._window.append(mine)
        step = trainer.global_step
        if self._every and step % self._every == 0 and step != self._logged_step:
            self._logged_step = step
            window = self._window
            is_full = len(window) == self.window_size
            total, every_rank = self._over_ranks(trainer, mine.minus(window[0]) if is_full else Totals())
            self._log(trainer, "train", total, mine.minus(window[0]) if is_full else None, every_rank)

    def _stop_counting(self, samples: int) -> None:
        counter, self._counter = self._counter, None
        assert counter is not None
        counter.__exit__(None, None, None)
        if samples:
            self._flops_per_sample = counter.total / samples

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:  # still counting, because the counted step raised an error
            counter.__exit__(None, None, None)

    # ---- evaluation

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._evaluation = Totals(time.perf_counter())

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        done = self._evaluation
        if done is not None:
            samples, lengths = self._size(trainer, batch)
            self._evaluation = Totals(done.time_s, done.batches + 1, done.samples + samples, done.lengths + lengths)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        done, self._evaluation = self._evaluation, None
        if done is None:
            return
        took_s = time.perf_counter() - done.time_s
        self._clock += took_s  # do not count the time of evaluation as training time
        stage = trainer.state.stage
        if self._every and stage in _EVALUATIONS and took_s > 0:
            mine = done._replace(time_s=took_s)
            _, every_rank = self._over_ranks(trainer, mine)
            self._log(trainer, str(stage.value), every_rank, mine, every_rank)

    on_test_end = on_predict_end = on_validation_end

    # ---- used by training and evaluation

    def _size(self, trainer: Trainer, batch: Any) -> tuple[int, int]:
        """Return the number of samples and of items in a batch; both are 0 for a batch that this rank only repeats."""
        known = trainer.batch_weight
        if known == 0:
            return 0, 0
        if self.batch_size_fn is not None:
            samples: int | None = self.batch_size_fn(batch)
        else:
            samples = find_batch_size(batch) if known is None else int(known)
        if samples is None:
            raise SettingError(
                f"ThroughputMonitor cannot tell how many samples a batch has (a {type(batch).__name__} without "
                "tensors). Give ThroughputMonitor(batch_size_fn=...).",
                field="batch_size_fn",
            )
        return samples, 0 if self.length_fn is None else self.length_fn(batch)

    def _over_ranks(self, trainer: Trainer, part: Totals) -> tuple[Totals, Totals]:
        """Return the run's totals, and the totals `part`, both with the counts of all ranks. Collective."""
        mine = self._mine
        counts = trainer.strategy.contributes  # if several ranks read the same data, True on only one of them
        sums = torch.tensor(
            [*(mine[2:4] if counts else (0, 0)), mine.flops, *(part[2:4] if counts else (0, 0)), part.flops],
            dtype=torch.float64,
        )
        samples, lengths, flops, *of_part = all_reduce_(sums).tolist()
        before = self._before
        total = Totals(
            before.time_s + mine.time_s,
            before.batches + mine.batches,
            before.samples + int(samples),
            before.lengths + int(lengths),
            before.flops + flops,
        )
        return total, Totals(part.time_s, part.batches, int(of_part[0]), int(of_part[1]), of_part[2])

    def _log(self, trainer: Trainer, stage: str, total: Totals, mine: Totals | None, every_rank: Totals) -> None:
        values: dict[str, float] = {"time": total.time_s, "batches": total.batches, "samples": total.samples}
        if self.length_fn is not None:
            values["lengths"] = total.lengths
        if mine is not None and mine.time_s > 0:
            values |= self._rates(mine, f"device{self.separator}")
            if self._peak and mine.flops:
                values[f"device{self.separator}mfu"] = mine.flops / mine.time_s / self._peak
            if trainer.world_size > 1:
                world = every_rank._replace(batches=mine.batches * trainer.world_size)
                values |= self._rates(world, "")
        named = {f"{stage}{self.separator}{name}": value for name, value in values.items()}
        if stage == "train":
            named["samples"] = total.samples
            if self.length_fn is not None:
                named["tokens"] = total.lengths
        self.metrics |= named
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.global_step)

    def _rates(self, done: Totals, prefix: str) -> dict[str, float]:
        names = {"batches": done.batches, "samples": done.samples}
        if self.length_fn is not None:
            names["items"] = done.lengths
        if done.flops:
            names["flops"] = done.flops  # pyright: ignore[reportArgumentType]
        return {f"{prefix}{name}_per_sec": count / done.time_s for name, count in names.items()}
