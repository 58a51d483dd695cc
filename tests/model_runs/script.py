"""Writes a program of at most 40 lines that shows a run, without the model."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace

from tests.model.checkpoints import Checkpoints
from tests.model.data import Combined, Data
from tests.model.logs import Log
from tests.model.run import Case, Settings
from tests.model.stopping import Stopping
from tests.model_runs.modules import size_of


def saver_of(given: Checkpoints) -> str:
    """Write the ModelCheckpoint of a case."""
    arguments = changed(replace(given, folder="checkpoints")).partition("(")[2]
    return f"ModelCheckpoint(root + '/{given.folder}', {arguments}"


def stopping_of(given: Stopping) -> str:
    """Write the EarlyStopping of a case."""
    options = changed(replace(given, monitor="val")).partition("(")[2]
    return f"EarlyStopping({given.monitor!r}, {options}"


def changed(thing: object) -> str:
    """Write a dataclass as Python, without what is as it is by default."""
    parts = []
    for field in fields(thing):  # pyright: ignore[reportArgumentType]
        value = getattr(thing, field.name)
        default = field.default if field.default is not MISSING else None
        if repr(value) != repr(default) and repr(value) != f"{type(value).__name__}()":
            parts.append(f"{field.name}={written(value)}")
    return f"{type(thing).__name__}({', '.join(parts)})"


def written(value: object) -> str:
    """Write a value of a dataclass as Python."""
    if isinstance(value, tuple) and value and hasattr(value[0], "__dataclass_fields__"):
        return f"({', '.join(map(changed, value))},)"
    return changed(value) if hasattr(value, "__dataclass_fields__") else repr(value)


STEPS = ("training_step", "validation_step")


def logs_of(case: Case, hook: str) -> str:
    """Write the calls of `self.log` in a method."""
    lines: list[str] = []
    for call in (call for call in case.logs if call.hook == hook):
        given = {name: getattr(call, name) for name in LOG_ARGUMENTS if getattr(call, name) != getattr(Log(), name)}
        options = "".join(f", {name}={value!r}" for name, value in given.items())
        if call.metric is not None:  # the objects stand in a dict: one for each word
            for kind in ("mean", "sum") if call.metric == "both" else (call.metric,):
                name = f"pair_{kind}" if call.metric == "both" else call.name
                objects = f"self.objects[{kind!r}]"
                lines += [f"{objects}(batch.float()), self.log({name!r}, {objects}{options})"]
        elif hook in STEPS:
            nan = "" if call.nan_at is None else f" * (float('nan') if batch_idx == {call.nan_at} else 1)"
            if_due = "" if call.every == 1 else f"if (batch_idx + 1) % {call.every} == 0: "
            lines += [f"{if_due}self.log({call.name!r}, batch.float().mean(){nan}{options})"]
        else:
            lines += [f"self.log({call.name!r}, float(self.global_step){options})"]
    return "\n".join(f"        {line}" for line in lines)


LOG_ARGUMENTS = ("on_step", "on_epoch", "reduce_fx", "batch_size", "logger", "prog_bar", "sync_dist")


def training_of(case: Case) -> str:
    """Write the rest of `training_step`: the loss, or what is done by hand."""
    given = case.optimization
    mean = "sum(weights[batch].mean() for weights in self.weights)"
    lines = [] if not given.skips else [f"if (batch_idx + 1) % {given.skips} == 0: return None"]
    if (manual := given.manual) is not None:
        loss = mean if manual.both else "self.weights[n][batch].mean()"
        lines += [f"for n, every in enumerate({manual.every[: given.optimizers]}):"]
        lines += [f"    optimizer = self.optimizers(){'[n]' if given.optimizers > 1 else ''}"]
        lines += ["    self.toggle_optimizer(optimizer)"] if manual.toggles else []
        lines += [f"    self.manual_backward({loss} * self.batch_weight / max(1, every))"]
        lines += ["    self.untoggle_optimizer(optimizer)"] if manual.toggles else []
        lines += ["    if every and ((batch_idx + 1) % every == 0 or self.trainer.is_last_batch):"]
        lines += [f"        self.clip_gradients(optimizer, {manual.clip})"] if manual.clip is not None else []
        lines += ["        optimizer.step(), optimizer.zero_grad()"]
    lines += [f"return {mean}" if given.returns == "loss" else f'return {{"loss": {mean}, "number": batch_idx}}']
    return "\n".join(f"        {line}" for line in lines)


def optimizers_of(case: Case) -> str:
    """Write what `configure_optimizers` returns."""
    parts: list[str] = []
    for one in case.schedulers:
        kind = "ReduceLROnPlateau(o[{}], factor=0.5, patience=0)" if one.plateau else "ExponentialLR(o[{}], 0.5)"
        options = f'"interval": {one.interval!r}, "frequency": {one.frequency}, "strict": {one.strict}'
        monitor = f', "monitor": {one.monitor!r}' if one.plateau else ""
        parts += [f'{{"scheduler": torch.optim.lr_scheduler.{kind.format(one.optimizer)}, {options}{monitor}}}']
    return f"return o, [{', '.join(parts)}]" if parts else "return o"


def source_of(data: Data | Combined | None) -> str:
    """Write the loaders of a stage as one expression."""
    if data is None:
        return "None"
    if isinstance(data, Combined):
        parts = [source_of(one) for one in data.loaders]
        if data.given == "list":
            return f"[{', '.join(parts)}]"
        named = ", ".join(f"{name!r}: {part}" for name, part in zip("abc", parts, strict=False))
        return f"{{{named}}}" if data.given == "dict" else f"CombinedLoader({{{named}}}, {data.mode!r})"
    numbers, rest = f"range({data.first}, {data.first + data.samples})", f"num_workers={data.workers}"
    batches = [list(batch) for batch in data.batches(data.in_sequence())]
    if data.kind in ("map", "parted"):
        return f"DataLoader({numbers}, {data.batch_size}, shuffle={data.shuffle}, drop_last={data.drop_last}, {rest})"
    if data.kind == "batches":
        places = [[sample - data.first for sample in batch] for batch in batches]
        return f"DataLoader({numbers}, batch_sampler={places}, {rest})"
    if data.kind == "iterable":
        length = "" if data.claims is None else f', "__len__": lambda self: {data.claims}'
        stream = f'type("Stream", (IterableDataset,), {{"__iter__": lambda self: iter({numbers}){length}}})()'
        return f"DataLoader({stream}, {data.batch_size}, drop_last={data.drop_last}, {rest})"
    tensors = f"torch.tensor(batch) for batch in {batches}"
    if data.kind == "again":
        return f"{'Again' if data.claims is None else 'SizedAgain'}([{tensors}])"
    return f"({tensors})" if data.kind == "generator" else f"[{tensors}]"


def script(case: Case) -> str:
    """Return a program without the model that prints the hooks of the case's run."""
    defaults = vars(Settings())
    given = {name: value for name, value in vars(case.settings).items() if repr(value) != repr(defaults[name])} | {
        "trigger_every": 1
    }
    objects = any(call.metric for call in case.logs)
    stages = [case.train] if case.val is None else [case.train, case.val]
    again = any(one.kind == "again" for stage in stages for one in stage.loaders)
    several = any(isinstance(stage, Combined) for stage in stages)
    data = [_AGAIN] if again else []
    data += [f"train = {source_of(case.train)}", f"val = {source_of(case.val)}"]
    if case.source == "hooks":  # epoch 0 alone: what the case says of fewer samples is left out
        data.append("Module.train_dataloader, Module.val_dataloader = lambda self: train, lambda self: val")
    return _SCRIPT.format(
        case=changed(case),
        data="\n".join(data),
        combined="from instep.data import CombinedLoader\n" if several else "",
        joined=_JOINED if several else "",
        given="" if case.source == "hooks" else ", train, val",
        settings=", ".join(f"{name}={value!r}" for name, value in given.items()),
        samples=size_of(case.train),
        optimizers=case.optimization.optimizers,
        automatic=case.optimization.manual is None,
        training_logs=logs_of(case, "training_step") + "\n" if logs_of(case, "training_step") else "",
        validation_logs=logs_of(case, "validation_step") + "\n" if logs_of(case, "validation_step") else "",
        other_logs="".join(
            f"    def {hook}(self, *args):\n{logs_of(case, hook)}; super().{hook}(*args)\n"
            for hook in dict.fromkeys(call.hook for call in case.logs if call.hook not in STEPS)
        ),
        training=training_of(case),
        configured=optimizers_of(case),
        stop="" if case.stop_at is None else _STOP.format(step=case.stop_at),
        stopping="Callback" if case.stop_at is None else "Stop",
        objects="\n        self.objects = torch.nn.ModuleDict({name: getattr(torchmetrics, kind)() for name, kind in "
        '{"mean": "MeanMetric", "sum": "SumMetric", "max": "MaxMetric"}.items()})'
        if objects
        else "",
        imports="import torch, torchmetrics" if objects else "import torch",
        values=repr(list(case.values)).replace("nan", "torch.nan"),
        number=len(case.values),
        callbacks=", ".join(
            [
                *([] if case.stopping is None else [stopping_of(case.stopping)]),
                *(saver_of(given) for given in (case.checkpoints, case.second) if given is not None),
            ]
        ),
    )


_STOP = """\
class Stop(Callback):
    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.should_stop or trainer.global_step == {step}

"""
_SCRIPT = """\
# {case}
{imports}, tempfile
from torch.utils.data import DataLoader, IterableDataset
from instep import Callback, Trainer, TrainModule
from instep.callbacks import EarlyStopping, ModelCheckpoint
{combined}
class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros({samples}) for _ in range({optimizers}))
        self.validations, self.automatic_optimization = -1, {automatic}{objects}
    def on_validation_model_zero_grad(self): self.validations += 1
    def training_step(self, batch, batch_idx):
        print("training_step", batch, batch_idx, "step", self.global_step, "epoch", self.current_epoch)
{joined}{training_logs}{training}
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", {values}[self.validations % {number}])
{joined}{validation_logs}        print("validation_step", batch, batch_idx, self.trainer.callback_metrics)
{other_logs}    def on_before_optimizer_step(self, optimizer):
        print("weights", [weights.grad for weights in self.weights], "rate", optimizer.param_groups[0]["lr"])
    def configure_optimizers(self):
        o = [torch.optim.SGD([weights], lr=0.5) for weights in self.weights]
        {configured}

{stop}{data}
root = tempfile.mkdtemp()
trainer = Trainer({settings}, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
    default_root_dir=root, callbacks=[{stopping}(), {callbacks}])
trainer.fit(Module(){given})
print("kept", [callback.saved for callback in trainer.checkpoint_callbacks], dict(trainer.callback_metrics))
"""

_AGAIN = """\
class Again:
    at = 0
    def __init__(self, batches): self.batches = batches
    def __iter__(self):
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]
        self.at = 0
SizedAgain = type("SizedAgain", (Again,), {"__len__": lambda self: len(self.batches)})"""
_JOINED = """\
        parts = batch.values() if isinstance(batch, dict) else [batch] if isinstance(batch, torch.Tensor) else batch
        batch = torch.cat([part for part in parts if part is not None])
"""

FOR_LIGHTNING = {
    "from instep.data import": "from lightning.pytorch.utilities import",
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
