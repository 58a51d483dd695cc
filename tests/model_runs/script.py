"""Writes a program of at most 40 lines that shows a run, without the model."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace

from tests.model.checkpoints import Checkpoints
from tests.model.data import Data
from tests.model.run import Case, Settings


def saver_of(given: Checkpoints) -> str:
    """Write the ModelCheckpoint of a case."""
    arguments = changed(replace(given, folder="checkpoints")).partition("(")[2]
    return f"ModelCheckpoint(tempfile.mkdtemp(), {arguments}"


def changed(thing: object) -> str:
    """Write a dataclass as Python, without what is as it is by default."""
    parts = []
    for field in fields(thing):  # pyright: ignore[reportArgumentType]
        value = getattr(thing, field.name)
        default = field.default if field.default is not MISSING else None
        if repr(value) != repr(default):
            parts.append(f"{field.name}={changed(value) if hasattr(value, '__dataclass_fields__') else repr(value)}")
    return f"{type(thing).__name__}({', '.join(parts)})"


def data_of(name: str, data: Data | None) -> str:
    """Write the lines that make a loader."""
    if data is None:
        return f"{name} = None"
    if data.kind == "list":
        batches = [list(batch) for batch in data.batches(data.in_sequence())]
        return f"{name} = {batches}\n{name} = [torch.tensor(batch) for batch in {name}]"
    if data.kind == "map":
        options = f"{data.batch_size}, shuffle={data.shuffle}, drop_last={data.drop_last}"
        return f"{name} = DataLoader(range({data.first}, {data.first + data.samples}), {options})"
    length = "" if data.claims is None else f', "__len__": lambda self: {data.claims}'
    numbers = f"iter(range({data.first}, {data.first + data.samples}))"
    return (
        f'{name} = type("Stream", (IterableDataset,), {{"__iter__": lambda self: {numbers}{length}}})()\n'
        f"{name} = DataLoader({name}, {data.batch_size}, drop_last={data.drop_last})"
    )


def script(case: Case) -> str:
    """Return a program without the model that prints the hooks of the case's run."""
    defaults = vars(Settings())
    given = {name: value for name, value in vars(case.settings).items() if repr(value) != repr(defaults[name])} | {
        "trigger_every": 1
    }
    return _SCRIPT.format(
        case=changed(case),
        data="\n".join(data_of(name, getattr(case, name)) for name in ("train", "val")),
        settings=", ".join(f"{name}={value!r}" for name, value in given.items()),
        samples=max(1, case.train.samples),
        stop=case.stop_at,
        values=list(case.values),
        saver="Callback()" if case.checkpoints is None else saver_of(case.checkpoints),
    )


_SCRIPT = """\
# {case}
import tempfile
import torch
from torch.utils.data import DataLoader, IterableDataset
from instep import Callback, Trainer, TrainModule
from instep.callbacks import ModelCheckpoint

class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros({samples}))
    def training_step(self, batch, batch_idx):
        print("training_step", batch.tolist(), batch_idx, "step", self.global_step, "epoch", self.current_epoch)
        return self.weights[batch].mean()
    def validation_step(self, batch, batch_idx):
        self.log("val", {values}[0])
        print("validation_step", batch.tolist(), batch_idx, "step", self.global_step, "epoch", self.current_epoch)
    def on_before_optimizer_step(self, optimizer):
        print("weights", self.weights.grad.tolist(), "rate", optimizer.param_groups[0]["lr"])
    def on_train_epoch_end(self):
        print("on_train_epoch_end")
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)  # and the scheduler of the case

class Stop(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == {stop}:
            trainer.should_stop = True

{data}
trainer = Trainer({settings}, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
    default_root_dir=tempfile.mkdtemp(), callbacks=[Stop(), {saver}])
trainer.fit(Module(), train, val)
print("kept", [callback.saved for callback in trainer.checkpoint_callbacks])
"""

FOR_LIGHTNING = {
    "from instep import Callback": "from lightning.pytorch import Callback",
    ", TrainModule": ", LightningModule",
    "from instep.callbacks": "from lightning.pytorch.callbacks",
    "(TrainModule)": "(LightningModule)",
    "trigger_every=1": "devices=1",
    "[callback.saved for": "[callback.best_model_path for",
}
"""What is another thing in a script for PyTorch Lightning."""


def script_for_lightning(case: Case) -> str:
    """Return the same program for PyTorch Lightning."""
    text = script(replace(case, settings=replace(case.settings, uneven="stop")))  # which is for several ranks
    for ours, theirs in FOR_LIGHTNING.items():
        assert ours in text, ours
        text = text.replace(ours, theirs)
    # A list is several loaders there.
    for name in ("train", "val"):
        text = text.replace(
            f"for batch in {name}]", f"for batch in {name}]\n{name} = DataLoader({name}, batch_size=None)"
        )
    return text
