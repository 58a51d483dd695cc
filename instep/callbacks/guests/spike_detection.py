"""`SpikeDetection`: stop training when the loss suddenly jumps, and name the batches that may have caused it."""

from __future__ import annotations

import json
import math
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from instep.callbacks.base import Callback
from instep.data.base import list_samples
from instep.distributed import gather_object
from instep.errors import HookError, TrainingSpikeError
from instep.utils.atomic import replace
from instep.utils.checks import at_least, choice

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule


class _Batch(NamedTuple):
    """A batch that waits for its comparison, because its loss may not be computed on the device yet."""

    number: int
    step: int
    loss: Tensor | None  # None if this rank only repeated or skipped the batch


class SpikeDetection(Callback):
    """Stop training on all ranks when the loss of a batch jumps, with an error that names batches and samples.

    Each rank's loss is compared with the running mean: the mean loss of the last `window` batches over all ranks. A
    batch is a spike if its loss on any rank is worse than the mean loss of the batch before it, and differs from the
    running mean by at least `atol` and `rtol`. The spike and the batch before it (whose update may be the cause) are
    written to a file, and no checkpoint is saved after them.

    On one CPU the losses are compared at each batch. Otherwise they are compared later, so that no step waits for the
    device: every `log_every_n_steps` steps, the losses up to the previous comparison step are read. All losses are
    compared before a save and at the end of an epoch. So the run may stop some steps after the spike, but the error
    always names the same batches.

    With `Trainer(nonfinite=...)`, the Trainer handles a loss that is nan or inf, and this callback ignores the loss.

    Args:
        mode: "min" if a lower loss is better, "max" if a higher loss is better.
        window: number of batches in the running mean.
        warmup: number of batches at the start of training that are never spikes.
        atol: smallest difference from the running mean that is a spike. None: no absolute limit.
        rtol: smallest difference that is a spike, as a multiple of the running mean. None: no relative limit.
        exclude_batches_path: the JSON file to write, or a folder for `skip_batches.json`. None: use the run folder.
        finite_only: True: a loss that is nan or inf is a spike. False: nan is ignored, inf is compared as a number.

    Attributes:
        bad_batches: the content of the written JSON file: for each batch its "epoch", its "batch" index, and its
            "samples", which are a list of indices in the data set for each rank (null if unknown).

    Raises:
        SettingError: an argument is wrong.
        TrainingSpikeError: the loss of a batch is a spike; raised on all ranks.

    Example:
        >>> SpikeDetection(window=50, warmup=100, rtol=3.0).rtol
        3.0

    Source: Lightning's `SpikeDetection`, which has a separate mean on each rank and another file format.
    """

    def __init__(
        self,
        mode: Literal["min", "max"] = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | Path | None = None,
        finite_only: bool = True,
    ) -> None:
        self.mode = choice("min", "max")("mode", mode)
        self.window = at_least(1)("window", window)
        self.warmup = at_least(0)("warmup", warmup)
        self.atol = atol
        self.rtol = rtol
        self.exclude_batches_path = exclude_batches_path
        self.finite_only = finite_only
        self.bad_batches: list[dict[str, Any]] = []
        self._means: deque[float] = deque(maxlen=window)
        self._judged = 0
        self._waiting: list[_Batch] = []
        self._older = 0  # number of batches that were waiting at the last comparison
        self._last_look = 0
        self._at_once = False
        self._every = 50
        self._error: TrainingSpikeError | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the mean losses of the last batches and the number of compared batches."""
        return {"means": list(self._means), "judged": self._judged}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the mean losses of the last batches and the number of compared batches."""
        self._means = deque(state_dict["means"], maxlen=self.window)
        self._judged = state_dict["judged"]

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._waiting, self._older, self._error = [], 0, None
        if stage == "fit" and trainer.global_step == 0:  # an earlier run may have used this callback
            self.bad_batches = []
            self.load_state_dict({"means": [], "judged": 0})

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._at_once = trainer.world_size == 1 and module.device.type == "cpu"
        self._every = trainer.log_every_n_steps or 50
        self._last_look = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = _loss_of(outputs, module)
        replayed = trainer.batch_weight == 0
        step = trainer.global_step
        if self._at_once:
            self._judge(trainer, _Batch(batch_idx, step, None), [None if loss is None else loss.item()])
            return
        # Copy the loss, since a CUDA graph writes the next loss into the same memory.
        kept = None if loss is None or replayed else loss.detach().clone()
        self._waiting.append(_Batch(batch_idx, step, kept))
        if step % self._every == 0 and step != self._last_look:
            self._last_look = step
            # The device computed these losses many steps ago, so reading them does not wait.
            self._judge_waiting(trainer, self._older)
            self._older = len(self._waiting)

    def before_save(self, trainer: Trainer) -> None:
        try:
            self._judge_waiting(trainer, len(self._waiting))
        except TrainingSpikeError as error:
            # Keep the error to raise it again, since ModelCheckpoint(on_error="warn") treats it as a failed save.
            self._error = error
            raise

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._judge_waiting(trainer, len(self._waiting))  # compare now: the next epoch replaces the samples' indices

    def _judge_waiting(self, trainer: Trainer, count: int) -> None:
        """Compare the losses of the first `count` waiting batches. Collective: all ranks call it."""
        if self._error is not None:
            raise self._error
        batches, self._waiting, self._older = self._waiting[:count], self._waiting[count:], 0
        if not batches:
            return
        for batch, losses in zip(batches, _over_ranks(trainer, batches), strict=True):
            self._judge(trainer, batch, losses)

    def _judge(self, trainer: Trainer, batch: _Batch, losses: list[float | None]) -> None:
        ranks = self._spikes(trainer, losses)
        self._judged += 1
        if ranks:
            raise self._report(trainer, batch, losses, ranks)
        finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
        if finite:
            self._means.append(math.fsum(finite) / len(finite))

    def _spikes(self, trainer: Trainer, losses: list[float | None]) -> list[int]:
        """Return the ranks whose loss is a spike."""
        if self._judged < self.warmup or not self._means:
            return []
        mean, last = math.fsum(self._means) / len(self._means), self._means[-1]
        sign = 1 if self.mode == "min" else -1

        def is_spike(loss: float | None) -> bool:
            if loss is None:
                return False
            if not math.isfinite(loss) and (self.finite_only or trainer.settings.nonfinite is not None):
                return trainer.settings.nonfinite is None
            if not sign * (loss - last) > 0:
                return False
            away = abs(loss - mean)
            limits = (self.atol, None if self.rtol is None else self.rtol * mean)
            return all(limit is None or away >= abs(limit) for limit in limits)

        return [rank for rank, loss in enumerate(losses) if is_spike(loss)]

    def _report(
        self, trainer: Trainer, batch: _Batch, losses: list[float | None], ranks: list[int]
    ) -> TrainingSpikeError:
        """Write the file with the spike's batches, and return the error to raise. Collective: all ranks call it."""
        epoch, indices = trainer.position.epoch, range(max(0, batch.number - 1), batch.number + 1)
        mine = tuple(map(trainer.batch_indices, indices))
        everyone: list[Any] = gather_object(mine)
        for place, index in enumerate(indices):
            samples = {str(rank): of_rank[place] for rank, of_rank in enumerate(everyone)}
            self.bad_batches.append({"epoch": epoch, "batch": index, "samples": samples})
        path = self._path(trainer)
        if trainer.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path, json.dumps(self.bad_batches, indent=2, default=str).encode())
        mean = math.fsum(self._means) / len(self._means)
        found = ", ".join(f"{losses[rank]:.6g}" for rank in ranks)
        on = f" on rank {', '.join(map(str, ranks))}" if len(losses) > 1 else ""
        listed = ", ".join(
            (f"rank {rank}: " if len(losses) > 1 else "")
            + "; ".join(list_samples(each, trainer.train_dataloader) for each in everyone[rank])
            for rank in ranks
        )
        last = getattr(trainer.checkpoint_callback, "last_model_path", "")
        return TrainingSpikeError(
            f"global_step {batch.step} (epoch {epoch}, batch_idx {batch.number}): the loss is {found}{on}, where the "
            f"mean of the last {len(self._means)} batches is {mean:.6g} (SpikeDetection: mode={self.mode!r}, "
            f"atol={self.atol}, rtol={self.rtol}). Samples of batch_idx {' and '.join(map(str, indices))}: {listed}; "
            f"those of all ranks are in {path}. To find the cause: `instep replay {last or '<checkpoint>'}` repeats "
            "the steps after a checkpoint. To go on, leave these samples out of the data set and begin from a "
            "checkpoint's weights, or raise atol or rtol.",
            global_step=batch.step,
            epoch=epoch,
            batches=indices,
            ranks=ranks,
            sample_indices=[dict(zip(indices, of_rank, strict=True)) for of_rank in everyone],
        )

    def _path(self, trainer: Trainer) -> Path:
        path = Path(self.exclude_batches_path or trainer.log_dir or trainer.default_root_dir)
        return path if path.suffix == ".json" else path / "skip_batches.json"


def _loss_of(outputs: Any, module: TrainModule) -> Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if isinstance(loss, Tensor) or (loss is None and module.automatic_optimization):
        return loss
    raise HookError(
        f"SpikeDetection needs the loss, and training_step returned {type(outputs).__name__}. With manual "
        "optimization too, return the loss or a dict that has it under 'loss'."
    )


def _over_ranks(trainer: Trainer, batches: list[_Batch]) -> list[list[float | None]]:
    """Return for each batch a list of its losses on all ranks. Collective: all ranks call it."""
    tensors = [batch.loss.reshape(()).float() for batch in batches if batch.loss is not None]
    values = iter(torch.stack(tensors).tolist() if tensors else ())
    mine = tuple(None if batch.loss is None else next(values) for batch in batches)
    everyone = gather_object(mine) if trainer.world_size > 1 else [mine]
    return [list(losses) for losses in zip(*everyone, strict=True)]
