"""Places that work but mean something else: each is noted, and the guides have the same list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from instep.cli.migrate import changes
from instep.cli.migrate.changes import Change
from instep.cli.migrate.rewrite import migrate

DOCS = Path(__file__).parents[3] / "docs/porting"
_L = "import lightning as L\n"
_A = "from accelerate import Accelerator\nfrom accelerate import utils\na = Accelerator()\n"
_HOMES = {  # of what is no callback
    **{f"{name}Logger": "L.pytorch.loggers." for name in ("CSV", "Comet", "MLFlow", "TensorBoard", "Wandb")},
    **dict.fromkeys(("AdvancedProfiler", "PyTorchProfiler"), "L.pytorch.profilers."),
    "FSDPStrategy": "L.pytorch.strategies.", "Tuner": "L.pytorch.tuner.", "Trainer": "L.", "seed_everything": "L.",
    "CombinedLoader": "L.pytorch.utilities.",
}  # fmt: skip
GAN = """import lightning as L

class Gan(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        if self.global_step % 2 == 0:
            first.step()

trainer = L.Trainer(max_steps=100, min_steps=10)
saver = L.pytorch.callbacks.ModelCheckpoint(every_n_train_steps=10)
"""
SAMPLES = {
    changes.SEVERAL_OPTIMIZERS: GAN,
    **dict.fromkeys(changes.COUNTERS, GAN),
    '"frequency":': _L + "def configure_optimizers(s): return {'frequency': 2}",
    '"lightning_logs"': _L + "f = 'out/lightning_logs/version_0'",
    '".ckpt"': _L + "if os.path.exists('x.ckpt'): L.Trainer().fit(m, ckpt_path='x.ckpt')",
    "Accelerator.save_state": _A + "os.listdir('x')\na.save_state('x')",
    "EarlyStopping": _L + "L.Trainer(min_epochs=2, callbacks=[L.pytorch.callbacks.EarlyStopping('a')])",
    "ModelCheckpoint(every_n_train_steps=)": _L
    + "L.pytorch.callbacks.ModelCheckpoint(monitor='a', every_n_train_steps=2)",
    "CombinedLoader": _L + "for b, i, d in L.pytorch.utilities.CombinedLoader(x): ...",
    "Strategy.num_processes": _L + "t = L.Trainer()\nt.strategy.num_processes",
    "TrainModule.strict_loading =": _L
    + "class M(L.LightningModule):\n  def on_save_checkpoint(s, c): ...\n  def f(self): self.strict_loading = False",
    "TrainModule.save_hyperparameters": _L
    + "import omegaconf\nclass M(L.LightningModule):\n  def __init__(self, net): self.save_hyperparameters()",
    "a scheduler that `prepare` gets": _A + "a.prepare(scheduler)",
    changes.MULTIPLIED: _A + "get_scheduler('linear', num_training_steps=args.n * a.num_processes)",
    changes.GATHERED: _A + "for b in x: a.gather(b)",
    changes.NORM: _A + "norm = a.clip_grad_norm_(p, 1)",
    changes.LIFTED: _A + "if a.is_main_process:\n  a.save_state('x')",
    changes.SKIPPED: _A + "a.load_state()\nfor i, b in enumerate(x):\n  if i < resume_step:\n    continue",
    "Accelerator.unwrap_model": _A + "a.unwrap_model(torch.compile(m))",
    "find_executable_batch_size(reduce_batch_size_fn=)": _A
    + "utils.find_executable_batch_size(f, reduce_batch_size_fn=g)",
}  # fmt: skip
EVERY = [change for page in changes.PAGES.values() for change in page]


def sample(change: Change) -> str:
    """Return a script with the place, made of how the list writes it."""
    if change.where in SAMPLES:
        return SAMPLES[change.where]
    of_lightning = change in changes.LIGHTNING
    if change.where.startswith("def "):
        body = {"def on_train_batch_start": "return -1", "def on_load_checkpoint": "c['optimizer_states']"}
        line = body.get(change.where, "self.lr_schedulers()")
        return _L + f"class M(L.LightningModule):\n  {change.where}(self, c): {line}"
    values = ["x", "2", "1", "0", "True", "False", "'ddp_spawn'", "'fsdp'", "'transformer-engine'"]
    value = next(value for value in values if re.search(change.having, value))
    owner, _, rest = change.where.replace("(", ".(").partition(".")
    start, home = (
        (_L, _HOMES.get(owner, "L.pytorch.callbacks."))
        if of_lightning
        else (_A, "" if owner == "Accelerator" else "utils.")
    )
    if rest.startswith("("):
        return f"{start}{home}{owner}({rest[1:-2]}={value})"
    if owner == "TrainModule":
        method, _, argument = rest.partition(".(")
        return f"{start}class M(L.LightningModule):\n  def f(self): self.{method}('a', 1, {argument[:-2]}={value})"
    if owner == "DistributedType":
        return f"{start}a.distributed_type == utils.{change.where}"
    if "." in rest:
        method, _, argument = rest.partition(".(")
        return f"{start}a.{method}(x, {argument[:-2]}={value})"
    if rest:
        made = f"{home}{owner}()" if of_lightning else "Accelerator()"
        return f"{start}a = {made}\na.{rest}{f' {value}' if rest.endswith('=') else ''}"
    return f"{start}{home}{owner}"


@pytest.mark.parametrize("change", EVERY, ids=lambda change: f"{change.where} {change.having}".strip())
def test_each_change_is_noted_where_a_script_has_it(change: Change) -> None:
    script = sample(change)
    text = change.text[0].lower() + change.text[1:]
    kinds = [finding.kind for finding in migrate(script)[1] if finding.text.partition(" (also in")[0].endswith(text)]
    assert kinds, script
    assert set(kinds) == {"note"}


@pytest.mark.parametrize("page", changes.PAGES)
def test_the_first_table_of_the_guide_is_the_list(page: str) -> None:
    assert not [change.text for change in changes.PAGES[page] if "](" in change.text]  # a note is no Markdown
    guide = (DOCS / f"{page}.md").read_text().partition("## What differs")[2]
    first = re.search(r"(^\|[^\n]*\n)+", guide, re.MULTILINE)
    assert first is not None
    assert first[0] == changes.table(page) + "\n"


def test_what_counts_otherwise_is_noted_where_it_stands() -> None:
    found = {(one.line, one.kind, one.text.partition(":")[0]) for one in migrate(GAN)[1] if "several optim" in one.text}
    assert found == {
        (10, "note", "self.global_step"),
        (13, "note", "max_steps"),
        (13, "note", "min_steps"),
        (14, "note", "every_n_train_steps"),
    }


@pytest.mark.parametrize(
    ("old", "new", "is_several"),
    [
        ("first, second = self.optimizers()", "first = self.optimizers()", False),
        ("first, second = self.optimizers()", "both = self.optimizers()\n        first = both[0]", True),
        ("first, second = self.optimizers()", "first = self.optimizers()[1]", True),
        ("first, second = self.optimizers()", "for opt in self.optimizers(): opt.step()", True),
        ("first, second = self.optimizers()", "opts = self.optimizers()\n        a, b = opts", True),
        (
            "            first.step()",
            "            for _ in range(5): opt.step()",  # one optimizer, several times in a batch
            True,
        ),
        ("automatic_optimization = False", "automatic_optimization = True", False),
    ],
)
def test_several_optimizers_are_known_by_how_a_script_takes_them(old: str, new: str, is_several: bool) -> None:
    notes = [one for one in migrate(GAN.replace(old, new))[1] if "several optimizers" in one.text]
    assert (notes != []) == is_several


def test_a_module_alone_says_what_its_trainer_counts() -> None:
    alone = GAN.partition("trainer =")[0].replace("self.global_step % 2 == 0", "True")
    [note] = [one for one in migrate(alone)[1] if "max_steps" in one.text]
    assert (note.line, note.kind) == (6, "note")


def test_arguments_in_a_dict_are_noted_as_those_of_a_call() -> None:
    cli = "from lightning.pytorch.cli import LightningCLI\nLightningCLI(M, trainer_defaults={'min_steps': 4})"
    for script in (cli, _L + "k = dict(min_steps=4)\nL.Trainer(**k)", _L + "k = {'min_steps': 4}\nL.Trainer(**k)"):
        assert [one.kind for one in migrate(script)[1] if "min_epochs=1" in one.text] == ["note"]


OLD = """import accelerate
from accelerate import Accelerator
from packaging import version

if version.parse(accelerate.__version__) >= version.parse("0.16.0"):
    pass
accelerator = Accelerator()
accelerator.native_amp = False
"""


def test_a_version_test_and_an_attribute_that_the_script_sets_are_no_todo() -> None:
    assert [(one.line, one.kind) for one in migrate(OLD)[1]] == [(5, "note"), (8, "note")]


@pytest.mark.parametrize("base", ["LightningModule", "Callback"])
def test_a_hook_of_lightning_1_that_nothing_calls_warns_as_the_trainer_does(base: str) -> None:
    [found] = migrate(f"{_L}class C(L.{base}):\n  def on_epoch_end(self): ...")[1]
    assert (found.line, found.kind) == (3, "warns")
    assert "on_train_epoch_end" in found.text


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("from lightning.fabric.plugins import CheckpointIO", "reads and writes checkpoints itself"),
        ("from lightning.fabric.plugins.environments import ClusterEnvironment", "environment is read by itself"),
        ("from lightning.fabric.plugins.precision import MixedPrecision", "precision='bf16-mixed'"),
        ("from lightning.fabric.accelerators import CPUAccelerator", 'accelerator="cpu"'),
        ("from lightning.fabric.utilities.cloud_io import get_filesystem", "fsspec"),
        ("from lightning_fabric.utilities.types import _Stateful", "internal part of Lightning"),
        ("from lightning.pytorch.trainer.connectors.x import _Connector", "internal part of Lightning"),
        ("from lightning.fabric.wrappers import _FabricModule", "instep.Accelerator is for handwritten loops"),
    ],
)
def test_a_name_without_a_counterpart_says_what_its_part_of_lightning_became(line: str, text: str) -> None:
    [found] = migrate(line)[1]
    assert found.kind == "todo"
    assert text in found.text
    assert ("handwritten" in found.text) == ("_FabricModule" in line)
