"""Mistakes that beginners make: the first line of each error names the cause, and what to do."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from instep import Accelerator, Trainer
from instep.callbacks import ModelCheckpoint
from instep.distributed import gather
from instep.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DataError,
    DistributedError,
    HookError,
    InstepError,
    SettingError,
    ShapeMismatchError,
    UsageError,
)
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import Toy, WiderToy, loader, quiet, samples


def fit(module: Any, data: Any = None, **settings: Any) -> Trainer:
    trainer = quiet(**{"max_epochs": 2, **settings})
    trainer.fit(module, loader() if data is None else data)
    return trainer


class BackwardTwice(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        loss.backward()
        return loss


class BackwardTwiceLater(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx == 1:
            loss.backward()  # the graph is gone, for the loop's own backward
        return loss


class SumsLosses(Toy):
    total: Any = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.total = self.total + self.loss(batch)
        return self.total


class CarriesState(Toy):
    state: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.layer(batch[0]) + (0 if self.state is None else self.state)
        self.state = out
        return (out * out).mean()


def optimized(make: Callable[[Toy], Any]) -> Toy:
    class Net(Toy):
        def configure_optimizers(self) -> Any:
            return make(self)

    return Net()


def one_cycle(module: Toy) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ReadsTrainer(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.epochs = self.trainer.max_epochs


class Unpacks(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return self.loss((x, y))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        (x, _), *rest = batch  # of another data set
        return x


class ReadsLabel(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss((batch["x"], batch["label"]))


class Ragged(Dataset[Any]):
    """Samples of different lengths, as tensors or as lists."""

    def __init__(self, kind: Callable[[int], Any]) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.kind(2 + index % 3)


class RaggedStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (torch.ones(2 + index % 3) for index in range(8))


class LockedStream(RaggedStream):
    def __init__(self) -> None:
        self.lock = threading.Lock()


def local_dataset() -> Dataset[Any]:
    class Local(TensorDataset):
        pass

    return Local(torch.ones(4, 4))


def saved_by_trainer() -> Path:
    return fit(Toy()).save_checkpoint("toy.ckpt")


def load_other_size() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare_model(nn.Linear(2, 1))
    accelerator.save_state("state")
    accelerator.free_memory()
    accelerator.prepare_model(nn.Linear(3, 1))
    try:
        accelerator.load_state("state")
    finally:
        accelerator.end_training()


def validate(module: Toy, data: Any) -> None:
    quiet().validate(module, data)


def accelerated(call: Callable[[Accelerator, nn.Module], Any]) -> None:
    accelerator = Accelerator(cpu=True)
    try:
        call(accelerator, accelerator.prepare_model(nn.Linear(2, 1)))
    finally:
        accelerator.end_training()


def loss_of(model: nn.Module) -> Any:
    return model(torch.ones(3, 2)).mean()


ADAM = torch.optim.Adam
SPAWNED: Any = {"batch_size": 4, "multiprocessing_context": "spawn"}
UNSTACKABLE = r"the samples of a batch have different (sizes, such as \[2\] and \[3\]|lengths),.*collate_fn that pads"

MISTAKES: dict[str, tuple[Callable[[], Any], type[InstepError], str]] = {
    "backward in training_step": (
        lambda: fit(BackwardTwice()),
        UsageError,
        "BackwardTwice.training_step has called backward on the loss itself.*automatic_optimization = False.*batch_idx",
    ),
    "backward in a later training_step": (
        lambda: fit(BackwardTwiceLater()),
        UsageError,
        "BackwardTwiceLater.training_step has called backward.*from the backward, epoch 0, batch_idx 1; the batch is",
    ),
    "losses summed with their graphs": (
        lambda: fit(SumsLosses()),
        UsageError,
        r"values of an earlier batch.*\.detach\(\).*batch_idx 1",
    ),
    "a state carried with its graph, accumulated": (
        lambda: fit(CarriesState(), accumulate_grad_batches=2),
        UsageError,
        r"values of an earlier batch.*\.detach\(\)",
    ),
    "parameters without ()": (
        lambda: fit(optimized(lambda net: ADAM(net.parameters))),
        HookError,
        r"Net.configure_optimizers: Adam\(params=...\) got the method parameters itself; call it: parameters\(\)",
    ),
    "the module for its parameters": (
        lambda: fit(optimized(lambda net: torch.optim.SGD(net, lr=0.1))),  # pyright: ignore[reportArgumentType]
        HookError,
        r"SGD\(params=...\) got a module, Net; give it that module's .parameters\(\)",
    ),
    "a learning rate out of YAML": (
        lambda: fit(optimized(lambda net: torch.optim.AdamW(net.parameters(), lr="1e-3"))),  # pyright: ignore
        HookError,
        "AdamW got lr='1e-3', a text; give it a number",
    ),
    "a schedule shorter than the run": (
        lambda: fit(optimized(one_cycle)),
        HookError,
        "OneCycleLR has total_steps=2, and the run takes more steps.*estimated_stepping_batches",
    ),
    "the trainer before a run": (ReadsTrainer, UsageError, "ReadsTrainer is not attached.*after its __init__.*setup"),
    "a batch of one tensor for two": (
        lambda: fit(Unpacks(), DataLoader(torch.ones(8, 4), batch_size=4)),
        DataError,
        r"Unpacks.training_step: `x, y = batch` does not fit the batch, which is float32\[4, 4\] \(too many values",
    ),
    "a batch of three in validation": (
        lambda: validate(Unpacks(), DataLoader(TensorDataset(*[torch.ones(8, 3)] * 3), batch_size=4)),
        DataError,
        r"Unpacks.validation_step: `\(x, _\), \*rest = batch .*\[float32\[4, 3\], float32\[4, 3\], float32\[4, 3\]\]",
    ),
    "a key that the batch does not have": (
        lambda: fit(ReadsLabel(), [{"x": torch.ones(4, 4), "y": torch.ones(4)}]),
        DataError,
        r"ReadsLabel.training_step reads batch\['label'\], and the batch has the keys 'x', 'y'",
    ),
    "an optimizer for the model": (
        lambda: accelerated(
            lambda a, m: a.prepare_optimizer(torch.optim.SGD(m.parameters(), lr=0.1))(torch.ones(3, 2))
        ),
        UsageError,
        r"SGD was called as a model is.*model, optimizer, loader = accelerator.prepare",
    ),
    "a dataset for a loader": (
        lambda: fit(Toy(), samples()),
        DataError,
        r"the train loader must be iterable.* got a \w+: a dataset. Wrap it: DataLoader\(dataset, batch_size=...\)",
    ),
    "tensors of other sizes": (
        lambda: fit(Toy(), DataLoader(Ragged(torch.ones), batch_size=2)),
        ShapeMismatchError,
        UNSTACKABLE,
    ),
    "tensors of other sizes in a worker": (
        lambda: fit(Toy(), DataLoader(Ragged(torch.ones), batch_size=2, num_workers=1)),
        ShapeMismatchError,
        UNSTACKABLE,
    ),
    "lists of other lengths": (
        lambda: fit(Toy(), DataLoader(Ragged(lambda size: [1.0] * size), batch_size=2)),
        ShapeMismatchError,
        UNSTACKABLE,
    ),
    "a stream of other sizes": (
        lambda: fit(Toy(), DataLoader(RaggedStream(), batch_size=2)),
        ShapeMismatchError,
        UNSTACKABLE,
    ),
    "a loop's data of other sizes": (
        lambda: accelerated(lambda own, _: list(own.prepare(DataLoader(Ragged(torch.ones), batch_size=2)))),
        ShapeMismatchError,
        UNSTACKABLE,
    ),
    "backward of a number": (
        lambda: accelerated(lambda own, model: own.backward(loss_of(model).item())),
        UsageError,
        r"accelerator.backward got a float: it takes the loss as a tensor",
    ),
    "backward of a cut loss": (
        lambda: accelerated(lambda own, model: own.backward(loss_of(model).detach())),
        UsageError,
        r"accelerator.backward got a loss without a graph \(requires_grad is False\): ",
    ),
    "clipping a model": (
        lambda: accelerated(lambda own, model: own.clip_grad_norm_(model, 1.0)),  # pyright: ignore
        SettingError,
        r"accelerator.clip_grad_norm_ takes parameters, such as model.parameters\(\); got Linear",
    ),
    "clipping the method": (
        lambda: accelerated(lambda own, model: own.clip_grad_value_(model.parameters, 1.0)),  # pyright: ignore
        SettingError,
        "accelerator.clip_grad_value_ takes parameters, .* got method",
    ),
    "a lambda for workers that are spawned": (
        lambda: fit(Toy(), DataLoader(samples(), num_workers=1, collate_fn=lambda rows: rows, **SPAWNED)),
        DataError,
        "workers are started by spawn.*its collate_fn, .*<lambda>, cannot be pickled: .*at the top of a module",
    ),
    "a local data set for workers that are spawned": (
        lambda: fit(Toy(), DataLoader(local_dataset(), num_workers=1, **SPAWNED)),
        DataError,
        "its dataset, local_dataset.<locals>.Local, cannot be pickled",
    ),
    "a stream with a lock for workers that are spawned": (
        lambda: fit(Toy(), DataLoader(LockedStream(), num_workers=1, **SPAWNED)),
        DataError,
        "its dataset, LockedStream, cannot be pickled",
    ),
    "another model for the Trainer's weights": (
        lambda: quiet(max_epochs=3).fit(WiderToy(), loader(), ckpt_path=saved_by_trainer()),
        CheckpointError,
        r'do not fit WiderToy: .*Missing key\(s\) .*"more.weight", "more.bias"\. Set strict_loading = False',
    ),
    "another size for the loop's weights": (
        load_other_size,
        CheckpointError,
        r"do not fit .*size mismatch for weight: .*resume=Resume\(strict=False\)",
    ),
    "the best of a run that ranked nothing": (
        lambda: quiet().test(Toy(), loader(), ckpt_path=ModelCheckpoint(monitor="val_loss").best_model_path),
        CheckpointNotFoundError,
        "ckpt_path='' is empty. A ModelCheckpoint's best_model_path is, where it has saved nothing",
    ),
    "an argument of old scripts": (
        lambda: Accelerator(cpu=True, fp16=True),
        SettingError,
        r"Accelerator\(fp16=...\) is not taken: use mixed_precision='fp16'",
    ),
    "an argument misspelt": (
        lambda: Accelerator(cpu=True, gradient_acumulation_steps=4),
        SettingError,
        "did you mean gradient_accumulation_steps",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step", "ignore:'set_vital' is deprecated", "ignore:Got pickle")
def test_the_first_line_of_an_error_names_the_mistake(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, kind, text = MISTAKES[mistake]
    with pytest.raises(InstepError) as caught:
        call()
    assert isinstance(caught.value, kind)
    assert re.search(text, str(caught.value).split("\n")[0]), str(caught.value)


class Missing(Dataset[Any]):
    """Data set whose third sample cannot be read."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            raise self.error
        return torch.ones(4), torch.ones(())


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (FileNotFoundError(2, "No such file or directory", "images/2.npy"), "'images/2.npy' (in DataLoader worker"),
        (KeyError("label"), "'label' (in DataLoader worker process 0)"),
        (ValueError("a bad sample\nof two lines"), "a bad sample (in DataLoader worker process 0)"),
    ],
    ids=["file", "key", "lines"],
)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_an_error_in_a_worker_begins_with_its_own_text(error: Exception, first: str) -> None:
    with pytest.raises(type(error)) as caught:
        fit(Toy(), DataLoader(Missing(error), batch_size=2, num_workers=1))
    begin, rest = str(caught.value).split("\n", 1)
    assert first in begin
    assert rest.startswith(f"Caught {type(error).__name__} in DataLoader worker process 0.\nOriginal Traceback")


class UnusedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Any) -> Any:
        return self.used(x)


def disagree(mistake: str) -> str:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    try:
        if mistake == "sizes":
            accelerator.gather({"loss": torch.ones(1), "logits": torch.ones(2 + rank % 2, 3)})
        elif mistake == "calls" and rank == 0:
            accelerator.gather(torch.ones(1))
        elif mistake == "calls":
            gather([torch.ones(1), torch.ones(1)])
        else:
            model = accelerator.prepare(UnusedLayer())
            for _ in range(2):
                accelerator.backward(loss_of(model))
    except (DistributedError, HookError) as error:
        return str(error).split("\n")[0]
    return ""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("mistake", "ranks", "text"),
    [
        ("sizes", 3, r"about what they give to gather: ranks 0, 2 with \['logits'\].*\(2, 3\); rank 1 with .*\(3, 3\)"),
        ("calls", 2, r"give to gather: rank 0 with tensor: .*; rank 1 with \[0\]"),
        ("unused", 2, r"took no part in the last loss.*: unused.weight, unused.bias\. .*find_unused_parameters=True"),
    ],
)
def test_what_differs_between_ranks_is_in_the_first_line(mistake: str, ranks: int, text: str) -> None:
    for line in run_ranks(disagree, ranks, mistake):
        assert re.search(text, line), line
