"""`instep migrate`: what scripts become, what is left to do, and that they run and compute the same afterwards."""

from __future__ import annotations

import inspect
import json
import runpy
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from instep.cli.main import main
from instep.cli.migrate import uses
from instep.cli.migrate.rewrite import migrate
from instep.compat import tables
from instep.trainer.settings import check_value
from instep.utils import porting
from tests.helpers.spawn import run_command
from tests.test_public_names import PUBLIC

HERE = Path(__file__).parent
SCRIPTS = {  # what they print when run with Lightning 2.6 and Accelerate 1.15
    "lightning": ["-0.14000395685434341", "0.006721834652125835", "16", "32", "4"],
    "accelerate": ["-0.5252891127020121", "40", "0.0125"],
}

_L = "import lightning as L\n"
_M = _L + "class M(L.LightningModule):\n"
_A = "from accelerate import Accelerator\na = Accelerator()\n"
_STEPS = "from accelerate import Accelerator\na = Accelerator(gradient_accumulation_steps=n)\n"
_CLI = "from lightning.pytorch.cli import LightningCLI\n"


def numbers(printed: str) -> list[float]:
    """What a script said after RESULT."""
    return [float(word) for word in printed.split("RESULT ")[1].splitlines()[0].split()]


@pytest.mark.filterwarnings("ignore:trainer.lightning_module:FutureWarning")
@pytest.mark.parametrize("which", SCRIPTS)
def test_a_whole_script_computes_the_same_afterwards(
    which: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    old = (HERE / f"{which}_script.txt").read_text()
    script.write_text(old)
    assert main(["migrate", str(script)]) == 0
    assert "0 places left to do" in capsys.readouterr().out
    assert script.read_text() == old
    assert main(["migrate", str(script), "--write"]) == 0
    assert "lightning" not in script.read_text().split('"""')[2].lower().replace("lightning_module", "")
    capsys.readouterr()
    runpy.run_path(str(script))["main"](str(tmp_path))
    assert numbers(capsys.readouterr().out) == pytest.approx([float(word) for word in SCRIPTS[which]], rel=1e-6)
    assert main(["migrate", str(script)]) == 0
    assert capsys.readouterr().out == "nothing of Lightning or Accelerate in 1 file\n"


@pytest.mark.slow
@pytest.mark.parametrize("which", SCRIPTS)
def test_the_scripts_to_migrate_run_before_they_are_migrated(which: str, tmp_path: Path) -> None:
    pytest.importorskip(which)
    script = tmp_path / "script.py"
    script.write_text((HERE / f"{which}_script.txt").read_text())
    done = run_command([sys.executable, str(script), str(tmp_path)])
    assert numbers(done.stdout) == pytest.approx([float(word) for word in SCRIPTS[which]], rel=1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "from accelerate import init_empty_weights as empty\nempty()\n",
            "from instep.big_models import init_empty_weights as empty\nempty()\n",
        ),
        ("import lightning as L\nL.LightningModule\n", "import instep\ninstep.TrainModule\n"),
        ("import pytorch_lightning as pl\nx: 'pl.Trainer'\n", "import instep\nx: 'instep.Trainer'\n"),
        ("import lightning.pytorch\nlightning.pytorch.Trainer\n", "import instep\ninstep.Trainer\n"),
        ("from lightning import pytorch as pl\npl.Trainer()\n", "import instep\ninstep.Trainer()\n"),
        (
            "from lightning.pytorch import callbacks\ncallbacks.Timer()\n",
            "import instep.callbacks\ninstep.callbacks.Timer()\n",
        ),
        ("from lightning import Trainer as T\nT()\n", "from instep import Trainer as T\nT()\n"),
        ("import lightning, os  # both\n", "import instep\nimport os  # both\n"),
        ("if x: import lightning\n", "if x: import instep\n"),
        (
            "from lightning import LightningModule\nclass TrainModule(LightningModule): ...\n",
            "from instep import TrainModule as InstepTrainModule\nclass TrainModule(InstepTrainModule): ...\n",
        ),
        ("from lightning.fabric import seed_everything\n", "from instep import seed_everything\n"),
        ("import lightning as L\nL.Trainer(gpus=2)\n", 'import instep\ninstep.Trainer(accelerator="gpu", devices=2)\n'),
        (
            "import lightning as L\nL.Trainer(\n    tpu_cores=8,\n    max_epochs=1,\n)\n",
            'import instep\ninstep.Trainer(\n    accelerator="xla",\n    devices=8,\n    max_epochs=1,\n)\n',
        ),
        (
            "import lightning as L\nL.Trainer(strategy='ddp_spawn', precision='transformer-engine')\n",
            'import instep\ninstep.Trainer(strategy="ddp", precision="fp8")\n',
        ),
        (
            "from lightning import Trainer\nTrainer(num_processes=f(Trainer), suggest_integrations=True)\n",
            "from instep import Trainer\nTrainer(devices=f(Trainer))\n",
        ),
        (
            "from lightning import Trainer\ntrainer = Trainer()\ntrainer.fit(m, train_dataloader=x)\n",
            "from instep import Trainer\ntrainer = Trainer()\ntrainer.fit(m, train_dataloaders=x)\n",
        ),
        (
            "import accelerate\na = accelerate.Accelerator(even_batches=False, cpu=True)\n",
            "import instep\nimport instep.accelerator\na = instep.Accelerator("
            "dataloader_config=instep.accelerator.DataLoaderConfiguration(even_batches=False), cpu=True)\n",
        ),
        ("from accelerate.utils import gather, set_seed\n", None),
        (
            "from accelerate import Accelerator\na = Accelerator()\nfor b in x: a.gather((m(b), b['y']))\n",
            "from instep import Accelerator\na = Accelerator()\nfor b in x: a.gather_for_metrics((m(b), b['y']))\n",
        ),
        (
            _A + "for b in x: a.gather(count).sum(), a.gather(loss)\n",
            "from instep import Accelerator\na = Accelerator()\nfor b in x: a.gather(count).sum(), a.gather(loss)\n",
        ),
        (
            "from accelerate.utils import is_wandb_available, is_xpu_available\nif is_xpu_available(): pass\n",
            'from importlib.util import find_spec\nis_wandb_available = lambda: find_spec("wandb") is not None\n'
            "from torch.xpu import is_available as is_xpu_available\nif is_xpu_available(): pass\n",
        ),
        (
            _CLI + "class C(LightningCLI):\n  def add_arguments_to_parser(s, p): p.add_lightning_class_args(A, 'a')\n",
            "from instep.cli import TrainerCLI\n"
            "class C(TrainerCLI):\n  def add_arguments_to_parser(s, p): p.add_instep_class_args(A, 'a')\n",
        ),
        (
            "from lightning.pytorch.cli import LightningCLI\nLightningCLI(M, trainer_defaults={'strategy': 'ddp_spawn',"
            " 'callbacks': {'class_path': 'lightning.pytorch.callbacks.Timer'}})\n",
            "from instep.cli import TrainerCLI\nTrainerCLI(M, trainer_defaults={'strategy': \"ddp\","
            " 'callbacks': {'class_path': 'instep.callbacks.Timer'}})\n",
        ),
        (
            "from accelerate import DistributedType as D\nD.NO\n",
            "from instep.state import DistributedType as D\nD.NO\n",
        ),
        (
            "import lightning as L\nclass D(L.LightningDataModule): ...\nD.load_from_checkpoint('a')\n",
            "import instep\nclass D(instep.DataModule): ...\nD.load_from_checkpoint('a')\n",
        ),
        (
            "import accelerate\nx = accelerate.state.is_initialized() and 1\n",
            "import instep\nx = instep.AcceleratorState().initialized and 1\n",
        ),
        (
            "from accelerate import Accelerator\nfrom accelerate.utils import ProjectConfiguration\n"
            "c = ProjectConfiguration()\nAccelerator(project_dir=c)\n",
            "from instep import Accelerator\nfrom instep.accelerator import ProjectConfiguration\n"
            "c = ProjectConfiguration()\nAccelerator(project_config=c)\n",
        ),
        ("import accelerate\n'accelerate...'\n", "import instep\n'accelerate...'\n"),
        ("import torch\nTrainer = 1\ntrainer.fit_loop\n", "import torch\nTrainer = 1\ntrainer.fit_loop\n"),
        ("def f(lightning): return lightning.Trainer\n", "def f(lightning): return lightning.Trainer\n"),
    ],
)
def test_small_pieces_of_code_are_migrated_as_the_table_says(old: str, new: str | None) -> None:
    got, findings, _ = migrate(old)
    want = "from instep.accelerator import set_seed\nfrom instep.distributed import gather\n" if new is None else new
    assert got == want
    assert [finding for finding in findings if finding.kind == "todo"] == []
    assert migrate(got)[0] == got


@pytest.mark.parametrize(
    ("source", "line", "kind", "text"),
    [
        ("from lightning import *", 1, "todo", "name what is used"),
        (_L + "L.fabric.fabric.X()\nL.fabric.fabric.X()", 2, "todo", "(also in line 3): instep.Accelerator is for"),
        (_L + "from optuna.integration import PyTorchLightningPruningCallback", 2, "todo", "OptunaPruning(trial"),
        (_L + "L.callbacks.QuantizationAwareTraining(qconfig='x')", 2, "todo", "use config=...: torchao's"),
        (_L + "L.Trainer(plugins=[])", 2, "todo", "use precision=... and strategy=..."),
        (_L + "L.Trainer(max_epoch=1)", 2, "todo", "did you mean max_epochs"),
        (_L + "L.Trainer(precision='half')", 2, "todo", "Use one of: 32-true"),
        (_L + "L.Trainer(gpus=0)", 2, "todo", 'use accelerator="gpu", devices='),
        (_L + "L.Trainer(gpus=1, devices=2)", 2, "todo", "devices=...; already there: devices="),
        (_L + "L.Trainer(gpus=1, accelerator=a)", 2, "todo", "already there: accelerator="),
        (_L + "L.Trainer(**x)", 2, "note", "cannot be seen"),
        (_L + "L.Trainer(accumulate_grad_batches=4)", 2, "note", "each sample of a window counts the same"),
        (_L + "L.Trainer(accumulate_grad_batches=None, min_steps=n)", 2, "note", "also sets `min_epochs=1`"),
        (_L + "L.Trainer.from_argparse_args(x)", 2, "todo", "TrainerCLI"),
        (_L + "t = L.Trainer()\nt.fit_loop", 3, "todo", "say where a run stands"),
        (_L + "t = L.Trainer()\nt.teleport()", 3, "todo", "no such attribute"),
        (
            _L + "class C(L.Callback):\n  def on_fit_end(s, t, m): t.teleport()",
            3,
            "todo",
            "no such attr",
        ),
        (
            _L + "class C(L.Callback):\n  def on_fit_end(s, t, m): t.lightning_module",
            3,
            "warns",
            "`model`",
        ),
        (
            _L + "f(x.trainer.lightning_module)",
            2,
            "warns",
            "x.trainer.lightning_module: write `model`",
        ),
        (_L + "t = L.Trainer()\nt.seed = 2", 3, "todo", "cannot be set: "),
        (_L + "t = L.Trainer()\nt.strategy.teleport()", 3, "todo", "instep's Strategy has no such"),
        (_L + "def f(pl_module): pl_module.configure_sharded_model()", 2, "todo", "use `configure_model`"),
        (
            "from lightning.pytorch.callbacks import TQDMProgressBar\nclass B(TQDMProgressBar):\n"
            "  def __init__(self): super().__init__(leave=True, colour=1)",
            3,
            "todo",
            "ProgressBar(colour=1)",
        ),
        (
            _CLI + "LightningCLI(M, trainer_defaults={'gpus': 1})",
            2,
            "todo",
            'use accelerator="gpu", devices=',
        ),
        (
            _CLI + "LightningCLI(M, trainer_defaults=dict(resume_from_checkpoint=1))",
            2,
            "todo",
            "ckpt_path",
        ),
        ("import lightning as L\nk = dict(max_epoch=1)\nL.Trainer(**k)", 2, "todo", "did you mean max_epochs"),
        ("import lightning as L\nk = {'plugins': []}\nL.Trainer(**k)", 2, "todo", "use precision=... and strategy=..."),
        ("from accelerate.utils import gather\nfor b in x: gather(b['labels'])", 2, "todo", "gather_for_metrics"),
        (
            _CLI + "LightningCLI(trainer_defaults={'max_epoch': 1})",
            2,
            "todo",
            "max_epochs",
        ),
        (
            "from lightning.fabric.utilities.imports import _IS_NOTHING",
            1,
            "todo",
            "_IS_NOTHING: instep has nothing of that name",
        ),
        ("from lightning.pytorch.demos import WikiText2", 1, "todo", "package for demonstrations"),
        (_L + "L.Trainer().fit(ckpt_path='x.ckpt')", 2, "note", "checkpoint convert"),
        (
            _L + "import torch\nt = L.Trainer()\ntorch.load(t.checkpoint_callback.best_model_path)",
            4,
            "todo",
            "load_weights",
        ),
        (_L + "t = L.Trainer()\nt.optimizers = []", 3, "todo", "cannot be set: return them from the"),
        (
            _L + "def f(t: L.Trainer):\n  if t.is_global_zero:\n    t.save_checkpoint(best_of(1))",
            4,
            "todo",
            "call it on all",
        ),
        (
            _L + "class A(L.LightningModule): ...\nclass B(A):\n def training_epoch_end(s, o): ...",
            4,
            "todo",
            "use on_train_epoch_end",
        ),
        (
            _L + "class A(L.LightningModule):\n def training_step(s, b, i, optimizer_idx): ...",
            3,
            "todo",
            "manual optimization",
        ),
        (
            _L + "class A(L.LightningModule):\n  def f(self): self.log('a', 1, prog=True)",
            3,
            "todo",
            "it takes name, value, prog_bar",
        ),
        (
            _L + "class A(L.LightningModule):\n  def f(self): self.get_progress_bar_dict()",
            3,
            "todo",
            "ProgressBar.get_metrics",
        ),
        ("from lightning.pytorch.loggers import Logger\nclass A(Logger): ...", 2, "todo", "its hooks are other ones"),
        (
            "from lightning.pytorch.loggers import WandbLogger\nWandbLogger().use_artifact(1)",
            2,
            "todo",
            "W&B's own run",
        ),
        (
            "from lightning.pytorch.loggers import TensorBoardLogger\nTensorBoardLogger(1, 2, 3, 4, 5, 6, 7, 8)",
            2,
            "todo",
            "after number 7",
        ),
        ("from accelerate import Accelerator\nAccelerator(fsdp_plugin=x)", 2, "todo", "FSDPStrategy"),
        (
            "from accelerate import Accelerator\nAccelerator(dataloader_config=x, even_batches=True)",
            2,
            "todo",
            "belong into its dataloader_config",
        ),
        (_A + "a.trigger_sync_in_backward", 3, "todo", "use `accumulate`"),
        (
            _A + "if a.is_main_process:\n  if loss < best: a.save_state('x')",
            4,
            "todo",
            "a.save_state is called on one rank only",
        ),
        (_A + "a.prepare(scheduler)", 3, "note", "steps once per"),
        (
            _A + "a.state.deepspeed_plugin",
            3,
            "warns",
            "has no DeepSpeed",
        ),
        ("from accelerate.state import AcceleratorState\nAcceleratorState().fsdp_plugin", 2, "todo", "FSDPStrategy"),
        (
            _STEPS + "a.backward(loss)\na.backward(x)",
            3,
            "warns",
            "a.backward outside `accumulate`, with accumulation: write `with accelerator.accumulate(model):`",
        ),
        (_A + "for b in x: a.gather(b)", 3, "note", "`gather` refuses"),
        (
            _A + "a.load_state('x')\nfor i, b in enumerate(x):\n    if epoch == first_epoch and i < resume_step:\n"
            "        bar.update(1)\n        continue",
            5,
            "note",
            "skip_first_batches",
        ),
        (
            _A + "a.load_state('x')\nfor b in itertools.islice(x, resume_step, None): pass",
            4,
            "note",
            "skip_first_batches",
        ),
        ("import accelerate, os\nos.environ['ACCELERATE_USE_FSDP'] = '1'", 2, "todo", "instep env"),
        ("from lightning.fabric.plugins import XLAPrecision\nXLAPrecision()", 2, "todo", "use precision="),
        ("from lightning.fabric.wrappers import _FabricModule as F\nF(m, s)", 2, "todo", "launch --as fabric"),
    ],
)
def test_migrate_reports_what_is_left_to_do_by_line(source: str, line: int, kind: str, text: str) -> None:
    [finding] = [finding for finding in migrate(source)[1] if text in finding.text]
    assert (finding.line, finding.kind) == (line, kind)


def test_migrate_reports_nothing_for_code_that_needs_no_change() -> None:
    sources = [
        "from accelerate import Accelerator\na = Accelerator(gradient_accumulation_steps=1)\n"
        "with a.accumulate(m): a.backward(loss)",
        "from accelerate import Accelerator\na = Accelerator(gradient_accumulation_steps=1)\na.backward(loss)",
        _L + "t = L.Trainer()\nt.own = 1\nt.own, t.strategy.root_device",
        _L + "class C(L.Callback):\n  def on_fit_end(s, t, m): m.own, m.trainer.model, t.callbacks",
        _L + "class M(L.LightningModule):\n  def log(s, a, other): ...\n  def f(self): self.log(1, other=2)",
        _M + "  def log(s, a, other): ...\nclass N(M):\n  def f(self): self.log(1, other=2)",
        _M + "  def training_step(s, dataloader_iter): ...\n  def data_step(s, dataloader_iter, optimizer_idx): ...",
        _M + "  def forward(s, x, mask): ...\nclass N(M):\n  def f(self): self.forward(1, mask=2)",
        _L + "from base import M\nclass N(M, L.LightningModule):\n  def f(self): self.forward(1, mask=2)",
        _L + "class C(L.Callback):\n  def on_epoch_end(s): ...\n  def on_train_end(s, t, m): s.on_epoch_end()",
        "from accelerate import PartialState\nx = SFTTrainer()\nx_trainer.accelerator.state.fsdp_plugin.f()",
        _A + "total_batch_size = n * a.num_processes\nprint(total_batch_size * a.num_processes)",
        _L + "L.Trainer(accumulate_grad_batches=1, max_steps=3, val_check_interval=1.0)",
    ]
    for source in sources:
        assert migrate(source)[1] == [], source


def test_a_program_of_fabric_changes_its_imports_only() -> None:
    body = """
fabric = L.Fabric(loggers=CSVLogger(root_dir="logs"))
model = fabric.setup(model)
fabric.save("a.pth", {"model": model})
"""
    new, findings, _ = migrate("import lightning as L\nfrom lightning.fabric.loggers import CSVLogger" + body)
    assert "from instep.compat.fabric import CSVLogger" in new
    assert "instep.compat.fabric.Fabric(loggers=CSVLogger(root_dir=" in new
    assert not findings


def test_what_is_not_taken_over_keeps_its_import() -> None:
    old = "import lightning as L\nfrom lightning.pytorch import Trainer, tuner\nL.Flow(), L.Trainer, tuner.X()\n"
    new = migrate(old)[0]
    assert new.splitlines()[:4] == [
        "import lightning as L",
        "import instep",
        "from lightning.pytorch import tuner",
        "from instep import Trainer",
    ]
    assert new.splitlines()[4] == "L.Flow(), instep.Trainer, tuner.X()"


def test_migrate_breaks_import_lines_only_where_they_grow_too_long() -> None:
    names = [f"name_{number:02}" for number in range(10)]
    old = f"from accelerate.utils import {', '.join(names)}, set_seed\n"  # longer than 88
    new = migrate(old)[0]
    assert new == f"{old.removesuffix(', set_seed' + chr(10))}\nfrom instep.accelerator import set_seed\n"
    many = "find_executable_batch_size, release_memory, synchronize_rng_states"
    new = migrate(f"from accelerate import {many}, ProfileKwargs\n")[0]
    assert new.splitlines()[:2] == ["from instep.accelerator import (", "    ProfileKwargs,"]
    compile(new, "new", "exec")


# ---- the tables


def _homes() -> dict[str, str]:
    return {target.rpartition(".")[2]: target for moved in porting.moved().values() for target in moved.values()}


def test_every_name_has_a_place() -> None:
    for moved in porting.moved().values():
        for target in moved.values():
            if find_spec(target.partition(".")[0]):  # torchvision may be missing
                assert uses.load(target) is not None
    for imports, value in tables.DEFINED.values():
        exec(f"{imports}\nvalue = {value}\nif callable(value): value()", {})
    for owner, parts in tables.PARTS.items():
        for part, target in parts.items():
            assert uses.has_attribute(_homes()[owner], part), (owner, part)
            assert uses.load(target) is not None
    for target in tables.PARAMETERS.values():
        assert uses.load(target) is not None


def test_no_name_that_exists_is_called_missing() -> None:
    public = {name for room in PUBLIC for name in getattr(import_module(room), "__all__", ())}
    moved = {name for names in porting.moved().values() for name in names}
    assert not (public | moved) & porting.ADVICE.keys() - {"__version__"}
    classes = {target for moved in porting.moved().values() for target in moved.values()}
    owners = [target for target in classes if target.startswith("instep.") and isinstance(uses.load(target), type)]
    for name in tables.ANYWHERE:
        assert not any(uses.has_attribute(owner, name) for owner in owners), name
    for name in tables.ALIASES:
        assert any(uses.has_attribute(owner, name) for owner in owners), name


def test_the_tables_are_not_older_than_the_classes() -> None:
    homes = _homes()

    def function(key: str) -> Any:
        owner, _, method = key.partition(".")
        return getattr(uses.load(homes[owner]), method) if method else uses.load(homes[owner])

    for key, arguments in {key: names for key, names in porting.RENAMED.items() if key != "launch"}.items():
        for old, new in arguments.items():
            assert not uses.has_argument(function(key), old)
            assert uses.has_argument(function(key), new)
    for key, arguments in porting.DROPPED.items():
        for old in arguments:
            assert not uses.has_argument(function(key), old), (key, old)
    for owner, attributes in porting.ATTRIBUTES.items():
        assert not attributes.keys() & uses.attributes(uses.load(homes[owner]))
    for (_, argument), values in porting.VALUES.items():
        for value in values.values():
            check_value(argument, value)


_SAME = {  # of functions, by position
    "tensor": "data",
    "object": "obj",
    "object_list": "objects",
    "dataloader": "loader",
    "bnb_quantization_config": "quantization_config",
    "rng_types": "types",
    "reduction": "op",
}


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning.pytorch", "accelerate"])
def test_arguments_without_a_name_mean_the_same(package: str) -> None:
    pytest.importorskip(package.split(".")[0])
    root = package.split(".")[0]
    homes = ("", ".callbacks", ".loggers", ".strategies", ".utils", ".logging", ".local_sgd")
    for name, target in porting.moved()[root].items():
        leaf, new = target.rpartition(".")[2], uses.load(target)
        for home in homes:
            try:
                old = getattr(import_module(package + home), name)
                theirs, ours = (
                    [n for n, p in inspect.signature(f).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
                    for f in (old, new)
                )
            except (ImportError, AttributeError, ValueError, TypeError):
                continue
            limit = min(tables.POSITIONAL.get(leaf, len(theirs)), uses.count_positional(new))
            if not isinstance(new, type):
                theirs = [_SAME.get(argument, argument) for argument in theirs]
            same = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), limit)
            assert same >= limit, (name, theirs, ours)


# ---- the command


def test_folders_line_ends_and_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "src" / ".venv").mkdir(parents=True)
    script, hidden = tmp_path / "src" / "train.py", tmp_path / "src" / ".venv" / "train.py"
    for path in (script, hidden):
        path.write_bytes(b"import lightning\r\nlightning.Trainer(plugins=[])\r\n")
    script.chmod(0o755)
    link = tmp_path / "link.py"
    link.symlink_to(script)
    assert main(["migrate", str(link), str(tmp_path / "src"), "--write", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [(file["changed"], file["written"]) for file in report["files"]] == [(True, True)] * 2
    assert report["todo"] == 2
    assert report["files"][0]["findings"][0]["line"] == 2
    assert script.read_bytes() == b"import instep\r\ninstep.Trainer(plugins=[])\r\n"
    assert script.stat().st_mode & 0o777 == 0o755
    assert link.is_symlink()
    assert b"instep" not in hidden.read_bytes()
    assert sorted(path.name for path in (tmp_path / "src").iterdir()) == [".venv", "train.py"]


def test_a_file_that_cannot_be_read_changes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "a.py", tmp_path / "b.py"
    good.write_text("import lightning\n")
    bad.write_text("def f(:\n")
    assert main(["migrate", str(tmp_path), "--write"]) == 1
    assert "b.py cannot be read as Python" in capsys.readouterr().err
    assert good.read_text() == "import lightning\n"
    assert main(["migrate", str(tmp_path / "c.py")]) == 1
    assert "c.py is not there" in capsys.readouterr().err


def test_migrate_without_libcst_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    assert main(["migrate", str(tmp_path)]) == 1
    assert "pip install 'instep[migrate]'" in capsys.readouterr().err


def test_a_class_whose_package_is_missing_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "instep.callbacks.guests.tqdm_progress"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.delattr(import_module("instep.callbacks"), "TQDMProgressBar", raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    uses.load.cache_clear()
    uses.attributes.cache_clear()
    new, findings, _ = migrate(
        "from lightning import Trainer\nfrom lightning.pytorch.callbacks import TQDMProgressBar\n"
        "class Bar(TQDMProgressBar):\n  def __init__(self): super().__init__(2)\n"
        "bar = TQDMProgressBar(refresh_rate=1)\nbar.reset()\n"
        "Trainer(callbacks=bar, max_epoch=1)\n"
    )
    uses.load.cache_clear()
    assert "from instep.callbacks import TQDMProgressBar" in new
    assert [(each.line, each.kind) for each in findings] == [(4, "note"), (7, "todo")]
    assert "pip install tqdm. Its arguments were not checked (also in line 5)" in findings[0].text
