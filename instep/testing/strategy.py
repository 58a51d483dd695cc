"""Contract test of a strategy: `check_strategy`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from instep.callbacks import Callback, ModelCheckpoint
from instep.strategies import Strategy
from instep.testing.ranks import in_ranks
from instep.testing.runs import ContractError, comparable, differences, made, samples
from instep.trainer import Trainer, TrainModule
from instep.utils.seed import seed_process

CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "whole batches": ({}, 36, 12),
    "a last batch smaller than the ranks": ({}, 37, 12),
    "windows of micro-batches, clipped": ({"gradient_clip_val": 0.05}, 43, 3),
}
"""Case -> settings of the Trainer, number of samples, and batch size of the loader; the global batch size is 12."""


class Regression(TrainModule):
    """A network without dropout and batch statistics, so that training does not depend on how batches are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean squared error of a batch `(x, y)`, and log its mean over the epoch as `loss`."""
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return SGD with momentum, so that checkpoints must contain an optimizer state."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def check_strategy(
    make: Callable[[], Strategy | str],
    *,
    devices: int = 2,
    module: Callable[[], TrainModule] = Regression,
    tolerance: float = 1e-5,
    timeout_s: float = 300.0,
) -> None:
    """Check that a strategy keeps the rules of strategies, by runs of several processes on the CPU.

    The rules: with the same global batch, losses and weights equal those of one process; this is tried with a batch
    that has fewer samples than ranks, with accumulated micro-batches, and with clipping. A run that is resumed in the
    middle of an epoch ends in the same state, bit for bit, as a run that was not stopped. One process can load the
    strategy's checkpoint, and the strategy can load the checkpoint of one process.

    Args:
        make: the class, or a function without arguments, at the top level of a module, since new processes import it.
        devices: number of ranks.
        module: function at the top level of a module that makes the module to train, for a strategy that needs certain
            layers. The module has no dropout and no BatchNorm, takes batches `(x, y)` of shapes (n, 8) and (n, 2), and
            logs `loss` as the mean over an epoch.
        tolerance: maximum absolute difference of a loss or weight from the value of one process, in float32.
        timeout_s: seconds that each of the three sets of processes may take.

    Raises:
        ContractError: a rule is broken; the message has the rule and what was seen.

    Example:
        ::

            from instep.testing import check_strategy
            from my_package import AveragedGradients

            def test_it_trains_like_one_process():
                check_strategy(AveragedGradients, devices=2)
    """
    with tempfile.TemporaryDirectory(prefix="instep-testing-") as folder:
        [alone] = in_ranks(train_cases, (alone_strategy, module, f"{folder}/alone", None), 1, timeout_s)
        ranks = in_ranks(train_cases, (make, module, f"{folder}/spread", f"{folder}/alone"), devices, timeout_s)
        [back] = in_ranks(resume, (alone_strategy, module, f"{folder}/spread", f"{folder}/back"), 1, timeout_s)
    name = ranks[0]["name"]
    for case in CASES:
        _close(f"{name}, {case}", alone[case], ranks[0][case], tolerance)
        for rank, results in enumerate(ranks):
            if results[case]["losses"] != ranks[0][case]["losses"]:
                raise ContractError(f"{name}, {case}: the losses of rank {rank} are not those of rank 0")
    for rank, results in enumerate(ranks):
        if lines := differences(results["whole"], results["resumed"]):
            raise ContractError(
                f"{name}: rank {rank} of a run that is resumed ends in another way than one that is not stopped:\n  "
                + "\n  ".join(lines[:8])
            )
    last = alone[next(iter(CASES))]
    _close(f"{name} with the checkpoint of one process", last, ranks[0]["taken over"], tolerance)
    _close(f"one process with the checkpoint of {name}", last, back, tolerance)


def alone_strategy() -> Strategy:
    """Make the strategy of a single process."""
    return Strategy()


def train_cases(
    make: Callable[[], Strategy | str], module: Callable[[], TrainModule], folder: str, other: str | None
) -> dict[str, Any]:
    """Train all cases on this rank. If `other` is given, also resume a checkpoint of this run and one of `other`."""
    strategy = make()
    results: dict[str, Any] = {
        "name": strategy if isinstance(strategy, str) else type(made(make, Strategy, "check_strategy")).__name__
    }
    for number, case in enumerate(CASES):
        results[case] = _train(make, module, case, f"{folder}/{number}", None)
    if other is not None:
        first = next(iter(CASES))
        results["whole"] = results[first]["held"]
        results["resumed"] = _train(make, module, first, f"{folder}/resumed", middle(f"{folder}/0"))["held"]
        results["taken over"] = resume(make, module, other, f"{folder}/taken-over")
    return results


def resume(
    make: Callable[[], Strategy | str], module: Callable[[], TrainModule], other: str, folder: str
) -> dict[str, Any]:
    """Resume the first case from a checkpoint that an earlier run of it has saved in the folder `other`."""
    return _train(make, module, next(iter(CASES)), folder, middle(f"{other}/0"))


def middle(folder: str) -> Path:
    """Return the checkpoint in the middle of the first case's second epoch, which has three steps."""
    return next(Path(folder).glob("**/step-00000005-*"))


class Watch(Callback):
    """Callback that keeps the loss of each epoch, and the weights at the end of fit."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.weights: dict[str, Tensor] = {}

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Keep the loss of the epoch."""
        self.losses.append(float(trainer.callback_metrics["loss"]))

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        """Keep the whole weights, on the main process."""
        self.weights = {name: value.clone() for name, value in trainer.strategy.full_model_state().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the losses, for a checkpoint."""
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the losses from a checkpoint."""
        self.losses = state_dict["losses"]


def _train(
    make: Callable[[], Strategy | str], module: Callable[[], TrainModule], case: str, folder: str, start: Path | None
) -> dict[str, Any]:
    settings, length, batch_size = CASES[case]
    seed_process(1 if start is None else 2)
    watch = Watch()
    trainer = Trainer(
        accelerator="cpu",
        strategy=make(),
        max_epochs=3,
        global_batch_size=12,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[watch, ModelCheckpoint(every_n_train_steps=5, save_top_k=-1, save_last=True)],
        **settings,
    )
    trainer.fit(module(), DataLoader(samples(length), batch_size=batch_size, shuffle=True), ckpt_path=start)
    held = comparable(dict(trainer.strategy.local_weights()), folder)
    trainer.strategy.teardown()  # `fit` has called `teardown` already; a second call must be harmless
    return {"losses": watch.losses, "weights": watch.weights, "held": held}


def _close(what: str, right: dict[str, Any], got: dict[str, Any], tolerance: float) -> None:
    far = [abs(one - other) for one, other in zip(right["losses"], got["losses"], strict=False)]
    # The condition is also true if a loss is NaN.
    if len(right["losses"]) != len(got["losses"]) or not all(each <= tolerance for each in far):
        raise ContractError(
            f"{what}: the losses of the epochs are {got['losses']}; those of one process {right['losses']}. Gradients "
            "are to be the mean over all ranks, once per optimizer step, and before they are clipped."
        )
    if right["weights"].keys() != got["weights"].keys():
        names = sorted(right["weights"].keys() ^ got["weights"].keys())
        raise ContractError(f"{what}: full_model_state() has other names than state_dict() of the module: {names}")
    for name, value in right["weights"].items():
        other = got["weights"][name]
        if other.shape != value.shape:
            raise ContractError(
                f"{what}: the weights {name!r} of full_model_state() have the shape {tuple(other.shape)}; those of one "
                f"process {tuple(value.shape)}. Gather what is cut over the ranks."
            )
        if not ((other - value).abs() <= tolerance).all():  # the condition is also true if a weight is NaN
            raise ContractError(
                f"{what}: the weights {name!r} differ from those of one process by more than {tolerance}"
            )
