"""The small runs that every check makes, and what a run ends with, in a form that compares bit for bit."""

from __future__ import annotations

import hashlib
import io
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instep.callbacks import Callback, ModelCheckpoint, ModelSummary, ProgressBar
from instep.errors import InstepError
from instep.trainer import Trainer, TrainModule
from instep.utils.seed import seed_process

T = TypeVar("T")

OF_THE_MACHINE = r"DeviceStats|cpu_|device/|time|throughput|per_sec|samples|batches|memory"
"""Pattern of metrics that differ between two runs on one machine: times, speeds, memory."""

EPOCHS, SAVED_EVERY = 3, 7  # of four, six and twelve batches: saved within the second of two epochs, and of three


class ContractError(InstepError, AssertionError):
    """Raised when a class breaks a rule that instep relies on; the text has the rule and what was seen."""


class Net(TrainModule):
    """A regression with dropout and BatchNorm, and the attributes that callbacks look for."""

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
        """Return Adam over what is trainable, with an exponential schedule."""
        optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}

    def train_dataloader(self) -> DataLoader[Any]:
        """Return 48 shuffled samples."""
        return DataLoader(samples(48), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return 48 samples in order."""
        return DataLoader(samples(48), batch_size=8)

    test_dataloader = predict_dataloader = val_dataloader


class FailingNet(Net):
    """`Net` whose step raises once a number of optimizer steps is done."""

    fails_at = 3 * SAVED_EVERY + 3

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss, or raise `Failure`."""
        if self.global_step >= self.fails_at:
            raise Failure("the step that was to fail")
        return super().training_step(batch, batch_idx)


class Failure(RuntimeError):
    """The error of `FailingNet`."""


def samples(length: int) -> TensorDataset:
    """Make `length` fixed samples `(x, y)` of shapes (8,) and (2,)."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(length, 8, generator=generator), torch.randn(length, 2, generator=generator))


@contextmanager
def run_folder(check: str) -> Iterator[Path]:
    """Yield a temporary folder, and print nothing; an instep error in the block becomes a ContractError."""
    with tempfile.TemporaryDirectory(prefix="instep-testing-") as folder, redirect_stdout(io.StringIO()):
        try:
            yield Path(folder)
        except ContractError:
            raise
        except InstepError as error:
            raise ContractError(f"{check}: {type(error).__name__}: {error}") from error


def made(make: Callable[[], T], kind: type[T], check: str) -> T:
    """Make the object that is checked.

    Raises:
        ContractError: it is of another class.
    """
    one = make()
    if not isinstance(one, kind):
        raise ContractError(
            f"{check}: got an object of {type(one).__name__}; expected one of a subclass of {kind.__name__}. Give the "
            "class, or a function without arguments that makes one."
        )
    return one


def small_trainer(folder: Path, callbacks: Sequence[Callback] = (), **settings: Any) -> Trainer:
    """Make a quiet Trainer on one CPU process that keeps a checkpoint of every `SAVED_EVERY` steps and of the end."""
    saver = ModelCheckpoint(every_n_train_steps=SAVED_EVERY, save_top_k=-1, save_last=True)
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


def check_hook_names(caught: Sequence[warnings.WarningMessage], name: str, check: str) -> None:
    """Raise where the Trainer has warned of a method that looks like a hook of a class, and is none."""
    wrong = [
        text for text in (str(each.message) for each in caught) if text.startswith(f"{name}.") and "called" in text
    ]
    if wrong:
        raise ContractError(f"{check}: {'; '.join(dict.fromkeys(wrong))}")


def check_resume(name: str, run: Callable[[Path, Path | None], tuple[Trainer, dict[str, Any]]], folder: Path) -> None:
    """Resume a run in the middle, with all objects new, and compare what it ends with.

    Args:
        name: of what is checked, for the error.
        run: trains in a folder, from a checkpoint or from the start; returns the Trainer and what else to compare.
        folder: for the runs.

    Raises:
        ContractError: the resumed run ends in another way.
    """
    seed_process(1)
    trainer, extra = run(folder / "whole", None)
    expected = ends_of(trainer, extra, folder / "whole")
    step = resumed_step(trainer.global_step)
    found = sorted((folder / "whole").glob(f"**/step-{step:08d}-*"))
    if not found:
        raise ContractError(
            f"{name}: the run of this check has {trainer.global_step} optimizer steps, and no checkpoint at step "
            f"{step} to resume from. Give data of at least four batches."
        )
    seed_process(2)  # all that is random must come from the checkpoint
    trainer, extra = run(folder / "resumed", found[-1])
    lines = differences(expected, ends_of(trainer, extra, folder / "resumed"))
    if lines:
        listed = "\n  ".join(lines[:8])
        raise ContractError(
            f"{name}: a run that is resumed at step {step} ends in another way than one that is not stopped:\n  "
            f"{listed}\nKeep what decides this in state_dict and take it up in load_state_dict."
        )


def resumed_step(steps: int) -> int:
    """Return the first step in the second half of a run at which a checkpoint was saved."""
    return (steps // 2 // SAVED_EVERY + 1) * SAVED_EVERY


def ends_of(trainer: Trainer, extra: dict[str, Any], folder: Path, ignored: str = OF_THE_MACHINE) -> dict[str, Any]:
    """Return all that a run of fit ends with on this rank, in a form that compares."""
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
    """Turn a state into values that compare, tensors into their bits; a run's folder and times are left out."""
    if isinstance(value, Tensor):
        local = getattr(value, "_local_tensor", value).detach().cpu().contiguous()
        digest = hashlib.sha1(local.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        return f"{local.dtype}{tuple(local.shape)} {digest}"
    if isinstance(value, dict):
        return {str(key): comparable(each, folder) for key, each in value.items() if not str(key).startswith("time_")}
    if isinstance(value, list | tuple):
        return [comparable(each, folder) for each in value]
    if isinstance(value, float):
        return value.hex()
    return re.sub(r"-\d+$", "", str(value).replace(folder, ""))  # the number of a save's attempt


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """List where two results of `comparable` differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted(one.keys() | other.keys())
        return [line for key in keys for line in differences(one.get(key), other.get(key), f"{at}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [line for i, pair in enumerate(zip(one, other, strict=True)) for line in differences(*pair, f"{at}/{i}")]
    return [] if one == other else [f"{at}: {str(one)[:200]} != {str(other)[:200]}"]


def expect_failure(fit: Callable[[], Any], name: str) -> None:
    """Call a fit whose step raises `Failure`.

    Raises:
        ContractError: none came out of `fit`, or a hook that ran after it raised one more, which the Trainer prints.
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
