"""Replay of the steps after a checkpoint: the Trainer's part in a program that `instep replay` runs again.

The environment variable INSTEP_REPLAY holds what to replay, as JSON: `{"checkpoint": path, "steps": count, "output":
folder}`. The first `fit` then goes on from that checkpoint without loggers and without callbacks that save or draw on
the terminal, writes one line for each optimizer step into `<output>/rank-<rank>.jsonl`, and ends the process after the
last step.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from instep.callbacks.base import Callback
from instep.strategies.gradients import parameters_of
from instep.trainer.guests import REPLAY
from instep.trainer.plugins import saves

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer
    from instep.trainer.module import TrainModule

_ALL_ARRIVE_S = 60.0


def silence(trainer: Trainer) -> None:
    """Remove the Trainer's callbacks that save or draw on the terminal, and make its `save_checkpoint` save nothing."""
    trainer.callbacks = _silenced(trainer.callbacks)
    trainer.save_checkpoint = lambda filepath, *_, **__: Path(filepath)  # type: ignore[method-assign]


def prepare(trainer: Trainer, module: TrainModule) -> Any:
    """Set up the recording of steps, and return the path of the checkpoint to start from."""
    order = json.loads(os.environ[REPLAY])
    own = module.configure_callbacks

    def configure_callbacks() -> list[Callback]:
        callbacks = own() or []
        return _silenced([callbacks] if isinstance(callbacks, Callback) else callbacks)

    module.configure_callbacks = configure_callbacks
    recorder = _Recorder(order)
    module.training_step = recorder.watch(module.training_step)
    # first in the list, so that it sees gradients before another callback changes them
    trainer.callbacks = [recorder, *trainer.callbacks]
    return order["checkpoint"]


class _Silenced(Callback):
    """Stand-in for a callback that is left out.

    It accepts the saved state of that callback, so that nothing warns of a saved state without a callback.
    """

    def __init__(self, key: str) -> None:
        self._key = key

    @property
    def state_key(self) -> str:
        return self._key


def _silenced(callbacks: Iterable[Callback]) -> list[Callback]:
    from instep import callbacks as room  # imported late: only a replay needs it

    # Timer is left out since it limits the time of the first run, which takes longer than a replay.
    # LearningRateMonitor is left out since it requires a logger, and a replay has none.
    left_out = (room.ProgressBar, room.ModelSummary, room.LearningRateMonitor, room.Timer)
    return [
        # Each stand-in gets its own class, since callbacks of configure_callbacks replace others of the same class.
        type("Silenced", (_Silenced,), {})(callback.state_key)
        if saves(callback) or isinstance(callback, left_out)
        else callback
        for callback in callbacks
    ]


class _Recorder(Callback):
    """Callback that records each optimizer step, and ends the process after the last step of the replay."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._left: int = order["steps"]
        self._output = Path(order["output"])
        # what training_step returned, to be recorded if the step fails after training_step has returned
        self._returned: Any = None

    def watch(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `training_step`, so that the recorder knows what it returned."""

        @functools.wraps(training_step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._returned = None
            self._returned = training_step(*args, **kwargs)
            return self._returned

        return watched

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        path = self._output / f"rank-{trainer.global_rank}.jsonl"
        self._file = open(path, "w", buffering=1)  # noqa: SIM115  closed at the end; each line is written at once
        self._step = trainer.global_step
        self._batches: list[dict[str, Any]] = []
        self._norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        self._norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._note(trainer, batch_idx, outputs)
        if trainer.global_step == self._step:
            return  # the batch did not complete an optimizer step
        self._step = trainer.global_step
        self._write(trainer)
        self._left -= 1
        if not self._left:
            self._end(trainer)

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        if hasattr(self, "_file"):  # record the failed step too, since the user may be looking for this step
            self._step += 1
            self._note(trainer, trainer.progress.batch_idx, self._returned)
            self._write(trainer, error=f"{type(exception).__name__}: {exception}")
            self._file.close()

    def _note(self, trainer: Trainer, batch_idx: int, outputs: Any) -> None:
        self._returned = None
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        samples = trainer.batch_indices(batch_idx)
        self._batches.append({"batch": batch_idx, "loss": None if loss is None else float(loss), "samples": samples})

    def _write(self, trainer: Trainer, **more: Any) -> None:
        line = {"step": self._step, "epoch": trainer.position.epoch, "rank": trainer.global_rank, **more}
        json.dump({**line, "grad_norms": self._norms, "batches": self._batches}, self._file, default=repr)
        self._file.write("\n")
        self._batches, self._norms = [], []

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end(trainer)  # the training ended before the requested number of steps

    def _end(self, trainer: Trainer) -> NoReturn:
        """End the process at once: hooks and the program must not act on a run that only repeats another one."""
        self._file.close()
        # Imported late: only a replay needs it
        from instep.distributed.after_error import all_arrive

        all_arrive(_ALL_ARRIVE_S)
        # reset torch's handler, which would raise an error for a killed DataLoader worker
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in multiprocessing.active_children():
            worker.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
