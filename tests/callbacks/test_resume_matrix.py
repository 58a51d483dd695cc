"""Every callback: killed by SIGKILL in the middle of an epoch and resumed, the run ends with the same bits.

`make test` combines many callbacks in one run, under two strategies. The whole matrix, each callback by itself on one
rank, on two under ddp and on two under fsdp, takes some minutes:

    python -m tests.callbacks.test_resume_matrix [one|ddp|fsdp ...] [CALLBACK...]
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import instep.callbacks as room
from instep import Callback, Trainer
from instep.testing import check_callback
from instep.testing.runs import OF_THE_MACHINE, Net, differences, ends_of
from tests.helpers.spawn import RanksFailed, run_ranks

SETUPS = {"one": ("auto", 1), "ddp": ("ddp", 2), "fsdp": ("fsdp", 2)}
COMBINED = ("EMAWeightAveraging", "EarlyStopping", "GradientMonitor", "LearningRateMonitor", "SpikeDetection", "Timer")


class Kill(Callback):
    """Kills its process in the middle of the second epoch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.position.epoch == 1 and batch_idx == max(1, trainer.num_training_batches // 2):
            os.kill(os.getpid(), signal.SIGKILL)


def _finetuning() -> Callback:
    class Later(room.BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.backbone)

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.backbone, optimizer)

    return Later()


def _writer() -> Callback:
    class Writer(room.BasePredictionWriter):
        def write_on_batch_end(self, *_: Any) -> None: ...

    return Writer()


def _quantization() -> Callback:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig
    from torchao.quantization.granularity import PerGroup

    config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(8))
    return room.QuantizationAwareTraining(config, start_epoch=1, convert_at_end=False)


class _Trial:
    """What `OptunaPruning` needs of a trial that is never pruned."""

    number = 0

    def __init__(self) -> None:
        self.study = type("Study", (), {"directions": ["minimize"], "_is_multi_objective": lambda self: False})()

    def report(self, value: float, step: int) -> None: ...

    def should_prune(self) -> bool:
        return False

    def set_user_attr(self, key: str, value: Any) -> None: ...


def _called(name: str, *args: Any, **kwargs: Any) -> Callable[[Path], Callback]:
    return lambda folder: getattr(room, name)(*args, **kwargs)


CASES: dict[str, Callable[[Path], Callback]] = {
    "BackboneFinetuning": _called("BackboneFinetuning", unfreeze_backbone_at_epoch=1),
    "BaseFinetuning": lambda folder: _finetuning(),
    "BasePredictionWriter": lambda folder: _writer(),
    "BatchSizeFinder": _called("BatchSizeFinder", init_val=4, max_trials=1, steps_per_trial=2),
    "EMAWeightAveraging": _called("EMAWeightAveraging", decay=0.8),
    "EarlyStopping": _called("EarlyStopping", "val_loss", patience=9),
    "GradientAccumulationScheduler": _called("GradientAccumulationScheduler", {0: 1, 1: 2}),
    "ImageSampler": _called("ImageSampler", sample_fn=lambda module, batch: {}),
    "LambdaCallback": _called("LambdaCallback", on_train_epoch_end=lambda trainer, module: None),
    "LearningRateFinder": _called("LearningRateFinder", num_training_steps=13, max_lr=0.1),
    "ModelCheckpoint": _called("ModelCheckpoint", monitor="val_loss", save_top_k=2),
    "ModelPruning": _called("ModelPruning", "l1_unstructured", amount=0.2),
    "OnExceptionCheckpoint": lambda folder: room.OnExceptionCheckpoint(folder / "failed"),
    "OptunaPruning": lambda folder: room.OptunaPruning(_Trial(), monitor="val_loss"),
    "PredictionWriter": lambda folder: room.PredictionWriter(folder / "predictions"),
    "QuantizationAwareTraining": lambda folder: _quantization(),
    "ReplicaCheck": _called("ReplicaCheck", every_n_steps=3),
    "SpikeDetection": _called("SpikeDetection", warmup=100),
    "StochasticWeightAveraging": _called("StochasticWeightAveraging", 0.01, swa_epoch_start=1),
    "ThroughputMonitor": _called("ThroughputMonitor", batch_size_fn=lambda batch: len(batch[0])),
    "Timer": _called("Timer", "00:01:00:00"),
}
"""What makes each callback; those that are not here are made without arguments."""


def all_callbacks() -> list[str]:
    """Return the names of the room's callbacks."""
    names = [
        name for name in room.__all__ if name not in ("Callback", "RayReport", "WandbSweep")
    ]  # ask for their services
    return [name for name in names if inspect.isclass(made := getattr(room, name)) and issubclass(made, Callback)]


def train(names: tuple[str, ...], folder: str, strategy: str, devices: int, killed: bool, resumed: bool) -> Any:
    """Train with some callbacks; return all that the run ends with, on this rank."""
    torch.manual_seed(1)
    where = Path(folder)
    made = [CASES.get(name, _called(name))(where) for name in names]
    module = Net()
    bars = any(isinstance(callback, room.ProgressBar) for callback in made)
    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        callbacks=[*made, room.ModelCheckpoint(every_n_train_steps=1, save_last=True), *([Kill()] if killed else [])],
        logger="csv",
        log_every_n_steps=2,
        num_sanity_val_steps=0,
        enable_progress_bar=bars,
        enable_model_summary=any(isinstance(callback, room.ModelSummary) for callback in made),
        default_root_dir=folder,
    )
    trainer.fit(module, ckpt_path="auto" if resumed else None)
    assert (trainer.resume_report is not None) == resumed
    extra = {
        "callbacks": {callback.state_key: callback.state_dict() for callback in made},
        "logged": _logged(where) if trainer.is_global_zero else [],
    }
    for callback in made:
        if isinstance(callback, room.WeightAveraging):
            extra["live"] = callback._live
    return ends_of(trainer, extra, where)


def _logged(folder: Path) -> list[str]:
    """Return the rows of the csv logger whose columns do not depend on the machine."""
    rows: list[str] = []
    for path in sorted(folder.glob("**/metrics.csv")):
        head, *lines = path.read_text().splitlines()
        kept = [index for index, name in enumerate(head.split(",")) if not re.search(OF_THE_MACHINE, name)]
        rows += [",".join(line.split(",")[index] for index in kept) for line in (head, *lines)]
    return rows


def results_of(runs: tuple[tuple[str, tuple[str, ...]], ...], folder: str) -> dict[str, Any]:
    """Train each run whole, and resume what was killed, in one set of ranks; an error is the result."""
    warnings.simplefilter("ignore")
    ends: dict[str, Any] = {}
    for setup, names in runs:
        strategy, devices = SETUPS[setup]
        key = "+".join(names)
        for part in ("whole", "killed"):
            try:
                where = f"{folder}/{setup}-{key}/{part}"
                ends[f"{setup} {key} {part}"] = train(names, where, strategy, devices, False, part == "killed")
            except Exception as error:
                traceback.print_exc()
                ends[f"{setup} {key} {part}"] = f"{type(error).__name__}: {str(error)[:400]}"
    return ends


def kill(setup: str, names: tuple[str, ...], folder: str) -> None:
    """Train until all ranks are killed."""
    strategy, devices = SETUPS[setup]
    where = f"{folder}/{setup}-{'+'.join(names)}/killed"
    with suppress(RanksFailed):
        run_ranks(_train_until_killed, devices, names, where, strategy, devices, others_s=20.0)


def _train_until_killed(names: tuple[str, ...], where: str, strategy: str, devices: int) -> None:
    warnings.simplefilter("ignore")
    train(names, where, strategy, devices, True, False)


def compare(cases: list[tuple[str, tuple[str, ...]]], folder: str) -> dict[tuple[str, str], list[str]]:
    """Kill and resume cases, all on as many ranks; return what differs from the runs that were not killed."""
    for setup, names in cases:
        kill(setup, names, folder)
    (devices,) = {SETUPS[setup][1] for setup, _ in cases}
    ranks = run_ranks(results_of, devices, tuple(cases), folder)
    found: dict[tuple[str, str], list[str]] = {}
    for setup, names in cases:
        key = "+".join(names)
        lines = []
        for rank, ends in enumerate(ranks):
            whole, resumed = ends[f"{setup} {key} whole"], ends[f"{setup} {key} killed"]
            if isinstance(whole, str):
                lines = [f"refused: {whole}"]
                break
            lines += [f"rank {rank}{line}" for line in differences(whole, resumed)]
        found[setup, key] = lines
    return found


@pytest.mark.dist
@pytest.mark.campaign
def test_combined_callbacks_end_with_the_same_bits(tmp_path):
    found = compare([("ddp", COMBINED), ("fsdp", COMBINED)], str(tmp_path))
    assert [lines for lines in found.values() if lines] == []
    for setup in ("ddp", "fsdp"):
        assert list(tmp_path.glob(f"{setup}-*/killed/**/manifest.json"))


@pytest.mark.parametrize("name", COMBINED)
def test_a_callback_with_a_state_keeps_the_contract(name, tmp_path):
    check_callback(lambda: CASES.get(name, _called(name))(tmp_path))


def test_every_callback_can_be_made(tmp_path):
    assert set(CASES) >= {name for name in all_callbacks() if _needs_arguments(getattr(room, name))}


def _needs_arguments(cls: type) -> bool:
    parameters = inspect.signature(cls).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in kinds for p in parameters)


def run_all(words: list[str]) -> int:
    """Run the matrix, or the rows and columns that are named; print one line for each cell, and the counts."""
    setups = [word for word in words if word in SETUPS] or list(SETUPS)
    names = [word for word in words if word not in SETUPS] or all_callbacks()
    same = refused = differ = 0
    for setup in setups:
        with tempfile.TemporaryDirectory() as folder:
            for (_, name), lines in compare([(setup, (name,)) for name in names], folder).items():
                verdict = "same bits" if not lines else lines[0] if lines[0].startswith("refused") else "DIFFERS"
                same, refused, differ = (
                    same + (verdict == "same bits"),
                    refused + verdict.startswith("refused"),
                    differ + (verdict == "DIFFERS"),
                )
                print(f"{setup:5} {name:32} {verdict}", *(lines[:6] if verdict == "DIFFERS" else []), sep="\n      ")
    print(f"{same} same bits, {refused} refused, {differ} differ")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(run_all(sys.argv[1:]))
