"""Make the small runs of the checks, and convert their final states to values that can be compared bit for bit."""

from __future__ import annotations

import hashlib
import io
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instep.callbacks import Callback, ModelCheckpoint, ModelSummary, ProgressBar
from instep.errors import InstepError
from instep.trainer import Trainer, TrainModule
from instep.trainer.plugins import uncalled_methods
from instep.utils.seed import isolate_rng, seed_process

T = TypeVar("T")

OF_THE_MACHINE = r"^DeviceStats|(^|/)device/|(^|[/_])time(_m?s)?$|throughput|_per_sec$|/mfu$"
"""Pattern of metrics that differ between two runs on one machine: times, speeds, what its devices do."""

TIMED = ("time_elapsed", "time_s")
"""Keys of states that hold seconds, which differ between two runs."""

EPOCHS, SAVED_EVERY = 3, 7  # epochs have four or twelve batches, so the save after 7 steps is inside an epoch


class ContractError(InstepError, AssertionError):
    """Raised when a class breaks a rule that instep relies on; the message has the rule and what was seen."""


class Net(TrainModule):
    """A small network for regression with dropout and BatchNorm, and with the attributes that callbacks look for."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 8})
        self.lr, self.batch_size = 0.05, 4
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 2))

    def loss(self, batch: Any) -> Tensor:
        """Return the mean squared error of a batch `(x, y)` of shapes (n, 8) and (n, 2)."""
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss, and log it as `train_loss`."""
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss as `val_loss`."""
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss as `test_loss`."""
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return predictions of shape (n, 2)."""
        return self.head(self.backbone(batch[0]))

    def configure_optimizers(self) -> Any:
        """Return Adam over the trainable parameters, with an exponential schedule."""
        optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of 48 shuffled samples."""
        return DataLoader(samples(48), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return a loader of 48 samples in order."""
        return DataLoader(samples(48), batch_size=8)

    test_dataloader = predict_dataloader = val_dataloader


class FailAt(Callback):
    """Callback that raises `Failure` at the first batch that begins after `step` optimizer steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Raise `Failure` once `step` optimizer steps are done."""
        if trainer.global_step >= self.step:
            raise Failure("the step that was to fail")


class Failure(RuntimeError):
    """Error that `FailAt` raises."""


def samples(length: int) -> TensorDataset:
    """Make `length` fixed samples `(x, y)` of shapes (8,) and (2,)."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(length, 8, generator=generator), torch.randn(length, 2, generator=generator))


@contextmanager
def run_folder(check: str) -> Iterator[Path]:
    """Yield a temporary folder; printing is suppressed, and an instep error in the block becomes a ContractError.

    The random generators of the caller are restored at the end.
    """
    temporary = tempfile.TemporaryDirectory(prefix="instep-testing-")
    with temporary as folder, redirect_stdout(io.StringIO()), isolate_rng():
        try:
            yield Path(folder)
        except ContractError:
            raise
        except InstepError as error:
            raise ContractError(f"{check}: {type(error).__name__}: {error}") from error


def made(make: Callable[[], T], kind: type[T], check: str) -> T:
    """Make the object that is tested, and check its class.

    Raises:
        ContractError: the object is not of the class `kind`.
    """
    one = make()
    if not isinstance(one, kind):
        raise ContractError(
            f"{check}: got an object of {type(one).__name__}; expected one of a subclass of {kind.__name__}. Give the "
            "class, or a function without arguments that makes one."
        )
    return one


def small_trainer(
    folder: Path, callbacks: Sequence[Callback] = (), saved_every: int = SAVED_EVERY, **settings: Any
) -> Trainer:
    """Make a quiet Trainer with one CPU process; it saves every `saved_every` steps and at the end, and keeps all."""
    saver = ModelCheckpoint(every_n_train_steps=saved_every, save_top_k=-1, save_last=True)
    options = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": EPOCHS,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks),
        "enable_model_summary": any(isinstance(callback, ModelSummary) for callback in callbacks),
        "default_root_dir": folder,
    }
    return Trainer(**{**options, **settings}, callbacks=[*callbacks, saver])


def check_hook_names(tested: Any, base: type, check: str) -> None:
    """Raise an error if the tested object has a method that nothing calls, with a name similar to a hook's or loader's.

    Args:
        tested: the tested object.
        base: its base class, such as `Callback`.
        check: name of the check, for the error.

    Raises:
        ContractError: there is such a method.
    """
    if wrong := [*uncalled_methods(tested, base, "fit")]:
        raise ContractError(f"{check}: {'; '.join(wrong)}")


def check_resume(
    name: str,
    run: Callable[[Path, Path | None], tuple[Trainer, dict[str, Any]]],
    folder: Path,
    saved_every: int = SAVED_EVERY,
) -> None:
    """Resume a run in the middle of an epoch with new objects, and compare its final state with an unstopped run's.

    Args:
        name: name of the tested class, for errors.
        run: function that trains in a folder, from a checkpoint or from the start; returns the Trainer, and more values
            to compare.
        folder: folder in which the runs make their folders.
        saved_every: number of optimizer steps between two checkpoints of a run.

    Raises:
        ContractError: the resumed run ends in another state, or no checkpoint was saved inside an epoch.
    """
    seed_process(1)
    trainer, extra = run(folder / "whole", None)
    expected = ends_of(trainer, extra, folder / "whole")
    step = resumed_step(trainer.global_step, trainer.current_epoch, saved_every)
    found = sorted((folder / "whole").glob(f"**/step-{step:08d}-*"))
    if not found:
        raise ContractError(
            f"{name}: the run of this check has {trainer.global_step} optimizer steps in {trainer.current_epoch} "
            f"epochs, and no checkpoint within an epoch to resume from: it saves every {saved_every} steps. Give data "
            "of at least four batches."
        )
    seed_process(2)  # another seed: all random state must come from the checkpoint
    trainer, extra = run(folder / "resumed", found[-1])
    lines = differences(expected, ends_of(trainer, extra, folder / "resumed"))
    if lines:
        listed = "\n  ".join(lines[:8])
        raise ContractError(
            f"{name}: a run that is resumed at step {step} ends in another way than one that is not stopped:\n  "
            f"{listed}\nKeep what decides this in state_dict and take it up in load_state_dict."
        )


def resumed_step(steps: int, epochs: int, saved_every: int) -> int:
    """Return the first saved step that is in the second half of a run and not at the end of an epoch.

    If there is none, return the last saved step in the first half that is not at the end of an epoch, or else 0.
    """
    within = [step for step in range(saved_every, steps, saved_every) if step * max(epochs, 1) % steps]
    return next((step for step in within if 2 * step > steps), within[-1] if within else 0)


def ends_of(trainer: Trainer, extra: dict[str, Any], folder: Path, ignored: str = OF_THE_MACHINE) -> dict[str, Any]:
    """Return the final state of a fit on this rank, in a form that can be compared."""
    metrics = {name: value for name, value in trainer.callback_metrics.items() if not re.search(ignored, name)}
    ends = {
        "weights": dict(trainer.strategy.local_weights()),
        "optimizer": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "metrics": metrics,
        "position": trainer.position.state_dict(),
        **extra,
    }
    return {part: comparable(value, str(folder)) for part, value in ends.items()}


def comparable(value: Any, folder: str) -> Any:
    """Convert a state to values that can be compared bit for bit, without the run's folder and the keys in `TIMED`.

    Raises:
        ContractError: a value is of a class that cannot be compared.
    """
    if isinstance(value, Tensor):
        local = getattr(value, "_local_tensor", value).detach().cpu().contiguous()
        return _digest(local.dtype, local.shape, local.view(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return _digest(value.dtype, value.shape, value.tobytes())
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): comparable(each, folder) for key, each in value.items() if key not in TIMED}
    if isinstance(value, list | tuple | deque):
        return [comparable(each, folder) for each in value]
    if isinstance(value, str | Path):
        text = str(value).replace(folder, "")
        # Remove the attempt number from the name of a checkpoint.
        return repr(re.sub(r"(step-\d{8})-\d+$", r"\1", text))
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, int | complex | bytes | Enum | torch.dtype | torch.device):
        return repr(value)
    raise ContractError(
        f"instep.testing cannot compare an object of {type(value).__name__}: {str(value)[:100]}. Use tensors, arrays, "
        "numbers, texts, and mappings, sequences or dataclasses of them."
    )


def _digest(dtype: Any, shape: Sequence[int], data: bytes) -> str:
    return f"{dtype}{tuple(shape)} {hashlib.sha1(data).hexdigest()[:16]}"


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """List the places at which two results of `comparable` differ, with both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted(one.keys() | other.keys())
        return [line for key in keys for line in differences(one.get(key), other.get(key), f"{at}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [line for i, pair in enumerate(zip(one, other, strict=True)) for line in differences(*pair, f"{at}/{i}")]
    return [] if one == other else [f"{at}: {str(one)[:200]} != {str(other)[:200]}"]


def expect_failure(fit: Callable[[], Any], name: str) -> None:
    """Call a fit in which a step raises `Failure`, and check that the fit raises this error and no other.

    Raises:
        ContractError: `fit` raised no error, or a hook that ran afterwards raised an error too, which the Trainer
            prints.
    """
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            fit()
    except Failure:
        if "Traceback (most recent call last)" in printed.getvalue():
            *_, last = printed.getvalue().strip().splitlines()
            raise ContractError(
                f"{name}: after a step had raised, a hook raised too: {last}. Hooks that run after an error "
                "(on_exception, teardown, finalize) must work wherever the run stopped."
            ) from None
        return
    raise ContractError(f"{name}: a step of the run raised, and fit returned as if it had not. Do not hide errors.")
